package pool

import (
	"maps"
	"time"

	"github.com/hearth-dev/hearth/router/pick"
)

// Stats is a snapshot for metrics and for the admin listener. Counters count
// since the start.
type Stats struct {
	Endpoints []EndpointStats `json:"endpoints"`
	Pools     []PoolStats     `json:"pools"`
	Models    []ModelStats    `json:"models"`
	Responses int             `json:"responses"` // response ids remembered
	Blocks    int             `json:"blocks"`    // prefix blocks held, all endpoints together
	LeftOut   uint64          `json:"leftOut"`   // reported endpoints that a limit or a bad URL left out
}

// EndpointStats is one endpoint as requests see it.
type EndpointStats struct {
	ID          string   `json:"id"`
	Pool        string   `json:"pool"`
	Node        string   `json:"node,omitempty"`
	URL         string   `json:"url"`
	Engine      string   `json:"engine,omitempty"`
	Accelerator string   `json:"accelerator,omitempty"`
	Served      []string `json:"servedModels,omitempty"`
	Health      string   `json:"health"` // healthy, degraded or unhealthy
	Suspended   bool     `json:"suspended"`
	Draining    bool     `json:"draining"`
	Reachable   bool     `json:"reachable"`

	InFlight             int    `json:"inFlight"`
	InFlightPromptTokens int    `json:"inFlightPromptTokens"`
	InFlightDecodeTokens int    `json:"inFlightDecodeTokens"`
	Ended                uint64 `json:"ended"` // reservations that ended, of this incarnation

	Running        int     `json:"running"`
	Waiting        int     `json:"waiting"`
	KVUsage        float64 `json:"kvUsage"`
	LoadAgeSeconds float64 `json:"loadAgeSeconds"` // -1 where no load was reported
	HeldBlocks     int     `json:"heldBlocks"`
	CapacityBlocks int     `json:"capacityBlocks"`
}

// PoolStats is one pool.
type PoolStats struct {
	Name      string                 `json:"name"`
	Endpoints int                    `json:"endpoints"`
	Reasons   map[pick.Reason]uint64 `json:"reasons"`  // decisions
	Alarms    uint64                 `json:"alarms"`   // decisions for an unhealthy or suspended endpoint
	Failures  map[string]uint64      `json:"failures"` // ended reservations by Failure
	// Of requests for which the engine reported usage.
	PromptTokens          uint64  `json:"promptTokens"`
	PredictedCachedTokens uint64  `json:"predictedCachedTokens"`
	ReportedCachedTokens  uint64  `json:"reportedCachedTokens"`
	PrefillRate           float64 `json:"prefillRate"` // tokens per second, 0 = not yet learned
	BytesPerToken         float64 `json:"bytesPerToken"`
}

// ModelStats is one logical model.
type ModelStats struct {
	Name    string        `json:"name"`
	Targets []TargetStats `json:"targets"` // as in the configuration, those without a weight last
}

// TargetStats is one target of a logical model.
type TargetStats struct {
	Pool        string `json:"pool"`
	ServedModel string `json:"servedModel"`
	Ref         string `json:"ref,omitempty"`
	Weight      int    `json:"weight"`
	Ready       bool   `json:"ready"`
	Endpoints   int    `json:"endpoints"` // that serve it
}

// Stats takes a snapshot. Pools are consistent each in itself.
func (p *Pools) Stats() Stats {
	view := p.routes.Load()
	now := p.now()
	s := Stats{Endpoints: []EndpointStats{}, Pools: []PoolStats{}, Models: []ModelStats{}, Responses: p.responses.len(), Blocks: p.index.Len()}
	p.mu.Lock()
	s.LeftOut = p.leftOut
	p.mu.Unlock()
	for _, ps := range view.pools {
		ps.mu.Lock()
		s.Pools = append(s.Pools, ps.statsLocked())
		for _, e := range ps.members() {
			s.Endpoints = append(s.Endpoints, e.statsLocked(ps.name, now))
		}
		ps.mu.Unlock()
	}
	for _, info := range view.infos {
		m := ModelStats{Name: info.Name}
		for i := range view.models[info.Name].targets {
			t := &view.models[info.Name].targets[i]
			m.Targets = append(m.Targets, TargetStats{
				Pool: t.Pool, ServedModel: t.ServedModel, Ref: t.ref, Weight: t.Weight, Ready: t.ready, Endpoints: t.pool.serving(t),
			})
		}
		s.Models = append(s.Models, m)
	}
	return s
}

func (ps *poolState) serving(t *target) int {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	n := 0
	for _, e := range ps.members() {
		if e.servesLocked(t) {
			n++
		}
	}
	return n
}

func (ps *poolState) statsLocked() PoolStats {
	s := PoolStats{
		Name: ps.name, Endpoints: len(ps.members()), Reasons: maps.Clone(ps.count.reasons), Alarms: ps.count.alarms,
		Failures: map[string]uint64{}, PromptTokens: ps.count.prompt, PredictedCachedTokens: ps.count.predicted,
		ReportedCachedTokens: ps.count.reported, PrefillRate: ps.rateLocked(), BytesPerToken: ps.learn.bytesPerToken(),
	}
	for f, n := range ps.count.failures {
		s.Failures[Failure(f).String()] = n
	}
	return s
}

func (e *endpoint) statsLocked(pool string, now time.Time) EndpointStats {
	c := e.candidateLocked(now, 0, 0)
	s := EndpointStats{
		ID: e.id, Pool: pool, Node: e.node, URL: e.url, Engine: e.engine, Accelerator: e.accelerator, Served: e.served,
		Health:    [...]string{"healthy", "degraded", "unhealthy"}[e.health],
		Suspended: c.Suspended, Draining: c.Draining, Reachable: e.reachable,
		InFlight: e.inFlight, InFlightPromptTokens: e.promptInFlight, InFlightDecodeTokens: e.decodeInFlight, Ended: e.ends,
		Running: e.running, Waiting: e.waiting, KVUsage: e.kvUsage, LoadAgeSeconds: c.LoadAge.Seconds(),
		HeldBlocks: c.HeldBlocks, CapacityBlocks: c.CapacityBlocks,
	}
	if e.loadAt.IsZero() {
		s.LoadAgeSeconds = -1
	}
	return s
}
