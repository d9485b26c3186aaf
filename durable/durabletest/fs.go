// Package durabletest owns what tests put in place of a drive: FS, a file
// system in memory that forgets what was not synced when it crashes and that
// can fail or tear any operation, and the suite that it and the operating
// system's file system both pass. Only tests import it.
package durabletest

import (
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/durable"
)

// ErrCrashed is given by every operation after the crash point.
var ErrCrashed = errors.New("file system has crashed")

// node is a file, directory or symbolic link. It has what is seen now and what
// a crash would leave.
type node struct {
	mode    fs.FileMode
	mtime   time.Time
	target  string           // of a symbolic link
	entries map[string]*node // of a directory
	data    []byte           // of a file
	nlink   int

	keptEntries map[string]*node
	keptData    []byte
	keptMode    fs.FileMode
	kept        bool // the file was synced at least once
}

// FS is a crashable file system. It is safe for concurrent use.
type FS struct {
	mu       sync.Mutex
	root     *node
	locks    map[string]bool
	changes  int           // changing operations so far
	crashAt  int           // the change that does not happen; 0 = never
	tear     bool          // a write that crashes is half done
	failures map[int]error // change number -> error
	fail     func(op, path string) error
	crashed  bool
	capacity int64 // bytes of file data; 0 = no bound
	now      func() time.Time
}

var _ durable.FS = (*FS)(nil)

// New makes an empty file system.
func New() *FS {
	root := &node{mode: fs.ModeDir | 0o755, entries: map[string]*node{}, keptEntries: map[string]*node{}, nlink: 1, kept: true}
	return &FS{root: root, locks: map[string]bool{}, failures: map[int]error{}, now: time.Now}
}

// CrashAt makes change number n (from 1) and everything after it fail with
// ErrCrashed; tear lets a write that is number n happen by half.
func (f *FS) CrashAt(n int, tear bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.crashAt, f.tear = n, tear
}

// FailAt makes change number n fail once with err.
func (f *FS) FailAt(n int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failures[n] = err
}

// FailWhen makes every change for which fail gives an error fail with it. op
// is open, mkdir, rename, remove, link, symlink, chmod, chtimes, syncdir,
// write, sync, datasync, allocate or truncate.
func (f *FS) FailWhen(fail func(op, path string) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = fail
}

// SetCapacity bounds the bytes of file data; what exceeds it gets ENOSPC.
func (f *FS) SetCapacity(n int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.capacity = n
}

// Changes is the number of changing operations so far.
func (f *FS) Changes() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changes
}

// Crash gives the file system as the next boot finds it. With a nil random
// only what was synced is there; otherwise each unsynced entry and file may
// have reached the drive, wholly or by a prefix.
func (f *FS) Crash(random *rand.Rand) *FS {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.crashed = true
	next := New()
	next.capacity = f.capacity
	next.root = survive(f.root, random, map[*node]*node{})
	return next
}

// survive copies a tree as a crash leaves it.
func survive(n *node, random *rand.Rand, done map[*node]*node) *node {
	if c := done[n]; c != nil {
		c.nlink++
		return c
	}
	c := &node{mode: n.mode, mtime: n.mtime, target: n.target, nlink: 1, kept: true}
	done[n] = c
	switch {
	case n.mode.IsDir():
		c.entries, c.keptEntries = map[string]*node{}, map[string]*node{}
		for _, name := range union(n.entries, n.keptEntries) {
			child := n.keptEntries[name]
			if now := n.entries[name]; now != child && random != nil && random.IntN(2) == 0 {
				child = now
			}
			if child != nil {
				s := survive(child, random, done)
				c.entries[name], c.keptEntries[name] = s, s
			}
		}
	case n.mode.IsRegular():
		data := n.keptData
		c.mode = n.keptMode
		if !n.kept {
			c.mode = n.mode
		}
		if random != nil {
			switch random.IntN(3) {
			case 0:
				data, c.mode = n.data, n.mode
			case 1:
				// Each 4 KiB page may have been written or not.
				data = slices.Clone(n.data)
				for off := 0; off < len(data); off += 4096 {
					if random.IntN(2) == 0 {
						page := data[off:min(off+4096, len(data))]
						clear(page)
						if off < len(n.keptData) {
							copy(page, n.keptData[off:])
						}
					}
				}
			}
		}
		c.data = slices.Clone(data)
		c.keptData, c.keptMode = slices.Clone(data), c.mode
	}
	return c
}

func union(a, b map[string]*node) []string {
	var names []string
	for name := range a {
		names = append(names, name)
	}
	for name := range b {
		if _, both := a[name]; !both {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// change counts a changing operation and says whether it may happen; torn
// means that half of it does and then the crash comes.
func (f *FS) changeLocked(op, path string) (torn bool, err error) {
	if f.crashed {
		return false, &fs.PathError{Op: op, Path: path, Err: ErrCrashed}
	}
	f.changes++
	if f.crashAt > 0 && f.changes >= f.crashAt {
		f.crashed = true
		return f.tear, &fs.PathError{Op: op, Path: path, Err: ErrCrashed}
	}
	if err := f.failures[f.changes]; err != nil {
		delete(f.failures, f.changes)
		return false, &fs.PathError{Op: op, Path: path, Err: err}
	}
	if f.fail != nil {
		if err := f.fail(op, path); err != nil {
			return false, &fs.PathError{Op: op, Path: path, Err: err}
		}
	}
	return false, nil
}

func (f *FS) aliveLocked(op, path string) error {
	if f.crashed {
		return &fs.PathError{Op: op, Path: path, Err: ErrCrashed}
	}
	return nil
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

// usedLocked is the bytes of file data.
func (f *FS) usedLocked() int64 {
	seen := map[*node]bool{}
	var walk func(n *node) int64
	walk = func(n *node) int64 {
		if seen[n] {
			return 0
		}
		seen[n] = true
		used := int64(len(n.data))
		for _, c := range n.entries {
			used += walk(c)
		}
		return used
	}
	return walk(f.root)
}

func (f *FS) roomLocked(grow int64) error {
	if f.capacity > 0 && grow > 0 && f.usedLocked()+grow > f.capacity {
		return syscall.ENOSPC
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
