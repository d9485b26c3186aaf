package weightcache

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// maxKeep bounds how long one Keep may ask for.
const maxKeep = 24 * time.Hour

// pruneKept is the number of kept artifacts from which those whose time is over
// are forgotten.
const pruneKept = 1024

// Keep asks that the bytes of an artifact stay until then though no ref means it
// any more: neither a refresh nor an eviction takes them. It forbids neither the
// removal of a ref nor the eviction of what a ref means, which can be fetched
// again, and it ends with the process. An earlier time than asked for before
// changes nothing, nor does an artifact that the store does not know.
func (s *Store) Keep(digest artifact.Digest, until time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.artifacts[digest] == nil {
		return
	}
	now := s.now()
	if until.After(now.Add(maxKeep)) {
		until = now.Add(maxKeep)
	}
	if len(s.kept) >= pruneKept {
		maps.DeleteFunc(s.kept, func(_ artifact.Digest, at time.Time) bool { return !now.Before(at) })
	}
	if until.After(s.kept[digest]) {
		s.kept[digest] = until
	}
}

// keptLocked reports whether a Keep of an artifact holds now.
func (s *Store) keptLocked(digest artifact.Digest) bool { return s.now().Before(s.kept[digest]) }

// nextKept is when the first Keep of an artifact that no ref means ends.
func (s *Store) nextKept() (at time.Time, found bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	current := map[artifact.Digest]bool{}
	for _, m := range s.refs {
		current[m.Digest] = true
	}
	for digest, until := range s.kept {
		if s.artifacts[digest] != nil && !current[digest] && s.keptLocked(digest) && (!found || until.Before(at)) {
			at, found = until, true
		}
	}
	return at, found
}

// Held finds the manifest of a commit of a hub repository: what a ref means, or
// else what one meant before and the store still knows.
func (s *Store) Held(repo, commit string) (*artifact.Manifest, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	is := func(m *artifact.Manifest) bool {
		return m.Commit == commit && m.Ref.Scheme == artifact.SchemeHub && m.Ref.Name == repo
	}
	var found *artifact.Manifest
	for _, m := range s.refs {
		// The order of a map must not decide under which of its refs it is known.
		if is(m) && (found == nil || m.Ref.Revision < found.Ref.Revision) {
			found = m
		}
	}
	if found != nil {
		return found, true
	}
	for _, r := range s.artifacts {
		if is(r.m) && !r.evicting {
			return r.m, true
		}
	}
	return nil, false
}

// Keep is Store.Keep.
func (p *Puller) Keep(digest artifact.Digest, until time.Time) { p.store.Keep(digest, until) }

// Held is Store.Held for refs that a rule allows.
func (p *Puller) Held(repo, commit string) (*artifact.Manifest, bool) {
	m, found := p.store.Held(repo, commit)
	if !found {
		return nil, false
	}
	for _, r := range p.rules {
		if r.Covers(m.Ref) {
			return m, true
		}
	}
	return nil, false
}

// Since is when the store came to know what the ref of a manifest means; zero
// where it does not know it any more.
func (p *Puller) Since(m *artifact.Manifest) time.Time {
	for _, path := range []string{p.store.recordPath(m.Ref), p.store.supersededPath(m)} {
		if info, err := p.store.fs.Stat(path); err == nil {
			return info.ModTime()
		}
	}
	return time.Time{}
}

// refTeller is implemented by sources that know what kinds of names there are.
type refTeller interface {
	Refs(ctx context.Context, repo string) (map[string]string, error)
}

// RefNames asks the first source that a rule allows for a repository what kinds
// of names its revisions are: names to full names ("refs/tags/v1"). Errors wrap
// ErrNotAllowed, ErrUnknown where no source can tell, or the source's sentinels.
func (p *Puller) RefNames(ctx context.Context, repo string) (map[string]string, error) {
	sources, err := p.allowed(artifact.Ref{Scheme: artifact.SchemeHub, Name: repo, Revision: artifact.DefaultRevision})
	if err != nil {
		return nil, err
	}
	for _, src := range sources {
		if teller, ok := src.(refTeller); ok {
			if err := p.throttles.wait(ctx, src.Name()); err != nil {
				return nil, err
			}
			names, err := teller.Refs(ctx, repo)
			p.throttles.note(err)
			return names, err
		}
	}
	return nil, fmt.Errorf("list refs of %s: %w: its source cannot tell", repo, ErrUnknown)
}
