package simgpu_test

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/simgpu"
)

const head = "apiVersion: hearth.dev/v1alpha1\nkind: SimInventory\n"

func parse(t *testing.T, node, text string) []device.Device {
	t.Helper()
	devices, err := simgpu.Parse("sim.yaml", []byte(head+text), node)
	if err != nil {
		t.Fatal(err)
	}
	return devices
}

func ids(devices []device.Device) string {
	var names []string
	for _, d := range devices {
		names = append(names, string(d.ID))
	}
	return strings.Join(names, " ")
}

func TestEveryProductIsAWholeBoard(t *testing.T) {
	t.Parallel()
	for _, product := range simgpu.Products() {
		devices := parse(t, "n", "gpus: [{product: "+product+", count: 8}]\n")
		if len(devices) != 8 {
			t.Fatalf("%s: %d GPUs", product, len(devices))
		}
		seen := map[string]bool{}
		for _, d := range devices {
			for _, value := range []string{
				d.Product, d.UUID, d.Brand, d.Architecture, d.ComputeCapability, d.DriverVersion, d.CUDAVersion, d.PCIBusID, d.PCIRoot, d.NVLinkGroup,
			} {
				if value == "" {
					t.Errorf("%s: %+v lacks something", product, d)
				}
			}
			if d.Memory < 80<<30-1<<30 || d.NUMA == nil || seen[d.UUID] || seen[d.PCIBusID] || d.NVLinkGroup != devices[0].NVLinkGroup || len(d.Nodes) > 0 {
				t.Errorf("%s: %+v", product, d)
			}
			seen[d.UUID], seen[d.PCIBusID] = true, true
		}
	}
}

func TestTheSameFileGivesANodeTheSameGPUs(t *testing.T) {
	t.Parallel()
	const text = "gpus: [{product: h100, count: 3}, {product: a100, count: 2}]\n"
	a, again, b := parse(t, "a", text), parse(t, "a", text), parse(t, "b", text)
	if !reflect.DeepEqual(a, again) {
		t.Error("two readings differ")
	}
	if ids(a) != "gpu-0000-1b-00-0 gpu-0000-43-00-0 gpu-0000-52-00-0 gpu-0001-07-00-0 gpu-0001-0f-00-0" || ids(a) != ids(b) {
		t.Errorf("got %s", ids(a))
	}
	for i := range a {
		if a[i].UUID == b[i].UUID || len(a[i].UUID) != len("GPU-00000000-0000-0000-0000-000000000000") {
			t.Errorf("UUIDs %s and %s", a[i].UUID, b[i].UUID)
		}
	}
}

func TestMoreThanABoardIsAnotherBoard(t *testing.T) {
	t.Parallel()
	devices := parse(t, "n", "gpus: [{product: b200, count: 10}]\n")
	groups := map[string]int{}
	for _, d := range devices {
		groups[d.NVLinkGroup]++
	}
	if groups["board-0"] != 8 || groups["board-1"] != 2 {
		t.Errorf("groups %v", groups)
	}
	for _, d := range parse(t, "n", "gpus: [{product: b200, count: 2, nvlink: false, cliqueID: c.1, driverVersion: 600.1}]\n") {
		if d.NVLinkGroup != "" || d.CliqueID != "c.1" || d.DriverVersion != "600.1" {
			t.Errorf("got %+v", d)
		}
	}
}

func TestNodesHaveTheFirstShapeThatMatches(t *testing.T) {
	t.Parallel()
	const text = `
gpus: [{product: h100, count: 1}]
nodes:
- {name: "big-*", gpus: [{product: h200, count: 2}], deviceNodes: [/dev/null]}
- {name: "big-1", gpus: [{product: a100, count: 4}]}
- {name: none}
`
	for node, want := range map[string]int{"other": 1, "big-1": 2, "none": 0} {
		if got := parse(t, node, text); len(got) != want {
			t.Errorf("%s: %d GPUs, want %d", node, len(got), want)
		}
	}
	if d := parse(t, "big-2", text)[0]; !reflect.DeepEqual(d.Nodes, []string{"/dev/null"}) {
		t.Errorf("device nodes %v", d.Nodes)
	}
}

func TestADeviceMayBeToldInFull(t *testing.T) {
	t.Parallel()
	got := parse(t, "n", `
devices:
- {pciBusID: "0000:1b:00.0", product: NVIDIA L40S, memory: 46068MiB, numaNode: 1, uuid: GPU-x, deviceNodes: [/dev/zero]}
- {pciBusID: "0000:02:00.0"}
deviceNodes: [/dev/null]
`)
	one := 1
	want := device.Device{ID: "gpu-0000-1b-00-0", Product: "NVIDIA L40S", Facts: device.Facts{
		UUID: "GPU-x", PCIBusID: "0000:1b:00.0", NUMA: &one, Memory: 46068 << 20, Nodes: []string{"/dev/zero", "/dev/null"},
	}}
	if len(got) != 2 || !reflect.DeepEqual(got[1], want) || got[0].UUID == "" {
		t.Errorf("got %+v", got)
	}
}

func TestAFileThatIsWrongSaysWhere(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"gpus: [{product: h101, count: 1}]\n":                                             `gpus[0].product: "h101" is none of a100, b200, h100, h200`,
		"gpus: [{product: h100}]\n":                                                       "gpus[0].count: 0 is not within 1 and 64",
		"gpus: [{product: h100, count: 65}]\n":                                            "gpus[0].count: 65",
		"gpus: [{product: h100, cuont: 1}]\n":                                             "did you mean count",
		"devices: [{pciBusID: 1b:00.0}]\n":                                                "devices[0].pciBusID: want a form like 0000:1b:00.0",
		"devices: [{pciBusID: \"0000:1b:00.0\"}]\ngpus: [{product: h100, count: 1}]\n":    "0000:1b:00.0 stands twice",
		"deviceNodes: [dev/null]\n":                                                       "deviceNodes[0]: want an absolute path",
		"nodes: [{name: x, gpus: [{product: h100, count: 99}]}]\n":                        "nodes[0].gpus[0].count: 99",
		"nodes: [{name: \"[\"}]\n":                                                        "nodes[0].name",
		"nodes: [{gpus: []}]\n":                                                           "nodes[0].name",
		"gpus: [" + strings.Repeat("{product: h100, count: 64}, ", 17) + "]\n":            "1088 on one node, at most 1024",
		"devices: [{pciBusID: \"0000:1b:00.0\", memory: -1}]\n":                           "memory",
		"deviceNodes: [" + strings.Repeat("/dev/null, ", simgpu.MaxDeviceNodes+1) + "]\n": "deviceNodes: 65 entries",
		"nodes: [" + strings.Repeat("{name: a}, ", simgpu.MaxNodes+1) + "]\n":             "nodes: 1025 entries",
	} {
		_, err := simgpu.Parse("sim.yaml", []byte(head+text), "x")
		if !errors.Is(err, configfile.ErrInvalid) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "sim.yaml") {
			t.Errorf("%.60q: %v, want %q", text, err, want)
		}
	}
}

func TestTheExampleIsReadAndAMissingFileIsNoInvalidOne(t *testing.T) {
	t.Parallel()
	devices, err := simgpu.Load("inventory.yaml", "worker-0")
	if err != nil || len(devices) == 0 {
		t.Errorf("got %d GPUs, %v", len(devices), err)
	}
	if _, err := simgpu.Load(filepath.Join(t.TempDir(), "x"), "n"); !errors.Is(err, os.ErrNotExist) || errors.Is(err, configfile.ErrInvalid) {
		t.Errorf("got %v", err)
	}
}

func TestNoTwoGPUsHaveOneUUID(t *testing.T) {
	t.Parallel()
	const text = `
devices:
- {pciBusID: "0000:1b:00.0", uuid: GPU-x}
- {pciBusID: "0000:1c:00.0", uuid: GPU-x}
`
	_, err := simgpu.Parse("sim.yaml", []byte(head+text), "x")
	if !errors.Is(err, configfile.ErrInvalid) || !strings.Contains(err.Error(), "the uuid GPU-x stands twice") {
		t.Errorf("got %v", err)
	}
}
