package nodeagent

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
)

func TestAScaleOutIsReportedByClassWithoutItsPodsAndItsCourse(t *testing.T) {
	t.Parallel()
	start := time.UnixMilli(1764400001000)
	var overlap []string
	for i := range report.MaxRepeated + 1 {
		overlap = append(overlap, fmt.Sprint(i))
	}
	share := func(pod, class, locality string, received uint64) scaleout.Share {
		return scaleout.Share{Pod: pod, Class: class, Locality: locality, Bytes: scaleout.Bytes{Received: received, Transmitted: 2 * received, Retransmitted: 1}}
	}
	records := []scaleout.Record{
		{
			ID: "b", Node: "n", State: scaleout.StateRunning, Ref: "hub://org/name@main", Digest: "ab", Reason: "configured", Start: start,
			SizeBytes: 9, MissingBytes: 8, Sources: []scaleout.Source{{Name: "node-2", Kind: scaleout.KindPeer, Bytes: 7}},
			Connections: scaleout.Bytes{Received: 10, Transmitted: 1, Retransmitted: 1}, Devices: scaleout.Bytes{Received: 100, Transmitted: 50},
			Unattributed: scaleout.Bytes{Received: 5, Transmitted: 4},
			Shares:       []scaleout.Share{share("a/x", "serving", "off_node", 10), share("a/y", "weights", "off_node", 5), share("a/z", "serving", "off_node", 1), share("a/z", "serving", "loopback", 1)},
			Visible:      "partial", Unseen: "seed: off", PacedSeconds: map[string]float64{"live": 1, "link": 0.5}, Overlap: overlap,
			Before: scaleout.Latency{Samples: 1, P50: 0.1, P90: 0.2, P99: 0.3}, During: scaleout.Latency{Samples: 2, P90: 0.4},
			Series: []scaleout.Point{{Seconds: 1}},
		},
		{ID: "a", State: scaleout.StateFailed, Error: "refused", Start: start, End: start.Add(time.Second), Visible: "none"},
	}
	want := []*report.ScaleOut{
		{
			Id: "b", Ref: "hub://org/name@main", Digest: "ab", Reason: "configured", Source: "node-2", SourceKind: report.SourceKind_SOURCE_KIND_PEER,
			State: report.ScaleOutState_SCALE_OUT_STATE_RUNNING, StartUnixMillis: 1764400001000, SizeBytes: 9, MissingBytes: 8, FetchedBytes: 7,
			Connections: &report.Moved{Received: 10, Transmitted: 1, Retransmitted: 1}, Devices: &report.Moved{Received: 100, Transmitted: 50},
			Unattributed: &report.Moved{Received: 5, Transmitted: 4},
			Classes: []*report.ClassMoved{
				{TrafficClass: "serving", Locality: "off_node", Received: 11, Transmitted: 22, Retransmitted: 2},
				{TrafficClass: "weights", Locality: "off_node", Received: 5, Transmitted: 10, Retransmitted: 1},
				{TrafficClass: "serving", Locality: "loopback", Received: 1, Transmitted: 2, Retransmitted: 1},
			},
			Before: &report.RoundTrips{Samples: 1, P50: 0.1, P90: 0.2, P99: 0.3}, During: &report.RoundTrips{Samples: 2, P90: 0.4},
			PacedSeconds: 1.5, Overlap: overlap[:report.MaxRepeated], Sight: report.Sight_SIGHT_PARTIAL,
		},
		{
			Id: "a", State: report.ScaleOutState_SCALE_OUT_STATE_FAILED, Detail: "refused", StartUnixMillis: 1764400001000, EndUnixMillis: 1764400002000,
			Connections: &report.Moved{}, Devices: &report.Moved{}, Unattributed: &report.Moved{}, Before: &report.RoundTrips{}, During: &report.RoundTrips{},
			Sight: report.Sight_SIGHT_NONE,
		},
	}
	got := scaleOutsOf(records)
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("scale-outs differ (-want +got):\n%s", diff)
	}
	if err := reporting(t).publisher.SetScaleOuts(got); err != nil {
		t.Errorf("they are not taken: %v", err)
	}
}
