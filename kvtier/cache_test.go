package kvtier

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

// newCache opens a cache in a temporary directory that verifies every read.
func newCache(t *testing.T, memory units.Bytes, change ...func(*CacheOptions)) *Cache {
	t.Helper()
	transit := units.Bytes(0)
	opts := CacheOptions{Dir: t.TempDir(), Memory: memory, Transit: &transit, VerifyEvery: 1}
	for _, c := range change {
		c(&opts)
	}
	c, err := OpenCache(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func addTenant(t *testing.T, c *Cache, spec TenantSpec) *Namespace {
	t.Helper()
	if spec.Kind == "" {
		spec.Kind = TenantCredential
	}
	tenant, err := c.AddTenant(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	n, err := tenant.Namespace(t.Context(), block.Identity{Format: "test"})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func keyOf(n int) (k block.Key) {
	binary.BigEndian.PutUint64(k.Hash[:], uint64(n))
	return k
}

// content is what a block of a key has in tests: bytes that tell key and version.
func content(key, version, size int) []byte {
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], uint64(key))
	binary.LittleEndian.PutUint64(seed[8:], uint64(version))
	data := make([]byte, size)
	_, _ = rand.NewChaCha8(seed).Read(data)
	return data
}

func put(ctx context.Context, n *Namespace, key block.Key, data []byte, opts PutOptions) error {
	p, err := n.Put(key, len(data), opts)
	if err != nil {
		return err
	}
	defer p.Abort()
	copy(p.Bytes(), data)
	p.Fill(len(data))
	return p.Commit(ctx)
}

func mustPut(t *testing.T, n *Namespace, key int, data []byte) {
	t.Helper()
	if err := put(t.Context(), n, keyOf(key), data, PutOptions{}); err != nil {
		t.Fatal(err)
	}
}

// get gives a copy of a block, nil for a miss.
func get(t *testing.T, n *Namespace, key int) []byte {
	t.Helper()
	b, err := n.Get(t.Context(), keyOf(key))
	if errors.Is(err, ErrMiss) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	defer b.Release()
	return bytes.Clone(b.Bytes())
}

func TestABlockIsFoundWithItsBytes(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, units.MiB), TenantSpec{Name: "a", Memory: units.MiB})
	for key, size := range []int{1, 28, 4096, 5000, 300_000} {
		mustPut(t, n, key, content(key, 0, size))
		if got := get(t, n, key); !bytes.Equal(got, content(key, 0, size)) {
			t.Errorf("block of %d bytes came back with %d bytes that differ", size, len(got))
		}
		if got, ok := n.Lookup(keyOf(key)); !ok || got != size {
			t.Errorf("lookup gives %d, %t, want %d", got, ok, size)
		}
	}
	if _, ok := n.Lookup(keyOf(99)); ok || get(t, n, 99) != nil {
		t.Error("a block is found that nobody stored")
	}
}

func TestABlockIsInvisibleUntilItsCommit(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, units.MiB), TenantSpec{Name: "a", Memory: units.MiB})
	p, err := n.Put(keyOf(1), 100, PutOptions{})
	if err != nil {
		t.Fatal(err)
	}
	copy(p.Bytes(), content(1, 0, 100))
	if err := p.Commit(t.Context()); !errors.Is(err, block.ErrInvalid) {
		t.Errorf("an unfilled block is stored: %v", err)
	}
	p, _ = n.Put(keyOf(1), 100, PutOptions{})
	copy(p.Bytes(), content(1, 0, 100))
	p.Fill(100)
	if get(t, n, 1) != nil {
		t.Error("a block is found before its commit")
	}
	p.Abort()
	p.Abort()
	if get(t, n, 1) != nil || n.Tenant().Stats().RAM.Used != 0 {
		t.Error("an aborted block is found, or its room is not given back")
	}
}

func TestOtherBytesOfAKeyTakeTheirPlaceAndAReaderKeepsTheOld(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, units.MiB), TenantSpec{Name: "a", Memory: units.MiB})
	mustPut(t, n, 1, content(1, 0, 9000))
	old, err := n.Get(t.Context(), keyOf(1))
	if err != nil {
		t.Fatal(err)
	}
	for version := 1; version < 50; version++ {
		mustPut(t, n, 1, content(1, version, 9000+version))
		if got := get(t, n, 1); !bytes.Equal(got, content(1, version, 9000+version)) {
			t.Fatalf("version %d is not what is found", version)
		}
	}
	if !bytes.Equal(old.Bytes(), content(1, 0, 9000)) {
		t.Error("the bytes changed under a reader")
	}
	old.Release()
	if removed, err := n.Delete(t.Context(), keyOf(1), keyOf(2)); removed != 1 || err != nil {
		t.Errorf("removed %d, %v", removed, err)
	}
	if used := n.Tenant().Stats().RAM.Used; get(t, n, 1) != nil || used != 0 {
		t.Errorf("after its removal a block is found or %d bytes are in use", used)
	}
}

func TestTheBudgetIsNeverExceededAndThePutNeverWaits(t *testing.T) {
	t.Parallel()
	c := newCache(t, 2*units.MiB)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: units.MiB})
	random := rand.New(rand.NewPCG(1, 1))
	for i := range 2000 {
		size := 1 + random.IntN(100_000)
		mustPut(t, n, i, content(i, 0, size))
		if s := n.Tenant().Stats().RAM; s.Used > s.Budget || c.arena.Resident() > c.arena.Capacity() {
			t.Fatalf("%d bytes are used of %d, %d resident of %d", s.Used, s.Budget, c.arena.Resident(), c.arena.Capacity())
		}
		if got := get(t, n, i); !bytes.Equal(got, content(i, 0, size)) {
			t.Fatalf("block %d is not found at once", i)
		}
	}
	if err := put(t.Context(), n, keyOf(1), make([]byte, 2<<20), PutOptions{}); !errors.Is(err, ErrDropped) {
		t.Errorf("a block larger than the budget: %v", err)
	}
}

func TestABlockThatIsReadOrPinnedStays(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, units.MiB), TenantSpec{Name: "a", Memory: units.MiB})
	mustPut(t, n, 1, content(1, 0, 100_000))
	mustPut(t, n, 2, content(2, 0, 100_000))
	pin, ok := n.Pin(keyOf(1))
	if !ok || pin.Size() != 100_000 {
		t.Fatal("cannot pin a block that is there")
	}
	reading, err := n.Get(t.Context(), keyOf(2))
	if err != nil {
		t.Fatal(err)
	}
	for i := 10; i < 100; i++ {
		mustPut(t, n, i, content(i, 0, 100_000))
	}
	if !bytes.Equal(reading.Bytes(), content(2, 0, 100_000)) || !bytes.Equal(get(t, n, 1), content(1, 0, 100_000)) {
		t.Error("a pinned block or one being read left")
	}
	pin.Release()
	pin.Release()
	reading.Release()
	for i := 100; i < 200; i++ {
		mustPut(t, n, i, content(i, 0, 100_000))
		get(t, n, i)
		get(t, n, i)
	}
	if get(t, n, 1) != nil || get(t, n, 2) != nil {
		t.Error("blocks stay that nobody holds any more")
	}
	if _, ok := n.Pin(keyOf(1)); ok {
		t.Error("a pin on a block that is gone")
	}
}

func TestAPutIsDroppedWhereAllIsHeld(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, units.MiB), TenantSpec{Name: "a", Memory: 400 * units.KiB})
	for i := range 3 {
		mustPut(t, n, i, content(i, 0, 128<<10))
		pin, ok := n.Pin(keyOf(i))
		if !ok {
			t.Fatal("no pin")
		}
		defer pin.Release()
	}
	err := put(t.Context(), n, keyOf(9), content(9, 0, 128<<10), PutOptions{})
	if !errors.Is(err, ErrDropped) || n.Tenant().Stats().DroppedFull != 1 {
		t.Errorf("got %v and %d drops", err, n.Tenant().Stats().DroppedFull)
	}
}

func TestATenantNeverLosesWhatIsItsOwnToAnother(t *testing.T) {
	t.Parallel()
	c := newCache(t, 4*units.MiB)
	mine := addTenant(t, c, TenantSpec{Name: "mine", Memory: 2 * units.MiB})
	other := addTenant(t, c, TenantSpec{Name: "other", Memory: units.MiB, MemoryLimit: 4 * units.MiB})
	for i := range 20 {
		mustPut(t, mine, i, content(i, 0, 96<<10))
	}
	for i := range 500 {
		mustPut(t, other, i, content(i, 1, 64<<10))
	}
	if s := other.Tenant().Stats().RAM; s.Used <= units.MiB {
		t.Errorf("a tenant borrows nothing of what is free: it has %d bytes", s.Used)
	}
	for i := range 20 {
		if !bytes.Equal(get(t, mine, i), content(i, 0, 96<<10)) {
			t.Fatalf("block %d of a tenant within its own left for another's load", i)
		}
	}
	// What is borrowed is given back as soon as its owner wants it.
	late := addTenant(t, c, TenantSpec{Name: "late", Memory: units.MiB})
	for i := range 8 {
		mustPut(t, late, i, content(i, 2, 128<<10))
	}
	for i := range 8 {
		if get(t, late, i) == nil {
			t.Fatalf("block %d of a tenant within its own did not stay", i)
		}
	}
}

func TestTenantsDoNotSeeEachOthersBlocks(t *testing.T) {
	t.Parallel()
	c := newCache(t, 4*units.MiB)
	a := addTenant(t, c, TenantSpec{Name: "a", Memory: units.MiB})
	b := addTenant(t, c, TenantSpec{Name: "b", Memory: units.MiB})
	again, err := a.Tenant().Namespace(t.Context(), block.Identity{Tenant: "credential b", Format: "test"})
	if err != nil || again.ID() != a.ID() || a.ID() == b.ID() {
		t.Fatalf("the namespace is %v and not %v: %v", again.ID(), a.ID(), err)
	}
	mustPut(t, a, 1, content(1, 0, 100))
	if _, ok := b.Lookup(keyOf(1)); ok || get(t, b, 1) != nil {
		t.Error("another tenant finds the block")
	}
	if removed, err := b.Delete(t.Context(), keyOf(1)); removed != 0 || err != nil || get(t, a, 1) == nil {
		t.Error("another tenant removes the block")
	}
	format, err := a.Tenant().Namespace(t.Context(), block.Identity{Format: "other"})
	if err != nil || get(t, format, 1) != nil {
		t.Error("another namespace of the tenant finds the block")
	}
}

func TestAPrefixIsFoundUpToItsFirstGap(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, units.MiB), TenantSpec{Name: "a", Memory: units.MiB})
	var keys []block.Key
	for i := range 10 {
		keys = append(keys, keyOf(i))
		if i != 6 {
			mustPut(t, n, i, content(i, 0, 100))
		}
	}
	if found := n.LookupPrefix(keys); found != 6 {
		t.Errorf("found %d of the prefix, want 6", found)
	}
}

func TestAChainLeavesFromItsEnd(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, units.MiB), TenantSpec{Name: "a", Memory: units.MiB})
	opts := PutOptions{}
	for i := range 10 {
		if err := put(t.Context(), n, keyOf(i), content(i, 0, 64<<10), opts); err != nil {
			t.Fatal(err)
		}
		opts = PutOptions{Parent: keyOf(i), HasParent: true}
	}
	for i := 100; i < 111; i++ {
		mustPut(t, n, i, content(i, 0, 64<<10))
	}
	keys := make([]block.Key, 10)
	for i := range keys {
		keys[i] = keyOf(i)
	}
	there := 0
	for i := range 10 {
		if _, ok := n.Lookup(keyOf(i)); ok {
			there++
		}
	}
	if found := n.LookupPrefix(keys); found != there || found == 0 || found == 10 {
		t.Errorf("of a chain %d blocks are there and %d of its beginning", there, found)
	}
}

func TestADamagedBlockInRAMIsAMissAndAnEvent(t *testing.T) {
	t.Parallel()
	c := newCache(t, units.MiB)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: units.MiB})
	mustPut(t, n, 1, content(1, 0, 5000))
	b, err := n.Get(t.Context(), keyOf(1))
	if err != nil {
		t.Fatal(err)
	}
	b.Bytes()[1234] ^= 4
	b.Release()
	if get(t, n, 1) != nil {
		t.Error("damaged bytes are given out")
	}
	list, _ := c.Events(0, 100)
	if len(list) != 2 || list[1].Kind != EventDamaged || list[1].Key != keyOf(1) || n.Tenant().Stats().RAM.Damaged != 1 {
		t.Errorf("the events are %+v", list)
	}
	mustPut(t, n, 1, content(1, 0, 5000))
	if get(t, n, 1) == nil {
		t.Error("the key cannot be stored again")
	}
}

func TestReadersAndWritersOfManyKeysSeeWholeBlocks(t *testing.T) {
	t.Parallel()
	c := newCache(t, units.MiB)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: units.MiB})
	var all sync.WaitGroup
	for worker := range 4 {
		all.Go(func() {
			random := rand.New(rand.NewPCG(uint64(worker), 9))
			for range 2000 {
				key := random.IntN(40)
				size := 20_000 + key
				switch random.IntN(5) {
				case 0:
					if _, err := n.Delete(t.Context(), keyOf(key)); err != nil {
						t.Error(err)
					}
				case 1, 2:
					data := bytes.Repeat([]byte{byte(key), byte(random.IntN(256))}, size/2)
					if err := put(t.Context(), n, keyOf(key), data, PutOptions{}); err != nil && !errors.Is(err, ErrDropped) {
						t.Error(err)
					}
				default:
					b, err := n.Get(t.Context(), keyOf(key))
					if err != nil {
						continue
					}
					data := b.Bytes()
					if !bytes.Equal(data, bytes.Repeat(data[:2], len(data)/2)) || data[0] != byte(key) || len(data) != size/2*2 {
						t.Errorf("block %d is mixed", key)
					}
					b.Release()
				}
			}
		})
	}
	all.Wait()
}

func TestATenantThatDidNotOpenNamesNoBlocks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := onDrive(t, dir)
	defer closeCache(t, c)
	known := newTenant(c, TenantSpec{Kind: TenantCredential, Name: "a"})
	if err := errors.Join(os.MkdirAll(known.dir(), 0o700), known.writeRecord(newRecord(TenantCredential, "a"))); err != nil {
		t.Fatal(err)
	}
	blocks := filepath.Join(dir, blocksDir, known.folder())
	if err := os.WriteFile(blocks, nil, 0o600); err != nil { // instead of a directory
		t.Fatal(err)
	}
	spec := TenantSpec{Kind: TenantCredential, Name: "a", Memory: units.MiB, NVMe: 40 * units.MiB}
	if _, err := c.AddTenant(t.Context(), spec); err == nil {
		t.Fatal("a tenant is open without its drive")
	}
	tenant, err := c.Tenant(TenantCredential, "a")
	if err == nil {
		// Its place would be another's once the drives tell which there are.
		if _, err := tenant.Namespace(t.Context(), block.Identity{Format: "test"}); !errors.Is(err, ErrUnknown) {
			t.Errorf("naming blocks gave %v", err)
		}
	}
	if err := os.Remove(blocks); err != nil {
		t.Fatal(err)
	}
	mustPut(t, addTenant(t, c, spec), 1, content(1, 0, 1000))
}

func TestARemovedTenantIsGone(t *testing.T) {
	t.Parallel()
	c := newCache(t, units.MiB)
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: units.MiB})
	mustPut(t, n, 1, content(1, 0, 5000))
	reading, err := n.Get(t.Context(), keyOf(1))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.RemoveTenant(t.Context(), TenantCredential, "a"); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(reading.Bytes(), content(1, 0, 5000)) {
		t.Error("the bytes went under a reader")
	}
	reading.Release()
	if err := put(t.Context(), n, keyOf(1), []byte("x"), PutOptions{}); !errors.Is(err, ErrRemoved) {
		t.Errorf("a removed tenant stores: %v", err)
	}
	if _, err := c.Tenant(TenantCredential, "a"); !errors.Is(err, ErrUnknown) {
		t.Errorf("got %v", err)
	}
	again := addTenant(t, c, TenantSpec{Name: "a", Memory: units.MiB})
	if get(t, again, 1) != nil {
		t.Error("a tenant of the same name has the blocks of the one before")
	}
	if c.arena.Used() != 0 {
		t.Errorf("%d bytes of a removed tenant are in use", c.arena.Used())
	}
}

func BenchmarkGetRAM(b *testing.B) {
	for _, size := range []int{64 << 10, 2 << 20} {
		for _, every := range []int{1, 64} {
			b.Run(fmt.Sprintf("%dKiB/verify=%d", size>>10, every), func(b *testing.B) {
				c, err := OpenCache(CacheOptions{Dir: b.TempDir(), Memory: 600 * units.MiB, VerifyEvery: every})
				if err != nil {
					b.Fatal(err)
				}
				defer func() { _ = c.Close() }()
				tenant, err := c.AddTenant(b.Context(), TenantSpec{Kind: TenantCredential, Name: "a", Memory: 600 * units.MiB})
				if err != nil {
					b.Fatal(err)
				}
				n, err := tenant.Namespace(b.Context(), block.Identity{})
				if err != nil {
					b.Fatal(err)
				}
				blocks := 512 << 20 / size
				for i := range blocks {
					if err := put(b.Context(), n, keyOf(i), bytes.Repeat([]byte{byte(i)}, size), PutOptions{}); err != nil {
						b.Fatal(err)
					}
				}
				to := make([]byte, size)
				b.SetBytes(int64(size))
				for i := 0; b.Loop(); i++ {
					got, err := n.Get(b.Context(), keyOf(i%blocks))
					if err != nil {
						b.Fatal(err)
					}
					copy(to, got.Bytes())
					got.Release()
				}
			})
		}
	}
}

func TestWhatIsKeptBesideABlockCountsNoTokens(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, units.MiB), TenantSpec{Name: "a", Memory: units.MiB, BlockTokens: 256})
	mustPut(t, n, 1, content(1, 0, 5000))
	mustPut(t, n, 2, content(2, 0, 28))
	get(t, n, 1)
	get(t, n, 2)
	if s := n.Tenant().Stats().RAM; s.HitTokens != 256 || s.Hits != 2 {
		t.Errorf("%d hits save %d tokens, want one block's 256", s.Hits, s.HitTokens)
	}
}

func TestABlockThatIsLargerThanAnyIsCounted(t *testing.T) {
	t.Parallel()
	n := addTenant(t, newCache(t, units.MiB), TenantSpec{Name: "a", Memory: units.MiB})
	if _, err := n.Put(keyOf(1), block.MaxSize+1, PutOptions{}); !errors.Is(err, block.ErrInvalid) {
		t.Fatalf("got %v", err)
	}
	if s := n.Tenant().Stats(); s.DroppedLarge != 1 {
		t.Errorf("%d blocks are counted as too large", s.DroppedLarge)
	}
}
