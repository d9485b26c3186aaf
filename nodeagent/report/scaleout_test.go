package report

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
)

func fullScaleOut(id string) *ScaleOut {
	return &ScaleOut{
		Id: id, Ref: "hub://org/name@main", Digest: strings.Repeat("ab", 32), Reason: "claim llm/smol", Source: "hub",
		SourceKind: SourceKind_SOURCE_KIND_ORIGIN, State: ScaleOutState_SCALE_OUT_STATE_FAILED, Detail: "source refused",
		StartUnixMillis: 1764400001000, EndUnixMillis: 1764400009000, SizeBytes: 16 << 30, MissingBytes: 8 << 30, FetchedBytes: 4 << 30,
		Connections:  &Moved{Received: 5 << 30, Transmitted: 1 << 20, Retransmitted: 7},
		Devices:      &Moved{Received: 6 << 30, Transmitted: 1 << 30},
		Unattributed: &Moved{Received: 3 << 20, Transmitted: 1 << 10},
		Classes: []*ClassMoved{
			{TrafficClass: "weights", Locality: "off_node", Received: 5 << 30, Transmitted: 1 << 20, Retransmitted: 7},
			{TrafficClass: "serving", Locality: "same_node", Received: 1 << 20, Transmitted: 9 << 20},
		},
		Before:       &RoundTrips{Samples: 100, P50: 0.0001, P90: 0.0002, P99: 0.0003},
		During:       &RoundTrips{Samples: 200, P50: 0.0002, P90: 0.0004, P99: 0.0009},
		PacedSeconds: 1.5, Overlap: []string{"a", "b"}, Sight: Sight_SIGHT_PARTIAL,
	}
}

func snapshotWithScaleOuts() *Report {
	r := fullSnapshot()
	r.Scaleouts = []*ScaleOut{fullScaleOut("1z141z4")}
	return r
}

func TestTheBytesOfAReportWithScaleOutsStayAsStored(t *testing.T) {
	t.Parallel()
	const file = "testdata/report_v1_scaleouts.bin"
	got, err := proto.MarshalOptions{Deterministic: true}.Marshal(snapshotWithScaleOuts())
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("bytes differ (-stored +written):\n%s", diff)
	}
	var read Report
	var s State
	if err := errors.Join(proto.Unmarshal(want, &read), s.Apply(&read)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]*ScaleOut{fullScaleOut("1z141z4")}, s.ScaleOuts(), protocmp.Transform()); diff != "" {
		t.Errorf("scale-outs differ (-want +got):\n%s", diff)
	}
}

func TestScaleOutsComeChangeAndGoByDeltas(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 3)
	var s State
	follow := func() {
		t.Helper()
		messages, _ := p.after(s.Seq())
		for _, m := range messages {
			if err := s.Apply(m); err != nil {
				t.Fatal(err)
			}
		}
	}
	follow()
	set := func(list ...*ScaleOut) {
		t.Helper()
		if err := p.SetScaleOuts(list); err != nil {
			t.Fatal(err)
		}
		follow()
	}
	set(fullScaleOut("b"), fullScaleOut("a"))
	set(fullScaleOut("a"), fullScaleOut("b"))
	if got := s.ScaleOuts(); p.Seq() != 2 || len(got) != 2 || got[0].GetId() != "a" {
		t.Fatalf("sequence %d, %d scale-outs; want 2 of sequence 2 by id", p.Seq(), len(got))
	}
	grown := fullScaleOut("b")
	grown.FetchedBytes++
	set(fullScaleOut("a"), grown)
	if delta, _ := p.after(2); len(delta) != 1 || len(delta[0].Scaleouts) != 1 || s.ScaleOuts()[1].GetFetchedBytes() != grown.GetFetchedBytes() {
		t.Errorf("the delta of one that grew is %v", delta)
	}
	set(grown)
	if got := s.ScaleOuts(); len(got) != 1 || got[0].GetId() != "b" {
		t.Errorf("after one went there are %v", got)
	}
	var fresh State
	messages, _ := p.after(0)
	if err := fresh.Apply(messages[0]); err != nil || len(fresh.ScaleOuts()) != 1 {
		t.Errorf("the snapshot gives %d scale-outs, %v", len(fresh.ScaleOuts()), err)
	}
}

func TestAReaderThatKnowsNoScaleOutsFollowsTheDeltasThatHaveThem(t *testing.T) {
	t.Parallel()
	for name, space := range map[string]*Space{"with a space": {CapacityBytes: 9}, "without": nil} {
		p := newPublisher(t, 3)
		if err := p.SetSpace(space); err != nil {
			t.Fatal(err)
		}
		before, _ := p.after(0)
		var old State
		if err := old.Apply(before[0]); err != nil {
			t.Fatal(err)
		}
		// One comes, and goes: a delta with a gone key alone.
		if err := errors.Join(p.SetScaleOuts([]*ScaleOut{fullScaleOut("a")}), p.SetScaleOuts(nil)); err != nil {
			t.Fatal(err)
		}
		deltas, _ := p.after(old.Seq())
		for _, m := range deltas {
			// A reader of before keeps the fields unread.
			unknown := proto.CloneOf(m)
			unknown.Scaleouts, unknown.GoneScaleouts = nil, nil
			if err := old.Apply(unknown); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if len(deltas) != 2 || old.Seq() != p.Seq() || old.Space().GetCapacityBytes() != space.GetCapacityBytes() {
			t.Errorf("%s: after %d deltas the old reader is at %d of %d", name, len(deltas), old.Seq(), p.Seq())
		}
	}
}

func TestAScaleOutThatCannotBeIsRefused(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*ScaleOut){
		"no id":                    func(s *ScaleOut) { s.Id = "" },
		"a negative size":          func(s *ScaleOut) { s.SizeBytes = -1 },
		"an end before time began": func(s *ScaleOut) { s.EndUnixMillis = -1 },
		"an endless round trip":    func(s *ScaleOut) { s.During.P90 = math.Inf(1) },
		"no round trip":            func(s *ScaleOut) { s.Before.P50 = math.NaN() },
		"paced for less than none": func(s *ScaleOut) { s.PacedSeconds = -1 },
		"a class without a name":   func(s *ScaleOut) { s.Classes[0].TrafficClass = "" },
		"too many classes": func(s *ScaleOut) {
			for i := range MaxRepeated {
				s.Classes = append(s.Classes, &ClassMoved{TrafficClass: fmt.Sprint(i)})
			}
		},
		"an endless overlap": func(s *ScaleOut) { s.Overlap = make([]string, MaxRepeated+1) },
		"an endless ref":     func(s *ScaleOut) { s.Ref = strings.Repeat("x", MaxTextBytes+1) },
	} {
		bad := fullScaleOut("a")
		spoil(bad)
		p := newPublisher(t, 3)
		if err := p.SetScaleOuts([]*ScaleOut{bad}); !errors.Is(err, ErrInvalid) || p.Seq() != 1 {
			t.Errorf("%s: %v at sequence %d", name, err, p.Seq())
		}
	}
	p := newPublisher(t, 3)
	var many []*ScaleOut
	for i := range MaxScaleOuts + 1 {
		many = append(many, &ScaleOut{Id: fmt.Sprint(i)})
	}
	if err := errors.Join(p.SetScaleOuts(many[1:])); err != nil {
		t.Errorf("%d scale-outs: %v", MaxScaleOuts, err)
	}
	if err := p.SetScaleOuts(many); !errors.Is(err, ErrInvalid) {
		t.Errorf("%d scale-outs: %v", len(many), err)
	}
	long := fullScaleOut("a")
	long.Detail = strings.Repeat("é", MaxTextBytes)
	if err := p.SetScaleOuts([]*ScaleOut{long}); err != nil {
		t.Errorf("a long detail is cut, not refused: %v", err)
	}
}
