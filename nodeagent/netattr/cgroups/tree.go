package cgroups

import (
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// Limits.
const (
	// maxKnown is how many cgroups a Tree knows, gone ones included. When it is
	// full, those that went first are forgotten; where none is gone, any.
	maxKnown = 20_000
	// maxMissed is how many ids that are nowhere a Tree remembers. When it is
	// full, any is forgotten, which costs a walk.
	maxMissed = 20_000
	// walkEvery is the least time between two walks that misses cause.
	walkEvery = time.Second
	// missFor is how long an id that no walk found causes none.
	missFor = 30 * time.Second
)

// TrueRoot is the id of the root of a machine's cgroups. A Tree whose root has
// another id sees a part of the machine: that of a container or of a nested
// node, with a cgroup namespace of its own.
const TrueRoot = 1

// Options are what a Tree needs.
type Options struct {
	Root string           // directory of a mounted cgroup2, as FindRoot gives it
	Now  func() time.Time // time.Now where it is nil
}

// Tree finds the paths of cgroups by id, which is the inode number of a
// cgroup's directory. A kernel of 64 bits never gives an id twice. What a Tree
// found it keeps after the cgroup is gone, since sockets may outlive theirs. A
// Tree belongs to one goroutine.
type Tree struct {
	root      string
	top       uint64 // id of the root, 0 before the first walk
	now       func() time.Time
	maxKnown  int
	maxMissed int

	known  map[uint64]cgroup
	missed map[uint64]miss
	went   uint64    // cgroups that were seen to be gone
	walks  int       // made so far
	walked time.Time // when the last walk began
	err    error     // of the last walk
}

// cgroup is what is known of one.
type cgroup struct {
	path string
	gone uint64 // 0 while its directory is there; else its place among those that went
}

// miss is an id that was asked for and is not known.
type miss struct {
	asked  time.Time // the last time
	absent bool      // a walk did not find it
}

// New makes a Tree, which reads nothing before it is asked.
func New(o Options) *Tree {
	t := &Tree{
		root: filepath.Clean(o.Root), now: o.Now, maxKnown: maxKnown, maxMissed: maxMissed,
		known: map[uint64]cgroup{}, missed: map[uint64]miss{},
	}
	if t.now == nil {
		t.now = time.Now
	}
	return t
}

// RootID gives the id of the cgroup at the root of what the Tree sees: TrueRoot
// where that is the whole machine.
func (t *Tree) RootID() (uint64, error) {
	info, err := os.Lstat(t.root)
	if err != nil {
		return 0, fmt.Errorf("read the root of cgroups: %w", err)
	}
	return inode(info).Ino, nil
}

// Lookup gives the path of a cgroup below the root, "/" for the root itself,
// also where the cgroup is gone by now. An id that is not known makes it walk
// the tree, at most once a second, and for 30 s not again after a walk that did
// not find the id. So a new cgroup may be found a second late.
func (t *Tree) Lookup(id uint64) (path string, ok bool) {
	if c, ok := t.known[id]; ok {
		return c.path, true
	}
	now := t.now()
	m, before := t.missed[id]
	if !before {
		trim(t.missed, t.maxMissed-1)
	}
	t.missed[id] = miss{asked: now, absent: m.absent}
	wait := walkEvery
	if m.absent {
		wait = missFor
	}
	if t.walks > 0 && now.Sub(t.walked) < wait {
		return "", false // the next walk looks for it too
	}
	_ = t.Walk() // Err tells
	c, ok := t.known[id]
	return c.path, ok
}

// Gone reports whether a cgroup's directory exists no more; one of the same
// name that was made since is another cgroup. Of an id that Lookup did not find
// it is true once a walk of the whole tree has confirmed that. Such a cgroup
// may yet have sockets, and where the Tree sees a part of the machine, be alive
// elsewhere.
func (t *Tree) Gone(id uint64) bool {
	c, ok := t.known[id]
	if !ok {
		return t.missed[id].absent && t.err == nil
	}
	if c.gone == 0 && t.lost(id, c.path) {
		t.bury(id)
	}
	return t.known[id].gone != 0
}

// Forget drops what is kept of a cgroup that nobody will ask for again. A
// cgroup that is still there is found again when it is asked for.
func (t *Tree) Forget(id uint64) {
	delete(t.known, id)
	delete(t.missed, id)
}

// Err tells what the last walk could not read, nil where it read all. Walks
// that Lookup makes tell it here alone.
func (t *Tree) Err() error { return t.err }

// bury marks a cgroup as gone.
func (t *Tree) bury(id uint64) {
	t.went++
	t.known[id] = cgroup{path: t.known[id].path, gone: t.went}
}

// trim drops any entries of a map until at most so many are left.
func trim[V any](m map[uint64]V, most int) {
	for id := range m {
		if len(m) <= most {
			return
		}
		delete(m, id)
	}
}
