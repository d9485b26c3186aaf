package nodeagent

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/nodeagent/endpoints"
	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/weightcache"
)

const (
	// artifactsEvery is the least time between two reports of artifacts, whose
	// progress changes all the time.
	artifactsEvery = 100 * time.Millisecond
	// spaceEvery is how often the drive is asked for its space, besides after
	// each report of artifacts.
	spaceEvery = 5 * time.Second
	// maxArtifactBytes is the artifacts' share of a report's message: half, so
	// that they never keep out endpoints and devices.
	maxArtifactBytes = report.MaxMessageBytes / 2
	// fieldOverhead is what an object takes in a message besides its own bytes.
	fieldOverhead = 5
)

// reportState carries the rooms' snapshots to the publisher: devices and
// endpoints at once, artifacts at most every artifactsEvery, scale-outs at most
// every scaleOutsEvery.
func (a *Agent) reportState(ctx context.Context) error {
	weights, endWeights := a.data.Subscribe()
	defer endWeights()
	devices, endDevices := a.tracker.Subscribe()
	defer endDevices()
	engines, endEngines := a.poller.Subscribe()
	defer endEngines()
	pulls, endPulls := a.watchScaleOuts()
	defer endPulls()
	scaleouts := time.NewTimer(0)
	defer scaleouts.Stop()
	due := true // the timer of scale-outs runs
	space := time.NewTicker(spaceEvery)
	defer space.Stop()
	artifacts := time.NewTimer(0)
	defer artifacts.Stop()
	pending := true // the timer runs

	a.publish("devices", a.publisher.SetDevices(devicesOf(a.tracker.Snapshot())))
	a.publish("endpoints", a.publisher.SetEndpoints(endpointsOf(a.poller.Snapshot())))
	a.publishSpace()
	a.publishKV()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-devices:
			a.publish("devices", a.publisher.SetDevices(devicesOf(a.tracker.Snapshot())))
		case <-engines:
			a.publish("endpoints", a.publisher.SetEndpoints(endpointsOf(a.poller.Snapshot())))
		case <-weights:
			if !pending {
				artifacts.Reset(artifactsEvery)
				pending = true
			}
		case <-artifacts.C:
			pending = false
			state, _ := a.data.Snapshot() // the last one known, where the data role is away
			a.publishArtifacts(state.Models)
			a.publishSpace()
		case <-pulls:
			if !due {
				scaleouts.Reset(scaleOutsEvery)
				due = true
			}
		case <-scaleouts.C:
			due = false
			a.publishScaleOuts()
		case <-space.C:
			a.publishSpace()
			a.publishKV()
		}
	}
}

// publishArtifacts reports the artifacts to report. Where they do not fit the
// report, the least of them are left out, which is counted and is a problem of
// the node; what is reported never stands still.
func (a *Agent) publishArtifacts(statuses []weightcache.Status) {
	list, more := a.toReport(statuses)
	objects := artifactsOf(list)
	size := 0
	for i, o := range objects {
		if size += proto.Size(o) + fieldOverhead; size > maxArtifactBytes {
			more += len(objects) - i
			objects = objects[:i]
			break
		}
	}
	err := a.publisher.SetArtifacts(objects)
	for errors.Is(err, report.ErrTooMany) && len(objects) > 0 {
		// Endpoints have taken more than their half.
		keep := len(objects) / 2
		more += len(objects) - keep
		objects = objects[:keep]
		err = a.publisher.SetArtifacts(objects)
	}
	a.publish("artifacts", err)
	a.leftOut.Store(int64(more))
	text := ""
	if more > 0 {
		text = "the report is full and leaves out artifacts, configured and ready ones last: remove models that are not needed"
	}
	if a.setProblem("report room", text) && more > 0 {
		a.log.Warn("report is full, artifacts are left out", slog.Int("artifacts", more))
	}
}

// toReport gives the artifacts that the report and the metrics name, configured
// ones first, then Ready ones, at most report.MaxArtifacts, and how many more
// there are. A ref of which nothing is known is among them only where it is
// configured: anybody may ask for any name.
func (a *Agent) toReport(statuses []weightcache.Status) (list []weightcache.Status, more int) {
	rank := func(s weightcache.Status) int {
		switch {
		case a.configured[s.Ref]:
			return 0
		case s.State == weightcache.Ready:
			return 1
		}
		return 2
	}
	for _, s := range statuses {
		if !s.Digest.IsZero() || a.configured[s.Ref] {
			list = append(list, s)
		}
	}
	slices.SortStableFunc(list, func(x, y weightcache.Status) int { return cmp.Compare(rank(x), rank(y)) })
	if more = len(list) - report.MaxArtifacts; more > 0 {
		return list[:report.MaxArtifacts], more
	}
	return list, 0
}

func (a *Agent) publishSpace() {
	state, _ := a.data.Snapshot()
	s := state.Space
	a.publish("space", a.publisher.SetSpace(&report.Space{CapacityBytes: int64(s.Capacity), UsedBytes: int64(s.Used), FreeBytes: int64(s.Free)}))
}

// publishKV reports the fill of the KV store, which changes every few seconds at
// most.
func (a *Agent) publishKV() {
	state, _ := a.data.Snapshot()
	if state.KV == nil {
		return
	}
	tier := func(t local.KVTier) *report.KVTier {
		return &report.KVTier{
			UsedBytes: int64(t.Used), BudgetBytes: int64(t.Budget), Blocks: t.Blocks, Hits: t.Hits, SavedTokens: t.SavedTokens, Damaged: t.Damaged,
		}
	}
	a.publish("kv", a.publisher.SetKV(&report.KV{
		Ram: tier(state.KV.RAM), Nvme: tier(state.KV.NVMe), Blocks: state.KV.Blocks, Misses: state.KV.Misses, Dropped: state.KV.Dropped,
	}))
}

// publish notes what the publisher refused; the state before it stands.
func (a *Agent) publish(what string, err error) {
	text := ""
	if err != nil {
		text = "the report does not show the present " + what + ": " + err.Error()
	}
	if a.setProblem("report "+what, text) && err != nil {
		a.log.Error("report not published", slog.String("what", what), slog.Any("error", err))
	}
}

var artifactStates = map[weightcache.State]report.ArtifactState{
	weightcache.Absent:    report.ArtifactState_ARTIFACT_STATE_ABSENT,
	weightcache.Resolving: report.ArtifactState_ARTIFACT_STATE_RESOLVING,
	weightcache.Metadata:  report.ArtifactState_ARTIFACT_STATE_METADATA,
	weightcache.Filling:   report.ArtifactState_ARTIFACT_STATE_FILLING,
	weightcache.Verifying: report.ArtifactState_ARTIFACT_STATE_VERIFYING,
	weightcache.Ready:     report.ArtifactState_ARTIFACT_STATE_READY,
	weightcache.Suspect:   report.ArtifactState_ARTIFACT_STATE_SUSPECT,
	weightcache.Failed:    report.ArtifactState_ARTIFACT_STATE_FAILED,
	weightcache.Evicting:  report.ArtifactState_ARTIFACT_STATE_EVICTING,
}

func artifactsOf(statuses []weightcache.Status) []*report.Artifact {
	list := make([]*report.Artifact, 0, len(statuses))
	for _, s := range statuses {
		a := &report.Artifact{
			Ref: s.Ref.String(), Commit: s.Commit, State: artifactStates[s.State],
			SizeBytes: s.Size, PresentBytes: s.Present, Detail: s.Detail,
		}
		if !s.Digest.IsZero() {
			a.Digest = s.Digest.String()
		}
		list = append(list, a)
	}
	return list
}

var engineKinds = map[string]report.EngineKind{
	endpoints.EngineVLLM:        report.EngineKind_ENGINE_KIND_VLLM,
	endpoints.EngineSGLang:      report.EngineKind_ENGINE_KIND_SGLANG,
	endpoints.EngineLlamaServer: report.EngineKind_ENGINE_KIND_LLAMA_SERVER,
	endpoints.EngineSim:         report.EngineKind_ENGINE_KIND_SIM,
}

func endpointsOf(states []endpoints.State) []*report.Endpoint {
	list := make([]*report.Endpoint, 0, len(states))
	for _, s := range states {
		e := &report.Endpoint{
			Name: s.Name, Url: s.URL, Engine: engineKinds[s.Engine], Pool: s.Pool, ServedModels: s.ServedModels,
			Devices: s.Devices, Accelerator: s.Accelerator, Ref: s.Ref, Reachable: s.Reachable, Incarnation: s.Incarnation, Pod: s.Pod,
		}
		if !s.Load.At.IsZero() {
			e.Load = &report.Load{
				UnixMillis: s.Load.At.UnixMilli(), Running: s.Load.Running, Waiting: s.Load.Waiting, KvUsage: s.Load.KVUsage,
				KvCapacityTokens: s.Load.KVCapacityTokens, BlockTokens: s.Load.BlockTokens,
				PromptTokensTotal: s.Load.PromptTokens, CachedTokensTotal: s.Load.CachedTokens,
				GeneratedTokensTotal: s.Load.GeneratedTokens, MaxRunning: s.Load.MaxRunning,
			}
		}
		list = append(list, e)
	}
	return list
}

var healths = map[device.Health]report.Health{
	device.Healthy:   report.Health_HEALTH_HEALTHY,
	device.Degraded:  report.Health_HEALTH_DEGRADED,
	device.Unhealthy: report.Health_HEALTH_UNHEALTHY,
}

func devicesOf(snapshot device.Snapshot) []*report.Device {
	list := make([]*report.Device, 0, len(snapshot))
	for _, s := range snapshot {
		d := &report.Device{Id: string(s.Device.ID), Product: s.Device.Product, Health: healths[s.Health]}
		for _, c := range s.Conditions {
			d.Conditions = append(d.Conditions, &report.Condition{Key: c.Key, Value: c.Value, SinceUnixMillis: c.Since.UnixMilli()})
		}
		list = append(list, d)
	}
	return list
}
