package segment

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
)

// failOn makes operations on one drive fail, as long as failing says so.
func failOn(fs *durabletest.FS, drive string, cause error, ops ...string) {
	fs.FailWhen(func(op, path string) error {
		for _, o := range ops {
			if op == o && strings.HasPrefix(path, drive) {
				return cause
			}
		}
		return nil
	})
}

func TestIOErrorOfOneWriteCostsASegmentsRestAndNoBlock(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"write", "datasync"} {
		for _, cause := range []error{syscall.EIO, syscall.ENOSPC, syscall.EDQUOT} {
			c := opened(t, nil)
			must(t, fill(0, 4, 0)(c))
			failed := false
			c.fs.FailWhen(func(o, _ string) error {
				if o == op && !failed {
					failed = true
					return cause
				}
				return nil
			})
			must(t, fill(4, 30, 0)(c), c.check())
			if len(c.index) != 30 || !failed {
				t.Errorf("%s fails with %v once: %d of 30 blocks are there", op, cause, len(c.index))
			}
			if s := c.log.Stats(); s.Failures == 0 {
				t.Errorf("%s fails with %v: not counted", op, cause)
			}
			c.fs.Heal()
			if err := c.close(); err != nil && op != "datasync" {
				t.Error(err)
			}
			must(t, c.open(), c.check())
			if len(c.index) != 30 {
				t.Errorf("%s fails with %v once: %d of 30 blocks are there after a restart", op, cause, len(c.index))
			}
		}
	}
}

func TestIOErrorsOfOneDriveSetItAsideAndTheOthersGoOn(t *testing.T) {
	t.Parallel()
	c := opened(t, func(o *Options) { withDrives(2)(o); o.Bytes = 20 * smallSegment })
	must(t, fill(0, 30, 0)(c), c.seal())
	var bad string
	for _, s := range c.log.Segments() {
		bad = filepath.Dir(c.log.drives[s.Drive].dir)
	}
	failOn(c.fs, bad, syscall.EIO, "write", "datasync", "sync", "open")
	must(t, fill(30, 90, 0)(c))
	if s := c.log.Stats(); s.Aside != 1 || s.Failures < failuresBefore || s.Failures > 12 {
		t.Errorf("%+v", s)
	}
	c.found = 0
	must(t, c.check())
	if c.found < 40 {
		t.Errorf("%d blocks are found", c.found)
	}
	// It is well again after a while.
	c.fs.Heal()
	must(t, fill(100, 100+8*passes, 0)(c))
	if s := c.log.Stats(); s.Aside != 0 {
		t.Errorf("a drive that is well is still aside: %+v", s)
	}
	must(t, c.restart(), c.check())
}

func TestIOErrorOfADriveThatIsToEndAKeyGivesTheDriveUp(t *testing.T) {
	t.Parallel()
	c := opened(t, func(o *Options) { withDrives(2)(o); o.Bytes = 20 * smallSegment })
	must(t, fill(0, 40, 0)(c), c.seal())
	failOn(c.fs, "/drive1", syscall.EIO, "write", "datasync")
	must(t, c.end(keyOf(3)), c.end(keyOf(4)))
	must(t, fill(3, 5, 1)(c), c.check())
	if s := c.log.Stats(); s.Aside != 1 {
		t.Errorf("%+v", s)
	}
	// The drive comes back as it was, without the tombstones.
	c.fs.Heal()
	clear(c.sure)
	c = c.on(c.fs.Crash(nil))
	must(t, c.open(), c.check())
	for k, loc := range c.index {
		if loc.Drive() == 1 {
			t.Errorf("%v of the drive that was given up is found", k.key)
		}
	}
	if len(c.index) == 0 {
		t.Error("the other drive lost its blocks")
	}
}

func TestWithoutADriveThatCanEndAKeyTheCallerIsTold(t *testing.T) {
	t.Parallel()
	c := opened(t, nil)
	must(t, fill(0, 10, 0)(c), c.seal())
	failOn(c.fs, "/drive0", syscall.EIO, "write")
	if err := c.end(keyOf(1)); !errors.Is(err, syscall.EIO) {
		t.Errorf("%v", err)
	}
	c.fs.Heal()
	must(t, c.end(keyOf(1)), c.restart(), c.check())
}

func TestFailedSyncIsToldByTheNextSealOnce(t *testing.T) {
	t.Parallel()
	c := opened(t, nil)
	must(t, fill(0, 10, 0)(c))
	failed := false
	c.fs.FailWhen(func(op, _ string) error {
		if op == "datasync" && !failed {
			failed = true
			return syscall.EIO
		}
		return nil
	})
	must(t, c.end(keyOf(1)))
	if err := c.seal(); !failed || !errors.Is(err, syscall.EIO) {
		t.Errorf("after a sync that failed: %v", err)
	}
	must(t, fill(10, 20, 0)(c), c.seal())
	for i := range 10 {
		delete(c.sure, keyOf(i)) // these were told to be in doubt
	}
	c = c.on(c.fs.Crash(nil))
	must(t, c.open(), c.check())
	for i := 10; i < 20; i++ {
		if c.index[keyOf(i)] == 0 {
			t.Errorf("block %d was sealed and is lost", i)
		}
	}
	if c.index[keyOf(1)] != 0 {
		t.Error("a key is there that ended")
	}
}

func TestADriveThatWasAwayForAStartIsNotBelieved(t *testing.T) {
	t.Parallel()
	c := opened(t, func(o *Options) { withDrives(2)(o); o.Bytes = 20 * smallSegment })
	must(t, fill(0, 40, 0)(c), c.close())
	away := errors.New("no such device")
	gone := func(op, path string) error {
		if strings.HasPrefix(path, "/drive1") {
			return away
		}
		return nil
	}
	c.fs.FailWhen(gone)
	c.fs.FailReadWhen(gone)
	must(t, c.open(), c.reads())
	n := len(c.index)
	if n == 0 || n == 40 {
		t.Fatalf("%d of 40 blocks are found without a drive", n)
	}
	// Keys of the drive that is away are unknown, and get other bytes that a power
	// cut takes.
	for i := range 40 {
		if _, known := c.index[keyOf(i)]; !known {
			delete(c.may, keyOf(i))
		}
	}
	c.fs.Heal()
	c = c.on(c.fs.Crash(nil))
	must(t, c.open(), c.check())
	if len(c.index) != n {
		t.Errorf("%d blocks are found with the drive back, want %d", len(c.index), n)
	}
	if err := fill(50, 90, 0)(c); err != nil {
		t.Error(err)
	}
	used := map[uint32]bool{}
	for _, loc := range c.index {
		used[loc.Drive()] = true
	}
	if !used[1] {
		t.Error("the drive that is back is not used")
	}
}

func TestFullDriveIsUsedAsFarAsItGoes(t *testing.T) {
	t.Parallel()
	for what, limit := range map[string]func(fs *durabletest.FS){
		"ENOSPC": func(fs *durabletest.FS) { fs.SetCapacity(3*smallSegment + 2*PageSize) },
		"EDQUOT": func(fs *durabletest.FS) { fs.SetQuota(3*smallSegment + 2*PageSize) },
	} {
		c := newCaller(nil)
		limit(c.fs)
		must(t, c.open())
		for i := range 200 {
			must(t, fill(i, i+1, 0)(c))
		}
		must(t, c.check(), c.end(keyOf(199)))
		if n := c.log.Bytes(); n != 3*smallSegment {
			t.Errorf("%s: %d bytes are used", what, n)
		}
		if s := c.log.Stats(); s.Failures != 0 || s.Aside != 0 {
			t.Errorf("%s: a full drive counts as one that fails: %+v", what, s)
		}
		c.fs.SetCapacity(0)
		c.fs.SetQuota(0)
		for i := range 200 {
			must(t, fill(i+300, i+301, 0)(c))
		}
		if n := c.log.Bytes(); n != 8*smallSegment {
			t.Errorf("%s: with room %d bytes are used", what, n)
		}
		must(t, c.restart(), c.check())
	}
}

func TestReadOnlyFileSystemGivesReadsAndRefusesWrites(t *testing.T) {
	t.Parallel()
	c := opened(t, nil)
	must(t, fill(0, 20, 0)(c), c.seal())
	c.fs.SetReadOnly(true)
	if err := fill(20, 22, 0)(c); !errors.Is(err, syscall.EROFS) {
		t.Errorf("append: %v", err)
	}
	c.found = 0
	must(t, c.check())
	if c.found != 20 {
		t.Errorf("%d blocks are found", c.found)
	}
	if err := c.end(keyOf(1)); !errors.Is(err, syscall.EROFS) {
		t.Errorf("delete: %v", err)
	}
	c.fs.SetReadOnly(false)
	must(t, c.end(keyOf(1)), c.restart(), c.check())
}

// short is a file system whose reads of segments end early.
type short struct {
	durable.FS
	cut bool
}

type shortFile struct {
	durable.File
	fs *short
}

func (s *short) OpenFile(path string, flag int, perm fs.FileMode) (durable.File, error) {
	f, err := s.FS.OpenFile(path, flag, perm)
	if err != nil {
		return nil, err
	}
	return &shortFile{f, s}, nil
}

func (f *shortFile) ReadAt(p []byte, off int64) (int, error) {
	if f.fs.cut && len(p) > 10 {
		n, _ := f.File.ReadAt(p[:len(p)/2], off)
		return n, nil
	}
	return f.File.ReadAt(p, off)
}

// worn is a file system with pages that cannot be read.
type worn struct {
	durable.FS
	bad map[string]map[int64]bool // by file, pages
}

type wornFile struct {
	durable.File
	fs *worn
}

func (w *worn) OpenFile(path string, flag int, perm fs.FileMode) (durable.File, error) {
	f, err := w.FS.OpenFile(path, flag, perm)
	if err != nil {
		return nil, err
	}
	return &wornFile{f, w}, nil
}

func (f *wornFile) ReadAt(p []byte, off int64) (int, error) {
	bad := f.fs.bad[filepath.Base(f.Name())]
	for page := off / PageSize; page*PageSize < off+int64(len(p)); page++ {
		if bad[page] {
			return 0, &fs.PathError{Op: "read", Path: f.Name(), Err: syscall.EIO}
		}
	}
	return f.File.ReadAt(p, off)
}

func TestIOErrorWhereTombstonesMayBeCostsWhatTheyMayBeAbout(t *testing.T) {
	t.Parallel()
	for _, bad := range []map[int64]bool{
		{1: true, 2: true, smallSegment/PageSize - 1: true}, // both copies, and the footer
		{smallSegment/PageSize - 1: true},
		{1: true, smallSegment/PageSize - 1: true},
		{0: true},
		{1: true},
		{0: true, 1: true},
		{0: true, 2: true},
	} {
		w := &worn{}
		c := newCaller(func(o *Options) { w.FS = o.FS; o.FS = w })
		must(t, c.open(), fill(0, 3, 0)(c), c.seal(), c.end(keyOf(1)), fill(5, 7, 0)(c), c.seal(), fill(10, 12, 0)(c), c.close())
		w.bad = map[string]map[int64]bool{"1.seg": bad}
		clear(c.sure)
		must(t, c.open(), c.check())
		if len(c.index) < 2 {
			t.Errorf("with pages %v unreadable %d blocks are found", bad, len(c.index))
		}
		w.bad = nil
		must(t, c.restart(), c.check())
	}
}

func TestAShortReadIsAMiss(t *testing.T) {
	t.Parallel()
	s := &short{}
	c := newCaller(func(o *Options) { s.FS = o.FS; o.FS = s })
	must(t, c.open(), fill(0, 12, 0)(c))
	s.cut = true
	for i := range 12 {
		k := keyOf(i)
		buf := make([]byte, len(c.may[k]))
		if _, err := c.log.Read(context.Background(), c.index[k], k.namespace, k.key, buf); !errors.Is(err, ErrDamaged) {
			t.Errorf("a short read gives %v", err)
		}
		if _, err := c.log.Stat(context.Background(), c.index[k], k.namespace, k.key); !errors.Is(err, ErrDamaged) {
			t.Errorf("a short read of a header gives %v", err)
		}
	}
	s.cut = false
	must(t, c.check())
}

// slow is a file system whose reads wait.
type slow struct {
	durable.FS
	gate chan struct{}
	only int // bytes of the reads that wait, 0 for all
}

type slowFile struct {
	durable.File
	fs *slow
}

func (s *slow) OpenFile(path string, flag int, perm fs.FileMode) (durable.File, error) {
	f, err := s.FS.OpenFile(path, flag, perm)
	if err != nil {
		return nil, err
	}
	return &slowFile{f, s}, nil
}

func (f *slowFile) ReadAt(p []byte, off int64) (int, error) {
	if f.fs.gate != nil && (f.fs.only == 0 || f.fs.only == len(p)) {
		<-f.fs.gate
	}
	return f.File.ReadAt(p, off)
}

func TestReadsWaitForTheirTurnAsLongAsTheirCallersDo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &slow{}
		c := newCaller(func(o *Options) { s.FS = o.FS; o.FS, o.Depth = s, 2 })
		must(t, c.open(), c.put(map[name][]byte{keyOf(0): []byte("a")}))
		k, loc := keyOf(0), c.index[keyOf(0)]
		s.gate = make(chan struct{})
		read := func(ctx context.Context) error {
			_, err := c.log.Read(ctx, loc, k.namespace, k.key, make([]byte, 1))
			return err
		}
		var readers sync.WaitGroup
		for range 2 {
			readers.Go(func() {
				if err := read(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		ctx, cancel := context.WithCancelCause(t.Context())
		third := make(chan error, 1)
		go func() { third <- read(ctx) }()
		synctest.Wait()
		select {
		case err := <-third:
			t.Errorf("a third read of two did not wait: %v", err)
		default:
		}
		why := errors.New("the caller left")
		cancel(why)
		if err := <-third; !errors.Is(err, why) {
			t.Errorf("a read whose caller left gives %v", err)
		}
		// Nobody closes the files under a read.
		closed := make(chan error, 1)
		go func() { closed <- c.log.Close() }()
		synctest.Wait()
		select {
		case err := <-closed:
			t.Errorf("the log ended under a read: %v", err)
		default:
		}
		close(s.gate)
		readers.Wait()
		must(t, <-closed)
	})
}

func TestASegmentIsNotReusedUnderAReader(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &slow{}
		c := newCaller(func(o *Options) { s.FS = o.FS; o.FS = s; o.Bytes = 3 * smallSegment })
		c.keep = func(Record) bool { return false }
		value := make([]byte, 9*PageSize)
		for i := range value {
			value[i] = byte(i % 251)
		}
		// Not the first record: its page is where a segment's end begins.
		must(t, c.open(), c.put(map[name][]byte{keyOf(50): []byte("first")}), c.put(map[name][]byte{keyOf(0): value}))
		k, loc := keyOf(0), c.index[keyOf(0)]
		s.gate, s.only = make(chan struct{}), len(value)
		got := make(chan error, 1)
		go func() {
			buf := make([]byte, len(value))
			_, err := c.log.Read(t.Context(), loc, k.namespace, k.key, buf)
			if err == nil && string(buf) != string(value) {
				err = errors.New("other bytes")
			}
			got <- err
		}()
		synctest.Wait()
		appended := make(chan error, 1)
		go func() {
			var err error
			for i := 1; i < 8 && err == nil; i++ {
				_, err = c.log.Append(t.Context(), []Write{writeOf(keyOf(i), value)})
			}
			appended <- err
		}()
		synctest.Wait()
		select {
		case err := <-appended:
			t.Errorf("all segments were written under a reader: %v", err)
			appended <- nil
		default:
		}
		close(s.gate)
		must(t, <-got, <-appended)
		if _, err := c.log.Read(t.Context(), loc, k.namespace, k.key, make([]byte, len(value))); !errors.Is(err, ErrGone) {
			t.Errorf("after its end: %v", err)
		}
		must(t, c.log.Close())
	})
}

func TestAReadAllocatesNothingThatGrows(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(Options{FS: durable.OS, Dirs: []string{dir}, Tenant: testTenant, Bytes: 8 * MinSize, LargestBlock: 1 << 20})
	must(t, err)
	data, free, err := newPages(1 << 20)
	must(t, err)
	defer free()
	w := writeOf(keyOf(1), data)
	locs, err := l.Append(t.Context(), []Write{w})
	must(t, err)
	ctx := t.Context()
	n := testing.AllocsPerRun(100, func() {
		if _, err := l.Read(ctx, locs[0], w.Namespace, w.Key, data); err != nil {
			t.Fatal(err)
		}
	})
	if n > 12 {
		t.Errorf("a read makes %.0f allocations", n)
	}
	must(t, l.Close())
}
