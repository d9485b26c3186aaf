package kvtier

import (
	"fmt"
	"testing"

	"github.com/hearth-dev/hearth/units"
)

// hog takes and holds of a tenant's whatever it is given: Puts that are not filled,
// blocks that are read, and pins. It gives them back with free.
func hog(t *testing.T, n *Namespace, from int) (taken int, free func()) {
	t.Helper()
	var frees []func()
	for key := from; key < from+200; key++ {
		if p, err := n.Put(keyOf(key), 60<<10, PutOptions{}); err == nil {
			frees = append(frees, p.Abort)
			taken++
		}
		if put(t.Context(), n, keyOf(1000+key), content(key, 0, 60<<10), PutOptions{}) != nil {
			continue
		}
		if b, err := n.Get(t.Context(), keyOf(1000+key)); err == nil {
			frees = append(frees, b.Release)
			taken++
		}
		if p, ok := n.Pin(keyOf(1000 + key - 1)); ok {
			frees = append(frees, p.Release)
		}
	}
	return taken, func() {
		for _, f := range frees {
			f()
		}
	}
}

func TestNoMixOfTenantsKeepsAnOwnerFromItsOwn(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir(), func(o *CacheOptions) {
		transit := 2 * units.MiB
		o.Memory, o.Transit = 4*units.MiB, &transit
	})
	defer closeCache(t, c)
	owner := addTenant(t, c, TenantSpec{Name: "owner", Memory: 3 * units.MiB})
	var others []*Namespace
	others = append(others, addTenant(t, c, TenantSpec{Name: "little", Memory: units.MiB, MemoryLimit: 6 * units.MiB}))
	for i := range 3 {
		others = append(others, addTenant(t, c, TenantSpec{Name: fmt.Sprintf("none%d", i), NVMe: 40 * units.MiB, AdmitAll: true}),
			addTenant(t, c, TenantSpec{Name: fmt.Sprintf("borrows%d", i), MemoryLimit: 6 * units.MiB}))
	}
	var frees []func()
	for i, n := range others {
		taken, free := hog(t, n, 10_000*i)
		frees = append(frees, free)
		if taken == 0 {
			t.Errorf("%s gets nothing beside the others", n.Tenant().Name())
		}
	}
	if lent := c.lending.bytes.Load(); lent <= 0 || lent > int64(2*units.MiB) {
		t.Errorf("%d bytes are lent", lent)
	}
	// All of its own, while everybody holds what they have.
	var puts []*Put
	for key := range 3 << 20 / (64 << 10) {
		p, err := owner.Put(keyOf(key), 60<<10, PutOptions{})
		if err != nil {
			t.Fatalf("block %d of an owner's own: %v", key, err)
		}
		puts = append(puts, p)
	}
	for _, p := range puts {
		p.Abort()
	}
	for _, free := range frees {
		free()
	}
	for _, n := range others {
		drain(t, n.Tenant())
	}
	if lent := c.lending.bytes.Load(); lent != 0 {
		t.Errorf("%d bytes are lent when nobody holds anything", lent)
	}
	for _, n := range append(others, owner) {
		if n.tenant.loose != 0 || n.tenant.index.Held() != 0 || n.tenant.lent != 0 {
			t.Errorf("%s: %d bytes loose, %d held, %d lent", n.Tenant().Name(), n.tenant.loose, n.tenant.index.Held(), n.tenant.lent)
		}
	}
}

func TestWhoHasLittleLentGetsItsPartBesideOneWhoTakesAll(t *testing.T) {
	t.Parallel()
	c := newCache(t, 8*units.MiB)
	transit := 2 * units.MiB
	c.opts.Transit = &transit
	addTenant(t, c, TenantSpec{Name: "owner", Memory: 4 * units.MiB})
	greedy := addTenant(t, c, TenantSpec{Name: "greedy", MemoryLimit: 8 * units.MiB})
	modest := addTenant(t, c, TenantSpec{Name: "modest", MemoryLimit: 8 * units.MiB})
	_, free := hog(t, greedy, 0)
	if lent := greedy.tenant.lent; lent > int64(units.MiB) {
		t.Errorf("one who takes all has %d bytes of 2 MiB", lent)
	}
	var puts []*Put
	for key := range 512 << 10 / (64 << 10) { // its part of the half
		p, err := modest.Put(keyOf(key), 60<<10, PutOptions{})
		if err != nil {
			t.Errorf("block %d of its part: %v", key, err)
			break
		}
		puts = append(puts, p)
	}
	for _, p := range puts {
		p.Abort()
	}
	free()
}

func TestPinsOfOneWhoBorrowsKeepNoOwnerFromItsOwn(t *testing.T) {
	t.Parallel()
	c := newCache(t, 4*units.MiB)
	owner := addTenant(t, c, TenantSpec{Name: "owner", Memory: 3 * units.MiB})
	borrower := addTenant(t, c, TenantSpec{Name: "borrower", Memory: units.MiB, MemoryLimit: 4 * units.MiB})
	for key := range 30 {
		mustPut(t, borrower, key, content(key, 0, 60<<10))
		if _, err := borrower.Tenant().PinBlocks(t.Context(), keyOf(key)); err != nil {
			t.Fatal(err)
		}
	}
	for key := range 3 << 20 / (64 << 10) {
		if err := put(t.Context(), owner, keyOf(key), content(key, 0, 60<<10), PutOptions{}); err != nil {
			t.Fatalf("block %d of an owner's own: %v", key, err)
		}
	}
	kept := 0
	for key := range 30 {
		if get(t, borrower, key) != nil {
			kept++
		}
	}
	if kept < 1<<20/(64<<10) {
		t.Errorf("%d pinned blocks are left of what is its own", kept)
	}
}
