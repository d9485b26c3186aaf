package weightcache

import (
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Lease forbids removal and eviction of an artifact until Release. It lives in
// memory: a process that ends holds none, and its successor takes those it
// still needs from its own ledger.
type Lease struct {
	Digest artifact.Digest
	Holder string
	once   sync.Once
	end    func()
}

// Release ends the lease; more than once is harmless.
func (l *Lease) Release() { l.once.Do(l.end) }

// touchEvery bounds how often the last use is written to the drive.
const touchEvery = time.Minute

// Acquire leases an artifact for an unnamed holder; see AcquireFor.
func (s *Store) Acquire(digest artifact.Digest) (*Lease, error) { return s.AcquireFor(digest, "") }

// AcquireFor leases an artifact, Ready or not. The holder's name appears in
// the error that a removal gets. It fails with ErrUnknown where the store does
// not know the artifact or is removing it.
func (s *Store) AcquireFor(digest artifact.Digest, holder string) (*Lease, error) {
	s.mu.Lock()
	r := s.artifacts[digest]
	if r == nil || r.evicting {
		s.mu.Unlock()
		return nil, fmt.Errorf("lease artifact %s: %w", digest.Short(), ErrUnknown)
	}
	r.leases++
	touch := s.useLocked(r)
	s.mu.Unlock()
	s.touch(digest, touch)
	s.notify()
	return &Lease{Digest: digest, Holder: holder, end: func() {
		s.mu.Lock()
		r.leases--
		touch := s.useLocked(r)
		s.mu.Unlock()
		s.touch(digest, touch)
		s.notify()
	}}, nil
}

// turnLocked makes an artifact the one used last.
func (s *Store) turnLocked(r *record) {
	s.turn++
	r.turn = s.turn
}

// useLocked notes a use and says whether the drive should know.
func (s *Store) useLocked(r *record) bool {
	now := s.now()
	since := now.Sub(r.lastUsed)
	stale := since > touchEvery || since < 0 // the clock was set back
	r.lastUsed = now
	s.turnLocked(r)
	return stale && r.checked
}

// touch keeps the order of eviction across restarts; losing it costs only that.
func (s *Store) touch(digest artifact.Digest, needed bool) {
	if !needed {
		return
	}
	now := s.now()
	if err := s.fs.Chtimes(s.path(readyDir, digest.String()), now, now); err != nil && !notExist(err) {
		s.log.Warn("cannot note last use", slog.String("artifact", digest.String()), slog.Any("error", err))
	}
}
