package dradriver

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/operation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

var update = flag.Bool("update", false, "write the golden files")

// fullNode is a node that uses everything a slice can say.
func fullNode() Offer {
	zero, minus := 0, -1
	return Offer{
		Node: "node-a", Pools: Pools{GPUs: true, Weights: true, KV: true}, Features: FeaturesOf(37),
		GPUs: device.Snapshot{
			{Device: device.Device{ID: "gpu-0000-43-00-0", Product: "NVIDIA H100 80GB HBM3", Facts: device.Facts{
				UUID: "GPU-0f1e2d3c-0000-0000-0000-000000000002", PCIBusID: "00000000:43:00.0", PCIRoot: "pci0000:37", NUMA: &minus, Memory: 81559 << 20,
			}}},
			{Device: device.Device{ID: "gpu-0000-1b-00-0", Product: "NVIDIA H100 80GB HBM3", Facts: device.Facts{
				UUID: "GPU-0f1e2d3c-0000-0000-0000-000000000001", Brand: "Nvidia", Architecture: "Hopper", ComputeCapability: "9.0",
				DriverVersion: "580.95.05", CUDAVersion: "13.0", PCIBusID: "0000:1b:00.0", PCIRoot: "pci0000:15", NUMA: &zero,
				NVLinkGroup: "board-0", CliqueID: "7b0f0000-0000-0000-0000-000000000001.3", Memory: 81559 << 20,
			}}, Health: device.Unhealthy},
		},
		Weights: &stock.Weights{
			Artifacts: []stock.Artifact{
				{
					Ref: artifact.Ref{Scheme: "hub", Name: "meta-llama/Llama-3.1-8B-Instruct", Revision: "main"}, Digest: artifact.Digest{0xab, 0xcd},
					Model: "Llama-3.1-8B-Instruct", Format: "safetensors", Size: 16 * units.GiB,
				},
				{
					Ref: artifact.Ref{Scheme: "hub", Name: "org/" + strings.Repeat("long-", 20) + "7B", Revision: "v1"}, Digest: artifact.Digest{0x01},
					Model: strings.Repeat("long-", 20) + "7B", Format: "gguf", Quantization: "Q4_K_M", Size: 4 * units.GiB,
				},
				{Ref: artifact.Ref{Scheme: "dir", Name: "/models/own"}, Digest: artifact.Digest{0x02}, Model: "own", Format: "safetensors", Size: 5},
			},
			Drive: stock.Drive{Tier: "nvme", Free: 3 << 40, PCIRoot: "pci0000:15", NUMA: &zero},
		},
		KV:   &stock.Space{Memory: 256 * units.GiB, NVMe: 2 << 40, NamespaceMemory: 128 * units.GiB},
		Cold: Cold{Failure: "Forbidden", Taken: 1 << 40},
	}
}

func TestTheSlicesOfANodeAreAsRecorded(t *testing.T) {
	t.Parallel()
	plan := PlanSlices(fullNode())
	text, err := yaml.Marshal(map[string]any{"leftOut": plan.LeftOut, "pools": plan.Resources.Pools})
	if err != nil {
		t.Fatal(err)
	}
	const name = "testdata/slices.yaml"
	if *update {
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	recorded, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(recorded), string(text)); diff != "" {
		t.Errorf("slices changed (-recorded +now):\n%s", diff)
	}
	wellFormed(t, plan)
}

// wellFormed checks a plan by our own rules and by those of the API's types.
func wellFormed(t *testing.T, plan Plan) {
	t.Helper()
	for name, pool := range plan.Resources.Pools {
		if err := checkPool(name, pool); err != nil {
			t.Errorf("own check: %v", err)
		}
		for _, slice := range pool.Slices {
			node := "node"
			spec := &resourceapi.ResourceSliceSpec{
				Driver: Name, NodeName: &node, Devices: slice.Devices,
				Pool: resourceapi.ResourcePool{Name: name, ResourceSliceCount: int64(len(pool.Slices))},
			}
			for _, problem := range resourceapi.Validate_ResourceSliceSpec(context.Background(), operation.Operation{Type: operation.Create, Options: map[string]bool{"DRAPartitionableDevicesType": false}}, field.NewPath("spec"), spec, nil) {
				t.Errorf("API: %v", problem)
			}
		}
	}
}

func asBytes(t *testing.T, plan Plan) []byte {
	t.Helper()
	text, err := json.Marshal(plan)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// shuffled is the same offer with its lists in another order.
func shuffled(o Offer, random *rand.Rand) Offer {
	o.GPUs = slices.Clone(o.GPUs)
	random.Shuffle(len(o.GPUs), func(i, j int) { o.GPUs[i], o.GPUs[j] = o.GPUs[j], o.GPUs[i] })
	if o.Weights != nil {
		w := *o.Weights
		w.Artifacts = slices.Clone(w.Artifacts)
		random.Shuffle(len(w.Artifacts), func(i, j int) { w.Artifacts[i], w.Artifacts[j] = w.Artifacts[j], w.Artifacts[i] })
		o.Weights = &w
	}
	return o
}

func TestTheSameStockGivesTheSameBytesInAnyOrder(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	want := asBytes(t, PlanSlices(fullNode()))
	for range 50 {
		if got := asBytes(t, PlanSlices(shuffled(fullNode(), random))); !bytes.Equal(got, want) {
			t.Fatalf("other bytes:\n%s\n%s", got, want)
		}
	}
}

// odd makes offers of weird values from a seed.
func odd(seed uint64) Offer {
	random := rand.New(rand.NewPCG(seed, seed))
	pick := func(from ...string) string { return from[random.IntN(len(from))] }
	text := func() string {
		return pick("", "x", "\xff\xfe", strings.Repeat("é", 33), strings.Repeat("a", 64), strings.Repeat("a", 65), "a/b c\n\x00", "NVIDIA H100", strings.Repeat("long ", 5000))
	}
	number := func() int64 {
		return []int64{0, -1, 1, 15, 16, 17, 1 << 20, 1<<30 - 1, 1 << 30, 1<<40 + 7, 1<<63 - 1, random.Int64()}[random.IntN(12)]
	}
	numa := func() *int {
		n := []int{-1, 0, 1, 1 << 40}[random.IntN(4)]
		return []*int{nil, &n}[random.IntN(2)]
	}
	o := Offer{
		Node: "node-a", Pools: Pools{GPUs: true, Weights: true, KV: true},
		Features: []Features{FeaturesOf(34), FeaturesOf(36), FeaturesOf(37), {ConsumableCapacity: true}}[random.IntN(4)],
		GPUs:     device.Snapshot{},
		Cold:     Cold{Failure: text(), Taken: units.Bytes(number())},
	}
	for range random.IntN(150) {
		id := device.ID(fmt.Sprintf("gpu-%04x-%02x-00-0", random.IntN(3), random.IntN(64)))
		if random.IntN(20) == 0 {
			id = device.ID(text())
		}
		o.GPUs = append(o.GPUs, device.State{Device: device.Device{ID: id, Product: text(), Facts: device.Facts{
			UUID: text(), Brand: text(), Architecture: text(), ComputeCapability: pick("9.0", "", "0", "..", "1.2.3.4", "9.0-x", "007.05", text()),
			DriverVersion: pick("580.95.05", "580", text()), CUDAVersion: pick("13.0", "18446744073709551616.1", text()),
			PCIBusID: pick("0000:1b:00.0", "00000000:1B:00.0", "10000:1b:00.0", text()), PCIRoot: pick("pci0000:15", text()), NUMA: numa(),
			NVLinkGroup: text(), CliqueID: text(), Memory: number(),
		}}, Health: device.Health(random.IntN(4))})
	}
	w := stock.Weights{Drive: stock.Drive{Tier: text(), Free: units.Bytes(number()), PCIRoot: pick("pci0000:15", text()), NUMA: numa()}}
	for range random.IntN(200) {
		w.Artifacts = append(w.Artifacts, stock.Artifact{
			Ref:    artifact.Ref{Scheme: pick("hub", "dir", text()), Name: text(), Revision: text()},
			Digest: artifact.Digest{byte(random.IntN(128)), 8: byte(random.IntN(2))},
			Commit: text(), Model: text(), Format: text(), Quantization: text(), Size: units.Bytes(number()),
		})
	}
	o.Weights = &w
	o.KV = &stock.Space{Memory: units.Bytes(number()), NVMe: units.Bytes(number()), NamespaceMemory: units.Bytes(number()), NamespaceNVMe: units.Bytes(number())}
	return o
}

func FuzzPlanSlicesIsAlwaysValidAndStable(f *testing.F) {
	for seed := range uint64(40) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		o := odd(seed)
		plan := PlanSlices(o)
		wellFormed(t, plan)
		want := asBytes(t, plan)
		if got := asBytes(t, PlanSlices(shuffled(o, rand.New(rand.NewPCG(seed, 0))))); !bytes.Equal(got, want) {
			t.Errorf("seed %d: the order of a list shows", seed)
		}
		var back Plan
		if err := json.Unmarshal(want, &back); err != nil {
			t.Fatal(err)
		}
		if names := changedPools(plan.Resources.Pools, back.Resources.Pools); len(names) > 0 {
			t.Errorf("seed %d: pools %v do not survive the wire", seed, names)
		}
	})
}

func TestManyGPUsAreCutAtSixtyFour(t *testing.T) {
	t.Parallel()
	o := Offer{Node: "n", Pools: Pools{GPUs: true}, GPUs: device.Snapshot{}}
	for i := range 130 {
		o.GPUs = append(o.GPUs, device.State{Device: device.Device{ID: device.ID(fmt.Sprintf("gpu-%04x-00-00-0", i))}})
	}
	var sizes []int
	for _, slice := range PlanSlices(o).Resources.Pools["n"].Slices {
		sizes = append(sizes, len(slice.Devices))
	}
	if !slices.Equal(sizes, []int{64, 64, 2}) {
		t.Errorf("slices of %v devices", sizes)
	}
}

func TestWeightsFillOneSliceAndWhatStaysOutIsTold(t *testing.T) {
	t.Parallel()
	o := Offer{Node: "n", Pools: Pools{Weights: true}, Features: FeaturesOf(37), Weights: &stock.Weights{Drive: stock.Drive{Free: units.GiB}}}
	for i := range 70 {
		o.Weights.Artifacts = append(o.Weights.Artifacts, stock.Artifact{
			Ref: artifact.Ref{Scheme: "hub", Name: fmt.Sprintf("org/m%d", i), Revision: "main"}, Digest: artifact.Digest{byte(i + 1)}, Size: units.Bytes(i),
		})
	}
	plan := PlanSlices(o)
	pool := plan.Resources.Pools["n/weights"]
	if len(pool.Slices) != 1 || len(pool.Slices[0].Devices) != 64 {
		t.Fatalf("want one slice of 64 devices, got %d slices", len(pool.Slices))
	}
	if len(plan.LeftOut) != 7 || !strings.Contains(plan.LeftOut[0], "hub://org/m6@main: only the largest 63") {
		t.Errorf("left out: %q", plan.LeftOut)
	}
	wellFormed(t, plan)
}

func TestAPoolIsPublishedOnlyWhereItIsAskedForAndKnown(t *testing.T) {
	t.Parallel()
	all := fullNode()
	for name, c := range map[string]struct {
		change func(*Offer)
		want   []string
	}{
		"all":                    {func(*Offer) {}, []string{"node-a", "node-a/kv", "node-a/weights"}},
		"none":                   {func(o *Offer) { o.Pools = Pools{} }, nil},
		"beside another driver":  {func(o *Offer) { o.Pools.GPUs = false }, []string{"node-a/kv", "node-a/weights"}},
		"no KV space":            {func(o *Offer) { o.KV = &stock.Space{} }, []string{"node-a", "node-a/weights"}},
		"nothing known yet":      {func(o *Offer) { o.GPUs, o.Weights, o.KV = nil, nil, nil }, nil},
		"no GPU on the node":     {func(o *Offer) { o.GPUs, o.Weights, o.KV = device.Snapshot{}, nil, nil }, []string{"node-a"}},
		"no consumable capacity": {func(o *Offer) { o.Features.ConsumableCapacity = false }, []string{"node-a"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := all
			c.change(&o)
			plan := PlanSlices(o)
			if got := slices.Sorted(maps.Keys(plan.Resources.Pools)); !slices.Equal(got, c.want) {
				t.Errorf("pools %q, want %q", got, c.want)
			}
			wellFormed(t, plan)
		})
	}
}

func TestWithoutTaintsTheColdDeviceIsLeftOutWhileAPullHasFailed(t *testing.T) {
	t.Parallel()
	o := fullNode()
	o.Features.DeviceTaints = false
	plan := PlanSlices(o)
	for _, d := range plan.Resources.Pools["node-a/weights"].Slices[0].Devices {
		if d.Name == DeviceCold {
			t.Error("the cold device is published without its taint")
		}
	}
	if !slices.ContainsFunc(plan.LeftOut, func(s string) bool { return strings.HasPrefix(s, "cold: ") }) {
		t.Errorf("left out: %q", plan.LeftOut)
	}
	o.Cold.Failure = ""
	if devices := PlanSlices(o).Resources.Pools["node-a/weights"].Slices[0].Devices; devices[0].Name != DeviceCold {
		t.Errorf("the cold device is missing though nothing failed: %s", devices[0].Name)
	}
}

func TestPoolsAreNamedByConfiguration(t *testing.T) {
	t.Parallel()
	got, err := ParsePools([]string{"weights", "kv"})
	if err != nil || got != (Pools{Weights: true, KV: true}) {
		t.Errorf("got %v, %v", got, err)
	}
	if _, err := ParsePools([]string{"gpu"}); err == nil || !strings.Contains(err.Error(), `"gpu"`) {
		t.Errorf("got %v", err)
	}
}
