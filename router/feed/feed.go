// Package feed owns the router's connections to nodes: one goroutine per node
// that watches its report and hands each state to a Sink, which is the pool.
// The router's root runs it. It decides nothing about a state, and a node it
// cannot reach keeps the state it last reported.
package feed

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/report"
)

// MaxNodes bounds the nodes of one router.
const MaxNodes = 4096

// Node is where a node's report is served.
type Node struct {
	// Address is host:port.
	Address string `json:"address" yaml:"address"`
	// Name, if set, is the only node name that the address may report.
	Name string `json:"name,omitempty" yaml:"name"`
}

// Sink takes what nodes report. Calls for one node do not overlap.
type Sink interface {
	// Apply takes a node's state. It must not keep the state itself, which
	// changes with the next message.
	Apply(state *report.State, receivedAt time.Time)
	// Forget drops a node that the configuration no longer names.
	Forget(node string)
}

// Options is what New needs.
type Options struct {
	Nodes []Node
	Sink  Sink
	// Router is this router's name, for the nodes' logs.
	Router string
	// TLS is the router's side of mTLS, which checks the agent's role. Without
	// it only nodes on loopback are dialled, unless Insecure is set.
	TLS      *tls.Config
	Insecure bool
	Log      *slog.Logger     // nil = discard
	Now      func() time.Time // nil = time.Now
	// Jitter gives values in [0, 1) that spread the nodes' retries, nil = random.
	Jitter func() float64
}

// ErrName means that an address reports a node name that it must not report:
// another than configured, or one that another address reports already.
var ErrName = errors.New("node name not allowed")

// Feed watches nodes. It is safe for concurrent use.
type Feed struct {
	opts    Options
	changed chan struct{} // capacity 1: nodes differ from what runs

	mu       sync.Mutex
	nodes    []Node              // wanted; guarded by mu
	watchers map[Node]*watcher   // running; guarded by mu
	owners   map[string]*watcher // by node name; guarded by mu
}

// New returns a feed of the nodes. It dials nothing before Run.
func New(opts Options) (*Feed, error) {
	if opts.Sink == nil {
		return nil, errors.New("make feed: no sink")
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.Jitter == nil {
		opts.Jitter = rand.Float64
	}
	f := &Feed{
		opts: opts, changed: make(chan struct{}, 1),
		watchers: map[Node]*watcher{}, owners: map[string]*watcher{},
	}
	if err := f.SetNodes(opts.Nodes); err != nil {
		return nil, err
	}
	return f, nil
}

// SetNodes swaps the nodes to watch. Those that stay keep their connection;
// those that go are forgotten by the Sink, save where another address has their
// name. On an error nothing changes.
func (f *Feed) SetNodes(nodes []Node) error {
	if err := f.check(nodes); err != nil {
		return fmt.Errorf("set nodes: %w", err)
	}
	f.mu.Lock()
	f.nodes = slices.Clone(nodes)
	f.mu.Unlock()
	select {
	case f.changed <- struct{}{}:
	default:
	}
	return nil
}

func (f *Feed) check(nodes []Node) error {
	if len(nodes) > MaxNodes {
		return fmt.Errorf("nodes: %d, want at most %d", len(nodes), MaxNodes)
	}
	seen := map[string]bool{}
	for i, n := range nodes {
		_, port, err := net.SplitHostPort(n.Address)
		if err != nil || port == "" {
			return fmt.Errorf("nodes[%d].address: %q, want host:port", i, n.Address)
		}
		if seen[n.Address] {
			return fmt.Errorf("nodes[%d].address: %s stands twice", i, n.Address)
		}
		seen[n.Address] = true
		if f.opts.TLS == nil && !f.opts.Insecure && !identity.IsLoopback(n.Address) {
			return fmt.Errorf("nodes[%d].address: %s is not loopback, want certificates or insecure: true", i, n.Address)
		}
	}
	return nil
}

// Run watches the nodes until ctx is done, and returns nil then.
func (f *Feed) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	for {
		f.reconcile(ctx, &running)
		select {
		case <-ctx.Done():
			return nil
		case <-f.changed:
		}
	}
}

// reconcile ends watchers that are not wanted and starts those that lack.
func (f *Feed) reconcile(ctx context.Context, running *sync.WaitGroup) {
	f.mu.Lock()
	var ended []*watcher
	for n, w := range f.watchers {
		if !slices.Contains(f.nodes, n) {
			ended = append(ended, w)
			delete(f.watchers, n)
		}
	}
	f.mu.Unlock()
	for _, w := range ended {
		w.cancel()
		<-w.done
		f.release(w)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, n := range f.nodes {
		if f.watchers[n] != nil {
			continue
		}
		inner, cancel := context.WithCancel(ctx)
		w := &watcher{feed: f, node: n, cancel: cancel, done: make(chan struct{})}
		f.watchers[n] = w
		running.Go(func() {
			defer close(w.done)
			defer cancel()
			w.run(inner)
		})
	}
}

// own claims a node name for a watcher, and forgets the name it had before.
func (f *Feed) own(w *watcher, name string) error {
	if w.node.Name != "" && w.node.Name != name {
		return fmt.Errorf("watch node %s: %w: it reports %q, want %q", w.node.Address, ErrName, name, w.node.Name)
	}
	f.mu.Lock()
	owner := f.owners[name]
	if owner != nil && owner != w {
		f.mu.Unlock()
		return fmt.Errorf("watch node %s: %w: %q is reported by %s too", w.node.Address, ErrName, name, owner.node.Address)
	}
	f.owners[name] = w
	f.mu.Unlock()
	if before := w.rename(name); before != "" && before != name {
		f.forget(w, before)
	}
	return nil
}

// release forgets the node of a watcher that ended for good, also one that it
// took over from another address and never reached.
func (f *Feed) release(w *watcher) {
	if name := cmp.Or(w.rename(""), w.node.Name); name != "" {
		f.forget(w, name)
	}
}

func (f *Feed) forget(w *watcher, name string) {
	f.mu.Lock()
	owner := f.owners[name]
	mine := owner == w || owner == nil
	if mine {
		delete(f.owners, name)
	}
	// An agent that moved to another address is the same node.
	moved := slices.ContainsFunc(f.nodes, func(n Node) bool { return n.Name == name && n != w.node })
	f.mu.Unlock()
	if mine && !moved {
		f.opts.Sink.Forget(name)
	}
}

// Stats gives what is known of each node, by address.
func (f *Feed) Stats() []NodeStats {
	f.mu.Lock()
	watchers := make([]*watcher, 0, len(f.watchers))
	for _, n := range f.nodes {
		if w := f.watchers[n]; w != nil {
			watchers = append(watchers, w)
		}
	}
	f.mu.Unlock()
	now := f.opts.Now()
	stats := make([]NodeStats, 0, len(watchers))
	for _, w := range watchers {
		stats = append(stats, w.snapshot(now))
	}
	return stats
}
