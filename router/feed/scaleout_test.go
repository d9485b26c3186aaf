package feed

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/hearth-dev/hearth/nodeagent/report"
)

func TestTheScaleOutsOfAllNodesShowAsTheyLastReportedThem(t *testing.T) {
	t.Parallel()
	first, second := publisher(t, "n1", 7, "a"), publisher(t, "n2", 7, "a")
	addressOne, _ := serve(t, "127.0.0.1:0", first)
	addressTwo, stop := serve(t, "127.0.0.1:0", second)
	f, sink := run(t, Node{Address: addressOne}, Node{Address: addressTwo})
	done := report.ScaleOutState_SCALE_OUT_STATE_READY
	full := &report.ScaleOut{
		Id: "x", Ref: "hub://org/name@main", Digest: "ab", Reason: "configured", Source: "hub", SourceKind: report.SourceKind_SOURCE_KIND_ORIGIN,
		State: report.ScaleOutState_SCALE_OUT_STATE_FAILED, Detail: "refused", StartUnixMillis: 1000, EndUnixMillis: 3000, SizeBytes: 9, MissingBytes: 8,
		FetchedBytes: 7, Connections: &report.Moved{Received: 10, Transmitted: 2, Retransmitted: 1}, Devices: &report.Moved{Received: 30},
		Unattributed: &report.Moved{Received: 3}, Classes: []*report.ClassMoved{{TrafficClass: "weights", Locality: "off_node", Received: 10, Transmitted: 2, Retransmitted: 1}},
		Before: &report.RoundTrips{Samples: 1, P50: 0.1, P90: 0.2, P99: 0.3}, PacedSeconds: 2, Overlap: []string{"y"}, Sight: report.Sight_SIGHT_PARTIAL,
	}
	tell := func(p *report.Publisher, list ...*report.ScaleOut) {
		t.Helper()
		if err := p.SetScaleOuts(list); err != nil {
			t.Fatal(err)
		}
	}
	running := report.ScaleOutState_SCALE_OUT_STATE_RUNNING
	tell(first, full, &report.ScaleOut{Id: "late", State: done, StartUnixMillis: 5000, EndUnixMillis: 6000})
	tell(second, &report.ScaleOut{Id: "runs", State: running, StartUnixMillis: 500}, &report.ScaleOut{Id: "gone", State: done})
	tell(second, &report.ScaleOut{Id: "runs", State: running, StartUnixMillis: 500, SourceKind: 99})
	// By the arrival of what comes after them they are there.
	set(t, first, "a", "b")
	sink.until(t, "the delta after those of n1", func(s seen) bool { return s.node == "n1" && s.endpoints == 2 })
	set(t, second, "a", "b", "c")
	sink.until(t, "the delta after those of n2", func(s seen) bool { return s.node == "n2" && s.endpoints == 3 })
	stop()
	got, more := f.ScaleOuts()
	var order []string
	for _, s := range got {
		order = append(order, s.Node+"/"+s.ID)
	}
	if want := "n2/runs n1/late n1/x"; strings.Join(order, " ") != want || more != 0 {
		t.Fatalf("scale-outs are %v and %d more, want %s", order, more, want)
	}
	want := ScaleOut{
		ID: "x", Node: "n1", State: "failed", Error: "refused", Ref: "hub://org/name@main", Digest: "ab", Reason: "configured",
		Start: time.UnixMilli(1000).UTC(), End: time.UnixMilli(3000).UTC(), SizeBytes: 9, MissingBytes: 8,
		Sources: []Source{{Name: "hub", Kind: "origin", Bytes: 7}}, Connections: Moved{10, 2, 1}, Classes: []Class{{"weights", "off_node", Moved{10, 2, 1}}},
		Devices: Moved{Received: 30}, Unattributed: Moved{Received: 3}, Visible: "partial", PacedSeconds: 2,
		Before: RoundTrips{1, 0.1, 0.2, 0.3}, Overlap: []string{"y"},
	}
	if diff := cmp.Diff(want, got[2]); diff != "" {
		t.Errorf("a scale-out differs (-want +got):\n%s", diff)
	}
	if runs := got[0]; !runs.End.IsZero() || runs.Visible != "" || runs.Sources[0].Kind != "" {
		t.Errorf("what is not told or not known shows as %+v", runs)
	}
}

func TestScaleOutsPastTheLimitAreCountedAndTheRunningOnesStay(t *testing.T) {
	t.Parallel()
	f, err := New(Options{Sink: make(recorder, 1)})
	if err != nil {
		t.Fatal(err)
	}
	for n := range MaxScaleOuts/report.MaxScaleOuts + 1 {
		w := &watcher{feed: f, node: Node{Address: fmt.Sprint(n)}, stats: NodeStats{Node: fmt.Sprint("n", n)}}
		for i := range report.MaxScaleOuts {
			w.scaleouts = append(w.scaleouts, &report.ScaleOut{
				Id: fmt.Sprint(i), State: report.ScaleOutState_SCALE_OUT_STATE_READY, StartUnixMillis: int64(i + 1),
			})
		}
		w.scaleouts[0].State = report.ScaleOutState_SCALE_OUT_STATE_RUNNING
		f.watchers[w.node] = w
	}
	list, more := f.ScaleOuts()
	running := MaxScaleOuts/report.MaxScaleOuts + 1
	if len(list) != MaxScaleOuts || more != report.MaxScaleOuts || list[running-1].State != "running" || list[running].State != "ready" ||
		list[running].Start.UnixMilli() != report.MaxScaleOuts {
		t.Errorf("%d scale-outs and %d more, first %+v", len(list), more, list[0])
	}
}
