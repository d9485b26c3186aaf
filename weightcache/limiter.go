package weightcache

import (
	"context"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/units"
)

// Limiter bounds the byte rate of all pulls together. It is a token bucket in
// debt form: a caller that took n bytes waits until the bucket is positive
// again, so n may exceed the burst and a rate change reaches waiters at once.
// It is safe for concurrent use.
type Limiter struct {
	mu      sync.Mutex
	rate    float64 // bytes per second, 0 = unlimited
	tokens  float64
	last    time.Time
	changed chan struct{} // closed and replaced by SetRate
}

// limiterBurst is how much unused rate may be saved up.
const limiterBurst = 50 * time.Millisecond

// NewLimiter starts with a rate; 0 means unlimited.
func NewLimiter(rate units.Rate) *Limiter {
	return &Limiter{rate: float64(rate), changed: make(chan struct{}), last: time.Now()}
}

// SetRate changes the rate for everyone, also for those who wait.
func (l *Limiter) SetRate(rate units.Rate) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refillLocked(time.Now())
	l.rate = float64(max(0, rate))
	close(l.changed)
	l.changed = make(chan struct{})
}

// Rate gives the rate in force.
func (l *Limiter) Rate() units.Rate {
	l.mu.Lock()
	defer l.mu.Unlock()
	return units.Rate(l.rate)
}

// Charge takes n bytes without waiting: who waits next waits for them too.
func (l *Limiter) Charge(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refillLocked(time.Now())
	if l.rate > 0 {
		l.tokens -= float64(n)
	}
}

// WaitN takes n bytes and waits until they are paid for. It fails only with
// the context's cause.
func (l *Limiter) WaitN(ctx context.Context, n int) error {
	l.mu.Lock()
	l.refillLocked(time.Now())
	if l.rate > 0 {
		l.tokens -= float64(n)
	}
	for {
		if l.rate == 0 || l.tokens >= 0 {
			l.mu.Unlock()
			return nil
		}
		wait := time.Duration(-l.tokens / l.rate * float64(time.Second))
		changed := l.changed
		l.mu.Unlock()
		timer := time.NewTimer(min(max(wait, time.Microsecond), time.Hour))
		select {
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-changed:
			timer.Stop()
		case <-timer.C:
		}
		l.mu.Lock()
		l.refillLocked(time.Now())
	}
}

func (l *Limiter) refillLocked(now time.Time) {
	elapsed := now.Sub(l.last)
	l.last = now
	if l.rate == 0 {
		l.tokens = 0
		return
	}
	l.tokens = min(l.tokens+elapsed.Seconds()*l.rate, limiterBurst.Seconds()*l.rate)
}
