package durable

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Limits of removeAll: how many levels of folders it has open at once, and how
// many names of one folder it reads at once.
const (
	removeLevels = 32
	removeNames  = 1024
)

// removeAll does as os.RemoveAll, for trees that others made: however deep and
// wide they are, it has few files open and little memory. What lies deeper than
// removeLevels is moved up first. It follows no symbolic link.
func removeAll(path string) error {
	err := unlink(unix.AT_FDCWD, path)
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return pathError(path, err)
	}
	r := remover{stamp: strconv.FormatInt(time.Now().UnixNano(), 36)}
	if r.top, err = openFolder(unix.AT_FDCWD, path); err != nil {
		return pathError(path, err)
	}
	err = r.empty(r.top, 1)
	_ = r.top.Close() // it was read only
	if err != nil {
		return pathError(path, err)
	}
	return pathError(path, ignoreGone(unix.Unlinkat(unix.AT_FDCWD, path, unix.AT_REMOVEDIR)))
}

func pathError(path string, err error) error {
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return &fs.PathError{Op: "remove", Path: path, Err: err}
}

func ignoreGone(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

func unlink(folder int, name string) error {
	return ignoreGone(unix.Unlinkat(folder, name, 0))
}

func openFolder(folder int, name string) (*os.File, error) {
	for {
		fd, err := unix.Openat(folder, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return os.NewFile(uintptr(fd), filepath.Base(name)), nil
	}
}

// remover empties one tree.
type remover struct {
	top   *os.File
	stamp string // makes names at the top that nobody else chose
	moved int
}

// empty removes what is in a folder that is level levels deep. What cannot be
// removed stays, and the first reason for it is the error.
func (r *remover) empty(folder *os.File, level int) error {
	for {
		removed, failed := 0, error(nil)
		if _, err := folder.Seek(0, io.SeekStart); err != nil {
			return err
		}
		for {
			names, err := folder.Readdirnames(removeNames)
			for _, name := range names {
				if err := r.remove(int(folder.Fd()), name, level); err == nil {
					removed++
				} else if failed == nil {
					failed = err
				}
			}
			if err != nil || len(names) == 0 {
				if err != nil && !errors.Is(err, io.EOF) && failed == nil {
					failed = err
				}
				break
			}
		}
		// A folder that changes while it is read may have skipped some, and the
		// top has what was moved there meanwhile.
		if removed == 0 {
			return failed
		}
	}
}

// remove removes one name of a folder, or moves it to the top.
func (r *remover) remove(folder int, name string, level int) error {
	err := unlink(folder, name)
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return err
	}
	if ignoreGone(unix.Unlinkat(folder, name, unix.AT_REMOVEDIR)) == nil {
		return nil
	}
	if level >= removeLevels {
		r.moved++
		return unix.Renameat(folder, name, int(r.top.Fd()), ".removing-"+r.stamp+"-"+strconv.Itoa(r.moved))
	}
	inner, openErr := openFolder(folder, name)
	if openErr != nil {
		if errors.Is(openErr, unix.ENOTDIR) {
			return err // no folder, and it may not be unlinked
		}
		return ignoreGone(openErr)
	}
	emptied := r.empty(inner, level+1)
	_ = inner.Close() // it was read only
	if emptied != nil {
		return emptied
	}
	return ignoreGone(unix.Unlinkat(folder, name, unix.AT_REMOVEDIR))
}
