package durabletest

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/durable"
)

// Suite checks that a file system behaves as durable.FS says. open gives a
// file system and an empty directory on it.
func Suite(t *testing.T, open func(t *testing.T) (durable.FS, string)) {
	t.Helper()
	run := func(name string, check func(t *testing.T, fsys durable.FS, dir string)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fsys, dir := open(t)
			check(t, fsys, dir)
		})
	}
	run("WriteFileReplacesContentAndMode", checkWriteFile)
	run("ReadFileRefusesWhatIsLongerThanItsLimit", checkReadFile)
	run("LinksShareOneFileAndOutliveTheirOrigin", checkLinks)
	run("SymbolicLinksAreRelativeToTheirFolder", checkSymlinks)
	run("RenameReplacesFilesAndKeepsFullDirectories", checkRename)
	run("AllocateSetsTheLengthAndKeepsContent", checkAllocate)
	run("WritesAtAnOffsetLeaveZeroesBetween", checkWriteAt)
	run("LockHasOneOwner", checkLock)
	run("AbsentFilesAreNotExist", checkAbsent)
	run("RemoveAllRemovesATree", checkRemoveAll)
	run("AnOpenFileOutlivesItsName", checkUnlinked)
	run("SeveralBuffersAreReadAndWrittenAsOneRange", checkVectored)
	run("ManyBuffersAreReadAndWrittenAsOneRange", checkManyBuffers)
	run("AFileOpenedForDirectAccessHoldsWhatWasWritten", checkDirect)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, fsys durable.FS, path string) string {
	t.Helper()
	data, err := durable.ReadFile(fsys, path, 1<<20)
	must(t, err)
	return string(data)
}

func checkWriteFile(t *testing.T, fsys durable.FS, dir string) {
	path := filepath.Join(dir, "a")
	must(t, durable.WriteFile(fsys, path, []byte("one"), 0o600))
	must(t, durable.WriteFile(fsys, path, []byte("second"), 0o644))
	if got := read(t, fsys, path); got != "second" {
		t.Errorf("content %q", got)
	}
	info, err := fsys.Stat(path)
	must(t, err)
	if info.Mode().Perm() != 0o644 || info.Size() != 6 {
		t.Errorf("mode %v, size %d", info.Mode(), info.Size())
	}
	entries, err := fsys.ReadDir(dir)
	must(t, err)
	if len(entries) != 1 {
		t.Errorf("%d entries are left, want the file alone", len(entries))
	}
}

func checkReadFile(t *testing.T, fsys durable.FS, dir string) {
	path := filepath.Join(dir, "a")
	must(t, durable.WriteFile(fsys, path, []byte("12345"), 0o600))
	if _, err := durable.ReadFile(fsys, path, 4); err == nil {
		t.Error("a file longer than the limit was read")
	}
	if got, err := durable.ReadFile(fsys, path, 5); err != nil || len(got) != 5 {
		t.Errorf("read %d bytes, %v", len(got), err)
	}
}

func checkLinks(t *testing.T, fsys durable.FS, dir string) {
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	must(t, durable.WriteFile(fsys, a, []byte("x"), 0o444))
	must(t, fsys.Link(a, b))
	infoA, errA := fsys.Lstat(a)
	infoB, errB := fsys.Lstat(b)
	must(t, errors.Join(errA, errB))
	if !durable.SameFile(infoA, infoB) {
		t.Error("two links are not the same file")
	}
	other := filepath.Join(dir, "c")
	must(t, durable.WriteFile(fsys, other, []byte("x"), 0o444))
	infoC, err := fsys.Lstat(other)
	must(t, err)
	if durable.SameFile(infoA, infoC) {
		t.Error("two files are the same")
	}
	if err := fsys.Link(a, b); !errors.Is(err, fs.ErrExist) {
		t.Errorf("second link: %v, want ErrExist", err)
	}
	must(t, fsys.Remove(a))
	if got := read(t, fsys, b); got != "x" {
		t.Errorf("content %q", got)
	}
}

func checkSymlinks(t *testing.T, fsys durable.FS, dir string) {
	must(t, fsys.MkdirAll(filepath.Join(dir, "x/y"), 0o755))
	must(t, durable.WriteFile(fsys, filepath.Join(dir, "blob"), []byte("b"), 0o444))
	link := filepath.Join(dir, "x/y/link")
	must(t, fsys.Symlink("../../blob", link))
	if got := read(t, fsys, link); got != "b" {
		t.Errorf("content %q", got)
	}
	if target, err := fsys.Readlink(link); err != nil || target != "../../blob" {
		t.Errorf("target %q, %v", target, err)
	}
	info, err := fsys.Lstat(link)
	must(t, err)
	if info.Mode()&fs.ModeSymlink == 0 {
		t.Errorf("mode %v, want a link", info.Mode())
	}
}

func checkRename(t *testing.T, fsys durable.FS, dir string) {
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	must(t, durable.WriteFile(fsys, a, []byte("a"), 0o600))
	must(t, durable.WriteFile(fsys, b, []byte("b"), 0o600))
	must(t, fsys.Rename(a, b))
	if got := read(t, fsys, b); got != "a" {
		t.Errorf("content %q", got)
	}
	if err := fsys.Rename(a, b); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("rename of nothing: %v", err)
	}
	full, other := filepath.Join(dir, "full"), filepath.Join(dir, "other")
	must(t, fsys.MkdirAll(filepath.Join(full, "in"), 0o755))
	must(t, fsys.Mkdir(other, 0o755))
	if err := fsys.Rename(other, full); !errors.Is(err, fs.ErrExist) {
		t.Errorf("rename onto a full directory: %v, want ErrExist", err)
	}
	must(t, fsys.SyncDir(dir))
}

func checkAllocate(t *testing.T, fsys durable.FS, dir string) {
	f, err := fsys.OpenFile(filepath.Join(dir, "a"), os.O_CREATE|os.O_RDWR, 0o600)
	must(t, err)
	_, err = f.WriteAt([]byte("head"), 0)
	must(t, err)
	must(t, f.Allocate(10000))
	info, err := f.Stat()
	must(t, err)
	if info.Size() != 10000 {
		t.Errorf("size %d", info.Size())
	}
	p := make([]byte, 5)
	_, err = f.ReadAt(p, 0)
	must(t, err)
	if string(p) != "head\x00" {
		t.Errorf("content %q", p)
	}
	must(t, f.Allocate(0))
	must(t, f.Datasync())
	must(t, f.Truncate(2))
	if n, err := f.ReadAt(p, 0); n != 2 || !errors.Is(err, io.EOF) {
		t.Errorf("read %d, %v past the end", n, err)
	}
	must(t, f.Close())
}

func checkWriteAt(t *testing.T, fsys durable.FS, dir string) {
	path := filepath.Join(dir, "a")
	f, err := fsys.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	must(t, err)
	_, err = f.WriteAt([]byte("z"), 3)
	must(t, err)
	must(t, f.Chmod(0o444))
	must(t, f.Sync())
	must(t, f.Close())
	if got := read(t, fsys, path); got != "\x00\x00\x00z" {
		t.Errorf("content %q", got)
	}
}

func checkLock(t *testing.T, fsys durable.FS, dir string) {
	path := filepath.Join(dir, "lock")
	l, err := fsys.Lock(path)
	must(t, err)
	if _, err := fsys.Lock(path); !errors.Is(err, durable.ErrLocked) {
		t.Errorf("second lock: %v, want ErrLocked", err)
	}
	must(t, l.Close())
	l, err = fsys.Lock(path)
	must(t, err)
	must(t, l.Close())
}

func checkAbsent(t *testing.T, fsys durable.FS, dir string) {
	path := filepath.Join(dir, "none")
	_, err := fsys.OpenFile(path, os.O_RDONLY, 0)
	for name, err := range map[string]error{"open": err, "remove": fsys.Remove(path), "chmod": fsys.Chmod(path, 0o600), "link": fsys.Link(path, path+"2")} {
		if !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v, want ErrNotExist", name, err)
		}
	}
	must(t, fsys.RemoveAll(path))
}

func checkRemoveAll(t *testing.T, fsys durable.FS, dir string) {
	tree := filepath.Join(dir, "tree")
	must(t, durable.MkdirAllSynced(fsys, filepath.Join(tree, "a/b"), 0o755))
	must(t, durable.WriteFile(fsys, filepath.Join(tree, "a/b/c"), []byte("c"), 0o444))
	must(t, fsys.RemoveAll(tree))
	if _, err := fsys.Lstat(tree); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the tree is still there: %v", err)
	}
	if free, total, err := fsys.Free(dir); err != nil || free <= 0 || total < free {
		t.Errorf("free %d of %d, %v", free, total, err)
	}
}

func checkUnlinked(t *testing.T, fsys durable.FS, dir string) {
	path := filepath.Join(dir, "a")
	must(t, durable.WriteFile(fsys, path, []byte("abc"), 0o600))
	f, err := fsys.OpenFile(path, os.O_RDONLY, 0)
	must(t, err)
	must(t, fsys.Remove(path))
	data, err := io.ReadAll(f)
	must(t, err)
	if string(data) != "abc" {
		t.Errorf("content %q", data)
	}
	must(t, f.Close())
}

func checkVectored(t *testing.T, fsys durable.FS, dir string) {
	path := filepath.Join(dir, "a")
	f, err := fsys.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	must(t, err)
	parts := [][]byte{nil, []byte("hea"), {}, []byte("d and"), []byte(" body")}
	given := slices.Clone(parts)
	if n, err := durable.WriteVAt(f, parts, 3); n != 13 || err != nil {
		t.Fatalf("wrote %d, %v", n, err)
	}
	if !slices.EqualFunc(parts, given, bytes.Equal) {
		t.Errorf("the list of buffers became %q", parts)
	}
	if got := read(t, fsys, path); got != "\x00\x00\x00head and body" {
		t.Errorf("content %q", got)
	}
	for _, c := range []struct {
		off   int64
		sizes []int
		want  string
		err   error
	}{
		{3, []int{4, 0, 9}, "head and body", nil},
		{0, []int{1, 2, 4}, "\x00\x00\x00head", nil},
		{12, []int{2, 2}, "body", nil},
		{12, []int{2, 3}, "body", io.ErrUnexpectedEOF},
		{12, []int{4, 1, 7}, "body", io.ErrUnexpectedEOF},
		{16, []int{1, 1}, "", io.EOF},
		{4096, []int{0, 1}, "", io.EOF},
		{16, []int{0, 0}, "", nil},
		{16, nil, "", nil},
	} {
		var bufs [][]byte
		for _, size := range c.sizes {
			bufs = append(bufs, make([]byte, size))
		}
		n, err := durable.ReadVAt(f, bufs, c.off)
		got := bytes.Join(bufs, nil)[:n]
		if string(got) != c.want || !errors.Is(err, c.err) {
			t.Errorf("%v from %d on: %q, %v, want %q, %v", c.sizes, c.off, got, err, c.want, c.err)
		}
	}
	_, readErr := durable.ReadVAt(f, [][]byte{{0}}, -1)
	_, writeErr := durable.WriteVAt(f, [][]byte{{0}}, -1)
	if readErr == nil || writeErr == nil {
		t.Errorf("before the file's begin: %v, %v", readErr, writeErr)
	}
	must(t, f.Close())
	_, readErr = durable.ReadVAt(f, [][]byte{{0}}, 0)
	_, writeErr = durable.WriteVAt(f, [][]byte{{0}}, 0)
	if !errors.Is(readErr, fs.ErrClosed) || !errors.Is(writeErr, fs.ErrClosed) {
		t.Errorf("a closed file: %v, %v, want ErrClosed", readErr, writeErr)
	}
}

func checkManyBuffers(t *testing.T, fsys durable.FS, dir string) {
	path := filepath.Join(dir, "a")
	f, err := fsys.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	must(t, err)
	// More than a kernel takes at once, the first of them empty.
	var bufs [][]byte
	for range 1500 {
		bufs = append(bufs, []byte{})
	}
	for i := range 2500 {
		bufs = append(bufs, []byte{byte(i), byte(i >> 8)}[:1+i%2])
	}
	want := bytes.Join(bufs, nil)
	if n, err := durable.WriteVAt(f, bufs, 0); n != len(want) || err != nil {
		t.Fatalf("wrote %d of %d, %v", n, len(want), err)
	}
	for _, b := range bufs {
		clear(b)
	}
	n, err := durable.ReadVAt(f, bufs, 0)
	if n != len(want) || err != nil || !bytes.Equal(bytes.Join(bufs, nil), want) {
		t.Errorf("read %d of %d, %v", n, len(want), err)
	}
	must(t, f.Close())
}

// checkDirect uses O_DIRECT as its callers do: a file system that refuses it at
// open gets a plain file.
func checkDirect(t *testing.T, fsys durable.FS, dir string) {
	path := filepath.Join(dir, "a")
	f, err := fsys.OpenFile(path, os.O_CREATE|os.O_RDWR|syscall.O_DIRECT, 0o600)
	if errors.Is(err, syscall.EINVAL) {
		f, err = fsys.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	}
	must(t, err)
	memory, err := unix.Mmap(-1, 0, 4*PageSector, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	must(t, err)
	defer func() { must(t, unix.Munmap(memory)) }()
	out, in := memory[:2*PageSector], memory[2*PageSector:]
	for i := range out {
		out[i] = byte(i / 7)
	}
	must(t, f.Allocate(4*PageSector))
	if n, err := durable.WriteVAt(f, [][]byte{out[:PageSector], out[PageSector:]}, PageSector); n != len(out) || err != nil {
		t.Fatalf("wrote %d, %v", n, err)
	}
	must(t, f.Datasync())
	if n, err := durable.ReadVAt(f, [][]byte{in[:PageSector], in[PageSector:]}, PageSector); n != len(in) || err != nil || !bytes.Equal(in, out) {
		t.Errorf("read %d, %v", n, err)
	}
	// Where the file ends within a sector, so does the read.
	must(t, f.Truncate(2*PageSector+100))
	clear(in)
	n, err := durable.ReadVAt(f, [][]byte{in[:PageSector], in[PageSector:]}, PageSector)
	if n != PageSector+100 || !errors.Is(err, io.ErrUnexpectedEOF) || !bytes.Equal(in[:n], out[:n]) {
		t.Errorf("read %d, %v, want %d and the end", n, err, PageSector+100)
	}
	must(t, f.Close())
}
