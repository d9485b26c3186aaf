package kvtier

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

// TestNobodysLoadTakesAnothersBlocksOrWear has a loud tenant store all it can, small
// and large, pin, overwrite, churn its drive and wear it, beside a quiet one.
func TestNobodysLoadTakesAnothersBlocksOrWear(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var now time.Duration
	clock := func() time.Duration {
		mu.Lock()
		defer mu.Unlock()
		return now
	}
	c := onDrive(t, t.TempDir(), func(o *CacheOptions) {
		o.Memory = 6 * units.MiB
		o.Wear = WearOptions{WritesPerDay: 12, Capacity: 120 * units.MiB, Now: clock}
	})
	defer closeCache(t, c)
	quiet := addTenant(t, c, TenantSpec{Name: "quiet", Memory: 2 * units.MiB, NVMe: 24 * units.MiB, AdmitAll: true})
	loud := addTenant(t, c, TenantSpec{Name: "loud", Memory: units.MiB, MemoryLimit: 6 * units.MiB, NVMe: 24 * units.MiB, AdmitAll: true})
	for key := range 60 { // 18 MiB on the drive, the last 6 of them in RAM as well
		mustPut(t, quiet, key, content(key, 1, 300_000))
		drain(t, quiet.tenant)
	}
	before := quiet.tenant.Stats()
	if before.NVMe.Blocks != 60 || before.RAM.Blocks == 0 {
		t.Fatalf("the quiet tenant has %d blocks on the drive and %d in RAM", before.NVMe.Blocks, before.RAM.Blocks)
	}
	mu.Lock()
	now += 24 * time.Hour // both have saved their shares of wear
	mu.Unlock()
	stop := start(t, c)
	var all sync.WaitGroup
	for worker := range 4 {
		all.Go(func() {
			for i := range 150 {
				key := 1000*worker + i
				size := []int{4000, 60_000, 300_000, 1_000_000}[i%4]
				if err := put(t.Context(), loud, keyOf(key), content(key, 0, size), PutOptions{}); err != nil {
					continue // no room: all of its own is held
				}
				if pin, ok := loud.Pin(keyOf(key)); ok {
					defer pin.Release()
					if i%3 > 0 {
						pin.Release()
					}
				}
				_, _ = loud.tenant.PinBlocks(t.Context(), keyOf(key))
				_ = put(t.Context(), loud, keyOf(key), content(key, 1, size), PutOptions{})
				if i%5 == 0 {
					_, _ = loud.Delete(t.Context(), keyOf(key))
				}
			}
		})
	}
	all.Wait()
	stop()
	for i := range 60 { // more than it may
		mustPut(t, loud, 5000+i, content(i, 0, 1_000_000))
		drain(t, loud.tenant)
	}
	if s := loud.tenant.Stats(); s.WrittenBytes == 0 || s.DroppedWear == 0 {
		t.Errorf("the loud tenant wrote %d bytes and wore %d writes out: that is no load", s.WrittenBytes, s.DroppedWear)
	}
	after := quiet.tenant.Stats()
	if after.RAM.Blocks != before.RAM.Blocks || after.NVMe.Blocks != before.NVMe.Blocks {
		t.Errorf("the quiet tenant had %d blocks in RAM and %d on the drive, now %d and %d",
			before.RAM.Blocks, before.NVMe.Blocks, after.RAM.Blocks, after.NVMe.Blocks)
	}
	for key := range 60 {
		if !bytes.Equal(get(t, quiet, key), content(key, 1, 300_000)) {
			t.Errorf("block %d of the quiet tenant is gone", key)
		}
	}
	// What the loud one wore out was its own.
	mustPut(t, quiet, 100, content(100, 1, 100_000))
	drain(t, quiet.tenant)
	if s := quiet.tenant.Stats(); s.DroppedWear != 0 || s.Written != before.Written+1 {
		t.Errorf("the quiet tenant may not write: %d refused, %d written", s.DroppedWear, s.Written-before.Written)
	}
}

// TestAnothersKeyAndOneThatIsNowhereTakeTheSamePath asks for both in every way: every
// count that changes is the same, and no file is touched.
func TestAnothersKeyAndOneThatIsNowhereTakeTheSamePath(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	t.Cleanup(func() { _ = w.cache.Close() })
	spec := TenantSpec{Kind: TenantCredential, Memory: units.MiB, NVMe: 24 * units.MiB, AdmitAll: true}
	var spaces []*Namespace
	for _, name := range []string{"owner", "asker"} {
		spec.Name = name
		tenant, err := w.cache.AddTenant(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		n, err := tenant.Namespace(t.Context(), block.Identity{Format: "same"})
		if err != nil {
			t.Fatal(err)
		}
		spaces = append(spaces, n)
	}
	owner, asker := spaces[0], spaces[1]
	if owner.ID() == asker.ID() {
		t.Fatal("two tenants share a namespace")
	}
	onDrive, inRAM, nowhere := 1, 2, 3
	mustPut(t, owner, onDrive, content(onDrive, 0, 50_000))
	drain(t, owner.tenant)
	owner.tenant.mu.Lock()
	owner.tenant.evictLocked()
	owner.tenant.mu.Unlock()
	mustPut(t, owner, inRAM, content(inRAM, 0, 50_000))
	ask := map[string]func(key block.Key) string{
		"lookup": func(key block.Key) string { size, ok := asker.Lookup(key); return fmt.Sprint(size, ok) },
		"prefix": func(key block.Key) string { return fmt.Sprint(asker.LookupPrefix([]block.Key{key})) },
		"pin":    func(key block.Key) string { pin, ok := asker.Pin(key); return fmt.Sprint(pin, ok) },
		"get": func(key block.Key) string {
			b, err := asker.Get(t.Context(), key)
			return fmt.Sprint(b, err, errors.Is(err, ErrMiss))
		},
		"delete": func(key block.Key) string {
			n, err := asker.Delete(t.Context(), key)
			return fmt.Sprint(n, err)
		},
		"pin for good": func(key block.Key) string {
			n, err := asker.tenant.PinBlocks(t.Context(), key)
			return fmt.Sprint(n, errors.Is(err, ErrMiss))
		},
		"drop": func(key block.Key) string {
			n, err := asker.tenant.DropBlocks(t.Context(), key)
			return fmt.Sprint(n, err)
		},
	}
	for name, do := range ask {
		var told []string
		for _, key := range []int{nowhere, onDrive, inRAM} {
			before, ofOwner := asker.tenant.Stats(), owner.tenant.Stats()
			reads, changes := w.fs.Reads(), w.fs.Changes()
			answer := do(keyOf(key))
			after := asker.tenant.Stats()
			if w.fs.Reads() != reads || w.fs.Changes() != changes {
				t.Errorf("%s touches files for a key that the tenant has not", name)
			}
			if owner.tenant.Stats() != ofOwner {
				t.Errorf("%s changes what another tenant has or counts", name)
			}
			told = append(told, fmt.Sprint(answer, after.LookupMisses-before.LookupMisses, after.LookupHits-before.LookupHits,
				after.Misses-before.Misses, after.Deletes-before.Deletes, after.IndexBytes-before.IndexBytes, after.Pins-before.Pins))
		}
		if told[0] != told[1] || told[0] != told[2] {
			t.Errorf("%s tells a key that is nowhere from another's: %q", name, told)
		}
	}
	for _, key := range []int{onDrive, inRAM} {
		if !bytes.Equal(get(t, owner, key), content(key, 0, 50_000)) {
			t.Errorf("block %d is gone", key)
		}
	}
}

func TestWhatABorrowerFillsDoesNotKeepAnotherFromItsOwn(t *testing.T) {
	t.Parallel()
	c := newCache(t, 4*units.MiB)
	owner := addTenant(t, c, TenantSpec{Name: "owner", Memory: 3 * units.MiB})
	borrower := addTenant(t, c, TenantSpec{Name: "borrower", Memory: units.MiB, MemoryLimit: 4 * units.MiB})
	var slow []*Put
	for i := range 40 {
		if p, err := borrower.Put(keyOf(i), 100_000, PutOptions{}); err == nil {
			slow = append(slow, p)
		} else if !errors.Is(err, ErrDropped) {
			t.Fatal(err)
		}
	}
	for i := range 28 {
		if err := put(t.Context(), owner, keyOf(i), content(i, 0, 100_000), PutOptions{}); err != nil {
			t.Fatalf("block %d of what is the owner's: %v", i, err)
		}
	}
	for _, p := range slow {
		p.Abort()
	}
	if len(slow) == 0 || borrower.tenant.loose != 0 || borrower.tenant.Stats().RAM.Used != 0 {
		t.Errorf("%d are filled, %d bytes are counted as being filled", len(slow), borrower.tenant.loose)
	}
}

func TestATenantOfDrivesAloneIsSentLargeBlocksTwoAtATime(t *testing.T) {
	t.Parallel()
	transit := Transit
	c := newCache(t, units.MiB, func(o *CacheOptions) { o.Transit = &transit })
	n := addTenant(t, c, TenantSpec{Name: "a", NVMe: units.GiB})
	for key := range 2 {
		p, err := n.Put(keyOf(key), 32<<20, PutOptions{})
		if err != nil {
			t.Fatalf("block %d of two that come at once: %v", key, err)
		}
		defer p.Abort()
	}
}
