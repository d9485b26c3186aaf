package cli

import (
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"sigs.k8s.io/yaml"

	"github.com/hearth-dev/hearth/api/v1alpha1"
	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// printed runs hearth with arguments and gives its answer.
func printed(t *testing.T, args ...string) string {
	t.Helper()
	out, complaint, code := hearth(t, args...)
	if code != terminal.ExitOK {
		t.Fatalf("hearth %q ended with %d: %s", args, code, complaint)
	}
	return out
}

// template reads what `hearth claim` printed as strictly as an API server does.
func template(t *testing.T, args ...string) *resourceapi.ResourceClaimTemplate {
	t.Helper()
	text := printed(t, append([]string{"claim"}, args...)...)
	object := &resourceapi.ResourceClaimTemplate{}
	if err := yaml.UnmarshalStrict([]byte(text), object); err != nil {
		t.Fatalf("hearth claim %q printed no ResourceClaimTemplate: %v\n%s", args, err, text)
	}
	if object.APIVersion != "resource.k8s.io/v1" || object.Kind != "ResourceClaimTemplate" {
		t.Fatalf("hearth claim %q printed a %s of %s", args, object.Kind, object.APIVersion)
	}
	defaults(&object.Spec.Spec)
	return object
}

// defaults sets what an API server sets in a claim that does not say it.
func defaults(spec *resourceapi.ResourceClaimSpec) {
	set := func(mode *resourceapi.DeviceAllocationMode, count *int64) {
		if *mode == "" {
			*mode = resourceapi.DeviceAllocationModeExactCount
		}
		if *mode == resourceapi.DeviceAllocationModeExactCount && *count == 0 {
			*count = 1
		}
	}
	for i := range spec.Devices.Requests {
		if r := spec.Devices.Requests[i].Exactly; r != nil {
			set(&r.AllocationMode, &r.Count)
		}
		for j := range spec.Devices.Requests[i].FirstAvailable {
			r := &spec.Devices.Requests[i].FirstAvailable[j]
			set(&r.AllocationMode, &r.Count)
		}
	}
}

// newNode is what a node with two GPUs on each of two PCIe roots offers.
func newNode(name, product string, artifacts ...stock.Artifact) dradriver.Offer {
	offer := dradriver.Offer{
		Node: name, Pools: dradriver.Pools{GPUs: true, Weights: true, KV: true}, Features: dradriver.FeaturesOf(37),
		Weights: &stock.Weights{Artifacts: artifacts, Drive: stock.Drive{Tier: "nvme", Free: 100 * units.GiB}},
		KV:      &stock.Space{Memory: 100 * units.GiB, NVMe: 400 * units.GiB},
	}
	for i, bus := range []string{"0000:1b:00.0", "0000:1c:00.0", "0000:9b:00.0", "0000:9c:00.0"} {
		id := "gpu-" + strings.NewReplacer(":", "-", ".", "-").Replace(bus)
		offer.GPUs = append(offer.GPUs, device.State{Device: device.Device{ID: device.ID(id), Product: product, Facts: device.Facts{
			UUID: "GPU-" + id, PCIBusID: bus, PCIRoot: []string{"pci0000:17", "pci0000:97"}[i/2], NUMA: new(i / 2), NVLinkGroup: "nvl-0", Memory: 80 << 30,
		}}})
	}
	return offer
}

func newArtifact(ref, model string, digit byte) stock.Artifact {
	a := stock.Artifact{Model: model, Size: 3 * units.GiB, Format: "safetensors"}
	a.Ref, _ = artifact.ParseRef(ref) // the tests' own refs
	a.Digest[0] = digit
	return a
}

// allocate runs the scheduler's allocator for a claim on one node; nil where
// the node cannot have it.
func allocate(t *testing.T, spec resourceapi.ResourceClaimSpec, offer dradriver.Offer) *resourceapi.AllocationResult {
	t.Helper()
	var published []*resourceapi.ResourceSlice
	plan := dradriver.PlanSlices(offer)
	for _, name := range slices.Sorted(maps.Keys(plan.Resources.Pools)) {
		pool := plan.Resources.Pools[name]
		for _, slice := range pool.Slices {
			published = append(published, &resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{Name: strings.ReplaceAll(name, "/", "-")},
				Spec: resourceapi.ResourceSliceSpec{
					Driver: dradriver.Name, NodeName: &offer.Node, Devices: slice.Devices,
					Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(pool.Slices))},
				},
			})
		}
	}
	allocator, err := structured.NewAllocator(t.Context(),
		structured.Features{AdminAccess: true, PrioritizedList: true, ConsumableCapacity: true, DeviceTaints: true, PartitionableDevices: true, DeviceBindingAndStatus: true},
		structured.AllocatedState{
			AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
			AggregatedCapacity: structured.NewConsumedCapacityCollection(),
		}, newClasses(t), published, cel.NewCache(10, cel.Features{EnableConsumableCapacity: true}))
	if err != nil {
		t.Fatal(err)
	}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "llm", Name: "c", UID: types.UID("uid")}, Spec: spec}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: offer.Node}}
	results, err := allocator.Allocate(t.Context(), node, []*resourceapi.ResourceClaim{claim})
	if err != nil {
		t.Fatalf("the allocator failed: %v", err)
	}
	if len(results) == 0 {
		return nil
	}
	return &results[0]
}

// classes are the DeviceClasses of the manifests.
type classes map[string]*resourceapi.DeviceClass

// List implements structured.DeviceClassLister.
func (c classes) List() ([]*resourceapi.DeviceClass, error) {
	return slices.Collect(maps.Values(c)), nil
}

// Get implements structured.DeviceClassLister.
func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if class := c[name]; class != nil {
		return class, nil
	}
	return nil, os.ErrNotExist
}

func newClasses(t *testing.T) classes {
	t.Helper()
	c := classes{}
	for _, kind := range []string{dradriver.KindGPU, dradriver.KindWeights, dradriver.KindKV} {
		class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: class(kind)}}
		class.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: `device.driver == "hearth.dev" && device.attributes["hearth.dev"].kind == "` + kind + `"`,
		}}}
		c[class.Name] = class
	}
	return c
}

// got maps requests to the devices that an allocation gives them.
func got(result *resourceapi.AllocationResult) map[string][]string {
	if result == nil {
		return nil
	}
	found := map[string][]string{}
	for _, r := range result.Devices.Results {
		found[r.Request] = append(found[r.Request], r.Device)
	}
	return found
}

func TestAPrintedClaimGetsGPUsWeightsAndKVSpaceFromTheRealAllocator(t *testing.T) {
	t.Parallel()
	smol := newArtifact("hub://org/smol@main", "smol", 1)
	fork := newArtifact("hub://fork/smol@main", "smol", 2)
	spec := template(t, "--model", "smol", "--ref", "hub://org/smol", "--gpus", "2", "--kv", "40Gi", "--kv-nvme", "100GiB", "--size", "3Gi").Spec.Spec

	warm := got(allocate(t, spec, newNode("warm", "NVIDIA H200", fork, smol)))
	if len(warm["gpu"]) != 2 || !slices.Equal(warm["weights/warm"], []string{dradriver.WeightsDevice(smol.Digest)}) || !slices.Equal(warm["kv"], []string{"kv"}) {
		t.Errorf("a node that has the model gives %v", warm)
	}
	cold := got(allocate(t, spec, newNode("cold", "NVIDIA H200", fork)))
	if len(cold["gpu"]) != 2 || !slices.Equal(cold["weights/cold"], []string{dradriver.DeviceCold}) {
		t.Errorf("a node that has another one of that name gives %v, want its cold device", cold)
	}
	full := newNode("full", "NVIDIA H200")
	full.Weights.Drive.Free = 2 * units.GiB
	if result := got(allocate(t, spec, full)); result != nil {
		t.Errorf("a node without room for the model gives %v", result)
	}
	small := newNode("small", "NVIDIA H200", smol)
	small.KV.Memory = 39 * units.GiB
	if result := got(allocate(t, spec, small)); result != nil {
		t.Errorf("a node with less KV space than asked for gives %v", result)
	}

	weights := spec.Devices.Requests[1]
	if n := len(weights.FirstAvailable); n != 8 || weights.FirstAvailable[0].Name != "warm" || weights.FirstAvailable[7].Name != "cold" {
		t.Errorf("the alternatives are %d, from %s on; want warm at index 0 and cold at index 7", n, weights.FirstAvailable[0].Name)
	}
	if len(spec.Devices.Config) != 1 || !slices.Equal(spec.Devices.Config[0].Requests, []string{"weights/cold"}) ||
		string(spec.Devices.Config[0].Opaque.Parameters.Raw) != `{"apiVersion":"hearth.dev/v1alpha1","kind":"WeightsConfig","ref":"hub://org/smol@main"}` {
		t.Errorf("the configuration is %+v", spec.Devices.Config)
	}
}

func TestAPrintedClaimWithoutARefWaitsForANodeThatHasTheModel(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("long-", 20)
	spec := template(t, "--model", long, "--gpus", "0").Spec.Spec
	if result := got(allocate(t, spec, newNode("cold", "NVIDIA H200"))); result != nil {
		t.Errorf("a node without the model gives %v", result)
	}
	local := newArtifact("dir:///models/x", long, 3)
	result := got(allocate(t, spec, newNode("warm", "NVIDIA H200", local)))
	if !slices.Equal(result["weights"], []string{dradriver.WeightsDevice(local.Digest)}) {
		t.Errorf("a node that has a model whose name no attribute can hold gives %v", result)
	}
}

func TestAPrintedClaimSelectsGPUsByProductAndByWhatTheyHaveInCommon(t *testing.T) {
	t.Parallel()
	node := newNode("node", "NVIDIA H200")
	byProduct := func(product string) map[string][]string {
		return got(allocate(t, template(t, "--gpus", "1", "--product", product).Spec.Spec, node))
	}
	if result := byProduct("NVIDIA H200"); len(result["gpu"]) != 1 {
		t.Errorf("by its product a node gives %v", result)
	}
	if result := byProduct(`NVIDIA "B200" it's`); result != nil {
		t.Errorf("by another product a node gives %v", result)
	}
	for same, most := range map[string]int{"pcieRoot": 2, "numaNode": 2, "nvlink": 4} {
		for gpus := 1; gpus <= 5; gpus++ {
			spec := template(t, "--gpus", string(rune('0'+gpus)), "--same", same).Spec.Spec
			if result := got(allocate(t, spec, node)); len(result["gpu"]) != gpus && gpus <= most || result != nil && gpus > most {
				t.Errorf("%d GPUs of the same %s: %v", gpus, same, result)
			}
		}
	}
}

func TestASharedClaimIsAResourceClaim(t *testing.T) {
	t.Parallel()
	text := printed(t, "claim", "--ref", "hub://org/Big.Model-1_2@v1", "--shared", "--namespace", "llm", "--path", "/models/it's")
	object := &resourceapi.ResourceClaim{}
	if err := yaml.UnmarshalStrict([]byte(text), object); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if object.Kind != "ResourceClaim" || object.Name != "big-model-1-2" || object.Namespace != "llm" || len(object.Spec.Devices.Requests) != 2 {
		t.Errorf("it is a %s %s/%s with %d requests", object.Kind, object.Namespace, object.Name, len(object.Spec.Devices.Requests))
	}
	var paths []string
	for _, c := range object.Spec.Devices.Config {
		paths = append(paths, strings.Join(c.Requests, " "))
		if !strings.Contains(string(c.Opaque.Parameters.Raw), `"containerPath":"/models/it's"`) {
			t.Errorf("%q has parameters %s", c.Requests, c.Opaque.Parameters.Raw)
		}
	}
	if !slices.Equal(paths, []string{"weights/warm", "weights/cold"}) || !strings.Contains(text, "resourceClaimName: big-model-1-2") {
		t.Errorf("configurations are for %q\n%s", paths, text)
	}
	for _, name := range []string{"true", "123", "on", "1e3"} {
		if object := template(t, "--gpus", "1", "--name", name); object.Name != name {
			t.Errorf("--name %s became %q", name, object.Name)
		}
	}
}

func TestWhatCannotBeClaimedIsAUsageError(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"--gpus", "0"},
		{"--gpus", "31"},
		{"--gpus", "-1"},
		{"--gpus", "0", "--kv", "1Gi", "--product", "x"},
		{"--kv", "much"},
		{"--kv", "-1Gi"},
		{"--kv", "0"},
		{"--ref", "s3://x"},
		{"--ref", "dir:///models/x"},
		{"--ref", "hub://org/smol", "--model", "big"},
		{"--same", "rack"},
		{"--size", "3Gi"},
		{"--name", "Big"},
		{"--namespace", "a.b"},
		{"--path", "/x"},
		{"--model", "m", "--path", "x"},
		{"--model", "m", "--path", "/models\nkind: Secret"},
		{"--model", "m", "--path", "/models\t"},
		{"--model", "m", "--path", "/models:rw"},
		{"--model", "m", "--path", "/etc/ssl"},
		{"--model", "m", "--path", "/a/../b"},
		{"--ref", "hub://org/m@main\nkind: Secret"},
		{"--product", "x\ny"},
		{"--kv", "1Gi\n"},
		{"--kv-nvme", "1Gi\n"},
		{"--ref", "hub://org/m", "--size", "1Gi\n"},
		{"--same", "nvlink\n"},
		{"--name", "a\nb"},
		{"--namespace", "a\nb"},
		{"--model", "org/m"},
		{"--model", "a\nb"},
	} {
		out, said, code := hearth(t, append([]string{"claim"}, args...)...)
		if code != terminal.ExitUsage || out != "" {
			t.Errorf("hearth claim %q ended with %d and printed %q: %s", args, code, out, said)
		}
	}
}

func TestWhateverMayBeSaidOfAClaimIsReadBackAsItWasSaid(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"/it's", `/a "b"`, "/# no comment", "/käse", "/\u2028", "/{a}", "/ a"} {
		config := template(t, "--model", "m", "--path", path).Spec.Spec.Devices.Config
		if len(config) != 1 {
			t.Fatalf("--path %q gave %v", path, config)
		}
		decoded, err := v1alpha1.Decode(config[0].Opaque.Parameters.Raw)
		if weights, ok := decoded.(*v1alpha1.WeightsConfig); !ok || weights.ContainerPath != path {
			t.Errorf("--path %q became %+v, %v", path, decoded, err)
		}
	}
	for _, name := range []string{"null", "yes", "12", "1e3", "0x1f"} {
		if got := template(t, "--model", "m", "--name", name, "--namespace", name); got.Name != name || got.Namespace != name {
			t.Errorf("name %q became %q, %q", name, got.Name, got.Namespace)
		}
	}
}

func FuzzAQuotedTextIsOneLineThatReadsBackAsItself(f *testing.F) {
	for _, text := range []string{"", "a", "it's", "a\nb", "\x00", "\u2028", "\u0085", "\ufeff", "😀", "- a", "'", `"`, "\\n", "\x7f"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if !utf8.ValidString(text) {
			return
		}
		quoted := quote(text)
		var got struct{ A string }
		if err := yaml.UnmarshalStrict([]byte("a: "+quoted+"\n"), &got); err != nil || got.A != text || strings.ContainsAny(quoted, "\n\r") {
			t.Errorf("%q is written as %s and read as %q, %v", text, quoted, got.A, err)
		}
	})
}
