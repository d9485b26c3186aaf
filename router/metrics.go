package router

import (
	"crypto/rand"
	"encoding/hex"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/hearth-dev/hearth/router/proxy"
)

// metrics are the router's Prometheus series. Every label value comes from a
// bounded set: the proxy's own words, configured models, and pools. Nodes name
// pools too; such a one has series only while it has an endpoint, and none
// comes into being while pool.MaxPools exist.
type metrics struct {
	registry *prometheus.Registry
	added    prometheus.Histogram
	ttft     prometheus.Histogram
	requests *prometheus.CounterVec // path, outcome, code
	refused  *prometheus.CounterVec // reason
	tokens   *prometheus.CounterVec // model, kind
	retries  prometheus.Counter
	reloads  *prometheus.CounterVec // result
	healthy  prometheus.Gauge

	series sync.Map // seriesKey -> prometheus.Counter
	models sync.Map // model -> *modelSeries
}

type seriesKey struct {
	path, outcome string
	status        int
}

// modelSeries are the token counters of one model.
type modelSeries struct{ prompt, cached, completion, estimated, predicted, reported prometheus.Counter }

const namespace = "hearth_router"

func newMetrics(r *Router) *metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
	}
	m := &metrics{
		registry: prometheus.NewRegistry(),
		added: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: namespace, Name: "added_latency_seconds",
			Help:    "Time from a request's headers to its being sent to an engine: body, scan, keys, choice.",
			Buckets: []float64{.00005, .0001, .0002, .0005, .001, .002, .005, .01, .05, .1, 1},
		}),
		ttft: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: namespace, Name: "ttft_seconds",
			Help:    "Time from sending a request to the first content.",
			Buckets: []float64{.01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30},
		}),
		requests: counter("requests_total", "Requests by route, outcome and status code.", "path", "outcome", "code"),
		refused:  counter("refused_total", "Requests the router answered with an error of its own.", "reason"),
		tokens: counter("tokens_total", "Tokens by logical model: prompt, cached, completion as metered; estimated of these; "+
			"predicted and reported cached tokens of requests whose engine reported them.", "model", "kind"),
		retries: prometheus.NewCounter(prometheus.CounterOpts{Namespace: namespace, Name: "retries_total", Help: "Requests sent to a second endpoint."}),
		reloads: counter("config_reloads_total", "Configuration files taken or refused.", "result"),
		healthy: prometheus.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Name: "config_valid", Help: "1 while the configuration file as it is now is in use."}),
	}
	m.healthy.Set(1)
	m.registry.MustRegister(m.added, m.ttft, m.requests, m.refused, m.tokens, m.retries, m.reloads, m.healthy,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), snapshot{r})
	return m
}

// observe counts one finished exchange.
func (m *metrics) observe(x *proxy.Exchange) {
	key := seriesKey{x.Path, x.Outcome, x.Status}
	series, ok := m.series.Load(key)
	if !ok {
		series, _ = m.series.LoadOrStore(key, m.requests.WithLabelValues(x.Path, x.Outcome, strconv.Itoa(x.Status)))
	}
	series.(prometheus.Counter).Inc()
	if x.Retries > 0 {
		m.retries.Inc()
	}
	if x.Outcome == "refused" {
		m.refused.WithLabelValues(x.Reason).Inc()
	}
	if x.EndpointID == "" {
		return
	}
	m.added.Observe(x.Added.Seconds())
	if x.TTFT > 0 {
		m.ttft.Observe(x.TTFT.Seconds())
	}
	t := m.model(x.Model)
	t.prompt.Add(float64(x.PromptTokens))
	t.completion.Add(float64(x.CompletionTokens))
	if x.Estimated {
		t.estimated.Add(float64(x.PromptTokens + x.CompletionTokens))
	}
	if x.CachedKnown {
		t.cached.Add(float64(x.CachedTokens))
		t.reported.Add(float64(x.CachedTokens))
		t.predicted.Add(float64(min(x.PredictedCached, x.PromptTokens)))
	}
}

func (m *metrics) model(name string) *modelSeries {
	if t, ok := m.models.Load(name); ok {
		return t.(*modelSeries)
	}
	kind := func(k string) prometheus.Counter { return m.tokens.WithLabelValues(name, k) }
	t, _ := m.models.LoadOrStore(name, &modelSeries{kind("prompt"), kind("cached"), kind("completion"), kind("estimated"), kind("predicted_cached"), kind("reported_cached")})
	return t.(*modelSeries)
}

func (m *metrics) reloaded(err error) {
	if err != nil {
		m.healthy.Set(0)
		m.reloads.WithLabelValues("refused").Inc()
		return
	}
	m.healthy.Set(1)
	m.reloads.WithLabelValues("taken").Inc()
}

// snapshot collects what the other rooms count, at scrape time.
type snapshot struct{ r *Router }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(namespace+"_"+name, help, labels, nil)
}

var (
	descInFlight  = desc("in_flight_requests", "Requests being handled.")
	descDecisions = desc("decisions_total", "Choices of an endpoint by pool and reason.", "pool", "reason")
	descAlarms    = desc("alarms_total", "Choices of an unhealthy or suspended endpoint, since nothing better was left.", "pool")
	descAttempts  = desc("attempts_total", "Ended attempts by pool and how they failed (none: answered).", "pool", "failure")
	descEndpoints = desc("endpoints", "Endpoints by pool.", "pool")
	descStates    = desc("endpoints_by_state", "Endpoints by pool and state: ready, unhealthy, suspended or draining.", "pool", "state")
	descBlocks    = desc("prefix_blocks", "Prefix blocks remembered, all endpoints together.")
	descLeftOut   = desc("endpoints_left_out_total", "Reported endpoints that a limit or a bad URL left out.")
	descWritten   = desc("meter_records_total", "Usage records written and synced.")
	descDropped   = desc("meter_dropped_total", "Usage records given up; each is in the log.")
	descDuplicate = desc("meter_duplicates_total", "Usage records not written twice.")
	descRetried   = desc("meter_write_failures_total", "Batches of usage records that had to be tried again.")
	descQueued    = desc("meter_queue_records", "Usage records waiting to be written.")
)

// Describe implements prometheus.Collector; an unchecked one, since pools come and go.
func (snapshot) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (s snapshot) Collect(out chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	send(descInFlight, prometheus.GaugeValue, float64(s.r.proxy.InFlight()))
	stats := s.r.pools.Stats()
	for _, p := range stats.Pools {
		send(descEndpoints, prometheus.GaugeValue, float64(p.Endpoints), p.Name)
		send(descAlarms, prometheus.CounterValue, float64(p.Alarms), p.Name)
		for reason, n := range p.Reasons {
			send(descDecisions, prometheus.CounterValue, float64(n), p.Name, string(reason))
		}
		for failure, n := range p.Failures {
			send(descAttempts, prometheus.CounterValue, float64(n), p.Name, failure)
		}
	}
	collectStates(stats, send)
	if s.r.cluster != nil {
		collectWatches(s.r.cluster.Stats(), send)
	}
	send(descBlocks, prometheus.GaugeValue, float64(stats.Blocks))
	send(descLeftOut, prometheus.CounterValue, float64(stats.LeftOut))
	if s.r.meter == nil {
		return
	}
	m := s.r.meter.Stats()
	send(descWritten, prometheus.CounterValue, float64(m.Written))
	send(descDropped, prometheus.CounterValue, float64(m.Dropped))
	send(descDuplicate, prometheus.CounterValue, float64(m.Duplicates))
	send(descRetried, prometheus.CounterValue, float64(m.Failures))
	send(descQueued, prometheus.GaugeValue, float64(m.Queued))
}

// recordIDs makes usage record ids that no other run of any router makes.
type recordIDs struct {
	prefix string
	count  *atomic.Uint64
}

func newRecordIDs() recordIDs {
	var raw [9]byte
	_, _ = rand.Read(raw[:])
	return recordIDs{hex.EncodeToString(raw[:]) + "-", new(atomic.Uint64)}
}

func (i recordIDs) next() string { return i.prefix + strconv.FormatUint(i.count.Add(1), 36) }
