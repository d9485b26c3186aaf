package dradriver

import (
	"errors"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/hearth-dev/hearth/api/v1alpha1"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// ErrConfig is wrapped by errors that only another claim or class can mend.
var ErrConfig = errors.New("the claim cannot be prepared as it is written")

// words are what a claim and its classes say about one allocated device. They
// follow from the claim alone, whose configuration never changes.
type words struct {
	ref       artifact.Ref // zero where nothing names one
	path      string       // container path of weights and of KV
	across    bool         // claims of several namespaces may have the device
	deletePod bool         // a pull that cannot succeed deletes the pods
	deadline  time.Duration
}

// refusal is an error about one request of a claim.
func refusal(request, format string, args ...any) error {
	return fmt.Errorf("request %s: %w: %w", request, ErrConfig, fmt.Errorf(format, args...))
}

// kindOf says what a result is of, by its slice pool and device.
func kindOf(node string, pools Pools, result *resourceapi.DeviceRequestAllocationResult) (string, error) {
	kind, offered := "", false
	switch result.Pool {
	case PoolGPUs(node):
		kind, offered = ledger.KindGPU, pools.GPUs
	case PoolWeights(node):
		kind, offered = ledger.KindWeights, pools.Weights
		if result.Device == DeviceCold {
			kind = ledger.KindCold
		}
	case PoolKV(node):
		kind, offered = ledger.KindKV, pools.KV
	default:
		return "", fmt.Errorf("request %s: slice pool %s is not of node %s", result.Request, result.Pool, node)
	}
	if !offered {
		return "", fmt.Errorf("request %s: node %s does not offer slice pool %s; kubernetes.devices in the agent's configuration says which it offers",
			result.Request, node, result.Pool)
	}
	return kind, nil
}

// ourResults gives the results of a claim that are of this driver.
func ourResults(claim *resourceapi.ResourceClaim) []resourceapi.DeviceRequestAllocationResult {
	if claim.Status.Allocation == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(claim.Status.Allocation.Devices.Results), func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver != Name
	})
}

// reader decodes the opaque configuration of one claim, each text once.
type reader struct {
	all     []resourceapi.DeviceAllocationConfiguration
	decoded map[string]v1alpha1.Config
}

// readConfig decodes what is addressed to this driver, wherever it applies: a
// mistake in what another alternative of a request would have used is told as
// well, before it bites on another node.
func readConfig(claim *resourceapi.ResourceClaim) (*reader, error) {
	r := &reader{decoded: map[string]v1alpha1.Config{}}
	for _, c := range claim.Status.Allocation.Devices.Config {
		if c.Opaque == nil || c.Opaque.Driver != Name {
			continue
		}
		raw := string(c.Opaque.Parameters.Raw)
		config, err := v1alpha1.Decode([]byte(raw))
		if err != nil {
			return nil, fmt.Errorf("%s: %w: %w", whose(c), ErrConfig, err)
		}
		if _, class := config.(*v1alpha1.ClassConfig); class && c.Source != resourceapi.AllocationConfigSourceClass {
			return nil, fmt.Errorf("%s: %w: %s is the administrators' word and may stand in a DeviceClass only", whose(c), ErrConfig, v1alpha1.KindClass)
		}
		r.decoded[raw] = config
		r.all = append(r.all, c)
	}
	// What a claim says comes after what its class says.
	slices.SortStableFunc(r.all, func(a, b resourceapi.DeviceAllocationConfiguration) int { return rank(a) - rank(b) })
	return r, nil
}

func rank(c resourceapi.DeviceAllocationConfiguration) int {
	if c.Source == resourceapi.AllocationConfigSourceClass {
		return 0
	}
	return 1
}

// whose names a configuration for people.
func whose(c resourceapi.DeviceAllocationConfiguration) string {
	from := "configuration of the claim"
	if c.Source == resourceapi.AllocationConfigSourceClass {
		from = "configuration of a DeviceClass"
	}
	switch len(c.Requests) {
	case 0:
		return from
	case 1:
		return from + " for request " + c.Requests[0]
	}
	return fmt.Sprintf("%s for requests %v", from, c.Requests)
}

// wordsFor folds what applies to one result. A configuration that is addressed
// to no request applies where its kind fits; one that names the request must
// fit it.
func (r *reader) wordsFor(result resourceapi.DeviceRequestAllocationResult, kind string) (words, error) {
	w := words{}
	switch kind {
	case ledger.KindWeights, ledger.KindCold:
		w.path = v1alpha1.DefaultModelPath
	case ledger.KindKV:
		w.path = v1alpha1.DefaultKVPath
	}
	var classRef artifact.Ref
	for _, c := range resourceclaim.ConfigForResult(r.all, result) {
		fits := true
		switch config := r.decoded[string(c.Opaque.Parameters.Raw)].(type) {
		case *v1alpha1.ClassConfig:
			w.across, w.deletePod, w.deadline = config.ShareAcrossNamespaces, config.DeletePodOnPullFailure, config.PullDeadline.Duration
		case *v1alpha1.KVConfig:
			if fits = kind == ledger.KindKV; fits && config.ContainerPath != "" {
				w.path = config.ContainerPath
			}
		case *v1alpha1.WeightsConfig:
			if fits = kind == ledger.KindWeights || kind == ledger.KindCold; !fits {
				break
			}
			if config.ContainerPath != "" {
				w.path = config.ContainerPath
			}
			if config.Ref == "" {
				break
			}
			ref, err := artifact.ParseRef(config.Ref)
			if err != nil {
				return words{}, refusal(result.Request, "%s: ref: %w", v1alpha1.KindWeights, err)
			}
			if c.Source == resourceapi.AllocationConfigSourceClass {
				classRef = ref
			} else if !classRef.IsZero() && ref != classRef {
				return words{}, refusal(result.Request, "its DeviceClass says ref %s, which the claim may not change to %s", classRef, ref)
			}
			w.ref = ref
		}
		if !fits && len(c.Requests) > 0 {
			return words{}, refusal(result.Request, "%s does not fit what was allocated, %s %s",
				r.decoded[string(c.Opaque.Parameters.Raw)].GetObjectKind().GroupVersionKind().Kind, kind, result.Device)
		}
	}
	return w, nil
}

// readWords gives what a claim says about each of its results of this driver,
// in their order, and the kind of each.
func readWords(claim *resourceapi.ResourceClaim, node string, pools Pools) (all []words, kinds []string, err error) {
	results := ourResults(claim)
	if len(results) == 0 {
		return nil, nil, fmt.Errorf("claim has no device of %s", Name)
	}
	config, err := readConfig(claim)
	if err != nil {
		return nil, nil, err
	}
	for i := range results {
		kind, err := kindOf(node, pools, &results[i])
		if err != nil {
			return nil, nil, err
		}
		w, err := config.wordsFor(results[i], kind)
		if err != nil {
			return nil, nil, err
		}
		all, kinds = append(all, w), append(kinds, kind)
	}
	return all, kinds, apart(results, all, kinds)
}
