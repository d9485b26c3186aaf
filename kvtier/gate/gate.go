// Package gate decides whether a block is worth loading: a tier that needs longer
// than the engine needs to compute the block anew only makes its answer later.
// The KV tier asks it before it tells an engine that a block is there. Decide is
// pure; Estimator learns how fast a tier is from the reads that were made. It
// reads nothing itself and keeps no block.
package gate

import (
	"math"
	"time"
)

// Load is a read of a block from a tier.
type Load struct {
	Bytes     int64
	Queued    int64         // bytes that the tier reads before it
	Bandwidth float64       // of the tier, bytes per second
	Latency   time.Duration // of a read of nothing
}

// Recompute is the engine's work for the same tokens.
type Recompute struct {
	Tokens int     // of the block; 0 is unknown
	Rate   float64 // tokens per second that the engine prefills; 0 is unknown
}

// maxTime is longer than anything that is worth waiting for.
const maxTime = 24 * time.Hour

// Time is how long the load takes, at most a day. A tier without bandwidth takes
// that long.
func (l Load) Time() time.Duration {
	bytes := float64(max(0, l.Bytes)) + float64(max(0, l.Queued))
	if !(l.Bandwidth > 0) {
		return maxTime
	}
	return duration(max(0, l.Latency).Seconds() + bytes/l.Bandwidth)
}

// Time is how long the engine computes, at most a day; known is false where the
// tokens or the rate are not known.
func (r Recompute) Time() (took time.Duration, known bool) {
	if r.Tokens <= 0 || !(r.Rate > 0) {
		return 0, false
	}
	return duration(float64(r.Tokens) / r.Rate), true
}

// Decide reports whether to load: where that takes less time than computing
// anew, and where nobody knows how long computing takes.
func Decide(l Load, r Recompute) bool {
	anew, known := r.Time()
	return !known || l.Time() < anew
}

// duration bounds seconds; what is no number is as long as can be.
func duration(seconds float64) time.Duration {
	if !(seconds < maxTime.Seconds()) {
		return maxTime
	}
	return time.Duration(math.Round(seconds * float64(time.Second)))
}
