// Package netns makes networks for tests in the kernel that runs them: network
// namespaces, pairs of virtual devices between them, and cgroups to run
// processes in. Tests that run as root call it; it runs no program, so it works
// in a machine that has none, and it touches nothing outside of what it made.
package netns

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	handles "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace. It lasts for its test, and as long as
// processes or sockets are in it.
type Namespace struct {
	at      *os.File
	network *netlink.Handle
}

// New makes a namespace whose loopback device is up.
func New(t testing.TB) *Namespace {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("these tests make network namespaces: run them as root")
	}
	made := make(chan error, 1)
	n := &Namespace{}
	go func() {
		// The thread stays locked, so that it ends with the goroutine.
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			n.at, err = os.Open("/proc/thread-self/ns/net")
		}
		made <- err
	}()
	if err := <-made; err != nil {
		t.Fatalf("make network namespace: %v", err)
	}
	network, err := netlink.NewHandleAt(handles.NsHandle(n.at.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatalf("speak to network namespace: %v", err)
	}
	n.network = network
	t.Cleanup(func() {
		network.Close()
		_ = n.at.Close()
	})
	n.up(t, "lo")
	return n
}

// Do runs f on a thread that is in the namespace: sockets that f makes, and
// processes that it starts, are there. f's own goroutines are not.
func (n *Namespace) Do(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if err := unix.Setns(int(n.at.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter network namespace: %w", err)
			return
		}
		done <- f()
	}()
	return <-done
}

// Set writes a setting below /proc/sys/net, for example ipv4/ip_forward.
func (n *Namespace) Set(t testing.TB, name, value string) {
	t.Helper()
	if err := n.Do(func() error { return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0) }); err != nil {
		t.Fatalf("set %s: %v", name, err)
	}
}

// Address is an address of a device, with its network.
type Address = netip.Prefix

// Pair connects two namespaces by a device in each, called name, with these
// addresses, which may be used at once. The devices take one segment a packet,
// so that their counters are those of a wire.
func Pair(t testing.TB, a *Namespace, nameA string, atA []Address, b *Namespace, nameB string, atB []Address) {
	t.Helper()
	pair := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: nameA, GSOMaxSegs: 1, MTU: 1500},
		PeerName:  nameB, PeerNamespace: netlink.NsFd(int(b.at.Fd())),
	}
	if err := a.network.LinkAdd(pair); err != nil {
		t.Fatalf("make devices %s and %s: %v", nameA, nameB, err)
	}
	for _, end := range []struct {
		n    *Namespace
		name string
		at   []Address
	}{{a, nameA, atA}, {b, nameB, atB}} {
		device := end.n.device(t, end.name)
		if err := end.n.network.LinkSetGSOMaxSegs(device, 1); err != nil {
			t.Fatalf("set segments of %s: %v", end.name, err)
		}
		for _, address := range end.at {
			own := &netlink.Addr{IPNet: network(address), Flags: unix.IFA_F_NODAD}
			if err := end.n.network.AddrAdd(device, own); err != nil {
				t.Fatalf("give %s the address %s: %v", end.name, address, err)
			}
		}
	}
	// Both ends have to be up before either is.
	a.up(t, nameA)
	b.up(t, nameB)
}

// Route sends what goes to a network by way of a neighbour.
func (n *Namespace) Route(t testing.TB, to Address, by netip.Addr) {
	t.Helper()
	route := &netlink.Route{Dst: network(to), Gw: by.AsSlice()}
	if err := n.network.RouteAdd(route); err != nil {
		t.Fatalf("route %s by %s: %v", to, by, err)
	}
}

// Counters are what a device has counted, in bytes with the headers of the link.
type Counters struct{ Received, Transmitted uint64 }

// Device reads a device's counters.
func (n *Namespace) Device(t testing.TB, name string) Counters {
	t.Helper()
	s := n.device(t, name).Attrs().Statistics
	return Counters{Received: s.RxBytes, Transmitted: s.TxBytes}
}

// Index gives the number of a device in its namespace.
func (n *Namespace) Index(t testing.TB, name string) int {
	t.Helper()
	return n.device(t, name).Attrs().Index
}

func (n *Namespace) device(t testing.TB, name string) netlink.Link {
	t.Helper()
	device, err := n.network.LinkByName(name)
	if err != nil {
		t.Fatalf("find device %s: %v", name, err)
	}
	return device
}

func (n *Namespace) up(t testing.TB, name string) {
	t.Helper()
	if err := n.network.LinkSetUp(n.device(t, name)); err != nil {
		t.Fatalf("set %s up: %v", name, err)
	}
}

func network(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
