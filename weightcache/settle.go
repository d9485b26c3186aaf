package weightcache

import (
	"errors"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"

	"github.com/hearth-dev/hearth/durable"
)

// settling is the store's file system. It remembers the directories whose sync
// failed: what they hold is seen and may still vanish with the power, so that
// nothing is promised before they are synced after all.
type settling struct {
	durable.FS
	mu     sync.Mutex
	owed   map[string]bool
	litter map[string]bool // what could not be removed, or not whole
}

func newSettling(fsys durable.FS) *settling {
	return &settling{FS: fsys, owed: map[string]bool{}, litter: map[string]bool{}}
}

// RemoveAll implements durable.FS; what it could not remove, clean tries again.
func (f *settling) RemoveAll(path string) error {
	err := f.FS.RemoveAll(path)
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil {
		delete(f.litter, path)
	} else {
		f.litter[path] = true
	}
	return err
}

// Remove implements durable.FS; a temporary file that it could not remove, clean
// tries again.
func (f *settling) Remove(path string) error {
	err := f.FS.Remove(path)
	if err != nil && !notExist(err) && durable.IsTemp(filepath.Base(path)) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.litter[path] = true
	}
	return err
}

// clean removes what an earlier removal left: it holds room that nobody counts.
func (f *settling) clean() error {
	f.mu.Lock()
	litter := slices.Sorted(maps.Keys(f.litter))
	f.mu.Unlock()
	var err error
	for _, path := range litter {
		err = errors.Join(err, f.RemoveAll(path))
	}
	return err
}

// SyncDir implements durable.FS.
func (f *settling) SyncDir(path string) error {
	err := f.FS.SyncDir(path)
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil || notExist(err) {
		delete(f.owed, path)
	} else {
		f.owed[path] = true
	}
	return err
}

// syncNames syncs a directory in which a file just got its name. Where that
// fails the file is there all the same, and counts; the sync is owed.
func (s *Store) syncNames(dir string) {
	if err := s.fs.SyncDir(dir); err != nil {
		s.log.Warn("cannot sync directory, its artifacts are not Ready before it can be", slog.String("dir", dir), slog.Any("error", err))
	}
}

// settle syncs what is owed; a promise is made only after it.
func (f *settling) settle() error {
	f.mu.Lock()
	owed := slices.Sorted(maps.Keys(f.owed))
	f.mu.Unlock()
	var err error
	for _, path := range owed {
		if syncErr := f.SyncDir(path); syncErr != nil && !notExist(syncErr) {
			err = errors.Join(err, syncErr)
		}
	}
	return err
}

// settleTree syncs a directory and every one below it. A process that was
// killed may have made names there and synced none of them: its successor
// trusts what it sees and must not lose it to a power cut.
func (s *Store) settleTree(dir string) error {
	entries, err := s.fs.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := s.settleTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return s.fs.SyncDir(dir)
}

// settleAll makes all that an Open found durable, and the two roots' own names.
func (s *Store) settleAll() error {
	for _, root := range []string{s.dir, s.views} {
		if err := errors.Join(s.settleTree(root), s.fs.SyncDir(filepath.Dir(root))); err != nil {
			return err
		}
	}
	return nil
}
