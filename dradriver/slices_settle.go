package dradriver

import (
	"reflect"
	"slices"
	"time"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// settler turns what a node has at this moment into what its volatile slice
// pools should say: every write of them reaches each scheduler, so they say
// only what will stay true. Its decisions depend on the times it is given and
// on nothing else; one goroutine uses it.
type settler struct {
	// coalesce is the least time between two changes of one volatile pool.
	coalesce time.Duration
	// settle is how long an artifact must be gone before its device goes.
	settle time.Duration

	gpus device.Snapshot // as last known

	free      int64          // size of the cold device that an earlier run published
	weights   *stock.Weights // as published; Drive.Free holds what Cold.Taken adds
	cold      Cold           // as published; Taken is 0
	weightsAt time.Time      // when they last changed
	gone      map[artifact.Digest]time.Time

	kv   *stock.Space
	kvAt time.Time
}

// next gives the offer to publish at now, and when to ask again even if
// nothing new is known; a zero time says that only news matter. GPUs pass at
// once. What is not known (nil) stays as it was last published.
func (s *settler) next(o Offer, now time.Time) (Offer, time.Time) {
	var wake time.Time
	later := func(t time.Time) {
		if wake.IsZero() || t.Before(wake) {
			wake = t
		}
	}
	if o.GPUs != nil {
		s.gpus = o.GPUs
	}
	if o.Weights != nil {
		s.nextWeights(*o.Weights, o.Cold, now, later)
	}
	if o.KV != nil && (s.kv == nil || *s.kv != *o.KV) {
		if due := s.kvAt.Add(s.coalesce); s.kv != nil && now.Before(due) {
			later(due)
		} else {
			space := *o.KV
			s.kv, s.kvAt = &space, now
		}
	}
	o.GPUs, o.Weights, o.KV, o.Cold = s.gpus, s.weights, s.kv, s.cold
	return o, wake
}

func (s *settler) nextWeights(w stock.Weights, cold Cold, now time.Time, later func(time.Time)) {
	published := s.free
	if s.weights != nil {
		published = int64(s.weights.Drive.Free)
	}
	w.Artifacts = s.present(w.Artifacts, now, later)
	w.Drive.Free = units.Bytes(coarse(clampAdd(int64(w.Drive.Free), int64(cold.Taken)), published))
	cold.Taken = 0
	if s.weights != nil && reflect.DeepEqual(*s.weights, w) && s.cold == cold {
		return
	}
	if due := s.weightsAt.Add(s.coalesce); s.weights != nil && now.Before(due) {
		later(due)
		return
	}
	s.weights, s.cold, s.weightsAt = &w, cold, now
}

// present gives the artifacts that are there, and those published that have
// not been gone for long.
func (s *settler) present(artifacts []stock.Artifact, now time.Time, later func(time.Time)) []stock.Artifact {
	there := map[artifact.Digest]bool{}
	for _, a := range artifacts {
		there[a.Digest] = true
	}
	artifacts = slices.Clone(artifacts)
	gone := map[artifact.Digest]time.Time{}
	if s.weights != nil {
		for _, a := range s.weights.Artifacts {
			if there[a.Digest] {
				continue
			}
			since, known := s.gone[a.Digest]
			if !known {
				since = now
			}
			gone[a.Digest] = since
			if leaves := since.Add(s.settle); now.Before(leaves) {
				artifacts = append(artifacts, a)
				later(leaves)
			}
		}
	}
	s.gone = gone
	slices.SortFunc(artifacts, compareArtifacts)
	return artifacts
}

// coarse rounds free bytes down to one of 16 steps within each power of two,
// and keeps what is published while that is no lie and less than two steps
// short: free space moves with every write of anybody, its slice must not.
func coarse(free, published int64) int64 {
	if published > 0 && free >= published && free-published < 2*coarseStep(published) {
		return published
	}
	if free <= 0 {
		return 0
	}
	return free - free%coarseStep(free)
}

func coarseStep(n int64) int64 { return max(powerBelow(n)/16, 1) }

// clampAdd adds what is not negative and stays within int64.
func clampAdd(a, b int64) int64 {
	a, b = max(a, 0), max(b, 0)
	if sum := a + b; sum >= 0 {
		return sum
	}
	return 1<<63 - 1
}
