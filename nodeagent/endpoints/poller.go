package endpoints

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// Options are what a Poller needs.
type Options struct {
	// Endpoints are the node's engines, at most MaxEndpoints.
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
	engines []*engine

	mu      sync.Mutex
	states  []State // in the order of opts.Endpoints
	readers map[chan struct{}]struct{}
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
	p := &Poller{opts: opts, readers: map[chan struct{}]struct{}{}}
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
		e := newEngine(config, p.client, opts.Now)
		p.engines = append(p.engines, e)
		p.states = append(p.states, e.state)
	}
	return p, nil
}

// Run reads every engine on its own schedule until ctx is done and then
// returns nil.
func (p *Poller) Run(ctx context.Context) error {
	defer p.client.CloseIdleConnections()
	var group errgroup.Group
	for i, e := range p.engines {
		group.Go(func() error { p.poll(ctx, i, e); return nil })
	}
	return group.Wait()
}

func (p *Poller) poll(ctx context.Context, i int, e *engine) {
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
		p.put(i, state)
		timer.Reset(pause)
	}
}

func (p *Poller) put(i int, state State) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.states[i] = state
	for reader := range p.readers {
		select {
		case reader <- struct{}{}:
		default:
		}
	}
}

// Snapshot is what is known of every endpoint, in the configured order.
func (p *Poller) Snapshot() []State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.states)
}

// Subscribe gives a channel that holds a signal after a read, and the func
// that ends the subscription. Signals merge; none is lost.
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
