package durable

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func openOS(t *testing.T, flag int) *OSFile {
	t.Helper()
	f, err := OS.OpenFile(filepath.Join(t.TempDir(), "a"), os.O_CREATE|os.O_RDWR|flag, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f.(*OSFile)
}

// slow is a system call that moves at most three bytes, and is interrupted every
// second time; after end bytes of the file it moves none.
func slow(file []byte, end int) func(int, [][]byte, int64) (int, error) {
	interrupted := false
	return func(_ int, bufs [][]byte, off int64) (int, error) {
		if interrupted = !interrupted; interrupted {
			return 0, syscall.EINTR
		}
		n := 0
		for _, b := range bufs {
			part := copy(b[:min(len(b), 3-n, max(0, end-int(off)-n))], file[int(off)+n:])
			if n += part; part < len(b) {
				break
			}
		}
		return n, nil
	}
}

func TestShortCountsAndInterruptsAreTriedUntilAllIsMoved(t *testing.T) {
	t.Parallel()
	f := openOS(t, 0)
	file := []byte("0123456789abcdefghij")
	for end := range len(file) + 1 {
		bufs := [][]byte{{}, make([]byte, 2), make([]byte, 7), {}, make([]byte, 1), make([]byte, 8)}
		n, err := f.vectored("preadv", slow(file, end), bufs, 2)
		want := min(18, max(0, end-2))
		if n != want || err != nil || !bytes.Equal(bytes.Join(bufs, nil)[:n], file[2:2+want]) {
			t.Errorf("a file of %d bytes: moved %d of %q, %v", end, n, bytes.Join(bufs, nil), err)
		}
		if len(bufs[1]) != 2 || len(bufs[2]) != 7 || len(bufs[5]) != 8 {
			t.Errorf("a file of %d bytes: the caller's buffers were cut", end)
		}
	}
}

func TestAFailureAfterSomeBytesTellsThemAndTheFile(t *testing.T) {
	t.Parallel()
	f := openOS(t, 0)
	calls := 0
	n, err := f.vectored("pwritev", func(_ int, bufs [][]byte, _ int64) (int, error) {
		if calls++; calls > 1 {
			return -1, syscall.ENOSPC
		}
		return len(bufs[0]) + 1, nil
	}, [][]byte{make([]byte, 4), make([]byte, 4)}, 0)
	var pathErr *fs.PathError
	if n != 5 || !errors.Is(err, syscall.ENOSPC) || !errors.As(err, &pathErr) || pathErr.Path != f.Name() || pathErr.Op != "pwritev" {
		t.Errorf("moved %d, %v, want 5 and ENOSPC of the file", n, err)
	}
}

func TestAReadOnlyFileTakesNoBuffers(t *testing.T) {
	t.Parallel()
	path := openOS(t, 0).Name()
	f, err := OS.OpenFile(path, os.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if n, err := WriteVAt(f, [][]byte{{1}}, 0); n != 0 || !errors.Is(err, syscall.EBADF) {
		t.Errorf("wrote %d, %v, want EBADF", n, err)
	}
}

func TestDirectAccessReachesTheKernelOrIsRefusedAtOpen(t *testing.T) {
	t.Parallel()
	f, err := OS.OpenFile(filepath.Join(t.TempDir(), "a"), os.O_CREATE|os.O_RDWR|syscall.O_DIRECT, 0o600)
	if errors.Is(err, syscall.EINVAL) {
		return // this file system has none, and says so
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	flags, err := unix.FcntlInt(f.(*OSFile).Fd(), unix.F_GETFL, 0)
	if err != nil || flags&syscall.O_DIRECT == 0 {
		t.Errorf("the open file has the flags %#x, %v, and no O_DIRECT", flags, err)
	}
}

// plain is a File that is not Vectored, whose reads say that the file ends
// together with its last bytes.
type plain struct {
	File
	data []byte
}

func (p plain) ReadAt(b []byte, off int64) (int, error) {
	if off >= int64(len(p.data)) {
		return 0, io.EOF
	}
	n := copy(b, p.data[off:])
	if int(off)+n == len(p.data) {
		return n, io.EOF
	}
	return n, nil
}

func (p plain) WriteAt(b []byte, off int64) (int, error) {
	return copy(p.data[off:], b), nil
}

func TestAFileWithoutTheCallIsReadAndWrittenBufferByBuffer(t *testing.T) {
	t.Parallel()
	f := plain{data: []byte("abcdef")}
	one, two := make([]byte, 2), make([]byte, 4)
	if n, err := ReadVAt(f, [][]byte{one, nil, two}, 0); n != 6 || err != nil || string(one)+string(two) != "abcdef" {
		t.Errorf("read %d: %q%q, %v", n, one, two, err)
	}
	if n, err := ReadVAt(f, [][]byte{one, two}, 4); n != 2 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("read %d, %v, want 2 and the end", n, err)
	}
	if n, err := WriteVAt(f, [][]byte{one, two}, 2); n != 4 || !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("wrote %d, %v, want 4 and a short write", n, err)
	}
}
