package pool

import (
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/report"
)

// node is what the router keeps of one node between its states.
type node struct {
	endpoints map[string]placed // by the name the node gives them
	// ready holds the refs that serve. A ref enters when the node has it Ready,
	// and stays while a flipped byte or a refresh takes the artifact out of
	// Ready: the engines that loaded it go on. It leaves when the node no longer
	// has the artifact.
	ready map[string]bool
}

// placed is an endpoint and the pool it is in.
type placed struct {
	endpoint *endpoint
	pool     *poolState
}

// defaultPool is where endpoints go whose node names no pool.
const defaultPool = "default"

// Apply takes a node's state as of receivedAt. It keeps the state's messages,
// not the state. What the state lacks is gone.
func (p *Pools) Apply(state *report.State, receivedAt time.Time) {
	if state.Node() == "" {
		return
	}
	p.mu.Lock()
	changes := p.applyLocked(state, receivedAt)
	p.mu.Unlock()
	p.logChanges(changes)
}

// change is an endpoint that came or went, for the log.
type change struct {
	endpoint, pool string
	gone           bool
}

func (p *Pools) logChanges(changes []change) {
	for _, c := range changes {
		endpoint, pool := slog.String("endpoint", c.endpoint), slog.String("pool", c.pool)
		if c.gone {
			p.log.Info("remove endpoint", endpoint, pool)
		} else {
			p.log.Info("add endpoint", endpoint, pool)
		}
	}
}

func (p *Pools) applyLocked(state *report.State, receivedAt time.Time) (changes []change) {
	name := state.Node()
	n := p.nodes[name]
	if n == nil {
		n = &node{endpoints: map[string]placed{}, ready: map[string]bool{}}
		p.nodes[name] = n
	}
	rebuild := n.takeArtifacts(state.Artifacts())
	touched := map[*poolState]bool{}
	present := map[string]bool{}
	for _, e := range state.Endpoints() {
		if at, is := p.podOfLocked(name, e); is {
			if at.endpoint != nil {
				changes = append(changes, p.tellLocked(at, e, state, receivedAt)...)
				touched[at.pool] = true
			}
			continue
		}
		ps, some := p.takeEndpointLocked(name, n, e, state, receivedAt)
		changes = append(changes, some...)
		if ps != nil {
			present[e.GetName()], touched[ps] = true, true
		}
	}
	for key := range n.endpoints {
		if !present[key] {
			changes = append(changes, p.dropLocked(n, key))
		}
	}
	for ps := range touched {
		p.sizeLocked(ps)
	}
	if rebuild || len(changes) > 0 {
		p.rebuildLocked()
	}
	return changes
}

// Forget removes a node and its endpoints: the configuration no longer names
// it. Its pods stay, and nothing is known of their load and health.
func (p *Pools) Forget(name string) {
	p.mu.Lock()
	changes := p.forgetLocked(name)
	p.mu.Unlock()
	p.logChanges(changes)
}

func (p *Pools) forgetLocked(name string) (changes []change) {
	n := p.nodes[name]
	if n == nil {
		return nil
	}
	for _, key := range slices.Collect(maps.Keys(n.endpoints)) {
		changes = append(changes, p.dropLocked(n, key))
	}
	delete(p.nodes, name)
	for _, at := range p.pods {
		if at.endpoint.node == name {
			at.pool.untell(at.endpoint)
		}
	}
	p.rebuildLocked()
	return changes
}

// takeEndpointLocked puts one reported endpoint where it belongs. The pool is
// nil where a limit leaves the endpoint out.
func (p *Pools) takeEndpointLocked(nodeName string, n *node, e *report.Endpoint, state *report.State, receivedAt time.Time) (_ *poolState, changes []change) {
	poolName := e.GetPool()
	if poolName == "" {
		poolName = defaultPool
	}
	old, known := n.endpoints[e.GetName()]
	same := known && old.pool.name == poolName && old.endpoint.url == trimURL(e.GetUrl()) && old.endpoint.isRun(e.GetIncarnation(), e.GetLoad())
	if !same {
		if known {
			changes = append(changes, p.dropLocked(n, e.GetName()))
		}
		ps := p.roomLocked(poolName, e)
		if ps == nil {
			p.leftOut++
			return nil, changes
		}
		fresh := &endpoint{
			id: nodeName + "/" + e.GetName(), url: trimURL(e.GetUrl()), node: nodeName,
			incarnation: e.GetIncarnation(), slot: p.index.Add(0),
		}
		fresh.count(e.GetLoad())
		old = placed{fresh, ps}
	}
	// The load's age is told by the node's clock alone, so that clocks need not agree.
	loadMillis := e.GetLoad().GetUnixMillis()
	age := max(state.At().Sub(time.UnixMilli(loadMillis)), 0)
	old.pool.take(old.endpoint, factsFrom(e, state), loadMillis, receivedAt.Add(-age), receivedAt)
	if !same {
		// Only an endpoint with its facts is seen by requests.
		old.pool.add(old.endpoint)
		n.endpoints[e.GetName()] = old
		changes = append(changes, change{endpoint: old.endpoint.id, pool: poolName})
	}
	return old.pool, changes
}

// roomLocked gives the pool for a new endpoint, nil where it cannot be taken.
func (p *Pools) roomLocked(poolName string, e *report.Endpoint) *poolState {
	if len(poolName) > maxNameBytes || checkURL(e.GetUrl()) != nil || p.countLocked() >= MaxEndpoints {
		return nil
	}
	if ps, found := p.pools[poolName]; found {
		return ps
	}
	if len(p.pools) >= MaxPools {
		return nil
	}
	ps := p.poolLocked(poolName)
	ps.configure(PoolConfig{Name: poolName}, nil)
	return ps
}

func (p *Pools) dropLocked(n *node, key string) change {
	old := n.endpoints[key]
	delete(n.endpoints, key)
	old.pool.remove(old.endpoint)
	p.index.Remove(old.endpoint.slot)
	return change{endpoint: old.endpoint.id, pool: old.pool.name, gone: true}
}

// takeArtifacts updates the refs that serve and reports whether they changed.
func (n *node) takeArtifacts(artifacts []*report.Artifact) bool {
	ready := map[string]bool{}
	for _, a := range artifacts {
		ref := canonical(a.GetRef())
		switch a.GetState() {
		case report.ArtifactState_ARTIFACT_STATE_READY:
			ready[ref] = true
		case report.ArtifactState_ARTIFACT_STATE_ABSENT, report.ArtifactState_ARTIFACT_STATE_EVICTING:
		default:
			if n.ready[ref] {
				ready[ref] = true
			}
		}
	}
	if maps.Equal(ready, n.ready) {
		return false
	}
	n.ready = ready
	return true
}
