package gate

import (
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

func TestABlockIsLoadedWhereThatIsSoonerThanComputingIt(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		load Load
		anew Recompute
		want bool
	}{
		// 16,384 tokens of an 8B model, 2 GiB, which a GPU computes in 0.7 s.
		"one drive":               {Load{2 * gib, 0, 7e9, 100 * time.Microsecond}, Recompute{16384, 23000}, true},
		"the same behind three":   {Load{2 * gib, 6 * gib, 7e9, 100 * time.Microsecond}, Recompute{16384, 23000}, false},
		"a drive behind overlays": {Load{2_400_000_000, 0, 60e6, time.Millisecond}, Recompute{16384, 18000}, false},
		"one block":               {Load{2 * mib, 0, 7e9, 100 * time.Microsecond}, Recompute{16, 23000}, true},
		"one block, far away":     {Load{2 * mib, 0, 7e9, 700 * time.Microsecond}, Recompute{16, 23000}, false},
		"as long as computing":    {Load{1000, 0, 1000, 0}, Recompute{10, 10}, false},
		"a moment shorter":        {Load{999, 0, 1000, 0}, Recompute{10, 10}, true},
		"tokens are unknown":      {Load{gib, gib, 1, time.Hour}, Recompute{0, 10}, true},
		"the rate is unknown":     {Load{gib, gib, 1, time.Hour}, Recompute{10, 0}, true},
		"the rate is no number":   {Load{gib, gib, 1, time.Hour}, Recompute{10, math.NaN()}, true},
		"no bandwidth":            {Load{1, 0, 0, 0}, Recompute{10, 10}, false},
		"bandwidth is no number":  {Load{1, 0, math.NaN(), 0}, Recompute{10, 10}, false},
		"endless bandwidth":       {Load{gib, 0, math.Inf(1), 0}, Recompute{10, 10}, true},
		"nothing at once":         {Load{0, 0, 1, 0}, Recompute{1, 1e9}, true},
		"less than nothing":       {Load{-5, -5, 1, -time.Hour}, Recompute{1, 1e9}, true},
		"more than can be":        {Load{math.MaxInt64, math.MaxInt64, 1, math.MaxInt64}, Recompute{math.MaxInt64, 1}, false},
		"an endless rate":         {Load{1, 0, 1e12, 0}, Recompute{10, math.Inf(1)}, false},
	} {
		if got := Decide(c.load, c.anew); got != c.want {
			anew, known := c.anew.Time()
			t.Errorf("%s: %v, the load takes %v, computing %v, known %v", name, got, c.load.Time(), anew, known)
		}
	}
	if got := (Load{math.MaxInt64, math.MaxInt64, 1e-300, math.MaxInt64}).Time(); got != maxTime {
		t.Errorf("the longest load takes %v", got)
	}
}

// clock is time that a test moves.
type clock struct{ at atomic.Int64 }

func (c *clock) now() time.Duration { return time.Duration(c.at.Load()) }

func near(got, want, part float64) bool { return math.Abs(got-want) <= want*part }

func TestAnEstimateFollowsTheReads(t *testing.T) {
	t.Parallel()
	seed := Speed{7e9, 100 * time.Microsecond}
	for name, truth := range map[string]Speed{
		"slower": {2e9, 400 * time.Microsecond}, "faster": {12e9, 60 * time.Microsecond}, "far": {10e9, 5 * time.Millisecond}, "a hundredth": {7e7, 100 * time.Microsecond},
	} {
		e := NewEstimator(seed, new(clock).now)
		random := rand.New(rand.NewPCG(1, 2))
		for range 3000 {
			bytes := int64(4096) << random.IntN(14)
			exact := Load{bytes, 0, truth.Bandwidth, truth.Latency}.Time()
			e.Observe(bytes, 0, time.Duration(float64(exact)*(0.8+0.4*random.Float64())))
		}
		if s := e.Speed(); !near(s.Bandwidth, truth.Bandwidth, 0.15) || !near(float64(s.Latency), float64(truth.Latency), 0.15) {
			t.Errorf("%s: %+v, want %+v", name, s, truth)
		}
	}
}

func TestReadsOfOneSizeArePredictedThoughTheyTellNothingElse(t *testing.T) {
	t.Parallel()
	e := NewEstimator(Speed{7e9, 100 * time.Microsecond}, new(clock).now)
	for range 200 {
		e.Observe(2*mib, 6*mib, 9*time.Millisecond)
	}
	s := e.Speed()
	if got := (Load{2 * mib, 6 * mib, s.Bandwidth, s.Latency}).Time(); !near(float64(got), float64(9*time.Millisecond), 0.02) {
		t.Errorf("predicted %v of 9ms", got)
	}
}

func TestSmallReadsTeachLatencyAndLargeOnesBandwidth(t *testing.T) {
	t.Parallel()
	seed := Speed{1e9, time.Millisecond}
	small, large := NewEstimator(seed, new(clock).now), NewEstimator(seed, new(clock).now)
	for range 200 {
		small.Observe(4096, 0, 10*time.Millisecond)
		large.Observe(64*mib, 0, time.Second)
	}
	if s := small.Speed(); !near(s.Bandwidth, 1e9, 0.05) || !near(float64(s.Latency), float64(10*time.Millisecond), 0.05) {
		t.Errorf("small reads teach %+v", s)
	}
	if s := large.Speed(); !near(s.Bandwidth, 64*mib, 0.05) || !near(float64(s.Latency), float64(time.Millisecond), 0.05) {
		t.Errorf("large reads teach %+v", s)
	}
}

func TestOneStrangeReadChangesLittle(t *testing.T) {
	t.Parallel()
	for _, took := range []time.Duration{1, time.Hour, math.MaxInt64} {
		e := NewEstimator(Speed{7e9, 100 * time.Microsecond}, new(clock).now)
		e.Observe(2*mib, 0, took)
		if s := e.Speed(); !near(s.Bandwidth, 7e9, 0.3) {
			t.Errorf("a read of %v makes %+v", took, s)
		}
	}
}

func TestATierThatSeemedSlowIsTriedAgain(t *testing.T) {
	t.Parallel()
	c := &clock{}
	seed := Speed{7e9, 100 * time.Microsecond}
	e := NewEstimator(seed, c.now)
	for range 500 {
		e.Observe(2*mib, 0, time.Second)
	}
	slow, anew := e.Speed(), Recompute{16, 23000}
	if Decide(e.Load(2*mib), anew) {
		t.Fatalf("still read at %+v", slow)
	}
	c.at.Add(int64(keeps))
	if s := e.Speed(); s != slow {
		t.Errorf("forgotten at once: %+v", s)
	}
	c.at.Add(int64(halfLife))
	if half := e.Speed(); !near(half.Bandwidth, math.Sqrt(slow.Bandwidth*7e9), 0.01) {
		t.Errorf("after a half-life %+v, between %+v and %+v", half, slow, seed)
	}
	c.at.Add(int64(10 * halfLife))
	if !Decide(e.Load(2*mib), anew) || !near(e.Speed().Bandwidth, 7e9, 0.01) {
		t.Errorf("never read again: %+v", e.Speed())
	}
	// What comes then counts from there on.
	e.Observe(2*mib, 0, 400*time.Microsecond)
	if s := e.Speed(); !near(s.Bandwidth, 7e9, 0.05) {
		t.Errorf("old reads count again: %+v", s)
	}
	c.at.Store(math.MinInt64)
	if s := e.Speed(); !near(s.Bandwidth, 7e9, 0.05) {
		t.Errorf("time that runs backwards makes %+v", s)
	}
}

func TestReadsUnderWayAreAheadOfTheNext(t *testing.T) {
	t.Parallel()
	c := &clock{}
	e := NewEstimator(Speed{1e9, time.Millisecond}, c.now)
	first, second := e.Begin(1_000_000), e.Begin(2_000_000)
	if got := e.Load(500); got != (Load{500, 3_000_000, 1e9, time.Millisecond}) {
		t.Errorf("the next load is %+v", got)
	}
	// Each took what was to be expected: nothing is learned.
	c.at.Store(int64(2 * time.Millisecond))
	first.Done()
	c.at.Store(int64(4 * time.Millisecond))
	second.Done()
	if s := e.Speed(); !near(s.Bandwidth, 1e9, 1e-6) {
		t.Errorf("expected times teach %+v", s)
	}
	e.Begin(5).Failed()
	e.Begin(-5).Failed()
	if got := e.Load(1).Queued; got != 0 {
		t.Errorf("%d bytes are under way", got)
	}
	third := e.Begin(1_000_000)
	c.at.Add(int64(time.Second))
	third.Done()
	if s := e.Speed(); !(s.Bandwidth < 1e9) || !(s.Latency > time.Millisecond) {
		t.Errorf("a slow read teaches %+v", s)
	}
}

func TestNoSpeedIsEverUseless(t *testing.T) {
	t.Parallel()
	for _, seed := range []Speed{{}, {-1, -1}, {math.NaN(), 5}, {math.Inf(1), math.MaxInt64}, {1e-300, 1}, {1e300, 0}, {7e9, time.Millisecond}} {
		c := &clock{}
		e := NewEstimator(seed, c.now)
		random := rand.New(rand.NewPCG(9, 9))
		for range 2000 {
			switch random.IntN(4) {
			case 0:
				c.at.Store(random.Int64() - random.Int64())
			case 1:
				c.at.Add(random.Int64N(int64(time.Minute)))
			default:
				n := random.Int64() >> random.IntN(64)
				e.Observe(n-random.Int64N(2), random.Int64()>>random.IntN(64)-1, time.Duration(random.Int64()>>random.IntN(64))-1)
			}
			s := e.Speed()
			if !(s.Bandwidth >= minBandwidth && s.Bandwidth <= maxBandwidth) || s.Latency < minLatency || s.Latency > maxLatency {
				t.Fatalf("seed %+v became %+v", seed, s)
			}
			if took := e.Load(mib).Time(); took <= 0 || took >= maxTime {
				t.Fatalf("seed %+v: a load takes %v", seed, took)
			}
		}
	}
	e := NewEstimator(Speed{}, nil)
	if got := e.Speed(); got != unknown {
		t.Errorf("unmeasured is %+v", got)
	}
	e.Seed(Speed{5e9, time.Millisecond})
	if got := e.Speed(); got != (Speed{5e9, time.Millisecond}) {
		t.Errorf("another self-test gives %+v", got)
	}
}

func TestManyReadersShareAnEstimate(t *testing.T) {
	t.Parallel()
	e := NewEstimator(Speed{7e9, 100 * time.Microsecond}, nil)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 500 {
				read := e.Begin(mib)
				if took := e.Load(mib).Time(); took <= 0 {
					t.Errorf("a load takes %v", took)
				}
				read.Done()
			}
		})
	}
	all.Wait()
	if got := e.Load(1).Queued; got != 0 {
		t.Errorf("%d bytes are under way", got)
	}
}

func BenchmarkDecide(b *testing.B) {
	e := NewEstimator(Speed{7e9, 100 * time.Microsecond}, nil)
	e.Observe(mib, 0, time.Second)
	for b.Loop() {
		Decide(e.Load(2*mib), Recompute{16, 23000})
	}
}
