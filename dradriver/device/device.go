// Package device is the vocabulary of devices and their health: what was
// observed (Fact), what it means (Condition), how bad that is (Severity) and
// the folded state (Health) that readers act on. Every package that speaks of
// devices uses it. It is pure: no I/O, no clock, standard library only.
package device

import (
	"fmt"
	"time"
)

// ID names a device, unique in its node. It is stable across restarts.
type ID string

// Device is a GPU or MIG slice as DRA sees it.
type Device struct {
	ID      ID     `json:"id"`                // a DNS label; of a PCI device "gpu-0000-1b-00-0"
	Product string `json:"product,omitempty"` // "NVIDIA H200"
	Facts
}

// Facts are what the inventory knows of a device; a zero field is not known.
type Facts struct {
	UUID              string   `json:"uuid,omitempty"`              // "GPU-..."
	Brand             string   `json:"brand,omitempty"`             // "Nvidia"
	Architecture      string   `json:"architecture,omitempty"`      // "Hopper"
	ComputeCapability string   `json:"computeCapability,omitempty"` // "9.0"
	DriverVersion     string   `json:"driverVersion,omitempty"`     // "580.95.5"
	CUDAVersion       string   `json:"cudaVersion,omitempty"`       // of the driver, "13.0"
	PCIBusID          string   `json:"pciBusID,omitempty"`          // "0000:1b:00.0"
	PCIRoot           string   `json:"pciRoot,omitempty"`           // "pci0000:17"
	NUMA              *int     `json:"numaNode,omitempty"`          // nil where unknown
	NVLinkGroup       string   `json:"nvlinkGroup,omitempty"`       // devices of one value reach each other by NVLink
	CliqueID          string   `json:"cliqueID,omitempty"`          // of the NVLink fabric, across nodes
	Memory            int64    `json:"memory,omitempty"`            // bytes
	Nodes             []string `json:"nodes,omitempty"`             // device nodes, absolute paths
}

// FactKind is the kind of an observation.
type FactKind string

// Kinds of facts.
const (
	FactXID      FactKind = "xid"      // the driver reported the error Code
	FactRecovery FactKind = "recovery" // the driver's recovery action is now Code (0 none, 1 reset, 2 reboot, 3 drain p2p, 4 drain and reset, 5 recover fabric, 6 bus reset, 7 system reboot)
	FactLost     FactKind = "lost"     // the device does not answer
	FactPresent  FactKind = "present"  // the device answers
	FactReset    FactKind = "reset"    // the device was reset
	FactBoot     FactKind = "boot"     // the node was booted
	FactCleared  FactKind = "cleared"  // an operator vouches for the device, or it was replaced
	FactTime     FactKind = "time"     // nothing but the passing of time
)

// Fact is one observation of one device.
type Fact struct {
	Device ID
	Kind   FactKind
	Code   int    // XID or recovery action
	Source string // who saw it: "inject", "kmsg", "nvml"
}

// Severity says what a condition asks of others. Greater is worse.
type Severity uint8

// Severities.
const (
	Notice  Severity = iota // shown, asks for nothing
	Degrade                 // serves; others are preferred
	NoNew                   // no new work
	Evict                   // running work must go too
)

var severityNames = [...]string{"notice", "degrade", "no-new", "evict"}

// String gives the text form.
func (s Severity) String() string {
	if int(s) >= len(severityNames) {
		return fmt.Sprintf("severity(%d)", uint8(s))
	}
	return severityNames[s]
}

// MarshalText implements encoding.TextMarshaler with String.
func (s Severity) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads notice, degrade, no-new or evict.
func (s *Severity) UnmarshalText(text []byte) error {
	for i, name := range severityNames {
		if name == string(text) {
			*s = Severity(i)
			return nil
		}
	}
	return fmt.Errorf("parse severity %q: want notice, degrade, no-new or evict", text)
}

// Keys of conditions. A device has at most one condition of each key.
const (
	AppFault       = "app-fault"       // an application's fault; the device is reusable
	ResetRequired  = "reset-required"  // the device needs a reset
	RebootRequired = "reboot-required" // the node needs a boot
	Lost           = "lost"            // the device is off the bus or does not answer
	MemoryDegraded = "memory-degraded" // memory errors past what repair covers
	PendingRemap   = "pending-remap"   // a memory row is replaced at the next reset
	FabricDegraded = "fabric-degraded" // links between devices fail
	Thermal        = "thermal"         // slowed or endangered by heat or power
	Unmonitored    = "unmonitored"     // nobody can tell how the device is
)

// Condition is the meaning of facts, as it stands.
type Condition struct {
	Key      string    `json:"key"`
	Value    string    `json:"value"` // short token of the worst cause, such as "xid-79"
	Severity Severity  `json:"severity"`
	Since    time.Time `json:"since"` // first fact of this condition
	Detail   string    `json:"detail,omitempty"`
}

// Health is the folded state of a device. Greater is worse.
type Health uint8

// Health values.
const (
	Healthy Health = iota
	Degraded
	Unhealthy
)

// String gives "healthy", "degraded" or "unhealthy".
func (h Health) String() string {
	switch h {
	case Healthy:
		return "healthy"
	case Degraded:
		return "degraded"
	}
	return "unhealthy"
}

// MarshalText implements encoding.TextMarshaler with String.
func (h Health) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// UnmarshalText reads healthy, degraded or unhealthy.
func (h *Health) UnmarshalText(text []byte) error {
	for _, v := range []Health{Healthy, Degraded, Unhealthy} {
		if v.String() == string(text) {
			*h = v
			return nil
		}
	}
	return fmt.Errorf("parse health %q: want healthy, degraded or unhealthy", text)
}

// Fold gives the health that conditions add up to: the worst of them.
func Fold(conditions []Condition) Health {
	health := Healthy
	for _, c := range conditions {
		switch {
		case c.Severity >= NoNew:
			health = max(health, Unhealthy)
		case c.Severity == Degrade:
			health = max(health, Degraded)
		}
	}
	return health
}

// State is a device with its conditions and what they add up to.
type State struct {
	Device     Device      `json:"device"`
	Health     Health      `json:"health"`
	Conditions []Condition `json:"conditions,omitempty"` // by Key
}

// Snapshot is the state of all devices of a node, by ID. It is never changed
// after it was given out.
type Snapshot []State

// Find gives the state of one device.
func (s Snapshot) Find(id ID) (State, bool) {
	for _, state := range s {
		if state.Device.ID == id {
			return state, true
		}
	}
	return State{}, false
}
