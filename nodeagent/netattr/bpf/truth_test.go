//go:build root

package bpf

import (
	"math"
	"net"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sync/errgroup"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/test/netns"
	"github.com/hearth-dev/hearth/test/netns/mover"
)

// three makes a node, another, and a router between them. Addresses of the
// others are those of families.
func three(t *testing.T) (node, router, other *netns.Namespace) {
	t.Helper()
	node, router, other = netns.New(t), netns.New(t), netns.New(t)
	netns.Pair(t, node, "eth0", prefixes("10.77.0.2/24", "fd77::2/64"), router, "node", prefixes("10.77.0.254/24", "fd77::fe/64"))
	netns.Pair(t, other, "eth0", prefixes("10.78.0.1/24", "fd78::1/64"), router, "other", prefixes("10.78.0.254/24", "fd78::fe/64"))
	router.Set(t, "ipv4/ip_forward", "1")
	router.Set(t, "ipv6/conf/all/forwarding", "1")
	for _, route := range []struct {
		n      *netns.Namespace
		to, by string
	}{
		{node, "10.78.0.0/24", "10.77.0.254"},
		{node, "fd78::/64", "fd77::fe"},
		{other, "10.77.0.0/24", "10.78.0.254"},
		{other, "fd77::/64", "fd78::fe"},
	} {
		route.n.Route(t, netip.MustParsePrefix(route.to), netip.MustParseAddr(route.by))
	}
	return node, router, other
}

// others are addresses of the other node of three.
var others = []string{"10.78.0.1", "fd78::1"}

// lose makes a router drop one in so many packets of some size that arrive.
func lose(t *testing.T, router *netns.Namespace, oneIn int32) {
	t.Helper()
	onPackets(t, router, []string{"node", "other"}, asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, 0, asm.Word),
		asm.LoadMem(asm.R3, asm.R1, 4, asm.Word),
		asm.Add.Imm(asm.R2, 1000),
		asm.JGT.Reg(asm.R2, asm.R3, "pass"),
		asm.FnGetPrandomU32.Call(),
		asm.Mod.Imm(asm.R0, oneIn),
		asm.JNE.Imm(asm.R0, 0, "pass"),
		asm.Mov.Imm(asm.R0, 1), // XDP_DROP
		asm.Return(),
		asm.Mov.Imm(asm.R0, 2).WithSymbol("pass"), // XDP_PASS
		asm.Return(),
	})
}

// wire adds up what passed the device of a node, by its counts.
func wire(counts map[Key]traffic.Counts) netns.Counters {
	var w netns.Counters
	for key, c := range counts {
		if key.Locality == traffic.OffNode {
			w.Received += c.Wire(traffic.Receive)
			w.Transmitted += c.Wire(traffic.Transmit)
		}
	}
	return w
}

// near fails where a count is not within a part of what it should be.
func near(t *testing.T, what string, got, want uint64, part float64) {
	t.Helper()
	off := math.Abs(float64(got)-float64(want)) / float64(want)
	t.Logf("%s: %d of %d, off by %.4f %%", what, got, want, 100*off)
	if off > part {
		t.Errorf("%s: counted %d, want %d: off by %.3f %%, want at most %.3f %%", what, got, want, 100*off, 100*part)
	}
}

// group is a cgroup with the movers in it.
type group struct {
	cgroup netns.Cgroup
	movers []*mover.Process
}

func (g group) totals() mover.Counts {
	var all mover.Counts
	for _, m := range g.movers {
		totals := m.Totals()
		all.Sent += totals.Sent
		all.Received += totals.Received
	}
	return all
}

func TestSixteenProcessesInEightCgroupsHaveWhatTheyMovedAndDevicesHaveTheSum(t *testing.T) {
	size := uint64(24 << 20)
	if testing.Short() {
		size = 1 << 20
	}
	node, _, other := three(t)
	root, away := netns.NewCgroup(t), netns.NewCgroup(t)
	p := opened(t, Options{Scope: root.ID, Datagrams: root.Path})
	whole := opened(t, Options{})

	remote := mover.Start(t, other, away)
	local := mover.Start(t, node, root.Below(t, "local"))
	var tcp, udp []string
	for _, address := range others {
		tcp = append(tcp, remote.Listen(mover.Socket{Address: net.JoinHostPort(address, "0")}))
		var at string
		remote.Do("End.Answer", mover.Datagrams{Address: net.JoinHostPort(address, "0"), Down: 700}, &at)
		udp = append(udp, at)
	}
	here := local.Listen(mover.Socket{Address: "10.77.0.2:0"})

	before, far := node.Device(t, "eth0"), other.Device(t, "eth0")
	groups := make([]group, 8)
	var all errgroup.Group
	for i := range 16 {
		g := &groups[i%8]
		if g.movers == nil {
			g.cgroup = root.Below(t, "pod"+string(rune('0'+i%8)))
		}
		m := mover.Start(t, node, g.cgroup)
		g.movers = append(g.movers, m)
		all.Go(func() error {
			way := mover.Ways()[i%len(mover.Ways())]
			up, down := size/8, size
			if i%3 == 0 {
				up, down = size, size/8
			}
			steps := []struct {
				method string
				args   any
			}{
				{"End.Dial", mover.Socket{Address: tcp[i%2], Count: 2}},
				{"End.Exchange", mover.Request{Up: up, Down: down, Way: way}},
				{"End.Ask", mover.Datagrams{Address: udp[(i+1)%2], Count: 300, Up: 1200}},
				{"End.Churn", mover.Churn{Socket: mover.Socket{Address: here, Count: 20}, AtOnce: 4, Request: mover.Request{Up: 1000, Down: 30_000, Way: way}}},
				{"End.Hangup", false},
			}
			for _, step := range steps {
				if err := m.Try(step.method, step.args, new(mover.Nothing)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		t.Fatal(err)
	}
	remote.Ended(32)
	for _, g := range groups {
		exactly(t, p, in(g.cgroup), g.totals())
	}
	counts := walked(t, p, func(Key) bool { return true })
	after, further := node.Device(t, "eth0"), other.Device(t, "eth0")
	w := wire(counts)
	near(t, "transmitted", w.Transmitted, after.Transmitted-before.Transmitted, 0.001)
	// What the other node repeats though nothing was lost arrives twice, and is
	// payload once.
	repeats := sum(walked(t, whole, in(away))).Retransmitted
	near(t, "received", w.Received+repeats, after.Received-before.Received, 0.001)
	near(t, "transmitted, as the other node received it", w.Transmitted, further.Received-far.Received, 0.001)
	var sent, received uint64
	for key, c := range counts {
		if key.Transport == traffic.NonTCP {
			sent, received = sent+c.Transmitted, received+c.Received
		}
	}
	if sent != 16*300*1200 || received != 16*300*700 {
		t.Errorf("datagrams: %d sent and %d received, want %d and %d", sent, received, 16*300*1200, 16*300*700)
	}
}

func TestRepeatsAreNamedAndPayloadIsStillExact(t *testing.T) {
	size := uint64(8 << 20)
	if testing.Short() {
		size = 2 << 20
	}
	node, router, other := three(t)
	lose(t, router, 200)
	root, away := netns.NewCgroup(t), netns.NewCgroup(t)
	p := opened(t, Options{Scope: root.ID})
	var repeats uint64
	for _, address := range others {
		before := node.Device(t, "eth0")
		counted := wire(walked(t, p, func(Key) bool { return true }))
		ours := root.Below(t, "")
		serve, call := mover.Start(t, other, away), mover.Start(t, node, ours)
		call.Dial(mover.Socket{Address: serve.Listen(mover.Socket{Address: net.JoinHostPort(address, "0")}), Count: 4})
		call.Exchange(mover.Request{Up: size, Down: size})
		call.Hangup(false)
		serve.Ended(4)
		c := exactly(t, p, in(ours), call.Totals())
		if c.Retransmitted == 0 {
			t.Errorf("%s: no repeats, though packets were lost", address)
		}
		repeats += c.Retransmitted
		after, w := node.Device(t, "eth0"), wire(walked(t, p, func(Key) bool { return true }))
		// Acknowledgements tell of each loss in options, which headers have not in.
		near(t, "transmitted to "+address, w.Transmitted-counted.Transmitted, after.Transmitted-before.Transmitted, 0.005)
	}
	t.Logf("%d bytes were sent again", repeats)
}

func TestWhatTheNodesOwnQueueDropsIsNotCountedTwice(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
	serve, call := mover.Start(t, server, theirs), mover.Start(t, client, ours)
	address := serve.Listen(mover.Socket{Address: "10.77.0.1:0"})
	call.Dial(mover.Socket{Address: address, Count: 8})
	// TCP hears of these drops as it hears of a full queue, and sends the segment
	// later as if for the first time.
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.CGroupSKB, AttachType: ebpf.AttachCGroupInetEgress, License: "GPL", Instructions: asm.Instructions{
		asm.FnGetPrandomU32.Call(),
		asm.Mod.Imm(asm.R0, 50),
		asm.JNE.Imm(asm.R0, 0, "pass"),
		asm.Mov.Imm(asm.R0, 0),
		asm.Return(),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("pass"),
		asm.Return(),
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = program.Close() }()
	l, err := link.AttachCgroup(link.CgroupOptions{Path: ours.Path, Attach: ebpf.AttachCGroupInetEgress, Program: program})
	if err != nil {
		t.Fatal(err)
	}
	call.Exchange(mover.Request{Up: uint64(shorter(4<<20, 1<<20)), Down: 1000})
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	exactly(t, p, in(ours), call.Totals())
	call.Exchange(mover.Request{Up: 70_000, Down: 1000, Half: true})
	exactly(t, p, in(ours), call.Totals())
	call.Hangup(false)
	serve.Ended(8)
	exactly(t, p, in(ours), call.Totals())
	exactly(t, p, in(theirs), serve.Totals())
}
