package router

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/hearth-dev/hearth/router/kube"
	"github.com/hearth-dev/hearth/router/pool"
)

// Metrics of what the router sees of its cluster. A watch is of a pool's pods,
// or of the agents, with an empty pool.
var (
	descListed  = desc("cluster_watch_listed", "1 once all that a watch is about was read.", "watch", "pool")
	descRefused = desc("cluster_watch_forbidden", "1 while the API server refuses what a watch is to read.", "watch", "pool")
	descStale   = desc("cluster_watch_stale_seconds", "Time since a watch was last followed, 0 while it is.", "watch", "pool")
	descEvents  = desc("cluster_watch_events_total", "Changes that a watch has brought.", "watch", "pool")
)

// send is how a collector gives one value.
type send func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string)

func collectWatches(watches []kube.WatchStats, send send) {
	yes := map[bool]float64{true: 1}
	for _, w := range watches {
		kind := "pods"
		if w.Pool == "" {
			kind = "agents"
		}
		send(descListed, prometheus.GaugeValue, yes[w.Listed], kind, w.Pool)
		send(descRefused, prometheus.GaugeValue, yes[w.Refused], kind, w.Pool)
		send(descStale, prometheus.GaugeValue, w.Stale.Seconds(), kind, w.Pool)
		send(descEvents, prometheus.CounterValue, float64(w.Events), kind, w.Pool)
	}
}

// endpointStates are the values of the label state.
var endpointStates = [...]string{"ready", "unhealthy", "suspended", "draining"}

// stateOf is the gravest thing that is to be said of an endpoint.
func stateOf(e *pool.EndpointStats) string {
	switch {
	case e.Draining:
		return endpointStates[3]
	case e.Suspended:
		return endpointStates[2]
	case e.Health == "unhealthy":
		return endpointStates[1]
	}
	return endpointStates[0]
}

// collectStates gives each pool a series for every state, also those of none.
func collectStates(stats pool.Stats, send send) {
	type key struct{ pool, state string }
	count := map[key]int{}
	for i := range stats.Endpoints {
		e := &stats.Endpoints[i]
		count[key{e.Pool, stateOf(e)}]++
	}
	for _, p := range stats.Pools {
		for _, state := range endpointStates {
			send(descStates, prometheus.GaugeValue, float64(count[key{p.Name, state}]), p.Name, state)
		}
	}
}
