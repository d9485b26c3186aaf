//go:build root

package bpf

import (
	"net"
	"testing"

	"github.com/hearth-dev/hearth/test/netns"
	"github.com/hearth-dev/hearth/test/netns/mover"
)

func TestPayloadIsCountedToTheByteHoweverAProgramSendsAndReceives(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	for _, family := range families {
		for _, over := range []struct {
			name, address string
			from          *netns.Namespace
		}{{"a device", family.server, client}, {"loopback", family.loopback, server}} {
			for _, way := range mover.Ways() {
				t.Run(family.name+" over "+over.name+" by "+way.String(), func(t *testing.T) {
					ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
					serve, call := mover.Start(t, server, theirs), mover.Start(t, over.from, ours)
					call.Dial(mover.Socket{Address: serve.Listen(mover.Socket{Address: net.JoinHostPort(over.address, "0")}), Count: 3})
					call.Exchange(mover.Request{Up: 1<<20 + 17, Down: 2<<20 + 3, Way: way})
					call.Exchange(mover.Request{Up: 1, Down: 70001, Way: way})
					call.Hangup(false)
					serve.Ended(3)
					exactly(t, p, in(ours), call.Totals())
					exactly(t, p, in(theirs), serve.Totals())
				})
			}
		}
	}
}

func TestAConnectionIsCountedWhileItIsOpen(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
	serve, call := mover.Start(t, server, theirs), mover.Start(t, client, ours)
	call.Dial(mover.Socket{Address: serve.Listen(mover.Socket{Address: "10.77.0.1:0"})})
	for range 3 {
		call.Exchange(mover.Request{Up: 100, Down: 1 << 20})
		exactly(t, p, in(ours), call.Totals())
		exactly(t, p, in(theirs), serve.Totals())
	}
}

func TestTheByteOfAFINIsNobodys(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
	serve, call := mover.Start(t, server, theirs), mover.Start(t, client, ours)
	address := serve.Listen(mover.Socket{Address: "10.77.0.1:0"})
	// Ended without a request: nothing was ever received but the FIN.
	call.Dial(mover.Socket{Address: address})
	call.Hangup(false)
	serve.Ended(1)
	exactly(t, p, in(theirs), mover.Counts{})
	// Half closed, and answered after that.
	call.Dial(mover.Socket{Address: address, Count: 8})
	call.Exchange(mover.Request{Up: 5000, Down: 300_000, Half: true})
	exactly(t, p, in(ours), call.Totals())
	exactly(t, p, in(theirs), serve.Totals())
	call.Hangup(false)
	serve.Ended(9)
	exactly(t, p, in(ours), call.Totals())
	exactly(t, p, in(theirs), serve.Totals())
}
