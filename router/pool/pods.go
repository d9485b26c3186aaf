package pool

import (
	"cmp"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/report"
)

// Pod is a pod that a pool's selector finds: it says that an endpoint exists
// and whether it takes requests. What it does and how it fares is its node's to
// tell.
type Pod struct {
	UID, Namespace, Name string
	Node                 string // where it runs
	URL                  string // http://host:port of its engine
	Ready                bool   // its readiness probes pass
	Leaving              bool   // it is being deleted: no new requests
	Restarts             int    // of the engine's container
}

// id is the endpoint's: no node and no URL gives such a one.
func (p *Pod) id() string { return "pod/" + p.Namespace + "/" + p.Name }

// SetPods takes the pods of pools, by the pool's name: all there are of each
// pool that is given; a pool that is not given keeps what it has. A pod becomes
// an endpoint when it is first seen Ready. From then on failing probes suspend
// it, so that a pool whose pods all fail theirs still serves, and being deleted
// makes it drain; it goes with the pod. Of several pools that select a pod the
// first of the configuration has it, and keeps it while it selects it. A
// restarted container is another incarnation, which becomes an endpoint once it
// is Ready.
func (p *Pools) SetPods(pods map[string][]Pod) {
	p.mu.Lock()
	changes := p.setPodsLocked(pods)
	p.mu.Unlock()
	p.logChanges(changes)
}

func (p *Pools) setPodsLocked(pods map[string][]Pod) (changes []change) {
	wanted := map[string]map[string]bool{}
	for name, list := range pods {
		wanted[name] = make(map[string]bool, len(list))
		for i := range list {
			wanted[name][list[i].UID] = true
		}
	}
	for uid, at := range p.pods {
		if uids, given := wanted[at.pool.name]; given && !uids[uid] {
			changes = append(changes, p.dropPodLocked(at))
		}
	}
	for i := range p.cfg.Pools {
		c := &p.cfg.Pools[i]
		list := pods[c.Name]
		if !c.Pods.Set() || len(list) == 0 {
			continue
		}
		ps := p.poolLocked(c.Name)
		for j := range list {
			changes = append(changes, p.takePodLocked(ps, &list[j])...)
		}
		p.sizeLocked(ps)
	}
	if len(changes) > 0 {
		p.rebuildLocked()
	}
	return changes
}

// takePodLocked makes one pod's endpoint as the pod is.
func (p *Pools) takePodLocked(ps *poolState, pod *Pod) (changes []change) {
	at, known := p.pods[pod.UID]
	if known && at.pool != ps {
		return nil
	}
	if known {
		if was := &at.endpoint.pod; was.URL == pod.URL && was.Node == pod.Node && was.Restarts == pod.Restarts {
			at.endpoint.pod = *pod
			ps.setPod(at.endpoint, pod)
			return nil
		}
		changes = append(changes, p.dropPodLocked(at))
	}
	if !pod.Ready || pod.Leaving {
		return changes
	}
	if p.countLocked() >= MaxEndpoints || pod.UID == "" || checkURL(pod.URL) != nil {
		p.leftOut++
		return changes
	}
	return append(changes, p.addPodLocked(ps, pod))
}

func (p *Pools) addPodLocked(ps *poolState, pod *Pod) change {
	fresh := &endpoint{id: pod.id(), url: trimURL(pod.URL), node: pod.Node, pod: *pod, slot: p.index.Add(0)}
	ps.untell(fresh)
	ps.setPod(fresh, pod)
	ps.add(fresh)
	p.pods[pod.UID] = placed{fresh, ps}
	return change{endpoint: fresh.id, pool: ps.name}
}

func (p *Pools) dropPodLocked(at placed) change {
	delete(p.pods, at.endpoint.pod.UID)
	at.pool.remove(at.endpoint)
	p.index.Remove(at.endpoint.slot)
	return change{endpoint: at.endpoint.id, pool: at.pool.name, gone: true}
}

// podOfLocked finds the pod that a reported endpoint is: by the pod's UID, or
// in a pool of pods by its address. A node speaks of pods of its own only. Where
// is says that it can be nothing but a pod and there is none, it is no endpoint.
func (p *Pools) podOfLocked(node string, e *report.Endpoint) (at placed, is bool) {
	if uid := e.GetPod(); uid != "" {
		if at = p.pods[uid]; at.endpoint != nil && at.endpoint.node != node {
			at = placed{}
		}
		return at, true
	}
	ps := p.pools[cmp.Or(e.GetPool(), defaultPool)]
	if ps == nil || !ps.ofPods() {
		return placed{}, false
	}
	for _, m := range ps.members() {
		if m.pod.UID != "" && m.node == node && m.url == trimURL(e.GetUrl()) {
			return placed{m, ps}, true
		}
	}
	return placed{}, true
}

// tellLocked gives a pod's endpoint what its node says. Where that is of
// another run of the engine the endpoint is replaced.
func (p *Pools) tellLocked(at placed, e *report.Endpoint, state *report.State, receivedAt time.Time) (changes []change) {
	if !at.endpoint.isRun(e.GetIncarnation(), e.GetLoad()) {
		pod := at.endpoint.pod
		changes = append(changes, p.dropPodLocked(at), p.addPodLocked(at.pool, &pod))
		at = p.pods[pod.UID]
		at.endpoint.incarnation = e.GetIncarnation()
		at.endpoint.count(e.GetLoad())
	}
	loadMillis := e.GetLoad().GetUnixMillis()
	age := max(state.At().Sub(time.UnixMilli(loadMillis)), 0)
	at.pool.tell(at.endpoint, factsFrom(e, state), loadMillis, receivedAt.Add(-age), receivedAt)
	return changes
}

// over puts what the configuration says of pods over what their node says: it
// counts where a person said it, and fills what the node does not know.
func (c *PodsConfig) over(told facts) facts {
	f := told
	f.engine = cmp.Or(told.engine, c.Engine)
	f.accelerator = cmp.Or(c.Accelerator, told.accelerator)
	if len(c.ServedModels) > 0 {
		f.served = c.ServedModels
	}
	f.maxRunning = cmp.Or(c.MaxRunning, told.maxRunning)
	f.kvTokens = cmp.Or(c.KVCapacityTokens, told.kvTokens)
	return f
}

func (ps *poolState) ofPods() bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return ps.cfg.Pods.Set()
}

func (ps *poolState) setPod(e *endpoint, pod *Pod) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	e.unready, e.leaving = !pod.Ready, pod.Leaving
}

// tell gives a pod's endpoint what its node says.
func (ps *poolState) tell(e *endpoint, told facts, loadMillis int64, loadAt, receivedAt time.Time) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	e.told = told
	e.takeLocked(ps.cfg.Pods.over(told), loadMillis, loadAt, receivedAt)
}

// untell takes back what a node said of a pod's endpoint.
func (ps *poolState) untell(e *endpoint) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	e.told = facts{reachable: true}
	e.facts = ps.cfg.Pods.over(e.told)
	e.loadAt, e.loadMillis = time.Time{}, 0
}
