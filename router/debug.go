package router

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/pprof"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/router/admin"
	"github.com/hearth-dev/hearth/router/pick"
	"github.com/hearth-dev/hearth/router/proxy"
)

var _ admin.Answers = (*Router)(nil)

// adminHandler serves metrics, probes, the JSON API and the debug pages. All
// of it only reads.
func (r *Router) adminHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/v1/", admin.Handler(r))
	mux.Handle("GET /metrics", promhttp.HandlerFor(r.metrics.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", r.readyz)
	mux.HandleFunc("GET /debug/config", func(w http.ResponseWriter, _ *http.Request) {
		r.mu.Lock()
		cfg := r.effective
		r.mu.Unlock()
		text, err := configfile.Marshal(cfg)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/yaml")
		_, _ = w.Write(text)
	})
	mux.HandleFunc("POST /debug/decide", admin.Explain(r))
	mux.HandleFunc("GET /debug/pools", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(r.pools.Stats())
	})
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return admin.Routes(mux)
}

// readyz is 200 while new requests are welcome: listeners open, not draining,
// and at least one endpoint for some model. In a cluster it decides whether a
// Service sends clients here: a router that knows the pods is ready also where
// there is none, since it tells clients so, and one that does not is not.
func (r *Router) readyz(w http.ResponseWriter, _ *http.Request) {
	reason := "no model has an endpoint"
	for _, m := range r.pools.Stats().Models {
		for _, t := range m.Targets {
			if t.Ready && t.Endpoints > 0 {
				reason = ""
			}
		}
	}
	if r.cluster != nil {
		reason = ""
		if !r.cluster.Listed() {
			reason = "the pods of the cluster are not listed yet"
		}
	}
	if r.draining.Load() {
		reason = "draining"
	}
	if reason != "" {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = fmt.Fprintln(w, reason)
		return
	}
	_, _ = fmt.Fprintln(w, "ok")
}

// Status implements admin.Answers.
func (r *Router) Status() admin.Status {
	stats := r.pools.Stats()
	s := admin.Status{
		Name: r.cfg.Name, Version: r.options.Version, StartedAt: r.started, Draining: r.draining.Load(),
		InFlight: r.proxy.InFlight(), Endpoints: len(stats.Endpoints), Models: len(stats.Models),
		Listeners: map[string]string{}, Nodes: r.feed.Stats(),
	}
	if r.meter != nil {
		m := r.meter.Stats()
		s.Metering = admin.Metering{File: r.cfg.Metering.File, Written: m.Written, Dropped: m.Dropped, Duplicates: m.Duplicates, Queued: m.Queued}
		if m.Dropped > 0 {
			s.Problems = append(s.Problems, fmt.Sprintf("%d usage records were dropped: see the log", m.Dropped))
		}
	}
	if r.cluster != nil {
		s.Problems = append(s.Problems, r.cluster.Problems()...)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.Copy(s.Listeners, r.listeners)
	s.Config = admin.Config{File: r.options.ConfigFile, LoadedAt: r.loadedAt, Error: r.loadError}
	if r.loadError != "" {
		s.Problems = append(s.Problems, "the configuration file was not taken: "+r.loadError)
	}
	return s
}

// Endpoints implements admin.Answers.
func (r *Router) Endpoints() []admin.Endpoint { return r.pools.Stats().Endpoints }

// Models implements admin.Answers.
func (r *Router) Models() []admin.Model { return r.pools.Stats().Models }

// ScaleOuts implements admin.Answers.
func (r *Router) ScaleOuts() admin.ScaleOuts {
	list, more := r.feed.ScaleOuts()
	return admin.ScaleOuts{ScaleOuts: list, More: more}
}

// Explain implements admin.Answers.
func (r *Router) Explain(body []byte) (admin.Explanation, error) {
	var req pick.Request
	if err := proxy.Inspect(body, &req); err != nil {
		return admin.Explanation{}, fmt.Errorf("read request: %w", err)
	}
	if models := r.pools.Models(); req.Model == "" && len(models) == 1 {
		req.Model = models[0].Name // as the ingress takes it
	}
	return r.pools.Explain(&req), nil
}
