package weightcache

import (
	"maps"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

const (
	// doubtFor is how long a client may hold the beginning of a file and come
	// back for the rest.
	doubtFor = time.Hour
	// maxDoubts bounds the files in doubt; past it the oldest is forgotten.
	maxDoubts = 1024
)

// doubtLocked notes that bytes of a file may have been given out which turned
// out wrong, or which no digest will ever prove: what they came from is gone.
func (s *Store) doubtLocked(sha artifact.Digest) {
	now := s.now()
	maps.DeleteFunc(s.doubts, func(_ artifact.Digest, at time.Time) bool { return now.Sub(at) >= doubtFor || now.Before(at) })
	if len(s.doubts) >= maxDoubts {
		var oldest artifact.Digest
		for file, at := range s.doubts {
			if first, found := s.doubts[oldest]; !found || at.Before(first) {
				oldest = file
			}
		}
		delete(s.doubts, oldest)
	}
	s.doubts[sha] = now
}

// Doubtful reports whether somebody who was given bytes of a file within the
// last hour may hold others than those it has: the rest alone would complete a
// wrong file. Of what an earlier process gave out it knows nothing.
func (s *Store) Doubtful(sha artifact.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, found := s.doubts[sha]
	age := s.now().Sub(at)
	return found && age >= 0 && age < doubtFor
}

// Doubtful is Store.Doubtful.
func (p *Puller) Doubtful(sha artifact.Digest) bool { return p.store.Doubtful(sha) }
