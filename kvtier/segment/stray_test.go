package segment

import (
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
)

// These tests look for records that nobody was told of: what a failing drive has
// although it said otherwise, copies that a reclaim gave up, and what an earlier
// incarnation left.

// liar is a file system whose writes of records happen and are said to have
// failed, while other writes to segments fail indeed.
type liar struct {
	durable.FS
	lies bool
	sync func() bool // says that a sync, which happens, is said to have failed
}

type liarFile struct {
	durable.File
	fs *liar
}

func (l *liar) OpenFile(path string, flag int, perm fs.FileMode) (durable.File, error) {
	f, err := l.FS.OpenFile(path, flag, perm)
	if err != nil {
		return nil, err
	}
	return &liarFile{f, l}, nil
}

func (f *liarFile) WriteAt(p []byte, off int64) (int, error) {
	if !f.fs.lies {
		return f.File.WriteAt(p, off)
	}
	if string(p[:4]) == recordMagic {
		_, _ = f.File.WriteAt(p, off)
	}
	return 0, &fs.PathError{Op: "write", Path: f.Name(), Err: syscall.EIO}
}

func (f *liarFile) Datasync() error {
	err := f.File.Datasync()
	if f.fs.sync != nil && f.fs.sync() {
		return &fs.PathError{Op: "datasync", Path: f.Name(), Err: syscall.EIO}
	}
	return err
}

func TestIOErrorOfAWriteThatHappenedLeavesNoRecordBehind(t *testing.T) {
	t.Parallel()
	l := &liar{}
	c := newCaller(func(o *Options) { l.FS = o.FS; o.FS = l })
	must(t, c.open(), fill(0, 3, 0)(c))
	l.lies = true
	if err := fill(3, 5, 0)(c); !errors.Is(err, syscall.EIO) {
		t.Fatalf("a drive that fails gives %v", err)
	}
	l.lies = false
	// It is tried again after a while.
	err := errors.New("none")
	for n := 0; err != nil && n <= 2*passes; n++ {
		err = fill(10, 12, 0)(c)
	}
	must(t, err, c.reads())
	c = c.on(c.fs.CrashWith(durabletest.PageSector, durabletest.Everything))
	must(t, c.open(), c.check())
	for i := range 12 {
		if i < 3 || i >= 10 {
			if c.index[keyOf(i)] == 0 {
				t.Errorf("block %d is lost", i)
			}
		}
	}
}

func TestIOErrorAmidReclaimsLeavesNoCopyBehind(t *testing.T) {
	t.Parallel()
	for seed := range 40 {
		random := rand.New(rand.NewPCG(uint64(seed), 17))
		c := newCaller(withDrives(1 + seed%2))
		c.keep = func(Record) bool { return random.IntN(2) == 0 }
		must(t, c.open(), fill(0, 70, 0)(c))
		left := 12
		c.fs.FailWhen(func(op, _ string) error {
			if (op == "write" || op == "datasync") && left > 0 && random.IntN(6) == 0 {
				left--
				return syscall.EIO
			}
			return nil
		})
		for i := range 10 + random.IntN(10) {
			if err := fill(70+i, 71+i, 0)(c); err != nil && !errors.Is(err, syscall.EIO) && !errors.Is(err, ErrNoDrive) && !errors.Is(err, ErrFull) {
				t.Fatal(err)
			}
		}
		c.fs.Heal()
		for i := range 4 + random.IntN(5) {
			if err := fill(100+i, 101+i, 0)(c); err != nil && !errors.Is(err, ErrNoDrive) {
				t.Fatal(err)
			}
		}
		clear(c.sure)
		c = c.on(c.fs.CrashWith(durabletest.PageSector, durabletest.Everything))
		if err := errors.Join(c.open(), c.check()); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
	}
}

func TestRecordsOfAnEarlierIncarnationAreNotRead(t *testing.T) {
	t.Parallel()
	c := opened(t, nil)
	c.keep = func(Record) bool { return false }
	must(t, fill(0, 100, 0)(c))
	tried := 0
	for _, s := range c.log.drives[0].segments {
		data := readAll(t, c, s.path)
		for page := range uint32(smallSegment / PageSize) {
			r, err := decodeRecord(data[page*PageSize:])
			if err != nil || r.incarnation == s.incarnation || s.state == free {
				continue
			}
			tried++
			loc := NewLoc(0, s.number, page, s.incarnation)
			buf := make([]byte, r.length)
			if _, err := c.log.Read(t.Context(), loc, r.namespace, r.key, buf); !errors.Is(err, ErrDamaged) {
				t.Errorf("page %d of %s: %v", page, s.path, err)
			}
			if _, err := c.log.Stat(t.Context(), loc, r.namespace, r.key); !errors.Is(err, ErrDamaged) {
				t.Errorf("header at page %d of %s: %v", page, s.path, err)
			}
		}
	}
	if tried == 0 {
		t.Error("no record of an earlier incarnation is there")
	}
}

func TestACheckpointIsBelievedUpToTheFirstSegmentThatItLacks(t *testing.T) {
	t.Parallel()
	lacks := uint64(0)
	c := newCaller(func(o *Options) {
		o.Covered = func(_, _ uint32, incarnation uint64) bool { return incarnation != lacks }
	})
	must(t, c.open(), fill(0, 30, 0)(c), endAll(2, 17)(c), c.seal())
	list := c.log.Segments()
	if len(list) < 4 {
		t.Fatalf("%d segments", len(list))
	}
	lacks = list[1].Incarnation
	held := map[uint64]int{}
	for _, s := range list {
		held[s.Incarnation] = s.Records
	}
	must(t, c.close(), c.open())
	told := 0
	for _, s := range c.log.Segments() {
		if s.Incarnation < lacks && s.Records >= 0 {
			t.Errorf("segment %d was read, the checkpoint covers it", s.Number)
		}
		if s.Incarnation >= lacks {
			told += held[s.Incarnation]
			if s.Records != held[s.Incarnation] {
				t.Errorf("segment %d has %d blocks, and had %d", s.Number, s.Records, held[s.Incarnation])
			}
		}
	}
	if len(c.index) < told-2 || len(c.index) > told {
		t.Errorf("told of %d blocks, %d are in segments that are not covered", len(c.index), told)
	}
}

func TestIOErrorOfTheSyncOfWhatWasKeptLeavesNoCopyBehind(t *testing.T) {
	t.Parallel()
	c := newCaller(nil)
	armed, kept := false, 0
	l := &liar{sync: func() bool {
		failing := armed
		armed = false
		return failing
	}}
	c.keep = func(Record) bool { return kept == 0 }
	c.options = func(o *Options) {
		l.FS = o.FS
		o.FS = l
		inner := o.Reclaim
		o.Reclaim = func(ctx context.Context, blocks []Record) []bool {
			keep := inner(ctx, blocks)
			for _, k := range keep {
				if k {
					kept++
				}
			}
			armed = kept > 0
			return keep
		}
	}
	must(t, c.open())
	i := 0
	for ; kept == 0; i++ {
		must(t, fill(i, i+1, 0)(c))
	}
	for end := i + 3; i < end; i++ {
		must(t, fill(i, i+1, 0)(c))
	}
	c = c.on(c.fs.CrashWith(durabletest.PageSector, durabletest.Everything))
	must(t, c.open(), c.check())
}
