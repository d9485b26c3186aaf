package pool

import "time"

// passive is what requests tell about an endpoint. Failures in a row add up to
// a suspension; after a pause one request is let through as a probe, and only
// its success ends the suspension.
type passive struct {
	score   int
	pause   time.Duration // of the present suspension, 0 = none
	until   time.Time     // when a probe may go
	probing bool          // a probe is under way
}

// Scores of failures in a row and the sum that suspends: one refused
// connection, three resets or time-outs, five answers of 5xx.
const (
	scoreConnect = 30
	scoreReset   = 10
	scoreServer  = 6
	scoreSuspend = 30

	firstPause = time.Second
	maxPause   = 30 * time.Second
)

// suspended reports whether the endpoint should get no request now. It is
// false when a probe may go.
func (p *passive) suspended(now time.Time) bool {
	return p.pause > 0 && (p.probing || now.Before(p.until))
}

// begin notes that a request goes to the endpoint, and reports whether it is a probe.
func (p *passive) begin(now time.Time) (probe bool) {
	if p.pause > 0 && !p.probing && !now.Before(p.until) {
		p.probing = true
		return true
	}
	return false
}

// verdict is what an ended request changed.
type verdict uint8

const (
	verdictNone verdict = iota
	verdictSuspended
	verdictRecovered
)

// end takes the failure a request ended with. A request that was under way
// when the endpoint was suspended proves nothing by failing again, and
// something by succeeding.
func (p *passive) end(f Failure, probe bool, now time.Time) verdict {
	if probe {
		p.probing = false
	}
	switch f {
	case FailureCanceled:
		return verdictNone
	case FailureNone, FailureClient:
		recovered := p.pause > 0
		*p = passive{}
		if recovered {
			return verdictRecovered
		}
		return verdictNone
	case FailureConnect:
		p.score += scoreConnect
	case FailureServer:
		p.score += scoreServer
	case FailureReset, FailureTimeout:
		p.score += scoreReset
	}
	switch {
	case p.pause > 0 && probe:
		p.pause = min(2*p.pause, maxPause)
		p.until = now.Add(p.pause)
	case p.pause == 0 && p.score >= scoreSuspend:
		p.pause = firstPause
		p.until = now.Add(p.pause)
		return verdictSuspended
	}
	return verdictNone
}
