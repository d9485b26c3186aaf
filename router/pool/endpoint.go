package pool

import (
	"slices"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/router/index"
	"github.com/hearth-dev/hearth/router/pick"
)

// endpoint is one incarnation of an engine's address. When the engine restarts
// the pool gets a new one, and reservations of the old one end at the old one,
// so that no count of the new one goes below zero.
type endpoint struct {
	id          string // node/name, pod/namespace/name, or the URL of a static endpoint
	url         string
	node        string // empty: static
	pod         Pod    // UID is empty where it is no pod; guarded by the mu of Pools
	incarnation uint64 // 0 until its node has read it; guarded by the mu of Pools
	slot        *index.Slot
	// Tokens since the engine's start, as last reported; guarded by the mu of Pools.
	promptTotal, generatedTotal uint64

	// What follows is guarded by the mu of the pool it is in.

	facts
	told       facts     // of a pod: what its node last said, without the configuration
	unready    bool      // of a pod: its readiness probes fail
	leaving    bool      // of a pod: it is being deleted
	loadAt     time.Time // of the reported load, by this process's clock; zero = none
	reportedAt time.Time // of the state that facts are from
	loadMillis int64     // the node's own time of the load, to tell a new one
	sized      int       // blocks that the index was last asked for

	inFlight       int
	promptInFlight int // uncached tokens of requests before their first byte
	decodeInFlight int // tokens of requests before their end
	peak           int // highest inFlight since the last load came
	peakAtReport   int // that peak as the last load came
	ends           uint64

	passive passive
}

// isRun reports whether the endpoint is this incarnation. A node that has not
// read the engine yet says 0, which may be any, and the first one that it tells
// is the one requests have been going to. So may be report.RunFound, which an
// agent says after its own restart. In either case a counter of the engine that
// fell tells that it restarted meanwhile.
func (e *endpoint) isRun(incarnation uint64, load *report.Load) bool {
	if e.incarnation == 0 {
		e.incarnation = incarnation
	}
	if incarnation > report.RunFound && incarnation != e.incarnation {
		return false
	}
	if load == nil {
		return true
	}
	if load.GetPromptTokensTotal() < e.promptTotal || load.GetGeneratedTokensTotal() < e.generatedTotal {
		return false
	}
	e.count(load)
	return true
}

func (e *endpoint) count(load *report.Load) {
	e.promptTotal, e.generatedTotal = load.GetPromptTokensTotal(), load.GetGeneratedTokensTotal()
}

// facts is what a node or the configuration says of an endpoint.
type facts struct {
	engine      string
	accelerator string
	served      []string // empty: any model
	ref         string   // canonical
	reachable   bool
	draining    bool
	health      pick.Health
	running     int
	waiting     int
	maxRunning  int
	kvUsage     float64
	kvTokens    int // 0 = unknown
}

// silenceForgives is the age of a state past which its word that an endpoint
// is unreachable no longer counts: the router then finds out by itself.
const silenceForgives = 30 * time.Second

func newStatic(c *EndpointConfig, slot *index.Slot) *endpoint {
	return &endpoint{id: trimURL(c.URL), url: trimURL(c.URL), slot: slot}
}

func trimURL(url string) string { return strings.TrimSuffix(url, "/") }

func factsOf(c *EndpointConfig) facts {
	return facts{
		engine: c.Engine, accelerator: c.Accelerator, served: c.ServedModels, reachable: true,
		maxRunning: c.MaxRunning, kvTokens: c.KVCapacityTokens,
	}
}

// factsFrom reads a node's words about one of its endpoints. Health is the
// worst of the devices it runs on.
func factsFrom(e *report.Endpoint, state *report.State) facts {
	f := facts{
		engine: engineName(e.GetEngine()), accelerator: e.GetAccelerator(), served: e.GetServedModels(),
		ref: canonical(e.GetRef()), reachable: e.GetReachable(), draining: e.GetDraining(),
	}
	for _, id := range e.GetDevices() {
		if d := state.Device(id); d != nil {
			f.health = max(f.health, healthOf(d.GetHealth()))
		}
	}
	if l := e.GetLoad(); l != nil {
		f.running, f.waiting, f.maxRunning = clampInt(l.GetRunning()), clampInt(l.GetWaiting()), clampInt(l.GetMaxRunning())
		f.kvUsage = l.GetKvUsage()
		f.kvTokens = int(min(l.GetKvCapacityTokens(), 1<<40))
	}
	return f
}

func clampInt(n uint32) int { return int(min(n, 1<<24)) }

// healthOf treats what it does not know as the worst.
func healthOf(h report.Health) pick.Health {
	switch h {
	case report.Health_HEALTH_HEALTHY:
		return pick.Healthy
	case report.Health_HEALTH_DEGRADED:
		return pick.Degraded
	}
	return pick.Unhealthy
}

func engineName(k report.EngineKind) string {
	switch k {
	case report.EngineKind_ENGINE_KIND_VLLM:
		return "vllm"
	case report.EngineKind_ENGINE_KIND_SGLANG:
		return "sglang"
	case report.EngineKind_ENGINE_KIND_LLAMA_SERVER:
		return "llama-server"
	case report.EngineKind_ENGINE_KIND_SIM:
		return "sim"
	}
	return ""
}

// servesLocked reports whether the endpoint may answer for the target: it
// serves the model, and not from another artifact.
func (e *endpoint) servesLocked(t *target) bool {
	if len(e.served) > 0 && !slices.Contains(e.served, t.ServedModel) {
		return false
	}
	return t.ref == "" || e.ref == "" || e.ref == t.ref
}

func (e *endpoint) reserveLocked(prompt, decode int) {
	e.inFlight++
	e.promptInFlight += prompt
	e.decodeInFlight += decode
	e.peak = max(e.peak, e.inFlight)
}

// takeLocked takes new facts, and a new load if they hold one.
func (e *endpoint) takeLocked(f facts, loadMillis int64, loadAt, receivedAt time.Time) {
	e.facts, e.reportedAt = f, receivedAt
	if loadMillis != 0 && loadMillis != e.loadMillis {
		e.loadMillis, e.loadAt = loadMillis, loadAt
		e.peakAtReport, e.peak = e.peak, e.inFlight
	}
}

// drainsLocked reports whether the endpoint gets no new requests: its node says
// so, or its pod is being deleted.
func (e *endpoint) drainsLocked() bool { return e.draining || e.leaving }

// candidateLocked is the endpoint as Pick sees it.
func (e *endpoint) candidateLocked(now time.Time, matched int, rate float64) pick.Candidate {
	held, capacity := e.slot.Usage()
	c := pick.Candidate{
		ID: e.id, Health: e.health, Draining: e.drainsLocked(),
		Suspended:     e.unready || e.passive.suspended(now) || !e.reachable && now.Sub(e.reportedAt) < silenceForgives,
		MatchedBlocks: matched, HeldBlocks: held, CapacityBlocks: capacity,
		Running: e.running, Waiting: e.waiting, MaxRunning: e.maxRunning, KVUsage: e.kvUsage,
		InFlightAtReport: e.peakAtReport, InFlight: e.inFlight,
		InFlightPromptTokens: e.promptInFlight, InFlightDecodeTokens: e.decodeInFlight,
		PrefillRate: rate,
	}
	if !e.loadAt.IsZero() {
		c.LoadAge = max(now.Sub(e.loadAt), 0)
	}
	return c
}
