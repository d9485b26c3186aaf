package dradriver

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
)

// Attributes of devices, in the domain of the driver: CEL reads them as
// device.attributes["hearth.dev"].kind. Their types never change.
const (
	AttributeKind = "kind" // of every device: KindGPU, KindWeights or KindKV

	AttributeUUID              = "uuid"
	AttributeProductName       = "productName"
	AttributeBrand             = "brand"
	AttributeArchitecture      = "architecture"
	AttributeComputeCapability = "cudaComputeCapability" // version
	AttributeDriverVersion     = "driverVersion"         // version
	AttributeCUDAVersion       = "cudaDriverVersion"     // version
	AttributeNVLinkGroup       = "nvlinkGroup"
	AttributeCliqueID          = "cliqueID"

	AttributeModel        = "model"
	AttributeRepo         = "repo"
	AttributeRevision     = "revision"
	AttributeDigest       = "digest" // 64 hex digits
	AttributeFormat       = "format"
	AttributeQuantization = "quantization"
	AttributeTier         = "tier"
)

// TierCold is the tier of the cold device; those of others are where the bytes
// lie ("nvme", "disk", "ram").
const TierCold = "cold"

// Capacities of devices, in bytes.
const (
	CapacityMemory resourceapi.QualifiedName = "memory" // of a GPU, and of the KV device
	CapacityNVMe   resourceapi.QualifiedName = "nvme"   // of the KV device
	CapacitySize   resourceapi.QualifiedName = "size"   // of weights
)

// TaintPullFailed is the key of the taint on a cold device whose last pull
// failed for good; its value is the reason.
const TaintPullFailed = Name + "/pull-failed"

// digestSuffix makes the name of the attribute that stands for one whose value
// cannot be published.
const digestSuffix = "Digest"

var (
	busIDForm   = regexp.MustCompile(`^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]$`)
	pcieRootIs  = regexp.MustCompile(`^pci[0-9a-f]{4}:[0-9a-f]{2}$`)
	versionPart = regexp.MustCompile(`^[0-9]{1,18}$`)
)

// published is one device on its way into a slice, with what had to stay out.
type published struct {
	resourceapi.Device
	leftOut []string // names of attributes
}

func newPublished(name, kind string) *published {
	p := &published{Device: resourceapi.Device{
		Name:       name,
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{},
		Capacity:   map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{},
	}}
	p.text(AttributeKind, kind)
	return p
}

// text sets a string that every device of its kind has: a CEL selector that
// reads an attribute which one device lacks fails for the whole cluster. An
// unknown value is empty, and so is one that does not fit or is no text; the
// SHA-256 of that is published under the name with digestSuffix. What can be
// selected is never truncated.
func (p *published) text(name resourceapi.QualifiedName, value string) {
	if !p.fits(name, value) {
		value = ""
	}
	p.Attributes[name] = resourceapi.DeviceAttribute{StringValue: &value}
}

// group sets a string that devices share: where it is unknown it must be
// missing, or matchAttribute would join devices that have nothing in common.
func (p *published) group(name resourceapi.QualifiedName, value string) {
	if value != "" && p.fits(name, value) {
		p.Attributes[name] = resourceapi.DeviceAttribute{StringValue: &value}
	}
}

// fits reports whether a value can be an attribute's, and publishes its digest
// where it cannot.
func (p *published) fits(name resourceapi.QualifiedName, value string) bool {
	if len(value) <= resourceapi.DeviceAttributeMaxValueLength && utf8.ValidString(value) {
		return true
	}
	sum := sha256.Sum256([]byte(value))
	text := hex.EncodeToString(sum[:])
	p.Attributes[name+digestSuffix] = resourceapi.DeviceAttribute{StringValue: &text}
	p.leftOut = append(p.leftOut, string(name))
	return false
}

// version sets a version that every device of its kind has, 0.0.0 where it is
// unknown. Drivers and CUDA count in two or three numbers with leading zeros,
// the API in exactly three without: "9.0" is 9.0.0 and "580.95.05" is 580.95.5.
func (p *published) version(name resourceapi.QualifiedName, value string) {
	text, ok := semantic(value)
	if !ok && value != "" {
		p.leftOut = append(p.leftOut, string(name))
	}
	p.Attributes[name] = resourceapi.DeviceAttribute{VersionValue: &text}
}

// semantic gives MAJOR.MINOR.PATCH of up to three numbers, or 0.0.0 and false.
func semantic(value string) (version string, ok bool) {
	const unknown = "0.0.0"
	parts := strings.Split(value, ".")
	if len(parts) > 3 {
		return unknown, false
	}
	for i, part := range parts {
		if !versionPart.MatchString(part) {
			return unknown, false
		}
		if parts[i] = strings.TrimLeft(part, "0"); parts[i] == "" {
			parts[i] = "0"
		}
	}
	for len(parts) < 3 {
		parts = append(parts, "0")
	}
	return strings.Join(parts, "."), true
}

// place sets the standard attributes that tell where in the machine a device
// is. A value of another form would lead matchAttribute astray, so it is left
// out, and so is a NUMA node that the kernel does not know (-1).
func (p *published) place(pcieRoot string, numa *int) {
	if pcieRootIs.MatchString(pcieRoot) {
		p.Attributes[deviceattribute.StandardDeviceAttributePCIeRoot] = resourceapi.DeviceAttribute{StringValue: &pcieRoot}
	} else if pcieRoot != "" {
		p.leftOut = append(p.leftOut, string(deviceattribute.StandardDeviceAttributePCIeRoot))
	}
	if numa != nil && *numa >= 0 {
		node := int64(*numa)
		p.Attributes[deviceattribute.StandardDeviceAttributeNUMANode] = resourceapi.DeviceAttribute{IntValue: &node}
	}
}

// busID sets the standard attribute pciBusID. NVML tells the domain with eight
// digits in upper case, the attribute wants four in lower case.
func (p *published) busID(id string) {
	if id == "" {
		return
	}
	norm := strings.ToLower(id)
	if domain, rest, ok := strings.Cut(norm, ":"); ok && len(domain) == 8 && strings.HasPrefix(domain, "0000") {
		norm = domain[4:] + ":" + rest
	}
	if !busIDForm.MatchString(norm) {
		p.leftOut = append(p.leftOut, string(deviceattribute.StandardDeviceAttributePCIBusID))
		return
	}
	p.Attributes[deviceattribute.StandardDeviceAttributePCIBusID] = resourceapi.DeviceAttribute{StringValue: &norm}
}

// capacity sets a number of bytes, which claims may take parts of as the
// policy says.
func (p *published) capacity(name resourceapi.QualifiedName, bytes int64, policy *resourceapi.CapacityRequestPolicy) {
	p.Capacity[name] = resourceapi.DeviceCapacity{Value: *quantity(bytes), RequestPolicy: policy}
}

func (p *published) shared() {
	yes := true
	p.AllowMultipleAllocations = &yes
}

// quantity gives bytes with their text already made: a Quantity caches its text
// when it is first asked, and two slices must be equal byte by byte however
// often they were printed.
func quantity(bytes int64) *resource.Quantity {
	q := resource.NewQuantity(bytes, resource.BinarySI)
	_ = q.String()
	return q
}
