package netattr

import (
	"maps"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// keeping is a kernel that keeps classes too.
type keeping struct {
	kernel
	decided map[uint64]traffic.Class
}

func (k keeping) Decide(cgroup uint64, class traffic.Class) error {
	if k.decided[cgroup] = class; class == traffic.ByCgroup {
		delete(k.decided, cgroup)
	}
	return nil
}

// restarted gives the books of a process that begins over what is kept.
func (k keeping) restarted(tree tree) *books {
	b := newBooks(nil)
	b.tree, b.decided = tree, maps.Clone(k.decided)
	return b
}

func TestTotalsOfKeptCountsAreTheSameAfterARestart(t *testing.T) {
	t.Parallel()
	d := newDay()
	tree := cgroupsOf{10: podPath(uidA), 20: "/system.slice/containerd.service", 30: "/user.slice"}
	k := keeping{kernel{}, map[uint64]traffic.Class{}}
	b := k.restarted(tree)
	b.close(d.read(k.kernel), k)
	for cgroup := range tree {
		k.kernel[bpf.Key{Cgroup: cgroup, Locality: traffic.OffNode}] = received(cgroup)
	}
	engine := Pod{UID: uidA, Engine: true}
	d.pass(time.Second)
	want := b.close(d.read(k.kernel, engine), k).Totals
	// The next process has not heard of pods yet, and a cgroup is gone.
	d.pass(time.Second)
	delete(tree, 20)
	b = k.restarted(tree)
	if got := b.close(d.read(k.kernel), k).Totals; !cmp.Equal(want, got) {
		t.Errorf("at once after a restart: %s", cmp.Diff(want, got))
	}
	k.kernel[bpf.Key{Cgroup: 10, Locality: traffic.OffNode}] = received(15)
	d.pass(time.Second)
	b.close(d.read(k.kernel), k)
	d.pass(time.Second)
	if got := b.close(d.read(k.kernel, engine), k).Class(traffic.Serving, traffic.OffNode).Received; got != 15 {
		t.Errorf("serving has %d bytes, want 15: of a pod that nobody told of yet", got)
	}
	// What is kept of cgroups goes with their counts.
	for range 4 {
		d.pass(idleFor)
		b.close(d.read(k.kernel, engine), k)
	}
	if want := map[uint64]traffic.Class{10: traffic.Serving}; !cmp.Equal(want, k.decided) {
		t.Errorf("kept classes: %s", cmp.Diff(want, k.decided))
	}
}
