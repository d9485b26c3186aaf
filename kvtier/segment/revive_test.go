package segment

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/durable/durabletest"
)

// givenUp is a log of two drives with one given up, since it could not note the end
// of keys 0 to 9; those are not to be found again.
func givenUp(t *testing.T, cause error) (c *caller, bad *drive) {
	t.Helper()
	c = opened(t, func(o *Options) {
		withDrives(2)(o)
		o.Bytes, o.Direct = 20*smallSegment, true
		o.Emptied = func(n uint32) {
			for k, loc := range c.index {
				if loc.Drive() == n {
					delete(c.index, k)
					delete(c.sure, k)
				}
			}
			for k := range c.known {
				for loc := range c.known[k] {
					if loc.Drive() == n {
						delete(c.known[k], loc)
					}
				}
				c.forget(k)
			}
		}
	})
	must(t, fill(0, 40, 0)(c), c.seal())
	bad = c.log.drives[c.log.Segments()[0].Drive]
	failOn(c.fs, filepath.Dir(bad.dir), cause, "write", "datasync", "sync", "open", "rename")
	must(t, endAll(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)(c))
	if s := c.log.Stats(); s.Out != 1 {
		t.Fatalf("%d drives are given up", s.Out)
	}
	return c, bad
}

func TestADriveThatWasGivenUpIsTakenBackEmptyWhenItCanBeWritten(t *testing.T) {
	t.Parallel()
	c, bad := givenUp(t, syscall.EIO)
	before := c.fs.Changes()
	if err := c.log.TakeBack(t.Context()); !errors.Is(err, syscall.EIO) {
		t.Errorf("a drive that fails still: %v", err)
	}
	if n := c.fs.Changes() - before; n > 3 {
		t.Errorf("a try is %d changes", n)
	}
	must(t, fill(40, 60, 0)(c), c.check()) // the other goes on
	c.fs.Heal()
	must(t, c.log.TakeBack(t.Context()), c.check())
	if s := c.log.Stats(); s.Out != 0 || s.Aside != 0 {
		t.Errorf("%d drives are given up, %d aside", s.Out, s.Aside)
	}
	for k, loc := range c.index {
		if loc.Drive() == bad.number {
			t.Errorf("%v is on a drive that was emptied", k.key)
		}
	}
	must(t, fill(60, 140, 0)(c), c.check(), c.seal())
	if !slices.ContainsFunc(c.log.Segments(), func(s Info) bool { return s.Drive == bad.number }) {
		t.Error("nothing is written to the drive that is back")
	}
	c.found = 0
	must(t, c.restart(), c.check())
	if c.found == 0 {
		t.Error("nothing is found after a restart")
	}
	changes := c.fs.Changes()
	must(t, c.log.TakeBack(t.Context()))
	if c.fs.Changes() != changes {
		t.Error("something is written where no drive is given up")
	}
}

func TestADriveThatFailsAgainWhileItIsTakenBackIsTold(t *testing.T) {
	t.Parallel()
	c, bad := givenUp(t, syscall.EIO)
	notes := 0
	c.fs.FailWhen(func(op, path string) error {
		if op == "rename" && path == filepath.Join(bad.dir, generationFile) {
			if notes++; notes > 1 {
				return syscall.EIO
			}
		}
		return nil
	})
	err := c.log.TakeBack(t.Context())
	if !errors.Is(err, syscall.EIO) || !strings.Contains(err.Error(), bad.dir) || c.log.Stats().Out != 1 {
		t.Errorf("a drive that cannot note the generation: %v, %d are given up", err, c.log.Stats().Out)
	}
	if out := c.log.Out(); len(out) != 1 || !errors.Is(out[0], syscall.EIO) {
		t.Errorf("it is said of it: %v", out)
	}
	must(t, fill(40, 60, 0)(c), c.check()) // the other goes on
	c.fs.Heal()
	must(t, c.log.TakeBack(t.Context()), c.check())
	if c.log.Stats().Out != 0 || c.log.Out() != nil {
		t.Errorf("it is still given up: %v", c.log.Out())
	}
}

func TestADriveThatIsTakenBackIsWrittenAsItsFileSystemIsNow(t *testing.T) {
	t.Parallel()
	c, bad := givenUp(t, syscall.EIO)
	if !c.log.Direct() {
		t.Fatal("the drives are written through the page cache")
	}
	c.fs.FailWhen(func(op, path string) error {
		if op == "open" && strings.HasPrefix(path, bad.dir) && strings.HasSuffix(path, "-direct") {
			return syscall.EINVAL
		}
		return nil
	})
	must(t, c.log.TakeBack(t.Context()), fill(60, 140, 0)(c), c.check())
	if c.log.Direct() {
		t.Error("a file system that has no direct way is written so")
	}
}

func TestTheOthersTakeTheShareOfADriveThatIsGivenUp(t *testing.T) {
	t.Parallel()
	// Of few segments one drive has all.
	c := opened(t, func(o *Options) { withDrives(2)(o); o.Bytes = 8 * smallSegment })
	must(t, fill(0, 30, 0)(c), c.seal())
	bad := c.log.drives[c.log.Segments()[0].Drive]
	failOn(c.fs, filepath.Dir(bad.dir), syscall.EIO, "write", "datasync", "sync", "open", "rename")
	for _, k := range []int{1, 2, 3} {
		if err := c.end(keyOf(k)); err != nil {
			t.Fatal(err)
		}
	}
	must(t, fill(30, 50, 0)(c), c.check())
	if s := c.log.Stats(); s.Out != 1 || c.log.Bytes() > 8*smallSegment {
		t.Errorf("%d drives are given up, %d bytes are taken", s.Out, c.log.Bytes())
	}
}

func TestAFullDriveThatWasGivenUpIsEmptiedToBeTakenBack(t *testing.T) {
	t.Parallel()
	c, bad := givenUp(t, syscall.ENOSPC)
	gone := map[string]bool{}
	c.fs.FailWhen(func(op, path string) error {
		if op == "remove" && strings.HasSuffix(path, ".seg") {
			gone[path] = true
		}
		if len(gone) == 0 && op == "open" && strings.HasPrefix(path, bad.dir) {
			return syscall.ENOSPC
		}
		return nil
	})
	must(t, c.log.TakeBack(t.Context()), fill(60, 140, 0)(c), c.check())
	if c.log.Stats().Out != 0 {
		t.Error("the drive is still given up")
	}
}

// TestCrashWhileADriveIsTakenBackGivesNoOldValue lets changes of it be the last one,
// and be lost.
func TestCrashWhileADriveIsTakenBackGivesNoOldValue(t *testing.T) {
	t.Parallel()
	step := 5 // odd, so that every second one is torn
	switch {
	case everyCrash:
		step = 1
	case testing.Short():
		step = 17
	}
	for n := 1; ; n += step {
		c, _ := givenUp(t, syscall.EIO)
		c.fs.Heal()
		c.fs.CrashAt(c.fs.Changes()+n, n%2 == 0)
		err := c.log.TakeBack(t.Context())
		if err == nil {
			err = fill(60, 100, 0)(c)
		}
		if err != nil && !crashed(c) {
			t.Fatal(err)
		}
		finished := !crashed(c)
		clear(c.sure) // what the drive had is given up on purpose
		for name, lives := range map[string]durabletest.Survives{
			"everything": durabletest.Everything, "nothing": durabletest.Nothing, "names": durabletest.NamesAlone, "bytes": durabletest.BytesAlone,
		} {
			after := c.on(c.fs.CrashWith(durabletest.PageSector, lives))
			for range 2 {
				if err := after.recover(); err != nil {
					t.Fatalf("crash at change %d, what survives: %s: %v", n, name, err)
				}
			}
		}
		if finished {
			t.Logf("%d changes", n)
			return
		}
	}
}

func crashed(c *caller) bool {
	_, err := c.fs.Stat("/")
	return errors.Is(err, durabletest.ErrCrashed)
}
