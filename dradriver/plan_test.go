package dradriver

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
	simstock "github.com/hearth-dev/hearth/test/sim/stock"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

const testNode = "n1"

var (
	planNow  = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	llama    = simstock.Sample("llama", 1)
	mistral  = simstock.Sample("mistral", 2)
	vanished = simstock.Sample("vanished", 3)
)

func testView() *nodeView {
	return &nodeView{
		node: testNode, pools: Pools{GPUs: true, Weights: true, KV: true},
		devices:      device.Snapshot{{Device: device.Device{ID: "gpu-0", Facts: device.Facts{UUID: "GPU-0"}}}, {Device: device.Device{ID: "gpu-1", Facts: device.Facts{UUID: "GPU-1"}}}},
		devicesKnown: true,
		weights:      stock.Weights{Artifacts: []stock.Artifact{llama, mistral}, Drive: stock.Drive{Tier: "nvme", Free: 1 << 40}},
		weightsKnown: true,
		known:        map[string]stock.Artifact{}, deadline: 30 * time.Minute, now: planNow,
	}
}

// allocated is a claim as the scheduler leaves it.
func allocated(results ...resourceapi.DeviceRequestAllocationResult) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "claim", UID: "uid-1"},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{
				{Resource: "pods", Name: "pod", UID: "pod-uid"}, {APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "group"},
			},
		},
	}
}

func ours(request, pool, name string) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: request, Driver: Name, Pool: pool, Device: name}
}

func gpuResult(request, name string) resourceapi.DeviceRequestAllocationResult {
	return ours(request, PoolGPUs(testNode), name)
}

func weightsResult(request string, a stock.Artifact) resourceapi.DeviceRequestAllocationResult {
	return withShare(ours(request, PoolWeights(testNode), WeightsDevice(a.Digest)), "share-"+a.Model)
}

func coldResult(request string) resourceapi.DeviceRequestAllocationResult {
	return withShare(ours(request, PoolWeights(testNode), DeviceCold), "share-cold")
}

func kvResult(request, memory, nvme string) resourceapi.DeviceRequestAllocationResult {
	r := withShare(ours(request, PoolKV(testNode), DeviceKV), "share-kv")
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory), "hearth.dev/nvme": resource.MustParse(nvme)}
	return r
}

func withShare(r resourceapi.DeviceRequestAllocationResult, share string) resourceapi.DeviceRequestAllocationResult {
	id := types.UID(share)
	r.ShareID = &id
	return r
}

const (
	fromClaim = resourceapi.AllocationConfigSourceClaim
	fromClass = resourceapi.AllocationConfigSourceClass
)

func configured(c *resourceapi.ResourceClaim, source resourceapi.AllocationConfigSource, driver, config string, requests ...string) *resourceapi.ResourceClaim {
	c.Status.Allocation.Devices.Config = append(c.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
		Source: source, Requests: requests,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(config)},
		}},
	})
	return c
}

func kind(name, fields string) string {
	return `{"apiVersion":"hearth.dev/v1alpha1","kind":"` + name + `"` + fields + `}`
}

func TestPlanGivesWhatWasAllocatedInItsOrder(t *testing.T) {
	t.Parallel()
	foreign := resourceapi.DeviceRequestAllocationResult{Request: "nic", Driver: "dra.net", Pool: testNode, Device: "eth1"}
	c := allocated(kvResult("kv", "8Gi", "16Gi"), foreign, weightsResult("model/warm", llama), gpuResult("gpus", "gpu-1"), gpuResult("gpus", "gpu-0"))
	configured(c, fromClaim, "dra.net", `{"anything":true}`)
	entry, words, err := planClaim(c, testView())
	if err != nil {
		t.Fatal(err)
	}
	want := ledger.Entry{
		UID: "uid-1", Namespace: "team", Name: "claim", Pods: []ledger.Pod{{Name: "pod", UID: "pod-uid"}},
		Results: []ledger.Result{
			{Request: "kv", Pool: "n1/kv", Device: "kv", ShareID: "share-kv", Kind: ledger.KindKV, Shared: true, Consumed: map[string]int64{"memory": 8 << 30, "nvme": 16 << 30}},
			{Request: "model/warm", Pool: "n1/weights", Device: WeightsDevice(llama.Digest), ShareID: "share-llama", Kind: ledger.KindWeights, Shared: true},
			{Request: "gpus", Pool: "n1", Device: "gpu-1", Kind: ledger.KindGPU, UUID: "GPU-1"},
			{Request: "gpus", Pool: "n1", Device: "gpu-0", Kind: ledger.KindGPU, UUID: "GPU-0"},
		},
		Weights: []ledger.Weight{{Request: "model/warm", Ref: llama.Ref, Digest: llama.Digest, Size: int64(llama.Size)}},
		KV:      &ledger.KV{Namespace: "team", Memory: 8 << 30, NVMe: 16 << 30},
	}
	if diff := cmp.Diff(want, entry); diff != "" {
		t.Error(diff)
	}
	if words[0].path != "/hearth/kv" || words[1].path != "/hearth/model" {
		t.Errorf("paths %q and %q", words[0].path, words[1].path)
	}
}

func TestPlanPullsWhatIsNotThere(t *testing.T) {
	t.Parallel()
	other := artifact.Ref{Scheme: artifact.SchemeHub, Name: "org/other", Revision: "v2"}
	atCommit := vanished.Ref
	atCommit.Revision = vanished.Commit
	for name, c := range map[string]struct {
		claim *resourceapi.ResourceClaim
		known []stock.Artifact
		want  ledger.Weight
	}{
		"a cold device pulls the ref of the claim": {
			claim: configured(allocated(coldResult("model")), fromClaim, Name, kind("WeightsConfig", `,"ref":"hub://org/other@v2"`)),
			want:  ledger.Weight{Request: "model", Ref: other, Pull: true, Deadline: planNow.Add(30 * time.Minute)},
		},
		"the words for a main request count for its alternative": {
			claim: configured(allocated(coldResult("model/last")), fromClaim, Name, kind("WeightsConfig", `,"ref":"hub://org/other@v2"`), "model"),
			want:  ledger.Weight{Request: "model/last", Ref: other, Pull: true, Deadline: planNow.Add(30 * time.Minute)},
		},
		"the ref and the deadline of a class count": {
			claim: configured(configured(allocated(coldResult("model")), fromClass, Name, kind("WeightsConfig", `,"ref":"hub://org/other@v2"`), "model"),
				fromClass, Name, kind("ClassConfig", `,"pullDeadline":"5m"`), "model"),
			want: ledger.Weight{Request: "model", Ref: other, Pull: true, Deadline: planNow.Add(5 * time.Minute)},
		},
		"what went is pulled by the ref of the claim": {
			claim: configured(allocated(weightsResult("model", vanished)), fromClaim, Name, kind("WeightsConfig", `,"ref":"hub://org/vanished"`)),
			want:  ledger.Weight{Request: "model", Ref: vanished.Ref, Pull: true, Deadline: planNow.Add(30 * time.Minute)},
		},
		"what went and was known is pulled by its commit": {
			claim: configured(allocated(weightsResult("model", vanished)), fromClaim, Name, kind("WeightsConfig", `,"ref":"hub://org/vanished"`)),
			known: []stock.Artifact{vanished},
			want: ledger.Weight{
				Request: "model", Ref: atCommit, Digest: vanished.Digest, Pull: true, Size: int64(vanished.Size), Deadline: planNow.Add(30 * time.Minute),
			},
		},
		"what went and was known needs no ref": {
			claim: allocated(weightsResult("model", vanished)),
			known: []stock.Artifact{vanished},
			want: ledger.Weight{
				Request: "model", Ref: atCommit, Digest: vanished.Digest, Pull: true, Size: int64(vanished.Size), Deadline: planNow.Add(30 * time.Minute),
			},
		},
		"a ref that means the warm artifact changes nothing": {
			claim: configured(allocated(weightsResult("model", llama)), fromClaim, Name, kind("WeightsConfig", `,"ref":"hub://org/llama@`+llama.Commit+`"`)),
			want:  ledger.Weight{Request: "model", Ref: llama.Ref, Digest: llama.Digest, Size: int64(llama.Size)},
		},
	} {
		view := testView()
		for _, a := range c.known {
			view.known[WeightsDevice(a.Digest)] = a
		}
		entry, _, err := planClaim(c.claim, view)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if diff := cmp.Diff([]ledger.Weight{c.want}, entry.Weights); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestPlanTakesTheContainerPathsOfTheClaim(t *testing.T) {
	t.Parallel()
	c := allocated(weightsResult("a", llama), weightsResult("b", mistral), kvResult("kv", "1Gi", "0"))
	configured(c, fromClass, Name, kind("WeightsConfig", `,"containerPath":"/class"`), "a", "b")
	configured(c, fromClaim, Name, kind("WeightsConfig", `,"containerPath":"/models/b"`), "b")
	configured(c, fromClaim, Name, kind("KVConfig", `,"containerPath":"/kv"`))
	_, words, err := planClaim(c, testView())
	if err != nil {
		t.Fatal(err)
	}
	if words[0].path != "/class" || words[1].path != "/models/b" || words[2].path != "/kv" {
		t.Errorf("paths %q, %q and %q", words[0].path, words[1].path, words[2].path)
	}
}

func TestPlanKeepsWhatClassesAllow(t *testing.T) {
	t.Parallel()
	admin := gpuResult("admin", "gpu-0")
	yes := true
	admin.AdminAccess = &yes
	c := allocated(withShare(gpuResult("gpu", "gpu-1"), "share"), admin)
	configured(c, fromClass, Name, kind("ClassConfig", `,"shareAcrossNamespaces":true,"deletePodOnPullFailure":true`), "gpu")
	entry, words, err := planClaim(c, testView())
	if err != nil {
		t.Fatal(err)
	}
	if r := entry.Results[0]; !r.Shared || !r.AcrossNamespaces || r.AdminAccess || !words[0].deletePod {
		t.Errorf("shared GPU %+v, %+v", r, words[0])
	}
	if r := entry.Results[1]; r.Shared || r.AcrossNamespaces || !r.AdminAccess || words[1].deletePod {
		t.Errorf("GPU by admin access %+v, %+v", r, words[1])
	}
}

func TestPlanRefusesAndNamesTheRequest(t *testing.T) {
	t.Parallel()
	unread := testView()
	unread.devicesKnown, unread.devices, unread.weightsKnown, unread.weights = false, nil, false, stock.Weights{}
	fewer := testView()
	fewer.pools = Pools{Weights: true}
	yes := true
	adminKV := kvResult("kv", "1Gi", "0")
	adminKV.AdminAccess = &yes
	weightsConfig := kind("WeightsConfig", `,"ref":"hub://org/other"`)
	for name, c := range map[string]struct {
		claim  *resourceapi.ResourceClaim
		view   *nodeView
		want   string
		config bool // only another claim can mend it
	}{
		"unknown device":        {claim: allocated(gpuResult("gpu", "gpu-9")), want: "request gpu: device gpu-9 is not on node n1"},
		"unknown pool":          {claim: allocated(ours("gpu", "elsewhere", "gpu-0")), want: "request gpu: slice pool elsewhere is not of node n1"},
		"unread devices":        {claim: allocated(gpuResult("gpu", "gpu-0")), view: unread, want: "have not been read yet"},
		"unread weights":        {claim: allocated(weightsResult("model", llama)), view: unread, want: "data role does not answer"},
		"pool not offered":      {claim: allocated(gpuResult("gpu", "gpu-0")), view: fewer, want: "does not offer slice pool n1; kubernetes.devices"},
		"nothing of ours":       {claim: allocated(), want: "no device of hearth.dev"},
		"what went unknown":     {claim: allocated(weightsResult("model", vanished)), want: "is no longer on node n1 and nothing says what to pull"},
		"cold without a ref":    {claim: allocated(coldResult("model")), want: "request model: ", config: true},
		"another model":         {claim: configured(allocated(weightsResult("model", llama)), fromClaim, Name, weightsConfig), want: "is not what was allocated, which is hub://org/llama@main", config: true},
		"another model went":    {claim: configured(allocated(weightsResult("model", vanished)), fromClaim, Name, weightsConfig), view: knows(vanished), want: "is not what was allocated", config: true},
		"class word by a claim": {claim: configured(allocated(gpuResult("gpu", "gpu-0")), fromClaim, Name, kind("ClassConfig", "")), want: "administrators' word", config: true},
		"host path":             {claim: configured(allocated(coldResult("model")), fromClaim, Name, kind("WeightsConfig", `,"ref":"dir:///etc"`)), want: "ref", config: true},
		"unknown field":         {claim: configured(allocated(coldResult("model")), fromClaim, Name, kind("WeightsConfig", `,"hostPath":"/etc"`), "model"), want: `configuration of the claim for request model: `, config: true},
		"bad ref":               {claim: configured(allocated(coldResult("model")), fromClaim, Name, kind("WeightsConfig", `,"ref":"hub://a/../b"`)), want: "ref", config: true},
		"path of the system":    {claim: configured(allocated(coldResult("model")), fromClaim, Name, kind("WeightsConfig", `,"containerPath":"/etc/x"`)), want: "containerPath", config: true},
		"a mistake in another alternative": {
			claim: configured(allocated(weightsResult("model/warm", llama)), fromClaim, Name, kind("WeightsConfig", `,"reff":"x"`), "model/cold"),
			want:  `unknown field "reff"`, config: true,
		},
		"words that do not fit": {claim: configured(allocated(gpuResult("gpu", "gpu-0")), fromClaim, Name, kind("KVConfig", ""), "gpu"), want: "KVConfig does not fit what was allocated, gpu gpu-0", config: true},
		"class ref changed": {
			claim: configured(configured(allocated(coldResult("model")), fromClaim, Name, weightsConfig), fromClass, Name, kind("WeightsConfig", `,"ref":"hub://org/llama"`), "model"),
			want:  "which the claim may not change", config: true,
		},
		"two models at one path": {claim: allocated(weightsResult("a", llama), weightsResult("b", mistral)), want: "request b: ", config: true},
		"a path in another": {
			claim: configured(allocated(weightsResult("a", llama), kvResult("kv", "1Gi", "0")), fromClaim, Name, kind("KVConfig", `,"containerPath":"/hearth/model-hub/kv"`)),
			want:  "collides with /hearth/model-hub of request a", config: true,
		},
		"KV twice":   {claim: configured(allocated(kvResult("a", "1Gi", "0"), kvResult("b", "1Gi", "0")), fromClaim, Name, kind("KVConfig", `,"containerPath":"/b"`), "b"), want: "KV space once", config: true},
		"no KV":      {claim: allocated(kvResult("kv", "0", "0")), want: "asks for no KV space", config: true},
		"KV, admins": {claim: allocated(adminKV), want: "admin access", config: true},
	} {
		view := c.view
		if view == nil {
			view = testView()
		}
		entry, _, err := planClaim(c.claim, view)
		if err == nil {
			t.Errorf("%s: planned %+v", name, entry)
			continue
		}
		if !strings.Contains(err.Error(), c.want) || errors.Is(err, ErrConfig) != c.config {
			t.Errorf("%s: %v (ErrConfig %t), want %q (%t)", name, err, errors.Is(err, ErrConfig), c.want, c.config)
		}
	}
}

func knows(a stock.Artifact) *nodeView {
	view := testView()
	view.known[WeightsDevice(a.Digest)] = a
	return view
}

func TestNoMountEverComesFromAClaim(t *testing.T) {
	t.Parallel()
	views := stock.Views{Digest: llama.Digest, Flat: "/node/flat", Hub: "/node/hub"}
	edits := weightsEdits(views, "/models/x")
	edits.Mounts = append(edits.Mounts, kvEdits(&ledger.KV{Dir: "/node/kv"}, "/kv").Mounts...)
	want := []ledger.Mount{
		{Host: "/node/flat", Container: "/models/x", Options: []string{"ro", "nosuid", "nodev", "rbind"}},
		{Host: "/node/hub", Container: "/models/x-hub", Options: []string{"ro", "nosuid", "nodev", "rbind"}},
		{Host: "/node/kv", Container: "/kv", Options: []string{"rw", "nosuid", "nodev", "rbind"}},
	}
	if diff := cmp.Diff(want, edits.Mounts); diff != "" {
		t.Error(diff)
	}
}

func TestAnEntryIsOfAnAllocationOnlyWhileItsDevicesAreTheSame(t *testing.T) {
	t.Parallel()
	c := allocated(gpuResult("gpu", "gpu-0"), weightsResult("model", llama))
	entry, _, err := planClaim(c, testView())
	if err != nil {
		t.Fatal(err)
	}
	if !sameAllocation(&entry, c) {
		t.Error("an entry is not of the allocation that it was made for")
	}
	for name, other := range map[string]*resourceapi.ResourceClaim{
		"another device": allocated(gpuResult("gpu", "gpu-1"), weightsResult("model", llama)),
		"fewer devices":  allocated(gpuResult("gpu", "gpu-0")),
		"another share":  allocated(gpuResult("gpu", "gpu-0"), withShare(weightsResult("model", llama), "other")),
	} {
		if sameAllocation(&entry, other) {
			t.Errorf("%s: taken for the same", name)
		}
	}
}
