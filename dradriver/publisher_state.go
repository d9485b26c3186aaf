package dradriver

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// PoolState is how far one slice pool is.
type PoolState struct {
	Name    string `json:"name"`
	Devices int    `json:"devices"`
	Slices  int    `json:"slices"`
	// Wanted is when what the pool should hold last changed. InSync says that
	// the API server holds it, since Synced.
	Wanted time.Time `json:"wanted"`
	Synced time.Time `json:"synced,omitzero"`
	InSync bool      `json:"inSync"`
	// Took is the time from Wanted to Synced of the last change that arrived.
	Took time.Duration `json:"took,omitempty"`
	// Failure is what the last try ended with; empty after one that succeeded.
	Failure  string `json:"failure,omitempty"`
	Failures uint64 `json:"failures"` // tries that failed, ever
	Syncs    uint64 `json:"syncs"`    // tries that succeeded, ever

	version uint64 // counts what the pool should hold
	removed bool   // should hold nothing: gone once that is synced
}

// PublisherState is how far a Publisher is, for admin and metrics.
type PublisherState struct {
	Cluster  ClusterFeatures `json:"cluster"`
	Features Features        `json:"features"` // in force
	// Lacking names the features that are not in force, Dropped those that the
	// API server dropped from a slice although it was said to have them.
	Lacking []string `json:"lacking,omitempty"`
	Dropped []string `json:"dropped,omitempty"`
	// Waiting says what a Publisher waits for that has not begun, or why the
	// cluster could not be asked of late; empty while all is well.
	Waiting string      `json:"waiting,omitempty"`
	Pools   []PoolState `json:"pools,omitempty"` // by name
	// LeftOut says what the node has and the slices do not; Refused what was not
	// sent because the API server would not take it.
	LeftOut []string `json:"leftOut,omitempty"`
	Refused string   `json:"refused,omitempty"`
	// Writes of slices by this process.
	Creates int64 `json:"creates"`
	Updates int64 `json:"updates"`
	Deletes int64 `json:"deletes"`
}

// InSync reports whether every slice pool is at the API server as it should
// be, and there is at least one.
func (s PublisherState) InSync() bool {
	return len(s.Pools) > 0 && !slices.ContainsFunc(s.Pools, func(p PoolState) bool { return !p.InSync })
}

// books is what a Publisher knows of its own progress; Publisher.mu guards it.
type books struct {
	cluster ClusterFeatures
	known   bool // cluster was learned once
	masked  map[string]bool
	dropped []string
	waiting string
	pools   map[string]*PoolState
	leftOut []string
	refused string
	stats   func() resourceslice.Stats
}

// State gives how far the Publisher is.
func (p *Publisher) State() PublisherState {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := &p.books
	s := PublisherState{
		Cluster: b.cluster, Features: p.features(), Dropped: slices.Clone(b.dropped),
		Waiting: b.waiting, LeftOut: slices.Clone(b.leftOut), Refused: b.refused,
	}
	if b.known {
		s.Lacking = s.Features.lacking()
	}
	for _, name := range slices.Sorted(maps.Keys(b.pools)) {
		s.Pools = append(s.Pools, *b.pools[name])
	}
	if b.stats != nil {
		stats := b.stats()
		s.Creates, s.Updates, s.Deletes = stats.NumCreates, stats.NumUpdates, stats.NumDeletes
	}
	return s
}

// Subscribe gives a channel that holds a signal after State changed, and the
// func that ends the subscription.
func (p *Publisher) Subscribe() (changed <-chan struct{}, cancel func()) {
	c := make(chan struct{}, 1)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.subs[c] = struct{}{}
	return c, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.subs, c)
	}
}

// edit changes the books and tells the subscribers.
func (p *Publisher) edit(change func(*books)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(&p.books)
	for c := range p.subs {
		signal(c)
	}
}

func (p *Publisher) known() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.books.known
}

// features gives those in force: found, then overruled, then without what the
// API server was seen to drop. The caller holds mu.
func (p *Publisher) features() Features {
	f, _ := p.books.cluster.Features.With(p.opts.Features) // the names were checked by NewPublisher
	f, _ = f.With(p.books.masked)
	return f
}

func (p *Publisher) waiting(what string) {
	p.edit(func(b *books) { b.waiting = what })
}

// learned takes what the cluster says of itself. A new version makes an end of
// what an earlier one was seen to drop.
func (p *Publisher) learned(c ClusterFeatures) {
	var lacking []string
	news := false
	p.edit(func(b *books) {
		news = !b.known || b.cluster.Version != c.Version || b.cluster.Features != c.Features
		if b.cluster.Version != c.Version {
			b.masked, b.dropped = map[string]bool{}, nil
		}
		b.cluster, b.known, b.waiting = c, true, ""
		lacking = p.features().lacking()
	})
	if news {
		p.log.Info("cluster's features", slog.String("version", c.Version), slog.String("from", c.From),
			slog.String("lacking", strings.Join(lacking, " ")), slog.String("problem", c.Problem))
	}
}

// maskDropped takes as not had what was dropped from a slice although the
// cluster, asked again, or the configuration still says that it is had.
func (p *Publisher) maskDropped() {
	p.edit(func(b *books) {
		for _, name := range b.dropped {
			if p.features().Has(name) {
				b.masked[name] = false
			}
		}
	})
}

func (p *Publisher) planned(plan Plan, refused error) {
	text := ""
	if refused != nil {
		text = refused.Error()
	}
	news := false
	p.edit(func(b *books) {
		news = text != "" && b.refused != text
		b.leftOut, b.refused = plan.LeftOut, text
	})
	if news {
		p.log.Error("slices not sent", slog.Any("error", refused))
	}
}

// wants notes what the pools named changed should hold from now on.
func (p *Publisher) wants(now time.Time, wanted map[string]resourceslice.Pool, changed []string) {
	p.edit(func(b *books) {
		b.stats = p.controller.GetStats
		for _, name := range changed {
			s := b.pools[name]
			if s == nil {
				s = &PoolState{Name: name}
				b.pools[name] = s
			}
			pool, ok := wanted[name]
			s.version++
			s.removed, s.Wanted, s.InSync = !ok, now, false
			s.Slices, s.Devices = len(pool.Slices), 0
			for _, slice := range pool.Slices {
				s.Devices += len(slice.Devices)
			}
		}
	})
}

// version gives which count of a pool a sync that starts now will send.
func (p *Publisher) version(pool string) uint64 {
	p.sendMu.Lock()
	defer p.sendMu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.books.pools[pool]; s != nil {
		return s.version
	}
	return 0
}

// synced notes that the API server holds what a pool should hold.
func (p *Publisher) synced(pool string, version uint64, now time.Time) {
	recovered := false
	p.edit(func(b *books) {
		s := b.pools[pool]
		if s == nil {
			return
		}
		s.Syncs++
		recovered = s.Failure != ""
		s.Failure = ""
		if s.version != version {
			return
		}
		if s.removed {
			delete(b.pools, pool)
			return
		}
		if !s.InSync {
			s.InSync, s.Took = true, now.Sub(s.Wanted)
		}
		s.Synced = now
	})
	if recovered {
		p.log.Info("slices published again", slog.String("pool", pool))
	}
}

// failed is called by the slice controller for every try that failed.
func (p *Publisher) failed(ctx context.Context, err error, doing string) {
	if ctx.Err() != nil {
		return // stopping
	}
	pool := p.queue.current()
	var dropped *resourceslice.DroppedFieldsError
	if errors.As(err, &dropped) {
		pool = dropped.PoolName
	}
	news := false
	p.edit(func(b *books) {
		for _, name := range droppedFeatures(err) {
			if !slices.Contains(b.dropped, name) {
				b.dropped = append(b.dropped, name)
			}
		}
		if s := b.pools[pool]; s != nil {
			news = s.Failure != err.Error()
			s.Failure = err.Error()
			s.Failures++
		}
	})
	if dropped != nil {
		signal(p.dropped)
	}
	if news {
		p.log.Error("slices not published", slog.String("pool", pool), slog.String("doing", doing), slog.Any("error", err))
	}
}
