package nodeagent

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/hearth-dev/hearth/dradriver"
)

// Metrics of the agent's side of Kubernetes. Labels are the driver's own words,
// never names of claims.
var (
	descClaims      = desc("claims", "Claims that have something on this node.", "state")
	descCalls       = desc("claim_call_seconds", "Prepare and Unprepare calls of the kubelet.", "call")
	descCallErrors  = desc("claim_call_errors_total", "Claims that a call ended with an error for.", "call")
	descCallWaiting = desc("claim_call_waiting_total", "Claims that a call answered to wait for a pull that goes on.", "call")
	descCallsNow    = desc("claim_calls_in_flight", "Calls of the kubelet that are being answered.", "call")
	descGPUWaiting  = desc("gpu_seconds_waiting_for_weights_total", "Seconds that allocated GPUs have waited for the weights of their claims, times GPUs.")
	descPullsFailed = desc("claim_pulls_failed_total", "Pulls for claims that cannot succeed.")
	descOwed        = desc("claims_releases_owed", "Unprepared claims whose holds the data role has still to give back.")
	descRecovers    = desc("claim_recover_errors_total", "Recoveries that failed.")
	descLedgerBad   = desc("claims_bad_files", "Claims whose file in the ledger was bad and that nobody unprepared since.")
	descLedgerSyncs = desc("claims_ledger_syncs_total", "Syncs of the ledger's files and directories.")
	descLedgerTime  = desc("claims_ledger_sync_seconds_total", "Time that calls waited for those syncs.")
	descRegistered  = desc("driver_registered", "1 where a kubelet has registered the driver.")
	descPool        = desc("slice_pool_in_sync", "1 where the API server holds a slice pool as it should be.", "pool")
	descPoolDevices = desc("slice_pool_devices", "Devices in a slice pool.", "pool")
	descPoolFailed  = desc("slice_pool_failures_total", "Tries to publish a slice pool that failed.", "pool")
	descPoolTook    = desc("slice_pool_publish_seconds", "Time of the last change of a slice pool until the API server held it.", "pool")
	descSlices      = desc("slice_writes_total", "Writes of slices.", "verb")
	descWithheld    = desc("gpus_withheld", "1 while GPUs are not published because of a classic device plugin.")
	descTold        = desc("api_server_messages_total", "Events, conditions and deletions for the API server.", "result")
	descTelling     = desc("api_server_messages_waiting", "Those that are still to be sent.")
)

var clusterDescs = []*prometheus.Desc{
	descClaims, descCalls, descCallErrors, descCallWaiting, descCallsNow, descGPUWaiting, descPullsFailed, descOwed, descRecovers, descLedgerBad,
	descLedgerSyncs, descLedgerTime, descRegistered, descPool, descPoolDevices, descPoolFailed, descPoolTook, descSlices, descWithheld, descTold, descTelling,
}

// claimStates are all values of the label state, so that a series never starts late.
var claimStates = []string{dradriver.ClaimPulling, dradriver.ClaimBegun, dradriver.ClaimPrepared, dradriver.ClaimOwing, dradriver.ClaimRefused}

// collect gives the cluster's metrics; a node without one has none.
func (c *cluster) collect(node string, ch chan<- prometheus.Metric) {
	if c == nil {
		return
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
	}
	count := claimsByState(c.driver.Claims())
	for _, state := range claimStates {
		gauge(descClaims, float64(count[state]), state)
	}
	s := c.driver.Stats()
	for call, stats := range s.Calls {
		ch <- prometheus.MustNewConstHistogram(descCalls, stats.Count, stats.Seconds, cumulative(stats.Buckets), string(call))
		counter(descCallErrors, float64(stats.Errors), string(call))
		counter(descCallWaiting, float64(stats.Waiting), string(call))
		gauge(descCallsNow, float64(stats.InFlight), string(call))
	}
	counter(descGPUWaiting, s.GPUSecondsWaiting)
	counter(descPullsFailed, float64(s.PullsFailed))
	gauge(descOwed, float64(s.Owing))
	counter(descRecovers, float64(s.RecoverFailed))
	book := c.ledger.Stats()
	gauge(descLedgerBad, float64(book.Bad))
	counter(descLedgerSyncs, float64(book.Syncs))
	counter(descLedgerTime, book.SyncTime.Seconds())
	gauge(descRegistered, number(c.registered()))
	published := c.publisher.State()
	kinds := map[string]string{dradriver.PoolGPUs(node): "gpus", dradriver.PoolWeights(node): "weights", dradriver.PoolKV(node): "kv"}
	for _, p := range published.Pools {
		kind := kinds[p.Name]
		gauge(descPool, number(p.InSync), kind)
		gauge(descPoolDevices, float64(p.Devices), kind)
		counter(descPoolFailed, float64(p.Failures), kind)
		gauge(descPoolTook, p.Took.Seconds(), kind)
	}
	counter(descSlices, float64(published.Creates), "create")
	counter(descSlices, float64(published.Updates), "update")
	counter(descSlices, float64(published.Deletes), "delete")
	withheld := false
	if c.classic != nil {
		may, _ := c.classic.MayPublish()
		withheld = !may
	}
	gauge(descWithheld, number(withheld))
	told := c.client.Stats()
	counter(descTold, float64(told.Sent), "sent")
	counter(descTold, float64(told.Dropped), "dropped")
	gauge(descTelling, float64(told.Waiting))
}

// cumulative turns counts by duration into those up to each bound, as a
// histogram has them.
func cumulative(buckets []uint64) map[float64]uint64 {
	found := map[float64]uint64{}
	var sum uint64
	for i, bound := range dradriver.CallBounds {
		sum += buckets[i]
		found[bound] = sum
	}
	return found
}
