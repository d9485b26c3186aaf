package kvtier

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

// start runs a cache's writers; the func it gives ends them and waits for the
// flush.
func start(t *testing.T, c *Cache) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	return func() {
		t.Helper()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// onDrive makes a cache with small segments in a directory that stays.
func onDrive(t *testing.T, dir string, change ...func(*CacheOptions)) *Cache {
	t.Helper()
	change = append([]func(*CacheOptions){func(o *CacheOptions) { o.Dir, o.SegmentSize = dir, 4<<20 }}, change...)
	c, err := OpenCache(func() CacheOptions {
		transit := units.Bytes(0)
		o := CacheOptions{Memory: 4 * units.MiB, Transit: &transit, VerifyEvery: 1}
		for _, f := range change {
			f(&o)
		}
		return o
	}())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func closeCache(t *testing.T, c *Cache) {
	t.Helper()
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}

// drain writes what waits.
func drain(t *testing.T, tenant *Tenant) {
	t.Helper()
	for {
		more, err := tenant.writeSome(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !more {
			return
		}
	}
}

func TestABlockGoesToTheDriveAtItsSecondUse(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir())
	defer closeCache(t, c)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB})
	mustPut(t, n, 1, content(1, 0, 10_000))
	drain(t, n.tenant)
	if s := n.tenant.Stats(); s.NVMe.Blocks != 0 {
		t.Fatalf("a block that nobody used again is on the drive: %+v", s.NVMe)
	}
	get(t, n, 1)
	drain(t, n.tenant)
	if s := n.tenant.Stats(); s.NVMe.Blocks != 1 || s.Total != 1 || s.Written != 1 || s.WrittenBytes != 10_000 {
		t.Fatalf("a block that was used again is not on the drive: %+v", s)
	}
	get(t, n, 1)
	drain(t, n.tenant)
	if s := n.tenant.Stats(); s.Written != 1 {
		t.Errorf("the block was written %d times", s.Written)
	}
}

func TestAdmission(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		block candidate
		level float64
		want  bool
	}{
		{"once", candidate{touches: 1}, 1, false},
		{"once, deep", candidate{touches: 1, depth: 500}, 1, false},
		{"twice", candidate{touches: 2}, 1, true},
		{"twice, half the wear left", candidate{touches: 2}, 0.5, true},
		{"twice, a quarter of the wear left", candidate{touches: 2}, 0.25, false},
		{"twice and deep, a quarter left", candidate{touches: 2, depth: 64}, 0.25, true},
		{"often, a tenth left", candidate{touches: 10}, 0.1, true},
		{"often, hardly any left", candidate{touches: 31}, 0.01, false},
		{"often, none left", candidate{touches: 31, depth: 256}, 0, false},
		{"no level", candidate{touches: 31}, math.NaN(), false},
	} {
		if got := admits(c.block, c.level); got != c.want {
			t.Errorf("%s: %t, want %t", c.name, got, c.want)
		}
	}
}

func TestBlocksComeBackFromTheDriveAfterTheyLeftRAM(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir())
	defer closeCache(t, c)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: units.MiB, NVMe: 60 * units.MiB, AdmitAll: true})
	for i := range 200 {
		mustPut(t, n, i, content(i, 0, 90_000))
		drain(t, n.tenant)
	}
	s := n.tenant.Stats()
	if s.NVMe.Blocks != 200 || s.RAM.Used > units.MiB || s.NVMe.Used > 60*units.MiB {
		t.Fatalf("%+v", s)
	}
	for i := range 200 {
		if !bytes.Equal(get(t, n, i), content(i, 0, 90_000)) {
			t.Fatalf("block %d is lost or differs", i)
		}
	}
	if s := n.tenant.Stats(); s.NVMe.Hits < 150 || s.NVMe.Hits+s.RAM.Hits != 200 {
		t.Errorf("hits: %d from RAM, %d from the drive", s.RAM.Hits, s.NVMe.Hits)
	}
}

func TestTheDrivesBudgetIsNeverExceeded(t *testing.T) {
	t.Parallel()
	dir, second := t.TempDir(), t.TempDir()
	c := onDrive(t, dir, func(o *CacheOptions) { o.Drives = []string{second} })
	defer closeCache(t, c)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 2 * units.MiB, NVMe: 30 * units.MiB, AdmitAll: true})
	for i := range 600 {
		mustPut(t, n, i, content(i, 0, 100_000))
		drain(t, n.tenant)
		if i%100 == 99 {
			if used := filesBelow(t, filepath.Join(dir, blocksDir)) + filesBelow(t, filepath.Join(second, blocksDir)); used > 30<<20 {
				t.Fatalf("segments have %d bytes, the budget is %d", used, 30<<20)
			}
		}
	}
	found := 0
	for i := range 600 {
		if data := get(t, n, i); data != nil {
			found++
			if !bytes.Equal(data, content(i, 0, 100_000)) {
				t.Fatalf("block %d differs", i)
			}
		}
	}
	if found < 150 {
		t.Errorf("of 30 MiB %d blocks of 100 kB are left", found)
	}
}

func filesBelow(t *testing.T, dir string) (sum int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(_ string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			sum += info.Size()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return sum
}

func TestTheEndOfTheProcessKeepsWhatIsInRAM(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := onDrive(t, dir)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB})
	stop := start(t, c)
	for i := range 30 {
		mustPut(t, n, i, content(i, 0, 100_000))
	}
	stop()
	closeCache(t, c)
	for round := range 3 {
		c = onDrive(t, dir)
		n = addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB})
		if s := n.tenant.Stats(); s.Recovered != 30 || s.NVMe.Blocks != 30 {
			t.Fatalf("round %d: %d blocks are taken in", round, s.Recovered)
		}
		for i := range 30 {
			if !bytes.Equal(get(t, n, i), content(i, 0, 100_000)) {
				t.Fatalf("round %d: block %d is lost or differs", round, i)
			}
		}
		if round == 1 { // without its checkpoint the segments tell as much
			if err := os.Remove(n.tenant.checkpointPath()); err != nil {
				t.Fatal(err)
			}
		}
		closeCache(t, c)
	}
}

func TestACheckpointKeepsChainsAndUses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := onDrive(t, dir)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
	opts := PutOptions{}
	for i := range 20 {
		if err := put(t.Context(), n, keyOf(i), content(i, 0, 50_000), opts); err != nil {
			t.Fatal(err)
		}
		opts = PutOptions{Parent: keyOf(i), HasParent: true}
	}
	for range 3 {
		get(t, n, 7)
	}
	n.tenant.flush(t.Context())
	closeCache(t, c)
	c = onDrive(t, dir)
	defer closeCache(t, c)
	n = addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB})
	x := n.tenant.index
	if depth := x.Depth(x.Find(n.print(keyOf(19))), 100); depth != 19 {
		t.Errorf("the last block of a chain of 20 has depth %d", depth)
	}
	if touches := x.Touches(x.Find(n.print(keyOf(7)))); touches != 4 {
		t.Errorf("a block used 4 times has %d", touches)
	}
}

func TestADamagedCheckpointCostsTimeAndNothingElse(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := onDrive(t, dir)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
	mustPut(t, n, 1, content(1, 0, 50_000))
	n.tenant.flush(t.Context())
	path := n.tenant.checkpointPath()
	closeCache(t, c)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	random := rand.New(rand.NewPCG(1, 1))
	for range 40 {
		bad := bytes.Clone(data)
		bad[random.IntN(len(bad))] ^= 1 << random.IntN(8)
		if random.IntN(4) == 0 {
			bad = bad[:random.IntN(len(bad))]
		}
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		c := onDrive(t, dir)
		tenant, err := c.AddTenant(t.Context(), TenantSpec{Kind: TenantCredential, Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB})
		switch {
		case errors.Is(err, ErrNewer): // the version was hit
		case err != nil:
			t.Fatal(err)
		default:
			n, err := tenant.Namespace(t.Context(), block.Identity{Format: "test"})
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(get(t, n, 1), content(1, 0, 50_000)) {
				t.Fatal("the block is lost with the checkpoint")
			}
		}
		closeCache(t, c)
	}
}

func TestADamagedBlockOnTheDriveIsAMissAnEventAndNeverComesBack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := onDrive(t, dir, func(o *CacheOptions) { o.Memory = units.MiB })
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
	for i := range 40 {
		mustPut(t, n, i, content(i, 0, 90_000))
		drain(t, n.tenant)
	}
	first, err := filepath.Glob(filepath.Join(dir, blocksDir, "*", "*.seg"))
	if err != nil || len(first) == 0 {
		t.Fatalf("no segment: %v", err)
	}
	for _, path := range first {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if at := bytes.Index(data, content(3, 0, 90_000)); at >= 0 {
			data[at+777] ^= 1
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	if get(t, n, 3) != nil {
		t.Fatal("damaged bytes are given out")
	}
	if s := n.tenant.Stats(); s.NVMe.Damaged != 1 {
		t.Errorf("%d blocks are counted as damaged", s.NVMe.Damaged)
	}
	for i := range 40 {
		if i != 3 && !bytes.Equal(get(t, n, i), content(i, 0, 90_000)) {
			t.Errorf("block %d is lost or differs", i)
		}
	}
	closeCache(t, c)
	c = onDrive(t, dir)
	defer closeCache(t, c)
	if n := addTenant(t, c, TenantSpec{Name: "a", Memory: units.MiB, NVMe: 40 * units.MiB}); get(t, n, 3) != nil {
		t.Error("the damaged block is found after a restart")
	}
}

func TestBlocksAreUnreadableOnTheDriveWithoutTheKeyAndTheTenant(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	key := sha256.Sum256([]byte("key file"))
	spec := TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true, EncryptionKey: key[:]}
	c := onDrive(t, dir)
	n := addTenant(t, c, spec)
	secret := bytes.Repeat([]byte("a secret of somebody"), 3000)
	mustPut(t, n, 1, secret)
	mustPut(t, n, 2, []byte("a secret of somebody"))
	n.tenant.flush(t.Context())
	closeCache(t, c)
	segments, _ := filepath.Glob(filepath.Join(dir, blocksDir, "*", "*.seg"))
	for _, path := range segments {
		if data, err := os.ReadFile(path); err != nil || bytes.Contains(data, []byte("secret")) {
			t.Fatalf("%s shows the block: %v", path, err)
		}
	}
	c = onDrive(t, dir)
	n = addTenant(t, c, spec)
	if !bytes.Equal(get(t, n, 1), secret) || string(get(t, n, 2)) != "a secret of somebody" {
		t.Error("the block cannot be read with its key")
	}
	closeCache(t, c)
	for _, wrong := range [][]byte{nil, bytes.Repeat([]byte{1}, 32)} {
		spec.EncryptionKey = wrong
		c = onDrive(t, dir)
		n = addTenant(t, c, spec)
		if get(t, n, 1) != nil {
			t.Error("the block is read without its key")
		}
		closeCache(t, c)
	}
}

func TestARemovedTenantsBlocksDoNotComeBack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := onDrive(t, dir)
	spec := TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true}
	n := addTenant(t, c, spec)
	mustPut(t, n, 1, content(1, 0, 50_000))
	n.tenant.flush(t.Context())
	if err := c.RemoveTenant(t.Context(), TenantCredential, "a"); err != nil {
		t.Fatal(err)
	}
	if err := c.sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if left := filesBelow(t, filepath.Join(dir, blocksDir)) + filesBelow(t, filepath.Join(dir, trashDir)); left != 0 {
		t.Errorf("%d bytes of a removed tenant are left", left)
	}
	if get(t, addTenant(t, c, spec), 1) != nil {
		t.Error("a removed tenant's block comes back")
	}
	closeCache(t, c)
}

func TestAPinnedBlockOnTheDriveOutlivesItsSegmentsTurn(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir(), func(o *CacheOptions) { o.Memory = units.MiB })
	defer closeCache(t, c)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: units.MiB, NVMe: 20 * units.MiB, AdmitAll: true})
	for i := range 20 {
		mustPut(t, n, i, content(i, 0, 100_000))
		drain(t, n.tenant)
	}
	pin, ok := n.Pin(keyOf(1))
	if !ok {
		t.Fatal("no pin")
	}
	for i := 100; i < 500; i++ {
		mustPut(t, n, i, content(i, 0, 100_000))
		drain(t, n.tenant)
	}
	if !bytes.Equal(get(t, n, 1), content(1, 0, 100_000)) {
		t.Error("a pinned block left the drive")
	}
	pin.Release()
	if get(t, n, 150) != nil {
		t.Error("a block that nobody wants outlived hundreds of others of twice the room")
	}
}

func TestADayOfWritingStaysWithinTheWearBudget(t *testing.T) {
	t.Parallel()
	var now time.Duration
	capacity := 64 * units.MiB // written over once a day
	dir := t.TempDir()
	open := func() (*Cache, *Namespace) {
		c := onDrive(t, dir, func(o *CacheOptions) {
			o.Wear = WearOptions{WritesPerDay: 4, Capacity: capacity, Now: func() time.Duration { return now }}
		})
		return c, addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
	}
	c, n := open()
	written := int64(0)
	key := 0
	for hour := range 24 {
		for range 40 { // 40 MB an hour are wanted, 11 allowed
			key++
			mustPut(t, n, key, content(key, 0, 1_000_000))
			now += time.Hour / 40
			drain(t, n.tenant)
		}
		if hour == 7 || hour == 15 {
			written += n.tenant.drive.Stats().Bytes
			closeCache(t, c)
			c, n = open()
		}
	}
	written += n.tenant.drive.Stats().Bytes
	s := n.tenant.Stats()
	if budget := 4 * int64(capacity); written > budget || written < budget/2 || s.DroppedWear == 0 {
		t.Errorf("%d bytes were written in a day, %d are allowed, %d blocks were refused", written, budget, s.DroppedWear)
	}
	closeCache(t, c)
}

func TestADriveBlockIsRefusedWhereComputingItIsFaster(t *testing.T) {
	t.Parallel()
	c := onDrive(t, t.TempDir(), func(o *CacheOptions) { o.Memory = units.MiB })
	defer closeCache(t, c)
	spec := TenantSpec{Name: "a", Memory: units.MiB, NVMe: 40 * units.MiB, AdmitAll: true, BlockTokens: 256, PrefillRate: 1e12}
	n := addTenant(t, c, spec)
	for i := range 30 {
		mustPut(t, n, i, content(i, 0, 100_000))
		drain(t, n.tenant)
	}
	if _, ok := n.Lookup(keyOf(1)); ok {
		t.Error("a load is promised that takes longer than to compute")
	}
	if _, ok := n.Pin(keyOf(1)); ok {
		t.Error("a load is promised by a pin")
	}
	if s := n.tenant.Stats(); s.Gated != 2 {
		t.Errorf("%d refusals are counted", s.Gated)
	}
	if _, ok := n.Lookup(keyOf(29)); !ok {
		t.Error("a block in RAM is refused")
	}
	spec.PrefillRate = 1
	addTenant(t, c, spec)
	if _, ok := n.Lookup(keyOf(1)); !ok {
		t.Error("a block is refused that takes long to compute")
	}
}

func TestAnOlderOrNewerTenantFileIsRefusedUntouched(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := onDrive(t, dir)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: units.MiB, NVMe: 40 * units.MiB})
	path := n.tenant.recordPath()
	closeCache(t, c)
	newer := []byte(fmt.Sprintf(`{"version":%d,"kind":"credential","name":"a","what":"is this"}`, FormatVersion+1))
	if err := os.WriteFile(path, newer, 0o600); err != nil {
		t.Fatal(err)
	}
	c = onDrive(t, dir)
	defer closeCache(t, c)
	if _, err := c.AddTenant(t.Context(), TenantSpec{Kind: TenantCredential, Name: "a", NVMe: 40 * units.MiB}); !errors.Is(err, ErrNewer) {
		t.Errorf("got %v", err)
	}
	if data, err := os.ReadFile(path); err != nil || !bytes.Equal(data, newer) {
		t.Errorf("the file was touched: %q, %v", data, err)
	}
}

func FuzzCheckpoint(f *testing.F) {
	c := checkpointed{seed: 9, segments: []covered{{1, 0, 7}}, namespaces: []block.Namespace{{1}}, entries: []saved{{segment: 0, page: 3, size: 9}, {segment: nowhereSaved, parent: 1}}}
	f.Add(c.encode())
	f.Add([]byte(checkpointMagic))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := decodeCheckpoint(data)
		if err != nil {
			if !errors.Is(err, errCheckpoint) && !errors.Is(err, ErrNewer) {
				t.Errorf("an error that says not what it is: %v", err)
			}
			return
		}
		again, err := decodeCheckpoint(got.encode())
		if err != nil || len(again.entries) != len(got.entries) {
			t.Errorf("what was read cannot be written and read: %v", err)
		}
	})
}

func FuzzTenantRecord(f *testing.F) {
	f.Add([]byte(`{"version":1,"kind":"claim","name":"a","salt":"00","namespaces":[]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if _, err := decodeTenant(data, "claim", "a"); err != nil && !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrNewer) {
			t.Errorf("%q gave %v, which says not what it is", data, err)
		}
	})
}
