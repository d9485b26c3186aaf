// Package kube owns what the router sees of the cluster it runs in: the pods
// that pools select, which it hands to package pool, and the addresses of the
// nodes' agents, which it hands to the feed. The router's root runs it. It only
// reads, decides nothing about requests, and takes nothing away because the API
// server is silent: the last state stands until a newer one comes.
package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/hearth-dev/hearth/router/feed"
	"github.com/hearth-dev/hearth/router/pool"
)

// Client reaches the API server.
type Client = kubernetes.Interface

// forgetAgentAfter is how long a node's agent is still looked for at the
// address it had, once the Service no longer lists it: an update takes seconds,
// and what the agent told of its devices must outlast it.
const forgetAgentAfter = 10 * time.Minute

// answerWithin is how long the router waits for the pods of a pool once the API
// server has answered for another: then it goes on without. It is longer than
// the 30 s after which a read that failed is tried again.
const answerWithin = time.Minute

// Options are what New needs.
type Options struct {
	Client Client
	// Namespace is that of pools and of the Service where they name none.
	Namespace string
	// Failing is why the API server does not answer, nil where it does; nil
	// where nobody can tell.
	Failing func() error
	// Agents is the headless Service of the agents; without a name none are looked for.
	Agents Agents
	// SetPods and SetNodes take what is found, each time all of it; SetPods
	// leaves out pools whose pods were not listed yet.
	SetPods  func(map[string][]pool.Pod)
	SetNodes func([]feed.Node)
	Log      *slog.Logger     // nil = discard
	Now      func() time.Time // nil = time.Now
}

// Agents names a headless Service and its port of the report.
type Agents struct {
	Namespace, Service, Port string
}

// Cluster follows pods and agents. It is safe for concurrent use.
type Cluster struct {
	opts    Options
	changed chan struct{} // capacity 1: look again
	agents  known         // of the goroutine of Run

	mu      sync.Mutex
	pools   []pool.PoolConfig    // those with pods; guarded by mu
	watches map[scope]*following // guarded by mu
	slices  *following           // of the agents' Service, nil = none; guarded by mu
	listed  bool                 // the API server has answered for every pool; guarded by mu
	heard   time.Time            // when it first did for one; zero: not yet; guarded by mu
	odd     map[string]string    // pods without their pool's port, by pool; guarded by mu
}

// scope is what one watch is about.
type scope struct{ namespace, selector string }

// New makes a Cluster. It asks nothing before Run.
func New(opts Options) (*Cluster, error) {
	if opts.Client == nil || opts.SetPods == nil || opts.SetNodes == nil {
		return nil, errors.New("follow cluster: no client, or nobody to tell")
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.Agents.Namespace == "" {
		opts.Agents.Namespace = opts.Namespace
	}
	return &Cluster{opts: opts, changed: make(chan struct{}, 1), agents: known{}, watches: map[scope]*following{}, odd: map[string]string{}}, nil
}

// SetPools swaps the pools whose pods are followed; those without a selector
// are none. Pods of pools that stay are not read again.
func (c *Cluster) SetPools(pools []pool.PoolConfig) {
	with := slices.DeleteFunc(slices.Clone(pools), func(p pool.PoolConfig) bool { return !p.Pods.Set() })
	c.mu.Lock()
	c.pools = with
	c.mu.Unlock()
	c.signal()
}

func (c *Cluster) signal() {
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// Listed reports whether the API server has answered for every pool at least
// once: with the pods, or that the router may not read them. A pool for which
// it fails to for longer than a minute after it answered for another counts
// too, so that no pool keeps the others from being served.
func (c *Cluster) Listed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.listed
}

// Problems says for people what cannot be read at present.
func (c *Cluster) Problems() (texts []string) {
	if c.opts.Failing != nil {
		if err := c.opts.Failing(); err != nil {
			texts = append(texts, fmt.Sprintf("the API server does not answer, pods and agents stand as they were last seen: %v", err))
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	add := func(f *following, without string) {
		if text := f.problem(c.opts.Now(), without); text != "" {
			texts = append(texts, text)
		}
	}
	for at, f := range c.watches {
		var names []string
		for i := range c.pools {
			if c.scopeOf(&c.pools[i]) == at {
				names = append(names, c.pools[i].Name)
			}
		}
		add(f, "pool "+strings.Join(names, ", ")+" has no endpoints")
	}
	if c.slices != nil {
		add(c.slices, "no agents are found")
	}
	slices.Sort(texts)
	return texts
}

// Run follows the cluster until ctx is done, and returns nil then.
func (c *Cluster) Run(ctx context.Context) error {
	defer c.stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		c.follow(ctx)
		pods, agents := c.tellPods(), c.tellAgents()
		if wait := cmp.Or(min(pods, agents), pods, agents); wait > 0 {
			timer.Reset(wait)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-c.changed:
		case <-timer.C:
		}
	}
}

// stop ends every watch.
func (c *Cluster) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range c.watches {
		f.end()
	}
	if c.slices != nil {
		c.slices.end()
	}
}

// follow starts the watches that lack and ends those that nobody needs.
func (c *Cluster) follow(ctx context.Context) {
	c.mu.Lock()
	defer c.mu.Unlock()
	wanted := map[scope]bool{}
	for i := range c.pools {
		at := c.scopeOf(&c.pools[i])
		wanted[at] = true
		if c.watches[at] == nil {
			c.watches[at] = c.start(ctx, fmt.Sprintf("pods %q of namespace %s", at.selector, at.namespace), podSource(c.opts.Client, at))
		}
	}
	for at, f := range c.watches {
		if !wanted[at] {
			f.end()
			delete(c.watches, at)
		}
	}
	if a := c.opts.Agents; a.Service != "" && c.slices == nil {
		c.slices = c.start(ctx, fmt.Sprintf("endpoint slices of service %s/%s", a.Namespace, a.Service),
			sliceSource(c.opts.Client, scope{a.Namespace, serviceLabel + "=" + a.Service}))
	}
}

func (c *Cluster) scopeOf(p *pool.PoolConfig) scope {
	at := scope{namespace: p.Pods.Namespace, selector: p.Pods.Selector}
	if at.namespace == "" {
		at.namespace = c.opts.Namespace
	}
	return at
}

// tellPods hands on the pods of every pool that was listed, and says when to
// look again, 0 for when something changes.
func (c *Cluster) tellPods() (wait time.Duration) {
	now := c.opts.Now()
	c.mu.Lock()
	found := make(map[string][]pool.Pod, len(c.pools))
	answered, silent := 0, time.Duration(0)
	for i := range c.pools {
		p := &c.pools[i]
		f := c.watches[c.scopeOf(p)]
		if f == nil {
			continue
		}
		if f.informer.HasSynced() {
			list, odd := podsOf(f.informer.GetStore().List(), p.Pods.Port)
			found[p.Name] = list
			c.noteLocked(p, odd)
		} else if !f.refused() {
			silent = max(silent, answerWithin-now.Sub(f.began))
			continue
		}
		answered++
	}
	if answered > 0 && c.heard.IsZero() {
		c.heard = now
	}
	if answered == len(c.pools) {
		c.listed = true
	} else if !c.listed && answered > 0 {
		wait = max(silent, answerWithin-now.Sub(c.heard))
		c.listed, wait = wait <= 0, max(wait, 0)
	}
	c.mu.Unlock()
	c.opts.SetPods(found)
	return wait
}

// tellAgents hands on where agents are, and says when to look again, 0 for
// when something changes.
func (c *Cluster) tellAgents() time.Duration {
	c.mu.Lock()
	f := c.slices
	c.mu.Unlock()
	if f == nil || !f.informer.HasSynced() {
		return 0
	}
	wait := c.agents.take(agentsOf(f.informer.GetStore().List(), c.opts.Agents.Port), c.opts.Now())
	c.opts.SetNodes(c.agents.nodes())
	return wait
}

// noteLocked tells of a pool's pods that lack its port, once for each set of them.
func (c *Cluster) noteLocked(p *pool.PoolConfig, odd []string) {
	text := strings.Join(odd[:min(len(odd), 10)], ", ")
	if c.odd[p.Name] == text {
		return
	}
	c.odd[p.Name] = text
	if text != "" {
		c.opts.Log.Warn("selected pods lack the port and are left out", slog.String("pool", p.Name),
			slog.String("port", p.Pods.Port), slog.Int("pods", len(odd)), slog.String("first", text))
	}
}
