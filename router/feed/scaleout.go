package feed

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/report"
)

// MaxScaleOuts bounds what ScaleOuts gives: what the nodes report of them is up to
// report.MaxScaleOuts each.
const MaxScaleOuts = 1024

// ScaleOut is the summary of a pull on a node as the node last reported it: what
// it and others moved over the node's network from its start to its end, or
// until now. Its keys in JSON are those of the agent's own record, which has the
// pods and its course too.
type ScaleOut struct {
	ID     string    `json:"id"` // unique on its node
	Node   string    `json:"node"`
	State  string    `json:"state"` // running, ready or failed
	Error  string    `json:"error,omitempty"`
	Ref    string    `json:"ref"`
	Digest string    `json:"digest"`
	Reason string    `json:"reason"` // who asked first
	Start  time.Time `json:"start"`
	End    time.Time `json:"end,omitzero"`

	SizeBytes    int64 `json:"sizeBytes"`    // of the artifact
	MissingBytes int64 `json:"missingBytes"` // of it at Start

	Sources      []Source   `json:"sources"`
	Connections  Moved      `json:"connections"` // the pull's own
	Classes      []Class    `json:"classes"`     // everybody's bytes
	Devices      Moved      `json:"devices"`
	Unattributed Moved      `json:"unattributed"`
	Visible      string     `json:"visible"` // full, partial, devices or none
	PacedSeconds float64    `json:"pacedSeconds,omitempty"`
	Before       RoundTrips `json:"before"`
	During       RoundTrips `json:"during"`
	Overlap      []string   `json:"overlap,omitempty"`
}

// Source is where the bytes of a ScaleOut came from.
type Source struct {
	Name  string `json:"name"`
	Kind  string `json:"kind"`  // origin or peer
	Bytes int64  `json:"bytes"` // payload of files
}

// Moved are bytes.
type Moved struct {
	Received      uint64 `json:"received"`
	Transmitted   uint64 `json:"transmitted"`
	Retransmitted uint64 `json:"retransmitted,omitempty"`
}

// Class is what was moved of one class and locality.
type Class struct {
	Class    string `json:"class"`
	Locality string `json:"locality"`
	Moved
}

// RoundTrips are those of connections that serve requests, in seconds. Where
// Samples is 0 the rest means nothing.
type RoundTrips struct {
	Samples uint64  `json:"samples"`
	P50     float64 `json:"p50"`
	P90     float64 `json:"p90"`
	P99     float64 `json:"p99"`
}

// ScaleOuts gives the scale-outs of all nodes, those that run first and then the
// latest, at most MaxScaleOuts; more is how many others there are. Those of a
// node that is lost are as it last reported them.
func (f *Feed) ScaleOuts() (list []ScaleOut, more int) {
	f.mu.Lock()
	watchers := make([]*watcher, 0, len(f.watchers))
	for _, w := range f.watchers {
		watchers = append(watchers, w)
	}
	f.mu.Unlock()
	type told struct {
		node string
		*report.ScaleOut
	}
	var all []told
	for _, w := range watchers {
		w.mu.Lock()
		node, scaleouts := w.stats.Node, w.scaleouts
		w.mu.Unlock()
		for _, s := range scaleouts {
			all = append(all, told{node, s})
		}
	}
	slices.SortFunc(all, func(a, b told) int {
		return cmp.Or(
			cmp.Compare(ended(a.ScaleOut), ended(b.ScaleOut)), cmp.Compare(b.GetStartUnixMillis(), a.GetStartUnixMillis()),
			strings.Compare(a.node, b.node), strings.Compare(a.GetId(), b.GetId()),
		)
	})
	if more = len(all) - MaxScaleOuts; more > 0 {
		all = all[:MaxScaleOuts]
	}
	list = make([]ScaleOut, 0, len(all))
	for _, s := range all {
		list = append(list, scaleOutOf(s.node, s.ScaleOut))
	}
	return list, max(more, 0)
}

func ended(s *report.ScaleOut) int {
	if s.GetState() == report.ScaleOutState_SCALE_OUT_STATE_RUNNING {
		return 0
	}
	return 1
}

// scaleOutOf copies what a report says; the message is read by others too.
func scaleOutOf(node string, s *report.ScaleOut) ScaleOut {
	o := ScaleOut{
		ID: s.GetId(), Node: node, State: word(s.GetState().String(), "SCALE_OUT_STATE_"), Error: s.GetDetail(), Ref: s.GetRef(), Digest: s.GetDigest(),
		Reason: s.GetReason(), Start: time.UnixMilli(s.GetStartUnixMillis()).UTC(), SizeBytes: s.GetSizeBytes(), MissingBytes: s.GetMissingBytes(),
		Sources:     []Source{{Name: s.GetSource(), Kind: word(s.GetSourceKind().String(), "SOURCE_KIND_"), Bytes: s.GetFetchedBytes()}},
		Connections: movedOf(s.GetConnections()), Devices: movedOf(s.GetDevices()), Unattributed: movedOf(s.GetUnattributed()),
		Classes: make([]Class, 0, len(s.GetClasses())), Visible: word(s.GetSight().String(), "SIGHT_"), PacedSeconds: s.GetPacedSeconds(),
		Before: roundTripsOf(s.GetBefore()), During: roundTripsOf(s.GetDuring()), Overlap: slices.Clone(s.GetOverlap()),
	}
	if s.GetEndUnixMillis() > 0 {
		o.End = time.UnixMilli(s.GetEndUnixMillis()).UTC()
	}
	for _, c := range s.GetClasses() {
		o.Classes = append(o.Classes, Class{
			Class: c.GetTrafficClass(), Locality: c.GetLocality(),
			Moved: Moved{Received: c.GetReceived(), Transmitted: c.GetTransmitted(), Retransmitted: c.GetRetransmitted()},
		})
	}
	return o
}

// word is the name of an enum's value as the agent's API has it: "ready"; empty
// where the value is unspecified or of a later release.
func word(name, prefix string) string {
	text, known := strings.CutPrefix(name, prefix)
	if !known || text == "UNSPECIFIED" {
		return ""
	}
	return strings.ToLower(text)
}

func movedOf(m *report.Moved) Moved {
	return Moved{Received: m.GetReceived(), Transmitted: m.GetTransmitted(), Retransmitted: m.GetRetransmitted()}
}

func roundTripsOf(r *report.RoundTrips) RoundTrips {
	return RoundTrips{Samples: r.GetSamples(), P50: r.GetP50(), P90: r.GetP90(), P99: r.GetP99()}
}
