package endpoints

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// Options are what a Poller needs.
type Options struct {
	// Endpoints are the node's engines that are always there, at most MaxEndpoints.
	Endpoints []Endpoint
	// Log receives changes of reachability and incarnation; nil discards.
	Log *slog.Logger
	// Now is the clock of loads and incarnations; nil is time.Now.
	Now func() time.Time
}

// Poller reads the local engines. It is safe for concurrent use.
type Poller struct {
	opts    Options
	client  *http.Client
	changed chan struct{} // capacity 1: what should be read differs from what is

	mu      sync.Mutex
	polled  []*polled // those of opts first, then those of Set; guarded by mu
	readers map[chan struct{}]struct{}
}

// polled is one engine that is read.
type polled struct {
	endpoint Endpoint // as it is configured now; guarded by the Poller's mu
	state    State    // as it was read last; guarded by the Poller's mu
	engine   *engine  // of its goroutine
	end      context.CancelFunc
	ended    bool // nobody wants it any more; guarded by the Poller's mu
}

// New makes a Poller; it starts nothing.
func New(opts Options) (*Poller, error) {
	if err := check(opts.Endpoints); err != nil {
		return nil, fmt.Errorf("make poller: %w", err)
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	p := &Poller{opts: opts, changed: make(chan struct{}, 1), readers: map[chan struct{}]struct{}{}}
	p.client = &http.Client{
		// One connection per engine, given back before engines on uvicorn
		// close an idle one after 5 s.
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: 2 * time.Second}).DialContext,
			MaxIdleConnsPerHost: 1, IdleConnTimeout: 4 * time.Second, DisableCompression: true,
			ResponseHeaderTimeout: readTimeout,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	for _, config := range opts.Endpoints {
		p.polled = append(p.polled, p.newPolled(config))
	}
	return p, nil
}

func (p *Poller) newPolled(config Endpoint) *polled {
	e := newEngine(config, p.client, p.opts.Now)
	return &polled{endpoint: e.config, state: e.state, engine: e}
}

// Set swaps the engines that come and go, besides those of Options. One that
// stays the same engine keeps what is known of it, also where other words about
// it change. An error names what is wrong, and nothing has changed then.
func (p *Poller) Set(list []Endpoint) error {
	all := slices.Concat(p.opts.Endpoints, list)
	if err := check(all); err != nil {
		return fmt.Errorf("set endpoints: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	next := slices.Clone(p.polled[:len(p.opts.Endpoints)])
	before := p.polled[len(p.opts.Endpoints):]
	for _, config := range list {
		config.URL = strings.TrimSuffix(config.URL, "/")
		at := slices.IndexFunc(before, func(o *polled) bool { return sameEngine(&o.endpoint, &config) })
		if at < 0 {
			next = append(next, p.newPolled(config))
			continue
		}
		before[at].endpoint = config
		next = append(next, before[at])
	}
	for _, o := range before {
		o.ended = !slices.Contains(next, o)
		if o.ended && o.end != nil {
			o.end()
		}
	}
	p.polled = next
	p.tellLocked()
	select {
	case p.changed <- struct{}{}:
	default:
	}
	return nil
}

// Run reads every engine on its own schedule until ctx is done and then
// returns nil.
func (p *Poller) Run(ctx context.Context) error {
	defer p.client.CloseIdleConnections()
	var running sync.WaitGroup
	defer running.Wait()
	for {
		p.start(ctx, &running)
		select {
		case <-ctx.Done():
			return nil
		case <-p.changed:
		}
	}
}

// start begins to read the engines that nobody reads yet.
func (p *Poller) start(ctx context.Context, running *sync.WaitGroup) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, o := range p.polled {
		if o.end != nil {
			continue
		}
		var inner context.Context
		inner, o.end = context.WithCancel(ctx)
		running.Go(func() {
			defer o.end()
			p.poll(inner, o)
		})
	}
}

func (p *Poller) poll(ctx context.Context, o *polled) {
	e := o.engine
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		before := e.state
		state, pause := e.read(ctx)
		if ctx.Err() != nil {
			return
		}
		if before.Reachable != state.Reachable || before.Incarnation != state.Incarnation {
			p.opts.Log.Info("endpoint changed", slog.String("endpoint", e.config.Name), slog.Bool("reachable", state.Reachable),
				slog.Uint64("incarnation", state.Incarnation), slog.String("detail", state.Detail))
		}
		p.put(o, state)
		timer.Reset(pause)
	}
}

func (p *Poller) put(o *polled, state State) {
	p.mu.Lock()
	defer p.mu.Unlock()
	o.state = state
	if !o.ended {
		p.tellLocked()
	}
}

func (p *Poller) tellLocked() {
	for reader := range p.readers {
		select {
		case reader <- struct{}{}:
		default:
		}
	}
}

// Snapshot is what is known of every endpoint: the configured ones in their
// order, then those of Set.
func (p *Poller) Snapshot() []State {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := make([]State, 0, len(p.polled))
	for _, o := range p.polled {
		state := o.state
		state.Endpoint = o.endpoint
		list = append(list, state)
	}
	return list
}

// Subscribe gives a channel that holds a signal after a read or a Set, and the
// func that ends the subscription. Signals merge; none is lost.
func (p *Poller) Subscribe() (<-chan struct{}, func()) {
	reader := make(chan struct{}, 1)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.readers[reader] = struct{}{}
	return reader, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.readers, reader)
	}
}
