//go:build root

package bpf

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/test/netns"
	"github.com/hearth-dev/hearth/test/netns/mover"
)

// only gives the one key that has payload.
func only(t *testing.T, counts map[Key]traffic.Counts) Key {
	t.Helper()
	var found []Key
	for key, c := range counts {
		if c.Received+c.Transmitted > 0 {
			found = append(found, key)
		}
	}
	if len(found) != 1 {
		t.Fatalf("keys with payload: %+v, want one", found)
	}
	return found[0]
}

// marked is an End of this process, each of whose sockets has a tag.
func marked(p *Probe, class traffic.Class, flight uint32) *mover.End {
	e := mover.NewEnd()
	e.Control = func(fd uintptr) error { return p.Tag(fd, class, flight) }
	return e
}

func ofFlight(flight uint32) func(Key) bool {
	return func(k Key) bool { return k.Flight == flight }
}

func portOf(t *testing.T, address string) uint16 {
	t.Helper()
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		t.Fatal(err)
	}
	return at.Port()
}

func TestASocketHasClassAndFlightOfItsTag(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	serve := mover.Start(t, server, netns.NewCgroup(t))
	for i, family := range families {
		flight := uint32(7000 + i)
		e := marked(p, traffic.Weights, flight)
		address := serve.Listen(mover.Socket{Address: net.JoinHostPort(family.server, "0")})
		if err := client.Do(func() error { return e.Dial(mover.Socket{Address: address, Count: 2}, nil) }); err != nil {
			t.Fatal(err)
		}
		if err := e.Exchange(mover.Request{Up: 10, Down: 1 << 20}, nil); err != nil {
			t.Fatal(err)
		}
		if err := e.Hangup(false, nil); err != nil {
			t.Fatal(err)
		}
		var totals mover.Counts
		_ = e.Totals(0, &totals)
		exactly(t, p, ofFlight(flight), totals)
		if key := only(t, walked(t, p, ofFlight(flight))); key.Class != traffic.Weights {
			t.Errorf("class %s, want weights", key.Class)
		}
	}
}

func TestAnAcceptedConnectionHasTheTagOfItsListener(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	ours := netns.NewCgroup(t)
	e, call := marked(p, traffic.KV, 7100), mover.Start(t, client, ours)
	var address string
	if err := server.Do(func() error { return e.Listen(mover.Socket{Address: "10.77.0.1:0"}, &address) }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close(0, nil) })
	call.Dial(mover.Socket{Address: address, Count: 20})
	call.Exchange(mover.Request{Up: 5000, Down: 5000})
	call.Hangup(false)
	if err := e.Ended(20, nil); err != nil {
		t.Fatal(err)
	}
	var totals mover.Counts
	_ = e.Totals(0, &totals)
	exactly(t, p, ofFlight(7100), totals)
	if key := only(t, walked(t, p, ofFlight(7100))); key.Class != traffic.KV {
		t.Errorf("class %s, want kv", key.Class)
	}
	exactly(t, p, in(ours), call.Totals())
	if key := only(t, walked(t, p, in(ours))); key.Class != traffic.ByCgroup || key.Flight != 0 {
		t.Errorf("the other end is %+v, want it without tag", key)
	}
}

func TestASocketOfMPTCPCannotBeTagged(t *testing.T) {
	p := opened(t, Options{})
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := p.Tag(uintptr(fd), traffic.KV, 7200); !errors.Is(err, errMultipath) {
		t.Errorf("Tag: %v, want %v", err, errMultipath)
	}
}

func TestAConnectionOfMPTCPIsCountedInItsCgroup(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
	serve, call := mover.Start(t, server, theirs), mover.Start(t, client, ours)
	call.Dial(mover.Socket{Address: serve.Listen(mover.Socket{Address: "10.77.0.1:0", Multipath: true}), Multipath: true})
	call.Exchange(mover.Request{Up: 1 << 20, Down: 1 << 20})
	call.Hangup(false)
	serve.Ended(1)
	// A subflow carries what MPTCP makes of the program's bytes: each once, and
	// perhaps a byte more for each probe of a window that is shut. Such a byte is
	// payload to both ends, as no FIN is.
	const probes = 64
	up, down := call.Totals(), serve.Totals()
	eventually(t, func() error {
		a, b := payload(sum(walked(t, p, in(ours)))), payload(sum(walked(t, p, in(theirs))))
		if a.Sent != b.Received || b.Sent != a.Received {
			return fmt.Errorf("one end has %+v and the other %+v", a, b)
		}
		if a.Sent < up.Sent || a.Sent > up.Sent+probes || b.Sent < down.Sent || b.Sent > down.Sent+probes {
			return fmt.Errorf("counted %+v and %+v, want %+v and %+v and at most %d more", a, b, up, down, probes)
		}
		return nil
	})
}

func TestATagAfterConnectIsRefused(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	serve := mover.Start(t, server, netns.NewCgroup(t))
	address := serve.Listen(mover.Socket{Address: "10.77.0.1:0"})
	var conn net.Conn
	if err := client.Do(func() (err error) { conn, err = net.Dial("tcp", address); return err }); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) { err = p.Tag(fd, traffic.Weights, 7300) }); err != nil {
		t.Fatal(err)
	}
	if err == nil {
		t.Error("tagged a connection whose bytes are counted already")
	}
}

func TestClassIsDecidedByTagMarkPortAndRangeInThisOrder(t *testing.T) {
	const markBase = 0x4ea0
	for _, family := range families {
		t.Run(family.name, func(t *testing.T) {
			client, server := two(t)
			p := opened(t, Options{MarkBase: markBase})
			own := netip.MustParseAddr(family.server)
			both, err := own.Prefix(own.BitLen() - 8)
			if err != nil {
				t.Fatal(err)
			}
			ranges := map[netip.Prefix]traffic.Class{
				netip.PrefixFrom(own, own.BitLen()):    traffic.Image,
				both:                                   traffic.KV,
				netip.MustParsePrefix("0.0.0.0/0"):     traffic.Weights,
				netip.MustParsePrefix("::/0"):          traffic.Weights,
				netip.MustParsePrefix("2001:db8::/32"): traffic.Weights,
			}
			theirs := netns.NewCgroup(t)
			serve := mover.Start(t, server, theirs)
			at := net.JoinHostPort(family.server, "0")
			known, unknown, kv := serve.Listen(mover.Socket{Address: at}), serve.Listen(mover.Socket{Address: at}), serve.Listen(mover.Socket{Address: at, Mark: markBase + int(traffic.KV)})
			ports := map[uint16]traffic.Class{portOf(t, known): traffic.Serving}
			for i, one := range []struct {
				what           string
				tagged         bool
				mark           int
				address        string
				ports, ranges  bool
				client, server traffic.Class
			}{
				{"nothing", false, 0, unknown, false, false, traffic.ByCgroup, traffic.ByCgroup},
				{"the narrowest range", false, 0, unknown, true, true, traffic.Image, traffic.KV},
				{"port", false, 0, known, true, false, traffic.Serving, traffic.Serving},
				{"port and range", false, 0, known, true, true, traffic.Serving, traffic.Serving},
				{"mark, port and range", false, markBase + int(traffic.KV), known, true, true, traffic.KV, traffic.Serving},
				{"a mark of others", false, markBase + 6, known, true, true, traffic.Serving, traffic.Serving},
				{"a mark below", false, markBase, unknown, true, false, traffic.ByCgroup, traffic.ByCgroup},
				{"mark of the listener", false, 0, kv, false, false, traffic.ByCgroup, traffic.KV},
				{"tag, mark, port and range", true, markBase + int(traffic.KV), known, true, true, traffic.Weights, traffic.Serving},
			} {
				if err := p.SetPorts(map[uint16]traffic.Class{}); err != nil {
					t.Fatal(err)
				}
				if err := p.SetRanges(nil); err != nil {
					t.Fatal(err)
				}
				if one.ports {
					if err := p.SetPorts(ports); err != nil {
						t.Fatal(err)
					}
				}
				if one.ranges {
					if err := p.SetRanges(ranges); err != nil {
						t.Fatal(err)
					}
				}
				socket := mover.Socket{Address: one.address, Mark: one.mark}
				request := mover.Request{Up: 100, Down: 900}
				before := walked(t, p, in(theirs))
				var key Key
				if one.tagged {
					e := marked(p, traffic.Weights, uint32(7400+i))
					if err := client.Do(func() error { return e.Dial(socket, nil) }); err != nil {
						t.Fatal(err)
					}
					if err := e.Exchange(request, nil); err != nil {
						t.Fatal(err)
					}
					if err := e.Hangup(false, nil); err != nil {
						t.Fatal(err)
					}
					key = only(t, walked(t, p, ofFlight(uint32(7400+i))))
				} else {
					ours := netns.NewCgroup(t)
					call := mover.Start(t, client, ours)
					call.Dial(socket)
					call.Exchange(request)
					call.Hangup(false)
					exactly(t, p, in(ours), call.Totals())
					key = only(t, walked(t, p, in(ours)))
				}
				if key.Class != one.client {
					t.Errorf("%s: the client's class is %s, want %s", one.what, key.Class, one.client)
				}
				serve.Ended(i + 1)
				exactly(t, p, in(theirs), serve.Totals())
				grown := walked(t, p, in(theirs))
				for key, c := range grown {
					grown[key] = c.Minus(before[key])
				}
				if key := only(t, grown); key.Class != one.server {
					t.Errorf("%s: the server's class is %s, want %s", one.what, key.Class, one.server)
				}
			}
		})
	}
}

func TestTablesOfPortsAndRangesHoldWhatWasSetLast(t *testing.T) {
	p := opened(t, Options{})
	many := map[uint16]traffic.Class{}
	for i := range MaxPorts {
		many[uint16(i)] = traffic.Serving
	}
	for _, ports := range []map[uint16]traffic.Class{many, {80: traffic.KV}, {}, {443: traffic.Image, 80: traffic.Serving}} {
		if err := p.SetPorts(ports); err != nil {
			t.Fatal(err)
		}
		got := map[uint16]traffic.Class{}
		var port, class uint32
		for it := p.maps.Ports.Iterate(); it.Next(&port, &class); {
			got[uint16(port)] = traffic.Class(class)
		}
		if len(got) != len(ports) {
			t.Fatalf("%d ports are set, want %d", len(got), len(ports))
		}
		for port, class := range ports {
			if got[port] != class {
				t.Errorf("port %d is %s, want %s", port, got[port], class)
			}
		}
	}
	ranges := map[netip.Prefix]traffic.Class{}
	for i := range MaxRanges {
		ranges[netip.MustParsePrefix("10."+strconv.Itoa(i/256)+"."+strconv.Itoa(i%256)+".0/24")] = traffic.Weights
	}
	for _, ranges := range []map[netip.Prefix]traffic.Class{ranges, {}, {netip.MustParsePrefix("0.0.0.0/0"): traffic.KV, netip.MustParsePrefix("::/0"): traffic.Image}} {
		if err := p.SetRanges(ranges); err != nil {
			t.Fatal(err)
		}
		got := 0
		var r netattrRange
		var class uint32
		for it := p.maps.Ranges.Iterate(); it.Next(&r, &class); got++ {
		}
		if got != len(ranges) {
			t.Fatalf("%d ranges are set, want %d", got, len(ranges))
		}
	}
	many[MaxPorts] = traffic.KV
	if p.SetPorts(many) == nil {
		t.Error("set more ports than there is room for")
	}
}
