//go:build root

package bpf

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/test/netns"
	"github.com/hearth-dev/hearth/test/netns/mover"
)

func TestWhereKeysHaveNoRoomOwnersAreLostAndBytesAreNot(t *testing.T) {
	client, server := two(t)
	node, away := netns.NewCgroup(t), netns.NewCgroup(t)
	// In a scope of its own: what others here move has no room either.
	p := opened(t, Options{Scope: node.ID})
	ours := node.Below(t, "known")
	serve, call := mover.Start(t, server, away), mover.Start(t, client, ours)
	address := serve.Listen(mover.Socket{Address: "10.77.0.1:0"})
	call.Dial(mover.Socket{Address: address})
	call.Exchange(mover.Request{Up: 100, Down: 100_000})
	exactly(t, p, in(ours), call.Totals())

	filled := 0
	for ; ; filled++ {
		err := p.maps.Acct.Update(netattrKey{Cgroup: 1<<40 + uint64(filled)}, netattrCounts{}, ebpf.UpdateNoExist)
		if err != nil {
			t.Logf("full after %d keys: %v", filled, err)
			break
		}
	}
	if filled < MaxKeys/2 || filled > MaxKeys {
		t.Errorf("room for %d keys, want %d but for those of overflow", filled, MaxKeys)
	}
	late := node.Below(t, "late")
	other := mover.Start(t, client, late)
	other.Churn(mover.Churn{Socket: mover.Socket{Address: address, Count: 50}, AtOnce: 5, Request: mover.Request{Up: 100, Down: 10_000}})
	call.Exchange(mover.Request{Up: 100, Down: 100_000})
	exactly(t, p, func(k Key) bool { return k.Cgroup == 0 }, other.Totals())
	exactly(t, p, in(ours), call.Totals())
	if key := only(t, walked(t, p, func(k Key) bool { return k.Cgroup == 0 })); key.Locality != traffic.OffNode || key.Class != traffic.ByCgroup {
		t.Errorf("overflowed to %+v, want locality and class kept", key)
	}
	status, err := p.Status()
	if err != nil || status.KeyLost == 0 {
		t.Errorf("status %+v, %v: want keys lost", status, err)
	}
	// With room again, owners are known again.
	for i := range 100 {
		if err := p.maps.Acct.Delete(netattrKey{Cgroup: 1<<40 + uint64(i)}); err != nil {
			t.Fatal(err)
		}
	}
	before := other.Totals()
	other.Churn(mover.Churn{Socket: mover.Socket{Address: address, Count: 50}, AtOnce: 5, Request: mover.Request{Up: 100, Down: 10_000}})
	exactly(t, p, in(late), since(other.Totals(), before))
}

// optmem sets how much memory besides buffers sockets may have: in a namespace,
// or in older kernels, which have one for all, there, until the test ends.
func optmem(t *testing.T, n *netns.Namespace, bytes string) {
	t.Helper()
	const setting = "/proc/sys/net/core/optmem_max"
	err := n.Do(func() error { return os.WriteFile(setting, []byte(bytes), 0) })
	if errors.Is(err, fs.ErrNotExist) {
		var was []byte
		if was, err = os.ReadFile(setting); err == nil {
			t.Cleanup(func() { _ = os.WriteFile(setting, was, 0) })
			err = os.WriteFile(setting, []byte(bytes), 0)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestSocketsWithoutMemoryForATagAreRefusedItAndConnectionsWithoutAreTold(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	ours := netns.NewCgroup(t)
	serve, call := mover.Start(t, server, netns.NewCgroup(t)), mover.Start(t, client, ours)
	address := serve.Listen(mover.Socket{Address: "10.77.0.1:0"})
	optmem(t, client, "16")
	e := marked(p, traffic.Weights, 7700)
	err := client.Do(func() error { return e.Dial(mover.Socket{Address: address}, nil) })
	if err == nil || !strings.Contains(err.Error(), "mark socket as weights") || !strings.Contains(err.Error(), "net.core.optmem_max") {
		t.Errorf("tag: %v, want it refused for the lack of memory", err)
	}
	before, _ := p.Status()
	call.Dial(mover.Socket{Address: address, Count: 10})
	call.Exchange(mover.Request{Up: 100, Down: 1000})
	after, err := p.Status()
	if err != nil || after.Untracked-before.Untracked < 10 {
		t.Errorf("%d connections are told as not seen (%v), want 10", after.Untracked-before.Untracked, err)
	}
	exactly(t, p, in(ours), mover.Counts{})
	// With memory again a new connection is seen.
	optmem(t, client, "131072")
	was := call.Totals()
	call.Hangup(false)
	call.Dial(mover.Socket{Address: address})
	call.Exchange(mover.Request{Up: 100, Down: 1000})
	exactly(t, p, in(ours), since(call.Totals(), was))
}

func TestFoldingUnderTrafficLosesNothing(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	serve := mover.Start(t, server, netns.NewCgroup(t))
	address := serve.Listen(mover.Socket{Address: "10.77.0.1:0"})
	root := netns.CgroupRoot(t)
	// What lives: no tag but a class of its own, so that nobody else's is in it.
	const class = traffic.Image
	live := marked(p, class, 0)
	dial := func(e *mover.End) {
		t.Helper()
		if err := client.Do(func() error { return e.Dial(mover.Socket{Address: address}, nil) }); err != nil {
			t.Fatal(err)
		}
	}
	dial(live)
	if err := live.Stream(mover.Request{Up: 500, Down: 500}, nil); err != nil {
		t.Fatal(err)
	}
	mine := func(k Key) bool { return k.Class == class }
	want := mover.Counts{}
	for flight := range uint32(50) {
		e := marked(p, class, 7800+flight)
		dial(e)
		if err := e.Exchange(mover.Request{Up: 100, Down: 100_000}, nil); err != nil {
			t.Fatal(err)
		}
		if err := e.Hangup(false, nil); err != nil {
			t.Fatal(err)
		}
		var totals mover.Counts
		_ = e.Totals(0, &totals)
		want.Sent, want.Received = want.Sent+totals.Sent, want.Received+totals.Received
		exactly(t, p, ofFlight(7800+flight), totals)
		for key := range walked(t, p, ofFlight(7800+flight)) {
			into := key
			into.Flight = 0
			if err := p.Fold(key, into); err != nil {
				t.Fatal(err)
			}
		}
		exactly(t, p, ofFlight(7800+flight), mover.Counts{}) // but the headers of its last FIN
	}
	if err := live.Quiet(0, nil); err != nil {
		t.Fatal(err)
	}
	if err := live.Hangup(false, nil); err != nil {
		t.Fatal(err)
	}
	var totals mover.Counts
	_ = live.Totals(0, &totals)
	want.Sent, want.Received = want.Sent+totals.Sent, want.Received+totals.Received
	exactly(t, p, mine, want)
	counts := walked(t, p, mine)
	if key := only(t, counts); key.Flight != 0 || key.Cgroup == 0 || key.Cgroup == Folded {
		t.Errorf("folded to %+v, want the same cgroup (the root's is %d) without flight", key, root.ID)
	}
	// The cgroup goes: all of it moves on.
	key := only(t, counts)
	if err := p.Fold(key, Key{Cgroup: Folded, Class: key.Class, Locality: key.Locality, Transport: key.Transport}); err != nil {
		t.Fatal(err)
	}
	exactly(t, p, mine, want)
	if key := only(t, walked(t, p, mine)); key.Cgroup != Folded {
		t.Errorf("folded to %+v, want the cgroup of what is gone", key)
	}
}
