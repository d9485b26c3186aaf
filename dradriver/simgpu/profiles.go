package simgpu

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/hearth-dev/hearth/dradriver/device"
)

// Versions that a simulated driver tells where the file says nothing.
const (
	driverVersion = "580.95.05"
	cudaVersion   = "13.0"
)

// profile is one product as its board carries it.
type profile struct {
	product      string
	architecture string
	capability   string
	memory       int64 // bytes
	slots        []slot
}

// slot is a place on a board: the bus of the GPU, the bus of its root complex
// and the NUMA node of that.
type slot struct {
	bus, root byte
	numa      int
}

const mebibyte = 1 << 20

// hgx are the slots of an eight-GPU board of two sockets, as HGX H100, H200
// and B200 systems number them; dgxA100 those of a board behind four NUMA
// nodes, two GPUs to each root complex.
var (
	hgx = []slot{
		{0x1b, 0x15, 0},
		{0x43, 0x37, 0},
		{0x52, 0x48, 0},
		{0x61, 0x59, 0},
		{0x9d, 0x97, 1},
		{0xc3, 0xb7, 1},
		{0xd1, 0xc7, 1},
		{0xdf, 0xd7, 1},
	}
	dgxA100 = []slot{
		{0x07, 0x00, 3},
		{0x0f, 0x00, 3},
		{0x47, 0x40, 1},
		{0x4e, 0x40, 1},
		{0x87, 0x80, 7},
		{0x90, 0x80, 7},
		{0xb7, 0xb0, 5},
		{0xbd, 0xb0, 5},
	}
)

var profiles = map[string]profile{
	"a100": {"NVIDIA A100-SXM4-80GB", "Ampere", "8.0", 81920 * mebibyte, dgxA100},
	"h100": {"NVIDIA H100 80GB HBM3", "Hopper", "9.0", 81559 * mebibyte, hgx},
	"h200": {"NVIDIA H200", "Hopper", "9.0", 143771 * mebibyte, hgx},
	"b200": {"NVIDIA B200", "Blackwell", "10.0", 183359 * mebibyte, hgx},
}

// Products names what `product` of gpus may say.
func Products() []string { return slices.Sorted(maps.Keys(profiles)) }

// device gives the GPU in one slot of one of the node's boards. Boards have a
// PCI domain each, so that addresses never meet.
func (p profile) device(g Group, board, place int, node string) device.Device {
	s := p.slots[place]
	numa := s.numa
	busID := fmt.Sprintf("%04x:%02x:00.0", board, s.bus)
	d := device.Device{
		ID: ID(busID), Product: p.product,
		Facts: device.Facts{
			UUID: uuid(node, busID), Brand: "Nvidia", Architecture: p.architecture, ComputeCapability: p.capability,
			DriverVersion: cmp.Or(g.DriverVersion, driverVersion), CUDAVersion: cmp.Or(g.CUDAVersion, cudaVersion),
			PCIBusID: busID, PCIRoot: fmt.Sprintf("pci%04x:%02x", board, s.root), NUMA: &numa,
			CliqueID: g.CliqueID, Memory: p.memory,
		},
	}
	if g.NVLink == nil || *g.NVLink {
		d.NVLinkGroup = fmt.Sprintf("board-%d", board)
	}
	return d
}
