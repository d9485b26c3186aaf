package dradriver

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Names of the features of a cluster that Hearth's slices and claims depend
// on. They are those of the Kubernetes feature gates, so that a configuration
// and `kubectl get --raw /metrics` speak of one thing.
const (
	FeatureConsumableCapacity = "DRAConsumableCapacity"
	FeatureDeviceTaints       = "DRADeviceTaints"
	FeatureExtendedResource   = "DRAExtendedResource"
	FeaturePrioritizedList    = "DRAPrioritizedList"
	FeatureAdminAccess        = "DRAAdminAccess"
	FeatureDeviceStatus       = "DRAResourceClaimDeviceStatus"
)

// Features says which of them a cluster has. The zero value has none.
type Features struct {
	ConsumableCapacity bool `json:"consumableCapacity"` // shared devices, and capacity that claims take parts of
	DeviceTaints       bool `json:"deviceTaints"`       // taints in slices
	ExtendedResource   bool `json:"extendedResource"`   // a DeviceClass may stand for an extended resource
	PrioritizedList    bool `json:"prioritizedList"`    // firstAvailable in claims
	AdminAccess        bool `json:"adminAccess"`        // claims beside the owner's
	DeviceStatus       bool `json:"deviceStatus"`       // conditions of devices in a claim's status
}

// FeatureRow is one row of the table minor x feature x fall-back.
type FeatureRow struct {
	Name string `json:"name"` // the feature gate
	// Gated and On are the minors of Kubernetes 1.x from which the gate exists
	// and from which it is on unless switched off.
	Gated int `json:"gated"`
	On    int `json:"on"`
	// Probed says that the Publisher finds out by itself what the API server
	// keeps; what is not probed follows the minor or the configuration.
	Probed bool `json:"probed"`
	// Without is what Hearth does in a cluster that lacks the feature.
	Without string `json:"without"`
}

// MinorFirst is the oldest minor of Kubernetes 1.x that has resource.k8s.io/v1.
const MinorFirst = 34

type featureRow struct {
	FeatureRow
	field func(*Features) *bool
}

var featureTable = []featureRow{
	{
		FeatureRow{
			FeatureConsumableCapacity, 34, 36, true,
			"the slice pools weights and kv are not published; weights reach a pod through the mirror or the hub cache",
		},
		func(f *Features) *bool { return &f.ConsumableCapacity },
	},
	{
		FeatureRow{
			FeatureDeviceTaints, 33, 36, true,
			"the cold device is left out of its slice while a pull has failed",
		},
		func(f *Features) *bool { return &f.DeviceTaints },
	},
	{
		FeatureRow{
			FeatureExtendedResource, 34, 36, false,
			"nvidia.com/gpu in a pod is not served; its claim names the DeviceClass",
		},
		func(f *Features) *bool { return &f.ExtendedResource },
	},
	{
		FeatureRow{
			FeaturePrioritizedList, 33, 34, false,
			"a claim cannot prefer warm nodes; it asks for warm weights or for a cold device",
		},
		func(f *Features) *bool { return &f.PrioritizedList },
	},
	{
		FeatureRow{
			FeatureAdminAccess, 32, 34, false,
			"monitoring has no claim of its own on a device in use",
		},
		func(f *Features) *bool { return &f.AdminAccess },
	},
	{
		FeatureRow{
			FeatureDeviceStatus, 32, 33, false,
			"a pull that fails shows as an event and not as a condition of the claim",
		},
		func(f *Features) *bool { return &f.DeviceStatus },
	},
}

// FeatureTable is the table minor x feature x fall-back, for people to read.
func FeatureTable() []FeatureRow {
	rows := make([]FeatureRow, len(featureTable))
	for i, row := range featureTable {
		rows[i] = row.FeatureRow
	}
	return rows
}

// FeaturesOf gives what a cluster of Kubernetes 1.minor has where nobody
// switched a gate. Before MinorFirst it is nothing.
func FeaturesOf(minor int) Features {
	var f Features
	for _, row := range featureTable {
		*row.field(&f) = minor >= MinorFirst && minor >= row.On
	}
	return f
}

// Has reports whether f has the feature of a name; an unknown name is not had.
func (f Features) Has(name string) bool {
	for _, row := range featureTable {
		if row.Name == name {
			return *row.field(&f)
		}
	}
	return false
}

// With gives f with the features of some names set as said. An unknown name is
// an error that lists the known ones.
func (f Features) With(set map[string]bool) (Features, error) {
	for _, name := range slices.Sorted(maps.Keys(set)) {
		i := slices.IndexFunc(featureTable, func(row featureRow) bool { return row.Name == name })
		if i < 0 {
			return f, fmt.Errorf("set feature %q: unknown; known: %s", name, strings.Join(featureNames(), ", "))
		}
		*featureTable[i].field(&f) = set[name]
	}
	return f, nil
}

func featureNames() []string {
	names := make([]string, len(featureTable))
	for i, row := range featureTable {
		names[i] = row.Name
	}
	return names
}

// lacking names the features that f lacks, in the table's order.
func (f Features) lacking() []string {
	var names []string
	for _, row := range featureTable {
		if !*row.field(&f) {
			names = append(names, row.Name)
		}
	}
	return names
}
