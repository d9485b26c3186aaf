package netattr

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestQuantilesAreRightToASixteenth(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	var h Histogram
	var all []time.Duration
	for range 10_000 {
		d := time.Duration(1+random.Uint64N(1<<random.UintN(35))) * time.Nanosecond * 1000
		d = min(d, 60*time.Second)
		h.Add(d)
		all = append(all, d)
	}
	slices.Sort(all)
	for _, q := range []float64{0, 0.1, 0.5, 0.9, 0.99, 1} {
		want := all[int(q*float64(len(all)-1))]
		if got := h.Quantile(q); got < want*15/16-time.Microsecond || got > want*17/16+time.Microsecond {
			t.Errorf("quantile %v is %v, want %v", q, got, want)
		}
	}
	if h.Count() != 10_000 {
		t.Errorf("counts %d", h.Count())
	}
}

func TestHistogramsMergeAsIfAllHadGoneIntoOne(t *testing.T) {
	t.Parallel()
	var a, b, both, none Histogram
	for i := range 1000 {
		d := time.Duration(i*i) * time.Microsecond
		both.Add(d)
		if i%3 == 0 {
			a.Add(d)
		} else {
			b.Add(d)
		}
	}
	a.Merge(&b)
	a.Merge(&none)
	if a != both {
		t.Error("merged and single histograms differ")
	}
	if none.Quantile(0.9) != 0 {
		t.Error("an empty histogram has a quantile")
	}
}

func TestDurationsBeyondTheEndsAreCounted(t *testing.T) {
	t.Parallel()
	var h Histogram
	h.Add(0)
	h.Add(-time.Second)
	h.Add(time.Hour)
	if h.Count() != 3 || h.Quantile(0) > 2*time.Microsecond || h.Quantile(1) < time.Minute {
		t.Errorf("%d durations from %v to %v", h.Count(), h.Quantile(0), h.Quantile(1))
	}
}
