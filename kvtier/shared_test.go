package kvtier

import (
	"bytes"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

func TestAPeekTellsSizesAndIsNoUse(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, units.MiB), TenantSpec{Name: "a", Memory: units.MiB})
	mustPut(t, n, 1, content(1, 0, 5000))
	before := n.Tenant().Stats()
	sizes := []int{7, 7, -7}
	n.Peek([]block.Key{keyOf(2), keyOf(1), keyOf(3)}, sizes)
	if sizes[0] != 0 || sizes[1] != 5000 || sizes[2] != 0 {
		t.Errorf("peeked %v", sizes)
	}
	after := n.Tenant().Stats()
	if after.LookupHits != before.LookupHits || after.LookupMisses != before.LookupMisses {
		t.Error("a peek counts as a lookup")
	}
	n.tenant.mu.Lock()
	touches := n.tenant.index.Touches(n.tenant.index.Find(n.print(keyOf(1))))
	n.tenant.mu.Unlock()
	if touches != 1 {
		t.Errorf("the block has %d uses, its being stored is the only one", touches)
	}
}

func TestANamespaceIsFoundByItsIdentifierAmongTheTenantsOwn(t *testing.T) {
	t.Parallel()
	c := newCache(t, units.MiB)
	n, other := addTenant(t, c, TenantSpec{Name: "a", Memory: 64 * units.KiB}), addTenant(t, c, TenantSpec{Name: "b", Memory: 64 * units.KiB})
	mustPut(t, n, 1, content(1, 0, 100))
	found, ok := n.Tenant().NamespaceOf(n.ID())
	if !ok || !bytes.Equal(get(t, found, 1), content(1, 0, 100)) {
		t.Error("the namespace found by its identifier has other blocks")
	}
	if _, ok := n.Tenant().NamespaceOf(other.ID()); ok {
		t.Error("another tenant's namespace is found")
	}
	if n.ID() == other.ID() {
		t.Error("two tenants share an identifier")
	}
}

func TestABlockFromElsewhereNeverReplacesOne(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, units.MiB), TenantSpec{Name: "a", Memory: units.MiB})
	late, err := n.Put(keyOf(1), 100, PutOptions{IfAbsent: true})
	if err != nil {
		t.Fatal(err)
	}
	copy(late.Bytes(), content(1, 9, 100))
	late.Fill(100)
	if want := xxh3.Hash128(content(1, 9, 100)).Bytes(); late.Sum() != want {
		t.Error("the sum is another than that of the bytes")
	}
	mustPut(t, n, 1, content(1, 0, 200))
	if err := late.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := get(t, n, 1); !bytes.Equal(got, content(1, 0, 200)) {
		t.Error("the block that was stored meanwhile is gone")
	}
	b, err := n.Get(t.Context(), keyOf(1))
	if err != nil {
		t.Fatal(err)
	}
	defer b.Release()
	if want := xxh3.Hash128(content(1, 0, 200)).Bytes(); b.Sum() != want {
		t.Error("a block tells another sum than that of its bytes")
	}
}
