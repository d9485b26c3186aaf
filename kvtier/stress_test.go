package kvtier

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

// oracle says which versions a get may give while many put and delete at once. A
// version is superseded where something that began after it was committed was
// done before the get began.
type oracle struct {
	clock    atomic.Int64
	next     atomic.Int64
	ends     []atomic.Int64 // of versions: when their commit was done, 0 where it was not
	barriers []atomic.Int64 // of keys: when the last of what is done had begun
}

func newOracle(keys, versions int) *oracle {
	return &oracle{ends: make([]atomic.Int64, versions), barriers: make([]atomic.Int64, keys)}
}

func (o *oracle) now() int64 { return o.clock.Add(1) }

// done notes that what began at start has changed a key.
func (o *oracle) done(key int, start int64) {
	for {
		before := o.barriers[key].Load()
		if before >= start || o.barriers[key].CompareAndSwap(before, start) {
			return
		}
	}
}

// stamp fills a block with bytes that tell key and version.
func stamp(data []byte, key, version int) {
	var word [16]byte
	binary.LittleEndian.PutUint64(word[:], uint64(key))
	binary.LittleEndian.PutUint64(word[8:], uint64(version))
	for n := copy(data, word[:]); n < len(data); n *= 2 {
		copy(data[n:], data[:n])
	}
}

// stamped reads them, and says whether all bytes are the version's.
func stamped(data []byte) (key, version int, whole bool) {
	if len(data) < 16 {
		return 0, 0, false
	}
	for i := 16; i < len(data); i++ {
		if data[i] != data[i-16] {
			return 0, 0, false
		}
	}
	return int(binary.LittleEndian.Uint64(data)), int(binary.LittleEndian.Uint64(data[8:])), true
}

// stressed is one tenant's namespace under load. It is another one after the
// tenant was removed or detached.
type stressed struct {
	cache  *Cache
	oracle *oracle
	name   string

	mu    sync.RWMutex
	spec  TenantSpec
	space *Namespace
}

func (s *stressed) now() *Namespace {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.space
}

// add adds the tenant, anew or with other budgets.
func (s *stressed) add(ctx context.Context, change func(spec *TenantSpec)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if change != nil {
		change(&s.spec)
	}
	t, err := s.cache.AddTenant(ctx, s.spec)
	if err != nil {
		return err
	}
	s.space, err = t.Namespace(ctx, block.Identity{Format: "stress"})
	return err
}

const stressKeys = 48

func stressSize(key, version int) int {
	return []int{64, 4000, 20_000, 65_536, 150_000}[(key+version)%5] + key
}

func (s *stressed) put(ctx context.Context, key int) error {
	o := s.oracle
	start, version := o.now(), int(o.next.Add(1))
	if version >= len(o.ends) {
		return nil
	}
	p, err := s.now().Put(keyOf(key), stressSize(key, version), PutOptions{Parent: keyOf(key - 1), HasParent: key%6 > 0})
	if err != nil {
		return tolerate(err)
	}
	defer p.Abort()
	stamp(p.Bytes(), key, version)
	p.Fill(len(p.Bytes()))
	if err := p.Commit(ctx); err != nil {
		return tolerate(err)
	}
	o.ends[version].Store(o.now())
	o.done(key, start)
	return nil
}

// tolerate is nil for what load and the end of tenants explain.
func tolerate(err error) error {
	if errors.Is(err, ErrDropped) || errors.Is(err, ErrRemoved) || errors.Is(err, ErrMiss) || errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

func (s *stressed) delete(ctx context.Context, keys ...int) error {
	start := s.oracle.now()
	names := make([]block.Key, len(keys))
	for i, key := range keys {
		names[i] = keyOf(key)
	}
	n := s.now()
	if _, err := n.Delete(ctx, names...); err != nil {
		return tolerate(err)
	}
	if n != s.now() {
		return nil // it was another tenant's life, whose blocks may be gone or not
	}
	for _, key := range keys {
		s.oracle.done(key, start)
	}
	return nil
}

func (s *stressed) get(ctx context.Context, key int) error {
	o := s.oracle
	barrier := o.barriers[key].Load()
	b, err := s.now().Get(ctx, keyOf(key))
	if err != nil {
		return tolerate(err)
	}
	defer b.Release()
	for range 2 {
		k, version, whole := stamped(b.Bytes())
		if !whole || k != key || version >= len(o.ends) || len(b.Bytes()) != stressSize(key, version) {
			return fmt.Errorf("%s: key %d: bytes of key %d, version %d, whole %t, %d of them", s.name, key, k, version, whole, len(b.Bytes()))
		}
		if end := o.ends[version].Load(); end != 0 && end < barrier {
			return fmt.Errorf("%s: key %d: version %d ended at %d, and what began at %d was done before the get", s.name, key, version, end, barrier)
		}
	}
	return nil
}

func (s *stressed) pin(ctx context.Context, key int) error {
	pin, ok := s.now().Pin(keyOf(key))
	if !ok {
		return nil
	}
	defer pin.Release()
	return s.get(ctx, key)
}

// remove ends the tenant and begins it anew: nothing of before is found.
func (s *stressed) remove(ctx context.Context) error {
	start := s.oracle.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.cache.RemoveTenant(ctx, s.spec.Kind, s.spec.Name); err != nil {
		return err
	}
	for key := range stressKeys {
		s.oracle.done(key, start)
	}
	return s.addLocked(ctx)
}

func (s *stressed) addLocked(ctx context.Context) error {
	t, err := s.cache.AddTenant(ctx, s.spec)
	if err != nil {
		return err
	}
	s.space, err = t.Namespace(ctx, block.Identity{Format: "stress"})
	return err
}

func (s *stressed) detach(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.cache.DetachTenant(ctx, s.spec.Kind, s.spec.Name); err != nil {
		return err
	}
	return s.addLocked(ctx)
}

func (s *stressed) clear(ctx context.Context) error {
	start := s.oracle.now()
	if _, err := s.now().Tenant().Clear(ctx); err != nil {
		return tolerate(err)
	}
	for key := range stressKeys {
		s.oracle.done(key, start)
	}
	return nil
}

// one does something by chance.
func (s *stressed) one(ctx context.Context, random *rand.Rand) error {
	key := random.IntN(stressKeys)
	switch n := random.IntN(100); {
	case n < 35:
		return s.put(ctx, key)
	case n < 75:
		return s.get(ctx, key)
	case n < 82:
		return s.delete(ctx, key)
	case n < 84:
		return s.delete(ctx, key, random.IntN(stressKeys), random.IntN(stressKeys))
	case n < 92:
		return s.pin(ctx, key)
	case n < 95:
		brief, cancel := context.WithCancel(ctx)
		go cancel()
		return errors.Join(s.put(brief, key), s.get(brief, key))
	case n < 97:
		s.now().LookupPrefix([]block.Key{keyOf(key), keyOf((key + 1) % stressKeys)})
		_ = s.now().Tenant().Stats()
	default:
		return s.get(ctx, key)
	}
	return nil
}

// upset changes budgets and tenants.
func (s *stressed) upset(ctx context.Context, random *rand.Rand) error {
	switch random.IntN(8) {
	case 0:
		return s.add(ctx, func(spec *TenantSpec) { spec.Memory = units.Bytes(1+random.IntN(3)) * 512 * units.KiB })
	case 1, 2:
		return s.add(ctx, func(spec *TenantSpec) { spec.NVMe = units.Bytes(4+random.IntN(4)) * 4 * units.MiB })
	case 3:
		s.cache.SetMemory(units.Bytes(2+random.IntN(4)) * units.MiB)
	case 4:
		return s.detach(ctx)
	case 5:
		return s.clear(ctx)
	case 6:
		_, err := s.now().Tenant().PinBlocks(ctx, keyOf(random.IntN(stressKeys)))
		if errors.Is(err, ErrNoSpace) {
			return nil
		}
		return tolerate(err)
	default:
		return s.remove(ctx)
	}
	return nil
}

// TestManyAtOnceFindWhatWasCommittedAndNotSuperseded has many put, get, pin and delete
// while budgets change and tenants come and go, and compares versions.
func TestManyAtOnceFindWhatWasCommittedAndNotSuperseded(t *testing.T) {
	t.Parallel()
	workers, ops := 6, 500
	if testing.Short() {
		workers, ops = 4, 150
	}
	dir := t.TempDir()
	open := func() *Cache {
		transit := units.Bytes(0)
		c, err := OpenCache(CacheOptions{
			Dir: dir, Memory: 4 * units.MiB, Transit: &transit, VerifyEvery: 2, SegmentSize: 4 << 20, CheckpointEvery: 30 * time.Millisecond,
			Log: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := open()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ran := make(chan error, 1)
	go func() { ran <- c.Run(ctx) }()
	var tenants []*stressed
	for _, name := range []string{"steady", "upset", "other"} {
		s := &stressed{cache: c, oracle: newOracle(stressKeys, 200_000), name: name, spec: TenantSpec{
			Kind: TenantCredential, Name: name, Memory: units.MiB, MemoryLimit: 3 * units.MiB, NVMe: 24 * units.MiB, AdmitAll: name != "other",
		}}
		if err := s.add(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		tenants = append(tenants, s)
	}
	var all sync.WaitGroup
	failed := make(chan error, 64)
	for worker := range workers * len(tenants) {
		s := tenants[worker%len(tenants)]
		random := rand.New(rand.NewPCG(uint64(worker), 21))
		all.Go(func() {
			for range ops {
				if err := s.one(t.Context(), random); err != nil {
					failed <- err
					return
				}
			}
		})
	}
	all.Go(func() {
		random := rand.New(rand.NewPCG(99, 21))
		for range ops / 12 {
			if err := tenants[1].upset(t.Context(), random); err != nil {
				failed <- fmt.Errorf("upset: %w", err)
				return
			}
		}
	})
	all.Wait()
	close(failed)
	for err := range failed {
		t.Error(err)
	}
	cancel()
	if err := <-ran; err != nil {
		t.Error(err)
	}
	for _, s := range tenants {
		if st := s.now().Tenant().Stats(); st.Pins != 0 || st.RAM.Used > st.RAM.Budget {
			t.Errorf("%s: %d pins are left, %d bytes used of %d", s.name, st.Pins, st.RAM.Used, st.RAM.Budget)
		}
	}
	closeCache(t, c)
	c = open()
	defer closeCache(t, c)
	for _, s := range tenants {
		s.cache = c
		if err := s.add(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		for key := range stressKeys {
			if err := s.get(t.Context(), key); err != nil {
				t.Error(err)
			}
		}
	}
}
