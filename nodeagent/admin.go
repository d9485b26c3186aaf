package nodeagent

import (
	"net/http"
	"net/http/pprof"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

func (a *Agent) adminOptions() admin.Options {
	o := admin.Options{Node: a.node, Log: a.log}
	if a.runs(RoleData) {
		o.Weights, o.Manifest, o.KV = a.inside, a.manifest, a.space
		o.Network, o.ScaleOuts = a.networkOf, a.network.scaleouts.List
	} else {
		o.Pass = admin.NewPass(a.config.Listen.DataSocket, a.log)
	}
	if a.runs(RoleControl) {
		o.Endpoints, o.Tracker, o.AllowInject = a.poller.Snapshot, a.tracker, a.config.Health.AllowInject
		o.Claims = a.cluster.claims
	}
	return o
}

// manifest gives what a ref means on this node, without asking a source.
func (a *Agent) manifest(ref artifact.Ref) (*artifact.Manifest, bool) {
	for _, m := range a.store.Manifests() {
		if m.Ref == ref {
			return m, true
		}
	}
	return nil, false
}

// adminHandler is what the admin listener serves: nothing that changes the node.
func (a *Agent) adminHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/v1/", admin.NewReadOnly(a.adminOptions()))
	mux.Handle("GET /metrics", promhttp.HandlerFor(a.registry(), promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { text(w, http.StatusOK, "ok\n") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !a.isReady() {
			text(w, http.StatusServiceUnavailable, "not ready\n")
			return
		}
		text(w, http.StatusOK, "ready\n")
	})
	mux.HandleFunc("GET /debug/config", func(w http.ResponseWriter, _ *http.Request) {
		masked, err := configfile.Marshal(a.settings())
		if err != nil {
			text(w, http.StatusInternalServerError, "the configuration cannot be shown\n")
			return
		}
		text(w, http.StatusOK, string(masked))
	})
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

func (a *Agent) isReady() bool {
	select {
	case <-a.ready:
	default:
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return !a.stopping && (a.cluster == nil || a.cluster.registered())
}

func text(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	// A caller that went away cannot be told.
	_, _ = w.Write([]byte(body))
}
