package nodeagent

import (
	"log/slog"
	"slices"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
)

// scaleOutsEvery is the least time between two reports of scale-outs, which
// change with every sample while one runs.
const scaleOutsEvery = time.Second

// watchScaleOuts gives a channel that holds a signal after scaleOuts changed, and
// the func that ends it.
func (a *Agent) watchScaleOuts() (changed <-chan struct{}, cancel func()) {
	if a.network == nil {
		return a.data.Subscribe()
	}
	return a.network.scaleouts.Subscribe()
}

// scaleOuts are the records of this node, those that run first and then the
// latest. Of a data role that runs apart they are the last ones it told.
func (a *Agent) scaleOuts() []scaleout.Record {
	if a.network == nil {
		state, _ := a.data.Snapshot()
		return state.ScaleOuts
	}
	return a.network.scaleouts.List()
}

// publishScaleOuts reports the scale-outs, at most report.MaxScaleOuts of them.
func (a *Agent) publishScaleOuts() {
	records := a.scaleOuts()
	if more := len(records) - report.MaxScaleOuts; more > 0 {
		a.log.Debug("scale-outs are left out of the report", slog.Int("scaleouts", more))
		records = records[:report.MaxScaleOuts]
	}
	a.publish("scale-outs", a.publisher.SetScaleOuts(scaleOutsOf(records)))
}

var scaleOutStates = map[string]report.ScaleOutState{
	scaleout.StateRunning: report.ScaleOutState_SCALE_OUT_STATE_RUNNING,
	scaleout.StateReady:   report.ScaleOutState_SCALE_OUT_STATE_READY,
	scaleout.StateFailed:  report.ScaleOutState_SCALE_OUT_STATE_FAILED,
}

var sourceKinds = map[string]report.SourceKind{
	scaleout.KindOrigin: report.SourceKind_SOURCE_KIND_ORIGIN,
	scaleout.KindPeer:   report.SourceKind_SOURCE_KIND_PEER,
}

var sights = map[string]report.Sight{
	"none": report.Sight_SIGHT_NONE, "devices": report.Sight_SIGHT_DEVICES, "partial": report.Sight_SIGHT_PARTIAL, "full": report.Sight_SIGHT_FULL,
}

// scaleOutsOf are records as the report has them: who else moved bytes only by
// class, and without their course.
func scaleOutsOf(records []scaleout.Record) []*report.ScaleOut {
	list := make([]*report.ScaleOut, 0, len(records))
	for _, r := range records {
		s := &report.ScaleOut{
			Id: r.ID, Ref: r.Ref, Digest: r.Digest, Reason: r.Reason, State: scaleOutStates[r.State], Detail: r.Error,
			StartUnixMillis: r.Start.UnixMilli(), SizeBytes: r.SizeBytes, MissingBytes: r.MissingBytes, FetchedBytes: r.Fetched(),
			Connections: movedOf(r.Connections), Devices: movedOf(r.Devices), Unattributed: movedOf(r.Unattributed),
			Classes: classesOf(r.Shares), Before: roundTripsOf(r.Before), During: roundTripsOf(r.During),
			Overlap: r.Overlap[:min(len(r.Overlap), report.MaxRepeated)], Sight: sights[r.Visible],
		}
		if !r.End.IsZero() {
			s.EndUnixMillis = r.End.UnixMilli()
		}
		if len(r.Sources) > 0 {
			s.Source, s.SourceKind = r.Sources[0].Name, sourceKinds[r.Sources[0].Kind]
		}
		for _, seconds := range r.PacedSeconds {
			s.PacedSeconds += seconds
		}
		list = append(list, s)
	}
	return list
}

func movedOf(b scaleout.Bytes) *report.Moved {
	return &report.Moved{Received: b.Received, Transmitted: b.Transmitted, Retransmitted: b.Retransmitted}
}

func roundTripsOf(l scaleout.Latency) *report.RoundTrips {
	return &report.RoundTrips{Samples: l.Samples, P50: l.P50, P90: l.P90, P99: l.P99}
}

// classesOf adds up shares by class and locality, the most first: bounded by the
// number of those.
func classesOf(shares []scaleout.Share) []*report.ClassMoved {
	var list []*report.ClassMoved
	for _, s := range shares {
		i := slices.IndexFunc(list, func(c *report.ClassMoved) bool { return c.TrafficClass == s.Class && c.Locality == s.Locality })
		if i < 0 {
			i, list = len(list), append(list, &report.ClassMoved{TrafficClass: s.Class, Locality: s.Locality})
		}
		list[i].Received += s.Received
		list[i].Transmitted += s.Transmitted
		list[i].Retransmitted += s.Retransmitted
	}
	return list
}
