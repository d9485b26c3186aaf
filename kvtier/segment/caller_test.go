package segment

import (
	"bytes"
	"context"
	"crypto/cipher"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/kvtier/block"
)

// caller is a small core: it knows where the blocks are, and what a read may
// give. It does to a log what the contract says a caller does.
type caller struct {
	fs      *durabletest.FS
	options func(*Options)
	log     *Log
	index   map[name]Loc
	// may is the one value that may be found under a key; a key without one must
	// never be found. A miss is always allowed, but for what is sure.
	may map[name][]byte
	// known are the records that may lie on the drives: those that were told and not
	// taken back. A key without any is not on the drives, and must not come back.
	known map[name]map[Loc]bool
	sure  map[name]bool
	keep  func(Record) bool

	found, damagedReads int
	failed              bool // its drives failed
}

var testTenant = [16]byte{'t', 'e', 'n', 'a', 'n', 't'}

const smallSegment = 16 * PageSize

func newCaller(options func(*Options)) *caller {
	return &caller{
		fs: durabletest.New(), options: options,
		may: map[name][]byte{}, known: map[name]map[Loc]bool{}, sure: map[name]bool{},
		keep: func(r Record) bool { return r.Key.Hash[1]%3 == 0 },
	}
}

// on is the same caller after a crash left another file system.
func (c *caller) on(fs *durabletest.FS) *caller {
	next := *c
	next.fs, next.log, next.index = fs, nil, nil
	next.may, next.known, next.sure = maps.Clone(c.may), map[name]map[Loc]bool{}, maps.Clone(c.sure)
	if c.log != nil {
		c.log.mu.Lock()
		defer c.log.mu.Unlock()
		for k := range next.sure {
			// The crash came while a segment was ended that is told of afterwards.
			if s := c.log.atLocked(c.index[k]); s == nil || s.broken {
				delete(next.sure, k)
			}
		}
	}
	return &next
}

func (c *caller) open() error {
	c.index, c.known = map[name]Loc{}, map[name]map[Loc]bool{}
	o := Options{
		FS: c.fs, Dirs: []string{"/drive0/blocks"}, Tenant: testTenant, Bytes: 8 * smallSegment, SegmentSize: smallSegment,
		LargestBlock: 11 * PageSize,
		Recovered: func(r Record) {
			k := name{r.Namespace, r.Key}
			c.index[k] = r.Loc
			c.learn(k, r.Loc)
		},
		Reclaim: func(_ context.Context, blocks []Record) []bool {
			keep := make([]bool, len(blocks))
			for i, r := range blocks {
				keep[i] = c.index[name{r.Namespace, r.Key}] == r.Loc && c.keep(r)
			}
			return keep
		},
		Moved: func(from, to Record) {
			k := name{from.Namespace, from.Key}
			if c.index[k] == from.Loc {
				c.index[k] = to.Loc
			}
			if c.known[k][from.Loc] {
				c.learn(k, to.Loc)
				delete(c.known[k], from.Loc)
			}
		},
		Dropped: func(r Record) {
			k := name{r.Namespace, r.Key}
			if c.index[k] == r.Loc {
				delete(c.index, k)
				delete(c.sure, k)
			}
			if c.known[k][r.Loc] {
				delete(c.known[k], r.Loc)
				c.forget(k)
			}
		},
	}
	if c.options != nil {
		c.options(&o)
	}
	log, err := Open(o)
	if err != nil {
		return err
	}
	c.log = log
	if o.Covered == nil {
		for k := range c.may {
			c.forget(k)
		}
	}
	return nil
}

// learn notes a record of a key, forget that there is perhaps none left.
func (c *caller) learn(k name, loc Loc) {
	if c.known[k] == nil {
		c.known[k] = map[Loc]bool{}
	}
	c.known[k][loc] = true
}

func (c *caller) forget(k name) {
	if len(c.known[k]) == 0 {
		delete(c.may, k)
	}
}

func (c *caller) close() error {
	log := c.log
	if c.log = nil; log == nil {
		return nil // it could not be opened
	}
	return log.Close()
}

// restart ends the log cleanly and opens it again.
func (c *caller) restart() error {
	if err := c.close(); err != nil {
		return err
	}
	return c.open()
}

func keyOf(i int) name {
	k := name{namespace: block.Namespace{'n', byte(i % 3)}}
	k.key = block.Key{Hash: block.HashOf([]byte{byte(i), byte(i >> 8)}), Group: uint32(i % 2)}
	return k
}

// valueOf makes bytes of a key's version, of a length that depends on both.
func valueOf(i, version int) []byte {
	random := rand.New(rand.NewPCG(uint64(i), uint64(version)))
	sizes := []int{1, 100, inlineBytes - tagBytes, inlineBytes, inlineBytes + 1, PageSize, PageSize + 1, 2*PageSize - tagBytes, 3*PageSize + 7, 9 * PageSize}
	p := make([]byte, sizes[random.IntN(len(sizes))])
	for i := range p {
		p[i] = byte(random.Uint32())
	}
	return p
}

func writeOf(k name, value []byte) Write {
	return Write{Namespace: k.namespace, Key: k.key, Data: value, Size: uint32(len(value)), Sum: xxh3.Hash128(value).Bytes()}
}

// end ends a key where a record of it may lie on a drive.
func (c *caller) end(k name) error {
	delete(c.index, k)
	delete(c.sure, k)
	if len(c.known[k]) == 0 {
		return nil
	}
	if err := c.log.Delete(context.Background(), []Tombstone{{Namespace: k.namespace, Key: k.key}}); err != nil {
		return err
	}
	delete(c.known, k)
	delete(c.may, k)
	return nil
}

// put stores values under keys: one that other bytes are under is ended first.
func (c *caller) put(values map[name][]byte) error {
	var writes []Write
	for _, k := range slices.SortedFunc(maps.Keys(values), func(a, b name) int { return bytes.Compare(a.key.Hash[:], b.key.Hash[:]) }) {
		if old, held := c.may[k]; held && !bytes.Equal(old, values[k]) {
			if err := c.end(k); err != nil {
				return err
			}
		}
		writes = append(writes, writeOf(k, values[k]))
		c.may[k] = values[k]
		c.learn(k, 0)     // until the log says where
		delete(c.sure, k) // a newer record counts, and is not sealed
	}
	locs, err := c.log.Append(context.Background(), writes)
	for i, w := range writes {
		k := name{w.Namespace, w.Key}
		delete(c.known[k], 0)
		if locs[i] != 0 {
			c.index[k] = locs[i]
			c.learn(k, locs[i])
		} else if !errors.Is(err, durabletest.ErrCrashed) {
			c.forget(k) // it was not written, whatever the drive did
		}
	}
	return err
}

func (c *caller) seal() error {
	if err := c.log.Seal(context.Background()); err != nil {
		return err
	}
	for k := range c.index {
		c.sure[k] = true
	}
	return nil
}

// get reads a key as the core does, and holds what comes to the model.
func (c *caller) get(k name) (hit bool, err error) {
	loc, known := c.index[k]
	if !known {
		return false, nil
	}
	want := c.may[k]
	// Whatever is there is read, also what has another length than it may.
	buf := make([]byte, 16*PageSize)
	n := 0
	r, err := c.log.Stat(context.Background(), loc, k.namespace, k.key)
	if err == nil {
		n = int(r.Size)
		r, err = c.log.Read(context.Background(), loc, k.namespace, k.key, buf[:n])
	}
	switch {
	case errors.Is(err, ErrGone), errors.Is(err, ErrDamaged):
		// The first record of a segment goes before its footer does, where a crash
		// comes while the segment ends.
		if loc.Page() != 1 {
			c.damagedReads++
		}
		if c.sure[k] {
			return false, fmt.Errorf("what was sealed cannot be read: %w", err)
		}
		// The record may come back, so the key stays known.
		delete(c.index, k)
		return false, nil
	case err != nil:
		return false, err
	case want == nil:
		return false, fmt.Errorf("%v was ended and is found", k.key)
	case int(r.Size) != len(want) || !bytes.Equal(buf[:n], want):
		return false, fmt.Errorf("%v has %d other bytes", k.key, r.Size)
	case r.Sum != xxh3.Hash128(want).Bytes() || r.Key != k.key || r.Namespace != k.namespace:
		return false, fmt.Errorf("%v has another record: %+v", k.key, r)
	}
	c.found++
	return true, nil
}

// check reads every key that was ever there: what is found may be found, and what
// is sure is found.
func (c *caller) check() error {
	errs := []error{c.reads()}
	for k := range c.sure {
		if _, ok := c.index[k]; !ok {
			errs = append(errs, fmt.Errorf("%v was sealed and is not there", k.key))
		}
	}
	if used, err := c.used(); err != nil || used > c.log.opts.Bytes || used != c.log.Bytes() {
		errs = append(errs, fmt.Errorf("the segments have %d bytes of %d, the log says %d, %w", used, c.log.opts.Bytes, c.log.Bytes(), err))
	}
	return errors.Join(errs...)
}

func withDrives(n int) func(*Options) {
	return func(o *Options) {
		o.Dirs = nil
		for i := range n {
			o.Dirs = append(o.Dirs, fmt.Sprintf("/drive%d/blocks", i))
		}
		o.Bytes = int64(n) * wanted * smallSegment
	}
}

func withAEAD(aead cipher.AEAD) func(*Options) {
	return func(o *Options) { o.AEAD = aead }
}

// reads reads every key that is known.
func (c *caller) reads() error {
	var errs []error
	for k := range c.index {
		if _, err := c.get(k); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// used is the size of all segments' files, of drives that take part.
func (c *caller) used() (n int64, err error) {
	for i, dir := range c.log.opts.Dirs {
		if c.log.drives[i].isOut() {
			continue
		}
		list, err := c.fs.ReadDir(dir)
		if err != nil {
			return 0, err
		}
		for _, e := range list {
			_, ok := parseName(e.Name())
			if _, leaving := parseOut(e.Name()); ok || leaving {
				info, err := e.Info()
				if err != nil {
					return 0, err
				}
				n += info.Size()
			}
		}
	}
	return n, nil
}

func (c *caller) context() context.Context { return context.Background() }
