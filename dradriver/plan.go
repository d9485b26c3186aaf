package dradriver

import (
	"fmt"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// nodeView is what a claim is planned against. It is never changed after it was
// made.
type nodeView struct {
	node         string
	pools        Pools
	devices      device.Snapshot
	devicesKnown bool
	weights      stock.Weights
	weightsKnown bool
	// known are artifacts that were Ready once, by the name of their device, so
	// that what went between allocation and Prepare can be pulled again.
	known    map[string]stock.Artifact
	deadline time.Duration // of pulls where no class says otherwise
	now      time.Time
}

// artifactOf finds the artifact of a weights device.
func (v *nodeView) artifactOf(name string) (stock.Artifact, bool) {
	at := slices.IndexFunc(v.weights.Artifacts, func(a stock.Artifact) bool { return WeightsDevice(a.Digest) == name })
	if at < 0 {
		return stock.Artifact{}, false
	}
	return v.weights.Artifacts[at], true
}

// planClaim decides what a claim gets: the entry that the ledger is to begin
// with, and what the claim says about each result. It has no effect and reads
// no clock. Its errors name the request; those that only another claim can mend
// wrap ErrConfig.
func planClaim(claim *resourceapi.ResourceClaim, view *nodeView) (ledger.Entry, []words, error) {
	all, kinds, err := readWords(claim, view.node, view.pools)
	if err != nil {
		return ledger.Entry{}, nil, err
	}
	entry := ledger.Entry{UID: string(claim.UID), Namespace: claim.Namespace, Name: claim.Name, Pods: PodsOf(claim)}
	for i, result := range ourResults(claim) {
		planned := resultOf(&result, kinds[i], all[i])
		switch kinds[i] {
		case ledger.KindGPU:
			err = giveGPU(view, &planned)
		case ledger.KindWeights:
			var w ledger.Weight
			w, err = giveWarm(view, result.Request, result.Device, all[i])
			entry.Weights = append(entry.Weights, w)
		case ledger.KindCold:
			var w ledger.Weight
			w, err = giveCold(view, result.Request, all[i])
			entry.Weights = append(entry.Weights, w)
		case ledger.KindKV:
			err = giveKV(&entry, &planned)
		}
		if err != nil {
			return ledger.Entry{}, nil, err
		}
		entry.Results = append(entry.Results, planned)
	}
	return entry, all, nil
}

// resultOf is a result as the ledger keeps it.
func resultOf(result *resourceapi.DeviceRequestAllocationResult, kind string, w words) ledger.Result {
	planned := ledger.Result{
		Request: result.Request, Pool: result.Pool, Device: result.Device, Kind: kind,
		AdminAccess:      result.AdminAccess != nil && *result.AdminAccess,
		Shared:           kind != ledger.KindGPU || result.ShareID != nil,
		AcrossNamespaces: w.across,
	}
	if result.ShareID != nil {
		planned.ShareID = string(*result.ShareID)
	}
	for name, quantity := range result.ConsumedCapacity {
		if planned.Consumed == nil {
			planned.Consumed = map[string]int64{}
		}
		planned.Consumed[strings.TrimPrefix(string(name), Name+"/")] = quantity.Value()
	}
	return planned
}

// PodsOf lists the pods that a claim is reserved for.
func PodsOf(claim *resourceapi.ResourceClaim) []ledger.Pod {
	var pods []ledger.Pod
	for _, consumer := range claim.Status.ReservedFor {
		if consumer.APIGroup == "" && consumer.Resource == "pods" {
			pods = append(pods, ledger.Pod{Name: consumer.Name, UID: string(consumer.UID)})
		}
	}
	return pods
}

func giveGPU(view *nodeView, planned *ledger.Result) error {
	if !view.devicesKnown {
		return fmt.Errorf("request %s: the node's devices have not been read yet", planned.Request)
	}
	state, ok := view.devices.Find(device.ID(planned.Device))
	if !ok {
		return fmt.Errorf("request %s: device %s is not on node %s", planned.Request, planned.Device, view.node)
	}
	planned.UUID = state.Device.UUID
	return nil
}

// giveWarm finds the artifact that a weights device stands for. One that went
// since the claim was allocated is pulled again where its ref is known.
func giveWarm(view *nodeView, request, name string, w words) (ledger.Weight, error) {
	if a, ok := view.artifactOf(name); ok {
		if !w.ref.IsZero() && !means(view.weights, w.ref, a.Digest) {
			return ledger.Weight{}, refusal(request, "ref %s is not what was allocated, which is %s; select by the model, or leave ref out", w.ref, a.Ref)
		}
		return ledger.Weight{Request: request, Ref: a.Ref, Digest: a.Digest, Size: int64(a.Size)}, nil
	}
	deadline := w.deadline
	if deadline == 0 {
		deadline = view.deadline
	}
	pull := ledger.Weight{Request: request, Ref: w.ref, Pull: true, Deadline: view.now.Add(deadline)}
	if a, ok := view.known[name]; ok {
		if !w.ref.IsZero() && w.ref.Name != a.Ref.Name {
			return ledger.Weight{}, refusal(request, "ref %s is not what was allocated, which is %s", w.ref, a.Ref)
		}
		// The commit gives the bytes that were allocated, even where the branch moved.
		pull.Ref, pull.Digest, pull.Size = exact(a), a.Digest, int64(a.Size)
	}
	switch {
	case !pull.Ref.IsZero():
		return pull, nil
	case !view.weightsKnown:
		return ledger.Weight{}, fmt.Errorf("request %s: %w", request, stock.ErrUnavailable)
	}
	return ledger.Weight{}, fmt.Errorf("request %s: the artifact of device %s is no longer on node %s and nothing says what to pull: "+
		"delete the pod, so that it is placed anew, or give its claim a WeightsConfig with ref", request, name, view.node)
}

func giveCold(view *nodeView, request string, w words) (ledger.Weight, error) {
	if w.ref.IsZero() {
		return ledger.Weight{}, refusal(request, "device %s wants a WeightsConfig with ref, which says what to pull", DeviceCold)
	}
	deadline := w.deadline
	if deadline == 0 {
		deadline = view.deadline
	}
	return ledger.Weight{Request: request, Ref: w.ref, Pull: true, Deadline: view.now.Add(deadline)}, nil
}

func giveKV(entry *ledger.Entry, planned *ledger.Result) error {
	kv := &ledger.KV{Namespace: entry.Namespace, Memory: planned.Consumed["memory"], NVMe: planned.Consumed["nvme"]}
	switch {
	case planned.AdminAccess:
		return refusal(planned.Request, "KV space cannot be had by admin access")
	case entry.KV != nil:
		return refusal(planned.Request, "a claim has KV space once; ask for it in one request")
	case kv.Memory <= 0 && kv.NVMe <= 0:
		return refusal(planned.Request, "it asks for no KV space; set capacity.requests memory or nvme")
	}
	entry.KV = kv
	return nil
}

// means reports whether a ref is a name of an artifact that is on the node.
func means(weights stock.Weights, ref artifact.Ref, digest artifact.Digest) bool {
	return slices.ContainsFunc(weights.Artifacts, func(a stock.Artifact) bool {
		return a.Digest == digest && (a.Ref == ref || a.Ref.Scheme == ref.Scheme && a.Ref.Name == ref.Name && a.Commit != "" && ref.Revision == a.Commit)
	})
}

// exact is the ref by which an artifact's bytes can be pulled again.
func exact(a stock.Artifact) artifact.Ref {
	ref := a.Ref
	if ref.Scheme == artifact.SchemeHub && a.Commit != "" {
		ref.Revision = a.Commit
	}
	return ref
}

// apart refuses container paths of one claim that are the same or within each
// other.
func apart(results []resourceapi.DeviceRequestAllocationResult, all []words, kinds []string) error {
	type place struct{ path, request string }
	var places []place
	for i, w := range all {
		var own []string
		switch kinds[i] {
		case ledger.KindWeights, ledger.KindCold:
			own = []string{w.path, hubPath(w.path)}
		case ledger.KindKV:
			own = []string{w.path}
		}
		for _, path := range own {
			for _, other := range places {
				if path == other.path || strings.HasPrefix(path, other.path+"/") || strings.HasPrefix(other.path, path+"/") {
					return refusal(results[i].Request, "containerPath %s collides with %s of request %s; give one of them another containerPath", path, other.path, other.request)
				}
			}
		}
		for _, path := range own {
			places = append(places, place{path, results[i].Request})
		}
	}
	return nil
}

// sameAllocation reports whether an entry was made for the allocation that a
// claim has now.
func sameAllocation(entry *ledger.Entry, claim *resourceapi.ResourceClaim) bool {
	return slices.EqualFunc(entry.Results, ourResults(claim), func(had ledger.Result, has resourceapi.DeviceRequestAllocationResult) bool {
		share := ""
		if has.ShareID != nil {
			share = string(*has.ShareID)
		}
		return had.Request == has.Request && had.Pool == has.Pool && had.Device == has.Device && had.ShareID == share
	})
}
