package durabletest

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/durable"
)

// OpenFile implements durable.FS.
func (f *FS) OpenFile(path string, flag int, perm fs.FileMode) (durable.File, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.readLocked("open", path); err != nil {
		return nil, err
	}
	writes := flag&(os.O_WRONLY|os.O_RDWR) != 0
	n, err := f.lookupLocked(path, true)
	switch {
	case writes && f.readOnly:
		return nil, wrap("open", path, syscall.EROFS)
	case err == nil && flag&(os.O_CREATE|os.O_EXCL) == os.O_CREATE|os.O_EXCL:
		return nil, wrap("open", path, syscall.EEXIST)
	case err == nil && n.mode.IsDir() && writes:
		return nil, wrap("open", path, syscall.EISDIR)
	case errors.Is(err, syscall.ENOENT) && flag&os.O_CREATE != 0:
		dir, name, err := f.parentLocked(path)
		if err != nil {
			return nil, wrap("open", path, err)
		}
		if err := f.inodeLocked(); err != nil {
			return nil, wrap("open", path, err)
		}
		if _, err := f.changeLocked("open", path); err != nil {
			return nil, err
		}
		n = newNode(perm.Perm(), f.now())
		f.entryLocked(dir, "open", path, name, n)
	case err != nil:
		return nil, wrap("open", path, err)
	case flag&os.O_TRUNC != 0 && len(n.data) > 0:
		if _, err := f.changeLocked("truncate", path); err != nil {
			return nil, err
		}
		n.data = nil
		f.noteLocked(n, "truncate", path, change{resize: true})
	}
	return &file{f: f, n: n, path: path, flag: flag}, nil
}

// Mkdir implements durable.FS.
func (f *FS) Mkdir(path string, perm fs.FileMode) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mkdirLocked(path, perm)
}

func (f *FS) mkdirLocked(path string, perm fs.FileMode) error {
	dir, name, err := f.parentLocked(path)
	if err != nil {
		return wrap("mkdir", path, err)
	}
	if dir.entries[name] != nil || name == "/" {
		return wrap("mkdir", path, syscall.EEXIST)
	}
	if err := f.inodeLocked(); err != nil {
		return wrap("mkdir", path, err)
	}
	if _, err := f.changeLocked("mkdir", path); err != nil {
		return err
	}
	f.entryLocked(dir, "mkdir", path, name, newNode(fs.ModeDir|perm.Perm(), f.now()))
	return nil
}

// MkdirAll implements durable.FS.
func (f *FS) MkdirAll(path string, perm fs.FileMode) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	path = filepath.Clean(path)
	var missing []string
	for at := path; ; at = filepath.Dir(at) {
		n, err := f.lookupLocked(at, true)
		if err == nil {
			if !n.mode.IsDir() {
				return wrap("mkdir", path, syscall.ENOTDIR)
			}
			break
		}
		missing = append(missing, at)
	}
	for _, at := range slices.Backward(missing) {
		if err := f.mkdirLocked(at, perm); err != nil {
			return err
		}
	}
	return nil
}

// Rename implements durable.FS.
func (f *FS) Rename(from, to string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	source, sourceName, err := f.parentLocked(from)
	if err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	target, targetName, err := f.parentLocked(to)
	if err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	n := source.entries[sourceName]
	if n == nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: syscall.ENOENT}
	}
	old := target.entries[targetName]
	switch {
	case old == nil:
	case old.mode.IsDir() && !n.mode.IsDir():
		err = syscall.EISDIR
	case !old.mode.IsDir() && n.mode.IsDir():
		err = syscall.ENOTDIR
	case old.mode.IsDir() && len(old.entries) > 0:
		err = syscall.ENOTEMPTY
	}
	if err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	if _, err := f.changeLocked("rename", to); err != nil {
		return err
	}
	if old == n {
		return nil
	}
	f.entryLocked(source, "rename", from, sourceName, nil)
	f.entryLocked(target, "rename", to, targetName, n)
	if n.mode.IsDir() && source != target {
		// A directory never has two names, or file systems would need repair.
		source.pending[len(source.pending)-1].twin = target
		target.pending[len(target.pending)-1].twin = source
	}
	return nil
}

// Remove implements durable.FS.
func (f *FS) Remove(path string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	dir, name, err := f.parentLocked(path)
	if err != nil {
		return wrap("remove", path, err)
	}
	n := dir.entries[name]
	if n == nil {
		return wrap("remove", path, syscall.ENOENT)
	}
	if len(n.entries) > 0 {
		return wrap("remove", path, syscall.ENOTEMPTY)
	}
	if _, err := f.changeLocked("remove", path); err != nil {
		return err
	}
	f.entryLocked(dir, "remove", path, name, nil)
	return nil
}

// RemoveAll implements durable.FS; every entry is one change.
func (f *FS) RemoveAll(path string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	dir, name, err := f.parentLocked(path)
	if errors.Is(err, syscall.ENOENT) {
		return nil
	}
	if err != nil {
		return wrap("remove", path, err)
	}
	if f.crashed {
		return wrap("remove", path, ErrCrashed)
	}
	return f.removeTreeLocked(dir, name, path)
}

func (f *FS) removeTreeLocked(dir *node, name, path string) error {
	n := dir.entries[name]
	if n == nil {
		return nil
	}
	for _, child := range slices.Sorted(maps.Keys(n.entries)) {
		if err := f.removeTreeLocked(n, child, path+"/"+child); err != nil {
			return err
		}
	}
	if _, err := f.changeLocked("remove", path); err != nil {
		return err
	}
	f.entryLocked(dir, "remove", path, name, nil)
	return nil
}

// Link implements durable.FS.
func (f *FS) Link(from, to string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, err := f.lookupLocked(from, false)
	var dir *node
	var name string
	if err == nil {
		dir, name, err = f.parentLocked(to)
	}
	switch {
	case err != nil:
	case n.mode.IsDir():
		err = syscall.EPERM
	case dir.entries[name] != nil:
		err = syscall.EEXIST
	}
	if err != nil {
		return &os.LinkError{Op: "link", Old: from, New: to, Err: err}
	}
	if _, err := f.changeLocked("link", to); err != nil {
		return err
	}
	f.entryLocked(dir, "link", to, name, n)
	return nil
}

// Symlink implements durable.FS.
func (f *FS) Symlink(target, path string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	dir, name, err := f.parentLocked(path)
	if err == nil && dir.entries[name] != nil {
		err = syscall.EEXIST
	}
	if err != nil {
		return &os.LinkError{Op: "symlink", Old: target, New: path, Err: err}
	}
	if err := f.inodeLocked(); err != nil {
		return &os.LinkError{Op: "symlink", Old: target, New: path, Err: err}
	}
	if _, err := f.changeLocked("symlink", path); err != nil {
		return err
	}
	n := newNode(fs.ModeSymlink|0o777, f.now())
	n.target = target
	f.entryLocked(dir, "symlink", path, name, n)
	return nil
}

// Readlink implements durable.FS.
func (f *FS) Readlink(path string) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.readLocked("readlink", path); err != nil {
		return "", err
	}
	n, err := f.lookupLocked(path, false)
	if err == nil && n.mode&fs.ModeSymlink == 0 {
		err = syscall.EINVAL
	}
	if err != nil {
		return "", wrap("readlink", path, err)
	}
	return n.target, nil
}

// ReadDir implements durable.FS.
func (f *FS) ReadDir(path string) ([]fs.DirEntry, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.readLocked("readdir", path); err != nil {
		return nil, err
	}
	n, err := f.lookupLocked(path, true)
	if err == nil && !n.mode.IsDir() {
		err = syscall.ENOTDIR
	}
	if err != nil {
		return nil, wrap("open", path, err)
	}
	list := []fs.DirEntry{}
	for _, name := range slices.Sorted(maps.Keys(n.entries)) {
		list = append(list, fs.FileInfoToDirEntry(infoOf(name, n.entries[name])))
	}
	return list, nil
}

// Stat implements durable.FS.
func (f *FS) Stat(path string) (fs.FileInfo, error) { return f.stat("stat", path, true) }

// Lstat implements durable.FS.
func (f *FS) Lstat(path string) (fs.FileInfo, error) { return f.stat("lstat", path, false) }

func (f *FS) stat(op, path string, follow bool) (fs.FileInfo, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.readLocked(op, path); err != nil {
		return nil, err
	}
	n, err := f.lookupLocked(path, follow)
	if err != nil {
		return nil, wrap(op, path, err)
	}
	return infoOf(filepath.Base(path), n), nil
}

// Chmod implements durable.FS.
func (f *FS) Chmod(path string, perm fs.FileMode) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, err := f.lookupLocked(path, true)
	if err != nil {
		return wrap("chmod", path, err)
	}
	if _, err := f.changeLocked("chmod", path); err != nil {
		return err
	}
	f.chmodLocked(n, path, perm)
	return nil
}

func (f *FS) chmodLocked(n *node, path string, perm fs.FileMode) {
	n.mode = n.mode.Type() | perm.Perm()
	f.noteLocked(n, "chmod", path, change{attr: &attr{n.mode, n.mtime}})
}

// Chtimes implements durable.FS.
func (f *FS) Chtimes(path string, _, mtime time.Time) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, err := f.lookupLocked(path, true)
	if err != nil {
		return wrap("chtimes", path, err)
	}
	if _, err := f.changeLocked("chtimes", path); err != nil {
		return err
	}
	n.mtime = mtime
	f.noteLocked(n, "chtimes", path, change{attr: &attr{n.mode, n.mtime}})
	return nil
}

// SyncDir implements durable.FS: the entries, mode and time of one directory
// survive.
func (f *FS) SyncDir(path string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, err := f.lookupLocked(path, true)
	if err == nil && !n.mode.IsDir() {
		err = syscall.ENOTDIR
	}
	if err != nil {
		return wrap("sync", path, err)
	}
	if _, err := f.changeLocked("syncdir", path); err != nil {
		return err
	}
	n.sync(false, true)
	return nil
}

// Free implements durable.FS.
func (f *FS) Free(path string) (free, total int64, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.readLocked("statfs", path); err != nil {
		return 0, 0, err
	}
	if f.capacity == 0 {
		return 1 << 50, 1 << 50, nil
	}
	_, used := f.usedLocked()
	return max(0, f.capacity-used), f.capacity, nil
}

type info struct {
	name string
	size int64
	mode fs.FileMode
	when time.Time
	node *node
}

func infoOf(name string, n *node) info {
	return info{name: name, size: int64(len(n.data)), mode: n.mode, when: n.mtime, node: n}
}

func (i info) Name() string       { return i.name }
func (i info) Size() int64        { return i.size }
func (i info) Mode() fs.FileMode  { return i.mode }
func (i info) ModTime() time.Time { return i.when }
func (i info) IsDir() bool        { return i.mode.IsDir() }
func (i info) Sys() any           { return i.node }
