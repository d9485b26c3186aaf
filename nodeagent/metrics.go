package nodeagent

import (
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/hearth-dev/hearth/identity"
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(identity.Name+"_"+name, help, labels, nil)
}

// The agent's metrics. Labels come from the configuration, the table of XIDs
// and the refs that the report names, so their number is bounded.
var (
	descInfo        = desc("agent_info", "The agent, always 1.", "node", "version")
	descModelState  = desc("weights_model_state", "1 for the state a model is in.", "ref", "state")
	descModelSize   = desc("weights_model_bytes", "Size of a model.", "ref")
	descModelHere   = desc("weights_model_present_bytes", "Bytes of a model that are on the drive.", "ref")
	descSpace       = desc("weights_space_bytes", "Space of the weights store.", "kind")
	descOrigin      = desc("weights_origin_bytes_total", "Bytes received from sources.")
	descRanges      = desc("weights_origin_requests_total", "Ranges asked of sources.")
	descRetries     = desc("weights_retries_total", "Ranges asked again after a failure.")
	descRefused     = desc("weights_refused_total", "Refs that no source rule allows.")
	descMismatches  = desc("weights_mismatches_total", "Files whose bytes had another digest.")
	descStalls      = desc("weights_stalls_total", "Ranges ended because no byte came, or too few.")
	descDamaged     = desc("weights_damaged_total", "Stored files found damaged.")
	descMirror      = desc("mirror_requests_total", "Requests to the mirror.", "route")
	descMirrorWho   = desc("mirror_clients_total", "Requests to the mirror by the client's family.", "family")
	descMirrorNo    = desc("mirror_refused_total", "Requests the mirror refused.", "code")
	descMirrorTrick = desc("mirror_trickled_bytes_total", "Single bytes the mirror sent to keep waiting clients.")
	descMirrorBytes = desc("mirror_bytes_total", "Bytes of file bodies the mirror wrote.")
	descMirrorNow   = desc("mirror_streams", "Bodies the mirror is writing or holding back.", "state")
	descMirrorCut   = desc("mirror_broken_total", "Bodies the mirror broke off.")
	descMirrorAsked = desc("mirror_token_questions_total", "Questions put to sources about the tokens of callers.")
	descReachable   = desc("endpoint_reachable", "1 where the engine answers.", "endpoint", "pool")
	descRunning     = desc("endpoint_requests", "Requests in the engine.", "endpoint", "state")
	descUsage       = desc("endpoint_kv_usage_ratio", "Share of the engine's KV capacity in use.", "endpoint")
	descHealth      = desc("device_health", "0 healthy, 1 degraded, 2 unhealthy.", "device")
	descCondition   = desc("device_condition", "1 for each condition a device has.", "device", "condition", "severity")
	descXID         = desc("device_xid_events_total", "XIDs a device reported.", "device", "xid")
	descLeftOut     = desc("report_left_out_artifacts", "Artifacts that the report has no room for.")
	descSeq         = desc("report_sequence", "Changes of the report since the agent started.")
	descDataUp      = desc("data_role_up", "1 where the data role answers the control role.")
)

var allDescs = []*prometheus.Desc{
	descInfo, descModelState, descModelSize, descModelHere, descSpace, descOrigin, descRanges, descRetries, descRefused, descMismatches,
	descStalls, descDamaged, descMirror, descMirrorWho, descMirrorNo, descMirrorTrick, descMirrorBytes, descMirrorNow, descMirrorCut, descMirrorAsked, descReachable, descRunning,
	descUsage, descHealth, descCondition, descXID, descLeftOut, descSeq, descDataUp,
}

// metrics reads the rooms when somebody asks.
type metrics struct{ agent *Agent }

func (a *Agent) registry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(metrics{a}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// Describe implements prometheus.Collector.
func (metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range slices.Concat(allDescs, kvDescs, kvPeerDescs, networkDescs, clusterDescs) {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m metrics) Collect(ch chan<- prometheus.Metric) {
	a := m.agent
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	gauge(descInfo, 1, a.config.Node, a.opts.Version)
	if a.runs(RoleData) {
		m.weights(gauge, counter)
		m.mirror(gauge, counter)
		a.space.collect(gauge, counter)
		a.network.collect(gauge, counter)
	}
	if a.runs(RoleControl) {
		m.control(gauge, counter)
		a.cluster.collect(a.config.Node, ch)
	}
}

// mirror tells of the mirror.
func (m metrics) mirror(gauge func(*prometheus.Desc, float64, ...string), counter func(*prometheus.Desc, int64, ...string)) {
	a := m.agent
	s := a.mirror.Stats()
	for route, n := range s.Requests {
		counter(descMirror, n, route)
	}
	for code, n := range s.Refused {
		counter(descMirrorNo, n, code)
	}
	for family, n := range s.Clients {
		counter(descMirrorWho, n, family)
	}
	counter(descMirrorTrick, s.Trickled)
	counter(descMirrorBytes, s.Bytes)
	counter(descMirrorCut, s.Broken)
	counter(descMirrorAsked, a.mirror.AuthStats().Asked)
	gauge(descMirrorNow, float64(s.Streams), "writing")
	gauge(descMirrorNow, float64(s.Waiting), "waiting")
}

// control tells of the report, the engines, the devices, and whether the data
// role answers.
func (m metrics) control(gauge func(*prometheus.Desc, float64, ...string), counter func(*prometheus.Desc, int64, ...string)) {
	a := m.agent
	gauge(descLeftOut, float64(a.leftOut.Load()))
	gauge(descSeq, float64(a.publisher.Seq()))
	_, up := a.data.Snapshot()
	gauge(descDataUp, number(up))
	for _, e := range a.poller.Snapshot() {
		gauge(descReachable, number(e.Reachable), e.Name, e.Pool)
		gauge(descRunning, float64(e.Load.Running), e.Name, "running")
		gauge(descRunning, float64(e.Load.Waiting), e.Name, "waiting")
		gauge(descUsage, e.Load.KVUsage, e.Name)
	}
	counts := a.tracker.Counts()
	for _, d := range a.tracker.Snapshot() {
		id := string(d.Device.ID)
		gauge(descHealth, float64(d.Health), id)
		for _, c := range d.Conditions {
			gauge(descCondition, 1, id, c.Key, c.Severity.String())
		}
		for code, n := range counts[d.Device.ID] {
			counter(descXID, int64(n), id, strconv.Itoa(code))
		}
	}
}

func (m metrics) weights(gauge func(*prometheus.Desc, float64, ...string), counter func(*prometheus.Desc, int64, ...string)) {
	state, _ := m.agent.data.Snapshot()
	list, _ := m.agent.toReport(state.Models)
	for _, s := range list {
		ref := s.Ref.String()
		for state := range artifactStates {
			gauge(descModelState, number(state == s.State), ref, string(state))
		}
		gauge(descModelSize, float64(s.Size), ref)
		gauge(descModelHere, float64(s.Present), ref)
	}
	space := state.Space
	gauge(descSpace, float64(space.Capacity), "capacity")
	gauge(descSpace, float64(space.Used), "used")
	gauge(descSpace, float64(space.Free), "free")
	s := m.agent.puller.Stats()
	counter(descOrigin, s.OriginBytes)
	counter(descRanges, s.Requests)
	counter(descRetries, s.Retries)
	counter(descRefused, s.Refused)
	counter(descMismatches, s.Mismatches)
	counter(descStalls, s.Stalls)
	counter(descDamaged, s.Damaged)
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
