package dradriver

import (
	"math/bits"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// gpuDevice is what the slice says of one GPU. Its health is not part of it.
func gpuDevice(s device.State) resourceapi.Device { return planGPU(s).Device }

// weightsDevice is what the slice says of one artifact.
func weightsDevice(a stock.Artifact, d stock.Drive) resourceapi.Device {
	return planWeights(a, d).Device
}

// kvDevice is what the slice says of the node's KV space.
func kvDevice(s stock.Space) resourceapi.Device { return planKV(s).Device }

func planGPU(s device.State) *published {
	d := s.Device
	p := newPublished(string(d.ID), KindGPU)
	p.text(AttributeUUID, d.UUID)
	p.text(AttributeProductName, d.Product)
	p.text(AttributeBrand, d.Brand)
	p.text(AttributeArchitecture, d.Architecture)
	p.version(AttributeComputeCapability, d.ComputeCapability)
	p.version(AttributeDriverVersion, d.DriverVersion)
	p.version(AttributeCUDAVersion, d.CUDAVersion)
	p.group(AttributeNVLinkGroup, d.NVLinkGroup)
	p.group(AttributeCliqueID, d.CliqueID)
	p.busID(d.PCIBusID)
	p.place(d.PCIRoot, d.NUMA)
	p.capacity(CapacityMemory, max(d.Memory, 0), nil)
	return p
}

func planWeights(a stock.Artifact, d stock.Drive) *published {
	p := newPublished(WeightsDevice(a.Digest), KindWeights)
	repo, revision := "", ""
	if a.Ref.Scheme == artifact.SchemeHub { // the name of a dir ref is a path of this node, which means nothing elsewhere
		repo, revision = a.Ref.Name, a.Ref.Revision
	}
	p.weights(d, weightsText{
		model: a.Model, repo: repo, revision: revision, digest: a.Digest.String(),
		format: a.Format, quantization: a.Quantization, tier: d.Tier,
	})
	// All capacity of a shared device is consumable. Weights are read by any
	// number of claims and consumed by none: nothing is the only amount that a
	// claim may ask for, and what it takes where it asks for none.
	p.capacity(CapacitySize, max(int64(a.Size), 0), onlyNothing())
	return p
}

// onlyNothing is the policy of a capacity of which no claim takes anything.
func onlyNothing() *resourceapi.CapacityRequestPolicy {
	return &resourceapi.CapacityRequestPolicy{Default: quantity(0), ValidValues: []resource.Quantity{*quantity(0)}}
}

// planCold publishes bytes that pulls may take. A claim that names no size
// takes a sixteenth, so that claims that say nothing are bounded too.
func planCold(d stock.Drive, bytes int64) *published {
	p := newPublished(DeviceCold, KindWeights)
	p.weights(d, weightsText{tier: TierCold})
	p.capacity(CapacitySize, max(bytes, 0), &resourceapi.CapacityRequestPolicy{
		Default:    quantity(max(bytes, 0) / 16),
		ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: quantity(0)},
	})
	return p
}

// weightsText is what people select weights by.
type weightsText struct{ model, repo, revision, digest, format, quantization, tier string }

// weights sets what every device of the slice pool of weights has.
func (p *published) weights(d stock.Drive, t weightsText) {
	p.shared()
	p.text(AttributeModel, t.model)
	p.text(AttributeRepo, t.repo)
	p.text(AttributeRevision, t.revision)
	p.text(AttributeDigest, t.digest)
	p.text(AttributeFormat, t.format)
	p.text(AttributeQuantization, t.quantization)
	p.text(AttributeTier, t.tier)
	p.place(d.PCIRoot, d.NUMA)
}

func planKV(s stock.Space) *published {
	p := newPublished(DeviceKV, KindKV)
	p.shared()
	p.text(AttributeTier, kvTier(s))
	p.kvCapacity(CapacityMemory, s.Memory, s.NamespaceMemory, true)
	p.kvCapacity(CapacityNVMe, s.NVMe, s.NamespaceNVMe, s.Memory <= 0)
	return p
}

// kvTier names the fastest tier that the space has.
func kvTier(s stock.Space) string {
	if s.Memory > 0 {
		return "ram"
	}
	return "nvme"
}

// kvCapacity publishes KV space in steps. One claim may take all that one
// namespace may; a claim that names no size takes one step of the first
// capacity that there is, and nothing of the other.
func (p *published) kvCapacity(name resourceapi.QualifiedName, total, namespace units.Bytes, first bool) {
	if total <= 0 {
		p.capacity(name, 0, onlyNothing())
		return
	}
	most := int64(total)
	if namespace > 0 {
		most = min(most, int64(namespace))
	}
	step := kvStep(most)
	most -= most % step
	policy := &resourceapi.CapacityRequestPolicy{
		Default:    quantity(0),
		ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: quantity(0), Max: quantity(most), Step: quantity(step)},
	}
	if first {
		policy.Default = quantity(step)
	}
	p.capacity(name, int64(total), policy)
}

// kvStep is 1 GiB, and where one claim may take little the largest power of two
// that makes at least sixteen steps of it, but a byte at the least.
func kvStep(most int64) int64 { return min(int64(units.GiB), powerBelow(most/16)) }

// powerBelow is the largest power of two that is not above n, at least 1.
func powerBelow(n int64) int64 {
	if n < 1 {
		return 1
	}
	return 1 << (bits.Len64(uint64(n)) - 1)
}
