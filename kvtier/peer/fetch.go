package peer

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/gate"
)

// flight is a block on its way from a peer.
type flight struct {
	space    *kvtier.Namespace
	name     name
	remote   *remote
	size     int
	expected time.Duration // that it takes, when it began
	read     gate.Read
	done     chan struct{} // closed at its end

	mu   sync.Mutex // of its being stored
	void bool       // the block was deleted here
}

// flyLocked begins to fetch a block that a peer has, where that is worth it.
func (p *Peers) flyLocked(space *kvtier.Namespace, id name, r *remote, size int, anew gate.Recompute) *flight {
	if f := p.flights[id]; f != nil || !p.running {
		return f
	}
	load := r.speed.Load(int64(size))
	if _, known := anew.Time(); !gate.Decide(load, anew) || !known && load.Time() > longest {
		p.totals.gated.Add(1)
		return nil
	}
	f := &flight{space: space, name: id, remote: r, size: size, expected: load.Time(), done: make(chan struct{})}
	f.read = r.speed.Begin(int64(size))
	select {
	case r.fetches <- f:
	default:
		f.read.Failed()
		p.totals.full.Add(1)
		return nil
	}
	p.flights[id] = f
	return f
}

// endLocked ends a flight.
func (p *Peers) endLocked(f *flight) {
	if p.flights[f.name] == f {
		delete(p.flights, f.name)
		close(f.done)
	}
}

func (p *Peers) end(f *flight) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endLocked(f)
}

// miss ends a flight without its block.
func (p *Peers) miss(f *flight) {
	f.read.Failed()
	p.end(f)
}

// runFetches fetches blocks of one peer, until ctx ends.
func (p *Peers) runFetches(ctx context.Context, r *remote) {
	joins := func(batch []*flight, f *flight) bool {
		// A share for each connection, so that all of them work.
		limit := min(batchBytes, p.ofTenant(f.space.Tenant()).most/int64(p.opts.Connections))
		bytes := int64(f.size)
		for _, one := range batch {
			bytes += int64(one.size)
		}
		return len(batch) < batchBlocks && f.name.space == batch[0].name.space && bytes <= limit
	}
	inBatches(ctx, r.fetches, joins, func(l *link, batch []*flight) *link { return p.fetch(ctx, r, l, batch) })
}

// landing is a flight with its room.
type landing struct {
	*flight
	put   *kvtier.Put
	taken *taken
}

// fetch brings blocks of one namespace from a peer and gives the connection to go
// on with, if any.
func (p *Peers) fetch(ctx context.Context, r *remote, l *link, batch []*flight) *link {
	wanted := p.wanted(r, batch)
	if len(wanted) == 0 {
		return l
	}
	var bytes int64
	for _, f := range wanted {
		bytes += int64(f.size)
	}
	taken, err := p.takeRoom(ctx, wanted[0].space.Tenant(), bytes)
	if err != nil {
		for _, f := range wanted {
			p.miss(f)
		}
		return l
	}
	var landings []landing
	var entries []entry
	var slots []slot
	for _, f := range wanted {
		put, err := f.space.Put(f.name.key, f.size, kvtier.PutOptions{IfAbsent: true})
		if err != nil {
			p.totals.noRoom.Add(1)
			taken.giveBack(f.size)
			p.miss(f)
			continue
		}
		landings = append(landings, landing{f, put, taken})
		entries = append(entries, entry{f.name.key, uint32(f.size)})
		slots = append(slots, put)
	}
	if len(landings) == 0 {
		return l
	}
	done := 0
	l, err = p.with(ctx, r, l, func(l *link) error {
		return l.get(ctx, p.opts.Limiter, landings[0].name.space, entries, slots, func(i int, absent bool) {
			p.land(ctx, landings[i], absent)
			done = i + 1
		})
	})
	for i, f := range landings[done:] {
		f.put.Abort()
		f.taken.giveBack(f.size)
		if i == 0 && (errors.Is(err, errDamaged) || errors.Is(err, ErrProtocol)) {
			p.totals.damaged.Add(1)
		} else {
			p.totals.failed.Add(1)
		}
		p.miss(f.flight)
	}
	return l
}

// wanted are those of a row that are still to be fetched; the others end.
func (p *Peers) wanted(r *remote, batch []*flight) []*flight {
	if r.down(p.now()) {
		for _, f := range batch {
			p.totals.failed.Add(1)
			p.miss(f)
		}
		return nil
	}
	keys, sizes := make([]block.Key, len(batch)), make([]int, len(batch))
	for i, f := range batch {
		keys[i] = f.name.key
	}
	batch[0].space.Peek(keys, sizes)
	wanted := batch[:0:0]
	for i, f := range batch {
		f.mu.Lock()
		void := f.void
		f.mu.Unlock()
		if void || sizes[i] != 0 { // somebody stored it here meanwhile
			p.miss(f)
			continue
		}
		wanted = append(wanted, f)
	}
	return wanted
}

// land stores a block that has come whole, or ends the flight of an absent one.
func (p *Peers) land(ctx context.Context, f landing, absent bool) {
	defer p.end(f.flight)
	defer f.taken.giveBack(f.size)
	if absent {
		f.put.Abort()
		f.read.Failed()
		p.totals.absent.Add(1)
		p.mu.Lock()
		p.known.learn(f.name, place{until: p.now() + absentFor})
		p.mu.Unlock()
		return
	}
	f.mu.Lock()
	var err error
	if f.void {
		f.put.Abort()
	} else {
		err = f.put.Commit(ctx)
	}
	f.mu.Unlock()
	if err != nil {
		p.log.Warn("a block of a KV peer is not stored", slog.String("peer", f.remote.Name), slog.Any("error", err))
	}
	f.read.Done()
	p.totals.blocks.Add(1)
	p.totals.blockBytes.Add(int64(f.size))
	p.totals.tokens.Add(int64(f.space.Recompute().Tokens))
	f.remote.blocks.Add(1)
	f.remote.blockBytes.Add(int64(f.size))
}

// taken is the right to await bytes. One fetch has it.
type taken struct {
	peers     *Peers
	own       *room
	mine, all int64 // of the tenant's and of all
}

// takeRoom waits until so many bytes of a tenant may be awaited. What is more than
// all there is counts as all.
func (p *Peers) takeRoom(ctx context.Context, t *kvtier.Tenant, bytes int64) (*taken, error) {
	own := p.ofTenant(t)
	r := &taken{p, own, min(bytes, own.most), min(bytes, int64(p.opts.InFlight))}
	if err := own.Acquire(ctx, r.mine); err != nil {
		return nil, err
	}
	if err := p.room.Acquire(ctx, r.all); err != nil {
		own.Release(r.mine)
		return nil, err
	}
	p.totals.awaited.Add(bytes)
	return r, nil
}

// giveBack ends the wait for a block.
func (r *taken) giveBack(size int) {
	mine, all := min(r.mine, int64(size)), min(r.all, int64(size))
	r.mine, r.all = r.mine-mine, r.all-all
	r.peers.totals.awaited.Add(-int64(size))
	r.peers.room.Release(all)
	r.own.Release(mine)
}

// ofTenant bounds the bytes that one tenant awaits: a quarter of its RAM.
func (p *Peers) ofTenant(t *kvtier.Tenant) *room {
	spec := t.Spec()
	memory := max(spec.Memory, spec.MemoryLimit)
	if memory == 0 {
		memory = kvtier.Transit
	}
	most := int64(max(1, min(memory/4, p.opts.InFlight)))
	p.mu.Lock()
	defer p.mu.Unlock()
	known, ok := p.tenants[t]
	if !ok || known.most != most {
		known = &room{semaphore.NewWeighted(most), most}
		p.tenants[t] = known
	}
	return known
}
