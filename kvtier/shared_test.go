package kvtier

import (
	"bytes"
	"errors"
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

// touchesOf is how often a block was used, its being stored included.
func touchesOf(n *Namespace, key int) int {
	n.tenant.mu.Lock()
	defer n.tenant.mu.Unlock()
	return n.tenant.index.Touches(n.tenant.index.Find(n.print(keyOf(key))))
}

func TestALentBlockIsNoHitAndNoUse(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir())
	defer closeCache(t, c)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 2 * units.MiB, NVMe: 40 * units.MiB})
	mustPut(t, n, 1, content(1, 0, 10_000))
	mustPut(t, n, 2, content(2, 0, 10_000))
	get(t, n, 2) // goes to the drive, and leaves RAM
	drain(t, n.tenant)
	for i := 10; i < 20; i++ {
		mustPut(t, n, i, content(i, 0, 400<<10))
		get(t, n, i)
	}
	mustPut(t, n, 1, content(1, 0, 10_000))
	drain(t, n.tenant)
	before, uses := n.tenant.Stats(), []int{touchesOf(n, 1), touchesOf(n, 2)}
	for key, tier := range map[int]Tier{1: TierRAM, 2: TierNVMe} {
		for range 3 {
			b, err := n.Lend(t.Context(), keyOf(key))
			if err != nil {
				t.Fatal(err)
			}
			if b.Tier() != tier || !bytes.Equal(b.Bytes(), content(key, 0, 10_000)) {
				t.Errorf("block %d is on %v", key, b.Tier())
			}
			b.Release()
		}
	}
	if _, err := n.Lend(t.Context(), keyOf(3)); !errors.Is(err, ErrMiss) {
		t.Errorf("a block that is nowhere: %v", err)
	}
	drain(t, n.tenant)
	after := n.tenant.Stats()
	if after.RAM.Hits != before.RAM.Hits || after.NVMe.Hits != before.NVMe.Hits || after.Misses != before.Misses || after.Written != before.Written {
		t.Errorf("counted are\n%+v, before\n%+v", after, before)
	}
	if now := []int{touchesOf(n, 1), touchesOf(n, 2)}; now[0] != uses[0] || now[1] != uses[1] {
		t.Errorf("the blocks have %v uses, before %v", now, uses)
	}
	sizes := make([]int, 1)
	n.Peek([]block.Key{keyOf(2)}, sizes)
	n.tenant.mu.Lock()
	_, here := n.tenant.index.Resident(n.tenant.index.Find(n.print(keyOf(2))))
	n.tenant.mu.Unlock()
	if here {
		t.Error("a block that was lent from the drive stays in RAM")
	}
}

func TestABlockKeepsItsPlaceForAParentThatComesLater(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, units.MiB), TenantSpec{Name: "a", Memory: units.MiB})
	follow := func(key, parent int) {
		p, err := n.Put(keyOf(key), 64<<10, PutOptions{IfAbsent: true})
		if err != nil {
			t.Fatal(err)
		}
		p.Follows(keyOf(parent))
		copy(p.Bytes(), content(key, 0, 64<<10))
		p.Fill(64 << 10)
		if err := p.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	follow(2, 1)
	follow(1, 1) // nothing follows itself
	mustPut(t, n, 3, content(3, 0, 64<<10))
	follow(3, 4) // what is here keeps what is known of it
	if blocks := n.tenant.Stats().Total; blocks != 3 {
		t.Fatalf("there are %d blocks", blocks)
	}
	parents, known := make([]block.Key, 3), make([]bool, 3)
	n.Parents([]block.Key{keyOf(1), keyOf(2), keyOf(3)}, parents, known)
	if known[0] || !known[1] || parents[1] != keyOf(1) || known[2] {
		t.Errorf("parents are %v, %v", parents, known)
	}
	// The parent of two chunks leaves after its child, whichever came first.
	sizes := []int{1, 1}
	for i := 100; sizes[1] != 0; i++ {
		if i == 200 {
			t.Fatal("a block that nobody uses never leaves")
		}
		mustPut(t, n, i, content(i, 0, 64<<10))
		if n.Peek([]block.Key{keyOf(1), keyOf(2)}, sizes); sizes[0] == 0 && sizes[1] != 0 {
			t.Fatal("a block stays whose parent left")
		}
	}
	if _, err := n.Delete(t.Context(), keyOf(1), keyOf(2), keyOf(3)); err != nil {
		t.Fatal(err)
	}
	n.tenant.mu.Lock()
	defer n.tenant.mu.Unlock()
	for key := 1; key <= 4; key++ {
		if n.tenant.index.Find(n.print(keyOf(key))) != 0 {
			t.Errorf("an entry of block %d is left", key)
		}
	}
}
