//go:build root

package bpf

import (
	"fmt"
	"net"
	"testing"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/test/netns"
	"github.com/hearth-dev/hearth/test/netns/mover"
)

func since(now, before mover.Counts) mover.Counts {
	return mover.Counts{Sent: now.Sent - before.Sent, Received: now.Received - before.Received}
}

func TestOfConnectionsOlderThanTheProbeOnlyWhatComesAfterIsCounted(t *testing.T) {
	client, server := two(t)
	for _, family := range families {
		ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
		serve, call := mover.Start(t, server, theirs), mover.Start(t, client, ours)
		call.Dial(mover.Socket{Address: serve.Listen(mover.Socket{Address: net.JoinHostPort(family.server, "0")}), Count: 10})
		call.Exchange(mover.Request{Up: 500_000, Down: 70_000})
		sent, answered := call.Totals(), mover.Counts{Sent: 10 * 70_000, Received: 10 * (500_000 + mover.HeadSize)}
		eventually(t, func() error {
			if totals := serve.Totals(); totals != answered {
				return fmt.Errorf("the books say %+v, want %+v", totals, answered)
			}
			return nil
		})

		p := opened(t, Options{})
		if status, err := p.Status(); err != nil || status.Seeded < 20 {
			t.Errorf("%d connections were taken in (%v), want 20 at least", status.Seeded, err)
		}
		exactly(t, p, in(ours), mover.Counts{})
		exactly(t, p, in(theirs), mover.Counts{})
		call.Exchange(mover.Request{Up: 12_345, Down: 1 << 20, Way: mover.ZeroCopy})
		exactly(t, p, in(ours), since(call.Totals(), sent))
		// Ended by the other side first, whose FIN is seen now.
		serve.Do("End.Close", mover.Nothing(0), new(mover.Nothing))
		call.Hangup(false)
		exactly(t, p, in(ours), since(call.Totals(), sent))
		exactly(t, p, in(theirs), since(serve.Totals(), answered))
		for _, found := range [][]traffic.Locality{localities(walked(t, p, in(ours))), localities(walked(t, p, in(theirs)))} {
			if len(found) != 1 || found[0] != traffic.SameNode {
				t.Errorf("localities %v, want same_node alone", found)
			}
		}
	}
}

func TestAnOlderConnectionThatIsHalfClosedIsCountedFromThenOn(t *testing.T) {
	client, server := two(t)
	ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
	serve, call := mover.Start(t, server, theirs), mover.Start(t, client, ours)
	call.Dial(mover.Socket{Address: serve.Listen(mover.Socket{Address: "10.77.0.1:0"}), Count: 4})
	call.Exchange(mover.Request{Up: 1000, Down: 100_000, Half: true})
	p := opened(t, Options{})
	call.Hangup(false)
	serve.Ended(4)
	exactly(t, p, in(ours), mover.Counts{})
	exactly(t, p, in(theirs), mover.Counts{})
}

func TestServicePortsHoldForOlderConnectionsOnEitherSide(t *testing.T) {
	client, server := two(t)
	ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
	serve, call := mover.Start(t, server, theirs), mover.Start(t, client, ours)
	address := serve.Listen(mover.Socket{Address: "10.77.0.1:0"})
	pins := pinned(t)
	first := opened(t, Options{Pins: pins})
	if err := first.SetPorts(map[uint16]traffic.Class{portOf(t, address): traffic.Serving}); err != nil {
		t.Fatal(err)
	}
	// Ports outlast the program that sees connections, so the next finds these
	// older than itself and with a class.
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	unpinLinks(t, pins)
	call.Dial(mover.Socket{Address: address})
	p := opened(t, Options{Pins: pins})
	call.Exchange(mover.Request{Up: 10, Down: 10_000})
	call.Hangup(false)
	exactly(t, p, in(ours), call.Totals())
	for _, group := range []netns.Cgroup{ours, theirs} {
		if key := only(t, walked(t, p, in(group))); key.Class != traffic.Serving {
			t.Errorf("class %s, want serving", key.Class)
		}
	}
}
