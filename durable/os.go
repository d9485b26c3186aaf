package durable

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"
)

// OS is the operating system's file system.
var OS FS = osFS{}

type osFS struct{}

// OSFile is the File of OS. Code that hands a descriptor to the kernel
// (sendfile, mmap) takes the embedded *os.File.
type OSFile struct{ *os.File }

func (osFS) OpenFile(path string, flag int, perm fs.FileMode) (File, error) {
	f, err := os.OpenFile(path, flag, perm)
	if err != nil {
		return nil, err
	}
	return &OSFile{f}, nil
}

func (osFS) Mkdir(path string, perm fs.FileMode) error    { return os.Mkdir(path, perm) }
func (osFS) MkdirAll(path string, perm fs.FileMode) error { return os.MkdirAll(path, perm) }
func (osFS) Rename(from, to string) error                 { return os.Rename(from, to) }
func (osFS) Remove(path string) error                     { return os.Remove(path) }
func (osFS) RemoveAll(path string) error                  { return removeAll(path) }
func (osFS) Link(from, to string) error                   { return os.Link(from, to) }
func (osFS) Symlink(target, path string) error            { return os.Symlink(target, path) }
func (osFS) Readlink(path string) (string, error)         { return os.Readlink(path) }
func (osFS) ReadDir(path string) ([]fs.DirEntry, error)   { return os.ReadDir(path) }
func (osFS) Stat(path string) (fs.FileInfo, error)        { return os.Stat(path) }
func (osFS) Lstat(path string) (fs.FileInfo, error)       { return os.Lstat(path) }
func (osFS) Chmod(path string, perm fs.FileMode) error    { return os.Chmod(path, perm) }

func (osFS) Chtimes(path string, atime, mtime time.Time) error {
	return os.Chtimes(path, atime, mtime)
}

func (osFS) SyncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

func (osFS) Free(path string) (free, total int64, err error) {
	var st syscall.Statfs_t
	if err := retry(func() error { return syscall.Statfs(path, &st) }); err != nil {
		return 0, 0, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	return int64(st.Bavail) * st.Bsize, int64(st.Blocks) * st.Bsize, nil
}

func (osFS) Lock(path string) (io.Closer, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	// The lock belongs to the open file, so it ends with the process whatever
	// becomes of it.
	err = retry(func() error { return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) })
	if err == nil {
		return held{f}, nil
	}
	_ = f.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, fmt.Errorf("lock %s: %w", path, ErrLocked)
	}
	return nil, fmt.Errorf("lock %s: %w", path, err)
}

// held is a lock that a file has.
type held struct{ file *os.File }

// Close gives the lock back by its name: closing the file alone leaves it to a
// child that another goroutine has forked and that has yet to close its copy.
func (h held) Close() error {
	err := retry(func() error { return syscall.Flock(int(h.file.Fd()), syscall.LOCK_UN) })
	return errors.Join(err, h.file.Close())
}

// Datasync flushes content and length, and skips times.
func (f *OSFile) Datasync() error {
	return f.call("fdatasync", syscall.Fdatasync)
}

// Allocate reserves blocks with fallocate and falls back to Truncate where the
// file system has no such call.
func (f *OSFile) Allocate(size int64) error {
	if size <= 0 {
		return f.Truncate(0)
	}
	err := f.call("fallocate", func(fd int) error { return syscall.Fallocate(fd, 0, 0, size) })
	if errors.Is(err, syscall.EOPNOTSUPP) || errors.Is(err, syscall.ENOSYS) {
		return f.Truncate(size)
	}
	return err
}

// syncFileRangeWrite is SYNC_FILE_RANGE_WRITE: start writing dirty pages back.
const syncFileRangeWrite = 2

// Flush starts write-back of a range. A file system that cannot is no error.
func (f *OSFile) Flush(off, n int64) error {
	err := f.call("sync_file_range", func(fd int) error { return syscall.SyncFileRange(fd, off, n, syncFileRangeWrite) })
	if errors.Is(err, syscall.ESPIPE) || errors.Is(err, syscall.ENOSYS) || errors.Is(err, syscall.EINVAL) {
		return nil
	}
	return err
}

// call runs a system call on the descriptor while it is kept open.
func (f *OSFile) call(op string, do func(fd int) error) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return &fs.PathError{Op: op, Path: f.Name(), Err: err}
	}
	var callErr error
	if err := conn.Control(func(fd uintptr) { callErr = retry(func() error { return do(int(fd)) }) }); err != nil {
		// Control fails where the file is closed, and names no error for it.
		return &fs.PathError{Op: op, Path: f.Name(), Err: fs.ErrClosed}
	}
	if callErr != nil {
		return &fs.PathError{Op: op, Path: f.Name(), Err: callErr}
	}
	return nil
}

// retry repeats a call that a signal interrupted.
func retry(do func() error) error {
	for {
		if err := do(); !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}
