package durable_test

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
)

// These tests hold the crashable file system to what drives and kernels do:
// a store is only as sound as the crashes it was tried with.

func create(t *testing.T, fsys durable.FS, path string) durable.File {
	t.Helper()
	f, err := fsys.OpenFile(path, syscall.O_CREAT|syscall.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func writeAt(t *testing.T, f durable.File, data []byte, off int64) {
	t.Helper()
	if _, err := f.WriteAt(data, off); err != nil {
		t.Fatal(err)
	}
}

// contents is what each of the names holds, "none" where there is no file.
func contents(t *testing.T, fsys durable.FS, names ...string) string {
	t.Helper()
	text := ""
	for _, name := range names {
		data, err := durable.ReadFile(fsys, name, 1<<20)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			data = []byte("none")
		case err != nil:
			t.Fatal(err)
		}
		text += name + "=" + string(data) + " "
	}
	return text
}

func TestAnUnsyncedWriteSurvivesBySectors(t *testing.T) {
	t.Parallel()
	for _, sector := range []int64{durabletest.SmallSector, durabletest.PageSector} {
		fsys := durabletest.New()
		f := create(t, fsys, "/a")
		old, now := bytes.Repeat([]byte{'o'}, 3*4096), bytes.Repeat([]byte{'n'}, 3*4096)
		writeAt(t, f, old, 0)
		if err := errors.Join(f.Sync(), fsys.SyncDir("/")); err != nil {
			t.Fatal(err)
		}
		writeAt(t, f, now, 0)
		torn := fsys.CrashWith(sector, func(c durabletest.Unsynced) bool { return c.Sector == 1 })
		want := slices.Clone(old)
		copy(want[sector:], now[:sector])
		if got, err := durable.ReadFile(torn, "/a", 1<<20); err != nil || !bytes.Equal(got, want) {
			t.Errorf("sectors of %d: the second alone should be new, %v", sector, err)
		}
	}
}

func TestALengthSurvivesApartFromItsBytes(t *testing.T) {
	t.Parallel()
	fsys := durabletest.New()
	f := create(t, fsys, "/a")
	if err := fsys.SyncDir("/"); err != nil {
		t.Fatal(err)
	}
	writeAt(t, f, []byte("abc"), 0)
	lengthOnly := fsys.CrashWith(4096, func(c durabletest.Unsynced) bool { return c.Sector < 0 })
	bytesOnly := fsys.CrashWith(4096, func(c durabletest.Unsynced) bool { return c.Sector >= 0 })
	if got := contents(t, lengthOnly, "/a"); got != "/a=\x00\x00\x00 " {
		t.Errorf("length alone: %q", got)
	}
	if got := contents(t, bytesOnly, "/a"); got != "/a= " {
		t.Errorf("bytes without length: %q", got)
	}
}

func TestWritesToSeparateFilesSurviveInAnyOrder(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for seed := range uint64(64) {
		fsys := durabletest.New()
		for _, name := range []string{"/a", "/b"} {
			f := create(t, fsys, name)
			if err := fsys.SyncDir("/"); err != nil {
				t.Fatal(err)
			}
			writeAt(t, f, []byte("x"), 0)
		}
		seen[contents(t, fsys.Crash(rand.New(rand.NewPCG(seed, 1))), "/a", "/b")] = true
	}
	for _, state := range []string{"/a=x /b= ", "/a= /b=x ", "/a=x /b=x ", "/a= /b= "} {
		if !seen[state] {
			t.Errorf("no crash left %q", state)
		}
	}
}

func TestARenameIsLostOrWholeAndNeverHalf(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for seed := range uint64(64) {
		fsys := durabletest.New()
		if err := durable.WriteFile(fsys, "/new", []byte("new"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := durable.WriteFile(fsys, "/old", []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := fsys.Rename("/new", "/old"); err != nil {
			t.Fatal(err)
		}
		seen[contents(t, fsys.Crash(rand.New(rand.NewPCG(seed, 2))), "/new", "/old")] = true
	}
	if len(seen) != 2 || !seen["/new=new /old=old "] || !seen["/new=none /old=new "] {
		t.Errorf("crashes left %v", seen)
	}
}

func TestARenamedFileWithoutASyncMayBeEmpty(t *testing.T) {
	t.Parallel()
	fsys := durabletest.New()
	if err := durable.WriteFile(fsys, "/a", []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	writeAt(t, create(t, fsys, "/temp"), []byte("new"), 0)
	if err := errors.Join(fsys.Rename("/temp", "/a"), fsys.SyncDir("/")); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, fsys.CrashWith(4096, durabletest.NamesAlone), "/a"); got != "/a= " {
		t.Errorf("after the crash: %q", got)
	}
}

func TestALaterByteOfASectorNeverSurvivesWithoutTheEarlier(t *testing.T) {
	t.Parallel()
	fsys := durabletest.New()
	f := create(t, fsys, "/a")
	writeAt(t, f, []byte("....."), 0)
	if err := errors.Join(f.Sync(), fsys.SyncDir("/")); err != nil {
		t.Fatal(err)
	}
	writeAt(t, f, []byte("1"), 0)
	writeAt(t, f, []byte("2"), 1)
	last := fsys.Changes()
	for _, c := range []struct {
		survives durabletest.Survives
		want     string
	}{{durabletest.Only(last), "/a=12... "}, {durabletest.Without(last), "/a=1.... "}, {durabletest.Nothing, "/a=..... "}} {
		if got := contents(t, fsys.CrashWith(4096, c.survives), "/a"); got != c.want {
			t.Errorf("after the crash: %q, want %q", got, c.want)
		}
	}
	if got := fsys.Unsynced(); !slices.Equal(got, []int{last - 1, last}) {
		t.Errorf("unsynced changes %v", got)
	}
}

func TestAFailedSyncLosesItsBytesAndNoLaterSyncBringsThemBack(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"sync", "datasync"} {
		fsys := durabletest.New()
		f := create(t, fsys, "/a")
		if err := fsys.SyncDir("/"); err != nil {
			t.Fatal(err)
		}
		writeAt(t, f, []byte("lost"), 0)
		fsys.FailAt(fsys.Changes()+1, syscall.EIO)
		sync := map[string]func() error{"sync": f.Sync, "datasync": f.Datasync}[op]
		if err := sync(); !errors.Is(err, syscall.EIO) {
			t.Errorf("%s: %v, want EIO", op, err)
		}
		writeAt(t, f, []byte("kept"), 4096)
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
		if got := contents(t, fsys, "/a")[:7]; got != "/a=lost" {
			t.Errorf("%s: the cache should still hold %q", op, got)
		}
		fsys.DropCaches()
		want := contents(t, fsys, "/a")
		if lost := "/a=\x00\x00\x00\x00"; want[:7] != lost || want[len(want)-5:] != "kept " {
			t.Errorf("%s: %q is on the drive", op, want)
		}
		if got := contents(t, fsys.CrashWith(4096, durabletest.Everything), "/a"); got != want {
			t.Errorf("%s: %q is there after a crash", op, got)
		}
	}
}

func TestModesAndTimesNeedASyncOfTheirOwn(t *testing.T) {
	t.Parallel()
	fsys := durabletest.New()
	f := create(t, fsys, "/a")
	if err := errors.Join(f.Sync(), fsys.SyncDir("/"), f.Chmod(0o444), f.Datasync()); err != nil {
		t.Fatal(err)
	}
	if info, err := fsys.CrashWith(4096, durabletest.Nothing).Stat("/a"); err != nil || info.Mode() != 0o600 {
		t.Errorf("a datasync kept mode %v, %v", info.Mode(), err)
	}
	fsys = durabletest.New()
	f = create(t, fsys, "/a")
	when := time.Unix(1e9, 0)
	if err := errors.Join(fsys.SyncDir("/"), f.Chmod(0o444), fsys.Chtimes("/a", when, when), f.Sync()); err != nil {
		t.Fatal(err)
	}
	if info, err := fsys.CrashWith(4096, durabletest.Nothing).Stat("/a"); err != nil || info.Mode() != 0o444 || !info.ModTime().Equal(when) {
		t.Errorf("a sync lost mode %v or time %v, %v", info.Mode(), info.ModTime(), err)
	}
}

func TestARecoveryCanCrashToo(t *testing.T) {
	t.Parallel()
	fsys := durabletest.New()
	if err := durable.WriteFile(fsys, "/a", []byte("one"), 0o600); err != nil {
		t.Fatal(err)
	}
	again := fsys.Crash(nil)
	again.CrashAt(again.Changes()+4, false)
	if err := durable.WriteFile(again, "/a", []byte("two"), 0o600); !errors.Is(err, durabletest.ErrCrashed) {
		t.Fatalf("write: %v, want a crash", err)
	}
	if got := contents(t, again.Crash(nil), "/a"); got != "/a=one " {
		t.Errorf("after the second crash: %q", got)
	}
}

func TestReadsFailWhereTheyAreSetTo(t *testing.T) {
	t.Parallel()
	fsys := durabletest.New()
	if err := durable.WriteFile(fsys, "/a", []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	failed := 0
	for n := 1; ; n++ {
		before := fsys.Reads()
		fsys.FailReadAt(before+n, syscall.EIO)
		_, err := durable.ReadFile(fsys, "/a", 10)
		if fsys.Reads()-before < n {
			break
		}
		if !errors.Is(err, syscall.EIO) {
			t.Errorf("read %d: %v, want EIO", n, err)
		}
		failed++
	}
	if failed < 3 {
		t.Errorf("%d reads could fail, want open, read and read at the end", failed)
	}
	fsys.FailReadWhen(func(op, path string) error {
		if op == "readdir" {
			return fmt.Errorf("no listing of %s", path)
		}
		return nil
	})
	if _, err := fsys.ReadDir("/"); err == nil {
		t.Error("a failing listing went unnoticed")
	}
}

func TestDrivesFillUpInThreeWays(t *testing.T) {
	t.Parallel()
	fill := map[string]struct {
		limit func(fsys *durabletest.FS)
		want  error
		room  bool // Free tells of room
	}{
		"bytes": {func(fsys *durabletest.FS) { fsys.SetCapacity(2) }, syscall.ENOSPC, false},
		"quota": {func(fsys *durabletest.FS) { fsys.SetQuota(2) }, syscall.EDQUOT, true},
		"files": {func(fsys *durabletest.FS) { fsys.SetInodes(fsys.Inodes()) }, syscall.ENOSPC, true},
	}
	for name, c := range fill {
		fsys := durabletest.New()
		if err := durable.WriteFile(fsys, "/a", []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		c.limit(fsys)
		if err := durable.WriteFile(fsys, "/b", []byte("xy"), 0o600); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		if free, _, err := fsys.Free("/"); err != nil || c.room != (free > 1000) {
			t.Errorf("%s: %d bytes free, %v", name, free, err)
		}
		if got := contents(t, fsys, "/a", "/b"); got != "/a=x /b=none " {
			t.Errorf("%s: %q is left", name, got)
		}
	}
}

func TestAReadOnlyFileSystemRefusesEveryChangeAndReads(t *testing.T) {
	t.Parallel()
	fsys := durabletest.New()
	if err := durable.WriteFile(fsys, "/a", []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	f := create(t, fsys, "/a")
	fsys.SetReadOnly(true)
	_, writeErr := f.WriteAt([]byte("y"), 0)
	_, openErr := fsys.OpenFile("/a", syscall.O_RDWR, 0)
	_, lockErr := fsys.Lock("/lock")
	for name, err := range map[string]error{
		"write": writeErr, "open": openErr, "lock": lockErr, "sync": f.Sync(), "truncate": f.Truncate(0), "chmod": fsys.Chmod("/a", 0o644),
		"rename": fsys.Rename("/a", "/b"), "remove": fsys.Remove("/a"), "mkdir": fsys.Mkdir("/d", 0o755), "link": fsys.Link("/a", "/b"),
		"symlink": fsys.Symlink("a", "/b"), "syncdir": fsys.SyncDir("/"), "chtimes": fsys.Chtimes("/a", time.Time{}, time.Time{}),
	} {
		if !errors.Is(err, syscall.EROFS) {
			t.Errorf("%s: %v, want EROFS", name, err)
		}
	}
	if got := contents(t, fsys, "/a"); got != "/a=x " {
		t.Errorf("reading: %q", got)
	}
	fsys.SetReadOnly(false)
	if err := durable.WriteFile(fsys, "/a", []byte("y"), 0o600); err != nil {
		t.Error(err)
	}
}
