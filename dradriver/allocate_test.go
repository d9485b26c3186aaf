package dradriver_test

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"sigs.k8s.io/yaml"

	"github.com/hearth-dev/hearth/dradriver"
)

// gatesOf are the features with which the scheduler of a cluster of Kubernetes
// 1.minor calls the allocator where nobody switched a gate.
func gatesOf(minor int) structured.Features {
	beta := minor >= 36
	return structured.Features{
		AdminAccess: true, PrioritizedList: true,
		ConsumableCapacity: beta, DeviceTaints: beta, PartitionableDevices: beta, DeviceBindingAndStatus: beta,
		FractionalCapacityRange: minor >= 37,
	}
}

var minors = []int{34, 35, 36, 37}

// scheduler is what the real allocator sees of a cluster: our DeviceClasses,
// the slices that an API server with its gates keeps of ours, and what was
// allocated so far.
type scheduler struct {
	gates   structured.Features
	classes map[string]*resourceapi.DeviceClass
	slices  []*resourceapi.ResourceSlice
	state   structured.AllocatedState
	claims  int
}

func newScheduler(t *testing.T, gates structured.Features, offers ...dradriver.Offer) *scheduler {
	t.Helper()
	s := &scheduler{
		gates: gates, classes: deviceClasses(t),
		state: structured.AllocatedState{
			AllocatedDevices:         sets.New[structured.DeviceID](),
			AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
			AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
		},
	}
	for _, offer := range offers {
		plan := dradriver.PlanSlices(offer)
		for _, name := range slices.Sorted(maps.Keys(plan.Resources.Pools)) {
			pool := plan.Resources.Pools[name]
			for i, slice := range pool.Slices {
				s.slices = append(s.slices, &resourceapi.ResourceSlice{
					ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%05x-%s-%s-%s", i, dradriver.Name, offer.Node, strings.ReplaceAll(name, "/", "-"))},
					Spec: resourceapi.ResourceSliceSpec{
						Driver: dradriver.Name, NodeName: &offer.Node,
						Pool:    resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(pool.Slices))},
						Devices: keptBy(gates, slice.Devices),
					},
				})
			}
		}
	}
	return s
}

// keptBy is what an API server with gates keeps of devices.
func keptBy(gates structured.Features, devices []resourceapi.Device) []resourceapi.Device {
	kept := make([]resourceapi.Device, len(devices))
	for i, d := range devices {
		kept[i] = *d.DeepCopy()
		if !gates.DeviceTaints {
			kept[i].Taints = nil
		}
		if !gates.ConsumableCapacity {
			kept[i].AllowMultipleAllocations = nil
			for name, capacity := range kept[i].Capacity {
				capacity.RequestPolicy = nil
				kept[i].Capacity[name] = capacity
			}
		}
	}
	return kept
}

// deviceClasses are those of the manifests.
func deviceClasses(t *testing.T) map[string]*resourceapi.DeviceClass {
	t.Helper()
	text, err := os.ReadFile("../deployments/manifests/deviceclasses.yaml")
	if err != nil {
		t.Fatal(err)
	}
	classes := map[string]*resourceapi.DeviceClass{}
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		class := &resourceapi.DeviceClass{}
		if err := yaml.UnmarshalStrict([]byte(doc), class); err != nil {
			t.Fatal(err)
		}
		classes[class.Name] = class
	}
	if len(classes) != 3 {
		t.Fatalf("the manifests have %d DeviceClasses", len(classes))
	}
	return classes
}

// List implements structured.DeviceClassLister.
func (s *scheduler) List() ([]*resourceapi.DeviceClass, error) {
	return slices.Collect(maps.Values(s.classes)), nil
}

// Get implements structured.DeviceClassLister.
func (s *scheduler) Get(name string) (*resourceapi.DeviceClass, error) {
	class, ok := s.classes[name]
	if !ok {
		return nil, fmt.Errorf("no class %s", name)
	}
	return class, nil
}

// devices reads what a ResourceClaim says under spec.devices. The API server
// sets the defaults that the allocator expects.
func devices(t *testing.T, text string) *resourceapi.ResourceClaim {
	t.Helper()
	claim := &resourceapi.ResourceClaim{}
	if err := yaml.UnmarshalStrict([]byte(text), &claim.Spec.Devices); err != nil {
		t.Fatal(err)
	}
	for i := range claim.Spec.Devices.Requests {
		r := &claim.Spec.Devices.Requests[i]
		if r.Exactly != nil && r.Exactly.AllocationMode == "" {
			r.Exactly.AllocationMode, r.Exactly.Count = resourceapi.DeviceAllocationModeExactCount, max(r.Exactly.Count, 1)
		}
		for j := range r.FirstAvailable {
			if f := &r.FirstAvailable[j]; f.AllocationMode == "" {
				f.AllocationMode, f.Count = resourceapi.DeviceAllocationModeExactCount, max(f.Count, 1)
			}
		}
	}
	return claim
}

// allocate asks the allocator for one claim on one node and keeps what it
// gives. It gives nil where the claim does not fit there.
func (s *scheduler) allocate(t *testing.T, node string, claim *resourceapi.ResourceClaim) []resourceapi.DeviceRequestAllocationResult {
	t.Helper()
	s.claims++
	claim = claim.DeepCopy()
	claim.Name, claim.Namespace = fmt.Sprintf("claim-%d", s.claims), "default"
	claim.UID = types.UID(claim.Name)
	allocator, err := structured.NewAllocator(t.Context(), s.gates, s.state, s, s.slices,
		cel.NewCache(10, cel.Features{EnableConsumableCapacity: s.gates.ConsumableCapacity}))
	if err != nil {
		t.Fatal(err)
	}
	results, err := allocator.Allocate(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, []*resourceapi.ResourceClaim{claim})
	if err != nil {
		t.Fatalf("allocate on %s: %v", node, err)
	}
	if len(results) == 0 {
		return nil
	}
	given := results[0].Devices.Results
	for _, r := range given {
		id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
		if r.ShareID == nil {
			s.state.AllocatedDevices.Insert(id)
			continue
		}
		s.state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
		s.state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
	}
	return given
}

func (s *scheduler) refuse(t *testing.T, node string, claim *resourceapi.ResourceClaim, why string) {
	t.Helper()
	if given := s.allocate(t, node, claim); given != nil {
		t.Errorf("%s: the claim got %s", why, named(given))
	}
}

// named gives results as "request=device".
func named(results []resourceapi.DeviceRequestAllocationResult) string {
	var names []string
	for _, r := range results {
		names = append(names, r.Request+"="+r.Device)
	}
	return strings.Join(names, " ")
}

// score is how many points the scheduler gives a node for what a claim gets
// there: eight for the first alternative of a request, one for the eighth.
func score(claim *resourceapi.ResourceClaim, results []resourceapi.DeviceRequestAllocationResult) int {
	points := 0
	for _, request := range claim.Spec.Devices.Requests {
		for i, alternative := range request.FirstAvailable {
			if slices.ContainsFunc(results, func(r resourceapi.DeviceRequestAllocationResult) bool {
				return r.Request == request.Name+"/"+alternative.Name
			}) {
				points += resourceapi.FirstAvailableDeviceRequestMaxSize - i
			}
		}
	}
	return points
}

var _ structured.DeviceClassLister = (*scheduler)(nil)
