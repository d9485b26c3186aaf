package durabletest

import (
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
)

// Unsynced is a change, or a part of one, that no sync had made durable when
// the crash came.
type Unsynced struct {
	// N is the number of the change, as Changes counts; the parts of a rename
	// share it.
	N int
	// Op is the operation, as FailWhen names it.
	Op   string
	Path string
	// Name says that the change is to a directory: what a name means. Else it
	// is to a file's bytes, length, mode or time.
	Name bool
	// Sector is which sector of the file a write is to, -1 for all else.
	Sector int64
}

// Survives says of each unsynced change whether it reached the drive. It is
// asked once for every sector of a write.
type Survives func(c Unsynced) bool

// What reaches the drive without a sync, in the extremes.
var (
	Nothing    Survives = func(Unsynced) bool { return false }
	Everything Survives = func(Unsynced) bool { return true }
	NamesAlone Survives = func(c Unsynced) bool { return c.Name }
	BytesAlone Survives = func(c Unsynced) bool { return !c.Name }
)

// Without lets everything survive but change number n.
func Without(n int) Survives { return func(c Unsynced) bool { return c.N != n } }

// Only lets nothing survive but change number n.
func Only(n int) Survives { return func(c Unsynced) bool { return c.N == n } }

// Randomly lets every change, and every sector of a write, survive with even
// chances.
func Randomly(random *rand.Rand) Survives {
	fates := map[int]bool{}
	return func(c Unsynced) bool {
		if c.Sector >= 0 {
			return random.IntN(2) == 0
		}
		fate, asked := fates[c.N]
		if !asked {
			fate = random.IntN(2) == 0
			fates[c.N] = fate
		}
		return fate
	}
}

// Sectors that drives write whole.
const (
	PageSector  = 4096
	SmallSector = 512
)

// Crash gives the file system as the next boot finds it, with a nil random
// only what was synced, else Randomly in sectors of either size.
func (f *FS) Crash(random *rand.Rand) *FS {
	if random == nil {
		return f.CrashWith(PageSector, Nothing)
	}
	sector := int64(PageSector)
	if random.IntN(2) == 0 {
		sector = SmallSector
	}
	return f.CrashWith(sector, Randomly(random))
}

// CrashWith gives the file system as the next boot finds it where writes reach
// the drive in sectors of that many bytes. The file system that crashed may be
// asked again, with another answer.
func (f *FS) CrashWith(sector int64, survives Survives) *FS {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.crashed = true
	next := New()
	next.capacity, next.quota, next.inodes, next.now = f.capacity, f.quota, f.inodes, f.now
	next.root = survive(f.root, sector, survives, map[*node]*node{})
	return next
}

// Unsynced lists the numbers of the changes that a crash now could lose.
func (f *FS) Unsynced() []int {
	f.mu.Lock()
	defer f.mu.Unlock()
	numbers := map[int]bool{}
	seen := map[*node]bool{}
	var walk func(n *node)
	walk = func(n *node) {
		if seen[n] {
			return
		}
		seen[n] = true
		for _, c := range n.pending {
			numbers[c.n] = true
		}
		for _, children := range []map[string]*node{n.entries, n.keptEntries} {
			for _, child := range children {
				walk(child)
			}
		}
	}
	walk(f.root)
	return slices.Sorted(maps.Keys(numbers))
}

// Fates are states in which the next boot may find the file system, by name: those
// in which drives lie most, and some by chance, which random and seed choose.
// Every also has each unsynced change lost alone, and there alone.
func (f *FS) Fates(random *rand.Rand, seed uint64, every bool) map[string]func() *FS {
	with := func(sector int64, s Survives) func() *FS {
		return func() *FS { return f.CrashWith(sector, s) }
	}
	some := func() Survives { return Randomly(rand.New(rand.NewPCG(random.Uint64(), seed))) }
	all := map[string]func() *FS{
		"nothing unsynced":      with(PageSector, Nothing),
		"everything":            with(PageSector, Everything),
		"names alone":           with(PageSector, NamesAlone),
		"bytes alone":           with(PageSector, BytesAlone),
		"some pages":            with(PageSector, some()),
		"some sectors":          with(SmallSector, some()),
		"other sectors":         with(SmallSector, some()),
		"yet others, and pages": with(PageSector, some()),
	}
	if every {
		for _, k := range f.Unsynced() {
			all[fmt.Sprintf("all but change %d", k)] = with(PageSector, Without(k))
			all[fmt.Sprintf("change %d alone", k)] = with(PageSector, Only(k))
		}
	}
	return all
}

// survive copies a tree as a crash leaves it.
func survive(n *node, sector int64, survives Survives, done map[*node]*node) *node {
	if c := done[n]; c != nil {
		return c
	}
	c := newNode(n.mode, n.mtime)
	c.target = n.target
	done[n] = c
	attributes := n.kept
	entries := maps.Clone(n.keptEntries)
	for _, p := range n.pending {
		what := Unsynced{N: p.n, Op: p.op, Path: p.path, Name: p.name != "", Sector: -1}
		switch {
		case p.attr != nil && survives(what):
			attributes = *p.attr
		case p.name != "" && survives(what):
			entries[p.name] = p.node
		}
	}
	c.attr, c.kept = attributes, attributes
	if n.mode.IsRegular() {
		c.data = surviveData(n, sector, survives)
		c.keptData = slices.Clone(c.data)
	}
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		if child := entries[name]; child != nil {
			s := survive(child, sector, survives, done)
			c.entries[name], c.keptEntries[name] = s, s
		}
	}
	return c
}

// surviveData is a file's content: of every sector, and of the length, the
// state after the last change that survives.
func surviveData(n *node, sector int64, survives Survives) []byte {
	lastOf := map[int64]int{} // sector -> index of the last surviving write
	lastSize := -1
	for i, p := range n.pending {
		what := Unsynced{N: p.n, Op: p.op, Path: p.path, Sector: -1}
		switch {
		case p.resize && survives(what):
			lastSize = i
		case p.write != nil:
			for s := p.off / sector; s*sector < p.off+int64(len(p.write)); s++ {
				if what.Sector = s; survives(what) {
					lastOf[s] = i
				}
			}
		}
	}
	data := slices.Clone(n.keptData)
	size := int64(len(data))
	for i, p := range n.pending {
		switch {
		case p.resize && i <= lastSize:
			size = p.size
			data = resized(data, min(size, int64(len(data))))
		case p.write != nil:
			end := p.off + int64(len(p.write))
			for s := p.off / sector; s*sector < end; s++ {
				last, any := lastOf[s]
				if !any || i > last {
					continue
				}
				from, to := max(p.off, s*sector), min(end, (s+1)*sector)
				data = resized(data, max(to, int64(len(data))))
				copy(data[from:to], p.write[from-p.off:])
			}
		}
	}
	return resized(data, size)
}

// resized cuts data or adds zeroes.
func resized(data []byte, size int64) []byte {
	if size <= int64(len(data)) {
		return data[:size:size]
	}
	return append(data, make([]byte, size-int64(len(data)))...)
}

// sync makes the changes of a node durable. Where it fails they are lost: the
// kernel takes the pages for clean, and no later sync writes them.
func (n *node) sync(failed, withAttributes bool) {
	var left []change
	for _, p := range n.pending {
		switch {
		case p.attr != nil && !failed && withAttributes:
			n.kept = *p.attr
		case p.attr != nil:
			left = append(left, p)
		case p.resize:
			n.keptData = resized(n.keptData, p.size)
		case p.write != nil && !failed:
			end := p.off + int64(len(p.write))
			n.keptData = resized(n.keptData, max(end, int64(len(n.keptData))))
			copy(n.keptData[p.off:end], p.write)
		case p.name != "" && !failed:
			n.keep(p)
			if p.twin != nil {
				p.twin.keepRename(p.n)
			}
		case p.name != "":
			left = append(left, p)
		}
	}
	n.pending = left
	if withAttributes && !failed {
		n.kept = n.attr
	}
}

// keep makes durable what a name means.
func (n *node) keep(p change) {
	n.keptEntries[p.name] = p.node
	if p.node == nil {
		delete(n.keptEntries, p.name)
	}
}

// keepRename makes the other half of a rename durable, and with it what came
// before under the same name.
func (n *node) keepRename(number int) {
	at := slices.IndexFunc(n.pending, func(p change) bool { return p.n == number && p.name != "" })
	if at < 0 {
		return
	}
	p := n.pending[at]
	n.keep(p)
	earlier := slices.DeleteFunc(slices.Clone(n.pending[:at]), func(e change) bool { return e.name == p.name })
	n.pending = append(earlier, n.pending[at+1:]...)
}

// DropCaches makes every read come from the drive, as memory pressure does:
// what a failed sync lost is seen to be lost.
func (f *FS) DropCaches() {
	f.mu.Lock()
	defer f.mu.Unlock()
	seen := map[*node]bool{}
	var walk func(n *node)
	walk = func(n *node) {
		if seen[n] {
			return
		}
		seen[n] = true
		if n.mode.IsRegular() {
			n.data = surviveData(n, PageSector, Everything)
		}
		for _, child := range n.entries {
			walk(child)
		}
	}
	walk(f.root)
}

// Revive lets a file system whose process was killed go on: nothing is lost,
// nothing more is synced, and no lock is held.
func (f *FS) Revive() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.crashed, f.crashAt = false, 0
	clear(f.locks)
}

// Corrupt turns one bit of a file, on the drive and in the cache, unseen.
func (f *FS) Corrupt(path string, at int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, err := f.lookupLocked(path, true)
	if err == nil && (at >= int64(len(n.data)) || at >= int64(len(n.keptData))) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return wrap("corrupt", path, err)
	}
	n.data[at] ^= 1
	if &n.data[at] != &n.keptData[at] {
		n.keptData[at] ^= 1
	}
	return nil
}
