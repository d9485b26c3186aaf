//go:build root

package bpf

import (
	"net"
	"testing"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/test/netns"
	"github.com/hearth-dev/hearth/test/netns/mover"
)

func TestDatagramsAreCountedToTheByteAndTCPOnce(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{Datagrams: netns.CgroupRoot(t).Path})
	for _, family := range families {
		for _, size := range []int{1, 1200, 20_000} { // the last in fragments
			ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
			serve, call := mover.Start(t, server, theirs), mover.Start(t, client, ours)
			var at string
			serve.Do("End.Answer", mover.Datagrams{Address: net.JoinHostPort(family.server, "0"), Down: size / 2}, &at)
			if err := p.SetPorts(map[uint16]traffic.Class{portOf(t, at): traffic.KV}); err != nil {
				t.Fatal(err)
			}
			call.Do("End.Ask", mover.Datagrams{Address: at, Count: 40, Up: size}, new(mover.Nothing))
			call.Dial(mover.Socket{Address: serve.Listen(mover.Socket{Address: net.JoinHostPort(family.server, "0")})})
			call.Exchange(mover.Request{Up: 1000, Down: 100_000})
			call.Hangup(false)
			serve.Ended(1)
			exactly(t, p, in(ours), call.Totals())
			exactly(t, p, in(theirs), serve.Totals())
			for key, c := range walked(t, p, in(theirs)) {
				if key.Transport == traffic.NonTCP && c.Received > 0 && (key.Class != traffic.KV || key.Locality != traffic.SameNode) {
					t.Errorf("datagrams of %d bytes at the service port: %+v, want kv of same_node", size, key)
				}
			}
		}
	}
}

func TestWhoOnlyReceivesDatagramsIsKnownToBeOfThisNode(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{Datagrams: netns.CgroupRoot(t).Path})
	ours := netns.NewCgroup(t)
	call := mover.Start(t, client, ours)
	serve := mover.Start(t, server, netns.NewCgroup(t))
	var at string
	serve.Do("End.Answer", mover.Datagrams{Address: "10.77.0.1:0"}, &at)
	call.Do("End.Ask", mover.Datagrams{Address: at, Count: 10, Up: 1000}, new(mover.Nothing))
	var near, far uint64
	for key, c := range walked(t, p, in(ours)) {
		if key.Locality == traffic.SameNode {
			near += c.Transmitted
		} else {
			far += c.Transmitted
		}
	}
	// Nobody had used the address before the first.
	if far > 1000 || near+far != 10_000 {
		t.Errorf("%d bytes within the node and %d beyond, want 9000 at least of 10000 within", near, far)
	}
}
