package dradriver

import (
	"testing"
	"time"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

func newSettler() *settler { return &settler{coalesce: 10 * time.Second, settle: 10 * time.Second} }

func after(seconds float64) time.Time {
	return epoch.Add(time.Duration(seconds * float64(time.Second)))
}

func withModels(free units.Bytes, ids ...byte) Offer {
	w := &stock.Weights{Drive: stock.Drive{Free: free}}
	for _, id := range ids {
		w.Artifacts = append(w.Artifacts, stock.Artifact{Digest: artifact.Digest{id}, Ref: artifact.Ref{Scheme: "hub", Name: string('a' + rune(id))}})
	}
	return Offer{Weights: w}
}

func models(o Offer) string {
	names := ""
	for _, a := range o.Weights.Artifacts {
		names += a.Ref.Name
	}
	return names
}

func TestArrivalsWithinTenSecondsAreOneChange(t *testing.T) {
	t.Parallel()
	s := newSettler()
	if o, wake := s.next(withModels(0, 1), after(0)); models(o) != "b" || !wake.IsZero() {
		t.Fatalf("the first state waits: %q until %v", models(o), wake)
	}
	for i, ids := range [][]byte{{1, 2}, {1, 2, 3}, {1, 2, 3, 4}} {
		o, wake := s.next(withModels(0, ids...), after(float64(i+1)))
		if models(o) != "b" || wake != after(10) {
			t.Errorf("after %d s: %q, wakes at %v", i+1, models(o), wake)
		}
	}
	if o, wake := s.next(withModels(0, 1, 2, 3, 4), after(10)); models(o) != "bcde" || !wake.IsZero() {
		t.Errorf("after 10 s: %q, wakes at %v", models(o), wake)
	}
	if o, _ := s.next(withModels(0, 1, 2, 3, 4, 5), after(21)); models(o) != "bcdef" {
		t.Errorf("after quiet a change waits: %q", models(o))
	}
}

func TestADeviceLeavesOnlyAfterItsAbsenceHasSettled(t *testing.T) {
	t.Parallel()
	s := newSettler()
	s.next(withModels(0, 1, 2), after(0))
	if o, wake := s.next(withModels(0, 1), after(20)); models(o) != "bc" || wake != after(30) {
		t.Errorf("at once: %q, wakes at %v", models(o), wake)
	}
	if o, _ := s.next(withModels(0, 1, 2), after(25)); models(o) != "bc" {
		t.Errorf("back in time: %q", models(o))
	}
	if o, wake := s.next(withModels(0, 1), after(28)); models(o) != "bc" || wake != after(38) {
		t.Errorf("the second absence counts anew: %q, wakes at %v", models(o), wake)
	}
	if o, wake := s.next(withModels(0, 1), after(38)); models(o) != "b" || !wake.IsZero() {
		t.Errorf("after it settled: %q, wakes at %v", models(o), wake)
	}
}

func TestAStateThatIsNotKnownStaysAsPublished(t *testing.T) {
	t.Parallel()
	s := newSettler()
	o, _ := s.next(Offer{}, after(0))
	if o.Weights != nil || o.KV != nil {
		t.Fatal("something is published that nobody told")
	}
	known := withModels(units.GiB, 1)
	known.KV = &stock.Space{Memory: 5}
	s.next(known, after(1))
	o, wake := s.next(Offer{}, after(100))
	if models(o) != "b" || o.KV.Memory != 5 || !wake.IsZero() {
		t.Errorf("lost %v, %v, wakes at %v", o.Weights, o.KV, wake)
	}
}

func TestFreeSpaceMovesInCoarseSteps(t *testing.T) {
	t.Parallel()
	const g = units.GiB
	s := newSettler()
	now := 0.0
	free := func(raw, taken units.Bytes) units.Bytes {
		now += 60
		o := withModels(raw, 1)
		o.Cold.Taken = taken
		o, _ = s.next(o, after(now))
		return o.Weights.Drive.Free
	}
	for i, c := range []struct{ raw, taken, want units.Bytes }{
		{100*g + 12345, 0, 100 * g},
		{103 * g, 0, 100 * g}, // not a step more
		{107 * g, 0, 100 * g}, // not two
		{108 * g, 0, 108 * g},
		{108*g - 1, 0, 104 * g}, // less than was promised
		{108*g + 1, 0, 104 * g}, // and back: no write
		{60 * g, 48 * g, 104 * g},
		{60 * g, 0, 60 * g}, // the claim that had it is gone
		{1, 0, 1},
		{0, 0, 0},
		{2 * g, 0, 2 * g},
		{1<<63 - 1, 1<<63 - 1, 0x7C00000000000000},
	} {
		if got := free(c.raw, c.taken); got != c.want {
			t.Errorf("%d: %v free and %v taken: published %v, want %v", i, c.raw, c.taken, got, c.want)
		}
	}
}

func TestFreeSpaceThatFluctuatesIsRarelyWritten(t *testing.T) {
	t.Parallel()
	s := newSettler()
	writes, last := 0, units.Bytes(-1)
	for i := range 10_000 {
		raw := 100*units.GiB + units.Bytes(i%7-3)*500*units.MiB
		o, _ := s.next(withModels(raw, 1), after(float64(11*i)))
		if o.Weights.Drive.Free > raw {
			t.Fatalf("promises %v of %v", o.Weights.Drive.Free, raw)
		}
		if o.Weights.Drive.Free != last {
			writes, last = writes+1, o.Weights.Drive.Free
		}
	}
	if writes > 2 {
		t.Errorf("%d writes of a value that moves by 3 %%", writes)
	}
}

func TestKVSpaceIsCoalescedByItself(t *testing.T) {
	t.Parallel()
	s := newSettler()
	s.next(withModels(0, 1), after(0))
	o, _ := s.next(Offer{KV: &stock.Space{Memory: 1}}, after(1))
	if o.KV == nil || o.KV.Memory != 1 {
		t.Fatal("KV waits for weights")
	}
	o, wake := s.next(Offer{KV: &stock.Space{Memory: 2}}, after(2))
	if o.KV.Memory != 1 || wake != after(11) {
		t.Errorf("published %v, wakes at %v", o.KV.Memory, wake)
	}
	if o, _ := s.next(Offer{KV: &stock.Space{Memory: 2}}, after(11)); o.KV.Memory != 2 {
		t.Errorf("published %v", o.KV.Memory)
	}
}
