package weightcache

import (
	"fmt"
	"math"

	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Room is what further pulls may take, in bytes: what budget and drive leave,
// and what eviction of everything that nothing holds would free.
func (s *Store) Room() (units.Bytes, error) {
	free, _, err := s.fs.Free(s.dir)
	if err != nil {
		return 0, fmt.Errorf("read free space of %s: %w", s.dir, s.gone(err))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	room := free - s.reserved - s.keepFree
	if s.budget > 0 {
		room = min(room, s.budget-s.usedLocked())
	}
	plan, _ := s.planLocked(math.MaxInt64)
	going := map[artifact.Digest]bool{}
	for _, digest := range plan {
		going[digest] = true
	}
	staying := map[artifact.Digest]bool{} // files
	for digest, r := range s.artifacts {
		if !going[digest] {
			for _, f := range r.m.Files {
				staying[f.SHA256] = true
			}
		}
	}
	for _, sizes := range []map[artifact.Digest]int64{s.blobs, s.partial} {
		for sha, size := range sizes {
			if !staying[sha] {
				room += size
			}
		}
	}
	return units.Bytes(max(0, room)), nil
}
