package pool

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/router/index"
	"github.com/hearth-dev/hearth/router/pick"
)

// poolState is one pool: its endpoints and the one critical section in which a
// choice is made and reserved.
type poolState struct {
	name string
	// list is sorted by id and immutable; it is replaced under mu by a holder of
	// Pools.mu.
	list atomic.Pointer[[]*endpoint]

	mu    sync.Mutex
	cfg   PoolConfig // guarded by mu, as is all that follows
	turn  uint64     // of PolicyRoundRobin
	learn learned
	count counters

	// Reused from request to request.
	chosen     []*endpoint
	slots      []*index.Slot
	matched    []int
	candidates []pick.Candidate
}

type counters struct {
	reasons   map[pick.Reason]uint64
	alarms    uint64
	prompt    uint64 // prompt tokens as engines reported them
	predicted uint64 // of those, cached by our prediction
	reported  uint64 // of those, cached by the engines' word
	failures  [FailureClient + 1]uint64
}

func newPoolState(name string) *poolState {
	ps := &poolState{name: name}
	ps.list.Store(&[]*endpoint{})
	ps.count.reasons = make(map[pick.Reason]uint64, len(pick.Reasons()))
	return ps
}

func (ps *poolState) members() []*endpoint { return *ps.list.Load() }

func (ps *poolState) configure(cfg PoolConfig, members []*endpoint) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.cfg = cfg
	for _, e := range members {
		if e.pod.UID != "" {
			e.facts = cfg.Pods.over(e.told)
		}
	}
	ps.setLocked(members)
}

func (ps *poolState) setStatic(e *endpoint, c *EndpointConfig) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	e.facts = factsOf(c)
}

func (ps *poolState) add(e *endpoint) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.setLocked(append(slices.Clone(ps.members()), e))
}

func (ps *poolState) remove(e *endpoint) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.setLocked(slices.DeleteFunc(slices.Clone(ps.members()), func(o *endpoint) bool { return o == e }))
}

func (ps *poolState) setLocked(members []*endpoint) {
	slices.SortFunc(members, func(a, b *endpoint) int { return cmp.Compare(a.id, b.id) })
	ps.list.Store(&members)
}

func (ps *poolState) take(e *endpoint, f facts, loadMillis int64, loadAt, receivedAt time.Time) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	e.takeLocked(f, loadMillis, loadAt, receivedAt)
}

// size is a wish for a slot's capacity.
type size struct {
	slot   *index.Slot
	blocks int
}

// sizes lists the slots whose capacity is off by more than a sixteenth.
func (ps *poolState) sizes() []size {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	var wishes []size
	for _, e := range ps.members() {
		tokens := cmp.Or(e.kvTokens, ps.cfg.KVCapacityTokens, DefaultKVTokens)
		blocks := max(int(float64(tokens)*ps.learn.bytesPerToken()/pick.BlockBytes), 16)
		if diff := blocks - e.sized; diff > e.sized/16 || -diff > e.sized/16 {
			e.sized = blocks
			wishes = append(wishes, size{e.slot, blocks})
		}
	}
	return wishes
}

// gatherLocked fills chosen and candidates with the endpoints that may answer
// for the target.
func (ps *poolState) gatherLocked(t *target, req *pick.Request, avoided []*endpoint, x *index.Index, now time.Time) {
	ps.chosen, ps.slots = ps.chosen[:0], ps.slots[:0]
	for _, e := range ps.members() {
		if e.servesLocked(t) && !slices.Contains(avoided, e) {
			ps.chosen, ps.slots = append(ps.chosen, e), append(ps.slots, e.slot)
		}
	}
	ps.matched = slices.Grow(ps.matched[:0], len(ps.chosen))[:len(ps.chosen)]
	x.Match(req.Keys, t.salt, ps.slots, ps.matched)
	ps.candidates = ps.candidates[:0]
	rate := ps.rateLocked()
	for i, e := range ps.chosen {
		ps.candidates = append(ps.candidates, e.candidateLocked(now, ps.matched[i], rate))
	}
	ps.assumeLoadsLocked()
}

// assumeLoadsLocked takes an endpoint of which no load is known for as busy with
// others' requests as the busiest that tells: silence must not look like
// idleness. Where none tells, nothing is assumed.
func (ps *poolState) assumeLoadsLocked() {
	most, freshest := -1, time.Duration(math.MaxInt64)
	for i, e := range ps.chosen {
		if c := &ps.candidates[i]; !e.loadAt.IsZero() {
			most = max(most, c.Running+c.Waiting-c.InFlightAtReport, 0)
			freshest = min(freshest, c.LoadAge)
		}
	}
	if most < 0 {
		return
	}
	for i, e := range ps.chosen {
		if c := &ps.candidates[i]; e.loadAt.IsZero() {
			c.Running, c.Waiting, c.InFlightAtReport, c.LoadAge = most, 0, 0, freshest
		}
	}
}

// rateLocked is the prefill rate of the pool's engines, 0 = unknown.
func (ps *poolState) rateLocked() float64 {
	return cmp.Or(ps.learn.rate, ps.cfg.PrefillRate)
}

// cause says why no endpoint of the pool could take a request, and whether
// there was one that the caller could have avoided.
func (ps *poolState) cause(t *target, req *pick.Request) (text string, usable bool) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	serving, draining := 0, 0
	pinned := false
	for _, e := range ps.members() {
		if !e.servesLocked(t) {
			continue
		}
		serving++
		if e.drainsLocked() {
			draining++
		}
		pinned = pinned || e.id == req.Pin && !e.drainsLocked()
	}
	switch members := len(ps.members()); {
	case members == 0:
		return fmt.Sprintf("pool %s has no endpoint", ps.name), false
	case serving == 0:
		return fmt.Sprintf("pool %s: none of %d endpoints serves %s", ps.name, members, t.ServedModel), false
	case serving == draining:
		return fmt.Sprintf("pool %s: all %d endpoints drain", ps.name, serving), false
	case req.Pin != "" && !pinned:
		return fmt.Sprintf("pool %s: endpoint %s is gone or drains", ps.name, req.Pin), false
	}
	return fmt.Sprintf("pool %s: every endpoint was tried", ps.name), true
}
