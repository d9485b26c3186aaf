package netattr

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
	"github.com/hearth-dev/hearth/nodeagent/netattr/nic"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

const (
	uidA = "0f9a1b2c-0000-4000-8000-00000000000a"
	ctrA = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
)

// podPath is where the cgroupfs driver has a container.
func podPath(uid string) string { return "/kubepods/besteffort/pod" + uid + "/" + ctrA }

// cgroupsOf is a tree in memory.
type cgroupsOf map[uint64]string

func (c cgroupsOf) Lookup(id uint64) (string, bool) { path, ok := c[id]; return path, ok }
func (c cgroupsOf) Gone(id uint64) bool             { _, ok := c[id]; return !ok }
func (c cgroupsOf) Forget(uint64)                   {}
func (c cgroupsOf) Walk() error                     { return nil }

// kernel is counts in memory, folded as the kernel's are.
type kernel map[bpf.Key]traffic.Counts

func (k kernel) Fold(key, into bpf.Key) error {
	sum := k[into]
	sum.Add(k[key])
	k[into] = sum
	delete(k, key)
	return nil
}

// Decide keeps nothing.
func (k kernel) Decide(uint64, traffic.Class) error { return nil }

func (k kernel) copy() map[bpf.Key]traffic.Counts {
	to := map[bpf.Key]traffic.Counts{}
	maps.Copy(to, k)
	return to
}

// day is a clock that the test moves.
type day struct{ now time.Time }

func newDay() *day { return &day{time.Unix(1_800_000_000, 0)} }

func (d *day) pass(t time.Duration) time.Time { d.now = d.now.Add(t); return d.now }

func (d *day) read(k kernel, pods ...Pod) reading {
	r := reading{at: d.now, counts: k.copy(), pods: map[string]Pod{}, sensors: []bpf.Sensor{{Name: bpf.SensorSockets, On: true, Wanted: true}}}
	for _, p := range pods {
		r.pods[p.UID] = p
	}
	return r
}

// device is a reading of one network device.
func device(received, transmitted uint64) nic.Devices {
	return nic.Devices{Net: []nic.Device{{
		Name: "eth0", Index: 2, Counters: nic.Counters{nic.ReceivedBytes: received, nic.TransmittedBytes: transmitted},
	}}}
}

func received(n uint64) traffic.Counts { return traffic.Counts{Received: n} }

func TestBytesOfAnEnginesPodAreServingAndOthersAreNot(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks(nil)
	b.tree = cgroupsOf{10: podPath(uidA), 20: "/system.slice/containerd.service", 30: "/user.slice"}
	k := kernel{
		{Cgroup: 10, Locality: traffic.OffNode}:                         received(1),
		{Cgroup: 10, Locality: traffic.OffNode, Class: traffic.KV}:      received(2),
		{Cgroup: 20, Locality: traffic.OffNode}:                         received(4),
		{Cgroup: 30, Locality: traffic.Loopback}:                        received(8),
		{Cgroup: 0, Locality: traffic.SameNode, Class: traffic.Weights}: received(16),
	}
	s := b.close(d.read(k, Pod{UID: uidA, Namespace: "team", Name: "llama", Engine: true}), k)
	want := map[Kind]traffic.Counts{
		{Class: traffic.Serving, Locality: traffic.OffNode}:  received(1),
		{Class: traffic.KV, Locality: traffic.OffNode}:       received(2),
		{Class: traffic.Image, Locality: traffic.OffNode}:    received(4),
		{Class: traffic.Other, Locality: traffic.Loopback}:   received(8),
		{Class: traffic.Weights, Locality: traffic.SameNode}: received(16),
	}
	if diff := cmp.Diff(want, s.Totals); diff != "" {
		t.Error(diff)
	}
	pod := Owner{PodUID: uidA, Container: ctrA}
	for _, share := range s.Shares {
		if share.PodUID != "" && share.Owner != pod {
			t.Errorf("share of %+v, want %+v", share.Owner, pod)
		}
	}
}

func TestRulesOfTheConfigurationComeBeforeWhatACgroupSays(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks([]Rule{{Pattern: "spegel*", Class: traffic.Image}, {Pattern: "/machine/*/x", Class: traffic.KV}})
	b.tree = cgroupsOf{10: podPath(uidA) + "/spegel.service", 11: "/machine/7/x", 12: "/machine/7/y"}
	k := kernel{
		{Cgroup: 10, Locality: traffic.OffNode}: received(1), {Cgroup: 11, Locality: traffic.OffNode}: received(2), {Cgroup: 12, Locality: traffic.OffNode}: received(4),
	}
	s := b.close(d.read(k), k)
	for class, want := range map[traffic.Class]uint64{traffic.Image: 1, traffic.KV: 2, traffic.Other: 4} {
		if got := s.Class(class, traffic.OffNode).Received; got != want {
			t.Errorf("%s: %d bytes, want %d", class, got, want)
		}
	}
}

func TestBytesOfACgroupThatIsNotFoundYetWaitForIt(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks(nil)
	tree := cgroupsOf{}
	b.tree = tree
	b.close(d.read(kernel{}), nil)
	k := kernel{{Cgroup: 10, Locality: traffic.OffNode}: received(100)}
	if s := b.close(d.read(k), k); len(s.Totals) != 0 {
		t.Errorf("counted %v before the cgroup was found", s.Totals)
	}
	tree[10] = podPath(uidA)
	d.pass(time.Second)
	s := b.close(d.read(k, Pod{UID: uidA, Engine: true}), k)
	if got := s.Class(traffic.Serving, traffic.OffNode).Received; got != 100 {
		t.Errorf("serving got %d bytes, want 100", got)
	}
	k[bpf.Key{Cgroup: 99, Locality: traffic.OffNode}] = received(7)
	b.close(d.read(k), k)
	d.pass(unknownFor)
	if got := b.close(d.read(k), k).Class(traffic.Other, traffic.OffNode).Received; got != 7 {
		t.Errorf("of a cgroup that is never found %d bytes are counted, want 7", got)
	}
}

// lateTree finds a cgroup once it was walked.
type lateTree struct {
	cgroupsOf
	walked bool
}

func (l *lateTree) Lookup(id uint64) (string, bool) {
	if !l.walked {
		return "", false
	}
	return l.cgroupsOf.Lookup(id)
}

func (l *lateTree) Walk() error { l.walked = true; return nil }

func TestAThoroughSampleLeavesNothingForTheNext(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks(nil)
	b.tree = &lateTree{cgroupsOf: cgroupsOf{10: podPath(uidA)}}
	k := kernel{{Cgroup: 10, Locality: traffic.OffNode}: received(100), {Cgroup: 99, Locality: traffic.OffNode}: received(7)}
	r := d.read(k, Pod{UID: uidA, Engine: true})
	r.thorough = true
	s := b.close(r, k)
	if serving, other := s.Class(traffic.Serving, traffic.OffNode).Received, s.Class(traffic.Other, traffic.OffNode).Received; serving != 100 || other != 7 {
		t.Errorf("serving %d and other %d bytes, want 100 of the pod and 7 of a cgroup that is nowhere", serving, other)
	}
}

func TestTotalsNeverFallWhateverTheKernelSays(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks(nil)
	b.tree = cgroupsOf{10: podPath(uidA)}
	key := bpf.Key{Cgroup: 10, Locality: traffic.OffNode}
	kind := Kind{Class: traffic.Other, Locality: traffic.OffNode}
	before := uint64(0)
	for i, now := range []uint64{10, 9, 50, 0, 51, 51, 40, 90} {
		k := kernel{key: received(now)}
		d.pass(time.Second)
		got := b.close(d.read(k), k).Totals[kind].Received
		if got < before || got < now {
			t.Errorf("sample %d: %d bytes after %d, kernel has %d", i, got, before, now)
		}
		before = got
	}
	if before != 90 {
		t.Errorf("%d bytes at the end, want the kernel's 90", before)
	}
}

func TestCountsOfGoneCgroupsAreFoldedAndNoTotalChanges(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks(nil)
	tree := cgroupsOf{10: podPath(uidA)}
	b.tree = tree
	engine := Pod{UID: uidA, Engine: true}
	k := kernel{{Cgroup: 10, Locality: traffic.OffNode}: received(100), {Cgroup: 10, Locality: traffic.OffNode, Flight: 7, Class: traffic.Weights}: received(30)}
	b.began(7)
	first := b.close(d.read(k, engine), k)
	delete(tree, 10)
	b.ended(7)
	for range 4 {
		d.pass(idleFor)
		s := b.close(d.read(k, engine), k)
		if diff := cmp.Diff(first.Totals, s.Totals); diff != "" {
			t.Fatal(diff)
		}
		if got := s.Flights[7].Received; got != 30 {
			t.Fatalf("flight has %d bytes, want 30", got)
		}
	}
	want := kernel{
		{Cgroup: bpf.Folded, Class: traffic.Serving, Locality: traffic.OffNode}: received(100),
		{Cgroup: bpf.Folded, Class: traffic.Weights, Locality: traffic.OffNode}: received(30),
	}
	if diff := cmp.Diff(want, k); diff != "" {
		t.Errorf("the kernel has after folding: %s", diff)
	}
	// A restart finds the same totals in what was folded.
	again := newBooks(nil)
	again.tree = tree
	if diff := cmp.Diff(first.Totals, again.close(d.read(k), k).Totals); diff != "" {
		t.Error(diff)
	}
	// A socket that outlived its cgroup begins a key anew.
	k[bpf.Key{Cgroup: 10, Locality: traffic.OffNode}] = received(5)
	d.pass(time.Second)
	if got := b.close(d.read(k, engine), k).Class(traffic.Serving, traffic.OffNode).Received; got != 105 {
		t.Errorf("serving has %d bytes, want 105", got)
	}
}

func TestAFlightsCountsAreFoldedIntoItsCgroupOnceItEnded(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks(nil)
	b.tree = cgroupsOf{10: podPath(uidA)}
	k := kernel{{Cgroup: 10, Locality: traffic.OffNode, Flight: 7, Class: traffic.Weights}: received(30)}
	b.began(7)
	for range 3 {
		b.close(d.read(k), k)
		d.pass(idleFor)
	}
	if len(k) != 1 || k[bpf.Key{Cgroup: 10, Locality: traffic.OffNode, Flight: 7, Class: traffic.Weights}].Received != 30 {
		t.Fatalf("a flight that runs was folded: %v", k)
	}
	b.ended(7)
	b.close(d.read(k), k)
	if want := (kernel{{Cgroup: 10, Locality: traffic.OffNode, Class: traffic.Weights}: received(30)}); !cmp.Equal(want, k) {
		t.Error(cmp.Diff(want, k))
	}
	d.pass(flightKept + time.Minute)
	b.close(d.read(k), k)
	d.pass(time.Minute)
	if s := b.close(d.read(k), k); len(s.Flights) != 0 {
		t.Errorf("flights %v are still known", s.Flights)
	}
}

func TestWhatAnotherAgentFoldsIsNotCountedAgain(t *testing.T) {
	t.Parallel()
	d := newDay()
	tree := cgroupsOf{10: podPath(uidA), 20: "/system.slice/hearth.service"}
	pod, pull := bpf.Key{Cgroup: 10, Locality: traffic.OffNode}, bpf.Key{Cgroup: 20, Flight: 7, Locality: traffic.OffNode, Class: traffic.Weights}
	k := kernel{pod: received(100), pull: received(30)}
	engine := Pod{UID: uidA, Engine: true}
	first, second := newBooks(nil), newBooks(nil)
	first.tree, second.tree = tree, tree
	first.began(7)
	both := func() (s *Snapshot) {
		t.Helper()
		first.close(d.read(k, engine), k)
		s = second.close(d.read(k, engine), nil) // its folds are refused
		d.pass(idleFor)
		return s
	}
	before := both()
	delete(tree, 10)
	first.ended(7)
	for range 3 {
		if diff := cmp.Diff(before.Totals, both().Totals); diff != "" {
			t.Fatal(diff)
		}
	}
	if len(k) != 2 || k[pod] != (traffic.Counts{}) || k[pull] != (traffic.Counts{}) {
		t.Fatalf("the first agent folded nothing: %v", k)
	}
	k[pull] = received(4)
	if got := both().Class(traffic.Weights, traffic.OffNode).Received; got != 34 {
		t.Errorf("weights are %d bytes, want 34", got)
	}
}

func TestAFlightOfAnAgentBesideIsFoldedWhenItIsLongOverAndForgotten(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks(nil)
	b.tree = cgroupsOf{20: "/system.slice/hearth.service"}
	key := bpf.Key{Cgroup: 20, Flight: 9, Locality: traffic.OffNode, Class: traffic.Weights}
	k := kernel{key: received(30)}
	b.close(d.read(k), k)
	d.pass(flightKept / 2)
	if b.close(d.read(k), k); k[key].Received != 30 {
		t.Fatalf("folded while its agent may yet go on with it: %v", k)
	}
	d.pass(flightKept)
	b.close(d.read(k), k)
	s := b.close(d.read(k), k)
	if k[key].Received != 0 || len(s.Flights) != 0 || len(b.foreign) != 0 || s.Class(traffic.Weights, traffic.OffNode).Received != 30 {
		t.Errorf("after a long while: %v, flights %v", k, s.Flights)
	}
}

func TestUnattributedIsWhatStaysOfDevicesLessOwners(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks(nil)
	b.tree = cgroupsOf{10: podPath(uidA)}
	key := bpf.Key{Cgroup: 10, Locality: traffic.OffNode}
	loop := bpf.Key{Cgroup: 10, Locality: traffic.Loopback}
	var s *Snapshot
	owned := uint64(5000) // of before: not of this agent's time
	wire := uint64(1 << 40)
	for i := range 12 {
		k := kernel{key: {Received: owned, ReceivedHeaders: owned / 10}, loop: received(uint64(i) * 1_000_000)}
		r := d.read(k)
		r.devices = device(wire, 0)
		s = b.close(r, k)
		d.pass(time.Second)
		if i < 6 {
			owned += 1000
			wire += 1100 + 50 // 50 bytes a second are nobody's
		}
		if i == 3 {
			wire += 700 // of a packet that the owner is told of a second later
			owned += 0
		}
		if i == 4 {
			owned += 636 // with its headers 700
		}
	}
	if got := s.Unattributed[traffic.Receive]; got < 300 || got > 302 {
		t.Errorf("unattributed is %d bytes, want 300: six seconds of 50", got)
	}
	if got := s.Residual[traffic.Receive]; got < 300 || got > 302 {
		t.Errorf("the last difference is %d bytes, want 300", got)
	}
	if s.OnWire[traffic.Receive] != 6*1150+700 {
		t.Errorf("devices counted %d bytes, want %d", s.OnWire[traffic.Receive], 6*1150+700)
	}
}

// A cgroup that went while no agent ran is in none of the tree's walks.
func TestWhatPassedBeforeTheAgentIsNotHeldAgainstItsDevices(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks(nil)
	b.tree = cgroupsOf{10: podPath(uidA)}
	there, gone := bpf.Key{Cgroup: 10, Locality: traffic.OffNode}, bpf.Key{Cgroup: 99, Locality: traffic.OffNode}
	k := kernel{there: received(1 << 30), gone: received(1 << 40), {Cgroup: 99, Flight: 7, Locality: traffic.OffNode}: received(1 << 20)}
	wire := uint64(1 << 30)
	late := d.read(nil)
	late.counts, late.devices = nil, device(wire, 0)
	b.close(late, k) // the programs are loaded later than the devices are read
	var s, first *Snapshot
	for range 30 {
		d.pass(time.Second)
		r := d.read(k)
		r.devices = device(wire, 0)
		s = b.close(r, k)
		if first == nil {
			first = s // where a scale-out that begins now begins
		}
		k[there], wire = received(k[there].Received+1000), wire+1500
	}
	if got := s.Class(traffic.Other, traffic.OffNode).Received - first.Class(traffic.Other, traffic.OffNode).Received; got != 29_000 {
		t.Errorf("%d bytes passed since the first counts, want 29000", got)
	}
	if got := s.Class(traffic.Other, traffic.OffNode).Received; got != 1<<40+1<<30+1<<20+29_000 {
		t.Errorf("the total is %d bytes, want all there ever was", got)
	}
	if s.Attributed[traffic.Receive] != 29_000 || s.Residual[traffic.Receive] != 29*500 {
		t.Errorf("%d bytes of the devices have an owner, want 29000; the difference is %d, want %d", s.Attributed[traffic.Receive], s.Residual[traffic.Receive], 29*500)
	}
}

func TestBytesThatWaitForTheirCgroupAreNotUnattributed(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks(nil)
	b.tree = cgroupsOf{}
	k := kernel{}
	wire := uint64(5)
	var s *Snapshot
	for i := range 40 {
		if i == 10 {
			k[bpf.Key{Cgroup: 99, Locality: traffic.OffNode}] = received(1 << 30)
			wire += 1 << 30
		}
		r := d.read(k)
		r.devices = device(wire, 0)
		s = b.close(r, k)
		d.pass(sampleFast)
	}
	if s.Unattributed[traffic.Receive] != 0 || s.Attributed[traffic.Receive] != 1<<30 {
		t.Errorf("%d bytes are unattributed and %d are not, want 0 and %d", s.Unattributed[traffic.Receive], s.Attributed[traffic.Receive], 1<<30)
	}
}

func TestShortLivedPodsLeaveNothingThatGrows(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks(nil)
	tree := cgroupsOf{}
	b.tree = tree
	k := kernel{}
	var s *Snapshot
	const pods = 5000
	for i := range uint64(pods) {
		id := 1000 + i
		uid := fmt.Sprintf("0f9a1b2c-0000-4000-8000-%012x", i)
		tree[id] = podPath(uid)
		k[bpf.Key{Cgroup: id, Locality: traffic.OffNode}] = received(10)
		s = b.close(d.read(k), k)
		delete(tree, id)
		d.pass(time.Second)
		if most := 64; len(k) > most {
			t.Fatalf("after %d pods the kernel has %d keys, want at most %d", i, len(k), most)
		}
	}
	if got := s.Class(traffic.Other, traffic.OffNode).Received; got != pods*10 {
		t.Errorf("%d bytes in all, want %d", got, pods*10)
	}
	if most := 700; len(s.Shares) > most || len(b.groups) > most || len(b.accounts) > most {
		t.Errorf("%d shares, %d cgroups, %d accounts, want at most %d each", len(s.Shares), len(b.groups), len(b.accounts), most)
	}
}

func TestSharesHaveABoundAndLoseNoByte(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks(nil)
	tree := cgroupsOf{}
	b.tree = tree
	k := kernel{}
	for i := range uint64(maxShares + 500) {
		tree[1000+i] = podPath(fmt.Sprintf("0f9a1b2c-0000-4000-8000-%012x", i))
		k[bpf.Key{Cgroup: 1000 + i, Locality: traffic.OffNode}] = received(1)
	}
	s := b.close(d.read(k), k)
	var sum uint64
	for _, share := range s.Shares {
		sum += share.Received
	}
	if len(s.Shares) > maxShares || sum != maxShares+500 {
		t.Errorf("%d shares of %d bytes, want at most %d of %d", len(s.Shares), sum, maxShares, maxShares+500)
	}
}

func TestLiveLatencyIsThatOfServingConnectionsOffTheNodeIfThereAreAny(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks(nil)
	b.tree = cgroupsOf{10: podPath(uidA), 20: "/user.slice"}
	r := d.read(kernel{}, Pod{UID: uidA, Engine: true})
	for _, row := range []bpf.Row{
		{Cgroup: 10, RTT: 3 * time.Millisecond, Locality: traffic.SameNode},
		{Cgroup: 20, RTT: time.Second, Locality: traffic.OffNode},
		{Cgroup: 20, RTT: 5 * time.Millisecond, Class: traffic.Serving, Locality: traffic.SameNode},
		{Cgroup: 10, RTT: time.Second, Class: traffic.Weights, Locality: traffic.OffNode},
		{Cgroup: 10, Locality: traffic.OffNode}, // has no round trip yet
	} {
		r.row(row)
	}
	live := b.close(r, nil).Live
	if live.Connections != 2 || live.RTT.Quantile(1).Round(time.Millisecond) != 5*time.Millisecond {
		t.Errorf("%d connections, slowest %v, want 2 and 5ms", live.Connections, live.RTT.Quantile(1))
	}
	r.row(bpf.Row{Cgroup: 10, RTT: 20 * time.Millisecond, Locality: traffic.OffNode, Retransmitted: 9})
	live = b.close(r, nil).Live
	if got := live.RTT.Quantile(0.5); live.Connections != 1 || got < 19*time.Millisecond || got > 21*time.Millisecond || live.Retransmitted != 9 {
		t.Errorf("%d connections at %v with %d bytes repeated, want 1 at 20ms with 9", live.Connections, got, live.Retransmitted)
	}
}

func TestANodeWithoutDevicesIsSaidToBeOne(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks(nil)
	b.tree = cgroupsOf{10: podPath(uidA)}
	r := d.read(kernel{})
	if s := b.close(r, nil); s.Sight != SightPartial || !strings.Contains(s.Reason, "devices: no network device") {
		t.Errorf("sight is %s, reason %q", s.Sight, s.Reason)
	}
	r.devices = device(1, 1)
	if s := b.close(r, nil); s.Sight != SightFull {
		t.Errorf("with a device the sight is %s, reason %q", s.Sight, s.Reason)
	}
}

func TestAKubeletOnCgroupV1IsSaidToBeOne(t *testing.T) {
	t.Parallel()
	d, b := newDay(), newBooks(nil)
	b.tree = cgroupsOf{1: "/"}
	k := kernel{{Cgroup: 1, Locality: traffic.OffNode}: received(5)}
	s := b.close(d.read(k, Pod{UID: uidA}), k)
	if s.Sight != SightPartial || s.Reason == "" {
		t.Errorf("sight is %s, reason %q", s.Sight, s.Reason)
	}
}
