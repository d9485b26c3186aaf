package dradriver

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
)

func everything() *resourceapi.ResourceClaim {
	return allocated(gpuResult("gpu", "gpu-0"), weightsResult("model", llama), kvResult("kv", "1Gi", "1Gi"))
}

func TestAPrepareThatArrivedBeforeTheUnprepareIsRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := everything()
	early := context.WithValue(t.Context(), arrivalKey{}, arrival{ticket: r.o.Ledger.Arrive()})
	r.mustPrepare(t, c)
	r.mustUnprepare(t, c.UID)
	all, err := r.PrepareResourceClaims(early, []*resourceapi.ResourceClaim{c})
	if err != nil || !errors.Is(all[c.UID].Err, ledger.ErrUnprepared) {
		t.Errorf("late prepare: %v, %v", all[c.UID].Err, err)
	}
	r.wantNothing(t)
	// One that arrives now is another use of the same claim.
	r.mustPrepare(t, c)
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestACallWhoseContextEndedDoesNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.PrepareResourceClaims(ended, []*resourceapi.ResourceClaim{everything()}); !errors.Is(err, context.Canceled) {
		t.Errorf("prepare: %v", err)
	}
	r.wantNothing(t)
}

func TestADeviceHasOneClaimUnlessItMayBeShared(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.mustPrepare(t, withUID(allocated(gpuResult("gpu", "gpu-0"), weightsResult("model", llama)), "team", "first"))
	second := withUID(allocated(gpuResult("gpu", "gpu-0")), "team", "second")
	err := r.prepare(t, second).Err
	var conflict *ledger.Conflict
	if !errors.As(err, &conflict) || !strings.Contains(err.Error(), "claim team/first") {
		t.Errorf("a GPU of another claim: %v", err)
	}
	yes := true
	admin := withUID(allocated(gpuResult("gpu", "gpu-0")), "kube-system", "admin")
	admin.Status.Allocation.Devices.Results[0].AdminAccess = &yes
	r.mustPrepare(t, admin)
	r.mustPrepare(t, withUID(allocated(withShare(weightsResult("model", llama), "other")), "elsewhere", "sharer"))
	r.mustUnprepare(t, "uid-first")
	r.mustPrepare(t, second)
	r.mustUnprepare(t, "uid-second", "uid-admin", "uid-sharer")
	r.wantNothing(t)
}

func TestAGPUCrossesNamespacesOnlyWhereItsClassSaysSo(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	share := func(namespace, name string, across bool) *resourceapi.ResourceClaim {
		c := withUID(allocated(withShare(gpuResult("gpu", "gpu-0"), "share-"+name)), namespace, name)
		if across {
			configured(c, fromClass, Name, kind("ClassConfig", `,"shareAcrossNamespaces":true`), "gpu")
		}
		return c
	}
	r.mustPrepare(t, share("a", "first", true))
	r.mustPrepare(t, share("b", "second", true))
	err := r.prepare(t, share("c", "third", false)).Err
	if err == nil || !strings.Contains(err.Error(), "another namespace") {
		t.Errorf("without the class's word: %v", err)
	}
	r.mustUnprepare(t, "uid-first", "uid-second", "uid-third")
	r.wantNothing(t)
}

func TestAnotherAllocationReplacesWhatTheClaimHad(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.mustPrepare(t, everything())
	other := allocated(gpuResult("gpu", "gpu-1"), kvResult("kv", "2Gi", "0"))
	result := r.mustPrepare(t, other)
	if len(result.Devices) != 2 || result.Devices[0].DeviceName != "gpu-1" {
		t.Errorf("devices %+v", result.Devices)
	}
	held, err := r.cache.Holds(t.Context())
	if err != nil || len(held) > 0 {
		t.Errorf("the weights of the earlier allocation are held: %v, %v", held, err)
	}
	r.mustPrepare(t, withUID(allocated(gpuResult("gpu", "gpu-0")), "team", "next"))
	r.mustUnprepare(t, other.UID, "uid-next")
	r.wantNothing(t)
}

func TestABegunClaimKeepsItsDevicesUntilItsWeightsCome(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cache.SetDown(true)
	c := everything()
	if err := r.prepare(t, c).Err; !errors.Is(err, stock.ErrUnavailable) {
		t.Fatalf("while the data role is away: %v", err)
	}
	if err := r.prepare(t, withUID(allocated(gpuResult("gpu", "gpu-0")), "team", "other")).Err; err == nil {
		t.Error("the GPU of a claim that waits went to another")
	}
	r.cache.SetDown(false)
	r.mustPrepare(t, c)
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestKVSpaceThatIsGoneIsToldByName(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.mustPrepare(t, withUID(allocated(kvResult("kv", "8Gi", "0")), "team", "big"))
	c := allocated(kvResult("kv", "1Gi", "0"))
	if err := r.prepare(t, c).Err; !errors.Is(err, stock.ErrNoSpace) {
		t.Errorf("prepare: %v", err)
	}
	r.mustUnprepare(t, "uid-big")
	r.mustPrepare(t, c)
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestMetadataHasTheAttributesOfTheSlice(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	result := r.mustPrepare(t, everything())
	for i, want := range []resourceapi.Device{
		gpuDevice(twoGPUs()[0]), weightsDevice(llama, stock.Drive{Tier: "nvme", Free: 1 << 40}), kvDevice(stock.Space{Memory: 8 << 30, NVMe: 8 << 30}),
	} {
		got := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
		for name, attribute := range result.Devices[i].Metadata.Attributes {
			got[resourceapi.QualifiedName(name)] = attribute
		}
		if diff := cmp.Diff(want.Attributes, got); diff != "" {
			t.Errorf("device %s: %s", result.Devices[i].DeviceName, diff)
		}
	}
}

func TestDeviceNodesFollowTheGPUAfterABoot(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := allocated(gpuResult("gpu", "gpu-0"))
	first := r.mustPrepare(t, c)
	moved := twoGPUs()
	moved[0].Device.Nodes, moved[1].Device.Nodes = moved[1].Device.Nodes, moved[0].Device.Nodes
	r.devices.set(moved)
	r.boot = "boot-2"
	r.reopen(t)
	second := r.mustPrepare(t, c)
	if diff := cmp.Diff(first.Devices[0].CDIDeviceIDs, second.Devices[0].CDIDeviceIDs); diff != "" {
		t.Error(diff)
	}
	entry, _ := r.o.Ledger.Get(string(c.UID))
	if nodes := entry.Results[0].Edits.DeviceNodes; len(nodes) != 1 || nodes[0].Path != "/dev/nvidia1" {
		t.Errorf("device nodes %+v", nodes)
	}
	r.mustUnprepare(t, c.UID)
	r.wantNothing(t)
}

func TestClaimsAreListedForPeople(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := everything()
	r.mustPrepare(t, c)
	got := r.Claims()
	if len(got) != 1 || got[0].State != ClaimPrepared || len(got[0].Devices) != 3 || got[0].Artifacts[0].Ref != llama.Ref.String() ||
		got[0].Artifacts[0].Present != llama.Size || got[0].KV.Memory != 1<<30 || !slices.Equal(got[0].Pods, []string{"pod"}) {
		t.Errorf("claims %+v", got)
	}
	if devices := r.DevicesOfPod("pod-uid"); !slices.Equal(devices, []string{"gpu-0"}) {
		t.Errorf("devices of the pod: %v", devices)
	}
	if s := r.Stats(); s.Prepared != 1 || s.Begun != 0 || s.Calls[CallPrepare].Count != 1 || s.Calls[CallPrepare].InFlight != 0 {
		t.Errorf("stats %+v", s)
	}
}
