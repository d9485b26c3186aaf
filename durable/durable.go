// Package durable owns the file-system seam: everything Hearth keeps on a
// drive is written through an FS, so that a crash test can put a file system
// there that forgets what was not synced. Stores, ledgers and configuration
// call it; it knows no format but the file that names a directory's, and keeps
// no state.
//
// Durable means: write, fsync, rename, fsync of the directory. WriteFile is
// that sequence; what does not fit it (large files written at an offset) uses
// the same steps from File and FS.
package durable

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"
)

// FS is the part of a POSIX file system that the stores need. Paths follow
// package os. Errors are *fs.PathError (or *os.LinkError) around an errno, so
// that errors.Is with fs.ErrNotExist, fs.ErrExist or syscall.ENOSPC works.
// Implementations are safe for concurrent use.
type FS interface {
	// OpenFile opens with the flags of package os.
	OpenFile(path string, flag int, perm fs.FileMode) (File, error)
	Mkdir(path string, perm fs.FileMode) error
	MkdirAll(path string, perm fs.FileMode) error
	// Rename replaces a file atomically; it is durable once the directories of
	// both names are synced.
	Rename(from, to string) error
	Remove(path string) error
	// RemoveAll removes a tree; an absent path is no error.
	RemoveAll(path string) error
	Link(from, to string) error
	Symlink(target, path string) error
	Readlink(path string) (string, error)
	// ReadDir lists a directory sorted by name.
	ReadDir(path string) ([]fs.DirEntry, error)
	Stat(path string) (fs.FileInfo, error)
	Lstat(path string) (fs.FileInfo, error)
	Chmod(path string, perm fs.FileMode) error
	Chtimes(path string, atime, mtime time.Time) error
	// SyncDir makes the entries of a directory durable.
	SyncDir(path string) error
	// Free gives the bytes an unprivileged writer may still use, and the size,
	// of the file system that holds path.
	Free(path string) (free, total int64, err error)
	// Lock takes an exclusive advisory lock on a file, creating it 0600. A lock
	// that is held gives ErrLocked at once; Close gives it back.
	Lock(path string) (io.Closer, error)
}

// File is an open file of an FS.
type File interface {
	io.ReadWriteCloser
	io.ReaderAt
	io.WriterAt
	// Sync makes content and metadata durable, Datasync content and length.
	Sync() error
	Datasync() error
	// Allocate reserves size bytes on the drive and sets the length to at
	// least that; a full drive gives ENOSPC here and not in a later write. A
	// file system without the call gets a plain Truncate.
	Allocate(size int64) error
	Truncate(size int64) error
	Chmod(perm fs.FileMode) error
	Stat() (fs.FileInfo, error)
	Name() string
}

// Flusher is a File that can start writing a range back without waiting, which
// makes a later Datasync short. It promises nothing about durability.
type Flusher interface {
	Flush(off, n int64) error
}

// ErrLocked says that another owner holds the lock.
var ErrLocked = errors.New("locked by another owner")

// tempCount makes temporary names unique within the process; stores have one
// owner, so that is enough.
var tempCount atomic.Uint64

// TempName gives a hidden name beside path for a file that a rename will
// publish. IsTemp recognises it after a crash.
func TempName(path string) string {
	dir, base := filepath.Split(path)
	return dir + ".tmp-" + strconv.Itoa(os.Getpid()) + "-" + strconv.FormatUint(tempCount.Add(1), 10) + "-" + base
}

// IsTemp reports whether a base name was made by TempName: the rest of an
// interrupted write, safe to remove by the owner of the directory.
func IsTemp(name string) bool {
	return len(name) > 5 && name[:5] == ".tmp-"
}

// WriteFile replaces path with data durably: after a crash the file has either
// the old content or the new one, and after return the new one. The mode is
// perm exactly, whatever the umask.
func WriteFile(fsys FS, path string, data []byte, perm fs.FileMode) (err error) {
	temp := TempName(path)
	f, err := fsys.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			_ = fsys.Remove(temp)
		}
	}()
	err = writeSynced(f, data, perm)
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err = fsys.Rename(temp, path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err = fsys.SyncDir(filepath.Dir(path)); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

func writeSynced(f File, data []byte, perm fs.FileMode) error {
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := f.Chmod(perm); err != nil {
		return err
	}
	return f.Sync()
}

// ErrTooLong is wrapped where a file is longer than its reader allows.
var ErrTooLong = errors.New("file is too long")

// ReadFile reads a whole file that may have at most limit bytes; a longer one
// gives ErrTooLong, not a truncated answer.
func ReadFile(fsys FS, path string, limit int64) (data []byte, err error) {
	f, err := fsys.OpenFile(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return readAll(f, path, limit)
}

func readAll(f File, path string, limit int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("read %s: %w: longer than the %d bytes allowed", path, ErrTooLong, limit)
	}
	return data, nil
}

// ErrIrregular is wrapped where something that is no regular file has a file's name.
var ErrIrregular = errors.New("it is no regular file")

// ReadRegular is ReadFile of what is a regular file, or a link to one; anything else
// gives ErrIrregular: to open a pipe that somebody put in its place would wait for ever.
func ReadRegular(fsys FS, path string, limit int64) (data []byte, err error) {
	f, err := fsys.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("read %s: %w, move it away", path, ErrIrregular)
	}
	return readAll(f, path, limit)
}

// MkdirAllSynced makes a directory and its missing parents and syncs each
// parent it added to.
func MkdirAllSynced(fsys FS, path string, perm fs.FileMode) error {
	if info, err := fsys.Stat(path); err == nil && info.IsDir() {
		return nil
	}
	parent := filepath.Dir(path)
	if parent != path {
		if err := MkdirAllSynced(fsys, parent, perm); err != nil {
			return err
		}
	}
	if err := fsys.Mkdir(path, perm); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make directory %s: %w", path, err)
	}
	if err := fsys.SyncDir(parent); err != nil {
		// Another try is not to take the unsynced directory for a durable one.
		return fmt.Errorf("make directory %s: %w", path, errors.Join(err, fsys.Remove(path)))
	}
	return nil
}

// SameFile reports whether two names of one FS, both asked of it, are links to
// one file.
func SameFile(a, b fs.FileInfo) bool {
	return os.SameFile(a, b) || a.Sys() != nil && a.Sys() == b.Sys()
}

// Lock takes an exclusive lock on a file of the operating system's file
// system; see FS.Lock.
func Lock(path string) (io.Closer, error) { return OS.Lock(path) }
