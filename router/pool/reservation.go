package pool

import (
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/router/pick"
)

// Failure is how an attempt at an endpoint ended, as far as its health goes.
type Failure uint8

// Failures of an Outcome.
const (
	FailureNone     Failure = iota // answered, with whatever code below 400
	FailureConnect                 // could not connect
	FailureReset                   // reset or EOF before the answer's end
	FailureServer                  // answered 5xx
	FailureTimeout                 // no answer in time
	FailureCanceled                // the client left or the router shut down: says nothing
	FailureClient                  // answered 4xx: says that it answers
)

// String names the failure, for metrics.
func (f Failure) String() string {
	names := [...]string{"none", "connect", "reset", "server", "timeout", "canceled", "client"}
	if int(f) < len(names) {
		return names[f]
	}
	return "unknown"
}

// Outcome is what became of a reservation. Token counts are the engine's own.
type Outcome struct {
	Failure Failure
	// Usage says that the engine reported the counts below.
	Usage bool
	// CachedTokens are those of PromptTokens that the engine found in its cache.
	PromptTokens, CachedTokens, CompletionTokens int
	// TTFT is the time from sending the request to the first byte of content, 0
	// where none came.
	TTFT time.Duration
}

// Reservation is a request's place at an endpoint, from Acquire to Done. Its
// fields do not change. FirstByte and Done may be called from any goroutine
// and count once each.
type Reservation struct {
	URL          string // http://host:port of the engine, no trailing slash
	EndpointID   string // node/name, or the URL of a static endpoint
	Pool         string
	LogicalModel string
	ServedModel  string // what to put into the body's model field
	Accelerator  string // accelerator class for metering, empty where unknown
	// Options of the pool.
	ForwardAuthorization bool
	ContinuousUsage      bool

	decision pick.Decision
	owner    *Pools
	pool     *poolState
	endpoint *endpoint
	prompt   int // uncached prompt tokens held until the first byte
	decode   int // tokens held until Done
	backlog  int // uncached tokens that were in flight before it
	bytes    int // length of the canonical walk
	probe    bool
	first    atomic.Bool
	done     atomic.Bool
}

// assumedAnswer is the length of an answer in tokens while it is not known; a
// client's larger maximum says little, since most answers end by themselves.
const assumedAnswer = 256

// Decision is why this endpoint was chosen.
func (r *Reservation) Decision() pick.Decision { return r.decision }

// acquireFrom makes a reservation in one target's pool, nil where no endpoint
// of it may take the request. Where only the least bad could, and least bad is
// not asked for, it is nil and alarmed.
func (p *Pools) acquireFrom(view *routes, m *model, t *target, req *pick.Request, avoid func(string) bool, leastBad bool) (_ *Reservation, alarmed bool) {
	ps := t.pool
	var avoided []*endpoint
	if avoid != nil {
		for _, e := range ps.members() {
			if avoid(e.id) {
				avoided = append(avoided, e)
			}
		}
	}
	r := &Reservation{
		Pool: ps.name, LogicalModel: m.name, ServedModel: t.ServedModel,
		owner: p, pool: ps, bytes: req.PromptBytes,
	}
	if alarmed = ps.reserve(r, view.roundRobin, leastBad, t, req, avoided, p); r.endpoint == nil {
		return nil, alarmed
	}
	p.index.Insert(r.endpoint.slot, req.Keys, t.salt)
	return r, alarmed
}

// reserve matches, chooses and reserves in one critical section, so that the
// next request sees this one. Without a choice r has no endpoint.
func (ps *poolState) reserve(r *Reservation, roundRobin, leastBad bool, t *target, req *pick.Request, avoided []*endpoint, p *Pools) (alarmed bool) {
	now := p.now()
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.gatherLocked(t, req, avoided, p.index, now)
	weights, ask := p.weights, *req
	if roundRobin {
		weights.RoundRobin, ask.Tie = true, ps.turn
	}
	d := pick.Pick(&ask, ps.candidates, weights)
	if d.Alarm && !leastBad {
		return true
	}
	ps.count.reasons[d.Reason]++
	if d.Index < 0 {
		return false
	}
	ps.turn++
	if d.Alarm {
		ps.count.alarms++
	}
	e := ps.chosen[d.Index]
	answer := assumedAnswer
	if req.MaxTokens > 0 {
		answer = min(answer, req.MaxTokens)
	}
	r.URL, r.EndpointID, r.endpoint = e.url, e.id, e
	r.Accelerator = e.accelerator
	r.ForwardAuthorization, r.ContinuousUsage = ps.cfg.ForwardAuthorization, ps.cfg.ContinuousUsage
	r.decision, r.backlog = d, e.promptInFlight
	r.prompt, r.decode = d.UncachedTokens, d.CreditTokens+d.UncachedTokens+answer
	r.probe = e.passive.begin(now)
	e.reserveLocked(r.prompt, r.decode)
	return d.Alarm
}

// FirstByte says that the engine began to answer: the prompt is computed and
// no longer stands before others.
func (r *Reservation) FirstByte() {
	if r.first.Swap(true) {
		return
	}
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	r.endpoint.promptInFlight -= r.prompt
}

// Done ends the reservation: all it held is free, and the outcome teaches the
// pool. Only the first call counts.
func (r *Reservation) Done(o Outcome) {
	if r.done.Swap(true) {
		return
	}
	r.FirstByte()
	ps, e := r.pool, r.endpoint
	now := r.owner.now()
	ps.mu.Lock()
	e.inFlight--
	e.decodeInFlight -= r.decode
	e.ends++
	if int(o.Failure) < len(ps.count.failures) {
		ps.count.failures[o.Failure]++
	}
	v := e.passive.end(o.Failure, r.probe, now)
	if o.Usage && o.PromptTokens > 0 {
		ps.count.prompt += uint64(o.PromptTokens)
		ps.count.predicted += uint64(min(r.decision.CreditTokens, o.PromptTokens))
		ps.count.reported += uint64(min(max(o.CachedTokens, 0), o.PromptTokens))
		ps.learn.takeText(r.bytes, o.PromptTokens)
		ps.learn.takeRate(o.PromptTokens-o.CachedTokens, r.backlog, o.TTFT)
	}
	ps.mu.Unlock()
	switch v {
	case verdictSuspended:
		if o.Failure == FailureConnect {
			// Nobody listens: what comes back is a new process with an empty cache.
			r.owner.index.Clear(e.slot)
		}
		r.owner.log.Warn("suspend endpoint", slog.String("endpoint", e.id), slog.String("failure", o.Failure.String()))
	case verdictRecovered:
		r.owner.log.Info("resume endpoint", slog.String("endpoint", e.id))
	case verdictNone:
	}
}
