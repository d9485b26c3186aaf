package nic

import (
	"cmp"
	"path/filepath"
	"slices"
	"strconv"
)

// wordBytes is what one step of a port's data counters stands for: they count
// words of four bytes, as InfiniBand's specification says.
const wordBytes = 4

var portCounters = []Counter{CNPSent, CNPHandled, MarkedPackets, OutOfSequence, LocalAckTimeouts, OutOfBuffer}

// ports reads all RDMA ports; none where there is no RDMA.
func (r Reader) ports() ([]Port, error) {
	class := filepath.Join(r.Sys, "class/infiniband")
	devices, err := list(class)
	if err != nil {
		return nil, err
	}
	var ports []Port
	for _, device := range devices {
		at := filepath.Join(class, device)
		numbers, err := list(filepath.Join(at, "ports"))
		if err != nil {
			return nil, err
		}
		for _, name := range numbers {
			n, err := strconv.Atoi(name)
			if err != nil {
				continue
			}
			// Some drivers have one set of counters for the device.
			shared := ""
			if len(numbers) == 1 {
				shared = filepath.Join(at, "hw_counters")
			}
			ports = append(ports, Port{
				Device: device, Number: n, GUID: text(filepath.Join(at, "node_guid")),
				LinkLayer: text(filepath.Join(at, "ports", name, "link_layer")),
				Counters:  readPort(filepath.Join(at, "ports", name), shared),
			})
		}
	}
	slices.SortFunc(ports, func(a, b Port) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Number, b.Number))
	})
	return ports, nil
}

// readPort reads the counters of the port in a folder; shared is the folder of
// the device's own, empty where they are not this port's alone.
func readPort(at, shared string) Counters {
	c := Counters{}
	hardware := func(name Counter) []string {
		files := []string{filepath.Join(at, "hw_counters", string(name))}
		if shared != "" {
			files = append(files, filepath.Join(shared, string(name)))
		}
		return files
	}
	for name, file := range map[Counter]string{ReceivedBytes: "port_rcv_data", TransmittedBytes: "port_xmit_data"} {
		c.read(name, wordBytes, filepath.Join(at, "counters", file), filepath.Join(at, "counters_ext", file+"_64"))
		if _, ok := c[name]; !ok {
			c.read(name, 1, hardware(name)...) // as EFA has it, in bytes
		}
	}
	c.read(TransmitWait, 1, filepath.Join(at, "counters", string(TransmitWait)))
	for _, name := range portCounters {
		c.read(name, 1, hardware(name)...)
	}
	return c
}
