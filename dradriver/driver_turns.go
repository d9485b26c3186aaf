package dradriver

import (
	"context"
	"errors"
	"slices"
)

// callRank says whose wish for a turn is to be heard by who has it: a visitor is
// hurried by one of a higher rank that waits for a turn of its.
type callRank uint8

// Ranks of visitors.
const (
	rankBackground callRank = iota // recovery, looking at pulls: what they leave is done later
	rankPrepare                    // waits for weights, unless it is hurried
	rankUnprepare                  // is kept waiting by nobody's waiting
)

// errHurried ends what a visitor may leave for later: somebody else wants the turn.
var errHurried = errors.New("another call wants the claim")

// turn is the right to act for one claim.
type turn struct {
	taken   chan struct{}   // capacity 1: full while somebody has the turn
	had     *visit          // who has it
	waiting map[*visit]bool // who waits for it
}

// visit is a caller that has its turns, or waits for them.
type visit struct {
	c     *calls
	names []string // of its turns, sorted
	has   int      // of them; only the visitor changes it
	rank  callRank // of it, or of who waits behind it; guarded by calls.mu
	// patience ends once somebody of a higher rank waits.
	patience context.Context
	hurry    context.CancelFunc
}

// enter waits until nobody else acts for any of the claims, or ctx ends. The
// caller leaves the visit. Who has a turn, and all behind whom that one waits,
// are hurried where they rank lower.
func (c *calls) enter(ctx context.Context, names []string, own callRank) (*visit, error) {
	// One order for all callers, so that two of them never wait for each other.
	names = slices.Compact(slices.Sorted(slices.Values(names)))
	v := &visit{c: c, names: names, rank: own}
	v.patience, v.hurry = context.WithCancel(context.Background())
	turns := c.join(v)
	for _, t := range turns {
		select {
		case t.taken <- struct{}{}:
			c.took(t, v)
		case <-ctx.Done():
			v.leave()
			return nil, ctx.Err()
		}
	}
	return v, nil
}

// join notes that a visitor waits for its turns.
func (c *calls) join(v *visit) []*turn {
	c.mu.Lock()
	defer c.mu.Unlock()
	turns := make([]*turn, 0, len(v.names))
	for _, name := range v.names {
		t := c.turns[name]
		if t == nil {
			t = &turn{taken: make(chan struct{}, 1), waiting: map[*visit]bool{}}
			c.turns[name] = t
		}
		t.waiting[v] = true
		turns = append(turns, t)
	}
	c.hurryLocked(v)
	return turns
}

// took notes that a visitor has a turn, and hurries it where somebody of a
// higher rank waits for it already.
func (c *calls) took(t *turn, v *visit) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(t.waiting, v)
	t.had = v
	v.has++
	for other := range t.waiting {
		c.raiseLocked(v, other.rank)
	}
}

// hurryLocked hurries whoever has a turn that v waits for.
func (c *calls) hurryLocked(v *visit) {
	for _, name := range v.names {
		if t := c.turns[name]; t.waiting[v] && t.had != nil {
			c.raiseLocked(t.had, v.rank)
		}
	}
}

// raiseLocked gives a visitor the rank of who waits for it.
func (c *calls) raiseLocked(v *visit, to callRank) {
	if to <= v.rank {
		return
	}
	v.rank = to
	v.hurry()
	c.hurryLocked(v)
}

// leave gives all turns back, and waits for none any more.
func (v *visit) leave() {
	v.hurry() // whoever watches its patience is let go
	v.c.mu.Lock()
	defer v.c.mu.Unlock()
	for i, name := range v.names {
		t := v.c.turns[name]
		if i < v.has {
			t.had = nil
			<-t.taken
		}
		delete(t.waiting, v)
		if t.had == nil && len(t.waiting) == 0 {
			delete(v.c.turns, name)
		}
	}
}

// within gives a context that ends too when the visitor is hurried, with
// errHurried as its cause.
func (v *visit) within(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(v.patience, func() { cancel(errHurried) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}
