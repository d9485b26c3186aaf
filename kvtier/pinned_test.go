package kvtier

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

func TestAPinnedBlockThatIsOnlyInRAMStaysThere(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, units.MiB), TenantSpec{Name: "a", Memory: units.MiB})
	mustPut(t, n, 1, content(1, 0, 100_000))
	if got, err := n.Tenant().PinBlocks(t.Context(), keyOf(1)); err != nil || got != 1 {
		t.Fatalf("pinned %d blocks: %v", got, err)
	}
	for key := 2; key < 60; key++ {
		mustPut(t, n, key, content(key, 0, 100_000))
	}
	if !bytes.Equal(get(t, n, 1), content(1, 0, 100_000)) {
		t.Error("the pinned block left")
	}
	if got := n.Tenant().Pinned(); got.Names != 1 || got.Blocks != 1 || got.Bytes != 100_000 {
		t.Errorf("pinned is %+v", got)
	}
	if got, err := n.Tenant().UnpinBlocks(t.Context(), keyOf(1), keyOf(99)); err != nil || got != 1 {
		t.Fatalf("unpinned %d blocks: %v", got, err)
	}
	for key := 100; key < 160; key++ {
		mustPut(t, n, key, content(key, 0, 100_000))
		get(t, n, key)
		get(t, n, key)
	}
	if get(t, n, 1) != nil {
		t.Error("the block stays that is pinned no more")
	}
}

func TestPinsTakeAtMostHalfOfTheRAMWithWhatIsBeforeThem(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, units.MiB), TenantSpec{Name: "a", Memory: units.MiB})
	for key := range 7 {
		opts := PutOptions{}
		if key > 0 {
			opts = PutOptions{Parent: keyOf(key - 1), HasParent: true}
		}
		if err := put(t.Context(), n, keyOf(key), content(key, 0, 100_000), opts); err != nil {
			t.Fatal(err)
		}
	}
	tenant := n.Tenant()
	if _, err := tenant.PinBlocks(t.Context(), keyOf(6)); !errors.Is(err, ErrNoSpace) {
		t.Errorf("the end of a chain of 700 KB in 1 MiB gave %v", err)
	}
	if _, err := tenant.PinBlocks(t.Context(), keyOf(3), keyOf(77)); !errors.Is(err, ErrMiss) {
		t.Errorf("a block that is nowhere gave %v", err)
	}
	if got := tenant.Pinned(); got.Names != 0 {
		t.Errorf("what was refused left %+v", got)
	}
	if got, err := tenant.PinBlocks(t.Context(), keyOf(3)); err != nil || got != 1 {
		t.Errorf("a chain of 400 KB gave %d, %v", got, err)
	}
	// A smaller budget stands over pins.
	if _, err := n.Tenant().cache.AddTenant(t.Context(), TenantSpec{Kind: TenantCredential, Name: "a", Memory: 300_000}); err != nil {
		t.Fatal(err)
	}
	if got := tenant.Stats().RAM; got.Used > 300_000 {
		t.Errorf("%d bytes are used of 300000", got.Used)
	}
}

func TestAPinnedBlockStaysOnTheDriveWhateverIsWritten(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := onDrive(t, dir)
	spec := TenantSpec{Name: "a", Memory: 2 * units.MiB, NVMe: 20 * units.MiB, AdmitAll: true}
	n := addTenant(t, c, spec)
	next := 2
	// turn writes more than twice what the drive's budget is.
	turn := func() {
		for range 90 {
			mustPut(t, n, next, content(next, 0, 500_000))
			drain(t, n.Tenant())
			next++
		}
	}
	there := func(key int) bool {
		tenant := n.Tenant()
		tenant.mu.Lock()
		defer tenant.mu.Unlock()
		return tenant.presentLocked(tenant.findNameLocked(pinName{n.ID(), keyOf(key)}))
	}
	mustPut(t, n, 1, content(1, 0, 500_000))
	drain(t, n.Tenant())
	if _, err := n.Tenant().PinBlocks(t.Context(), keyOf(1)); err != nil {
		t.Fatal(err)
	}
	turn()
	if !there(1) || there(20) {
		t.Errorf("the pinned block is there: %t; one that came later: %t", there(1), there(20))
	}
	closeCache(t, c)

	// A restart knows the pin, and goes on keeping the block.
	c = onDrive(t, dir)
	defer closeCache(t, c)
	n = addTenant(t, c, spec)
	if got := n.Tenant().Pinned(); got.Names != 1 || got.Blocks != 1 {
		t.Errorf("after a restart pinned is %+v", got)
	}
	turn()
	if !there(1) {
		t.Error("the pinned block left the drive after a restart")
	}
	if _, err := n.Tenant().UnpinBlocks(t.Context(), keyOf(1)); err != nil {
		t.Fatal(err)
	}
	turn()
	if there(1) {
		t.Error("the block stays that is pinned no more")
	}
}

func TestAPinHasABlockWrittenThatNobodyUsedAgain(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir())
	defer closeCache(t, c)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB})
	mustPut(t, n, 1, content(1, 0, 10_000))
	mustPut(t, n, 2, content(2, 0, 10_000))
	if _, err := n.Tenant().PinBlocks(t.Context(), keyOf(1)); err != nil {
		t.Fatal(err)
	}
	drain(t, n.Tenant())
	if got := n.Tenant().Stats().NVMe.Blocks; got != 1 {
		t.Errorf("%d blocks are on the drive, want the pinned one", got)
	}
	// Other bytes under the key are pinned too, and written.
	mustPut(t, n, 1, content(1, 1, 20_000))
	drain(t, n.Tenant())
	if got := n.Tenant().Stats().NVMe; got.Blocks != 1 || got.Bytes != 20_000 {
		t.Errorf("the drive has %d blocks of %d bytes", got.Blocks, got.Bytes)
	}
}

func TestAPinnedBlockThatWearRefusesIsNotTriedAtOnceAgain(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir(), func(o *CacheOptions) { o.Wear = WearOptions{WritesPerDay: 1, Capacity: 64 * units.KiB} })
	defer closeCache(t, c)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB})
	mustPut(t, n, 1, content(1, 0, 100_000))
	if _, err := n.Tenant().PinBlocks(t.Context(), keyOf(1)); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if more, err := n.Tenant().writeSome(t.Context()); err != nil || more {
			t.Fatalf("the writer goes on: %v, %v", more, err)
		}
	}
	if got := n.Tenant().Stats(); got.DroppedWear != 1 || got.RAM.Blocks != 1 {
		t.Errorf("refused %d times, %d blocks are in RAM", got.DroppedWear, got.RAM.Blocks)
	}
	n.Tenant().keepPins() // as the ticker does
	if got := n.Tenant().Stats().Waiting; got != 100_000 {
		t.Errorf("%d bytes wait to be tried again", got)
	}
}

func TestABlockLargerThanItsDrivesTakeHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir())
	defer closeCache(t, c)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 8 * units.MiB, AdmitAll: true})
	mustPut(t, n, 1, content(1, 0, 1_500_000))
	mustPut(t, n, 2, content(2, 0, 100_000))
	if _, err := n.Tenant().PinBlocks(t.Context(), keyOf(1)); err != nil {
		t.Fatal(err)
	}
	drain(t, n.Tenant())
	if got := n.Tenant().Stats(); got.NVMe.Blocks != 1 || got.RAM.Blocks != 2 || got.DroppedLarge != 1 {
		t.Errorf("%d blocks are on the drive, %d in RAM, %d were too large", got.NVMe.Blocks, got.RAM.Blocks, got.DroppedLarge)
	}
	n.Tenant().flush(t.Context())
	if got := n.Tenant().Stats(); got.DroppedDrive != 0 {
		t.Errorf("the flush tried %d blocks that no drive takes", got.DroppedDrive)
	}
}

func TestPinsHoldAtMostHalfOfTheSegments(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir())
	defer closeCache(t, c)
	// Ten segments of 4 MiB: a block of 2 MiB beside its header leaves no room for
	// another.
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
	tenant := n.Tenant()
	var pinned int
	var err error
	for key := 0; key < 12 && err == nil; key++ {
		mustPut(t, n, key, content(key, 0, 2_100_000))
		drain(t, tenant)
		if _, err = tenant.PinBlocks(t.Context(), keyOf(key)); err == nil {
			pinned++
		}
	}
	if !errors.Is(err, ErrNoSpace) || pinned != 5 {
		t.Errorf("%d blocks in a segment each are pinned, then %v; want 5", pinned, err)
	}
	for key := 100; key < 130; key++ {
		mustPut(t, n, key, content(key, 0, 1_000_000))
		drain(t, tenant)
	}
	if dropped := tenant.Stats().DroppedDrive; dropped != 0 {
		t.Errorf("%d blocks found no room beside the pinned ones", dropped)
	}
	for key := range pinned {
		if !bytes.Equal(get(t, n, key), content(key, 0, 2_100_000)) {
			t.Errorf("pinned block %d left", key)
		}
	}
}

func TestPinsThatCannotBeUnderstoodArePutAsideAndNewerOnesStay(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{"no JSON": "{", "an odd hash": `{"version":1,"pins":[{"namespace":"00","hash":"x","group":0}]}`, "newer": `{"version":2}`} {
		dir := t.TempDir()
		c := onDrive(t, dir)
		n := addTenant(t, c, TenantSpec{Name: "a", NVMe: 40 * units.MiB})
		path := n.Tenant().pinsPath()
		closeCache(t, c)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c = onDrive(t, dir)
		_, err := c.AddTenant(t.Context(), TenantSpec{Kind: TenantCredential, Name: "a", NVMe: 40 * units.MiB})
		if newer := name == "newer"; errors.Is(err, ErrNewer) != newer || err != nil && !newer {
			t.Errorf("%s: opening gave %v", name, err)
		}
		_, gone := os.Stat(path)
		aside, _ := filepath.Glob(filepath.Join(dir, quarantineDir, "*-"+pinsFile))
		if newer := name == "newer"; (gone == nil) != newer || (len(aside) == 1) == newer {
			t.Errorf("%s: the file is there: %t; put aside: %q", name, gone == nil, aside)
		}
		closeCache(t, c)
	}
}

func TestPinsAreEncodedAsStored(t *testing.T) {
	t.Parallel()
	names := []pinName{
		{block.Namespace{1}, block.Key{Hash: block.Hash{0xab}}},
		{block.Namespace{1}, block.Key{Hash: block.Hash{0xab}, Group: 7}},
	}
	got, err := encodePins(names)
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/pins_v1.json")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("pins are encoded as\n%s\nwant\n%s", got, want)
	}
	back, err := decodePins(want)
	if err != nil || len(back) != 2 || back[0] != names[0] || back[1] != names[1] {
		t.Errorf("read back as %v: %v", back, err)
	}
}

func FuzzDecodePins(f *testing.F) {
	stored, err := os.ReadFile("testdata/pins_v1.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(stored)
	f.Add([]byte(`{"version":1,"pins":[]}`))
	f.Add([]byte(`{"version":9}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		names, err := decodePins(data)
		if err != nil {
			if !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrNewer) {
				t.Fatalf("an error of another kind: %v", err)
			}
			return
		}
		again, err := encodePins(names)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := decodePins(again); err != nil || len(back) != len(names) {
			t.Fatalf("what was read is written as what is not: %v", err)
		}
	})
}
