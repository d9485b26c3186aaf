//go:build root

package bpf

import (
	"testing"

	"github.com/hearth-dev/hearth/test/netns"
	"github.com/hearth-dev/hearth/test/netns/mover"
)

// shorter gives a smaller number in a short run.
func shorter(full, short int) int {
	if testing.Short() {
		return short
	}
	return full
}

func TestConnectionsThatComeAndGoAreCountedToTheByte(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	for _, reset := range []bool{false, true} {
		ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
		serve, call := mover.Start(t, server, theirs), mover.Start(t, client, ours)
		count := shorter(5000, 500)
		call.Churn(mover.Churn{
			Socket: mover.Socket{Address: serve.Listen(mover.Socket{Address: "10.77.0.1:0"}), Count: count}, AtOnce: 16,
			Request: mover.Request{Up: 333, Down: 4444}, Reset: reset,
		})
		serve.Ended(count)
		exactly(t, p, in(ours), call.Totals())
		exactly(t, p, in(theirs), serve.Totals())
	}
}

func TestASocketThatIsConnectedAgainIsCountedAnew(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
	serve, call := mover.Start(t, server, theirs), mover.Start(t, client, ours)
	var totals mover.Counts
	call.Do("Reuser.Run", Reuse{
		Address: serve.Listen(mover.Socket{Address: "10.77.0.1:0"}), Times: 30, Request: mover.Request{Up: 1234, Down: 200_000},
	}, &totals)
	serve.Ended(30)
	exactly(t, p, in(ours), totals)
	exactly(t, p, in(theirs), serve.Totals())
}

func TestAConnectionThatIsRefusedHasNoPayload(t *testing.T) {
	client, _ := two(t)
	p := opened(t, Options{})
	ours := netns.NewCgroup(t)
	call := mover.Start(t, client, ours)
	for range 20 {
		if err := call.Try("End.Dial", mover.Socket{Address: "10.77.0.1:9"}, new(mover.Nothing)); err == nil {
			t.Fatal("connected where nothing listens")
		}
	}
	exactly(t, p, in(ours), mover.Counts{})
}

func TestAConnectionThatIsResetAmidATransferHasWhatReallyPassed(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	for range shorter(5, 2) {
		ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
		serve, call := mover.Start(t, server, theirs), mover.Start(t, client, ours)
		call.Dial(mover.Socket{Address: serve.Listen(mover.Socket{Address: "10.77.0.1:0"}), Count: 10})
		call.Stream(mover.Request{Up: 1 << 20, Down: 1 << 20})
		eventually(t, func() error {
			if call.Totals().Received < 8<<20 {
				return errNoWalk
			}
			return nil
		})
		call.Hangup(true)
		if call.Try("End.Quiet", mover.Nothing(0), new(mover.Nothing)) == nil {
			t.Error("no request was broken off")
		}
		serve.Ended(10)
		client, server := sum(walked(t, p, in(ours))), sum(walked(t, p, in(theirs)))
		called, served := call.Totals(), serve.Totals()
		// What a program wrote may never have been sent, and what arrived may never
		// have been read.
		if client.Transmitted > called.Sent || server.Transmitted > served.Sent || client.Received < called.Received || server.Received < served.Received {
			t.Errorf("counted %+v and %+v; the programs moved %+v and %+v", client, server, called, served)
		}
		if client.Received > server.Transmitted || server.Received > client.Transmitted {
			t.Errorf("more arrived than was sent: %+v and %+v", client, server)
		}
		again := sum(walked(t, p, in(ours)))
		if again != client {
			t.Errorf("counted %+v after %+v, though all has ended", again, client)
		}
	}
}

func TestManyConnectionsAreWalkedAndCountedToTheByte(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	const pairs = 4
	each := shorter(12_500, 500) // 100,000 sockets
	type pair struct {
		ours, theirs netns.Cgroup
		serve, call  *mover.Process
	}
	var all [pairs]pair
	for i := range all {
		ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
		all[i] = pair{ours, theirs, mover.Start(t, server, theirs), mover.Start(t, client, ours)}
		all[i].call.Dial(mover.Socket{Address: all[i].serve.Listen(mover.Socket{Address: "10.77.0.1:0"}), Count: each})
		all[i].serve.Do("End.Accepted", each, new(mover.Nothing))
	}
	for range 2 {
		for _, pair := range all {
			pair.call.Exchange(mover.Request{Up: 50, Down: 3000})
		}
		rows := 0
		if err := p.Walk(func(r Row) {
			for _, pair := range all {
				if r.Cgroup == pair.ours.ID || r.Cgroup == pair.theirs.ID {
					rows++
				}
			}
		}); err != nil {
			t.Fatal(err)
		}
		// The kernel skips one where others come and go while it pauses, and has it in
		// the next walk.
		if want := 2 * pairs * each; rows > want || rows < want-want/2000 {
			t.Errorf("the walk gave %d rows, want one for each of %d sockets", rows, want)
		}
		for _, pair := range all {
			exactly(t, p, in(pair.ours), pair.call.Totals())
			exactly(t, p, in(pair.theirs), pair.serve.Totals())
		}
	}
	for _, pair := range all {
		pair.call.Hangup(false)
		pair.serve.Ended(each)
		exactly(t, p, in(pair.ours), pair.call.Totals())
		exactly(t, p, in(pair.theirs), pair.serve.Totals())
	}
	if status, err := p.Status(); err != nil || status.Untracked != 0 || status.KeyLost != 0 {
		t.Errorf("status %+v, %v", status, err)
	}
}

func TestCgroupsThatComeAndGoUnderTrafficKeepTheirCounts(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	theirs := netns.NewCgroup(t)
	serve := mover.Start(t, server, theirs)
	address := serve.Listen(mover.Socket{Address: "10.77.0.1:0"})
	want := map[uint64]mover.Counts{}
	rounds := shorter(40, 8)
	for range rounds {
		group := netns.NewCgroup(t)
		call := mover.Start(t, client, group)
		call.Dial(mover.Socket{Address: address, Count: 3})
		call.Exchange(mover.Request{Up: 7000, Down: 90_000})
		want[group.ID] = call.Totals()
		// Its connections outlast it by moments: the kernel closes them.
		call.Kill()
		if err := group.Remove(); err != nil {
			t.Fatal(err)
		}
	}
	serve.Ended(3 * rounds)
	for id, totals := range want {
		exactly(t, p, func(k Key) bool { return k.Cgroup == id }, totals)
	}
	exactly(t, p, in(theirs), serve.Totals())
}
