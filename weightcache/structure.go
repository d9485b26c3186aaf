package weightcache

import (
	"errors"
	"fmt"
	"log/slog"
	"path"
	"strings"
	"syscall"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/safetensors"
)

// missing lists the files of a manifest that are not committed, and the bytes
// that landing them will allocate.
func (s *Store) missing(m *artifact.Manifest) (files []artifact.File, unallocated int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	files = s.missingLocked(m)
	for _, f := range files {
		if _, begun := s.partial[f.SHA256]; !begun {
			unallocated += f.Size
		}
	}
	return files, unallocated
}

// hasKind reports whether every file of a kind is committed.
func (s *Store) hasKind(m *artifact.Manifest, kind artifact.Kind) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range m.Files {
		if _, found := s.blobs[f.SHA256]; f.Kind == kind && !found {
			return false
		}
	}
	return true
}

// checkStructure refuses an artifact whose files disagree: a safetensors
// header that does not fit its file, a shard or tensor that the index names
// and the files lack. Errors wrap ErrBroken.
func (s *Store) checkStructure(m *artifact.Manifest) error {
	for _, f := range m.Files {
		if strings.HasSuffix(f.Path, ".safetensors") {
			if _, err := s.header(f); err != nil {
				return err
			}
		}
	}
	return s.eachIndex(m, func(f artifact.File, idx *safetensors.Index) error {
		for _, shard := range idx.Shards {
			sf, _ := m.File(path.Join(path.Dir(f.Path), shard))
			// Headers are read again one at a time: all of a large
			// checkpoint's at once would be too much memory.
			h, err := s.header(sf)
			if err != nil {
				return err
			}
			if err := idx.CheckShard(shard, h); err != nil {
				return fmt.Errorf("check file %s: %w: %w", f.Path, ErrBroken, err)
			}
		}
		return nil
	})
}

// checkIndexes refuses an artifact one of whose indexes names a shard that it
// does not list. It needs the metadata files only.
func (s *Store) checkIndexes(m *artifact.Manifest) error {
	return s.eachIndex(m, func(artifact.File, *safetensors.Index) error { return nil })
}

// eachIndex reads every sharded index, checks that its shards are listed and
// calls do.
func (s *Store) eachIndex(m *artifact.Manifest, do func(f artifact.File, idx *safetensors.Index) error) error {
	for _, f := range m.Files {
		if !strings.HasSuffix(f.Path, safetensors.IndexSuffix) {
			continue
		}
		data, err := durable.ReadFile(s.fs, s.blobPath(f.SHA256), safetensors.MaxIndexBytes)
		if err != nil {
			return fmt.Errorf("check file %s: %w", f.Path, s.unreadable(f.SHA256, err))
		}
		idx, err := safetensors.ParseIndex(data)
		if err == nil {
			err = idx.CheckFiles(func(shard string) bool {
				_, found := m.File(path.Join(path.Dir(f.Path), shard))
				return found
			})
		}
		if err != nil {
			return fmt.Errorf("check file %s: %w: %w", f.Path, ErrBroken, err)
		}
		if err := do(f, idx); err != nil {
			return err
		}
	}
	return nil
}

// unreadable takes a file out of the store where the drive cannot give its
// bytes; the next pull fetches it again.
func (s *Store) unreadable(sha artifact.Digest, err error) error {
	if !errors.Is(err, syscall.EIO) {
		return err
	}
	return errors.Join(err, s.discard(sha))
}

// header reads the header of a committed safetensors file.
func (s *Store) header(f artifact.File) (h *safetensors.Header, err error) {
	file, err := s.openBlob(f.SHA256)
	if err != nil {
		return nil, fmt.Errorf("check file %s: %w", f.Path, err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	if h, err = safetensors.ReadHeader(file, f.Size); errors.Is(err, syscall.EIO) {
		return nil, fmt.Errorf("check file %s: %w", f.Path, s.unreadable(f.SHA256, err))
	} else if err != nil {
		return nil, fmt.Errorf("check file %s: %w: %w", f.Path, ErrBroken, err)
	}
	return h, nil
}

// forgetMeant removes the superseded records of artifacts that a ref means now:
// that ref's own record names them.
func (s *Store) forgetMeant() {
	s.recording <- struct{}{} // no ref moves between the look and the removal
	defer func() { <-s.recording }()
	type meant struct {
		r      *record
		ref    artifact.Ref
		digest artifact.Digest
	}
	var found []meant
	s.mu.Lock()
	for _, m := range s.refs {
		if r := s.artifacts[m.Digest]; r != nil {
			for ref := range r.old {
				found = append(found, meant{r, ref, m.Digest})
				delete(r.old, ref)
				if r.m.Ref == ref {
					r.m = m
				}
			}
		}
	}
	s.mu.Unlock()
	for _, f := range found {
		if err := s.removeIfThere(s.oldPath(f.ref, f.digest)); err != nil {
			s.log.Warn("cannot remove superseded record", slog.String("ref", f.ref.String()), slog.Any("error", err))
			s.mu.Lock()
			f.r.old[f.ref] = true
			s.mu.Unlock()
		}
	}
}

// sweepSuperseded removes what refs meant before, where they are Ready again or
// mean nothing any more.
func (s *Store) sweepSuperseded() {
	s.forgetMeant()
	s.mu.Lock()
	current, old := map[artifact.Digest]bool{}, map[artifact.Ref]bool{}
	for _, m := range s.refs {
		current[m.Digest] = true
	}
	for digest, r := range s.artifacts {
		if !current[digest] && r.leases == 0 && r.busy == 0 && !r.evicting && !s.keptLocked(digest) {
			for ref := range r.old {
				old[ref] = true
			}
		}
	}
	var moved []artifact.Ref
	for ref := range old {
		if m := s.refs[ref]; m == nil || s.readyLocked(m.Digest) {
			moved = append(moved, ref)
		}
	}
	s.mu.Unlock()
	for _, ref := range moved {
		s.dropSuperseded(ref)
	}
}

// dropSuperseded removes what a ref meant before, where nothing holds
// it. What is held goes once it no longer is, or by eviction.
func (s *Store) dropSuperseded(ref artifact.Ref) {
	s.mu.Lock()
	current := map[artifact.Digest]bool{}
	for _, c := range s.refs {
		current[c.Digest] = true
	}
	var drop []artifact.Digest
	for digest, r := range s.artifacts {
		if !current[digest] && r.old[ref] && r.leases == 0 && r.busy == 0 && !r.evicting && !s.keptLocked(digest) {
			r.evicting = true
			drop = append(drop, digest)
		}
	}
	s.mu.Unlock()
	for _, digest := range drop {
		if err := s.drop(digest); err != nil {
			s.log.Warn("cannot remove superseded artifact", slog.String("artifact", digest.String()), slog.Any("error", err))
		}
	}
}
