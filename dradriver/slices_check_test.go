package dradriver

import (
	"errors"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// TestWhatTheAPIServerWouldRefuseIsNotSent breaks one rule at a time in a pool
// that is fine otherwise.
func TestWhatTheAPIServerWouldRefuseIsNotSent(t *testing.T) {
	t.Parallel()
	text := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	version := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{VersionValue: &s} }
	amount := func(s string) *resource.Quantity { q := resource.MustParse(s); return &q }
	ranged := func(standard, least, most, step string) resourceapi.DeviceCapacity {
		return resourceapi.DeviceCapacity{Value: *amount("64Gi"), RequestPolicy: &resourceapi.CapacityRequestPolicy{
			Default:    amount(standard),
			ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: amount(least), Max: amount(most), Step: amount(step)},
		}}
	}
	for name, c := range map[string]struct {
		change func(pool *resourceslice.Pool, d *resourceapi.Device)
		want   string
	}{
		"no slice":      {func(p *resourceslice.Pool, _ *resourceapi.Device) { p.Slices = nil }, "slices: there is none"},
		"device's name": {func(_ *resourceslice.Pool, d *resourceapi.Device) { d.Name = "Kv" }, "Kv: a lowercase RFC 1123 label"},
		"same name": {func(p *resourceslice.Pool, d *resourceapi.Device) {
			p.Slices = append(p.Slices, resourceslice.Slice{Devices: []resourceapi.Device{*d}})
		}, "stands twice"},
		"65 devices": {func(p *resourceslice.Pool, d *resourceapi.Device) {
			p.Slices[0].Devices = make([]resourceapi.Device, 65)
		}, "65 devices"},
		"long string": {func(_ *resourceslice.Pool, d *resourceapi.Device) { d.Attributes["x"] = text(strings.Repeat("x", 65)) }, "longer than 64"},
		"no UTF-8":    {func(_ *resourceslice.Pool, d *resourceapi.Device) { d.Attributes["x"] = text("\xff") }, "not UTF-8"},
		"two values": {func(_ *resourceslice.Pool, d *resourceapi.Device) {
			a := text("1")
			a.IntValue = new(int64)
			d.Attributes["x"] = a
		}, "exactly one value"},
		"no value":   {func(_ *resourceslice.Pool, d *resourceapi.Device) { d.Attributes["x"] = resourceapi.DeviceAttribute{} }, "exactly one value"},
		"version":    {func(_ *resourceslice.Pool, d *resourceapi.Device) { d.Attributes["x"] = version("580.95.05") }, "MAJOR.MINOR.PATCH"},
		"identifier": {func(_ *resourceslice.Pool, d *resourceapi.Device) { d.Attributes["a-b"] = text("") }, "C identifier"},
		"long name": {func(_ *resourceslice.Pool, d *resourceapi.Device) {
			d.Attributes[resourceapi.QualifiedName(strings.Repeat("x", 33))] = text("")
		}, "longer than 32"},
		"domain": {func(_ *resourceslice.Pool, d *resourceapi.Device) { d.Attributes["A/b"] = text("") }, "RFC 1123 subdomain"},
		"33 attributes": {func(_ *resourceslice.Pool, d *resourceapi.Device) {
			for c := 'a'; c < 'a'+26; c++ {
				d.Attributes[resourceapi.QualifiedName(c)], d.Attributes[resourceapi.QualifiedName(c)+"2"] = text(""), text("")
			}
		}, "at most 32"},
		"policy unshared": {func(_ *resourceslice.Pool, d *resourceapi.Device) { d.AllowMultipleAllocations = nil }, "not shared"},
		"default past max": {func(_ *resourceslice.Pool, d *resourceapi.Device) {
			d.Capacity["memory"] = ranged("9Gi", "0", "8Gi", "1Gi")
		}, "min <= default"},
		"max past value": {func(_ *resourceslice.Pool, d *resourceapi.Device) {
			d.Capacity["memory"] = ranged("0", "0", "65Gi", "1Gi")
		}, "min <= default"},
		"max off step": {func(_ *resourceslice.Pool, d *resourceapi.Device) {
			d.Capacity["memory"] = ranged("0", "0", "1500Mi", "1Gi")
		}, "whole number of steps"},
		"step past value": {func(_ *resourceslice.Pool, d *resourceapi.Device) {
			d.Capacity["memory"] = ranged("0", "0", "0", "65Gi")
		}, "one step exceeds"},
		"no step": {func(_ *resourceslice.Pool, d *resourceapi.Device) { d.Capacity["memory"] = ranged("0", "0", "0", "0") }, "not positive"},
		"taint": {func(_ *resourceslice.Pool, d *resourceapi.Device) {
			d.Taints = []resourceapi.DeviceTaint{{Key: "hearth.dev/x", Value: "two words"}}
		}, "taint hearth.dev/x"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := PlanSlices(fullNode()).Resources.Pools["node-a/kv"]
			c.change(&pool, &pool.Slices[:1:1][0].Devices[0])
			err := checkPool("node-a/kv", pool)
			if !errors.Is(err, ErrInvalidSlices) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
	if err := checkPool("Node/kv", PlanSlices(fullNode()).Resources.Pools["node-a/kv"]); !errors.Is(err, ErrInvalidSlices) {
		t.Errorf("a pool of a wrong name: %v", err)
	}
}
