// Package pool owns what the router knows of logical models, pools and
// endpoints, and the places that requests hold at them. The proxy calls
// Acquire for each attempt and ends the reservation with Done; the feed hands
// it the nodes' states, and kube the pods of a cluster; the router's root swaps
// its configuration. It never speaks to an engine, a node or an API server, and
// it never waits.
//
// An endpoint leaves a pool only when its node says so, when its node is
// forgotten, when its pod is gone, or when the configuration drops it. Neither silence nor failure
// removes one: silence ages its load, failure suspends it, and a suspended
// endpoint still serves where nothing better is left. So is one that its node
// has not read yet: as far as the node knows it is not reachable.
//
// Weights share requests, not conversations: each request draws its target, and
// the turns of a conversation may fall on several. Its keys cannot hold it to
// one. The first ones are those of a system prompt that all requests may share,
// which would give one target everything, and the last ones change from turn to
// turn.
package pool

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"

	"github.com/hearth-dev/hearth/router/index"
	"github.com/hearth-dev/hearth/router/pick"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Options is what New needs beyond the reloadable Config.
type Options struct {
	// Weights of the choice; zero fields mean pick.Default.
	Weights pick.Config
	// MaxBlocks bounds the prefix memory of all endpoints together, in blocks of
	// pick.BlockBytes that take up to 36 bytes each, 0 = DefaultMaxBlocks.
	MaxBlocks int
	// MaxResponses bounds the response ids that Remember keeps, 0 = DefaultMaxResponses.
	MaxResponses int
	Log          *slog.Logger     // nil = discard
	Now          func() time.Time // nil = time.Now
}

// Defaults of Options and PoolConfig.
const (
	DefaultMaxBlocks    = 4 << 20
	DefaultMaxResponses = 100_000
	DefaultKVTokens     = 512 << 10
)

// Pools is safe for concurrent use.
type Pools struct {
	weights   pick.Config
	log       *slog.Logger
	now       func() time.Time
	index     *index.Index
	responses *responses

	// routes is what Acquire reads; only a holder of mu replaces it.
	routes atomic.Pointer[routes]

	mu      sync.Mutex
	cfg     Config                // guarded by mu
	nodes   map[string]*node      // guarded by mu
	pools   map[string]*poolState // guarded by mu
	pods    map[string]placed     // endpoints that are pods, by UID; guarded by mu
	leftOut uint64                // endpoints past MaxEndpoints or MaxPools, ever; guarded by mu
}

// routes is an immutable view of the configuration and of what exists.
type routes struct {
	models     map[string]*model
	infos      []ModelInfo // of the models, sorted by name
	pools      []*poolState
	endpoints  map[string]*endpoint
	roundRobin bool
}

type model struct {
	name    string
	targets []target // those with a weight first, otherwise in the order of the configuration
}

type target struct {
	TargetConfig
	pool  *poolState
	ready bool
	salt  uint64
	ref   string // Ref in its canonical form
}

// New returns pools with the configuration. It starts nothing. An error names
// every field that is wrong.
func New(cfg Config, opts Options) (*Pools, error) {
	p := &Pools{
		weights: opts.Weights,
		log:     opts.Log,
		now:     opts.Now,
		nodes:   map[string]*node{},
		pools:   map[string]*poolState{},
		pods:    map[string]placed{},
	}
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	if p.now == nil {
		p.now = time.Now
	}
	p.index = index.New(index.Options{MaxBlocks: cmp.Or(opts.MaxBlocks, DefaultMaxBlocks)})
	p.responses = newResponses(cmp.Or(opts.MaxResponses, DefaultMaxResponses))
	if err := p.SetModels(cfg); err != nil {
		return nil, err
	}
	return p, nil
}

// SetModels swaps the configuration. On an error, which names every wrong
// field, the old one stays. Requests in flight are not touched, and endpoints
// that stay keep their prefix memory.
func (p *Pools) SetModels(cfg Config) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("set models: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cfg = cfg
	for i := range cfg.Pools {
		p.poolLocked(cfg.Pools[i].Name)
	}
	for i := range cfg.Models {
		for j := range cfg.Models[i].Targets {
			p.poolLocked(cfg.Models[i].Targets[j].Pool)
		}
	}
	for name, ps := range p.pools {
		at := slices.IndexFunc(cfg.Pools, func(c PoolConfig) bool { return c.Name == name })
		if at < 0 {
			p.configureLocked(ps, PoolConfig{Name: name})
		} else {
			p.configureLocked(ps, cfg.Pools[at])
		}
	}
	p.rebuildLocked()
	return nil
}

// poolLocked finds or makes a pool. One that nobody names any more goes with
// its last endpoint, so that no more exist than MaxPools and MaxEndpoints let.
func (p *Pools) poolLocked(name string) *poolState {
	ps, found := p.pools[name]
	if !found {
		ps = newPoolState(name)
		p.pools[name] = ps
	}
	return ps
}

// configureLocked gives a pool its configuration and the endpoints in it.
func (p *Pools) configureLocked(ps *poolState, cfg PoolConfig) {
	var members []*endpoint
	for _, e := range ps.members() {
		if e.pod.UID != "" && !cfg.Pods.Set() {
			delete(p.pods, e.pod.UID)
			p.index.Remove(e.slot)
			continue
		}
		if e.node != "" || e.pod.UID != "" {
			members = append(members, e)
			continue
		}
		at := slices.IndexFunc(cfg.Endpoints, func(c EndpointConfig) bool { return trimURL(c.URL) == e.id })
		if at < 0 {
			p.index.Remove(e.slot)
			continue
		}
		members = append(members, e)
	}
	for i := range cfg.Endpoints {
		c := &cfg.Endpoints[i]
		at := slices.IndexFunc(members, func(e *endpoint) bool { return e.node == "" && e.pod.UID == "" && e.id == trimURL(c.URL) })
		if at < 0 {
			if p.countLocked() >= MaxEndpoints {
				p.leftOut++
				continue
			}
			members = append(members, newStatic(c, p.index.Add(0)))
			at = len(members) - 1
		}
		ps.setStatic(members[at], c)
	}
	ps.configure(cfg, members)
	p.sizeLocked(ps)
}

// sizeLocked gives each endpoint of a pool a prefix memory of the size of its KV.
func (p *Pools) sizeLocked(ps *poolState) {
	for _, size := range ps.sizes() {
		p.index.SetCapacity(size.slot, size.blocks)
	}
}

func (p *Pools) countLocked() int {
	n := 0
	for _, ps := range p.pools {
		n += len(ps.members())
	}
	return n
}

// rebuildLocked makes the view that Acquire reads, and forgets pools that
// nobody names.
func (p *Pools) rebuildLocked() {
	r := &routes{
		models:     make(map[string]*model, len(p.cfg.Models)),
		endpoints:  map[string]*endpoint{},
		roundRobin: p.cfg.Policy == PolicyRoundRobin,
	}
	named := map[string]bool{}
	for i := range p.cfg.Pools {
		named[p.cfg.Pools[i].Name] = true
	}
	for i := range p.cfg.Models {
		c := &p.cfg.Models[i]
		m := &model{name: c.Name}
		for _, tc := range c.Targets {
			ps := p.poolLocked(tc.Pool)
			named[tc.Pool] = true
			m.targets = append(m.targets, p.targetLocked(c.Name, tc, ps))
		}
		slices.SortStableFunc(m.targets, func(a, b target) int {
			return cmp.Compare(min(b.Weight, 1), min(a.Weight, 1))
		})
		r.models[c.Name] = m
	}
	for name, ps := range p.pools {
		members := ps.members()
		if len(members) == 0 && !named[name] {
			delete(p.pools, name)
			continue
		}
		r.pools = append(r.pools, ps)
		for _, e := range members {
			r.endpoints[e.id] = e
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.models)) {
		r.infos = append(r.infos, r.models[name].info())
	}
	slices.SortFunc(r.pools, func(a, b *poolState) int { return cmp.Compare(a.name, b.name) })
	p.routes.Store(r)
}

func (p *Pools) targetLocked(model string, cfg TargetConfig, ps *poolState) target {
	t := target{TargetConfig: cfg, pool: ps, ready: true, ref: canonical(cfg.Ref)}
	if t.ServedModel == "" {
		t.ServedModel = model
	}
	t.salt = xxhash.Sum64String(t.Pool + "\x00" + t.ServedModel)
	if t.ref == "" {
		return t
	}
	t.ready = false
	for _, e := range ps.members() {
		// A pod becomes an endpoint once it is Ready: its engine has its weights.
		if n := p.nodes[e.node]; n != nil && n.ready[t.ref] || e.pod.UID != "" {
			t.ready = true
		}
	}
	return t
}

// canonical is a ref's text with its default revision; what is no ref stays as it is.
func canonical(ref string) string {
	if ref == "" {
		return ""
	}
	parsed, err := artifact.ParseRef(ref)
	if err != nil {
		return ref
	}
	return parsed.String()
}

// ModelInfo is a logical model as clients see it.
type ModelInfo struct {
	Name string
	// ContextTokens is the longest context that a target declares, 0 if none does.
	ContextTokens int
}

func (m *model) info() ModelInfo {
	info := ModelInfo{Name: m.name}
	for i := range m.targets {
		info.ContextTokens = max(info.ContextTokens, m.targets[i].ContextTokens)
	}
	return info
}

// Models lists the logical models, sorted by name. The caller must not change
// the slice.
func (p *Pools) Models() []ModelInfo { return p.routes.Load().infos }

// Acquire chooses an endpoint for the request and reserves a place there. An
// endpoint for which avoid (may be nil) is true is left out. It keeps neither
// the request nor its keys. Errors wrap ErrUnknownModel, ErrUnmetNeeds
// (UnmetNeedsError) or ErrNoEndpoint (NoEndpointError).
func (p *Pools) Acquire(req *pick.Request, avoid func(endpointID string) bool) (*Reservation, error) {
	r := p.routes.Load()
	m := r.models[req.Model]
	if m == nil {
		return nil, fmt.Errorf("acquire endpoint for %.200q: %w", req.Model, ErrUnknownModel)
	}
	var buffer [MaxTargets]int
	order, unmet := m.order(req, buffer[:0])
	// A target that stands in goes before the least bad of the drawn one's pool.
	alarmed := false
	for _, i := range order {
		if t := &m.targets[i]; t.ready {
			res, bad := p.acquireFrom(r, m, t, req, avoid, req.Pin != "")
			if res != nil {
				return res, nil
			}
			alarmed = alarmed || bad
		}
	}
	for _, i := range order {
		if t := &m.targets[i]; alarmed && t.ready {
			if res, _ := p.acquireFrom(r, m, t, req, avoid, true); res != nil {
				return res, nil
			}
		}
	}
	return nil, noEndpoint(m, order, unmet, avoid != nil, req)
}

// noEndpoint explains a failed Acquire.
func noEndpoint(m *model, order []int, unmet *UnmetNeedsError, avoiding bool, req *pick.Request) error {
	if len(order) == 0 && unmet != nil {
		return unmet
	}
	e := &NoEndpointError{Model: m.name}
	for _, i := range order {
		t := &m.targets[i]
		if !t.ready {
			e.Causes = append(e.Causes, t.causeNotReady())
			continue
		}
		cause, usable := t.pool.cause(t, req)
		e.Causes = append(e.Causes, cause)
		e.Tried = e.Tried || usable && avoiding
	}
	if len(e.Causes) == 0 {
		e.Causes = []string{"no target"}
	}
	return e
}

func (t *target) causeNotReady() string {
	return fmt.Sprintf("pool %s: no node of it has %s ready", t.Pool, t.ref)
}

// IsUnavailable reports whether err is of a kind that time may heal.
func IsUnavailable(err error) bool { return errors.Is(err, ErrNoEndpoint) }
