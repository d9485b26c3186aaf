package dradriver_test

import (
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceclass/extendedresourcecache"
	"k8s.io/klog/v2"
	"sigs.k8s.io/yaml"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/simgpu"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// simulated gives the GPUs that a SimInventory has for a node.
func simulated(t *testing.T, node, gpus string) device.Snapshot {
	t.Helper()
	list, err := simgpu.Parse("sim.yaml", []byte("apiVersion: hearth.dev/v1alpha1\nkind: SimInventory\n"+gpus), node)
	if err != nil {
		t.Fatal(err)
	}
	snapshot, _ := dradriver.StaticInventory(list).Devices()
	return snapshot
}

func offerOf(t *testing.T, node string, minor int, gpus string) dradriver.Offer {
	t.Helper()
	return dradriver.Offer{
		Node: node, Pools: dradriver.Pools{GPUs: true, Weights: true, KV: true},
		Features: dradriver.FeaturesOf(minor), GPUs: simulated(t, node, gpus),
	}
}

func ref(t *testing.T, text string) artifact.Ref {
	t.Helper()
	r, err := artifact.ParseRef(text)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// model is an artifact named by one byte of its digest.
func model(t *testing.T, name string, id byte, size units.Bytes) stock.Artifact {
	t.Helper()
	return stock.Artifact{
		Ref: ref(t, "hub://org/"+name+"@main"), Digest: artifact.Digest{id, 1, 2, 3}, Model: name, Format: "safetensors", Size: size,
	}
}

func weightsOf(free units.Bytes, artifacts ...stock.Artifact) *stock.Weights {
	numa := 0
	return &stock.Weights{Artifacts: artifacts, Drive: stock.Drive{Tier: "nvme", Free: free, PCIRoot: "pci0000:37", NUMA: &numa}}
}

const (
	eightH100 = "gpus: [{product: h100, count: 8}]\n"
	warmFirst = `
requests:
- name: weights
  firstAvailable:
  - name: warm
    deviceClassName: weights.hearth.dev
    selectors: [{cel: {expression: 'device.attributes["hearth.dev"].model == "llama"'}}]
  - {name: pad-1, deviceClassName: weights.hearth.dev, selectors: [{cel: {expression: 'false'}}]}
  - {name: pad-2, deviceClassName: weights.hearth.dev, selectors: [{cel: {expression: 'false'}}]}
  - {name: pad-3, deviceClassName: weights.hearth.dev, selectors: [{cel: {expression: 'false'}}]}
  - {name: pad-4, deviceClassName: weights.hearth.dev, selectors: [{cel: {expression: 'false'}}]}
  - {name: pad-5, deviceClassName: weights.hearth.dev, selectors: [{cel: {expression: 'false'}}]}
  - {name: pad-6, deviceClassName: weights.hearth.dev, selectors: [{cel: {expression: 'false'}}]}
  - name: cold
    deviceClassName: weights.hearth.dev
    selectors: [{cel: {expression: 'device.attributes["hearth.dev"].tier == "cold"'}}]
    capacity: {requests: {size: 40Gi}}
`
)

func TestAClaimGetsGPUsByAttributeAndMemoryInEveryMinor(t *testing.T) {
	t.Parallel()
	claim := devices(t, `
requests:
- name: gpu
  exactly:
    deviceClassName: gpu.hearth.dev
    count: 2
    selectors:
    - cel:
        expression: >-
          device.attributes["hearth.dev"].productName == "NVIDIA H200" &&
          device.attributes["hearth.dev"].cudaComputeCapability.compareTo(semver("9.0.0")) >= 0 &&
          device.attributes["hearth.dev"].driverVersion.isGreaterThan(semver("570.0.0")) &&
          device.capacity["hearth.dev"].memory.compareTo(quantity("100Gi")) >= 0
`)
	for _, minor := range minors {
		s := newScheduler(t, gatesOf(minor),
			offerOf(t, "small", minor, eightH100), offerOf(t, "large", minor, "gpus: [{product: h200, count: 4}]\n"))
		s.refuse(t, "small", claim, "no H200 is there")
		if got := named(s.allocate(t, "large", claim)); got != "gpu=gpu-0000-1b-00-0 gpu=gpu-0000-43-00-0" {
			t.Errorf("1.%d: got %q", minor, got)
		}
		if got := named(s.allocate(t, "large", claim)); got != "gpu=gpu-0000-52-00-0 gpu=gpu-0000-61-00-0" {
			t.Errorf("1.%d: got %q", minor, got)
		}
		s.refuse(t, "large", claim, "all four are taken")
	}
}

func TestMatchAttributeKeepsGPUsBehindOnePCIeRoot(t *testing.T) {
	t.Parallel()
	pair := `
requests: [{name: gpu, exactly: {deviceClassName: gpu.hearth.dev, count: 2}}]
constraints: [{matchAttribute: resource.kubernetes.io/pcieRoot}]
`
	for _, minor := range minors {
		s := newScheduler(t, gatesOf(minor), offerOf(t, "a", minor, "gpus: [{product: a100, count: 8}]\n"))
		s.refuse(t, "a", devices(t, strings.Replace(pair, "count: 2", "count: 3", 1)), "a root complex has two GPUs")
		if got := named(s.allocate(t, "a", devices(t, pair))); got != "gpu=gpu-0000-07-00-0 gpu=gpu-0000-0f-00-0" {
			t.Errorf("1.%d: got %q", minor, got)
		}
		one := devices(t, `requests: [{name: gpu, exactly: {deviceClassName: gpu.hearth.dev}}]`)
		if got := named(s.allocate(t, "a", one)); got != "gpu=gpu-0000-47-00-0" {
			t.Errorf("1.%d: got %q", minor, got)
		}
		if got := named(s.allocate(t, "a", devices(t, pair))); got != "gpu=gpu-0000-87-00-0 gpu=gpu-0000-90-00-0" {
			t.Errorf("1.%d: the half free root should have been passed over: got %q", minor, got)
		}
	}
}

func TestMatchAttributeKeepsGPUsOnOneNVLinkGroup(t *testing.T) {
	t.Parallel()
	linked := devices(t, `
requests: [{name: gpu, exactly: {deviceClassName: gpu.hearth.dev, count: 8}}]
constraints: [{matchAttribute: hearth.dev/nvlinkGroup}]
`)
	s := newScheduler(t, gatesOf(37),
		offerOf(t, "boards", 37, "gpus: [{product: h100, count: 12}]\n"),
		offerOf(t, "cards", 37, "gpus: [{product: h100, count: 8, nvlink: false}]\n"))
	got := s.allocate(t, "boards", linked)
	if len(got) != 8 || slices.ContainsFunc(got, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return !strings.HasPrefix(r.Device, "gpu-0000-")
	}) {
		t.Errorf("got %s, want the eight of the first board", named(got))
	}
	s.refuse(t, "boards", linked, "the second board has four")
	s.refuse(t, "cards", linked, "cards without NVLink have no group in common")
}

func TestGPUsAndWeightsBehindOneRootComplex(t *testing.T) {
	t.Parallel()
	offer := offerOf(t, "a", 37, eightH100)
	offer.Weights = weightsOf(0, model(t, "llama", 7, units.GiB))
	s := newScheduler(t, gatesOf(37), offer)
	claim := devices(t, `
requests:
- {name: gpu, exactly: {deviceClassName: gpu.hearth.dev}}
- name: weights
  exactly: {deviceClassName: weights.hearth.dev, selectors: [{cel: {expression: 'device.attributes["hearth.dev"].model == "llama"'}}]}
constraints: [{matchAttribute: resource.kubernetes.io/pcieRoot}]
`)
	if got := named(s.allocate(t, "a", claim)); got != "gpu=gpu-0000-43-00-0 weights=w-0701020300000000" {
		t.Errorf("got %q, want the GPU behind the drive's root", got)
	}
}

func TestWarmNodesArePreferredAndColdOnesCountTheirSpace(t *testing.T) {
	t.Parallel()
	warm, cold := offerOf(t, "warm", 37, eightH100), offerOf(t, "cold", 37, eightH100)
	warm.Weights = weightsOf(100*units.GiB, model(t, "llama", 1, 40*units.GiB), model(t, "qwen", 2, units.GiB))
	cold.Weights = weightsOf(100*units.GiB, model(t, "qwen", 2, units.GiB))
	s := newScheduler(t, gatesOf(37), warm, cold)
	claim := devices(t, warmFirst)
	got := s.allocate(t, "warm", claim)
	if named(got) != "weights/warm=w-0101020300000000" || score(claim, got) != 8 {
		t.Errorf("warm node: got %s with %d points", named(got), score(claim, got))
	}
	for range 2 {
		got := s.allocate(t, "cold", claim)
		if named(got) != "weights/cold=cold" || score(claim, got) != 1 {
			t.Errorf("cold node: got %s with %d points", named(got), score(claim, got))
		}
		if size := got[0].ConsumedCapacity[dradriver.CapacitySize]; size.String() != "40Gi" {
			t.Errorf("the pull takes %s of the free space", size.String())
		}
	}
	s.refuse(t, "cold", claim, "20 GiB are left")
	unsized := devices(t, `
requests: [{name: w, exactly: {deviceClassName: weights.hearth.dev, selectors: [{cel: {expression: 'device.attributes["hearth.dev"].tier == "cold"'}}]}}]
`)
	got = s.allocate(t, "cold", unsized)
	if size := got[0].ConsumedCapacity[dradriver.CapacitySize]; size.String() != "6400Mi" {
		t.Errorf("a claim that names no size takes %s, want a sixteenth of 100 GiB", size.String())
	}
}

func TestManyClaimsShareOneWeightsDevice(t *testing.T) {
	t.Parallel()
	offer := offerOf(t, "a", 37, eightH100)
	offer.Weights = weightsOf(0, model(t, "llama", 1, 40*units.GiB))
	s := newScheduler(t, gatesOf(37), offer)
	text := `
requests:
- name: weights
  exactly: {deviceClassName: weights.hearth.dev, selectors: [{cel: {expression: 'device.attributes["hearth.dev"].model == "llama"'}}]}
`
	shares := map[string]bool{}
	for range 20 {
		got := s.allocate(t, "a", devices(t, text))
		if len(got) != 1 || got[0].ShareID == nil || shares[string(*got[0].ShareID)] {
			t.Fatalf("got %v, want a share of its own", got)
		}
		shares[string(*got[0].ShareID)] = true
		if size := got[0].ConsumedCapacity[dradriver.CapacitySize]; !size.IsZero() {
			t.Errorf("a reader consumes %s", size.String())
		}
	}
	asks := devices(t, strings.Replace(text, "weights.hearth.dev,", "weights.hearth.dev, capacity: {requests: {size: 1Gi}},", 1))
	s.refuse(t, "a", asks, "readers consume nothing")
}

func TestKVSpaceIsGivenInStepsUntilItIsFull(t *testing.T) {
	t.Parallel()
	offer := offerOf(t, "a", 37, eightH100)
	offer.KV = &stock.Space{Memory: 64 * units.GiB, NVMe: 1 << 40, NamespaceMemory: 40 * units.GiB}
	s := newScheduler(t, gatesOf(37), offer)
	ask := func(requests string) *resourceapi.ResourceClaim {
		return devices(t, "requests: [{name: kv, exactly: {deviceClassName: kv.hearth.dev"+requests+"}}]")
	}
	takes := func(claim *resourceapi.ResourceClaim, memory, nvme string) {
		t.Helper()
		got := s.allocate(t, "a", claim)
		if len(got) != 1 {
			t.Fatalf("got %v", got)
		}
		m, n := got[0].ConsumedCapacity[dradriver.CapacityMemory], got[0].ConsumedCapacity[dradriver.CapacityNVMe]
		if m.String() != memory || n.String() != nvme {
			t.Errorf("takes %s of memory and %s of the drive, want %s and %s", m.String(), n.String(), memory, nvme)
		}
	}
	s.refuse(t, "a", ask(", capacity: {requests: {memory: 41Gi}}"), "a namespace may have 40 GiB")
	takes(ask(", capacity: {requests: {memory: 40Gi}}"), "40Gi", "0")
	takes(ask(", capacity: {requests: {memory: 1500Mi, nvme: 100Gi}}"), "2Gi", "100Gi")
	takes(ask(""), "1Gi", "0")
	s.refuse(t, "a", ask(", capacity: {requests: {memory: 22Gi}}"), "21 GiB are left")
	takes(ask(", capacity: {requests: {memory: 21Gi}}"), "21Gi", "0")
	s.refuse(t, "a", ask(", capacity: {requests: {memory: 1Gi}}"), "memory is full")
	takes(ask(", capacity: {requests: {memory: 0, nvme: 924Gi}}"), "0", "924Gi")
	s.refuse(t, "a", ask(", capacity: {requests: {memory: 0, nvme: 1Gi}}"), "the drive is full")
}

func TestNoClaimGetsAColdDeviceWhosePullFailedUnlessItToleratesThat(t *testing.T) {
	t.Parallel()
	offer := offerOf(t, "a", 37, eightH100)
	offer.Weights = weightsOf(100*units.GiB, model(t, "qwen", 2, units.GiB))
	offer.Cold.Failure = "Forbidden"
	s := newScheduler(t, gatesOf(37), offer)
	s.refuse(t, "a", devices(t, warmFirst), "the last pull failed")
	tolerant := devices(t, strings.Replace(warmFirst, "    capacity: {requests: {size: 40Gi}}",
		"    tolerations: [{key: hearth.dev/pull-failed, operator: Exists}]", 1))
	if got := named(s.allocate(t, "a", tolerant)); got != "weights/cold=cold" {
		t.Errorf("got %q", got)
	}
	warm := devices(t, strings.ReplaceAll(warmFirst, `"llama"`, `"qwen"`))
	if got := named(s.allocate(t, "a", warm)); got != "weights/warm=w-0201020300000000" {
		t.Errorf("warm weights do not suffer: got %q", got)
	}
}

func TestWithoutConsumableCapacityOnlyGPUsAreClaimed(t *testing.T) {
	t.Parallel()
	for _, minor := range []int{34, 35} {
		offer := offerOf(t, "a", minor, eightH100)
		offer.Weights, offer.KV = weightsOf(100*units.GiB, model(t, "llama", 1, units.GiB)), &stock.Space{Memory: units.GiB}
		s := newScheduler(t, gatesOf(minor), offer)
		s.refuse(t, "a", devices(t, warmFirst), "weights are not published")
		s.refuse(t, "a", devices(t, "requests: [{name: kv, exactly: {deviceClassName: kv.hearth.dev}}]"), "KV is not published")
		if got := s.allocate(t, "a", devices(t, "requests: [{name: gpu, exactly: {deviceClassName: gpu.hearth.dev}}]")); len(got) != 1 {
			t.Errorf("1.%d: no GPU", minor)
		}

		// Why: an API server without the gate makes of a shared device one that
		// belongs to its first claim.
		offer.Features.ConsumableCapacity = true
		s = newScheduler(t, gatesOf(minor), offer)
		reader := devices(t, `
requests:
- name: weights
  exactly: {deviceClassName: weights.hearth.dev, selectors: [{cel: {expression: 'device.attributes["hearth.dev"].model == "llama"'}}]}
`)
		if got := s.allocate(t, "a", reader); len(got) != 1 || got[0].ShareID != nil {
			t.Errorf("1.%d: got %v", minor, got)
		}
		s.refuse(t, "a", reader, "the first reader has the device alone")
	}
}

func TestAnExtendedResourceNameLeadsToOurClass(t *testing.T) {
	t.Parallel()
	classes := extendedresourcecache.NewExtendedResourceCache(klog.Background())
	for _, class := range deviceClasses(t) {
		if class.Name == "gpu.hearth.dev" { // as the component extended-resource does
			class.Spec.ExtendedResourceName = new("nvidia.com/gpu")
		}
		classes.OnAdd(class, true)
	}
	class := classes.GetDeviceClass(corev1.ResourceName("nvidia.com/gpu"))
	if class == nil || class.Name != "gpu.hearth.dev" {
		t.Fatalf("nvidia.com/gpu leads to %v", class)
	}
	// The claim that the scheduler makes of `nvidia.com/gpu: 2`.
	claim := devices(t, `requests: [{name: container-0-request-0, exactly: {deviceClassName: `+class.Name+`, count: 2}}]`)
	for _, minor := range minors {
		if !dradriver.FeaturesOf(minor).ExtendedResource {
			continue
		}
		offer := offerOf(t, "a", minor, "gpus: [{product: a100, count: 3}]\n")
		offer.Weights, offer.KV = weightsOf(100*units.GiB, model(t, "llama", 1, units.GiB)), &stock.Space{Memory: units.GiB}
		s := newScheduler(t, gatesOf(minor), offer)
		if got := s.allocate(t, "a", claim); len(got) != 2 || got[0].Pool != "a" || got[1].Pool != "a" {
			t.Errorf("1.%d: got %s", minor, named(got))
		}
		s.refuse(t, "a", claim, "one GPU is left")
	}
}

func TestASelectorNeverFailsOnADeviceOfWhichLittleIsKnown(t *testing.T) {
	t.Parallel()
	offer := offerOf(t, "a", 37, "devices: [{pciBusID: \"0000:01:00.0\"}]\n")
	offer.Weights = &stock.Weights{
		Artifacts: []stock.Artifact{{Digest: artifact.Digest{9}, Ref: ref(t, "hub://org/"+strings.Repeat("x", 90)+"@main")}},
		Drive:     stock.Drive{Free: units.GiB},
	}
	s := newScheduler(t, gatesOf(37), offer)
	// The allocator asks every selector of every device; an error of one fails the test.
	s.refuse(t, "a", devices(t, `
requests:
- name: gpu
  exactly:
    deviceClassName: gpu.hearth.dev
    selectors:
    - cel:
        expression: >-
          device.attributes["hearth.dev"].uuid == "x" || device.attributes["hearth.dev"].productName == "x" ||
          device.attributes["hearth.dev"].brand == "x" || device.attributes["hearth.dev"].architecture == "x" ||
          device.attributes["hearth.dev"].cudaComputeCapability.isGreaterThan(semver("1.0.0")) ||
          device.attributes["hearth.dev"].driverVersion.isGreaterThan(semver("1.0.0")) ||
          device.attributes["hearth.dev"].cudaDriverVersion.isGreaterThan(semver("1.0.0")) ||
          device.capacity["hearth.dev"].memory.isGreaterThan(quantity("1"))
`), "nothing is known of the GPU")
	s.refuse(t, "a", devices(t, `
requests:
- name: weights
  exactly:
    deviceClassName: weights.hearth.dev
    selectors:
    - cel:
        expression: >-
          device.attributes["hearth.dev"].model == "x" || device.attributes["hearth.dev"].repo == "x" ||
          device.attributes["hearth.dev"].revision == "x" || device.attributes["hearth.dev"].digest == "x" ||
          device.attributes["hearth.dev"].format == "x" || device.attributes["hearth.dev"].quantization == "x" ||
          device.attributes["hearth.dev"].tier == "x" || device.capacity["hearth.dev"].size.isGreaterThan(quantity("2Gi"))
`), "nothing is known of the weights")
}

func TestTheClaimsOfTheExamplesFitAWarmNodeAndAColdOne(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../deployments/examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no examples: %v", err)
	}
	tried := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for doc := range strings.SplitSeq(string(text), "\n---\n") {
			var template resourceapi.ResourceClaimTemplate
			if err := yaml.Unmarshal([]byte(doc), &template); err != nil || template.Kind != "ResourceClaimTemplate" {
				continue
			}
			spec, err := yaml.Marshal(template.Spec.Spec.Devices)
			if err != nil {
				t.Fatal(err)
			}
			warm, cold := offerOf(t, "warm", 37, eightH100), offerOf(t, "cold", 37, eightH100)
			warm.KV = &stock.Space{Memory: 256 * units.GiB, NVMe: 1 << 40}
			cold.KV = warm.KV
			cold.Weights, warm.Weights = weightsOf(4<<40), weightsOf(4<<40)
			for i, name := range []string{"org/name", "demo/tiny"} {
				warm.Weights.Artifacts = append(warm.Weights.Artifacts, stock.Artifact{
					Ref: ref(t, "hub://"+name), Digest: artifact.Digest{byte(i + 1)}, Model: path.Base(name), Size: units.GiB,
				})
			}
			s := newScheduler(t, gatesOf(37), warm, cold)
			claim := devices(t, string(spec))
			if got := s.allocate(t, "warm", claim); got == nil || strings.Contains(named(got), "/cold=") {
				t.Errorf("%s on a warm node: %q", file, named(got))
			}
			if got := s.allocate(t, "cold", claim); got == nil {
				t.Errorf("%s: no room on a cold node", file)
			}
			tried++
		}
	}
	if tried == 0 {
		t.Error("no example has a claim")
	}
}
