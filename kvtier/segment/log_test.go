package segment

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/kvtier/block"
)

func opened(t *testing.T, options func(*Options)) *caller {
	t.Helper()
	c := newCaller(options)
	if err := c.open(); err != nil {
		t.Fatal(err)
	}
	return c
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func TestBlocksInMemoryThatBeginsOnAPageAreWrittenFromThereAndOthersAreCopied(t *testing.T) {
	t.Parallel()
	c := opened(t, func(o *Options) { o.SegmentSize, o.Bytes, o.LargestBlock = MinSize, 8*MinSize, 1<<20 })
	memory, free, err := newPages(1 << 20)
	must(t, err)
	defer free()
	random := rand.New(rand.NewPCG(1, 1))
	for i := range memory {
		memory[i] = byte(random.Uint32())
	}
	sizes := []int{copied + 1, copied, 1<<20 - 5, 1 << 20, 3*PageSize + copied}
	for shift := range 2 {
		var writes []Write
		for i, n := range sizes {
			w := writeOf(keyOf(i+10*shift), memory[shift:][:min(n, len(memory)-shift)])
			w.Data = w.Data[:cap(w.Data)] // what is behind the block is not its own
			writes = append(writes, w)
		}
		locs, err := c.log.Append(c.context(), writes)
		must(t, err)
		for i, w := range writes {
			buf := bytes.Repeat([]byte{0xee}, int(roundUp(int64(w.Size))))
			r, err := c.log.Read(c.context(), locs[i], w.Namespace, w.Key, buf)
			if err != nil || r.Size != w.Size || !bytes.Equal(buf[:r.Size], w.Data[:w.Size]) {
				t.Errorf("block %d, shifted by %d: %d bytes, %v", i, shift, r.Size, err)
			}
			if rest := buf[r.Size:]; !bytes.Equal(rest, make([]byte, len(rest))) {
				t.Errorf("block %d, shifted by %d: what is behind it was read", i, shift)
			}
		}
	}
	report, err := Check(c.context(), CheckOptions{FS: c.fs, Dir: "/drive0/blocks", Tenant: testTenant})
	if err != nil || report.Blocks != 2*len(sizes) || len(report.Damaged) != 0 {
		t.Errorf("the check gives %+v, %v", report, err)
	}
}

func TestAReadOfAnotherNameOrLengthIsNoHit(t *testing.T) {
	t.Parallel()
	c := opened(t, nil)
	must(t, fill(0, 4, 0)(c))
	k := keyOf(2)
	loc, want := c.index[k], c.may[k]
	buf := make([]byte, len(want))
	for what, read := range map[string]func() (Record, error){
		"key": func() (Record, error) { return c.log.Read(c.context(), loc, k.namespace, keyOf(3).key, buf) },
		"group": func() (Record, error) {
			return c.log.Read(c.context(), loc, k.namespace, block.Key{Hash: k.key.Hash, Group: 9}, buf)
		},
		"namespace": func() (Record, error) { return c.log.Read(c.context(), loc, block.Namespace{9}, k.key, buf) },
		"length": func() (Record, error) {
			return c.log.Read(c.context(), loc, k.namespace, k.key, make([]byte, len(want)+PageSize))
		},
		"page":   func() (Record, error) { return c.log.Read(c.context(), loc+1<<markBits, k.namespace, k.key, buf) },
		"header": func() (Record, error) { return c.log.Stat(c.context(), loc, k.namespace, keyOf(3).key) },
	} {
		if r, err := read(); !errors.Is(err, ErrDamaged) {
			t.Errorf("another %s gives %+v, %v", what, r, err)
		}
	}
	for _, gone := range []Loc{0, loc ^ 1, loc ^ 1<<63, loc ^ 1<<(pageBits+markBits)} {
		if _, err := c.log.Read(c.context(), gone, k.namespace, k.key, buf); !errors.Is(err, ErrGone) {
			t.Errorf("loc %x gives %v", gone, err)
		}
	}
	r, err := c.log.Stat(c.context(), loc, k.namespace, k.key)
	if err != nil || int(r.Size) != len(want) || r.Sum != writeOf(k, want).Sum || r.Loc != loc {
		t.Errorf("the header says %+v, %v", r, err)
	}
	if s := c.log.Stats(); s.Damaged != 6 || s.Gone != 4 || s.Records != 4 {
		t.Errorf("counted %+v", s)
	}
}

func TestAPinnedSegmentIsNotReusedUntilItsRelease(t *testing.T) {
	t.Parallel()
	c := opened(t, nil)
	c.keep = func(Record) bool { return false }
	must(t, fill(0, 6, 0)(c))
	release, ok := c.log.Pin(c.index[keyOf(0)])
	if !ok {
		t.Fatal("it cannot be pinned")
	}
	loc := c.index[keyOf(0)]
	must(t, fill(100, 220, 0)(c))
	if hit, err := c.get(keyOf(0)); !hit || err != nil {
		t.Errorf("a pinned block is gone: %v", err)
	}
	if _, known := c.index[keyOf(130)]; known {
		t.Error("blocks after the pinned one were not reused")
	}
	release()
	release()
	must(t, fill(300, 400, 0)(c))
	if _, known := c.index[keyOf(0)]; known {
		t.Error("the block is there after its release")
	}
	if _, ok := c.log.Pin(loc); ok {
		t.Error("what is gone can be pinned")
	}
	must(t, c.restart(), c.check())
}

func TestWithEverySegmentPinnedBlocksAreRefusedAndTheBudgetHolds(t *testing.T) {
	t.Parallel()
	c := opened(t, nil)
	c.keep = func(Record) bool { return false }
	var releases []func()
	var err error
	for i := 0; err == nil; i++ {
		err = fill(i, i+1, 0)(c)
		if release, ok := c.log.Pin(c.index[keyOf(i)]); ok {
			releases = append(releases, release)
		}
		if i > 1000 {
			t.Fatal("it never fills up")
		}
	}
	if !errors.Is(err, ErrFull) {
		t.Errorf("a log that is full of pins gives %v", err)
	}
	must(t, c.check())
	for _, release := range releases {
		release()
	}
	must(t, fill(2000, 2040, 0)(c), c.check())
}

func TestBlocksThatTheDrivesMayNotWearForAreNotWritten(t *testing.T) {
	t.Parallel()
	var left int64 = 1 << 20
	var told int64
	c := opened(t, func(o *Options) {
		o.Spend = func(n int64) bool {
			told += n
			if left < n {
				return false
			}
			left -= n
			return true
		}
		o.Charge = func(n int64) { told += n }
	})
	must(t, fill(0, 6, 0)(c))
	if s := c.log.Stats(); s.Bytes != told || told < 7*PageSize {
		t.Errorf("told of %d bytes, counted %d", told, s.Bytes)
	}
	left = 0
	before, changes := c.log.Stats(), c.fs.Changes()
	if err := fill(10, 13, 0)(c); !errors.Is(err, ErrWear) {
		t.Errorf("without wear left: %v", err)
	}
	if after := c.log.Stats(); after.Bytes != before.Bytes || c.fs.Changes() != changes {
		t.Errorf("%d bytes were written, %d changes", after.Bytes-before.Bytes, c.fs.Changes()-changes)
	}
	// What keeps promises is written all the same, and told.
	must(t, c.end(keyOf(1)), c.seal())
	if after := c.log.Stats(); after.Bytes != before.Bytes+3*PageSize {
		t.Errorf("tombstones and a footer are %d bytes", after.Bytes-before.Bytes)
	}
	left = 1 << 30
	must(t, c.restart(), c.check())
}

func TestABlockThatASegmentCannotTakeIsRefusedAndTheOthersAreWritten(t *testing.T) {
	t.Parallel()
	c := opened(t, nil)
	large := writeOf(keyOf(1), make([]byte, 12*PageSize))
	short := writeOf(keyOf(3), make([]byte, 10))
	short.Size = 11
	locs, err := c.log.Append(c.context(), []Write{writeOf(keyOf(0), []byte("a")), large, writeOf(keyOf(2), []byte("b")), short, {}})
	if !errors.Is(err, ErrTooLarge) || locs[0] == 0 || locs[1] != 0 || locs[2] == 0 || locs[3] != 0 || locs[4] != 0 {
		t.Errorf("%x, %v", locs, err)
	}
}

func TestAKeyThatEndsWhileItMovesStaysEnded(t *testing.T) {
	t.Parallel()
	c := newCaller(nil)
	victims := map[name]bool{}
	reclaims := 0
	c.options = func(o *Options) {
		inner := o.Reclaim
		o.Reclaim = func(ctx context.Context, blocks []Record) []bool {
			keep := inner(ctx, blocks)
			if reclaims++; reclaims > 3 {
				return keep
			}
			// It was decided to keep them, and then one ends.
			for i, r := range blocks {
				if k := (name{r.Namespace, r.Key}); keep[i] {
					victims[k] = true
					if err := c.log.Delete(ctx, []Tombstone{{Namespace: r.Namespace, Key: r.Key, Upto: c.log.LastSeq()}}); err != nil {
						t.Error(err)
					}
					delete(c.index, k)
					delete(c.may, k)
					break
				}
			}
			return keep
		}
	}
	c.keep = func(Record) bool { return true }
	must(t, c.open())
	for i := 0; reclaims < 3 && i < 300; i++ {
		must(t, fill(i, i+1, 0)(c))
	}
	if len(victims) != 3 {
		t.Fatalf("%d keys ended in %d reclaims", len(victims), reclaims)
	}
	for range 2 {
		c = c.on(c.fs.CrashWith(durabletest.PageSector, durabletest.Everything))
		must(t, c.open(), c.check())
		for k := range victims {
			if _, found := c.index[k]; found {
				t.Errorf("%v is found again", k.key)
			}
		}
	}
}

func TestAKeyThatEndsRightAfterItMovedStaysEnded(t *testing.T) {
	t.Parallel()
	c := newCaller(nil)
	c.keep = func(Record) bool { return true }
	var upto uint64
	var ended []Record
	c.options = func(o *Options) {
		inner := o.Reclaim
		o.Reclaim = func(ctx context.Context, blocks []Record) []bool {
			upto = c.log.LastSeq() // what a caller knew that ends a key now
			return inner(ctx, blocks)
		}
		o.Moved = func(from, _ Record) {
			if len(ended) < 3 {
				ended = append(ended, from)
				delete(c.index, name{from.Namespace, from.Key})
				delete(c.may, name{from.Namespace, from.Key})
			}
		}
	}
	must(t, c.open())
	for i := 0; len(ended) == 0; i += 3 {
		must(t, fill(i, i+3, 0)(c))
	}
	for _, r := range ended {
		must(t, c.log.Delete(c.context(), []Tombstone{{Namespace: r.Namespace, Key: r.Key, Upto: upto}}))
	}
	c = c.on(c.fs.CrashWith(durabletest.PageSector, durabletest.Everything))
	must(t, c.open(), c.check())
}

func TestMoreTombstonesThanARecordTakesAreAllKept(t *testing.T) {
	t.Parallel()
	c := opened(t, nil)
	must(t, fill(0, 20, 0)(c), c.seal())
	var stones []Tombstone
	for i := range 1000 {
		if k := keyOf(i); i != 7 {
			stones = append(stones, Tombstone{Namespace: k.namespace, Key: k.key})
		}
	}
	must(t, c.log.Delete(c.context(), stones))
	c = c.on(c.fs.Crash(nil))
	must(t, c.open())
	if len(c.index) != 1 || c.index[keyOf(7)] == 0 {
		t.Errorf("%d blocks are found, want the one that did not end", len(c.index))
	}
}

func TestReadsAppendsDeletesAndReclaimsGoOnTogether(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex // of the caller
	c := newCaller(nil)
	c.options = func(o *Options) {
		withDrives(2)(o)
		for _, f := range []*func(Record){&o.Dropped, &o.Recovered} {
			inner := *f
			*f = func(r Record) { mu.Lock(); defer mu.Unlock(); inner(r) }
		}
		moved, reclaim := o.Moved, o.Reclaim
		o.Moved = func(from, to Record) { mu.Lock(); defer mu.Unlock(); moved(from, to) }
		o.Reclaim = func(ctx context.Context, list []Record) []bool {
			mu.Lock()
			defer mu.Unlock()
			return reclaim(ctx, list)
		}
		o.Depth = 2
	}
	must(t, c.open())
	done := make(chan struct{})
	var readers sync.WaitGroup
	for r := range 4 {
		readers.Go(func() {
			random := rand.New(rand.NewPCG(uint64(r), 9))
			buf := make([]byte, 16*PageSize)
			for {
				select {
				case <-done:
					return
				default:
				}
				i := random.IntN(200)
				k := keyOf(i)
				mu.Lock()
				loc, want := c.index[k], c.may[k]
				mu.Unlock()
				if loc == 0 {
					continue
				}
				release, pinned := c.log.Pin(loc)
				got, err := c.log.Read(context.Background(), loc, k.namespace, k.key, buf[:len(want)])
				switch {
				case errors.Is(err, ErrGone) && !pinned:
				case err != nil:
					t.Errorf("read: %v, pinned %v", err, pinned)
				case !bytes.Equal(buf[:got.Size], want):
					t.Error("other bytes")
				}
				if pinned {
					release()
				}
			}
		})
	}
	rounds := 6
	if testing.Short() {
		rounds = 2
	}
	for round := range rounds {
		for i := range 200 {
			k, v := keyOf(i), valueOf(i, 0)
			locs, err := c.log.Append(context.Background(), []Write{writeOf(k, v)})
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			c.index[k], c.may[k] = locs[0], v
			mu.Unlock()
			if i%17 == round {
				mu.Lock()
				delete(c.index, k)
				mu.Unlock()
				if err := c.log.Delete(context.Background(), []Tombstone{{Namespace: k.namespace, Key: k.key}}); err != nil {
					t.Error(err)
				}
			}
		}
	}
	close(done)
	readers.Wait()
	if s := c.log.Stats(); s.Damaged != 0 || s.Reclaimed == 0 || s.Moved == 0 {
		t.Errorf("%+v", s)
	}
	must(t, c.log.Close(), c.log.Close())
	if _, err := c.log.Append(context.Background(), []Write{writeOf(keyOf(1), []byte("x"))}); !errors.Is(err, ErrClosed) {
		t.Errorf("after the end: %v", err)
	}
	if _, err := c.log.Read(context.Background(), NewLoc(0, 0, 1, 1), block.Namespace{}, block.Key{}, make([]byte, 1)); !errors.Is(err, ErrGone) {
		t.Errorf("after the end: %v", err)
	}
}

func TestARealDriveIsWrittenDirectlyAndMeasured(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	o := Options{FS: durable.OS, Dirs: []string{filepath.Join(dir, "a", "blocks")}, Tenant: testTenant, Bytes: 8 * MinSize, LargestBlock: 1 << 20, Direct: true}
	index := map[name]Record{}
	o.Recovered = func(r Record) { index[name{r.Namespace, r.Key}] = r }
	for round := range 2 {
		l, err := Open(o)
		must(t, err)
		var writes []Write
		memory, free, err := newPages(1 << 20)
		must(t, err)
		random := rand.New(rand.NewPCG(5, 5))
		for i := range memory {
			memory[i] = byte(random.Uint32())
		}
		for i := range 40 {
			writes = append(writes, writeOf(keyOf(i), memory[i*PageSize:][:1+random.IntN(800<<10)]))
		}
		buf, freeBuf, err := newPages(1 << 20)
		must(t, err)
		if round == 0 {
			locs, err := l.Append(context.Background(), writes)
			must(t, err)
			for i, w := range writes {
				index[name{w.Namespace, w.Key}] = Record{Loc: locs[i]}
			}
		} else if len(index) < 8 {
			t.Errorf("%d blocks are found", len(index))
		}
		hits := 0
		for _, w := range writes {
			r, ok := index[name{w.Namespace, w.Key}]
			if !ok {
				continue
			}
			got, err := l.Read(context.Background(), r.Loc, w.Namespace, w.Key, buf[:roundUp(int64(w.Size))])
			if errors.Is(err, ErrGone) {
				continue
			}
			if err != nil || !bytes.Equal(buf[:got.Size], w.Data[:w.Size]) {
				t.Errorf("read: %v", err)
			}
			hits++
		}
		if hits < 8 {
			t.Errorf("%d blocks are read", hits)
		}
		must(t, l.Close())
		free()
		freeBuf()
	}
	v, err := SelfTest(context.Background(), durable.OS, dir, Wear{})
	if err != nil || v.Read <= 0 || v.Write <= 0 || v.Latency <= 0 {
		t.Errorf("measured %+v, %v", v, err)
	}
	if list, err := os.ReadDir(dir); err != nil || len(list) != 1 {
		t.Errorf("%d files are left, %v", len(list), err)
	}
}
