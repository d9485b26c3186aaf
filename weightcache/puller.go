package weightcache

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Limits of a Puller's options.
const (
	minSegment     = 64 << 10
	maxSegment     = 64 << 20
	defaultSegment = 16 << 20
	defaultStreams = 8
	maxStreams     = 64
	defaultStall   = 30 * time.Second
)

// PullerOptions configure a Puller.
type PullerOptions struct {
	Store *Store
	// Sources is the allow-list: which source may serve which refs.
	Sources []Rule
	// Limiter bounds the byte rate of all pulls; nil means unlimited.
	Limiter *Limiter
	// SegmentSize is the length of one ranged GET in bytes, 64 KiB to 64 MiB; 0
	// means 16 MiB.
	SegmentSize units.Bytes
	// Streams bounds the parallel GETs of all pulls, 1 to 64; 0 means 8.
	Streams int
	// StallTimeout ends a GET that yields no byte for so long, or over so long
	// a wait for its source less than 1 KiB a second; 0 means 30 s.
	StallTimeout time.Duration
	// RetryBase is the first pause after a failed GET; it doubles up to
	// RetryMax. 0 means 250 ms and 30 s.
	RetryBase, RetryMax time.Duration
	// Attempts is how often a segment is tried without receiving a byte; 0 means 8.
	Attempts int
	// ScrubEvery is how often each file is read again; 0 means 7 days, < 0 never.
	ScrubEvery time.Duration
	// ScrubRate bounds the scrub in bytes per second; 0 means 64 MiB/s.
	ScrubRate units.Rate
	// Began is told of each pull that lacks files, once, before it asks its source
	// for any. The func it gives is called once, when that pull has ended; nil is
	// none. The pull waits for both.
	Began func(f Flight) (ended func(FlightEnd))
	// FirstFlight is the id of the first flight; 0 means the time in seconds.
	FirstFlight uint32
	Log         *slog.Logger
	Now         func() time.Time
}

// Puller fills a Store from the sources it is allowed. It is safe for
// concurrent use.
type Puller struct {
	store    *Store
	rules    []Rule
	limiter  *Limiter
	segment  int64
	stall    time.Duration
	retry    time.Duration
	retryMax time.Duration
	attempts int
	scrub    scrubOptions
	log      *slog.Logger
	now      func() time.Time
	tokens   chan struct{} // one per stream
	stats    stats
	repairs  chan struct{} // capacity 1: a file was found damaged

	began      func(Flight) func(FlightEnd)
	lastFlight atomic.Uint32

	throttles throttles // pauses that sources asked for
	refusals  refusals  // what sources said no to

	mu        sync.Mutex
	wake      signal // fires when a stream or reader may go on
	running   bool   // Run is active
	resolves  map[resolveKey]*resolve
	pulls     map[artifact.Digest]*pull
	files     map[artifact.Digest]*fileFlight
	failed    map[artifact.Digest]error
	refFailed map[artifact.Ref]error
	resolving map[artifact.Ref]int
	lingering int // resolves that go on for nobody
	verifying map[artifact.Digest]bool
	bytes     map[artifact.Digest]*atomic.Int64
	flights   int // goroutines of pulls, files and resolves
}

// stats are counters since the process started.
type stats struct {
	bytes, requests, retries, refused, mismatches, stalls, damaged atomic.Int64
}

// Stats are a Puller's counters since the process started.
type Stats struct {
	OriginBytes int64 // received from sources
	Requests    int64 // ranges asked of sources
	Retries     int64 // ranges asked again after a failure
	Refused     int64 // refs that no rule allows
	Mismatches  int64 // files whose bytes had another digest
	Stalls      int64 // ranges ended because no byte came, or too few
	Damaged     int64 // stored files found damaged
}

// Stats reads the counters.
func (p *Puller) Stats() Stats {
	return Stats{
		OriginBytes: p.stats.bytes.Load(), Requests: p.stats.requests.Load(), Retries: p.stats.retries.Load(),
		Refused: p.stats.refused.Load(), Mismatches: p.stats.mismatches.Load(), Stalls: p.stats.stalls.Load(),
		Damaged: p.stats.damaged.Load(),
	}
}

// EnsureOptions modify one Ensure.
type EnsureOptions struct {
	// Refresh asks the source again what the ref means and moves it.
	Refresh bool
	// Reason says for what; empty means ReasonUnknown.
	Reason string
}

// OpenOptions modify one Open.
type OpenOptions struct {
	// Reason says for what; empty means ReasonUnknown.
	Reason string
}

// NewPuller checks the options; it starts nothing.
func NewPuller(opts PullerOptions) (*Puller, error) {
	if opts.Store == nil {
		return nil, errors.New("make puller: no store is given")
	}
	if err := checkRules(opts.Sources); err != nil {
		return nil, fmt.Errorf("make puller: %w", err)
	}
	p := &Puller{
		store: opts.Store, rules: slices.Clone(opts.Sources), limiter: opts.Limiter,
		segment: int64(opts.SegmentSize), stall: opts.StallTimeout,
		retry: opts.RetryBase, retryMax: opts.RetryMax, attempts: opts.Attempts,
		scrub: scrubOptions{every: opts.ScrubEvery, rate: opts.ScrubRate},
		began: opts.Began,
		log:   opts.Log, now: opts.Now, repairs: make(chan struct{}, 1),
		resolves: map[resolveKey]*resolve{}, pulls: map[artifact.Digest]*pull{},
		files: map[artifact.Digest]*fileFlight{}, failed: map[artifact.Digest]error{},
		refFailed: map[artifact.Ref]error{}, resolving: map[artifact.Ref]int{},
		verifying: map[artifact.Digest]bool{}, bytes: map[artifact.Digest]*atomic.Int64{},
	}
	if p.segment == 0 {
		p.segment = defaultSegment
	}
	if p.segment < minSegment || p.segment > maxSegment {
		return nil, fmt.Errorf("make puller: segment size %d bytes is outside %d to %d", p.segment, minSegment, maxSegment)
	}
	if opts.Streams == 0 {
		opts.Streams = defaultStreams
	}
	if opts.Streams < 1 || opts.Streams > maxStreams {
		return nil, fmt.Errorf("make puller: %d streams is outside 1 to %d", opts.Streams, maxStreams)
	}
	p.tokens = make(chan struct{}, opts.Streams)
	if p.limiter == nil {
		p.limiter = NewLimiter(0)
	}
	p.stall = orDefault(p.stall, defaultStall)
	p.retry = orDefault(p.retry, 250*time.Millisecond)
	p.retryMax = orDefault(p.retryMax, 30*time.Second)
	if p.attempts <= 0 {
		p.attempts = 8
	}
	p.scrub.setDefaults()
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	if p.now == nil {
		p.now = time.Now
	}
	if opts.FirstFlight == 0 {
		opts.FirstFlight = uint32(p.now().Unix())
	}
	p.lastFlight.Store(opts.FirstFlight - 1)
	return p, nil
}

// spawnLocked runs one flight's goroutine.
func (p *Puller) spawnLocked(run func()) {
	p.flights++
	go func() {
		defer func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.flights--
			p.wake.fire()
		}()
		run()
	}()
}

// Wait ends the questions that go on for nobody and waits until no pull, file
// or resolve is in flight; callers see to it that none is asked for any more.
// The store may be closed after it.
func (p *Puller) Wait(ctx context.Context) error {
	p.abandonAll()
	for {
		p.mu.Lock()
		flights := p.flights
		wait := p.wake.wait()
		p.mu.Unlock()
		if flights == 0 {
			return nil
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return fmt.Errorf("wait for pulls to end: %w", context.Cause(ctx))
		}
	}
}

func orDefault(d, otherwise time.Duration) time.Duration {
	if d <= 0 {
		return otherwise
	}
	return d
}

// Ensure blocks until every file of the ref's artifact is verified, and gives
// its manifest. Callers of one artifact share one pull; it goes on while one
// of them waits. Errors wrap ErrNotAllowed, ErrNoSpace, ErrMismatch, ErrBroken
// or the source's sentinels, and name file and cause; calling again resumes.
func (p *Puller) Ensure(ctx context.Context, ref artifact.Ref, opts EnsureOptions) (*artifact.Manifest, error) {
	m, err := p.resolve(ctx, ref, opts.Refresh, false)
	if err != nil {
		return nil, err
	}
	for {
		if p.store.Ready(m.Digest) {
			return m, nil
		}
		pl := p.join(m, false, opts.Reason)
		select {
		case <-pl.done:
		case <-ctx.Done():
		}
		p.leave(pl)
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("pull %s: %w", ref, context.Cause(ctx))
		}
		switch {
		case pl.err == nil:
			return m, nil
		case errors.Is(pl.err, errAbandoned):
			// The pull joined was being given up by its last caller.
		default:
			return nil, fmt.Errorf("pull %s: %w", ref, pl.err)
		}
	}
}

// Manifest gives what the ref is pinned to, from the drive; a ref that is not
// pinned is resolved now. A ref that no rule allows is refused with
// ErrNotAllowed even where it is pinned. A source's definite no is remembered for
// 30 s; Ensure asks nevertheless. Where ctx ends first the question to
// the source goes on for resolveLinger, and the next call may find its answer.
func (p *Puller) Manifest(ctx context.Context, ref artifact.Ref) (*artifact.Manifest, error) {
	if _, found := p.store.pinned(ref); !found {
		if err := p.refusals.find(ref, p.now()); err != nil {
			return nil, err
		}
	}
	m, err := p.resolve(ctx, ref, false, true)
	if ctx.Err() == nil {
		p.refusals.note(ref, err, p.now())
	}
	return m, err
}

// Open opens a file of a manifest. Where the file is not committed the pull of
// the whole artifact is started, with this file first, and the Reader serves
// it as it lands. ctx bounds only the call.
func (p *Puller) Open(ctx context.Context, m *artifact.Manifest, path string, opts OpenOptions) (*Reader, error) {
	f, found := m.File(path)
	if !found {
		return nil, fmt.Errorf("open file %s of %s: %w", path, m.Ref, ErrUnknown)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("open file %s of %s: %w", path, m.Ref, context.Cause(ctx))
	}
	p.store.use(m.Digest)
	r := &Reader{p: p, file: f, path: path, damage: p.store.damageOf(f.SHA256), waitsAt: -1}
	blob, err := p.store.openBlob(f.SHA256)
	if err == nil {
		r.blob = blob
		return r, nil
	}
	if !errors.Is(err, ErrNotReady) {
		return nil, fmt.Errorf("open file %s of %s: %w", path, m.Ref, err)
	}
	r.pull = p.join(m, true, opts.Reason)
	p.want(r.pull, r)
	return r, nil
}

// Remove drops a ref and the bytes that no other artifact uses. A pull of it
// is given up, but not while readers wait for its bytes: they would be broken
// off, come back, and begin it anew. Who reads committed files reads on. Errors
// wrap ErrUnknown or ErrLeased.
func (p *Puller) Remove(ctx context.Context, ref artifact.Ref) error {
	p.forgetQuestions(ref)
	m, found := p.store.pinned(ref)
	if !found {
		p.mu.Lock()
		_, failed := p.refFailed[ref]
		delete(p.refFailed, ref)
		p.mu.Unlock()
		if failed {
			return nil // it was known for its failure alone
		}
		return fmt.Errorf("remove %s: %w", ref, ErrUnknown)
	}
	if p.store.leased(m.Digest) {
		return fmt.Errorf("remove %s: %w: a lease holds artifact %s", ref, ErrLeased, m.Digest.Short())
	}
	if !p.store.shared(ref) {
		if err := p.stop(ctx, m.Digest); err != nil {
			return fmt.Errorf("remove %s: %w", ref, err)
		}
	}
	if err := p.store.removeRef(ref); err != nil {
		return err
	}
	p.mu.Lock()
	delete(p.failed, m.Digest)
	delete(p.bytes, m.Digest)
	p.mu.Unlock()
	return nil
}

// forgetQuestions ends the questions about a ref that go on for nobody: their
// answer would bring back what is removed.
func (p *Puller) forgetQuestions(ref artifact.Ref) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, r := range p.resolves {
		if key.ref == ref && r.linger != nil {
			p.abandonLocked(key, r)
		}
	}
}

// FlatView is Store.FlatView.
func (p *Puller) FlatView(digest artifact.Digest) (string, error) { return p.store.FlatView(digest) }

// HubView is Store.HubView.
func (p *Puller) HubView(m *artifact.Manifest) (string, error) { return p.store.HubView(m) }

// Subscribe gives a signal of capacity 1 that something in List may have
// changed, and the function that ends it.
func (p *Puller) Subscribe() (changed <-chan struct{}, cancel func()) { return p.store.Subscribe() }

// List gives the status of every known ref, sorted by ref.
func (p *Puller) List() []Status {
	var list []Status
	seen := map[artifact.Ref]bool{}
	for _, m := range p.store.Manifests() {
		seen[m.Ref] = true
		list = append(list, p.status(m))
	}
	p.mu.Lock()
	for ref := range p.resolving {
		if !seen[ref] {
			seen[ref] = true
			list = append(list, Status{Ref: ref, State: Resolving})
		}
	}
	for ref, err := range p.refFailed {
		if !seen[ref] {
			list = append(list, Status{Ref: ref, State: Failed, Detail: err.Error()})
		}
	}
	p.mu.Unlock()
	slices.SortFunc(list, func(a, b Status) int { return strings.Compare(a.Ref.String(), b.Ref.String()) })
	return list
}

// Status gives the status of one ref.
func (p *Puller) Status(ref artifact.Ref) (Status, bool) {
	if m, found := p.store.pinned(ref); found {
		return p.status(m), true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.resolving[ref] > 0 {
		return Status{Ref: ref, State: Resolving}, true
	}
	if err := p.refFailed[ref]; err != nil {
		return Status{Ref: ref, State: Failed, Detail: err.Error()}, true
	}
	return Status{Ref: ref, State: Absent}, false
}

// status gathers the facts about a pinned ref.
func (p *Puller) status(m *artifact.Manifest) Status {
	p.mu.Lock()
	facts := stateFacts{
		pulling: p.pulls[m.Digest] != nil, verifying: p.verifying[m.Digest], failed: p.failed[m.Digest],
	}
	landings := map[artifact.Digest]*landing{}
	for sha, ff := range p.files {
		if ff.landing != nil {
			landings[sha] = ff.landing
		}
	}
	var fetched int64
	if counter := p.bytes[m.Digest]; counter != nil {
		fetched = counter.Load()
	}
	p.mu.Unlock()
	select {
	case <-p.store.lost:
		facts.failed = p.store.lookLost()
	default:
	}
	st := p.store.status(m, landings, &facts)
	st.BytesFetched = fetched
	st.State, st.Detail = facts.state()
	return st
}
