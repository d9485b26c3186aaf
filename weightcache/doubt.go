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
// wrong file. What an earlier process may have given out of files that it did
// not finish counts as given out at Open.
func (s *Store) Doubtful(sha artifact.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, found := s.doubts[sha]
	age := s.now().Sub(at)
	return found && age >= 0 && age < doubtFor
}

// doubtUnfinished doubts what an earlier process may have begun to give out: it
// may have found it wrong, or lost it, and told nobody. It is called before the
// store is shared.
func (s *Store) doubtUnfinished() {
	for _, r := range s.artifacts {
		for _, f := range s.missingLocked(r.m) {
			if len(s.doubts) >= maxDoubts {
				return
			}
			s.doubts[f.SHA256] = s.now()
		}
	}
}

// Doubtful is Store.Doubtful.
func (p *Puller) Doubtful(sha artifact.Digest) bool { return p.store.Doubtful(sha) }
