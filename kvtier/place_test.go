package kvtier

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/kvtier/segment"
	"github.com/hearth-dev/hearth/units"
)

// recordOf is what the log says of a key that is on a drive.
func recordOf(t *testing.T, n *Namespace, key int) segment.Record {
	t.Helper()
	n.tenant.mu.Lock()
	loc := n.tenant.locLocked(n.tenant.index.Find(n.print(keyOf(key))))
	n.tenant.mu.Unlock()
	r, err := n.tenant.drive.Stat(t.Context(), loc, n.id, keyOf(key))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestWhatIsSaidOfAnotherPlaceOfABlockChangesNothing(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir())
	defer closeCache(t, c)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
	for key := range 2 {
		mustPut(t, n, key, content(key, 0, 50_000))
	}
	drain(t, n.tenant)
	r, other := recordOf(t, n, 0), recordOf(t, n, 1)
	elsewhere := r
	elsewhere.Loc = other.Loc
	n.tenant.dropped(elsewhere)
	n.tenant.moved(elsewhere, other)
	if got := recordOf(t, n, 0); got != r {
		t.Errorf("the block lies at %v now, and not at %v", got.Loc, r.Loc)
	}
	if keep := n.tenant.keep(t.Context(), []segment.Record{elsewhere, r}); keep[0] {
		t.Error("a record is kept that is not the block's")
	}
	n.tenant.dropped(r)
	if s := n.tenant.Stats(); s.NVMe.Blocks != 1 {
		t.Errorf("%d blocks are on the drive, want the other one", s.NVMe.Blocks)
	}
}

func TestAnotherKeyOfTheSameFingerprintIsAMiss(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir())
	defer closeCache(t, c)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
	tenant := n.tenant
	p, err := n.Put(keyOf(2), 100, PutOptions{})
	if err != nil {
		t.Fatal(err)
	}
	copy(p.Bytes(), content(2, 0, 100))
	p.Fill(100)
	tenant.mu.Lock()
	p.enterLocked(0, n.print(keyOf(1)), sumOf(content(2, 0, 100)), false) // as if both had one
	tenant.mu.Unlock()
	if got := get(t, n, 1); got != nil {
		t.Error("a key gives another's block from RAM")
	}
	drain(t, tenant)
	tenant.mu.Lock()
	tenant.evictLocked()
	tenant.mu.Unlock()
	if got := get(t, n, 1); got != nil {
		t.Error("a key gives another's block from the drive")
	}
}

func TestABlockThatLeftWhileItWasWrittenIsNotSaidToBeOnTheDrive(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir())
	defer closeCache(t, c)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
	mustPut(t, n, 1, content(1, 0, 50_000))
	batch, writes, drive := n.tenant.take()
	n.tenant.mu.Lock()
	id := n.tenant.index.Find(n.print(keyOf(1)))
	n.tenant.leaveLocked(id) // as where its bytes in RAM are damaged
	n.tenant.index.Drop(id)
	n.tenant.mu.Unlock()
	locs, err := drive.Append(t.Context(), writes)
	if err != nil {
		t.Fatal(err)
	}
	mustPut(t, n, 1, content(1, 1, 50_000)) // other bytes came, in the same entry
	n.tenant.written(batch, writes, locs, nil)
	if got := get(t, n, 1); !bytes.Equal(got, content(1, 1, 50_000)) {
		t.Error("the new bytes are not found")
	}
	n.tenant.mu.Lock()
	loc := n.tenant.locLocked(n.tenant.index.Find(n.print(keyOf(1))))
	n.tenant.mu.Unlock()
	if loc == locs[0] {
		t.Error("the new block is said to lie where the old one was written")
	}
}

func TestABlockThatIsDamagedInRAMWhileItIsWrittenIsReadFromTheDrive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := onDrive(t, t.TempDir())
		defer closeCache(t, c)
		n := addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
		mustPut(t, n, 1, content(1, 0, 50_000))
		batch, writes, drive := n.tenant.take()
		locs, err := drive.Append(t.Context(), writes)
		if err != nil {
			t.Fatal(err)
		}
		writes[0].Data[100] ^= 1
		got := make(chan []byte, 1)
		go func() { got <- get(t, n, 1) }()
		synctest.Wait() // it has found the damage
		n.tenant.written(batch, writes, locs, nil)
		if !bytes.Equal(<-got, content(1, 0, 50_000)) {
			t.Error("the copy on the drive is known to nobody")
		}
	})
}

func TestNobodyIsTakenMoreThanWhatIsBeyondItsOwn(t *testing.T) {
	t.Parallel()
	c := newCache(t, 4*units.MiB)
	lender := addTenant(t, c, TenantSpec{Name: "lender", Memory: 2 * units.MiB, MemoryLimit: 4 * units.MiB})
	asking := addTenant(t, c, TenantSpec{Name: "asking", Memory: units.MiB, MemoryLimit: 4 * units.MiB})
	for key := range 34 { // two blocks beyond its own
		mustPut(t, lender, key, content(key, 0, 64<<10))
	}
	// More than what is beyond is asked for at once.
	c.reclaim(asking.tenant, 1<<20)
	if s := lender.tenant.Stats(); s.RAM.Used != 2*units.MiB {
		t.Errorf("%s are left of 2 MiB of its own", s.RAM.Used)
	}
}

func TestBlocksOfASegmentThatIsGoneAreNotBelievedToBeThere(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := onDrive(t, dir)
	spec := TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true}
	n := addTenant(t, c, spec)
	for key := range 20 {
		mustPut(t, n, key, content(key, 0, 400_000))
		drain(t, n.tenant)
	}
	n.tenant.flush(t.Context())
	closeCache(t, c)
	list, err := filepath.Glob(filepath.Join(dir, blocksDir, "*", "*.seg"))
	if err != nil || len(list) < 2 {
		t.Fatalf("%d segments: %v", len(list), err)
	}
	if err := os.Remove(list[0]); err != nil {
		t.Fatal(err)
	}
	c = onDrive(t, dir)
	defer closeCache(t, c)
	n = addTenant(t, c, spec)
	told, found := n.tenant.Stats().NVMe.Blocks, int64(0)
	for key := range 20 {
		if got := get(t, n, key); got != nil {
			found++
		}
	}
	// Nor are the others of its drive: it may have had tombstones about them.
	if told != 0 || found != 0 {
		t.Errorf("%d blocks are told, %d are found", told, found)
	}
	mustPut(t, n, 1, content(1, 1, 400_000))
	drain(t, n.tenant)
	if s := n.tenant.Stats(); s.NVMe.Blocks != 1 {
		t.Errorf("%d blocks are written afterwards", s.NVMe.Blocks)
	}
}

func TestASegmentCanGoAfterItsPinsAreReleased(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir(), func(o *CacheOptions) { o.Memory = units.MiB })
	defer closeCache(t, c)
	spec := TenantSpec{Name: "a", Memory: units.MiB, NVMe: 40 * units.MiB, AdmitAll: true}
	n := addTenant(t, c, spec)
	for key := range 40 {
		mustPut(t, n, key, content(key, 0, 300_000))
		drain(t, n.tenant)
	}
	pin, ok := n.Pin(keyOf(1))
	if !ok {
		t.Fatal("no pin")
	}
	spec.NVMe = 4 * units.MiB
	addTenant(t, c, spec)
	if s := n.tenant.Stats(); s.NVMe.Used <= s.NVMe.Budget || get(t, n, 1) == nil {
		t.Errorf("%s are used of %s, the pinned block is there: %t", s.NVMe.Used, s.NVMe.Budget, get(t, n, 1) != nil)
	}
	pin.Release()
	mustPut(t, n, 100, content(100, 0, 300_000))
	drain(t, n.tenant)
	if s := n.tenant.Stats(); s.NVMe.Used > s.NVMe.Budget {
		t.Errorf("%s are used of %s, and nobody pins anything", s.NVMe.Used, s.NVMe.Budget)
	}
}

func TestAFlushSealsWhatItWrote(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir())
	defer closeCache(t, c)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB})
	mustPut(t, n, 1, content(1, 0, 300_000))
	n.tenant.flush(t.Context())
	list := n.tenant.drive.Segments()
	if len(list) != 1 || !list[0].Sealed || n.tenant.Stats().NVMe.Blocks != 1 {
		t.Errorf("after a flush there are the segments %+v", list)
	}
}

func TestATombstoneThatMovedOnEndsNothingThatWasStoredAfterIt(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := onDrive(t, dir)
	spec := TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true}
	n := addTenant(t, c, spec)
	next := 100
	fill := func(until func() bool) {
		for ; !until(); next++ {
			mustPut(t, n, next, content(next, 0, 100_000))
			drain(t, n.tenant)
		}
	}
	more := func(than int) { fill(func() bool { return len(n.tenant.drive.Segments()) > than }) }
	mustPut(t, n, 2, content(2, 0, 50_000))
	drain(t, n.tenant)
	pin, ok := n.Pin(keyOf(2)) // the oldest segment stays, and so what ends blocks in it
	if !ok {
		t.Fatal("no pin")
	}
	held, ok := n.tenant.drive.Pin(recordOf(t, n, 2).Loc)
	if !ok {
		t.Fatal("its segment cannot be pinned")
	}
	mustPut(t, n, 1, content(1, 0, 50_000))
	drain(t, n.tenant)
	more(1)
	if _, err := n.Delete(t.Context(), keyOf(1)); err != nil {
		t.Fatal(err)
	}
	more(2)
	mustPut(t, n, 1, content(1, 1, 50_000))
	more(4)
	n.tenant.checkpoint(t.Context())
	fill(func() bool { return n.tenant.drive.Stats().Reclaimed > 0 })
	pin.Release()
	held()
	closeCache(t, c)
	c = onDrive(t, dir)
	defer closeCache(t, c)
	if got := get(t, addTenant(t, c, spec), 1); !bytes.Equal(got, content(1, 1, 50_000)) {
		t.Error("the block that was stored after its end is lost")
	}
}

func TestWhatEndedAfterACheckpointThatCountedUnwrittenRecordsStaysEnded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var wear WearOptions
	open := func() (*Cache, *Namespace) {
		c := onDrive(t, dir, func(o *CacheOptions) { o.Wear = wear })
		return c, addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
	}
	c, n := open()
	mustPut(t, n, 1, content(1, 0, 50_000))
	n.tenant.flush(t.Context())
	closeCache(t, c)
	wear = WearOptions{WritesPerDay: 1, Capacity: 1} // refuses all, and sequence numbers are taken for it
	c, n = open()
	for key := 10; key < 40; key++ {
		mustPut(t, n, key, content(key, 0, 1000))
		drain(t, n.tenant)
	}
	if _, err := n.Delete(t.Context(), keyOf(2), keyOf(3)); err != nil {
		t.Fatal(err)
	}
	n.tenant.checkpointed.Store(-1) // as where anything was written
	n.tenant.checkpoint(t.Context())
	closeCache(t, c)
	c, n = open()
	if get(t, n, 1) == nil {
		t.Fatal("the block is lost")
	}
	if removed, err := n.Delete(t.Context(), keyOf(1)); removed != 1 || err != nil {
		t.Fatalf("%d blocks ended: %v", removed, err)
	}
	closeCache(t, c)
	c, n = open()
	defer closeCache(t, c)
	if get(t, n, 1) != nil {
		t.Error("a block comes back that was ended")
	}
}

func TestWhatAKilledProcessLeftHalfWrittenIsRemovedAtTheStart(t *testing.T) {
	t.Parallel()
	dir, second := t.TempDir(), t.TempDir()
	open := func() *Cache { return onDrive(t, dir, func(o *CacheOptions) { o.Drives = []string{second} }) }
	spec := TenantSpec{Name: "a", Memory: units.MiB, NVMe: 40 * units.MiB}
	c := open()
	n := addTenant(t, c, spec)
	var left []string
	for _, in := range []string{dir, second, n.tenant.dir()} {
		path := durable.TempName(filepath.Join(in, "checkpoint"))
		if err := os.WriteFile(path, []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
		left = append(left, path)
	}
	closeCache(t, c)
	c = open()
	defer closeCache(t, c)
	addTenant(t, c, spec)
	for _, path := range left {
		if _, err := os.Lstat(path); !notExist(err) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
}
