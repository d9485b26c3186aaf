package dradriver

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Limits of what one node publishes.
const (
	// MaxDevicesPerSlice is the API's limit for a slice that has a taint; the
	// first taint must never make a valid slice invalid, so every slice keeps it.
	MaxDevicesPerSlice = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	// MaxWeights bounds the artifacts that are published. With the cold device
	// they fill one slice: a change is then one write, and the slice pool is
	// never incomplete. Of more the largest are published, which are the dearest
	// to fetch; a claim that gets the cold device finds the others Ready at once.
	MaxWeights = MaxDevicesPerSlice - 1
	// MaxGPUs bounds the GPUs of a node.
	MaxGPUs = 16 * MaxDevicesPerSlice
	// maxLeftOut bounds the lines of Plan.LeftOut; a last line counts the rest.
	maxLeftOut = 32
)

// Pools says which slice pools a node publishes.
type Pools struct {
	GPUs    bool `json:"gpus"`
	Weights bool `json:"weights"`
	KV      bool `json:"kv"`
}

// ParsePools reads the names gpus, weights and kv; no name is no pool.
func ParsePools(names []string) (Pools, error) {
	var p Pools
	for _, name := range names {
		switch name {
		case "gpus":
			p.GPUs = true
		case "weights":
			p.Weights = true
		case "kv":
			p.KV = true
		default:
			return Pools{}, fmt.Errorf("parse devices: %q is none of gpus, weights, kv", name)
		}
	}
	return p, nil
}

// Cold is what the driver knows of the node's cold device.
type Cold struct {
	// Failure is the reason why the last pull for a claim cannot succeed
	// ("Forbidden", "NoSpace"); empty where none failed of late.
	Failure string
	// Taken is what claims have of the cold device whose pulls began. Their bytes
	// are gone from the drive's free space already while the scheduler counts
	// them too, so they are added to what is published.
	Taken units.Bytes
}

// Offer is what a node has to offer. A field that is nil is not known yet: its
// slice pool is not published. A node without GPUs has an empty GPUs. An Offer is not changed after it was given.
type Offer struct {
	Node     string
	Pools    Pools
	Features Features
	GPUs     device.Snapshot
	Weights  *stock.Weights
	KV       *stock.Space
	Cold     Cold
}

// Plan is what a node should publish.
type Plan struct {
	Resources resourceslice.DriverResources
	// LeftOut says, for people, what an Offer has and the slices do not: at most
	// 33 lines.
	LeftOut []string
}

// PlanSlices turns what a node has into its slices. It is pure; equal offers
// give equal bytes, in whatever order their lists stand. What cannot be
// published is left out and named, so that the rest always can.
func PlanSlices(o Offer) Plan {
	p := Plan{Resources: resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{}}}
	if o.Pools.GPUs && o.GPUs != nil {
		p.pool(PoolGPUs(o.Node), p.gpus(o.GPUs))
	}
	if o.Features.ConsumableCapacity { // without it a shared device would belong to its first claim
		if o.Pools.Weights && o.Weights != nil {
			p.pool(PoolWeights(o.Node), p.weights(*o.Weights, o.Cold, o.Features))
		}
		if o.Pools.KV && o.KV != nil && (o.KV.Memory > 0 || o.KV.NVMe > 0) {
			p.pool(PoolKV(o.Node), []resourceapi.Device{p.keep(planKV(*o.KV))})
		}
	}
	if more := len(p.LeftOut) - maxLeftOut; more > 0 {
		p.LeftOut = append(p.LeftOut[:maxLeftOut:maxLeftOut], fmt.Sprintf("and %d more", more))
	}
	return p
}

// pool cuts devices into slices. A slice pool without devices is one empty
// slice: it says that the driver is here and has nothing.
func (p *Plan) pool(name string, devices []resourceapi.Device) {
	pool := resourceslice.Pool{}
	for chunk := range slices.Chunk(devices, MaxDevicesPerSlice) {
		pool.Slices = append(pool.Slices, resourceslice.Slice{Devices: slices.Clip(chunk)})
	}
	if len(pool.Slices) == 0 {
		pool.Slices = []resourceslice.Slice{{}}
	}
	p.Resources.Pools[name] = pool
}

// keep notes which attributes of a device had to stay out.
func (p *Plan) keep(d *published) resourceapi.Device {
	if len(d.leftOut) > 0 {
		slices.Sort(d.leftOut)
		p.leave(d.Name, "without "+strings.Join(d.leftOut, ", ")+": the value does not fit the attribute")
	}
	return d.Device
}

func (p *Plan) leave(what, why string) {
	p.LeftOut = append(p.LeftOut, fmt.Sprintf("%.80s: %s", strings.ToValidUTF8(what, "?"), why))
}

func (p *Plan) gpus(snapshot device.Snapshot) []resourceapi.Device {
	states := slices.Clone(snapshot)
	slices.SortFunc(states, compareStates)
	var devices []resourceapi.Device
	for i, s := range states {
		id := string(s.Device.ID)
		switch {
		case len(validation.IsDNS1123Label(id)) > 0:
			p.leave(id, "the device's ID is no DNS label")
		case i > 0 && states[i-1].Device.ID == s.Device.ID:
			p.leave(id, "another device has the same ID")
		case len(devices) == MaxGPUs:
			p.leave(id, fmt.Sprintf("the node has more than %d GPUs", MaxGPUs))
		default:
			devices = append(devices, p.keep(planGPU(s)))
		}
	}
	return devices
}

// compareStates orders by ID, and devices of one ID by all else that is
// published, so that the order of a list never shows.
func compareStates(a, b device.State) int {
	return cmp.Or(
		cmp.Compare(a.Device.ID, b.Device.ID),
		cmp.Compare(identityOf(a), identityOf(b)),
	)
}

func identityOf(s device.State) string {
	d := s.Device
	numa := "-"
	if d.NUMA != nil {
		numa = fmt.Sprint(*d.NUMA)
	}
	return strings.Join([]string{
		d.UUID, d.Product, d.Brand, d.Architecture, d.ComputeCapability, d.DriverVersion, d.CUDAVersion,
		d.PCIBusID, d.PCIRoot, numa, d.NVLinkGroup, d.CliqueID, fmt.Sprint(d.Memory),
	}, "\x00")
}

func (p *Plan) weights(w stock.Weights, cold Cold, f Features) []resourceapi.Device {
	artifacts := slices.Clone(w.Artifacts)
	slices.SortFunc(artifacts, func(a, b stock.Artifact) int {
		return cmp.Or(cmp.Compare(a.Digest.String(), b.Digest.String()), compareArtifacts(a, b))
	})
	named := map[string]artifact.Digest{}
	var kept []stock.Artifact
	for _, a := range artifacts {
		digest, taken := named[WeightsDevice(a.Digest)]
		switch {
		case a.Digest.IsZero():
			p.leave(a.Ref.String(), "its digest is not known")
		case taken && digest == a.Digest: // the same bytes under another ref
			p.leave(a.Ref.String(), "is published as "+WeightsDevice(a.Digest)+" under another ref")
		case taken:
			p.leave(a.Ref.String(), "the first 16 digits of its digest are those of another artifact")
		default:
			named[WeightsDevice(a.Digest)] = a.Digest
			kept = append(kept, a)
		}
	}
	if len(kept) > MaxWeights {
		slices.SortStableFunc(kept, func(a, b stock.Artifact) int { return cmp.Compare(b.Size, a.Size) })
		for _, a := range kept[MaxWeights:] {
			p.leave(a.Ref.String(), fmt.Sprintf("only the largest %d artifacts are published", MaxWeights))
		}
		kept = kept[:MaxWeights]
	}
	devices := make([]resourceapi.Device, 0, len(kept)+1)
	for _, a := range kept {
		devices = append(devices, p.keep(planWeights(a, w.Drive)))
	}
	if d, ok := p.cold(w.Drive, cold, f); ok {
		devices = append(devices, d)
	}
	slices.SortFunc(devices, func(a, b resourceapi.Device) int { return cmp.Compare(a.Name, b.Name) })
	return devices
}

func compareArtifacts(a, b stock.Artifact) int {
	return cmp.Or(
		cmp.Compare(a.Ref.String(), b.Ref.String()), cmp.Compare(a.Model, b.Model), cmp.Compare(a.Commit, b.Commit),
		cmp.Compare(a.Format, b.Format), cmp.Compare(a.Quantization, b.Quantization), cmp.Compare(a.Size, b.Size),
	)
}

// cold gives the cold device; there is none where the node can take nothing.
func (p *Plan) cold(d stock.Drive, cold Cold, f Features) (resourceapi.Device, bool) {
	bytes := clampAdd(int64(d.Free), int64(cold.Taken))
	if bytes == 0 {
		return resourceapi.Device{}, false
	}
	planned := planCold(d, bytes)
	if cold.Failure != "" {
		if !f.DeviceTaints {
			p.leave(DeviceCold, "its last pull failed, and the cluster keeps no taints")
			return resourceapi.Device{}, false
		}
		planned.Taints = []resourceapi.DeviceTaint{{
			Key: TaintPullFailed, Value: taintValue(cold.Failure), Effect: resourceapi.DeviceTaintEffectNoSchedule,
		}}
	}
	return p.keep(planned), true
}

// taintValue is the reason where it can be a label's value.
func taintValue(reason string) string {
	if len(validation.IsValidLabelValue(reason)) > 0 {
		return "Failed"
	}
	return reason
}
