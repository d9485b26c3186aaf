package nic

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"
)

// node makes the tree of a fixture, where a file that begins with -> is a link.
func node(t *testing.T, name string) Reader {
	t.Helper()
	archive, err := txtar.ParseFile(filepath.Join("testdata", name+".txtar"))
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	for _, f := range archive.Files {
		at := filepath.Join(root, f.Name)
		if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
			t.Fatal(err)
		}
		if target, link := strings.CutPrefix(string(f.Data), "-> "); link {
			err = os.Symlink(strings.TrimSpace(target), at)
		} else {
			err = os.WriteFile(at, f.Data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return Reader{Sys: filepath.Join(root, "sys"), Proc: filepath.Join(root, "proc")}
}

func read(t *testing.T, r Reader) Devices {
	t.Helper()
	d, err := r.Read()
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// names gives the names of the devices that were read.
func names(d Devices) string {
	var all []string
	for i := range d.Net {
		all = append(all, d.Net[i].Name)
	}
	return strings.Join(all, " ")
}

func TestEachByteOfAServerIsCountedOnce(t *testing.T) {
	t.Parallel()
	d := read(t, node(t, "server"))
	if got := names(d); got != "eno1 eno2 ens5f0np0 ens5f0v0 ib0" || d.Fallback {
		t.Errorf("the devices are %s, fallback %v", got, d.Fallback)
	}
	want := []Device{
		{
			Name: "eno1", Index: 2, Address: "02:00:00:00:00:02", State: "up",
			Counters: Counters{
				ReceivedBytes: 1000, TransmittedBytes: 2000, ReceivedPackets: 20, TransmittedPackets: 21,
				ReceiveDrops: 22, TransmitDrops: 23, ReceiveMissed: 24,
			},
		},
		{
			Name: "eno2", Index: 3, Address: "02:00:00:00:00:03", State: "down",
			Counters: Counters{
				ReceivedBytes: 30, TransmittedBytes: 40, ReceivedPackets: 30, TransmittedPackets: 31,
				ReceiveDrops: 32, TransmitDrops: 33, ReceiveMissed: 34,
			},
		},
	}
	if diff := cmp.Diff(want, d.Net[:2]); diff != "" {
		t.Error(diff)
	}
	if !d.Net[4].InfiniBand || d.Net[2].InfiniBand {
		t.Errorf("IP over InfiniBand is not told from the rest: %+v", d.Net)
	}
}

func TestNamedDevicesAreReadAndNoOthers(t *testing.T) {
	t.Parallel()
	r := node(t, "server")
	for patterns, want := range map[string]string{
		"bond0":            "bond0",
		"bond0 eno?":       "eno1 eno2", // the bond's are counted, not the bond
		"bond0.100 eno1":   "eno1",      // what lies upon others, however deep
		"br0 veth*":        "veth1a2b",  // a bridge too
		"vxlan.* en?1":     "eno1 vxlan.calico",
		"lo":               "", // loopback never
		"wlan0":            "",
		"ens5f0npf0vf0":    "ens5f0npf0vf0", // what is left out by itself may be named
		"[i]b0 ens5f0v[0]": "ens5f0v0 ib0",
		"*":                "eno1 eno2 ens5f0np0 ens5f0npf0sf88 ens5f0npf0vf0 ens5f0v0 ib0 veth1a2b vxlan.calico",
	} {
		r.Names = strings.Fields(patterns)
		d := read(t, r)
		if got := names(d); got != want || d.Fallback {
			t.Errorf("%s: %s, fallback %v; want %s", patterns, got, d.Fallback, want)
		}
	}
	r.Names = []string{"eth[0"}
	if _, err := r.Read(); !errors.Is(err, path.ErrBadPattern) || !strings.Contains(err.Error(), `"eth[0"`) {
		t.Errorf("a malformed pattern gave %v", err)
	}
}

func TestAVirtualMachinesWayToACardCountsForBoth(t *testing.T) {
	t.Parallel()
	if got := names(read(t, node(t, "cloud"))); got != "eth0 eth1" {
		t.Errorf("the devices are %s", got)
	}
}

func TestWhatIsNoNumberOrVanishedIsAbsent(t *testing.T) {
	t.Parallel()
	d := read(t, node(t, "cloud"))
	want := Device{Name: "eth1", Index: 4, Address: "02:00:00:00:00:04", State: "up", Counters: Counters{ReceivedBytes: 7}}
	if diff := cmp.Diff(want, d.Net[1]); diff != "" {
		t.Error(diff)
	}
}

func TestWithoutAPhysicalDeviceThoseOfTheDefaultRoutesCount(t *testing.T) {
	t.Parallel()
	r := node(t, "container")
	d := read(t, r)
	if got := names(d); got != "eth0 net1" || !d.Fallback || d.Net[0].Counters[ReceivedBytes] != 100 {
		t.Errorf("the devices are %s, fallback %v", got, d.Fallback)
	}
	r.Proc = t.TempDir()
	if d := read(t, r); len(d.Net) > 0 || !d.Fallback {
		t.Errorf("without routes the devices are %s, fallback %v", names(d), d.Fallback)
	}
}

func TestWithoutNetworkDevicesTheErrorSaysSo(t *testing.T) {
	t.Parallel()
	_, err := Reader{Sys: t.TempDir()}.Read()
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "list network devices: ") {
		t.Errorf("got %v", err)
	}
}

func TestPortsAreReadWhateverTheDriver(t *testing.T) {
	t.Parallel()
	want := []Port{
		{Device: "i40iw0", Number: 1, Counters: Counters{}},
		{Device: "mlx5_0", Number: 1, GUID: "b859:9f03:00e4:1234", LinkLayer: "InfiniBand", Counters: Counters{ReceivedBytes: 100, TransmittedBytes: 200, TransmitWait: 7}},
		{Device: "mlx5_10", Number: 1, GUID: "b859:9f03:00e4:5678", LinkLayer: "Ethernet", Counters: Counters{
			ReceivedBytes: 4000, // what does not fit 64 bits as bytes is absent
			CNPSent:       1, CNPHandled: 2, MarkedPackets: 3, OutOfSequence: 4, LocalAckTimeouts: 5, OutOfBuffer: 6,
		}},
		{Device: "old0", Number: 1, Counters: Counters{ReceivedBytes: 4, TransmittedBytes: 40}},
		{Device: "old0", Number: 2, Counters: Counters{ReceivedBytes: 8, TransmittedBytes: 80}},
		{Device: "old0", Number: 10, Counters: Counters{ReceivedBytes: 40, TransmittedBytes: 400}},
		{Device: "one0", Number: 1, LinkLayer: "Ethernet", Counters: Counters{ReceivedBytes: 8, TransmittedBytes: 9, OutOfSequence: 1}},
		{Device: "rdmap0s6", Number: 1, LinkLayer: "Unspecified", Counters: Counters{ReceivedBytes: 111, TransmittedBytes: 222}},
	}
	if diff := cmp.Diff(want, read(t, node(t, "rdma")).Ports); diff != "" {
		t.Error(diff)
	}
	if ports := read(t, node(t, "server")).Ports; len(ports) > 0 {
		t.Errorf("a node without RDMA has ports: %+v", ports)
	}
}

func TestTheDevicesOfThisMachineAreRead(t *testing.T) {
	t.Parallel()
	d := read(t, Reader{})
	for i := range d.Net {
		if _, ok := d.Net[i].Counters[ReceivedBytes]; !ok || d.Net[i].Index == 0 {
			t.Errorf("no bytes are read of %+v", d.Net[i])
		}
	}
	if !slices.IsSortedFunc(d.Net, func(a, b Device) int { return strings.Compare(a.Name, b.Name) }) {
		t.Errorf("the devices are not in order: %s", names(d))
	}
}
