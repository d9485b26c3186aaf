package report

import (
	"errors"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
)

func fullKV() *KV {
	return &KV{
		Ram:    &KVTier{UsedBytes: 1 << 30, BudgetBytes: 4 << 30, Blocks: 512, Hits: 1000, SavedTokens: 256000, Damaged: 1},
		Nvme:   &KVTier{UsedBytes: 10 << 30, BudgetBytes: 40 << 30, Blocks: 5000, Hits: 20, SavedTokens: 5120, Damaged: 2},
		Blocks: 5300, Misses: 77, Dropped: 3,
	}
}

func snapshotWithKV() *Report {
	r := fullSnapshot()
	r.Kv = fullKV()
	return r
}

func TestTheBytesOfAReportWithKVStayAsStored(t *testing.T) {
	t.Parallel()
	const file = "testdata/report_v1_kv.bin"
	got, err := proto.MarshalOptions{Deterministic: true}.Marshal(snapshotWithKV())
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
	if diff := cmp.Diff(fullKV(), s.KV(), protocmp.Transform()); diff != "" {
		t.Errorf("KV differs (-want +got):\n%s", diff)
	}
}

func TestAReaderThatKnowsNoKVFollowsTheDeltasThatHaveIt(t *testing.T) {
	t.Parallel()
	for name, space := range map[string]*Space{"with a space": {CapacityBytes: 9}, "without": nil} {
		p := newPublisher(t, 3)
		if err := p.SetSpace(space); err != nil {
			t.Fatal(err)
		}
		before, _ := p.after(0)
		var now, old State
		if err := errors.Join(now.Apply(before[0]), old.Apply(proto.CloneOf(before[0]))); err != nil {
			t.Fatal(err)
		}
		if err := p.SetKV(fullKV()); err != nil {
			t.Fatal(err)
		}
		deltas, _ := p.after(now.Seq())
		if len(deltas) != 1 || deltas[0].Snapshot {
			t.Fatalf("%s: a change of KV made %d messages", name, len(deltas))
		}
		// A reader of before keeps the field unread.
		unknown := proto.CloneOf(deltas[0])
		unknown.Kv = nil
		if err := errors.Join(now.Apply(deltas[0]), old.Apply(unknown)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if now.KV().GetBlocks() != 5300 || old.KV() != nil || old.Seq() != p.Seq() || old.Space().GetCapacityBytes() != space.GetCapacityBytes() {
			t.Errorf("%s: the new reader has %v, the old one sequence %d of %d", name, now.KV(), old.Seq(), p.Seq())
		}
	}
}

func TestKVStaysUntilItIsToldAnewAndEqualOnesAreNoChange(t *testing.T) {
	t.Parallel()
	p := newPublisher(t, 3)
	for range 2 {
		if err := errors.Join(p.SetKV(fullKV()), p.SetKV(nil)); err != nil {
			t.Fatal(err)
		}
	}
	if p.Seq() != 2 {
		t.Errorf("sequence is %d, want 2", p.Seq())
	}
	if err := p.SetDevices(fullSnapshot().Devices); err != nil {
		t.Fatal(err)
	}
	var s State
	messages, _ := p.after(0)
	if err := s.Apply(messages[0]); err != nil {
		t.Fatal(err)
	}
	if s.KV().GetNvme().GetBlocks() != 5000 {
		t.Errorf("the snapshot has KV %v", s.KV())
	}
	bad := fullKV()
	bad.Nvme.SavedTokens = -1
	if err := p.SetKV(bad); !errors.Is(err, ErrInvalid) {
		t.Errorf("a negative number gave %v", err)
	}
}
