package peer

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
)

// Blocks are the blocks of a namespace here, and those that peers have. Its
// methods are those of kvtier.Namespace.
type Blocks struct {
	*kvtier.Namespace
	peers *Peers
	hope  *hope
}

// Blocks gives a namespace with what peers have of it. Its tenant is one that
// shares on this node, too.
func (p *Peers) Blocks(n *kvtier.Namespace) *Blocks { return &Blocks{n, p, newHope()} }

// hope is whether it pays to wait for answers: where peers had nothing for long,
// nobody waits, and what they have after all is found at the next question.
type hope struct{ left atomic.Int64 }

const (
	fullHope  = 64 // answers of no that are waited for in a row
	foundHope = 8  // what one of yes adds
)

func newHope() *hope {
	h := &hope{}
	h.left.Store(fullHope)
	return h
}

func (h *hope) any() bool { return h.left.Load() > 0 }

// learn takes an answer.
func (h *hope) learn(found bool) {
	by := int64(-1)
	if found {
		by = foundHope
	}
	for {
		left := h.left.Load()
		if h.left.CompareAndSwap(left, min(max(left+by, 0), fullHope)) {
			return
		}
	}
}

// Lookup tells whether the block is here or on its way, and its length in bytes.
// Where nobody knows, it asks, and waits a moment for answers. A block on its way
// may fail to come: then a Get misses.
func (b *Blocks) Lookup(key block.Key) (size int, ok bool) {
	if size, ok = b.Namespace.Lookup(key); ok {
		return size, true
	}
	f, came := b.seek(context.Background(), key)
	switch {
	case f != nil:
		return f.size, true
	case came:
		return b.Namespace.Lookup(key)
	}
	return 0, false
}

// Pin holds a block that is here, or comes within a moment.
func (b *Blocks) Pin(key block.Key) (*kvtier.Pin, bool) {
	if pin, ok := b.Namespace.Pin(key); ok {
		return pin, true
	}
	f, came := b.seek(context.Background(), key)
	if f == nil && !came {
		return nil, false
	}
	if f != nil && !within(context.Background(), f.done, b.peers.opts.PinWait) {
		return nil, false
	}
	return b.Namespace.Pin(key)
}

// Get gives a block that is here, or that a peer has and that comes sooner than it
// is computed. Errors are those of kvtier.Namespace. It counts as one hit or miss,
// or as both where a block that was here went just then.
func (b *Blocks) Get(ctx context.Context, key block.Key) (*kvtier.Block, error) {
	if b.here(key) {
		if got, err := b.Namespace.Get(ctx, key); !errors.Is(err, kvtier.ErrMiss) {
			return got, err
		}
		// It has gone just now, or is damaged.
	}
	if f, _ := b.seek(ctx, key); f != nil {
		if within(ctx, f.done, b.patience(f)) {
			b.peers.totals.waited.Add(1)
		} else {
			b.peers.totals.waitedOut.Add(1)
		}
	}
	return b.Namespace.Get(ctx, key)
}

// Delete ends blocks here. They are not fetched from peers for a while, and what
// is on its way is not stored.
func (b *Blocks) Delete(ctx context.Context, keys ...block.Key) (removed int, err error) {
	b.peers.Dropped(b.ID(), keys...)
	return b.Namespace.Delete(ctx, keys...)
}

// patience is how long a Get waits for a block on its way.
func (b *Blocks) patience(f *flight) time.Duration {
	if anew, known := b.Recompute().Time(); known {
		return anew
	}
	return min(longest, 50*time.Millisecond+4*f.expected)
}

// here says whether the block is here, worth its load or not.
func (b *Blocks) here(key block.Key) bool {
	var size [1]int
	b.Peek([]block.Key{key}, size[:])
	return size[0] != 0
}

// seek gives the flight of a block that is not here, or says that it has come.
func (b *Blocks) seek(ctx context.Context, key block.Key) (f *flight, came bool) {
	p, id := b.peers, name{b.ID(), key}
	if b.here(key) {
		return nil, true // as of now, or on a drive that is too slow for it
	}
	f, q := p.seek(b.Namespace, id, b.hope)
	if f != nil || q == nil {
		return f, false
	}
	// Who comes late to a question does not wait for it.
	if !b.hope.any() || p.now()-q.began > p.opts.LookupWait || !within(ctx, q.done, p.opts.LookupWait) {
		return nil, false
	}
	p.mu.Lock()
	f = p.flights[id]
	p.mu.Unlock()
	return f, f == nil && b.here(key)
}

// seek gives the flight of a block, or the question where it is.
func (p *Peers) seek(n *kvtier.Namespace, id name, h *hope) (*flight, *question) {
	anew := n.Recompute()
	p.mu.Lock()
	defer p.mu.Unlock()
	if f := p.flights[id]; f != nil || !p.running {
		return f, nil
	}
	if p.now() < p.quiet[id.space] {
		return nil, nil
	}
	if q := p.questions[id]; q != nil {
		return nil, q
	}
	if at, ok := p.known.find(id, p.now()); ok {
		if at.remote == nil {
			return nil, nil
		}
		return p.flyLocked(n, id, at.remote, at.size, anew), nil
	}
	q := &question{space: n, name: id, hope: h, began: p.now(), done: make(chan struct{})}
	if !p.askLocked(q, false) && !(p.opts.AllZones && p.askLocked(q, true)) {
		return nil, nil // nobody is there to ask
	}
	p.questions[id] = q
	return nil, q
}

// Dropped says that blocks are ended here, before they are: for a minute peers are
// not asked for them, and what is on its way is not stored.
func (p *Peers) Dropped(space block.Namespace, keys ...block.Key) {
	for _, key := range keys {
		p.deleted(name{space, key})
	}
}

// DroppedAll is Dropped for every block of a namespace.
func (p *Peers) DroppedAll(space block.Namespace) {
	p.mu.Lock()
	now := p.now()
	for id, until := range p.quiet {
		if now >= until {
			delete(p.quiet, id)
		}
	}
	p.quiet[space] = now + deletedFor
	for id, q := range p.questions {
		q.void = q.void || id.space == space
	}
	var flights []*flight
	for id, f := range p.flights {
		if id.space == space {
			flights = append(flights, f)
		}
	}
	p.mu.Unlock()
	for _, f := range flights {
		f.revoke()
	}
}

// revoke says that a block on its way is not to be stored.
func (f *flight) revoke() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.void = true
}

// deleted notes that a block was deleted here.
func (p *Peers) deleted(id name) {
	p.mu.Lock()
	p.known.learn(id, place{until: p.now() + deletedFor})
	if q := p.questions[id]; q != nil {
		q.void = true
	}
	f := p.flights[id]
	p.mu.Unlock()
	if f != nil {
		f.revoke()
	}
}

// within waits for a channel to be closed, at most so long.
func within(ctx context.Context, done <-chan struct{}, limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}
