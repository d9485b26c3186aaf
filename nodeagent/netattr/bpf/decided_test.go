//go:build root

package bpf

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

func TestDecidedClassesLastAsLongAsTheCounts(t *testing.T) {
	t.Parallel()
	pins := pinned(t)
	first := opened(t, Options{Pins: pins})
	for cgroup, class := range map[uint64]traffic.Class{10: traffic.Serving, 20: traffic.Image, 30: traffic.KV} {
		if err := first.Decide(cgroup, class); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // what is not there is forgotten too
		if err := first.Decide(30, traffic.ByCgroup); err != nil {
			t.Fatal(err)
		}
	}
	want := map[uint64]traffic.Class{10: traffic.Serving, 20: traffic.Image}
	for name, p := range map[string]*Probe{"the same": first, "the next": opened(t, Options{Pins: pins})} {
		if got, err := p.Decided(); err != nil || !cmp.Equal(want, got) {
			t.Errorf("%s: %v, %s", name, err, cmp.Diff(want, got))
		}
	}
	if got, err := opened(t, Options{}).Decided(); err != nil || len(got) > 0 {
		t.Errorf("without pins: %v, %v", got, err)
	}
	if err := Unpin(pins); err != nil {
		t.Fatal(err)
	}
	if p := opened(t, Options{Pins: pins}); p.Kept() {
		t.Error("counts are kept after they were removed")
	} else if got, err := p.Decided(); err != nil || len(got) > 0 {
		t.Errorf("after an uninstall: %v, %v", got, err)
	}
}
