// Package netattr says who moves bytes over this node's network: by pod, class,
// direction and locality, and by pull. It owns the programs in the kernel
// (bpf), the way from cgroups to pods (cgroups) and the devices' counters that
// all is held against (nic); NETWORK.md is what it promises. The agent's root
// builds it, marks its sockets by it and publishes its Snapshot. It never
// slows, blocks or changes a connection, and where the kernel refuses its
// programs it says what it cannot see and goes on.
package netattr

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
	"github.com/hearth-dev/hearth/nodeagent/netattr/nic"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// Kind is what totals are kept by.
type Kind struct {
	Class     traffic.Class // never ByCgroup
	Locality  traffic.Locality
	Transport traffic.Transport
}

// Owner is whose cgroup moved bytes.
type Owner struct {
	PodUID    string // empty where it is no pod
	Container string // id; empty at the level of the pod, and where it is none
	Unit      string // of what is no pod, such as containerd.service; empty where nothing is known
}

// Pod is what the cluster knows of a pod of this node.
type Pod struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Engine    bool   `json:"engine,omitempty"` // its traffic is of class serving unless something says otherwise
}

// Share is what one owner moved of one kind.
type Share struct {
	Owner
	Kind
	traffic.Counts
}

// Sight is how much is seen.
type Sight int

// Sights.
const (
	SightNone    Sight = iota // nothing, not even devices
	SightDevices              // devices alone: no byte has an owner
	SightPartial              // some sensors that are asked for are off
	SightFull
)

// String gives the sight for people.
func (l Sight) String() string { return [...]string{"none", "devices", "partial", "full"}[l] }

// Live is how the connections of class serving fared over one interval between
// two samples. Only those count on which payload passed.
type Live struct {
	Connections   int
	Retransmitted uint64    // bytes
	RTT           Histogram // smoothed round trips, one of each connection
}

// Snapshot is one sample. It is never changed after it was given out.
type Snapshot struct {
	At time.Time
	// Sight and Sensors say what is seen; Reason is empty at SightFull.
	Sight   Sight
	Reason  string
	Sensors []bpf.Sensor
	Status  bpf.Status
	// TagFailed counts sockets of the agent's own that could not be marked.
	TagFailed uint64
	// Totals never fall, but for a start without pins.
	Totals map[Kind]traffic.Counts
	// Shares are the owners' parts of Totals since the counts were made, of
	// owners that are still there or that moved something lately.
	Shares []Share
	// Flights are the bytes on connections that pulls marked, by the pulls' ids.
	Flights map[uint32]traffic.Counts
	// Pods are names of pods, by UID.
	Pods map[string]Pod
	// Devices are the node's network devices and RDMA ports as they are, and
	// Counted what they counted since Started.
	Devices nic.Devices
	Counted nic.Totals
	// Since Started: what devices counted, what of it has an owner, what has not,
	// and the last difference as it was measured; bytes by traffic.Direction.
	Started      time.Time
	OnWire       [2]uint64
	Attributed   [2]uint64
	Unattributed [2]uint64
	Residual     [2]int64
	// Live is that of the interval that this sample ended.
	Live Live
	// Walked is how long the last walk over the sockets took.
	Walked time.Duration
}

// Class gives the sum over one class and locality.
func (s *Snapshot) Class(class traffic.Class, locality traffic.Locality) traffic.Counts {
	var sum traffic.Counts
	for kind, c := range s.Totals {
		if kind.Class == class && kind.Locality == locality {
			sum.Add(c)
		}
	}
	return sum
}

// Kinds lists the kinds of Totals in a fixed order.
func (s *Snapshot) Kinds() []Kind {
	return slices.SortedFunc(maps.Keys(s.Totals), func(a, b Kind) int {
		return int(a.Class)<<8 + int(a.Locality)<<4 + int(a.Transport) - int(b.Class)<<8 - int(b.Locality)<<4 - int(b.Transport)
	})
}

// sight folds the sensors into one word, and says what is off.
func sight(sensors []bpf.Sensor, devices bool) (Sight, string) {
	var off []string
	on := false
	for _, p := range sensors {
		switch {
		case p.On:
			on = on || p.Name == bpf.SensorSockets || p.Name == bpf.SensorWalk
		case p.Wanted:
			off = append(off, p.Name+": "+p.Reason)
		}
	}
	reason := strings.Join(off, "; ")
	switch {
	case on && len(off) == 0:
		return SightFull, ""
	case on:
		return SightPartial, reason
	case devices:
		return SightDevices, reason
	}
	return SightNone, reason
}
