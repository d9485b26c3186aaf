// Package kube owns what the router sees of the cluster it runs in: the pods
// that pools select, which it hands to package pool, and the addresses of the
// nodes' agents, which it hands to the feed. The router's root runs it. It only
// reads, decides nothing about requests, and takes nothing away because the API
// server is silent: the last state stands until a newer one comes.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	discoveryinformers "k8s.io/client-go/informers/discovery/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/hearth-dev/hearth/router/feed"
	"github.com/hearth-dev/hearth/router/pool"
)

// Client reaches the API server.
type Client = kubernetes.Interface

// forgetAgentAfter is how long a node's agent is still looked for at the
// address it had, once the Service no longer lists it: an update takes seconds,
// and what the agent told of its devices must outlast it.
const forgetAgentAfter = 10 * time.Minute

// problemFor is how long a failure to read counts as the present state; reads
// that fail are tried again within 30 s.
const problemFor = time.Minute

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
	listed  bool                 // every pool's pods were once; guarded by mu
	odd     map[string]string    // pods without their pool's port, by pool; guarded by mu
}

// scope is what one watch is about.
type scope struct{ namespace, selector string }

// following is one running watch.
type following struct {
	what     string // for people
	informer cache.SharedIndexInformer
	cancel   context.CancelFunc
	done     chan struct{}

	mu       sync.Mutex
	failed   error     // of the last read that failed; guarded by mu
	failedAt time.Time // guarded by mu
}

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

// Listed reports whether the pods of every pool were listed at least once.
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
	add := func(f *following) {
		if text := f.problem(c.opts.Now()); text != "" {
			texts = append(texts, text)
		}
	}
	for _, f := range c.watches {
		add(f)
	}
	if c.slices != nil {
		add(c.slices)
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
		c.tellPods()
		if wait := c.tellAgents(); wait > 0 {
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

func (f *following) end() {
	f.cancel()
	<-f.done
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
			c.watches[at] = c.start(ctx, fmt.Sprintf("pods %q of namespace %s", at.selector, at.namespace),
				coreinformers.NewFilteredPodInformer(c.opts.Client, at.namespace, 0, nil, selecting(at.selector)), stripPod)
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
			discoveryinformers.NewFilteredEndpointSliceInformer(c.opts.Client, a.Namespace, 0, nil, selecting(serviceLabel+"="+a.Service)), stripSlice)
	}
}

func (c *Cluster) scopeOf(p *pool.PoolConfig) scope {
	at := scope{namespace: p.Pods.Namespace, selector: p.Pods.Selector}
	if at.namespace == "" {
		at.namespace = c.opts.Namespace
	}
	return at
}

func selecting(selector string) func(*metav1.ListOptions) {
	return func(o *metav1.ListOptions) { o.LabelSelector = selector }
}

// start runs one watch in a goroutine of its own, which ends with ctx or end.
func (c *Cluster) start(ctx context.Context, what string, informer cache.SharedIndexInformer, strip cache.TransformFunc) *following {
	inner, cancel := context.WithCancel(ctx)
	f := &following{what: what, informer: informer, cancel: cancel, done: make(chan struct{})}
	// These fail for an informer that runs already, and this one does not.
	_ = informer.SetTransform(strip)
	_ = informer.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) {
		if f.fail(err, c.opts.Now()) {
			c.opts.Log.Warn("cannot read from the API server, the last state stands", slog.String("what", what), slog.Any("error", err))
		}
	})
	_, _ = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { c.signal() },
		UpdateFunc: func(_, _ any) { c.signal() },
		DeleteFunc: func(any) { c.signal() },
	})
	var running sync.WaitGroup
	running.Go(func() { informer.RunWithContext(inner) })
	running.Go(func() {
		// An empty list brings no event.
		select {
		case <-informer.HasSyncedChecker().Done():
			c.signal()
		case <-inner.Done():
		}
	})
	go func() {
		defer close(f.done)
		running.Wait()
	}()
	return f
}

// tellPods hands on the pods of every pool that was listed.
func (c *Cluster) tellPods() {
	c.mu.Lock()
	found := make(map[string][]pool.Pod, len(c.pools))
	for i := range c.pools {
		p := &c.pools[i]
		if f := c.watches[c.scopeOf(p)]; f != nil && f.informer.HasSynced() {
			list, odd := podsOf(f.informer.GetStore().List(), p.Pods.Port)
			found[p.Name] = list
			c.noteLocked(p, odd)
		}
	}
	c.listed = c.listed || len(found) == len(c.pools)
	c.mu.Unlock()
	c.opts.SetPods(found)
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

// fail notes a read that failed and reports whether that is news. That a watch
// ended in the ordinary way is no failure.
func (f *following) fail(err error, now time.Time) bool {
	if ordinary(err) {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	news := f.failed == nil || f.failed.Error() != err.Error() || now.Sub(f.failedAt) > problemFor
	f.failed, f.failedAt = err, now
	return news
}

func (f *following) problem(now time.Time) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch synced := f.informer.HasSynced(); {
	case f.failed == nil:
		return ""
	case !synced:
		return fmt.Sprintf("%s were not read yet: %v", f.what, f.failed)
	case now.Sub(f.failedAt) < problemFor:
		return fmt.Sprintf("%s cannot be followed, the last state stands: %v", f.what, f.failed)
	}
	return ""
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
