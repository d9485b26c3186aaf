package gate

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Speed is what a tier can do.
type Speed struct {
	Bandwidth float64       // bytes per second
	Latency   time.Duration // of a read of nothing
}

// unknown is the speed of a tier that nobody measured: a slow NVMe drive.
var unknown = Speed{Bandwidth: 1e9, Latency: time.Millisecond}

// Bounds of an estimate, so that no measurement makes it useless.
const (
	minBandwidth = 64 << 10 // bytes per second
	maxBandwidth = 1 << 40
	minLatency   = time.Microsecond
	maxLatency   = time.Minute
)

// bounded is the speed within its bounds; what is no speed is unknown's.
func (s Speed) bounded() Speed {
	if !(s.Bandwidth > 0) {
		s.Bandwidth = unknown.Bandwidth
	}
	if s.Latency <= 0 {
		s.Latency = unknown.Latency
	}
	return Speed{min(max(s.Bandwidth, minBandwidth), maxBandwidth), min(max(s.Latency, minLatency), maxLatency)}
}

const (
	// weight is what a read counts against all before it.
	weight = 0.1
	// maxSurprise bounds how many times longer or shorter than expected a read
	// counts: one from a cache, or behind a drive's pause, says little.
	maxSurprise = 8.0
	// halfLife is after how long without a read half of what was learned is
	// forgotten. A tier that seems too slow is read no longer, so without this it
	// would seem so for ever.
	halfLife = 30 * time.Second
	// keeps is how long nothing is forgotten: lookups amid reads need no powers.
	keeps = time.Second
)

// Estimator learns the speed of one tier. It begins with what a self-test found,
// follows the reads that are made, and goes back to the self-test's figures while
// none are. It is safe for concurrent use, and Load is cheap enough for every
// lookup.
type Estimator struct {
	now    func() time.Duration
	queued atomic.Int64 // bytes of reads under way

	mu    sync.Mutex // of those who change learned
	state atomic.Pointer[learned]
}

// learned is one state of an estimator.
type learned struct {
	seed  Speed
	speed Speed
	at    time.Duration // of the last read
}

// NewEstimator makes one that begins with a self-test's speed; parts of it that
// are not above zero are unknown. now is monotonic time, nil: since now.
func NewEstimator(seed Speed, now func() time.Duration) *Estimator {
	if now == nil {
		began := time.Now()
		now = func() time.Duration { return time.Since(began) }
	}
	e := &Estimator{now: now}
	e.Seed(seed)
	return e
}

// Seed begins anew with the speed of another self-test.
func (e *Estimator) Seed(seed Speed) {
	e.mu.Lock()
	defer e.mu.Unlock()
	seed = seed.bounded()
	e.state.Store(&learned{seed: seed, speed: seed, at: e.now()})
}

// Speed is what the tier can do now, within its bounds: never 0, infinite or no
// number.
func (e *Estimator) Speed() Speed { return e.state.Load().after(e.now()) }

// after is the speed at a time: what was learned loses half of its distance to
// the seed, in ratio, with every half-life.
func (l *learned) after(now time.Duration) Speed {
	idle := now - l.at - keeps
	if now <= l.at || idle <= 0 || l.speed == l.seed {
		return l.speed
	}
	left := math.Exp2(-float64(idle) / float64(halfLife))
	return Speed{
		Bandwidth: l.seed.Bandwidth * math.Pow(l.speed.Bandwidth/l.seed.Bandwidth, left),
		Latency:   scaled(l.seed.Latency, math.Pow(float64(l.speed.Latency)/float64(l.seed.Latency), left)),
	}.bounded()
}

// Load is a read of that many bytes begun now, behind those under way.
func (e *Estimator) Load(bytes int64) Load {
	s := e.Speed()
	return Load{Bytes: bytes, Queued: max(0, e.queued.Load()), Bandwidth: s.Bandwidth, Latency: s.Latency}
}

// Read is one that is under way. Its end is told once: Done or Failed.
type Read struct {
	estimator *Estimator
	load      Load
	began     time.Duration
}

// Begin tells of a read of that many bytes.
func (e *Estimator) Begin(bytes int64) Read {
	load := e.Load(max(0, bytes))
	e.queued.Add(load.Bytes)
	return Read{estimator: e, load: load, began: e.now()}
}

// Failed ends a read that says nothing about speed.
func (r Read) Failed() { r.estimator.queued.Add(-r.load.Bytes) }

// Done ends a read that gave all its bytes, and learns from the time it took.
func (r Read) Done() {
	r.estimator.queued.Add(-r.load.Bytes)
	r.estimator.Observe(r.load.Bytes, r.load.Queued, r.estimator.now()-r.began)
}

// Observe learns from a read of that many bytes, which took that long and began
// behind queued others. What differs from the expectation changes latency and
// bandwidth by their parts in it: small reads teach the one, large ones the
// other. One without bytes or time teaches nothing.
func (e *Estimator) Observe(bytes, queued int64, took time.Duration) {
	if bytes <= 0 || took <= 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.now()
	old := e.state.Load()
	s := old.after(now)
	latency := s.Latency.Seconds()
	expected := latency + (float64(bytes)+float64(max(0, queued)))/s.Bandwidth
	surprise := min(max(took.Seconds()/expected, 1/maxSurprise), maxSurprise)
	part := latency / expected
	s = Speed{
		Bandwidth: s.Bandwidth / math.Pow(surprise, weight*(1-part)),
		Latency:   scaled(s.Latency, math.Pow(surprise, weight*part)),
	}.bounded()
	e.state.Store(&learned{seed: old.seed, speed: s, at: now})
}

// scaled is a latency times a factor, within the bounds of latencies.
func scaled(d time.Duration, by float64) time.Duration {
	return time.Duration(min(max(float64(d)*by, float64(minLatency)), float64(maxLatency)))
}
