package scaleout

import (
	"context"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/netattr"
)

// Limits of a Book.
const (
	MaxEnded   = 64 // records kept after their end
	MaxRunning = 64 // at once; more pulls have no record
	maxShares  = 32
	maxPoints  = 240
	maxOverlap = 64
	// before is how far back the round trips before a scale-out go.
	before = 30 * time.Second
)

// Flight is a pull that begins.
type Flight struct {
	ID          uint32
	Ref, Digest string
	Source      string
	Peer        bool // the source is another node
	Reason      string
	Size        int64 // bytes of the artifact
	Missing     int64 // bytes of it that are not here
}

// End is how a pull ended.
type End struct {
	Err   error // nil: the artifact is whole
	Bytes int64 // payload received from the source
}

// Sampler is where a Book has its numbers from.
type Sampler interface {
	Sample() *netattr.Snapshot
	Snapshot() *netattr.Snapshot
	Subscribe() (changed <-chan struct{}, cancel func())
	Fast() (end func())
	BeginFlight(id uint32)
	EndFlight(id uint32)
}

// Options configure a Book.
type Options struct {
	Node    string
	Sampler Sampler
	// Fetched gives the payload bytes that a pull that runs has received so far.
	Fetched func(flight uint32) int64
	Log     *slog.Logger
}

// Book keeps the records. It is safe for concurrent use.
type Book struct {
	opts Options

	mu       sync.Mutex
	running  []*entry
	ended    []Record // the latest last
	recent   []moment // the samples of the last 30 s
	watchers map[chan struct{}]bool
}

// moment is how the connections that serve requests fared at one sample.
type moment struct {
	at   time.Time
	live netattr.Live
}

// entry is a scale-out that runs.
type entry struct {
	record Record
	flight Flight
	base   *netattr.Snapshot
	during netattr.Histogram
	last   time.Time // of the sample that was taken in last
	every  int       // of the samples becomes a point
	skip   int
	fast   func()
}

// NewBook makes a Book; Run keeps its records up to date.
func NewBook(opts Options) *Book {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Fetched == nil {
		opts.Fetched = func(uint32) int64 { return 0 }
	}
	return &Book{opts: opts, watchers: map[chan struct{}]bool{}}
}

// Run takes in samples until ctx is done, and returns nil.
func (b *Book) Run(ctx context.Context) error {
	changed, cancel := b.opts.Sampler.Subscribe()
	defer cancel()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			b.observe(b.opts.Sampler.Snapshot())
		}
	}
}

// Began begins the record of a pull, before it has a connection; the func it
// gives ends it. Past MaxRunning there is no record.
func (b *Book) Began(f Flight) (ended func(End)) {
	b.opts.Sampler.BeginFlight(f.ID)
	base := b.opts.Sampler.Sample()
	kind := KindOrigin
	if f.Peer {
		kind = KindPeer
	}
	e := &entry{
		flight: f, base: base, every: 1, last: base.At,
		record: Record{
			ID: strconv.FormatUint(uint64(f.ID), 36), Node: b.opts.Node, State: StateRunning, Ref: f.Ref, Digest: f.Digest, Reason: f.Reason,
			Start: base.At.UTC(), SizeBytes: f.Size, MissingBytes: f.Missing, Sources: []Source{{Name: f.Source, Kind: kind}}, Shares: []Share{},
		},
	}
	b.mu.Lock()
	full := len(b.running) >= MaxRunning
	if !full {
		e.record.Before = b.beforeLocked(base.At)
		for _, other := range b.running {
			other.overlaps(e.record.ID)
			e.overlaps(other.record.ID)
		}
		b.running = append(b.running, e)
		e.update(base, 0)
	}
	b.mu.Unlock()
	if full {
		b.opts.Log.Warn("pull has no record of a scale-out", slog.String("ref", f.Ref), slog.Int("limit", MaxRunning))
		return func(End) { b.opts.Sampler.EndFlight(f.ID) }
	}
	e.fast = b.opts.Sampler.Fast()
	b.notify()
	return func(end End) { b.end(e, end) }
}

// overlaps notes another that ran at some time of this one: the first ones, of
// those that come and go while a long one runs.
func (e *entry) overlaps(id string) {
	if len(e.record.Overlap) < maxOverlap {
		e.record.Overlap = append(e.record.Overlap, id)
	}
}

// end takes the last sample of a scale-out and puts its record away.
func (b *Book) end(e *entry, end End) {
	last := b.opts.Sampler.Sample()
	e.fast()
	b.opts.Sampler.EndFlight(e.flight.ID)
	b.mu.Lock()
	e.take(last)
	e.update(last, end.Bytes)
	e.point(last)
	e.record.End, e.record.State = last.At.UTC(), StateReady
	if end.Err != nil {
		e.record.State, e.record.Error = StateFailed, end.Err.Error()
	}
	b.running = slices.DeleteFunc(b.running, func(other *entry) bool { return other == e })
	b.ended = append(b.ended, e.record)
	if len(b.ended) > MaxEnded {
		b.ended = slices.Delete(b.ended, 0, 1)
	}
	record := e.record
	b.mu.Unlock()
	b.log(record)
	b.notify()
}

// log tells a scale-out that ended as one line.
func (b *Book) log(r Record) {
	shares := make([]any, 0, len(r.Shares))
	for _, s := range r.Shares {
		who := s.Pod
		if who == "" {
			who = s.Unit
		}
		shares = append(shares, slog.Group(who+" "+s.Class+" "+s.Locality,
			slog.Uint64("received", s.Received), slog.Uint64("transmitted", s.Transmitted)))
	}
	attributes := []any{
		slog.String("scaleout", r.ID), slog.String("artifact", r.Digest), slog.String("ref", r.Ref), slog.String("reason", r.Reason),
		slog.String("state", r.State), slog.Time("start", r.Start), slog.Time("end", r.End), slog.Int64("bytes", r.Fetched()),
		slog.String("source", r.Sources[0].Name), slog.String("source_kind", r.Sources[0].Kind), slog.Any("overlap", r.Overlap),
		slog.Uint64("unattributed_received", r.Unattributed.Received), slog.Uint64("unattributed_transmitted", r.Unattributed.Transmitted),
		slog.String("visible", r.Visible), slog.Any("paced_seconds", r.PacedSeconds),
		slog.Float64("live_p90_before", r.Before.P90), slog.Float64("live_p90_during", r.During.P90), slog.Group("shares", shares...),
	}
	if r.Error != "" {
		attributes = append(attributes, slog.String("error", r.Error))
	}
	b.opts.Log.Info("scale-out ended", attributes...)
}

// observe takes a sample into all records that run.
func (b *Book) observe(s *netattr.Snapshot) {
	fetched := b.fetched()
	b.mu.Lock()
	b.recent = append(b.recent, moment{s.At, s.Live})
	for len(b.recent) > 0 && s.At.Sub(b.recent[0].at) > before {
		b.recent = slices.Delete(b.recent, 0, 1)
	}
	any := len(b.running) > 0
	for _, e := range b.running {
		if s.At.Before(e.base.At) {
			continue // it began meanwhile
		}
		e.take(s)
		e.update(s, fetched[e.flight.ID])
		if e.skip++; e.skip >= e.every {
			e.skip = 0
			e.point(s)
		}
	}
	b.mu.Unlock()
	if any {
		b.notify()
	}
}

// fetched asks what the pulls that run have received.
func (b *Book) fetched() map[uint32]int64 {
	b.mu.Lock()
	fetched := make(map[uint32]int64, len(b.running))
	for _, e := range b.running {
		fetched[e.flight.ID] = 0
	}
	b.mu.Unlock()
	for id := range fetched {
		fetched[id] = b.opts.Fetched(id)
	}
	return fetched
}

// beforeLocked folds the samples before a scale-out.
func (b *Book) beforeLocked(at time.Time) Latency {
	var all netattr.Histogram
	for _, m := range b.recent {
		if age := at.Sub(m.at); age >= 0 && age <= before {
			all.Merge(&m.live.RTT)
		}
	}
	return latencyOf(&all)
}

// List gives all records, those that run first, then the latest.
func (b *Book) List() []Record {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := make([]Record, 0, len(b.running)+len(b.ended))
	for _, e := range slices.Backward(b.running) {
		list = append(list, e.record.clone())
	}
	for _, r := range slices.Backward(b.ended) {
		list = append(list, r.clone())
	}
	return list
}

// clone copies what a later sample changes in place.
func (r Record) clone() Record {
	r.Series, r.Overlap = slices.Clone(r.Series), slices.Clone(r.Overlap)
	r.Sources = slices.Clone(r.Sources)
	return r
}

// Subscribe gives a channel that holds a signal after List changed, and the func
// that ends the subscription.
func (b *Book) Subscribe() (changed <-chan struct{}, cancel func()) {
	ch := make(chan struct{}, 1)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.watchers[ch] = true
	return ch, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.watchers, ch)
	}
}

func (b *Book) notify() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for ch := range b.watchers {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}
