package weightcache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// classified makes a full drive recognisable as ErrNoSpace, whichever write met it.
func classified(err error) error {
	if err == nil || !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) || errors.Is(err, ErrNoSpace) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrNoSpace, err)
}

// reservation is room that one pull was promised. Its bytes move to the files
// as they are allocated; release gives back the rest.
type reservation struct {
	s    *Store
	left int64
}

// take moves bytes from the reservation to a file that was just allocated.
func (r *reservation) takeLocked(n int64) {
	n = min(n, r.left)
	r.left -= n
	r.s.reserved -= n
}

// release gives back what was not used; more than once is harmless.
func (r *reservation) release() {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	r.takeLocked(r.left)
	r.s.freed.fire()
}

// usedLocked is the bytes that files occupy or are promised.
func (s *Store) usedLocked() int64 {
	used := s.reserved
	for _, n := range s.blobs {
		used += n
	}
	for _, n := range s.partial {
		used += n
	}
	return used
}

// Usage is what the store occupies, in bytes.
type Usage struct {
	Used     units.Bytes // committed and landing files
	Reserved units.Bytes // promised to pulls, not allocated yet
	Budget   units.Bytes // 0: what the drive has
	Free     units.Bytes // of the file system
	Total    units.Bytes // of the file system
}

// Usage reads the store's space.
func (s *Store) Usage() (Usage, error) {
	free, total, err := s.fs.Free(s.dir)
	if err != nil {
		return Usage{}, fmt.Errorf("read free space of %s: %w", s.dir, s.gone(err))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return Usage{
		Used: units.Bytes(s.usedLocked() - s.reserved), Reserved: units.Bytes(s.reserved),
		Budget: units.Bytes(s.budget), Free: units.Bytes(free), Total: units.Bytes(total),
	}, nil
}

// candidate is an artifact that eviction may take.
type candidate struct {
	digest     artifact.Digest
	superseded bool  // no ref means it any more
	lastUsed   int64 // its turn among all uses, which no clock moves
	files      []artifact.Digest
}

// planEviction chooses the artifacts to evict so that need bytes come free:
// superseded ones first, then the least recently used. sizes gives the bytes
// of each present file and users the number of artifacts that use it; a file
// comes free with the last of them. An artifact whose files all live on
// elsewhere is not chosen. The answer is false where all candidates together
// are not enough.
func planEviction(candidates []candidate, sizes map[artifact.Digest]int64, users map[artifact.Digest]int, need int64) ([]artifact.Digest, bool) {
	slices.SortFunc(candidates, func(a, b candidate) int {
		if a.superseded != b.superseded {
			if a.superseded {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(a.lastUsed, b.lastUsed), slices.Compare(a.digest[:], b.digest[:]))
	})
	left := map[artifact.Digest]int{}
	chosen := 0
	for _, c := range candidates {
		if need <= 0 {
			break
		}
		var freed int64
		for _, sha := range c.files {
			if _, seen := left[sha]; !seen {
				left[sha] = users[sha]
			}
			left[sha]--
			if left[sha] == 0 {
				freed += sizes[sha]
			}
		}
		chosen++
		need -= freed
	}
	var plan []artifact.Digest
	for _, c := range candidates[:chosen] {
		// One that frees nothing by itself is taken where the last user of one
		// of its files is taken too.
		if slices.ContainsFunc(c.files, func(sha artifact.Digest) bool { return left[sha] == 0 }) {
			plan = append(plan, c.digest)
		}
	}
	return plan, need <= 0
}

// reserve promises n bytes to a pull, evicting unused artifacts where budget
// or drive lack them. Errors wrap ErrNoSpace and say how much is missing.
func (s *Store) reserve(ctx context.Context, n int64, what string) (*reservation, error) {
	tried := false
	if err := s.fs.clean(); err != nil {
		s.log.Warn("cannot clear up", slog.Any("error", err))
	}
	for {
		free, _, err := s.fs.Free(s.dir)
		if err != nil {
			return nil, fmt.Errorf("reserve %d bytes for %s: %w", n, what, s.gone(err))
		}
		s.mu.Lock()
		need := n + s.reserved + s.keepFree - free
		if s.budget > 0 {
			need = max(need, s.usedLocked()+n-s.budget)
		}
		if need <= 0 || n == 0 {
			s.reserved += n
			s.mu.Unlock()
			return &reservation{s: s, left: n}, nil
		}
		if orphans := s.orphansLocked(); len(orphans) > 0 {
			s.mu.Unlock()
			if err := s.dropOrphans(orphans); err != nil {
				return nil, fmt.Errorf("reserve %d bytes for %s: %w", n, what, err)
			}
			continue
		}
		plan, enough := s.planLocked(need)
		evicting := len(s.removing) > 0
		wait := s.freed.wait()
		if !enough && !evicting {
			s.mu.Unlock()
			within := ""
			if s.budget > 0 {
				within = " within budget " + units.Bytes(s.budget).Human()
			}
			return nil, fmt.Errorf("reserve %s for %s: %w: %s too few%s with %s free on the drive, and nothing unused is left to evict",
				units.Bytes(n).Human(), what, ErrNoSpace, units.Bytes(need).Human(), within, units.Bytes(free).Human())
		}
		if !enough {
			s.mu.Unlock()
			select {
			case <-wait:
				continue
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}
		if !tried {
			// What is Ready is not given up where nothing can take its place.
			s.mu.Unlock()
			if err := s.writable(); err != nil {
				return nil, fmt.Errorf("reserve %s for %s: nothing is evicted: %w", units.Bytes(n).Human(), what, err)
			}
			tried = true
			continue
		}
		tried = false
		for _, digest := range plan {
			s.artifacts[digest].evicting = true
		}
		s.mu.Unlock()
		for _, digest := range plan {
			s.log.Info("evicting artifact", slog.String("artifact", digest.String()), slog.String("for", what))
			if err := s.drop(digest); err != nil {
				return nil, fmt.Errorf("evict artifact %s for %s: %w", digest.Short(), what, err)
			}
		}
	}
}

// orphansLocked gives the files that no artifact has and that were kept in case
// one would name them, and keeps them no longer.
func (s *Store) orphansLocked() []artifact.Digest {
	orphans := slices.Collect(maps.Keys(s.orphans))
	clear(s.orphans)
	return orphans
}

// planLocked gathers the facts for planEviction.
func (s *Store) planLocked(need int64) ([]artifact.Digest, bool) {
	current, kept := map[artifact.Digest]bool{}, map[artifact.Digest]bool{}
	for ref, m := range s.refs {
		current[m.Digest] = true
		kept[m.Digest] = kept[m.Digest] || s.keep[ref]
	}
	sizes := map[artifact.Digest]int64{}
	users := map[artifact.Digest]int{}
	var candidates []candidate
	for digest, r := range s.artifacts {
		c := candidate{digest: digest, superseded: !current[digest], lastUsed: r.turn}
		seen := map[artifact.Digest]bool{}
		for _, f := range r.m.Files {
			size, present := s.blobs[f.SHA256]
			if !present {
				size, present = s.partial[f.SHA256]
			}
			if present && !seen[f.SHA256] {
				seen[f.SHA256] = true
				sizes[f.SHA256] = size
				users[f.SHA256]++
				c.files = append(c.files, f.SHA256)
			}
		}
		held := r.leases > 0 || r.busy > 0 || kept[digest] || !current[digest] && s.keptLocked(digest)
		if !held && !r.evicting && len(c.files) > 0 {
			candidates = append(candidates, c)
		}
	}
	return planEviction(candidates, sizes, users, need)
}

// hold marks an artifact as being pulled, which forbids eviction; it waits for
// an eviction under way. One that was removed meanwhile gives ErrUnknown: its
// bytes would belong to no record.
func (s *Store) hold(ctx context.Context, m *artifact.Manifest) (end func(), err error) {
	for {
		s.mu.Lock()
		r := s.artifacts[m.Digest]
		if r == nil {
			s.mu.Unlock()
			return nil, fmt.Errorf("hold artifact %s: %w", m.Digest.Short(), ErrUnknown)
		}
		if !r.evicting {
			r.busy++
			s.mu.Unlock()
			return func() {
				s.mu.Lock()
				r.busy--
				s.mu.Unlock()
				s.notify()
			}, nil
		}
		wait := s.freed.wait()
		s.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// removeRef drops a ref and, where no other ref means its artifact, the
// artifact with its views and the files no other artifact uses. Errors wrap
// ErrUnknown or ErrLeased.
func (s *Store) removeRef(ref artifact.Ref) error {
	// Nobody pins the ref between the look and the removal of its record.
	s.recording <- struct{}{}
	recording := true
	done := func() {
		if recording {
			<-s.recording
		}
		recording = false
	}
	defer done()
	s.mu.Lock()
	m := s.refs[ref]
	if m == nil {
		s.mu.Unlock()
		return fmt.Errorf("remove %s: %w", ref, ErrUnknown)
	}
	shared := false
	r := s.addRecordLocked(m)
	for other, om := range s.refs {
		if other != ref && om.Digest == m.Digest {
			shared = true
			if r.m.Ref == ref {
				r.m = om // what it is known by from here on
			}
		}
	}
	if !shared && (r.leases > 0 || r.busy > 0 || r.evicting) {
		leases, busy := r.leases, r.busy
		s.mu.Unlock()
		return fmt.Errorf("remove %s: %w: %d leases and %d pulls hold artifact %s", ref, ErrLeased, leases, busy, m.Digest.Short())
	}
	delete(s.refs, ref)
	if !shared {
		r.evicting = true
	}
	s.mu.Unlock()
	// The record goes first: from here a crash leaves files that no artifact
	// uses, and the next open removes them.
	err := s.removeSynced(s.recordPath(ref))
	done()
	if err != nil {
		// The record may be there or not: the ref stays, to be removed again.
		s.mu.Lock()
		s.refs[ref] = m
		r.evicting = false
		s.freed.fire()
		s.mu.Unlock()
		return fmt.Errorf("remove %s: %w", ref, classified(err))
	}
	s.notify()
	if shared {
		if err := s.reviewViews(); err != nil {
			return fmt.Errorf("remove %s: %w", ref, classified(err))
		}
		return nil
	}
	if err := s.drop(m.Digest); err != nil {
		return fmt.Errorf("remove %s: %w", ref, classified(err))
	}
	return nil
}

// drop unlinks an artifact marked as evicting: its marker, its views, then the
// files no other artifact uses. A ref that still means it stays pinned.
func (s *Store) drop(digest artifact.Digest) error {
	s.notify()
	s.mu.Lock()
	r := s.artifacts[digest]
	used := map[artifact.Digest]bool{}
	for other, or := range s.artifacts {
		if other != digest {
			for _, f := range or.m.Files {
				used[f.SHA256] = true
			}
		}
	}
	var files, unproven []artifact.Digest
	sizes := map[artifact.Digest]int64{}
	for _, f := range r.m.Files {
		_, present := s.blobs[f.SHA256]
		_, partial := s.partial[f.SHA256]
		if !used[f.SHA256] && (present || partial) && !s.removing[f.SHA256] {
			if size, committed := s.blobs[f.SHA256]; committed {
				sizes[f.SHA256] = size
			} else {
				unproven = append(unproven, f.SHA256)
			}
			delete(s.blobs, f.SHA256)
			delete(s.partial, f.SHA256)
			s.removing[f.SHA256] = true
			files = append(files, f.SHA256)
		}
	}
	referenced := false
	for _, m := range s.refs {
		referenced = referenced || m.Digest == digest
	}
	old := slices.Collect(maps.Keys(r.old))
	r.checked = false
	s.mu.Unlock()

	s.doubt(unproven...)
	err := s.removeSynced(s.path(readyDir, digest.String()))
	err = errors.Join(err, s.removeViews(digest))
	stuck := map[artifact.Digest]int64{}
	for _, sha := range files {
		blobErr := s.removeIfThere(s.blobPath(sha))
		if size, committed := sizes[sha]; blobErr != nil && committed {
			stuck[sha] = size
		}
		err = errors.Join(err, blobErr, s.removeIfThere(s.chunksPath(sha)),
			s.removeIfThere(s.partPath(sha)), s.removeIfThere(s.bitsPath(sha)))
	}
	if !referenced {
		for _, ref := range old {
			err = errors.Join(err, s.removeIfThere(s.oldPath(ref, digest)))
		}
	}

	s.mu.Lock()
	for _, sha := range files {
		delete(s.removing, sha)
		delete(s.bad, sha)
	}
	for sha, size := range stuck {
		// It could not be removed: its room is not free.
		s.blobs[sha], s.orphans[sha] = size, true
	}
	r.evicting = false
	r.views = map[string]bool{}
	r.hubRefs = map[artifact.Ref]string{}
	for _, m := range s.refs {
		referenced = referenced || m.Digest == digest // pinned again meanwhile
	}
	if !referenced && r.busy == 0 {
		delete(s.artifacts, digest)
	}
	s.freed.fire()
	s.mu.Unlock()
	s.notify()
	return err
}

// waitRemoved waits until nobody changes the names of a file; claim then takes
// that right, as if for a removal, until the caller deletes it from removing.
func (s *Store) waitRemoved(ctx context.Context, sha artifact.Digest, claim bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.removing[sha] {
		wait := s.freed.wait()
		s.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
		}
		s.mu.Lock()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	if claim {
		s.removing[sha] = true
	}
	return nil
}

func (s *Store) removeIfThere(path string) error {
	if err := s.fs.Remove(path); err != nil && !notExist(err) {
		return err
	}
	return nil
}

func (s *Store) removeSynced(path string) error {
	if err := s.removeIfThere(path); err != nil {
		return err
	}
	return s.fs.SyncDir(filepath.Dir(path))
}

// discard takes a damaged file out of the store at once: no reader gets it
// from here on, and every artifact that has it is no longer Ready.
func (s *Store) discard(sha artifact.Digest) error {
	s.mu.Lock()
	if _, found := s.blobs[sha]; !found {
		s.mu.Unlock()
		return nil
	}
	delete(s.blobs, sha)
	s.bad[sha] = true
	s.damage[sha]++
	s.doubtLocked(sha)
	s.damages++
	s.removing[sha] = true
	var holders []artifact.Digest
	for digest, r := range s.artifacts {
		if r.checked && slices.ContainsFunc(r.m.Files, func(f artifact.File) bool { return f.SHA256 == sha }) {
			r.checked = false // Ready again once its views hold the new file
			holders = append(holders, digest)
		}
	}
	s.mu.Unlock()
	s.notify()
	s.keepDoubts()
	// The file goes before its links in views: after a crash the store must
	// not take it for good.
	var err error
	for _, digest := range holders {
		err = errors.Join(err, s.removeSynced(s.path(readyDir, digest.String())))
	}
	err = errors.Join(err, s.removeSynced(s.blobPath(sha)))
	err = errors.Join(err, s.removeIfThere(s.chunksPath(sha)), s.unlinkFromViews(sha))
	s.mu.Lock()
	delete(s.removing, sha)
	s.freed.fire()
	s.mu.Unlock()
	s.notify()
	return err
}
