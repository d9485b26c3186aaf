// Package nic owns what a node's network devices and RDMA ports count by
// themselves: the ground truth that all accounting is held against. Reader
// reads it, Meter makes totals of successive readings that never go backwards.
// The network accounting in nodeagent/netattr calls it, from one goroutine. It
// reads sysfs and procfs alone, changes nothing, and knows neither pods nor
// sockets.
package nic

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Counter names what is counted, as the kernel names the file.
type Counter string

// Counters of network devices; ports have the first two as well, of what RDMA moved.
const (
	ReceivedBytes      Counter = "rx_bytes"
	TransmittedBytes   Counter = "tx_bytes"
	ReceivedPackets    Counter = "rx_packets"
	TransmittedPackets Counter = "tx_packets"
	ReceiveDrops       Counter = "rx_dropped"       // packets
	TransmitDrops      Counter = "tx_dropped"       // packets
	ReceiveMissed      Counter = "rx_missed_errors" // packets that the device had no room for
)

// Counters of RDMA ports that tell of congestion and loss.
const (
	TransmitWait     Counter = "port_xmit_wait"             // ticks of the port in which data waited
	CNPSent          Counter = "np_cnp_sent"                // congestion notification packets
	CNPHandled       Counter = "rp_cnp_handled"             // congestion notification packets
	MarkedPackets    Counter = "np_ecn_marked_roce_packets" // packets that a switch marked
	OutOfSequence    Counter = "out_of_sequence"            // packets
	LocalAckTimeouts Counter = "local_ack_timeout_err"      // expired timers
	OutOfBuffer      Counter = "out_of_buffer"              // packets without a receive buffer
)

var netCounters = []Counter{ReceivedBytes, TransmittedBytes, ReceivedPackets, TransmittedPackets, ReceiveDrops, TransmitDrops, ReceiveMissed}

// Counters are values by name. What a device does not tell is absent.
type Counters map[Counter]uint64

// Device is one reading of a network device.
type Device struct {
	Name    string
	Index   int    // number in its network namespace, of which the kernel uses none twice in a row; 0 is unknown
	Address string // hardware address
	State   string // RFC 2863: up, down, unknown ...; empty where it is not told
	// InfiniBand is set for IP over InfiniBand, whose bytes the RDMA port below
	// counts as well.
	InfiniBand bool
	Counters   Counters
}

// Port is one reading of an RDMA port.
type Port struct {
	Device    string
	Number    int
	GUID      string // of the device; empty where it is not told
	LinkLayer string // Ethernet or InfiniBand; empty where it is not told
	// Counters hold the bytes that RDMA moved. On InfiniBand they hold those of IP
	// over it too; on Ethernet the network device does not count RDMA's.
	Counters Counters
}

// Name is the port's name in a node, such as mlx5_0/1.
func (p *Port) Name() string { return p.Device + "/" + strconv.Itoa(p.Number) }

// Devices is one reading of a node, each byte that passed it counted once.
type Devices struct {
	Net   []Device // by name
	Ports []Port   // by name
	// Fallback is set where no physical device is in this network namespace, as
	// in a container: Net has the devices of the default routes then, if any.
	Fallback bool
}

// Reader reads the devices of the network namespace that its Sys shows.
type Reader struct {
	Sys  string // where sysfs is mounted; /sys where it is empty
	Proc string // where procfs is mounted; /proc where it is empty
	// Names are patterns of path.Match: where there are any, the devices that
	// match one are read, physical or not, and no others.
	Names []string
}

// Read reads all devices. It fails where devices cannot be listed or a pattern
// is malformed; where only RDMA's cannot, Net and Fallback are good. A device
// that vanishes meanwhile is left out, and so is a value that cannot be read or
// is no number.
func (r Reader) Read() (Devices, error) {
	if r.Sys == "" {
		r.Sys = "/sys"
	}
	if r.Proc == "" {
		r.Proc = "/proc"
	}
	var d Devices
	names, err := r.choose()
	if err != nil {
		return Devices{}, err
	}
	if len(names) == 0 && len(r.Names) == 0 {
		d.Fallback = true
		names = r.once(r.defaultRoutes())
	}
	for _, name := range names {
		if device, ok := r.device(name); ok {
			d.Net = append(d.Net, device)
		}
	}
	d.Ports, err = r.ports()
	return d, err
}

// device reads a network device; ok is false where it is not there.
func (r Reader) device(name string) (device Device, ok bool) {
	at := r.net(name)
	index, ok := number(filepath.Join(at, "ifindex"))
	if !ok {
		return Device{}, false
	}
	kind, _ := number(filepath.Join(at, "type"))
	d := Device{
		Name: name, Index: int(index), Address: text(filepath.Join(at, "address")), State: text(filepath.Join(at, "operstate")),
		InfiniBand: kind == typeInfiniBand, Counters: Counters{},
	}
	for _, c := range netCounters {
		d.Counters.read(c, 1, filepath.Join(at, "statistics", string(c)))
	}
	return d, true
}

// net is the folder of a network device.
func (r Reader) net(name string) string { return filepath.Join(r.Sys, "class/net", name) }

// read takes a counter from the first of the files that has a number, times unit.
func (c Counters) read(name Counter, unit uint64, files ...string) {
	for _, file := range files {
		if n, ok := number(file); ok && n*unit/unit == n {
			c[name] = n * unit
			return
		}
	}
}

// text reads a file of one line; empty where there is none.
func text(file string) string {
	content, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(content))
}

// number reads a file that holds a number; ok is false for all else, such as
// "N/A (no PMA)", and where the file is gone.
func number(file string) (n uint64, ok bool) {
	n, err := strconv.ParseUint(text(file), 10, 64)
	return n, err == nil
}

// list gives the names in a folder, in order; none where there is no such folder.
func list(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	names := make([]string, 0, len(entries))
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	slices.Sort(names)
	return names, nil
}
