package dradriver

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// ErrInvalidSlices marks slices that the API server would refuse.
var ErrInvalidSlices = errors.New("invalid slices")

// checkPool tells whether the API server would take the slices of one pool, by
// the rules of resource.k8s.io/v1 as of 1.37 for the fields that Hearth uses.
// One refused slice makes its whole pool useless, so a pool is only ever sent
// after this. Errors wrap ErrInvalidSlices and name the device.
func checkPool(name string, pool resourceslice.Pool) error {
	c := poolCheck{seen: map[string]bool{}}
	c.poolName(name)
	for i, s := range pool.Slices {
		c.slice(i, s)
	}
	if len(pool.Slices) == 0 {
		c.fail("slices", "there is none")
	}
	if len(c.problems) > 0 {
		return fmt.Errorf("check slice pool %s: %w: %s", name, ErrInvalidSlices, strings.Join(c.problems, "; "))
	}
	return nil
}

// maxPolicyValues is how many amounts a request policy may list.
const maxPolicyValues = 10

// maxProblems bounds what one error says.
const maxProblems = 8

type poolCheck struct {
	seen     map[string]bool
	problems []string
}

func (c *poolCheck) fail(where, what string) {
	if len(c.problems) < maxProblems {
		c.problems = append(c.problems, where+": "+what)
	}
}

func (c *poolCheck) poolName(name string) {
	if name == "" || len(name) > resourceapi.PoolNameMaxLength {
		c.fail("name", fmt.Sprintf("want 1 to %d bytes", resourceapi.PoolNameMaxLength))
	}
	for part := range strings.SplitSeq(name, "/") {
		for _, problem := range validation.IsDNS1123Subdomain(part) {
			c.fail("name", problem)
		}
	}
}

func (c *poolCheck) slice(i int, s resourceslice.Slice) {
	if len(s.Devices) > MaxDevicesPerSlice {
		c.fail(fmt.Sprintf("slice %d", i), fmt.Sprintf("%d devices, at most %d", len(s.Devices), MaxDevicesPerSlice))
	}
	if len(s.SharedCounters) > 0 && len(s.Devices) > 0 {
		c.fail(fmt.Sprintf("slice %d", i), "has counters beside devices")
	}
	for _, d := range s.Devices {
		if c.seen[d.Name] {
			c.fail(d.Name, "stands twice")
		}
		c.seen[d.Name] = true
		c.device(d)
	}
}

func (c *poolCheck) device(d resourceapi.Device) {
	for _, problem := range validation.IsDNS1123Label(d.Name) {
		c.fail(d.Name, problem)
	}
	if n := len(d.Attributes) + len(d.Capacity); n > resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
		c.fail(d.Name, fmt.Sprintf("%d attributes and capacities, at most %d", n, resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice))
	}
	for _, name := range slices.Sorted(maps.Keys(d.Attributes)) {
		where := d.Name + "." + string(name)
		c.qualified(where, string(name))
		c.attribute(where, d.Attributes[name])
	}
	shared := d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations
	for _, name := range slices.Sorted(maps.Keys(d.Capacity)) {
		where := d.Name + "." + string(name)
		c.qualified(where, string(name))
		capacity := d.Capacity[name]
		if capacity.RequestPolicy == nil {
			continue
		}
		if !shared {
			c.fail(where, "has a request policy on a device that is not shared")
		}
		c.policy(where, capacity.Value, *capacity.RequestPolicy)
	}
	if len(d.Taints) > resourceapi.DeviceTaintsMaxLength {
		c.fail(d.Name, fmt.Sprintf("%d taints, at most %d", len(d.Taints), resourceapi.DeviceTaintsMaxLength))
	}
	for _, taint := range d.Taints {
		for _, problem := range slices.Concat(validation.IsQualifiedName(taint.Key), validation.IsValidLabelValue(taint.Value)) {
			c.fail(d.Name+" taint "+taint.Key, problem)
		}
	}
}

// qualified checks an attribute's or capacity's name: a C identifier, with the
// domain of whoever defined it where that is not the driver.
func (c *poolCheck) qualified(where, name string) {
	domain, id, found := strings.Cut(name, "/")
	if !found {
		id = name
	} else {
		if len(domain) > resourceapi.DriverNameMaxLength {
			c.fail(where, "the domain is too long")
		}
		for _, problem := range validation.IsDNS1123Subdomain(domain) {
			c.fail(where, problem)
		}
	}
	if len(id) > resourceapi.DeviceMaxIDLength {
		c.fail(where, fmt.Sprintf("the name is longer than %d bytes", resourceapi.DeviceMaxIDLength))
	}
	for _, problem := range validation.IsCIdentifier(id) {
		c.fail(where, problem)
	}
}

var semver = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)$`)

func (c *poolCheck) attribute(where string, a resourceapi.DeviceAttribute) {
	values := 0
	for _, set := range []bool{a.StringValue != nil, a.VersionValue != nil, a.IntValue != nil, a.BoolValue != nil} {
		if set {
			values++
		}
	}
	if values != 1 {
		c.fail(where, "want exactly one value")
	}
	for _, text := range []*string{a.StringValue, a.VersionValue} {
		if text == nil {
			continue
		}
		if len(*text) > resourceapi.DeviceAttributeMaxValueLength {
			c.fail(where, fmt.Sprintf("the value is longer than %d bytes", resourceapi.DeviceAttributeMaxValueLength))
		}
		if !utf8.ValidString(*text) {
			c.fail(where, "the value is not UTF-8")
		}
	}
	if a.VersionValue != nil && !semver.MatchString(*a.VersionValue) {
		c.fail(where, "the version is not MAJOR.MINOR.PATCH")
	}
}

// policy checks how parts of a capacity may be asked for.
func (c *poolCheck) policy(where string, value resource.Quantity, p resourceapi.CapacityRequestPolicy) {
	if len(p.ValidValues) == 0 && p.ValidRange == nil {
		return
	}
	if p.Default == nil {
		c.fail(where, "the policy has no default")
		return
	}
	if len(p.ValidValues) > 0 {
		if p.ValidRange != nil {
			c.fail(where, "the policy has values and a range")
		}
		c.values(where, value, *p.Default, p.ValidValues)
		return
	}
	c.bounds(where, value, *p.Default, *p.ValidRange)
}

func (c *poolCheck) values(where string, value, standard resource.Quantity, values []resource.Quantity) {
	if len(values) > maxPolicyValues {
		c.fail(where, "too many values")
	}
	found := false
	for i, v := range values {
		found = found || v.Cmp(standard) == 0
		if v.Cmp(value) > 0 {
			c.fail(where, "a value exceeds the capacity")
		}
		if i > 0 && values[i-1].Cmp(v) >= 0 {
			c.fail(where, "the values do not ascend")
		}
	}
	if !found {
		c.fail(where, "the default is none of the values")
	}
}

func (c *poolCheck) bounds(where string, value, standard resource.Quantity, r resourceapi.CapacityRequestPolicyRange) {
	if r.Min == nil || r.Min.Sign() < 0 {
		c.fail(where, "the range has no least amount")
		return
	}
	most := value
	if r.Max != nil {
		most = *r.Max
	}
	if r.Min.Cmp(most) > 0 || most.Cmp(value) > 0 || standard.Cmp(*r.Min) < 0 || standard.Cmp(most) > 0 {
		c.fail(where, "want min <= default <= max <= capacity")
	}
	if r.Step == nil {
		return
	}
	if r.Step.Sign() <= 0 {
		c.fail(where, "the step is not positive")
		return
	}
	first := r.Min.DeepCopy()
	first.Add(*r.Step)
	if first.Cmp(value) > 0 {
		c.fail(where, "one step exceeds the capacity")
	}
	for _, v := range []*resource.Quantity{&standard, r.Max} {
		if v != nil && (v.Value()-r.Min.Value())%r.Step.Value() != 0 {
			c.fail(where, "default or max is no whole number of steps")
		}
	}
}
