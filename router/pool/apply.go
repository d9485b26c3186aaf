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
	name := state.Node()
	if name == "" {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.nodes[name]
	if n == nil {
		n = &node{endpoints: map[string]placed{}, ready: map[string]bool{}}
		p.nodes[name] = n
	}
	changed := n.takeArtifacts(state.Artifacts())
	touched := map[*poolState]bool{}
	present := map[string]bool{}
	for _, e := range state.Endpoints() {
		added, ps := p.takeEndpointLocked(name, n, e, state, receivedAt)
		if ps == nil {
			continue
		}
		present[e.GetName()] = true
		changed = changed || added
		touched[ps] = true
	}
	for key := range n.endpoints {
		if !present[key] {
			p.dropLocked(n, key)
			changed = true
		}
	}
	for ps := range touched {
		p.sizeLocked(ps)
	}
	if changed {
		p.rebuildLocked()
	}
}

// Forget removes a node and its endpoints: the configuration no longer names it.
func (p *Pools) Forget(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.nodes[name]
	if n == nil {
		return
	}
	for _, key := range slices.Collect(maps.Keys(n.endpoints)) {
		p.dropLocked(n, key)
	}
	delete(p.nodes, name)
	p.rebuildLocked()
}

// takeEndpointLocked puts one reported endpoint where it belongs. The pool is
// nil where a limit leaves the endpoint out.
func (p *Pools) takeEndpointLocked(nodeName string, n *node, e *report.Endpoint, state *report.State, receivedAt time.Time) (added bool, _ *poolState) {
	poolName := e.GetPool()
	if poolName == "" {
		poolName = defaultPool
	}
	old, known := n.endpoints[e.GetName()]
	same := known && old.pool.name == poolName && old.endpoint.url == trimURL(e.GetUrl()) &&
		old.endpoint.incarnation == e.GetIncarnation()
	if !same {
		if known {
			p.dropLocked(n, e.GetName())
		}
		ps := p.roomLocked(poolName, e)
		if ps == nil {
			p.leftOut++
			return known, nil
		}
		fresh := &endpoint{
			id: nodeName + "/" + e.GetName(), url: trimURL(e.GetUrl()), node: nodeName,
			incarnation: e.GetIncarnation(), slot: p.index.Add(0),
		}
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
		p.log.Info("add endpoint", slog.String("endpoint", old.endpoint.id), slog.String("pool", poolName))
	}
	return !same, old.pool
}

// roomLocked gives the pool for a new endpoint, nil where it cannot be taken.
func (p *Pools) roomLocked(poolName string, e *report.Endpoint) *poolState {
	if len(poolName) > maxNameBytes || checkURL(e.GetUrl()) != nil || p.countLocked() >= MaxEndpoints {
		return nil
	}
	_, found := p.pools[poolName]
	ps := p.poolLocked(poolName)
	if !found && ps != nil {
		ps.configure(PoolConfig{Name: poolName}, nil)
	}
	return ps
}

func (p *Pools) dropLocked(n *node, key string) {
	old := n.endpoints[key]
	delete(n.endpoints, key)
	old.pool.remove(old.endpoint)
	p.index.Remove(old.endpoint.slot)
	p.log.Info("remove endpoint", slog.String("endpoint", old.endpoint.id), slog.String("pool", old.pool.name))
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
