package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"runtime/metrics"
	"slices"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/index"
	"github.com/hearth-dev/hearth/units"
)

// kvStore is a cache of one tenant in this process.
type kvStore struct {
	cache  *kvtier.Cache
	tenant *kvtier.Tenant
	space  *kvtier.Namespace
	end    func()
}

// openStore opens a store that runs its writers until its end.
func openStore(ctx context.Context, dir string, memory, nvme units.Bytes, change func(*kvtier.CacheOptions)) (*kvStore, error) {
	transit := 64 * units.MiB
	opts := kvtier.CacheOptions{Dir: dir, Memory: memory, Transit: &transit}
	if change != nil {
		change(&opts)
	}
	c, err := kvtier.OpenCache(opts)
	if err != nil {
		return nil, err
	}
	s := &kvStore{cache: c, end: func() { _ = c.Close() }}
	s.tenant, err = c.AddTenant(ctx, kvtier.TenantSpec{Kind: kvtier.TenantCredential, Name: "bench", Memory: memory, NVMe: nvme, AdmitAll: nvme > 0})
	if err == nil {
		s.space, err = s.tenant.Namespace(ctx, block.Identity{Format: "bench"})
	}
	if err != nil {
		s.end()
		return nil, err
	}
	running, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { defer close(done); _ = c.Run(running) }()
	s.end = func() { cancel(); <-done; _ = c.Close() }
	return s, nil
}

func blockKey(n int) (k block.Key) {
	binary.BigEndian.PutUint64(k.Hash[:], uint64(n))
	return k
}

// store puts a block and tells how long it took beyond its own copy and checksum.
func (s *kvStore) store(ctx context.Context, n int, data []byte) (waited time.Duration, err error) {
	began := time.Now()
	p, err := s.space.Put(blockKey(n), len(data), kvtier.PutOptions{})
	if err != nil {
		return 0, err
	}
	waited = time.Since(began)
	for at := 0; at < len(data); at += fillStep {
		fill := data[at:min(at+fillStep, len(data))]
		copy(p.Bytes()[at:], fill)
		p.Fill(len(fill))
	}
	began = time.Now()
	err = p.Commit(ctx)
	return waited + time.Since(began), err
}

// until waits for the tenant to be so; it looks whenever a block changed.
func (s *kvStore) until(so func(kvtier.TenantStats) bool) {
	for {
		_, changed := s.cache.Events(math.MaxUint64, 1)
		if so(s.tenant.Stats()) {
			return
		}
		<-changed
	}
}

// fillStep is how much is copied before it is hashed.
const fillStep = 128 << 10

// anonymous is memory that lies at pages, as what is read around the page cache
// needs, and outside of the heap.
func anonymous(size int) ([]byte, func(), error) {
	m, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, nil, fmt.Errorf("map memory: %w", err)
	}
	fillPattern(m)
	return m, func() { _ = unix.Munmap(m) }, nil
}

// fillPattern makes all pages of memory there, each other than the rest.
func fillPattern(m []byte) {
	for i := 0; i < len(m); i += 512 {
		binary.LittleEndian.PutUint64(m[i:], uint64(i)*0x9E3779B97F4A7C15)
	}
}

// rate is bytes per second.
func rate(bytes int64, took time.Duration) float64 { return float64(bytes) / took.Seconds() }

var coreSizes = []units.Bytes{64 * units.KiB, 512 * units.KiB, 2 * units.MiB, 8 * units.MiB, 32 * units.MiB}

// ramRows are reads and writes of blocks in RAM beside plain copies, over a working
// set that no cache of a processor holds.
func ramRows(ctx context.Context, dir string, o options) ([]Row, error) {
	var rows []Row
	plain, free, err := anonymous(int(kvWorkingSet))
	if err != nil {
		return nil, err
	}
	defer free()
	other, freeOther, err := anonymous(int(kvWorkingSet))
	if err != nil {
		return nil, err
	}
	defer freeOther()
	for _, size := range coreSizes {
		for _, every := range []int{64, 1} {
			s, err := openStore(ctx, filepath.Join(dir, fmt.Sprint(size, every)), kvWorkingSet, 0, func(o *kvtier.CacheOptions) { o.VerifyEvery = every })
			if err != nil {
				return nil, err
			}
			more, err := s.ramRows(ctx, o, int(size), every, plain, other)
			s.end()
			if err != nil {
				return nil, err
			}
			for _, row := range more {
				o.progress(describe(row))
			}
			rows = append(rows, more...)
		}
	}
	return rows, nil
}

func (s *kvStore) ramRows(ctx context.Context, o options, size, every int, plain, other []byte) ([]Row, error) {
	n := len(plain) / size
	at := func(i int) []byte { return plain[i*size : (i+1)*size] }
	for i := range n {
		if _, err := s.store(ctx, i, at(i)); err != nil {
			return nil, err
		}
	}
	to := make([]byte, size)
	get := func() (float64, error) {
		began := time.Now()
		for i := range n {
			b, err := s.space.Get(ctx, blockKey(i))
			if err != nil {
				return 0, err
			}
			copy(to, b.Bytes())
			b.Release()
		}
		return rate(int64(n*size), time.Since(began)), nil
	}
	copying := contender{"memcpy", func() (float64, error) {
		began := time.Now()
		for i := range n {
			copy(to, at(i))
		}
		return rate(int64(n*size), time.Since(began)), nil
	}}
	hashing := contender{"copy + xxh3", func() (float64, error) {
		began := time.Now()
		for i := range n {
			copy(to, at(i))
			xxh3.Hash128(at(i))
		}
		return rate(int64(n*size), time.Since(began)), nil
	}}
	row := Row{Name: fmt.Sprintf("ram_get_%s", units.Bytes(size)), Unit: "B/s", Better: higher, Aim: 0.9, Note: "one read in 64 is verified; must 0.9, goal 0.95"}
	if every == 1 {
		row.Name, row.Note = row.Name+"_verified", "every read is verified; must 0.9"
		row, err := rounds(row, o.pairs, get, hashing)
		return []Row{row}, err
	}
	row, err := rounds(row, o.pairs, get, copying)
	if err != nil {
		return nil, err
	}
	next := n
	put := func() (float64, error) {
		began := time.Now()
		for i := range n {
			if _, err := s.store(ctx, next, at(i)); err != nil {
				return 0, err
			}
			next++
		}
		return rate(int64(n*size), time.Since(began)), nil
	}
	puts, err := rounds(Row{
		Name: fmt.Sprintf("ram_put_%s", units.Bytes(size)), Unit: "B/s", Better: higher, Note: "with its checksum, the tier full: each block moves another out",
	}, o.pairs, put, contender{"copy to as much memory + xxh3", func() (float64, error) {
		began := time.Now()
		for i := range n {
			copy(other[i*size:(i+1)*size], at(i))
			xxh3.Hash128(at(i))
		}
		return rate(int64(n*size), time.Since(began)), nil
	}})
	return []Row{row, puts}, err
}

// indexRows are lookups and the memory of the index, of a million blocks.
func indexRows(_ context.Context, _ string, o options) ([]Row, error) {
	const blocks = 1_000_000
	x := index.New()
	worst := 0.0
	for i := range blocks {
		x.SetLoc(x.Add(index.PrintOf(7, 0, blockKey(i)), 0, 2<<20, 0), uint64(i)+1)
		if i > blocks/4 && i%1000 == 0 {
			worst = max(worst, float64(x.Bytes())/float64(i))
		}
	}
	const batch = 64
	prints, ids := make([]index.Print, batch), make([]index.ID, batch)
	random := rand.New(rand.NewPCG(1, 2))
	keys := make([]block.Key, 1<<18)
	for i := range keys {
		keys[i] = blockKey(random.IntN(blocks))
	}
	lookups := func() (float64, error) {
		began := time.Now()
		for at := 0; at < len(keys); at += batch {
			for i := range prints {
				prints[i] = index.PrintOf(7, 0, keys[at+i])
			}
			x.FindAll(prints, ids)
			if slices.Contains(ids, 0) {
				return 0, fmt.Errorf("a block of the index is not found")
			}
		}
		return float64(len(keys)) / time.Since(began).Seconds(), nil
	}
	rows := []Row{}
	row, err := alone(Row{Name: "index_lookups", Unit: "1/s", Better: higher, Aim: 5e6, Note: "one core, a million blocks, 64 keys a call, fingerprints included; must 5 M, goal 10 M"}, o.pairs, lookups)
	if err != nil {
		return nil, err
	}
	rows = append(rows, row)
	row, err = alone(Row{Name: "index_bytes", Unit: "B/block", Better: lower, Aim: 64, Note: fmt.Sprintf("a million blocks on drives; at most %.1f while it grew; must 64, goal 48", worst)}, 1, func() (float64, error) {
		return float64(x.Bytes()) / blocks, nil
	})
	rows = append(rows, row)
	for _, r := range rows {
		o.progress(describe(r))
	}
	return rows, err
}

// waitRows are what a put waits beyond its own copy while the tier is full and the
// drive is written, and what the garbage collector stops meanwhile.
func waitRows(ctx context.Context, dir string, o options) ([]Row, error) {
	s, err := openStore(ctx, filepath.Join(dir, "kv"), 256*units.MiB, 2*units.GiB, nil)
	if err != nil {
		return nil, err
	}
	defer s.end()
	data, free, err := anonymous(256 << 10)
	if err != nil {
		return nil, err
	}
	defer free()
	next := 0
	var p50 []float64
	puts := func() (float64, error) {
		var waits []float64
		for range 4000 {
			wait, err := s.store(ctx, next, data)
			if err != nil {
				return 0, err
			}
			next++
			waits = append(waits, float64(wait.Nanoseconds())/1e3)
		}
		slices.Sort(waits)
		p50 = append(p50, waits[len(waits)/2])
		return waits[len(waits)*99/100], nil
	}
	for range 2 { // the tier is full before it counts
		if _, err := puts(); err != nil {
			return nil, err
		}
	}
	p50 = nil
	before := pauses()
	row, err := alone(Row{Name: "put_wait_p99", Unit: "us", Better: lower, Aim: 100}, max(o.pairs, 5), puts)
	if err != nil {
		return nil, err
	}
	row.Note = fmt.Sprintf("256 KiB, beyond its own copy and checksum, the tier full and its drive written beside; p50 %.1f us; %d of %d blocks written; must 100", median(p50), s.tenant.Stats().Written, next)
	gc := Row{Name: "gc_pause_p99", Unit: "us", Better: lower, Note: "stops of the world for the collector under that load"}
	gc.Value, gc.Met = 1e6*gainedQuantile(before, pauses(), 0.99), true
	for _, r := range []Row{row, gc} {
		o.progress(describe(r))
	}
	return []Row{row, gc}, nil
}

func pauses() *metrics.Float64Histogram {
	sample := []metrics.Sample{{Name: "/sched/pauses/total/gc:seconds"}}
	metrics.Read(sample)
	h := sample[0].Value.Float64Histogram()
	return &metrics.Float64Histogram{Counts: slices.Clone(h.Counts), Buckets: slices.Clone(h.Buckets)}
}

// gainedQuantile is the quantile of what a histogram gained; 0 for nothing.
func gainedQuantile(before, after *metrics.Float64Histogram, q float64) float64 {
	var total, seen uint64
	gained := make([]uint64, len(after.Counts))
	for i := range gained {
		gained[i] = after.Counts[i] - before.Counts[i]
		total += gained[i]
	}
	for i, n := range gained {
		if seen += n; total > 0 && float64(seen) >= q*float64(total) {
			if above := after.Buckets[i+1]; !math.IsInf(above, 1) {
				return above
			}
			return after.Buckets[i]
		}
	}
	return 0
}
