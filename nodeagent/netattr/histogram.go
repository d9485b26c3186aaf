package netattr

import (
	"math/bits"
	"time"
)

// histogramSteps divides each doubling of a Histogram: a value is known to 1/16.
const histogramSteps = 16

// Histogram counts durations from 1 us to 2^26 us (67 s), each to a sixteenth of
// itself. The zero value is empty; it is copied like a number.
type Histogram struct {
	counts [26 * histogramSteps]uint32
	n      uint64
}

// place is the bucket of a duration.
func place(d time.Duration) int {
	us := uint64(max(d.Microseconds(), 1))
	octave := bits.Len64(us) - 1
	step := 0
	if octave >= 4 {
		step = int(us>>(octave-4)) - histogramSteps
	} else {
		step = int(us<<(4-octave)) - histogramSteps
	}
	return min(octave*histogramSteps+step, 26*histogramSteps-1)
}

// Add counts one duration.
func (h *Histogram) Add(d time.Duration) {
	h.counts[place(d)]++
	h.n++
}

// Merge counts all of another.
func (h *Histogram) Merge(o *Histogram) {
	if o.n == 0 {
		return
	}
	for i, n := range o.counts {
		h.counts[i] += n
	}
	h.n += o.n
}

// Count is how many durations there are.
func (h *Histogram) Count() uint64 { return h.n }

// Quantile gives the duration below which a share q (0 to 1) of all are, 0 where
// there are none.
func (h *Histogram) Quantile(q float64) time.Duration {
	if h.n == 0 {
		return 0
	}
	want := uint64(q * float64(h.n-1))
	for i, n := range h.counts {
		if uint64(n) > want {
			octave, step := i/histogramSteps, i%histogramSteps
			// The middle of the bucket.
			ns := (uint64(histogramSteps+step)*1000<<octave + 500<<octave) / histogramSteps
			return time.Duration(ns)
		}
		want -= uint64(n)
	}
	return 0
}
