// Package simgpu reads the GPUs of a node from a file instead of from the
// machine, so that clusters without hardware have nodes of any shape. The
// agent's root calls it where the configuration says `inventory: {sim: FILE}`.
// It opens no device and keeps no state, and what it gives depends on nothing
// but the file and the node's name.
//
// The file is a strict YAML document; inventory.yaml is an example:
//
//	apiVersion: hearth.dev/v1alpha1
//	kind: SimInventory
//	gpus:                      # boards of a product with everything a real one tells
//	  - product: h100          # a100, h100, h200 or b200
//	    count: 8               # 1 to 64; eight of them share a board and its NVLink
//	    nvlink: true           # default; false is PCIe cards of the same chip
//	    cliqueID: ""           # NVLink fabric across nodes; none by default
//	    driverVersion: 580.95.05
//	    cudaVersion: "13.0"
//	devices:                   # or beside them: devices told one by one
//	  - pciBusID: "0000:1b:00.0"
//	    product: NVIDIA L40S   # what is not said is not published; a UUID is made
//	    memory: 46068MiB
//	deviceNodes: []            # device nodes that every GPU injects, such as /dev/null
//	nodes:                     # other shapes for some nodes, the first that matches
//	  - name: "worker-*"       # of the node; * and ? as in file names
//	    gpus: [{product: a100, count: 4}]
package simgpu

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/units"
)

// Kind is the kind of the file.
const Kind = "SimInventory"

// Limits of a file.
const (
	MaxCount       = 64   // GPUs in one entry of gpus
	MaxDevices     = 1024 // GPUs of one node
	MaxNodes       = 1024 // entries of nodes
	MaxDeviceNodes = 64
)

// File is the inventory file.
type File struct {
	GPUs        []Group `yaml:"gpus"`
	Devices     []GPU   `yaml:"devices"`
	DeviceNodes []Path  `yaml:"deviceNodes"`
	Nodes       []Node  `yaml:"nodes"`
}

// Node is the shape of the nodes whose name matches.
type Node struct {
	Name        string  `yaml:"name"`
	GPUs        []Group `yaml:"gpus"`
	Devices     []GPU   `yaml:"devices"`
	DeviceNodes []Path  `yaml:"deviceNodes"`
}

// Path is an absolute, clean path.
type Path string

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *Path) UnmarshalText(text []byte) error {
	s := string(text)
	if !path.IsAbs(s) || path.Clean(s) != s {
		return fmt.Errorf("want an absolute path, have %q", s)
	}
	*p = Path(s)
	return nil
}

// Group is a number of equal GPUs.
type Group struct {
	Product       string `yaml:"product"`
	Count         int    `yaml:"count"`
	NVLink        *bool  `yaml:"nvlink"`
	CliqueID      string `yaml:"cliqueID"`
	DriverVersion string `yaml:"driverVersion"`
	CUDAVersion   string `yaml:"cudaVersion"`
}

// GPU is one GPU told in full; see device.Facts.
type GPU struct {
	PCIBusID          string      `yaml:"pciBusID"`
	UUID              string      `yaml:"uuid"`
	Product           string      `yaml:"product"`
	Brand             string      `yaml:"brand"`
	Architecture      string      `yaml:"architecture"`
	ComputeCapability string      `yaml:"computeCapability"`
	DriverVersion     string      `yaml:"driverVersion"`
	CUDAVersion       string      `yaml:"cudaVersion"`
	PCIRoot           string      `yaml:"pciRoot"`
	NUMA              *int        `yaml:"numaNode"`
	NVLinkGroup       string      `yaml:"nvlinkGroup"`
	CliqueID          string      `yaml:"cliqueID"`
	Memory            units.Bytes `yaml:"memory"`
	DeviceNodes       []Path      `yaml:"deviceNodes"`
}

// Load gives the GPUs that the file at name has for a node, by ID. Errors name
// the file and the field; those about the text wrap configfile.ErrInvalid.
func Load(name, node string) ([]device.Device, error) {
	var f File
	if err := configfile.Load(name, Kind, &f); err != nil {
		return nil, fmt.Errorf("load inventory: %w", err)
	}
	return f.at(name, node)
}

// Parse is Load for text already in memory.
func Parse(name string, text []byte, node string) ([]device.Device, error) {
	var f File
	if err := configfile.Parse(name, text, Kind, &f); err != nil {
		return nil, fmt.Errorf("parse inventory: %w", err)
	}
	return f.at(name, node)
}

func (f *File) at(name, node string) ([]device.Device, error) {
	if err := f.check(); err != nil {
		return nil, fmt.Errorf("%s: %w: %w", name, configfile.ErrInvalid, err)
	}
	shape := Node{GPUs: f.GPUs, Devices: f.Devices, DeviceNodes: f.DeviceNodes}
	where := ""
	for i, n := range f.Nodes {
		if ok, _ := path.Match(n.Name, node); ok {
			shape, where = n, fmt.Sprintf("nodes[%d].", i)
			break
		}
	}
	devices, err := shape.devices(node)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s%w", name, configfile.ErrInvalid, where, err)
	}
	return devices, nil
}

// check refuses shapes of any node, so that a file is wrong everywhere or
// nowhere.
func (f *File) check() error {
	if len(f.Nodes) > MaxNodes {
		return fmt.Errorf("nodes: %d entries, at most %d", len(f.Nodes), MaxNodes)
	}
	shape := Node{GPUs: f.GPUs, Devices: f.Devices, DeviceNodes: f.DeviceNodes}
	if _, err := shape.devices("any"); err != nil {
		return err
	}
	for i, n := range f.Nodes {
		if _, err := path.Match(n.Name, ""); err != nil || n.Name == "" {
			return fmt.Errorf("nodes[%d].name: want a node's name, * and ? as in file names", i)
		}
		if _, err := n.devices("any"); err != nil {
			return fmt.Errorf("nodes[%d].%w", i, err)
		}
	}
	return nil
}

func (n Node) devices(node string) ([]device.Device, error) {
	if len(n.DeviceNodes) > MaxDeviceNodes {
		return nil, fmt.Errorf("deviceNodes: %d entries, at most %d", len(n.DeviceNodes), MaxDeviceNodes)
	}
	var devices []device.Device
	board := 0
	for i, g := range n.GPUs {
		p, ok := profiles[strings.ToLower(g.Product)]
		if !ok {
			return nil, fmt.Errorf("gpus[%d].product: %q is none of %s", i, g.Product, strings.Join(Products(), ", "))
		}
		if g.Count < 1 || g.Count > MaxCount {
			return nil, fmt.Errorf("gpus[%d].count: %d is not within 1 and %d", i, g.Count, MaxCount)
		}
		for slot := range g.Count {
			devices = append(devices, p.device(g, board+slot/len(p.slots), slot%len(p.slots), node))
		}
		board += (g.Count + len(p.slots) - 1) / len(p.slots)
	}
	for i, g := range n.Devices {
		d, err := g.device(node)
		if err != nil {
			return nil, fmt.Errorf("devices[%d].%w", i, err)
		}
		devices = append(devices, d)
	}
	if len(devices) > MaxDevices {
		return nil, fmt.Errorf("gpus: %d on one node, at most %d", len(devices), MaxDevices)
	}
	for i := range devices {
		for _, p := range n.DeviceNodes {
			devices[i].Nodes = append(devices[i].Nodes, string(p))
		}
	}
	slices.SortFunc(devices, func(a, b device.Device) int { return cmp.Compare(a.ID, b.ID) })
	uuids := map[string]bool{}
	for i := range devices {
		if i > 0 && devices[i].ID == devices[i-1].ID {
			return nil, fmt.Errorf("devices: the address %s stands twice", devices[i].PCIBusID)
		}
		if uuids[devices[i].UUID] {
			return nil, fmt.Errorf("devices: the uuid %s stands twice", devices[i].UUID)
		}
		uuids[devices[i].UUID] = true
	}
	return devices, nil
}

var address = regexp.MustCompile(`^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]$`)

func (g GPU) device(node string) (device.Device, error) {
	if !address.MatchString(g.PCIBusID) {
		return device.Device{}, fmt.Errorf("pciBusID: want a form like 0000:1b:00.0, have %q", g.PCIBusID)
	}
	if g.Memory < 0 {
		return device.Device{}, errors.New("memory: less than nothing")
	}
	if len(g.DeviceNodes) > MaxDeviceNodes {
		return device.Device{}, fmt.Errorf("deviceNodes: %d entries, at most %d", len(g.DeviceNodes), MaxDeviceNodes)
	}
	d := device.Device{
		ID: ID(g.PCIBusID), Product: g.Product,
		Facts: device.Facts{
			UUID: cmp.Or(g.UUID, uuid(node, g.PCIBusID)), Brand: g.Brand, Architecture: g.Architecture,
			ComputeCapability: g.ComputeCapability, DriverVersion: g.DriverVersion, CUDAVersion: g.CUDAVersion,
			PCIBusID: g.PCIBusID, PCIRoot: g.PCIRoot, NUMA: g.NUMA,
			NVLinkGroup: g.NVLinkGroup, CliqueID: g.CliqueID, Memory: int64(g.Memory),
		},
	}
	for _, p := range g.DeviceNodes {
		d.Nodes = append(d.Nodes, string(p))
	}
	return d, nil
}

// ID is the ID of the GPU at a PCI address: "gpu-0000-1b-00-0".
func ID(busID string) device.ID {
	return device.ID("gpu-" + strings.NewReplacer(":", "-", ".", "-").Replace(busID))
}

// uuid makes the UUID of the GPU at an address of a node: always the same, and
// another on every other node.
func uuid(node, busID string) string {
	sum := sha256.Sum256([]byte("hearth simulated GPU\x00" + node + "\x00" + busID))
	h := hex.EncodeToString(sum[:16])
	return "GPU-" + strings.Join([]string{h[:8], h[8:12], h[12:16], h[16:20], h[20:32]}, "-")
}
