package weightcache

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Views are readable by every program of the node, and hub clients never ask
// again whether they may: an artifact that its source restricts has none unless
// Options.MayView says so. What may be viewed follows from the records alone, so
// views of before a change of access, or of what the configuration allows, are
// taken away when the change is known.

// mayView asks the configured policy about one manifest.
func (s *Store) mayView(m *artifact.Manifest) bool {
	if s.viewPolicy != nil {
		return s.viewPolicy(m)
	}
	return !m.Access.Restricted()
}

// meansLocked lists the manifests by which an artifact is known now: those its
// refs are pinned to, or the one that was superseded.
func (s *Store) meansLocked(digest artifact.Digest) []*artifact.Manifest {
	var list []*artifact.Manifest
	for _, m := range s.refs {
		if m.Digest == digest {
			list = append(list, m)
		}
	}
	if r := s.artifacts[digest]; len(list) == 0 && r != nil {
		list = append(list, r.m)
	}
	return list
}

// flatAllowed reports whether some ref of an artifact lets everybody read its
// bytes. Equal bytes are one artifact: one ref that is open is enough.
func (s *Store) flatAllowed(digest artifact.Digest) bool {
	s.mu.Lock()
	list := s.meansLocked(digest)
	s.mu.Unlock()
	return slices.ContainsFunc(list, s.mayView)
}

// hubAllowed reports whether the repository folder of that name may stand in an
// artifact's hub view, which all its refs share. Where no ref of the artifact
// has the name any more, what is known of the name elsewhere decides.
func (s *Store) hubAllowed(digest artifact.Digest, name string) bool {
	s.mu.Lock()
	here := s.meansLocked(digest)
	var elsewhere []*artifact.Manifest
	for _, m := range s.refs {
		elsewhere = append(elsewhere, m)
	}
	s.mu.Unlock()
	known := false
	for _, m := range here {
		if m.Ref.HubName() == name {
			known = true
			if s.mayView(m) {
				return true
			}
		}
	}
	if known {
		return false
	}
	for _, m := range elsewhere {
		if m.Ref.HubName() == name {
			known = true
			if !s.mayView(m) {
				return false
			}
		}
	}
	return known
}

// viewAllowed gives ErrRestricted where a view may not be published.
func (s *Store) viewAllowed(digest artifact.Digest, kind string, ref artifact.Ref) error {
	allowed := false
	if kind == flatKind {
		allowed = s.flatAllowed(digest)
	} else {
		allowed = s.hubAllowed(digest, ref.HubName())
	}
	if !allowed {
		return fmt.Errorf("artifact %s: %w", digest.Short(), ErrRestricted)
	}
	return nil
}

// reviewViews takes away what may not be viewed, or not any more. A program
// that has such a file open keeps it.
func (s *Store) reviewViews() error {
	s.mu.Lock()
	digests := make([]artifact.Digest, 0, len(s.artifacts))
	for digest := range s.artifacts {
		digests = append(digests, digest)
	}
	s.mu.Unlock()
	var err error
	for _, digest := range digests {
		err = errors.Join(err, s.reviewFlat(digest), s.reviewHub(digest))
	}
	return err
}

func (s *Store) reviewFlat(digest artifact.Digest) error {
	dir := s.viewPath(flatKind, digest)
	if _, err := s.fs.Lstat(dir); err != nil || s.flatAllowed(digest) {
		if notExist(err) {
			err = nil
		}
		return err
	}
	s.log.Info("taking a view away, access is restricted", slog.String("artifact", digest.String()), slog.String("view", dir))
	err := s.vanish(dir)
	s.forgetView(digest, flatKind, "")
	return err
}

func (s *Store) reviewHub(digest artifact.Digest) error {
	root := s.viewPath(hubKind, digest)
	entries, err := s.fs.ReadDir(root)
	if notExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	kept, taken := 0, 0
	for _, e := range entries {
		switch {
		case !e.IsDir():
			continue
		case s.hubAllowed(digest, e.Name()):
			kept++
			continue
		}
		taken++
		dir := filepath.Join(root, e.Name())
		s.log.Info("taking a view away, access is restricted", slog.String("artifact", digest.String()), slog.String("view", dir))
		err = errors.Join(err, s.vanish(dir))
		s.forgetView(digest, hubKind, e.Name())
	}
	if kept == 0 && taken > 0 {
		err = errors.Join(err, s.vanish(root))
		s.forgetView(digest, hubKind, "")
	}
	return err
}

// forgetView notes that a view, or one repository of a hub view, is gone.
func (s *Store) forgetView(digest artifact.Digest, kind, repo string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.artifacts[digest]
	if r == nil {
		return
	}
	if repo == "" {
		delete(r.views, kind)
	}
	for ref := range r.hubRefs {
		if kind == hubKind && (repo == "" || ref.HubName() == repo) {
			delete(r.hubRefs, ref)
		}
	}
}

// vanish takes a directory of the views away whole before it is taken apart.
func (s *Store) vanish(dir string) error {
	temp := durable.TempName(filepath.Join(s.views, filepath.Base(dir)))
	if err := s.fs.Rename(dir, temp); err != nil {
		if notExist(err) {
			return nil
		}
		return err
	}
	return errors.Join(s.fs.SyncDir(filepath.Dir(dir)), s.fs.RemoveAll(temp))
}

// sameRepository says whether two manifests are of one repository of one source.
func sameRepository(a, b *artifact.Manifest) bool {
	return a.Source == b.Source && a.Ref.Scheme == b.Ref.Scheme && a.Ref.Name == b.Ref.Name
}

// agree gives every record of a manifest's repository its access, durably: it
// belongs to the repository, not to a revision. The caller has s.recording. An
// unknown access changes nothing that is known.
func (s *Store) agree(told *artifact.Manifest) error {
	type change struct {
		m    *artifact.Manifest
		path string
	}
	var changes []change
	s.mu.Lock()
	current := map[artifact.Digest]bool{}
	for ref, m := range s.refs {
		current[m.Digest] = true
		if told.Access != artifact.AccessUnknown && sameRepository(m, told) && m.Access != told.Access {
			changes = append(changes, change{m, s.recordPath(ref)})
		}
	}
	for digest, r := range s.artifacts {
		if told.Access != artifact.AccessUnknown && !current[digest] && sameRepository(r.m, told) && r.m.Access != told.Access {
			changes = append(changes, change{r.m, s.supersededPath(r.m)})
		}
	}
	s.mu.Unlock()
	for _, c := range changes {
		next := c.m.WithAccess(told.Access)
		data, err := next.Encode()
		if _, there := s.fs.Lstat(c.path); err == nil && !notExist(there) {
			// An artifact that is being removed has no record any more.
			err = durable.WriteFile(s.fs, c.path, data, 0o600)
		}
		if err != nil {
			return fmt.Errorf("record access of %s: %w", c.m.Ref, err)
		}
		s.mu.Lock()
		if s.refs[c.m.Ref] == c.m {
			s.refs[c.m.Ref] = next
		}
		if r := s.artifacts[c.m.Digest]; r != nil && r.m == c.m {
			r.m = next
		}
		s.mu.Unlock()
		s.log.Info("access of artifact changed", slog.String("artifact", c.m.Digest.String()), slog.String("ref", c.m.Ref.String()),
			slog.String("access", string(told.Access)), slog.String("before", string(c.m.Access)))
	}
	return nil
}

// settleAccess makes the records of a repository agree where a crash ended a
// change between two of them: the strictest stands until the source is asked
// again. It is called before the store is shared.
func (s *Store) settleAccess() error {
	strictness := map[artifact.Access]int{artifact.AccessOpen: 1, artifact.AccessGated: 2, artifact.AccessPrivate: 3}
	var strictest []*artifact.Manifest // one per repository of which something is known
	consider := func(m *artifact.Manifest) {
		i := slices.IndexFunc(strictest, func(known *artifact.Manifest) bool { return sameRepository(known, m) })
		switch {
		case m.Access == artifact.AccessUnknown:
		case i < 0:
			strictest = append(strictest, m)
		case strictness[m.Access] > strictness[strictest[i].Access]:
			strictest[i] = m
		}
	}
	for _, m := range s.refs {
		consider(m)
	}
	for _, r := range s.artifacts {
		consider(r.m)
	}
	s.recording <- struct{}{}
	defer func() { <-s.recording }()
	for _, m := range strictest {
		if err := s.agree(m); err != nil {
			return err
		}
	}
	return nil
}

// setAccess records what a source says now about the access of a repository.
func (s *Store) setAccess(told *artifact.Manifest) error {
	s.recording <- struct{}{}
	err := s.agree(told)
	<-s.recording
	if err == nil {
		err = s.reviewViews()
	}
	s.notify()
	return err
}

// accessTeller is a source that can tell the access of what it listed before.
type accessTeller interface {
	Access(ctx context.Context, ref artifact.Ref, commit string) (artifact.Access, error)
}

// CheckAccess asks the sources again to whom they serve what is held, each
// repository once, or only those whose access is unknown, and records the
// answers. A source that cannot be asked, or that no longer knows the repository,
// changes nothing. It gives the number of repositories whose access stays unknown
// though their source could tell.
func (p *Puller) CheckAccess(ctx context.Context, onlyUnknown bool) (unknown int, err error) {
	for _, m := range p.repositories() {
		teller := p.tellerOf(m)
		if teller == nil || onlyUnknown && m.Access != artifact.AccessUnknown {
			continue
		}
		access, askErr := teller.Access(ctx, m.Ref, m.Commit)
		if askErr != nil || access == artifact.AccessUnknown {
			if m.Access == artifact.AccessUnknown {
				unknown++
			}
			err = errors.Join(err, askErr)
			continue
		}
		err = errors.Join(err, p.store.setAccess(m.WithAccess(access)))
	}
	return unknown, err
}

// AccessUnknown says that the access of something held is unknown though its
// source could tell.
func (p *Puller) AccessUnknown() bool {
	return slices.ContainsFunc(p.repositories(), func(m *artifact.Manifest) bool {
		return m.Access == artifact.AccessUnknown && p.tellerOf(m) != nil
	})
}

// repositories gives one manifest of each repository held.
func (p *Puller) repositories() []*artifact.Manifest {
	type repository struct{ source, scheme, name string }
	var list []*artifact.Manifest
	seen := map[repository]bool{}
	for _, m := range p.store.Manifests() {
		if key := (repository{m.Source, m.Ref.Scheme, m.Ref.Name}); !seen[key] {
			seen[key] = true
			list = append(list, m)
		}
	}
	return list
}

// tellerOf gives the source that a manifest came from, nil where it is not
// configured for the ref any more or cannot tell.
func (p *Puller) tellerOf(m *artifact.Manifest) accessTeller {
	for _, r := range p.rules {
		if r.Source.Name() == m.Source && r.Covers(m.Ref) {
			teller, _ := r.Source.(accessTeller)
			return teller
		}
	}
	return nil
}

// unlessRestricted drops the error of a view that may not be.
func unlessRestricted(err error) error {
	if errors.Is(err, ErrRestricted) {
		return nil
	}
	return err
}

// withKnownAccess gives a manifest of unknown access that of its repository,
// where a record has it.
func (s *Store) withKnownAccess(m *artifact.Manifest) *artifact.Manifest {
	if m.Access != artifact.AccessUnknown {
		return m
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, other := range s.refs {
		if sameRepository(other, m) && other.Access != artifact.AccessUnknown {
			return m.WithAccess(other.Access)
		}
	}
	return m
}
