package peer

import (
	"context"
	"errors"
	"time"

	"github.com/hearth-dev/hearth/kvtier"
)

// question asks peers for one block. Peers.mu guards it, but for done.
type question struct {
	space   *kvtier.Namespace
	name    name
	hope    *hope
	began   time.Duration
	far     bool // peers of other zones are asked by now
	pending int  // peers that have not answered
	awaited int  // of these those that are worth waiting for
	silent  bool // a peer did not answer
	void    bool // the block was deleted here meanwhile
	slow    map[*remote]bool
	settled bool
	done    chan struct{} // closed when nobody is to wait any longer
}

func (q *question) settle() {
	if !q.settled {
		q.settled = true
		close(q.done)
	}
}

// askLocked puts a question to the peers of one stage: those of this zone, or
// those of others. It says whether there is any to ask.
func (p *Peers) askLocked(q *question, far bool) bool {
	q.far = far
	for _, r := range p.remotes {
		if r.near == far || r.down(p.now()) {
			continue
		}
		select {
		case r.asks <- q:
			q.pending++
			if r.slow(p.now(), p.opts.LookupWait) {
				if q.slow == nil {
					q.slow = map[*remote]bool{}
				}
				q.slow[r] = true
			} else {
				q.awaited++
			}
		default:
			q.silent = true
		}
	}
	if q.pending > 0 && q.awaited == 0 {
		q.settle()
	}
	return q.pending > 0
}

// nextLocked ends a question that no peer of its stage said yes to, or puts it to
// those of other zones.
func (p *Peers) nextLocked(q *question) {
	if !q.far && p.opts.AllZones && !q.void && p.askLocked(q, true) {
		return
	}
	delete(p.questions, q.name)
	q.settle()
	switch {
	case q.void:
	case q.silent:
		p.totals.unanswered.Add(1)
	default:
		p.totals.notFound.Add(1)
		q.hope.learn(false)
		p.known.learn(q.name, place{until: p.now() + absentFor})
	}
}

// answered takes a peer's answer: the block's length, 0 for no, below 0 for none.
func (p *Peers) answered(r *remote, q *question, size int) {
	anew := q.space.Recompute()
	p.mu.Lock()
	defer p.mu.Unlock()
	q.pending--
	if !q.slow[r] {
		q.awaited--
	}
	q.silent = q.silent || size < 0
	open := p.questions[q.name] == q
	if open && size > 0 && !q.void {
		p.totals.found.Add(1)
		q.hope.learn(true)
		delete(p.questions, q.name)
		p.known.learn(q.name, place{remote: r, size: size, until: p.now() + hereFor})
		p.flyLocked(q.space, q.name, r, size, anew)
		q.settle()
		return
	}
	if !open {
		return
	}
	if q.pending == 0 {
		p.nextLocked(q)
	} else if q.awaited == 0 {
		q.settle()
	}
}

// runAsks asks one peer, until ctx ends.
func (p *Peers) runAsks(ctx context.Context, r *remote) {
	joins := func(batch []*question, q *question) bool {
		return len(batch) < MaxKeys && q.name.space == batch[0].name.space
	}
	inBatches(ctx, r.asks, joins, func(l *link, batch []*question) *link { return p.ask(ctx, r, l, batch) })
}

// ask puts questions of one namespace to a peer and gives the connection to go on
// with, if any.
func (p *Peers) ask(ctx context.Context, r *remote, l *link, batch []*question) *link {
	sizes := make([]int, len(batch))
	none := func() {
		for _, q := range batch {
			p.answered(r, q, -1)
		}
	}
	if r.down(p.now()) {
		none()
		return l
	}
	r.since.Store(max(1, int64(p.now())))
	defer r.since.Store(0)
	entries := make([]entry, len(batch))
	for i, q := range batch {
		entries[i].key = q.name.key
	}
	l, err := p.with(ctx, r, l, func(l *link) error { return l.has(batch[0].name.space, entries, sizes) })
	if err != nil {
		none()
		return l
	}
	p.totals.asked.Add(int64(len(batch)))
	for i, q := range batch {
		p.answered(r, q, sizes[i])
	}
	if p.opts.Limiter != nil {
		_ = p.opts.Limiter.WaitN(ctx, hasSize+4*len(batch)) // it has come: what comes next waits for it
	}
	return l
}

// with has do exchange something over a connection to a peer: over l, if that
// stands, else over a new one. It gives the connection to go on with, if any, and
// notes how the peer does.
func (p *Peers) with(ctx context.Context, r *remote, l *link, do func(*link) error) (*link, error) {
	err := errStale
	if l != nil {
		if err = do(l); err != nil {
			l.close()
		}
	}
	if errors.Is(err, errStale) {
		// The peer may have begun anew since.
		l, err = p.open(ctx, r)
		if err == nil {
			if err = do(l); err != nil {
				l.close()
			}
		}
	}
	if err != nil {
		if ctx.Err() == nil {
			p.failed(r, err)
		}
		return nil, err
	}
	p.good(r)
	return l, nil
}
