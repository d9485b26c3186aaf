package kvtier

import (
	"math"

	"github.com/hearth-dev/hearth/kvtier/index"
)

// candidate is a block that might be written to a drive.
type candidate struct {
	touches int // uses, the first is its being stored
	depth   int // blocks before it in its prefix
}

// Admission. A block is written once it was used a second time; what lies deep in
// a prompt costs the engine more to compute, since its attention looks back over
// all before it; and where drives have little wear left, only what is used more is
// worth it.
const (
	secondTouch = 2.0
	// depthCost is the number of blocks after which a block counts twice, and
	// maxDepth where that ends.
	depthCost = 64
	maxDepth  = 256
	// relaxed is the level of the wear bucket above which it does not matter.
	relaxed = 0.5
)

// admits decides whether a block is written to a drive. level is how full the
// bucket of drive wear is, from 0 to 1, for this tenant.
func admits(c candidate, level float64) bool {
	if c.touches < 2 {
		// A block that came once has not shown that anybody wants it.
		return false
	}
	worth := float64(c.touches) * (1 + float64(min(c.depth, maxDepth))/depthCost)
	if level <= 0 || math.IsNaN(level) {
		return false
	}
	return worth >= secondTouch*max(1, relaxed/level)
}

// admitLocked decides for an entry.
func (t *Tenant) admitLocked(id index.ID) bool {
	if t.drive == nil || !t.drive.Takes(t.index.Size(id)) {
		return false
	}
	if t.spec.AdmitAll || t.pinnedLocked(id) {
		return true
	}
	touches := t.index.Touches(id)
	if touches < 2 {
		return false
	}
	return admits(candidate{touches: touches, depth: t.index.Depth(id, maxDepth)}, t.cache.wear.level(t.id))
}

// considerLocked has a block written that is worth it and on no drive yet.
func (t *Tenant) considerLocked(id index.ID) {
	if t.drive == nil || t.index.Loc(id) != 0 || !t.admitLocked(id) {
		return
	}
	if _, here := t.index.Resident(id); here {
		t.enqueueLocked(id, false)
	}
}
