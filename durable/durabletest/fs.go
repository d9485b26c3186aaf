// Package durabletest owns what tests put in place of a drive: FS, a file
// system in memory that forgets what was not synced when it crashes and that
// can fail or tear any operation, and the suite that it and the operating
// system's file system both pass. Only tests import it.
//
// FS keeps every change that no sync has made durable yet. A crash lets any
// part of them reach the drive: names apart from data, one file apart from
// another, a write sector by sector, a rename or not at all. Within one sector,
// one length and one name the later change never survives without the earlier.
// A sync that fails loses what it was to keep: a later sync that succeeds does
// not bring it back.
package durabletest

import (
	"errors"
	"io"
	"io/fs"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/durable"
)

// ErrCrashed is given by every operation after the crash point.
var ErrCrashed = errors.New("file system has crashed")

// node is a file, directory or symbolic link: what is seen now, what a crash
// would leave, and the changes between the two.
type node struct {
	attr
	target  string           // of a symbolic link
	entries map[string]*node // of a directory
	data    []byte           // of a file

	kept        attr
	keptEntries map[string]*node
	keptData    []byte
	pending     []change
}

type attr struct {
	mode  fs.FileMode
	mtime time.Time
}

// change is one that no sync made durable. Exactly one of its parts is set.
type change struct {
	n    int // its number
	op   string
	path string

	write  []byte // at off
	off    int64
	resize bool // to size
	size   int64
	attr   *attr
	name   string // now means node, nil: nothing
	node   *node
	twin   *node // the other directory of a rename of a directory
}

// FS is a crashable file system. It is safe for concurrent use.
type FS struct {
	mu       sync.Mutex
	root     *node
	locks    map[string]bool
	changes  int // changing operations so far
	reads    int // reading operations so far
	crashAt  int // the change that does not happen; 0 = never
	tear     bool
	failures map[int]error // change number -> error
	badReads map[int]error // read number -> error
	fail     func(op, path string) error
	failRead func(op, path string) error
	readOnly bool
	crashed  bool
	capacity int64 // bytes of file data; 0 = no bound
	quota    int64 // the same, and not seen by Free
	inodes   int   // files, directories and links; 0 = no bound
	now      func() time.Time
}

var _ durable.FS = (*FS)(nil)

func newNode(mode fs.FileMode, when time.Time) *node {
	n := &node{attr: attr{mode, when}, kept: attr{mode, when}}
	if mode.IsDir() {
		n.entries, n.keptEntries = map[string]*node{}, map[string]*node{}
	}
	return n
}

// New makes an empty file system.
func New() *FS {
	return &FS{
		root: newNode(fs.ModeDir|0o755, time.Now()), locks: map[string]bool{},
		failures: map[int]error{}, badReads: map[int]error{}, now: time.Now,
	}
}

// set changes one knob of the file system.
func (f *FS) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// CrashAt makes change number n (from 1) and everything after it fail with
// ErrCrashed; tear lets a write that is number n happen by half. 0 takes that
// back.
func (f *FS) CrashAt(n int, tear bool) { f.set(func() { f.crashAt, f.tear = n, tear }) }

// FailAt makes change number n fail once with err.
func (f *FS) FailAt(n int, err error) { f.set(func() { f.failures[n] = err }) }

// FailReadAt makes reading operation number n (from 1) fail once with err.
func (f *FS) FailReadAt(n int, err error) { f.set(func() { f.badReads[n] = err }) }

// Heal takes back every failure that was set and does not lie in the past; the
// room stays what it is.
func (f *FS) Heal() {
	f.set(func() {
		clear(f.failures)
		clear(f.badReads)
		f.fail, f.failRead, f.readOnly = nil, nil, false
	})
}

// FailWhen makes every change for which fail gives an error fail with it. op
// is open (which creates), mkdir, rename, remove, link, symlink, chmod,
// chtimes, syncdir, write, sync, datasync, allocate or truncate.
func (f *FS) FailWhen(fail func(op, path string) error) { f.set(func() { f.fail = fail }) }

// FailReadWhen is FailWhen for reading: op is open, read, readdir, readlink,
// stat, lstat or statfs.
func (f *FS) FailReadWhen(fail func(op, path string) error) { f.set(func() { f.failRead = fail }) }

// SetReadOnly makes every change, and every open for writing, fail with EROFS,
// as a file system does that the kernel remounted.
func (f *FS) SetReadOnly(readOnly bool) { f.set(func() { f.readOnly = readOnly }) }

// SetCapacity bounds the bytes of file data; what exceeds it gets ENOSPC.
func (f *FS) SetCapacity(n int64) { f.set(func() { f.capacity = n }) }

// SetQuota bounds the bytes of file data by a quota that Free does not tell
// of; what exceeds it gets EDQUOT.
func (f *FS) SetQuota(n int64) { f.set(func() { f.quota = n }) }

// SetInodes bounds the number of files, directories and symbolic links; one
// more gets ENOSPC while Free tells of room.
func (f *FS) SetInodes(n int) { f.set(func() { f.inodes = n }) }

// SetNow replaces the clock that gives files their times.
func (f *FS) SetNow(now func() time.Time) { f.set(func() { f.now = now }) }

// Changes is the number of changing operations so far.
func (f *FS) Changes() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changes
}

// Reads is the number of reading operations so far.
func (f *FS) Reads() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reads
}

// Inodes is the number of files, directories and symbolic links.
func (f *FS) Inodes() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	inodes, _ := f.usedLocked()
	return inodes
}

// changeLocked counts a changing operation and says whether it may happen;
// torn means that half of it does and then the crash comes.
func (f *FS) changeLocked(op, path string) (torn bool, err error) {
	if f.crashed {
		return false, wrap(op, path, ErrCrashed)
	}
	f.changes++
	if f.crashAt > 0 && f.changes >= f.crashAt {
		f.crashed = true
		return f.tear, wrap(op, path, ErrCrashed)
	}
	if err := f.failures[f.changes]; err != nil {
		delete(f.failures, f.changes)
		return false, wrap(op, path, err)
	}
	if f.fail != nil {
		if err := f.fail(op, path); err != nil {
			return false, wrap(op, path, err)
		}
	}
	if f.readOnly {
		return false, wrap(op, path, syscall.EROFS)
	}
	return false, nil
}

// readLocked counts a reading operation and says whether it may happen.
func (f *FS) readLocked(op, path string) error {
	if f.crashed {
		return wrap(op, path, ErrCrashed)
	}
	f.reads++
	if err := f.badReads[f.reads]; err != nil {
		delete(f.badReads, f.reads)
		return wrap(op, path, err)
	}
	if f.failRead != nil {
		return wrap(op, path, f.failRead(op, path))
	}
	return nil
}

// noteLocked keeps a change that happened until a sync makes it durable.
func (f *FS) noteLocked(n *node, op, path string, c change) {
	c.n, c.op, c.path = f.changes, op, path
	n.pending = append(n.pending, c)
}

// entryLocked changes what a name in a directory means.
func (f *FS) entryLocked(dir *node, op, path, name string, child *node) {
	if child == nil {
		delete(dir.entries, name)
	} else {
		dir.entries[name] = child
	}
	f.noteLocked(dir, op, path, change{name: name, node: child})
}

const maxLinks = 16

// lookupLocked finds a path; follow resolves a symbolic link at its end.
func (f *FS) lookupLocked(path string, follow bool) (*node, error) {
	return f.walkLocked(filepath.Clean(path), follow, 0)
}

func (f *FS) walkLocked(path string, follow bool, depth int) (*node, error) {
	if depth > maxLinks {
		return nil, syscall.ELOOP
	}
	at := f.root
	var below []string
	parts := strings.Split(strings.Trim(path, "/"), "/")
	for i, name := range parts {
		if name == "" || name == "." {
			continue
		}
		if !at.mode.IsDir() {
			return nil, syscall.ENOTDIR
		}
		child := at.entries[name]
		if child == nil {
			return nil, syscall.ENOENT
		}
		if child.mode&fs.ModeSymlink != 0 && (follow || i < len(parts)-1) {
			target := child.target
			if !filepath.IsAbs(target) {
				target = "/" + strings.Join(below, "/") + "/" + target
			}
			return f.walkLocked(filepath.Join(append([]string{target}, parts[i+1:]...)...), follow, depth+1)
		}
		at = child
		below = append(below, name)
	}
	return at, nil
}

// parentLocked finds the directory of a path and the name in it.
func (f *FS) parentLocked(path string) (*node, string, error) {
	path = filepath.Clean(path)
	dir, err := f.lookupLocked(filepath.Dir(path), true)
	if err != nil {
		return nil, "", err
	}
	if !dir.mode.IsDir() {
		return nil, "", syscall.ENOTDIR
	}
	return dir, filepath.Base(path), nil
}

func wrap(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: path, Err: err}
}

// usedLocked is the number of nodes and the bytes of file data.
func (f *FS) usedLocked() (inodes int, bytes int64) {
	seen := map[*node]bool{}
	var walk func(n *node)
	walk = func(n *node) {
		if seen[n] {
			return
		}
		seen[n] = true
		inodes++
		bytes += int64(len(n.data))
		for _, c := range n.entries {
			walk(c)
		}
	}
	walk(f.root)
	return inodes, bytes
}

// roomLocked says whether file data may grow.
func (f *FS) roomLocked(grow int64) error {
	if grow <= 0 || f.capacity == 0 && f.quota == 0 {
		return nil
	}
	_, used := f.usedLocked()
	switch {
	case f.capacity > 0 && used+grow > f.capacity:
		return syscall.ENOSPC
	case f.quota > 0 && used+grow > f.quota:
		return syscall.EDQUOT
	}
	return nil
}

// inodeLocked says whether one more node may be made.
func (f *FS) inodeLocked() error {
	if f.inodes > 0 {
		if inodes, _ := f.usedLocked(); inodes >= f.inodes {
			return syscall.ENOSPC
		}
	}
	return nil
}

type lock struct {
	f    *FS
	path string
	once sync.Once
}

// Lock implements durable.FS; a crash frees every lock.
func (f *FS) Lock(path string) (io.Closer, error) {
	file, err := f.OpenFile(path, syscall.O_CREAT|syscall.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	_ = file.Close()
	f.mu.Lock()
	defer f.mu.Unlock()
	path = filepath.Clean(path)
	if f.locks[path] {
		return nil, wrap("lock", path, durable.ErrLocked)
	}
	f.locks[path] = true
	return &lock{f: f, path: path}, nil
}

func (l *lock) Close() error {
	l.once.Do(func() {
		l.f.mu.Lock()
		defer l.f.mu.Unlock()
		delete(l.f.locks, l.path)
	})
	return nil
}
