package ledger

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Limits of an entry. What exceeds them is refused at Begin.
const (
	MaxResults = 32  // allocated devices in a claim, as Kubernetes bounds them
	MaxPods    = 256 // pods in a claim's reservedFor, likewise
	maxUID     = 128 // bytes
	maxRecord  = 256 << 10
)

// State is how far a claim is.
type State string

// States. A claim goes from Begun to Prepared to Gone, or from Begun to Gone;
// only a Begin with a fresh ticket leads from Gone to Begun.
const (
	Begun    State = "begun"    // planned; some of the plan may have happened
	Prepared State = "prepared" // the kubelet was told that it is ready
	Gone     State = "gone"     // unprepared: a tombstone
)

// Kind is the kind of a device.
type Kind = string

// Kinds of devices.
const (
	KindGPU     Kind = "gpu"
	KindWeights Kind = "weights"
	KindCold    Kind = "cold"
	KindKV      Kind = "kv"
)

// Held is something that a claim has outside the ledger.
type Held string

// What a claim may hold.
const (
	HeldWeights Held = "weights" // artifacts and pulls, in the weight cache
	HeldKV      Held = "kv"      // KV space
)

// Entry is all that is known of one claim: enough to unprepare it, to answer a
// repeated Prepare and to write its CDI file again without asking anybody.
type Entry struct {
	UID       string `json:"uid"` // of the ResourceClaim
	Namespace string `json:"namespace"`
	Name      string `json:"name"`

	// These the ledger sets, in Begin, Commit and Tombstone.
	State    State     `json:"state"`
	Boot     string    `json:"boot,omitempty"` // id of the boot in which the entry was last begun or committed
	Begun    time.Time `json:"begun,omitzero"`
	Prepared time.Time `json:"prepared,omitzero"`
	Gone     time.Time `json:"gone,omitzero"`
	Seen     time.Time `json:"seen,omitzero"`     // when its pods last changed while it was prepared
	Sharers  []string  `json:"sharers,omitempty"` // UIDs of claims that had one of its devices too, at Commit, and when it was unprepared
	Lines    Lines     `json:"journal,omitzero"`
	Owed     []Held    `json:"owed,omitempty"` // of a tombstone: what is to be released yet

	Pods    []Pod    `json:"pods,omitempty"`
	Results []Result `json:"results,omitempty"`
	Weights []Weight `json:"weights,omitempty"`
	KV      *KV      `json:"kv,omitempty"`
}

// Lines are the numbers of an entry's lines in the journal; 0 is none.
type Lines struct {
	Prepared uint64 `json:"prepared,omitempty"`
	Pods     uint64 `json:"pods,omitempty"` // the last of those
	Gone     uint64 `json:"gone,omitempty"`
}

// Pod is a pod that a claim is or was reserved for.
type Pod struct {
	Name string    `json:"name"`
	UID  string    `json:"uid"`
	Left time.Time `json:"left,omitzero"` // when it was first seen that the claim is reserved for it no more
}

// same reports whether two are the same pod, and both there or both gone.
func (p Pod) same(o Pod) bool {
	return p.Name == o.Name && p.UID == o.UID && p.Left.Equal(o.Left)
}

// Result is one allocated device of a claim.
type Result struct {
	Request     string `json:"request"` // as in the allocation: "main", or "main/sub"
	Pool        string `json:"pool"`
	Device      string `json:"device"`
	ShareID     string `json:"shareID,omitempty"`
	Kind        Kind   `json:"kind"`
	UUID        string `json:"uuid,omitempty"` // of a GPU
	AdminAccess bool   `json:"adminAccess,omitempty"`
	// Shared says that the device allows several allocations.
	Shared bool `json:"shared,omitempty"`
	// AcrossNamespaces says that its class lets claims of several namespaces have
	// it. It counts where all of them say so.
	AcrossNamespaces bool             `json:"acrossNamespaces,omitempty"`
	Consumed         map[string]int64 `json:"consumed,omitempty"` // capacity's name to bytes
	CDI              string           `json:"cdi,omitempty"`      // name of its CDI device, unqualified
	Edits            Edits            `json:"edits,omitzero"`
}

// Edits is what a container gets with a device, as plain data.
type Edits struct {
	Env         []string     `json:"env,omitempty"` // NAME=value
	DeviceNodes []DeviceNode `json:"deviceNodes,omitempty"`
	Mounts      []Mount      `json:"mounts,omitempty"`
}

// IsZero reports whether a container gets nothing.
func (e Edits) IsZero() bool { return len(e.Env)+len(e.DeviceNodes)+len(e.Mounts) == 0 }

// DeviceNode is a device node in a container. Its numbers are those that the
// node's file has when the container starts.
type DeviceNode struct {
	Path     string `json:"path"`
	HostPath string `json:"hostPath,omitempty"` // on the node; empty: Path
}

// Mount is a mount in a container.
type Mount struct {
	Host      string   `json:"host"` // absolute path on the node
	Container string   `json:"container"`
	Options   []string `json:"options,omitempty"`
}

// Weight is one artifact that a claim holds, or pulls.
type Weight struct {
	Request  string          `json:"request"`
	Ref      artifact.Ref    `json:"ref,omitzero"`
	Digest   artifact.Digest `json:"digest,omitzero"`   // zero until it is resolved
	Pull     bool            `json:"pull,omitempty"`    // it was not there: Cache.Pull, not Cache.Hold
	Deadline time.Time       `json:"deadline,omitzero"` // of the pull
	Size     int64           `json:"size,omitempty"`    // bytes; 0: not known
}

// KV is the KV space that a claim has.
type KV struct {
	Namespace string `json:"namespace"`
	Memory    int64  `json:"memory,omitempty"` // bytes
	NVMe      int64  `json:"nvme,omitempty"`   // bytes
	Dir       string `json:"dir,omitempty"`    // on the node; empty until reserved
}

// live reports whether the claim has its devices.
func (e *Entry) live() bool { return e.State == Begun || e.State == Prepared }

// holds is what the claim may hold outside the ledger.
func (e *Entry) holds() []Held {
	var held []Held
	if len(e.Weights) > 0 {
		held = append(held, HeldWeights)
	}
	if e.KV != nil {
		held = append(held, HeldKV)
	}
	return held
}

// validUID reports whether a UID can be a file's name.
func validUID(uid string) bool {
	if uid == "" || len(uid) > maxUID || uid[0] == '.' {
		return false
	}
	for _, c := range []byte(uid) {
		plain := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !plain && c != '-' && c != '.' && c != '_' {
			return false
		}
	}
	return true
}

// check says why an entry cannot be kept, nil if it can.
func (e *Entry) check() error {
	switch {
	case !validUID(e.UID):
		return fmt.Errorf("uid %q is none", e.UID)
	case e.Namespace == "" || e.Name == "":
		return errors.New("claim without namespace or name")
	case len(e.Results) > MaxResults:
		return fmt.Errorf("%d allocated devices, at most %d", len(e.Results), MaxResults)
	case len(e.Pods) > MaxPods:
		return fmt.Errorf("%d pods, at most %d", len(e.Pods), MaxPods)
	case e.State != Begun && e.State != Prepared && e.State != Gone:
		return fmt.Errorf("state %q is none", e.State)
	}
	seen := map[device]bool{}
	for i := range e.Results {
		r := &e.Results[i]
		if r.Pool == "" || r.Device == "" {
			return fmt.Errorf("request %q has no device", r.Request)
		}
		if d := r.device(); seen[d] && r.ShareID == "" && !r.AdminAccess {
			return fmt.Errorf("device %s/%s twice", r.Pool, r.Device)
		}
		seen[r.device()] = true
	}
	return nil
}

// clone is a copy that shares nothing with e. Times are in UTC, so that equal
// entries are equal bytes.
func (e *Entry) clone() Entry {
	c := *e
	for _, t := range []*time.Time{&c.Begun, &c.Prepared, &c.Gone, &c.Seen} {
		*t = plainTime(*t)
	}
	c.Sharers, c.Owed, c.Pods = slices.Clone(e.Sharers), slices.Clone(e.Owed), slices.Clone(e.Pods)
	c.Results, c.Weights = slices.Clone(e.Results), slices.Clone(e.Weights)
	for i := range c.Results {
		r := &c.Results[i]
		r.Consumed = maps.Clone(r.Consumed)
		r.Edits.Env, r.Edits.DeviceNodes = slices.Clone(r.Edits.Env), slices.Clone(r.Edits.DeviceNodes)
		r.Edits.Mounts = slices.Clone(r.Edits.Mounts)
		for j := range r.Edits.Mounts {
			r.Edits.Mounts[j].Options = slices.Clone(r.Edits.Mounts[j].Options)
		}
	}
	for i := range c.Pods {
		c.Pods[i].Left = plainTime(c.Pods[i].Left)
	}
	for i := range c.Weights {
		c.Weights[i].Deadline = plainTime(c.Weights[i].Deadline)
	}
	if e.KV != nil {
		kv := *e.KV
		c.KV = &kv
	}
	return c
}

func plainTime(t time.Time) time.Time { return t.Round(0).UTC() }

// equal reports whether two entries are the same bytes on the drive.
func equal(a, b *Entry) bool {
	left, err1 := json.Marshal(a)
	right, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && bytes.Equal(left, right)
}

// tombstone is what remains of an entry.
func (e *Entry) tombstone(at time.Time) Entry {
	c := e.clone()
	c.State, c.Gone, c.Owed = Gone, plainTime(at), e.holds()
	for i := range c.Results {
		c.Results[i].CDI, c.Results[i].Edits = "", Edits{}
	}
	return c
}
