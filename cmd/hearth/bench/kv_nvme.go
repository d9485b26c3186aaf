package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/units"
)

var nvmeConns = []int{1, 4, 16}

// How much the rows of drives are made of: what a store has there, at least, and
// what one measurement moves.
const (
	nvmeSet      = units.GiB
	nvmeSetFull  = 8 * units.GiB
	nvmeMove     = 256 * units.MiB
	nvmeMoveFull = units.GiB
	nvmeMemory   = 128 * units.MiB // RAM of the store, at least
)

// nvmeBench is a store of blocks of one size on a drive, and a plain file beside
// it. Blocks and plain reads land in as much memory: in one buffer over and over,
// which nobody looks at, a plain read would be faster than any that is for use. What
// a drive does depends on the pages of the memory, so there is a reference for each.
type nvmeBench struct {
	*kvStore
	size, blocks, moved int
	next                int // the block that is stored next
	raw                 *os.File
	rawNext             int
	memory, plain, from []byte // plain has no huge pages
	frees               []func()
}

// nvmeRows are reads and writes of blocks on a drive beside the same from a plain
// file, both around the page cache.
func nvmeRows(ctx context.Context, dir string, o options) ([]Row, error) {
	var rows []Row
	for _, size := range coreSizes {
		more, err := nvmeRowsOf(ctx, filepath.Join(dir, size.String()), o, int(size))
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

func nvmeRowsOf(ctx context.Context, dir string, o options, size int) ([]Row, error) {
	n, err := newNVMeBench(ctx, dir, o, size)
	if err != nil {
		return nil, err
	}
	defer n.end()
	var rows []Row
	row := func(name, note string, own func() (float64, error), refs ...contender) error {
		row, err := rounds(Row{Name: name, Unit: "B/s", Better: higher, Aim: 0.9, Note: note + "; must 0.9, goal 0.95"}, o.pairs, own, refs...)
		if err != nil {
			return err
		}
		o.progress(describe(row))
		rows = append(rows, row)
		return nil
	}
	for _, conns := range nvmeConns {
		err := row(fmt.Sprintf("nvme_put_%s_%dc", units.Bytes(size), conns), "from the store of a block to its record on the drive",
			func() (float64, error) { return n.put(ctx, conns) },
			contender{"raw O_DIRECT pwrite", func() (float64, error) { return n.rawPut(conns, n.plain) }},
			contender{"the same of huge pages", func() (float64, error) { return n.rawPut(conns, n.from) }})
		if err != nil {
			return nil, err
		}
	}
	for _, conns := range nvmeConns {
		err := row(fmt.Sprintf("nvme_get_%s_%dc", units.Bytes(size), conns), "verified",
			func() (float64, error) { return n.get(ctx, conns) },
			contender{"raw O_DIRECT pread into as much memory", func() (float64, error) { return n.rawGet(conns, n.plain) }},
			contender{"the same of huge pages", func() (float64, error) { return n.rawGet(conns, n.memory) }})
		if err != nil {
			return nil, err
		}
	}
	return rows, nil
}

// newNVMeBench makes the store and the plain file, and fills both once.
func newNVMeBench(ctx context.Context, dir string, o options, size int) (n *nvmeBench, err error) {
	set, move := nvmeSet, nvmeMove
	if o.full {
		set, move = nvmeSetFull, nvmeMoveFull
	}
	most := nvmeConns[len(nvmeConns)-1]
	memory := max(nvmeMemory, units.Bytes((most+4)*size))
	set = max(set, 4*memory)
	n = &nvmeBench{size: size, blocks: int(set) / size, moved: max(int(move)/size, 2*most)}
	n.frees = append(n.frees, func() { _ = os.RemoveAll(dir) }) // the next size needs the room
	defer func() {
		if err != nil {
			n.end()
		}
	}()
	for _, m := range []struct {
		to     *[]byte
		advice int
	}{{&n.from, unix.MADV_HUGEPAGE}, {&n.memory, unix.MADV_HUGEPAGE}, {&n.plain, unix.MADV_NOHUGEPAGE}} {
		if err == nil {
			*m.to, err = n.allocate(int(memory), m.advice)
		}
	}
	if err == nil {
		n.kvStore, err = openStore(ctx, filepath.Join(dir, "kv"), memory, set, nil)
	}
	if err != nil {
		return n, err
	}
	n.frees = append(n.frees, n.kvStore.end)
	if n.raw, err = os.OpenFile(filepath.Join(dir, "raw"), os.O_CREATE|os.O_RDWR|syscall.O_DIRECT, 0o600); err != nil {
		return n, fmt.Errorf("open a plain file around the page cache: %w", err)
	}
	// One that is open costs nothing once it has no name.
	n.frees = append(n.frees, func() { _ = n.raw.Close() })
	if err = os.Remove(n.raw.Name()); err == nil {
		err = unix.Fallocate(int(n.raw.Fd()), 0, 0, int64(n.blocks*size))
	}
	if err != nil {
		return n, fmt.Errorf("allocate the plain file: %w", err)
	}
	// All of the plain file has data, and every segment has been used before.
	for n.rawNext < n.blocks && err == nil {
		_, err = n.rawPut(1, n.from)
	}
	for n.next < n.blocks*5/4 && err == nil {
		_, err = n.put(ctx, 1)
	}
	return n, err
}

// end gives everything back, what came last first.
func (n *nvmeBench) end() {
	for _, free := range n.frees {
		defer free()
	}
	n.frees = nil
}

// allocate is memory of the pages that are asked for, where the kernel has them.
func (n *nvmeBench) allocate(size, advice int) ([]byte, error) {
	m, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("map memory: %w", err)
	}
	n.frees = append(n.frees, func() { _ = unix.Munmap(m) })
	_ = unix.Madvise(m, advice) // it is no less memory without
	fillPattern(m)
	return m, nil
}

// part is the i-th part of memory that has the size of a block, over and over.
func (n *nvmeBench) part(m []byte, i int) []byte {
	at := i % (len(m) / n.size) * n.size
	return m[at : at+n.size]
}

// put stores blocks from so many goroutines until they are on the drive.
func (n *nvmeBench) put(ctx context.Context, conns int) (float64, error) {
	written := n.tenant.Stats().Written
	dropped := func(st kvtier.TenantStats) bool { return st.DroppedDrive+st.DroppedWear+st.QueueFull > 0 }
	first := n.next
	n.next += n.moved
	var turn sync.Mutex
	var under atomic.Int64 // bytes of blocks that are about to wait
	return parallel(conns, n.moved, n.size, func(i, _ int) error {
		// The writer is the bound here: who stores waits for it, so that nothing is
		// dropped. As much may wait as the store lets.
		turn.Lock()
		about := under.Load()
		n.until(func(st kvtier.TenantStats) bool {
			waiting := int64(st.Waiting) + about
			about = under.Load() // before the next look
			return waiting == 0 || waiting+int64(n.size) <= int64(len(n.memory)/4) || dropped(st)
		})
		under.Add(int64(n.size))
		turn.Unlock()
		_, err := n.store(ctx, first+i, n.part(n.from, i))
		under.Add(-int64(n.size))
		return err
	}, func() error {
		n.until(func(st kvtier.TenantStats) bool { return st.Written >= written+int64(n.moved) || dropped(st) })
		if st := n.tenant.Stats(); dropped(st) {
			return fmt.Errorf("blocks were not written: %+v", st)
		}
		return nil
	})
}

func (n *nvmeBench) rawPut(conns int, from []byte) (float64, error) {
	first := n.rawNext
	n.rawNext += n.moved
	return parallel(conns, n.moved, n.size, func(i, _ int) error {
		_, err := n.raw.WriteAt(n.part(from, i), int64((first+i)%n.blocks*n.size))
		return err
	}, nil)
}

// get reads blocks that are on the drive alone, in so many goroutines.
func (n *nvmeBench) get(ctx context.Context, conns int) (float64, error) {
	first := n.next - n.blocks/2
	return parallel(conns, n.moved, n.size, func(int, int) error {
		for {
			// What is in RAM does not count: the next is asked.
			b, err := n.space.Get(ctx, blockKey(first+rand.IntN(n.blocks/2)))
			if err != nil {
				return err
			}
			tier := b.Tier()
			b.Release()
			if tier == kvtier.TierNVMe {
				return nil
			}
		}
	}, nil)
}

func (n *nvmeBench) rawGet(conns int, to []byte) (float64, error) {
	slots := len(to) / n.size / conns
	return parallel(conns, n.moved, n.size, func(i, conn int) error {
		_, err := n.raw.ReadAt(n.part(to, conn*slots+i/conns%slots), int64(rand.IntN(n.blocks)*n.size))
		return err
	}, nil)
}

// parallel does n things of so many bytes each in conns goroutines, then what is
// at the end, and gives bytes per second.
func parallel(conns, n, size int, do func(i, conn int) error, end func() error) (float64, error) {
	var all sync.WaitGroup
	var next atomic.Int64
	errs := make([]error, conns+1)
	began := time.Now()
	for c := range conns {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < n && errs[c] == nil; i = int(next.Add(1)) - 1 {
				errs[c] = do(i, c)
			}
		})
	}
	all.Wait()
	if end != nil {
		errs[conns] = end()
	}
	took := time.Since(began)
	return rate(int64(n*size), took), errors.Join(errs...)
}
