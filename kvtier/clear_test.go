package kvtier

import (
	"bytes"
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

func TestAClearedTenantHasNothingAndGoesOn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := onDrive(t, dir)
	spec := TenantSpec{Name: "a", Memory: 2 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true}
	n, other := addTenant(t, c, spec), addTenant(t, c, TenantSpec{Name: "b", Memory: units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
	for key := range 20 {
		mustPut(t, n, key, content(key, 0, 100_000))
	}
	drain(t, n.Tenant())
	mustPut(t, other, 1, content(1, 7, 1000))
	drain(t, other.Tenant())
	if _, err := n.Tenant().PinBlocks(t.Context(), keyOf(1)); err != nil {
		t.Fatal(err)
	}
	pin, ok := n.Pin(keyOf(2))
	block, err := n.Get(t.Context(), keyOf(3))
	if !ok || err != nil {
		t.Fatal(ok, err)
	}
	if got, err := n.Tenant().Clear(t.Context()); err != nil || got != 20 {
		t.Fatalf("cleared %d blocks: %v", got, err)
	}
	if !bytes.Equal(block.Bytes(), content(3, 0, 100_000)) {
		t.Error("what is being read changed")
	}
	block.Release()
	pin.Release()
	for key := range 20 {
		if get(t, n, key) != nil {
			t.Errorf("block %d is still there", key)
		}
	}
	if s := n.Tenant().Stats(); s.Total != 0 || s.RAM.Used != 0 || n.Tenant().Pinned().Names != 0 {
		t.Errorf("there are %d blocks, %d bytes of RAM and pins %+v", s.Total, s.RAM.Used, n.Tenant().Pinned())
	}
	if !bytes.Equal(get(t, other, 1), content(1, 7, 1000)) {
		t.Error("another tenant's block went")
	}
	mustPut(t, n, 5, content(5, 1, 3000))
	drain(t, n.Tenant())
	closeCache(t, c)

	c = onDrive(t, dir)
	defer closeCache(t, c)
	n = addTenant(t, c, spec)
	if s := n.Tenant().Stats(); s.Total != 1 || s.Recovered != 1 {
		t.Errorf("after a restart there are %d blocks, want the one of after", s.Total)
	}
	if !bytes.Equal(get(t, n, 5), content(5, 1, 3000)) {
		t.Error("what was stored after is lost")
	}
}

func TestClearWhileBlocksAreStoredAndReadGivesNoOtherBytes(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir())
	defer closeCache(t, c)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 2 * units.MiB, NVMe: 24 * units.MiB, AdmitAll: true})
	stop := start(t, c)
	defer stop()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 4)
	for worker := range cap(done) {
		go func() {
			var err error
			for key := worker; err == nil && ctx.Err() == nil; key = (key + 4) % 120 {
				if err := put(ctx, n, keyOf(key), content(key, 0, 60_000), PutOptions{}); err != nil {
					continue // dropped
				}
				b, got := n.Get(ctx, keyOf(key))
				if got != nil {
					continue
				}
				if !bytes.Equal(b.Bytes(), content(key, 0, 60_000)) {
					err = errors.New("a block has other bytes")
				}
				b.Release()
			}
			done <- err
		}()
	}
	for range 12 {
		if _, err := n.Tenant().Clear(t.Context()); err != nil {
			t.Error(err)
		}
	}
	cancel()
	for range cap(done) {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestDropBlocksEndsThemInAllNamespacesWithTheirPins(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, units.MiB), TenantSpec{Name: "a", Memory: units.MiB})
	second, err := n.Tenant().Namespace(t.Context(), block.Identity{Format: "other"})
	if err != nil {
		t.Fatal(err)
	}
	mustPut(t, n, 1, content(1, 0, 10))
	mustPut(t, second, 1, content(1, 1, 10))
	mustPut(t, n, 2, content(2, 0, 10))
	if got, err := n.Tenant().PinBlocks(t.Context(), keyOf(1), keyOf(2)); err != nil || got != 3 {
		t.Fatalf("pinned %d: %v", got, err)
	}
	if got, err := n.Tenant().DropBlocks(t.Context(), keyOf(1), keyOf(9)); err != nil || got != 2 {
		t.Errorf("dropped %d: %v", got, err)
	}
	if get(t, n, 1) != nil || get(t, second, 1) != nil || get(t, n, 2) == nil {
		t.Error("other blocks went than those of the key")
	}
	if got := n.Tenant().Pinned(); got.Names != 1 {
		t.Errorf("pinned is %+v", got)
	}
}

func TestADetachedTenantIsLeftOnTheDrivesAndComesBack(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir())
	defer closeCache(t, c)
	spec := TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB}
	n := addTenant(t, c, spec)
	mustPut(t, n, 1, content(1, 0, 10_000))
	mustPut(t, n, 2, content(2, 0, 10_000)) // used once, and in RAM alone
	get(t, n, 1)
	stop := start(t, c)
	defer stop()
	if err := c.DetachTenant(t.Context(), TenantCredential, "a"); err != nil {
		t.Fatal(err)
	}
	// Who has it still finds nothing, and stores nothing.
	if _, ok := n.Pin(keyOf(1)); ok || get(t, n, 1) != nil {
		t.Error("a detached tenant has blocks")
	}
	if err := put(t.Context(), n, keyOf(3), []byte("x"), PutOptions{}); !errors.Is(err, ErrRemoved) {
		t.Errorf("storing in a detached tenant gave %v", err)
	}
	left, err := c.Left()
	if err != nil || len(left) != 1 || left[0].Name != "a" || left[0].Kind != TenantCredential || left[0].Bytes != 4<<20 {
		t.Fatalf("left is %+v: %v", left, err)
	}
	n = addTenant(t, c, spec)
	for key := 1; key <= 2; key++ {
		if !bytes.Equal(get(t, n, key), content(key, 0, 10_000)) {
			t.Errorf("block %d is lost", key)
		}
	}
	if left, err := c.Left(); err != nil || len(left) != 0 {
		t.Errorf("left is %+v: %v", left, err)
	}
	if err := c.DetachTenant(t.Context(), TenantCredential, "a"); err != nil {
		t.Fatal(err)
	}
	if err := c.RemoveTenant(t.Context(), TenantCredential, "a"); err != nil {
		t.Fatal(err)
	}
	if left, err := c.Left(); err != nil || len(left) != 0 {
		t.Errorf("after its removal left is %+v: %v", left, err)
	}
}

func TestATenantThatEndedHasNoBlocks(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir())
	defer closeCache(t, c)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
	mustPut(t, n, 1, content(1, 0, 10_000))
	drain(t, n.Tenant())
	if err := c.RemoveTenant(t.Context(), TenantCredential, "a"); err != nil {
		t.Fatal(err)
	}
	if _, ok := n.Lookup(keyOf(1)); ok {
		t.Error("a lookup finds a block of a tenant that ended")
	}
	if _, ok := n.Pin(keyOf(1)); ok {
		t.Error("a block is pinned of a tenant that ended")
	}
}

func TestABudgetBelowWhatClaimsReservedIsRefused(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, filepath.Join(t.TempDir(), "kv"), Budget{Memory: 10, NVMe: 100, NamespaceMemory: 8})
	if _, err := s.Reserve(t.Context(), Reservation{Claim: "c", Namespace: "n", Memory: 6, NVMe: 60}); err != nil {
		t.Fatal(err)
	}
	for _, b := range []Budget{{Memory: 5, NVMe: 100}, {Memory: 10, NVMe: 59}, {Memory: -1, NVMe: 100}} {
		if err := s.SetBudget(t.Context(), b); !errors.Is(err, ErrNoSpace) && !errors.Is(err, ErrInvalid) {
			t.Errorf("%+v gave %v", b, err)
		}
	}
	if got := s.Budget(); got.Memory != 10 || got.NVMe != 100 {
		t.Errorf("a refused budget left %+v", got)
	}
	want := Budget{Memory: 8, NVMe: 60, NamespaceMemory: 2}
	if err := s.SetBudget(t.Context(), want); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Reserve(t.Context(), Reservation{Claim: "d", Namespace: "m", Memory: 3}); !errors.Is(err, ErrNoSpace) {
		t.Errorf("more than the new budget gave %v", err)
	}
	if memory, nvme := s.Reserved(); memory != 6 || nvme != 60 {
		t.Errorf("reserved are %d and %d", memory, nvme)
	}
	if _, err := s.Reserve(t.Context(), Reservation{Claim: "d", Namespace: "m", Memory: 2}); err != nil {
		t.Error(err)
	}
}

func TestARateBeyondAllBoundsIsNoBound(t *testing.T) {
	t.Parallel()
	for _, perDay := range []float64{1e9, 1e300, math.Inf(1)} {
		c := onDrive(t, t.TempDir(), func(o *CacheOptions) { o.Wear.WritesPerDay, o.Wear.Capacity = perDay, units.TiB })
		n := addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
		mustPut(t, n, 1, content(1, 0, 50_000))
		drain(t, n.tenant)
		if s := n.tenant.Stats(); s.Written != 1 {
			t.Errorf("with %g writes a day %d blocks are written, not 1", perDay, s.Written)
		}
		closeCache(t, c)
	}
}

func TestTheDrivesRateChangesWhileBlocksAreWritten(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir(), func(o *CacheOptions) { o.Wear = WearOptions{WritesPerDay: 1, Capacity: 86_400 * units.MiB} })
	defer closeCache(t, c)
	if got := c.Wear().Rate; got != 1<<20 {
		t.Fatalf("the rate is %d", got)
	}
	if err := c.SetWritesPerDay(3); err != nil || c.Wear().Rate != 3<<20 {
		t.Errorf("the rate is %d: %v", c.Wear().Rate, err)
	}
	if err := c.SetWritesPerDay(0); !errors.Is(err, ErrInvalid) {
		t.Errorf("to take the bound away gave %v", err)
	}
	if got := c.Wear().Rate; got != 3<<20 {
		t.Errorf("a refused change left the rate at %d", got)
	}
}

func TestCheckFindsEveryDamagedRecordAndChangesNothing(t *testing.T) {
	t.Parallel()
	dir, second := t.TempDir(), t.TempDir()
	// A Space holds the lock of the first root.
	space, err := Open(Options{Dir: dir, Budget: Budget{NVMe: units.GiB}})
	if err != nil {
		t.Fatal(err)
	}
	c := onDrive(t, dir, func(o *CacheOptions) { o.Drives = []string{second} })
	key := bytes.Repeat([]byte{7}, 32)
	plain := addTenant(t, c, TenantSpec{Name: "a", NVMe: 200 * units.MiB, Memory: units.MiB, AdmitAll: true})
	secret := addTenant(t, c, TenantSpec{Name: "b", NVMe: 40 * units.MiB, Memory: units.MiB, AdmitAll: true, EncryptionKey: key})
	for i := range 10 {
		mustPut(t, plain, i, content(i, 0, 20_000))
		mustPut(t, secret, i, content(i, 0, 20_000))
		drain(t, plain.Tenant())
		drain(t, secret.Tenant())
	}
	opts := CheckOptions{Dir: dir, Drives: []string{second}, Key: func(_, name string) ([]byte, error) {
		return map[string][]byte{"b": key}[name], nil
	}}
	if _, err := Check(t.Context(), opts); err == nil {
		t.Error("a directory that is served was checked")
	}
	closeCache(t, c)
	if err := space.Close(); err != nil {
		t.Fatal(err)
	}
	check := func() map[string]TenantCheck {
		var last, total int64
		opts.Progress = func(done, of int64) {
			if done < last || done > of {
				t.Errorf("progress went from %d to %d of %d", last, done, of)
			}
			last, total = done, of
		}
		list, err := Check(t.Context(), opts)
		if err != nil {
			t.Fatal(err)
		}
		if last != total || total == 0 {
			t.Errorf("progress ended at %d of %d", last, total)
		}
		found := map[string]TenantCheck{}
		for _, one := range list {
			found[one.Name] = one
		}
		return found
	}
	for name, one := range check() {
		if one.Bad() || one.Blocks != 10 || one.Bytes != 200_000 || one.Unopened != 0 {
			t.Errorf("%s: %+v", name, one)
		}
	}
	paths, err := filepath.Glob(filepath.Join(dir, blocksDir, plain.Tenant().folder(), "*.seg"))
	if more, e := filepath.Glob(filepath.Join(second, blocksDir, plain.Tenant().folder(), "*.seg")); e == nil {
		paths = append(paths, more...)
	}
	if err != nil || len(paths) == 0 {
		t.Fatal(paths, err)
	}
	f, err := os.OpenFile(paths[0], os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	// A byte of the first record's payload: page 1 is its header.
	if _, err := f.WriteAt([]byte{0xff, 0x00}, 2*4096+100); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(paths[0])
	if err != nil {
		t.Fatal(err)
	}
	found := check()
	if bad := found["a"]; len(bad.Damaged) != 1 || bad.Damaged[0].Path != paths[0] || bad.Damaged[0].Page != 1 || bad.Blocks != 9 || found["b"].Bad() {
		t.Errorf("found %+v and %+v", bad, found["b"])
	}
	if after, err := os.ReadFile(paths[0]); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the check changed the segment: %v", err)
	}
	opts.Key = nil
	if one := check()["b"]; one.Unopened != 10 || one.Bad() {
		t.Errorf("without the key: %+v", one)
	}
}

func TestCheckTellsOfRecordsThatCannotBeRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if list, err := Check(t.Context(), CheckOptions{Dir: filepath.Join(dir, "nothing")}); err != nil || len(list) != 0 {
		t.Errorf("no KV space gave %v, %v", list, err)
	}
	space, err := Open(Options{Dir: dir, Budget: Budget{NVMe: units.GiB}})
	if err != nil {
		t.Fatal(err)
	}
	c := onDrive(t, dir)
	n := addTenant(t, c, TenantSpec{Name: "a", NVMe: 40 * units.MiB, Memory: units.MiB, AdmitAll: true})
	mustPut(t, n, 1, content(1, 0, 20_000))
	drain(t, n.Tenant())
	closeCache(t, c)
	if err := space.Close(); err != nil {
		t.Fatal(err)
	}
	record := n.Tenant().recordPath()
	text, err := os.ReadFile(record)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(record, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	list, err := Check(t.Context(), CheckOptions{Dir: dir})
	if err != nil || len(list) != 1 || !list[0].Bad() || list[0].Problem == "" || list[0].Foreign != 1 {
		t.Errorf("a record that is unreadable gave %+v, %v", list, err)
	}
	if err := os.WriteFile(record, bytes.Replace(text, []byte(`"version": 1`), []byte(`"version": 2`), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Check(t.Context(), CheckOptions{Dir: dir}); !errors.Is(err, ErrNewer) {
		t.Errorf("a record of a newer version gave %v", err)
	}
}
