package admin

import (
	"slices"
	"time"

	"github.com/hearth-dev/hearth/units"
)

// Claim is a ResourceClaim that has something on this node, or was refused of
// late what it was allocated.
type Claim struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	// State is "pulling", "begun", "prepared", "owing" where it is unprepared and
	// the data role has still to give back what it held, or "refused" where its
	// last Prepare failed before it got anything; Error says why.
	State string    `json:"state"`
	Since time.Time `json:"since,omitzero"`
	Pods  []string  `json:"pods,omitempty"` // that it is or was reserved for
	// Progress is of a pull, for people: "pulling org/name, 41 %, about 50 s left".
	Progress  string          `json:"progress,omitempty"`
	Error     string          `json:"error,omitempty"` // why the last try failed
	Devices   []ClaimDevice   `json:"devices,omitempty"`
	Artifacts []ClaimArtifact `json:"artifacts,omitempty"`
	KV        *ClaimKV        `json:"kv,omitempty"`
}

// ClaimDevice is one allocated device of a Claim.
type ClaimDevice struct {
	Request string `json:"request"` // "name", or "name/subrequest"
	Kind    string `json:"kind"`    // "gpu", "weights", "cold", "kv"; empty in a refused claim
	Pool    string `json:"pool"`    // slice pool
	Device  string `json:"device"`
	ShareID string `json:"shareID,omitempty"`
	UUID    string `json:"uuid,omitempty"` // of a GPU
	CDI     string `json:"cdi,omitempty"`  // qualified name of the CDI device
}

// ClaimArtifact is an artifact that a Claim holds or waits for.
type ClaimArtifact struct {
	Ref     string         `json:"ref,omitempty"`
	Digest  string         `json:"digest,omitempty"`
	Present int64          `json:"present"` // bytes
	Size    int64          `json:"size"`    // bytes; 0 until resolved
	Left    units.Duration `json:"left,omitempty"`
}

// ClaimKV is the KV space of a Claim, in bytes.
type ClaimKV struct {
	Memory int64  `json:"memory"`
	NVMe   int64  `json:"nvme"`
	Dir    string `json:"dir,omitempty"` // on the node
}

// Kubernetes is what an agent says of its side of Kubernetes.
type Kubernetes struct {
	// Registered says that a kubelet has registered the driver.
	Registered bool `json:"registered"`
	// Server is the cluster's version, "1.37"; empty until known.
	Server string `json:"server,omitempty"`
	// Pools are the slice pools of the node, by name.
	Pools []SlicePool `json:"pools,omitempty"`
	// Claims counts the claims by state.
	Claims map[string]int `json:"claims,omitempty"`
}

// SlicePool is one of a node's slice pools.
type SlicePool struct {
	Name    string `json:"name"`
	Devices int    `json:"devices"`
	// State is "published", "pending", "off" (not configured, or the cluster
	// lacks a feature) or "withheld".
	State  string `json:"state"`
	Detail string `json:"detail,omitempty"` // why it is not published
}

// claimList is the answer of GET /v1/claims.
type claimList struct {
	Claims []Claim `json:"claims"`
}

// claims gives the claims; none where there is no driver.
func (a *api) claims() []Claim {
	if a.opts.Claims == nil {
		return []Claim{}
	}
	if list := a.opts.Claims(); list != nil {
		return list
	}
	return []Claim{}
}

// holders gives the claims that have each GPU, "namespace/name" by device.
func holders(claims []Claim) map[string][]string {
	held := map[string][]string{}
	for _, c := range claims {
		name := c.Namespace + "/" + c.Name
		for _, d := range c.Devices {
			if d.Kind == "gpu" && !slices.Contains(held[d.Device], name) {
				held[d.Device] = append(held[d.Device], name)
			}
		}
	}
	return held
}
