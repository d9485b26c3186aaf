package cgroups

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
)

// maxDepth is how many cgroups deep a walk looks. Below that lies nothing that
// Parse would tell apart.
const maxDepth = 64

// Walk reads the whole tree: what is new becomes known and what is not there any
// more counts as gone. Lookup walks by itself when it must; a caller that walks
// at its start has no misses then. The error says what could not be read; all
// else was.
func (t *Tree) Walk() error {
	t.walked = t.now()
	t.walks++
	found, err := t.list()
	if t.err = err; found == nil {
		return err // nothing was seen, so nothing is known to have gone
	}
	for id, c := range t.known {
		// A walk may pass by what it could not read, so look for what it lacks.
		if _, seen := found[id]; !seen && c.gone == 0 && t.lost(id, c.path) {
			t.bury(id)
		}
	}
	t.learn(found)
	for id, m := range t.missed {
		if _, ok := t.known[id]; ok || t.walked.Sub(m.asked) > missFor {
			delete(t.missed, id)
			continue
		}
		t.missed[id] = miss{asked: m.asked, absent: true}
	}
	return err
}

// learn takes in what a walk found, first of all what was asked for.
func (t *Tree) learn(found map[uint64]string) {
	more := 0
	for id, path := range found {
		if _, ok := t.known[id]; ok {
			t.known[id] = cgroup{path: path}
		} else {
			more++
		}
	}
	t.makeRoom(more)
	for id := range t.missed {
		if path, ok := found[id]; ok {
			trim(t.known, t.maxKnown-1)
			t.known[id] = cgroup{path: path}
		}
	}
	for id, path := range found {
		if len(t.known) >= t.maxKnown {
			return
		}
		t.known[id] = cgroup{path: path}
	}
}

// makeRoom forgets gone cgroups, those that went first, until so many more have
// room, as far as that is possible.
func (t *Tree) makeRoom(more int) {
	over := len(t.known) + more - t.maxKnown
	if over <= 0 {
		return
	}
	var gone []uint64
	for id, c := range t.known {
		if c.gone != 0 {
			gone = append(gone, id)
		}
	}
	slices.SortFunc(gone, func(a, b uint64) int { return cmp.Compare(t.known[a].gone, t.known[b].gone) })
	for _, id := range gone[:min(over, len(gone))] {
		delete(t.known, id)
	}
}

// list reads the paths of all cgroups by id. What vanishes meanwhile is no error.
func (t *Tree) list() (map[uint64]string, error) {
	top, err := os.Lstat(t.root)
	if err != nil {
		return nil, fmt.Errorf("walk cgroups: %w", err)
	}
	if t.top == 0 {
		t.top = inode(top).Ino
	}
	if t.top != inode(top).Ino {
		return nil, fmt.Errorf("walk cgroups: %s is another directory than it was: cgroup2 is mounted there no more", t.root)
	}
	found := map[uint64]string{t.top: "/"}
	var failed []error
	level := []string{"/"}
	for depth := 0; depth < maxDepth && len(level) > 0; depth++ {
		var next []string
		for _, parent := range level {
			names, err := directories(filepath.Join(t.root, parent))
			if err != nil && !vanished(err) {
				failed = append(failed, err)
			}
			for _, name := range names {
				path := filepath.Join(parent, name)
				info, err := os.Lstat(filepath.Join(t.root, path))
				if err != nil || !info.IsDir() || inode(info).Dev != inode(top).Dev {
					if err != nil && !vanished(err) {
						failed = append(failed, err)
					}
					continue
				}
				found[inode(info).Ino] = path
				// A directory with two links has none below it, and most have none.
				if inode(info).Nlink != 2 {
					next = append(next, path)
				}
			}
		}
		level = next
	}
	if len(failed) > 0 {
		return found, fmt.Errorf("walk cgroups: %d could not be read: %w", len(failed), failed[0])
	}
	return found, nil
}

// directories gives the names of the directories in one, in any order. With an
// error it gives those that were read before.
func directories(dir string) ([]string, error) {
	file, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	entries, err := file.ReadDir(-1)
	var names []string
	for _, entry := range entries {
		if entry.IsDir() {
			names = append(names, entry.Name())
		}
	}
	return names, err
}

// lost reports whether a cgroup's directory is gone, or another's by now, while
// the tree that it was in is still there.
func (t *Tree) lost(id uint64, path string) bool {
	info, err := os.Lstat(filepath.Join(t.root, path))
	if err == nil && inode(info).Ino == id || err != nil && !vanished(err) {
		return false
	}
	root, err := t.RootID()
	return err == nil && root == t.top
}

// vanished reports whether an error says that a directory is not there. What is
// too deep for a path of the kernel's counts as that too.
func vanished(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.ENAMETOOLONG)
}

// inode gives what the kernel said of a file.
func inode(info fs.FileInfo) *syscall.Stat_t {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return s
	}
	return &syscall.Stat_t{}
}
