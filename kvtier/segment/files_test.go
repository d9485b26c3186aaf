package segment

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/durable"
)

func TestAListOfFilesIsReadAsItWasWrittenAndNothingElseIs(t *testing.T) {
	t.Parallel()
	for _, numbers := range [][]uint32{nil, {0}, {7}, {0, 1, 2, 5, 7, 8}, {maxNumber - 1, maxNumber}} {
		got, err := decodeFiles(encodeFiles(numbers))
		if err != nil || !slices.Equal(got, numbers) {
			t.Errorf("%v is read as %v, %v", numbers, got, err)
		}
	}
	golden(t, "files_v1.hex", encodeFiles([]uint32{0, 1, 2, 3, 5, 8, 9}))
	data := encodeFiles([]uint32{0, 1, 5})
	for i := range data {
		other := slices.Clone(data)
		other[i] ^= 1
		if numbers, err := decodeFiles(other); err == nil {
			t.Errorf("with byte %d another it is read as %v", i, numbers)
		}
	}
	newer := []byte("hearth files 2 whatever")
	newer = append(append(newer, ' '), hex16(hash64(newer))...)
	if _, err := decodeFiles(newer); !errors.Is(err, ErrNewer) {
		t.Errorf("a newer list gives %v", err)
	}
}

func FuzzFiles(f *testing.F) {
	f.Add(encodeFiles(nil))
	f.Add(encodeFiles([]uint32{0, 1, 2, 9}))
	f.Fuzz(func(t *testing.T, data []byte) {
		numbers, err := decodeFiles(data)
		if err == nil && !bytes.Equal(encodeFiles(numbers), data) {
			t.Errorf("%q is read as %v", data, numbers)
		}
	})
}

// manyEnded is a log on two drives with keys that ended, in several segments, closed.
func manyEnded(t *testing.T) (c *caller, paths []string) {
	t.Helper()
	c = opened(t, func(o *Options) { withDrives(2)(o); o.Bytes = 40 * smallSegment })
	must(t, fill(0, 40, 0)(c), c.seal(), endAll(1, 2, 3, 4, 5, 6, 7, 8, 9)(c), c.seal(), fill(40, 60, 0)(c), endAll(11, 12, 13, 41)(c), c.close())
	for _, dir := range []string{"/drive0/blocks", "/drive1/blocks"} {
		list, err := c.fs.ReadDir(dir)
		must(t, err)
		for _, e := range list {
			if _, ok := parseName(e.Name()); ok {
				paths = append(paths, filepath.Join(dir, e.Name()))
			}
		}
	}
	if len(paths) < 4 {
		t.Fatalf("there are %d segments", len(paths))
	}
	return c, paths
}

func TestASegmentThatSomebodyTookAwayTakesWhatItsTombstonesWereAboutWithIt(t *testing.T) {
	t.Parallel()
	for what, spoil := range map[string]func(c *caller, path string) error{
		"removed": func(c *caller, path string) error { return c.fs.Remove(path) },
		"renamed": func(c *caller, path string) error { return c.fs.Rename(path, path+".old") },
		"emptied": func(c *caller, path string) error { return truncate(c.fs, path) },
	} {
		_, paths := manyEnded(t)
		for i := range paths {
			c, _ := manyEnded(t)
			must(t, spoil(c, paths[i]))
			report, err := Check(t.Context(), CheckOptions{FS: c.fs, Dir: filepath.Dir(paths[i]), Tenant: testTenant})
			if err != nil || len(report.Damaged) == 0 {
				t.Errorf("%s is %s: a check finds nothing: %v", paths[i], what, err)
			}
			clear(c.sure) // what was sealed on that drive goes
			must(t, c.open(), c.check())
			if what != "emptied" && c.log.Stats().Missing != 1 {
				t.Errorf("%s is %s: %d files are said to be gone", paths[i], what, c.log.Stats().Missing)
			}
			for k, loc := range c.index {
				if filepath.Dir(paths[i]) == c.log.drives[loc.Drive()].dir {
					t.Errorf("%s is %s: %v of its drive is found", paths[i], what, k.key)
				}
			}
			if len(c.index) == 0 {
				t.Errorf("%s is %s: the other drive's blocks go, too", paths[i], what)
			}
			must(t, fill(60, 80, 0)(c), c.seal(), c.restart(), c.check(), c.close())
		}
	}
}

func TestASegmentThatComesBackIsNotBelieved(t *testing.T) {
	t.Parallel()
	c := opened(t, func(o *Options) { o.Bytes = 10 * smallSegment })
	must(t, fill(0, 40, 0)(c), c.seal())
	path := c.log.drives[0].list()[0].path
	old := readAll(t, c, path)
	must(t, c.log.SetBytes(t.Context(), 4*smallSegment))
	if _, err := c.fs.Stat(path); err == nil {
		t.Fatal("the segment is still there")
	}
	must(t, endAll(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)(c), c.close())
	must(t, durable.WriteFile(c.fs, path, old, 0o600), c.open(), c.check())
	if _, err := c.fs.Stat(path); err == nil && c.log.drives[0].segments[0] == nil {
		t.Error("a file that is not on the list stays")
	}
	for i := range 10 {
		if _, found := c.index[keyOf(i)]; found {
			t.Errorf("key %d is back", i)
		}
	}
}

func TestSegmentsFromBeforeThereWasAListAreTakenIn(t *testing.T) {
	t.Parallel()
	c := opened(t, nil)
	must(t, fill(0, 30, 0)(c), c.seal(), c.close())
	must(t, c.fs.Remove("/drive0/blocks/files"), c.open(), c.check())
	if len(c.index) != 30 {
		t.Errorf("%d of 30 blocks are found", len(c.index))
	}
	if _, known, err := readFiles(c.fs, "/drive0/blocks"); !known || err != nil {
		t.Errorf("there is no list: %v", err)
	}
}

func TestAFullDriveHasRoomForTheListOnceAFileGoes(t *testing.T) {
	t.Parallel()
	c := opened(t, nil)
	must(t, fill(0, 40, 0)(c), c.seal())
	freed := false
	c.fs.FailWhen(func(op, path string) error {
		freed = freed || op == "truncate"
		if op == "open" && !freed {
			return syscall.ENOSPC
		}
		return nil
	})
	d := c.log.drives[0]
	before := len(d.segments)
	must(t, c.log.SetBytes(t.Context(), int64(before-1)*smallSegment))
	if len(d.segments) != before-1 || !freed {
		t.Errorf("%d of %d segments are left", len(d.segments), before)
	}
	c.fs.Heal()
	clear(c.sure)
	c.options = func(o *Options) { o.Bytes = int64(before-1) * smallSegment }
	must(t, c.close(), c.open(), c.check())
	// The rest of one that was about to go.
	must(t, c.close())
	f, err := c.fs.OpenFile("/drive0/blocks/77.out", os.O_RDWR|os.O_CREATE, 0o600)
	must(t, err, f.Close(), c.open(), c.check())
	if _, err := c.fs.Stat("/drive0/blocks/77.out"); err == nil {
		t.Error("what was about to be removed stays")
	}
}

// TestNothingIsWrittenBelowADriveThatIsAway has another directory at a drive's path
// for a while, as where a file system is unmounted that covered one: tombstones that
// went there would be missed where the drive's records are.
func TestNothingIsWrittenBelowADriveThatIsAway(t *testing.T) {
	t.Parallel()
	c := opened(t, func(o *Options) { withDrives(2)(o); o.Bytes = 40 * smallSegment })
	must(t, fill(0, 40, 0)(c), c.seal())
	const dir, away = "/drive1/blocks", "/drive1/away"
	must(t, c.fs.Rename(dir, away), c.fs.MkdirAll(dir, 0o700))
	for i := range 40 {
		must(t, c.end(keyOf(i)), fill(40+i, 41+i, 0)(c))
	}
	list, err := c.fs.ReadDir(dir)
	must(t, err)
	for _, e := range list {
		t.Errorf("%s is written where another file system was", e.Name())
	}
	// The process is killed, and the drive is back.
	clear(c.sure)
	must(t, c.fs.RemoveAll(dir), c.fs.Rename(away, dir), c.open(), c.check())
	for i := range 40 {
		if _, found := c.index[keyOf(i)]; found {
			t.Errorf("key %d was ended and is found", i)
		}
	}
}

func TestTheOnlyDriveIsTakenBackWhereItsPathLeadsElsewhere(t *testing.T) {
	t.Parallel()
	usable := errors.New("another one")
	c := opened(t, func(o *Options) {
		o.Bytes = 10 * smallSegment
		o.Usable = func(uint32) error { return usable }
	})
	must(t, fill(0, 40, 0)(c), c.seal(), c.log.TakeBack(t.Context()))
	const dir, away = "/drive0/blocks", "/drive0/away"
	must(t, c.fs.Rename(dir, away), c.fs.MkdirAll(dir, 0o700))
	if err := c.log.TakeBack(t.Context()); !errors.Is(err, usable) {
		t.Errorf("a drive that is another one: %v", err)
	}
	if err := c.end(keyOf(39)); !errors.Is(err, ErrNoDrive) {
		t.Errorf("a key is ended on no drive: %v", err)
	}
	usable = nil
	must(t, c.log.TakeBack(t.Context()))
	clear(c.index)
	clear(c.sure)
	clear(c.known)
	clear(c.may)
	must(t, c.check(), fill(40, 60, 0)(c), c.seal(), c.restart(), c.check())
	if len(c.index) == 0 || c.log.Stats().Out != 0 {
		t.Errorf("%d blocks are found, %d drives are given up", len(c.index), c.log.Stats().Out)
	}
}
