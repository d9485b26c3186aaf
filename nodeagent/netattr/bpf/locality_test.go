//go:build root

package bpf

import (
	"net"
	"net/netip"
	"slices"
	"strconv"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/test/netns"
	"github.com/hearth-dev/hearth/test/netns/mover"
)

// met makes one connection with some payload and gives the localities of its ends.
func met(t *testing.T, p *Probe, from, to *netns.Namespace, ours, theirs netns.Cgroup, listen, dial string) (client, server []traffic.Locality) {
	t.Helper()
	serve, call := mover.Start(t, to, theirs), mover.Start(t, from, ours)
	_, port, err := net.SplitHostPort(serve.Listen(mover.Socket{Address: net.JoinHostPort(listen, "0")}))
	if err != nil {
		t.Fatal(err)
	}
	call.Dial(mover.Socket{Address: net.JoinHostPort(dial, port)})
	call.Exchange(mover.Request{Up: 1000, Down: 100_000})
	call.Hangup(false)
	serve.Ended(1)
	return localities(walked(t, p, in(ours))), localities(walked(t, p, in(theirs)))
}

func wantLocality(t *testing.T, what string, got []traffic.Locality, want traffic.Locality) {
	t.Helper()
	if !slices.Equal(got, []traffic.Locality{want}) {
		t.Errorf("%s: %v, want %s alone", what, got, want)
	}
}

func TestWhatStaysInANamespaceIsLoopback(t *testing.T) {
	p := opened(t, Options{})
	client, _ := two(t)
	for _, family := range families {
		for _, address := range []string{family.loopback, family.client} {
			ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
			a, b := met(t, p, client, client, ours, theirs, address, address)
			wantLocality(t, "client of "+address, a, traffic.Loopback)
			wantLocality(t, "server at "+address, b, traffic.Loopback)
		}
	}
}

func TestWhatPassesBetweenTwoNamespacesOfANodeIsSameNode(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	for _, family := range families {
		ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
		a, b := met(t, p, client, server, ours, theirs, family.server, family.server)
		wantLocality(t, "client by "+family.name, a, traffic.SameNode)
		wantLocality(t, "server by "+family.name, b, traffic.SameNode)
	}
}

func TestAnIPv4ConnectionOfAnIPv6SocketIsAsAnyOther(t *testing.T) {
	client, server := two(t)
	p := opened(t, Options{})
	ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
	// What listens at :: has the client as ::ffff:10.77.0.2.
	a, b := met(t, p, client, server, ours, theirs, "::", "10.77.0.1")
	wantLocality(t, "client", a, traffic.SameNode)
	wantLocality(t, "server", b, traffic.SameNode)
}

func TestAnotherNodeIsOffNodeAndItsSocketsAreNotSeen(t *testing.T) {
	client, server := two(t)
	node, other := netns.NewCgroup(t), netns.NewCgroup(t)
	pod := node
	for _, name := range []string{"kubepods.slice", "burstable", "pod", "container", "init", "deep", "deeper", "deepest"} {
		pod = pod.Below(t, name)
	}
	p := opened(t, Options{Scope: node.ID})
	for _, family := range families {
		for _, ours := range []netns.Cgroup{pod.Below(t, "of"+family.name), node.Below(t, "shallow"+family.name)} {
			a, b := met(t, p, client, server, ours, other, family.server, family.server)
			wantLocality(t, "client by "+family.name, a, traffic.OffNode)
			if len(b) != 0 {
				t.Errorf("server by %s, which is of another node: %v, want nothing", family.name, b)
			}
			a, b = met(t, p, server, client, other, ours, family.client, family.client)
			wantLocality(t, "server by "+family.name, b, traffic.OffNode)
			if len(a) != 0 {
				t.Errorf("client by %s, which is of another node: %v, want nothing", family.name, a)
			}
		}
	}
}

func TestAServiceAddressThatIsTranslatedToThisNodeIsSameNode(t *testing.T) {
	client, router, server := netns.New(t), netns.New(t), netns.New(t)
	netns.Pair(t, client, "eth0", prefixes("10.77.0.2/24"), router, "client", prefixes("10.77.0.1/24"))
	netns.Pair(t, server, "eth0", prefixes("10.77.1.2/24"), router, "server", prefixes("10.77.1.1/24"))
	client.Route(t, netip.MustParsePrefix("10.0.0.0/8"), netip.MustParseAddr("10.77.0.1"))
	server.Route(t, netip.MustParsePrefix("10.77.0.0/24"), netip.MustParseAddr("10.77.1.1"))
	router.Set(t, "ipv4/ip_forward", "1")
	// Checksums add 16 bits at a time: one more here and one less there is the same.
	const service = "10.76.1.3"
	translate(t, router, []string{"client", "server"}, netip.MustParseAddr(service), netip.MustParseAddr("10.77.1.2"))

	p := opened(t, Options{})
	ours, theirs := netns.NewCgroup(t), netns.NewCgroup(t)
	a, b := met(t, p, client, server, ours, theirs, "10.77.1.2", service)
	wantLocality(t, "client of the service address", a, traffic.SameNode)
	wantLocality(t, "server behind it", b, traffic.SameNode)
}

func TestAPortThatIsUsedWithinTheNodeAndBeyondAtATimeIsBoth(t *testing.T) {
	client, server := two(t)
	node, other := netns.NewCgroup(t), netns.NewCgroup(t)
	p := opened(t, Options{Scope: node.ID})
	within, beyond := node.Below(t, "within"), node.Below(t, "beyond")
	local, away := mover.Start(t, client, within), mover.Start(t, server, other)
	near, far := local.Listen(mover.Socket{Address: "10.77.0.2:0"}), away.Listen(mover.Socket{Address: "10.77.0.1:0"})
	// Before, while and after the other uses it.
	var calls []*mover.Process
	for range 2 {
		for to, in := range map[string]netns.Cgroup{near: within, far: beyond} {
			call := mover.Start(t, client, in)
			for port := range 3 {
				call.Dial(mover.Socket{Address: to, From: "10.77.0.2:" + strconv.Itoa(4321+port)})
			}
			call.Exchange(mover.Request{Up: 100, Down: 1000})
			calls = append(calls, call)
		}
		for _, call := range calls {
			call.Hangup(true)
		}
		calls = nil
	}
	wantLocality(t, "those within", localities(walked(t, p, in(within))), traffic.Loopback)
	wantLocality(t, "those beyond", localities(walked(t, p, in(beyond))), traffic.OffNode)
}

// translate makes a router's devices put the server's address in place of the
// service's where packets go there, and back where they come from there. Both
// addresses have the same sum.
func translate(t *testing.T, router *netns.Namespace, devices []string, service, server netip.Addr) {
	t.Helper()
	number := func(a netip.Addr) int32 {
		b := a.As4()
		return int32(b[0]) | int32(b[1])<<8 | int32(b[2])<<16 | int32(b[3])<<24
	}
	const source, target = 26, 30 // behind the head of the link
	onPackets(t, router, devices, asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), // where the packet begins
		asm.LoadMem(asm.R3, asm.R1, 4, asm.Word), // and ends
		asm.Mov.Reg(asm.R4, asm.R2),
		asm.Add.Imm(asm.R4, 34),
		asm.JGT.Reg(asm.R4, asm.R3, "pass"),
		asm.LoadMem(asm.R5, asm.R2, 12, asm.Half),
		asm.JNE.Imm(asm.R5, 0x0008, "pass"), // IPv4
		asm.LoadMem(asm.R5, asm.R2, target, asm.Word),
		asm.JNE.Imm(asm.R5, number(service), "back"),
		asm.StoreImm(asm.R2, target, int64(number(server)), asm.Word),
		asm.LoadMem(asm.R5, asm.R2, source, asm.Word).WithSymbol("back"),
		asm.JNE.Imm(asm.R5, number(server), "pass"),
		asm.StoreImm(asm.R2, source, int64(number(service)), asm.Word),
		asm.Mov.Imm(asm.R0, 2).WithSymbol("pass"), // XDP_PASS
		asm.Return(),
	})
}

// onPackets runs a program on each packet that arrives at devices.
func onPackets(t *testing.T, n *netns.Namespace, devices []string, code asm.Instructions) {
	t.Helper()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL", Instructions: code})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = program.Close() })
	for _, device := range devices {
		if err := n.Do(func() error {
			l, err := link.AttachXDP(link.XDPOptions{Program: program, Interface: n.Index(t, device), Flags: link.XDPGenericMode})
			if err == nil {
				t.Cleanup(func() { _ = l.Close() })
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
}
