// Package admin owns the agent's local API: its JSON types, the handlers that
// the agent serves on its socket and its admin listener, and the client that
// the command line uses. It holds no state of its own, decides nothing about
// models or devices, and never serves metrics. The API is in API.md.
package admin

import (
	"fmt"
	"time"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Version is the version of the API, in the header Hearth-API of each answer.
const Version = "1"

// Node is what an agent says of itself.
type Node struct {
	Name      string            `json:"name"`
	Version   string            `json:"version"`
	Roles     []string          `json:"roles"`
	Epoch     uint64            `json:"epoch"`
	StartedAt time.Time         `json:"startedAt"`
	Listeners map[string]string `json:"listeners"`
	Space     Space             `json:"space"`
	Problems  []string          `json:"problems,omitempty"`
	// KV is the fill of the KV store; nil where the node has none.
	KV *KVFill `json:"kv,omitempty"`
	// Network is how much is seen of who moves bytes over the network; nil where
	// the data role has not told it.
	Network *NetSight `json:"network,omitempty"`
	// Kubernetes is nil where the agent has no side of Kubernetes.
	Kubernetes *Kubernetes `json:"kubernetes,omitempty"`
}

// Space is the room of the weights store in bytes.
type Space struct {
	Capacity int64 `json:"capacity"` // budget, or the drive's size
	Used     int64 `json:"used"`
	Free     int64 `json:"free"`
}

// Model is an artifact under the ref by which it was asked for.
type Model struct {
	Ref          string    `json:"ref"`
	Digest       string    `json:"digest,omitempty"`
	Commit       string    `json:"commit,omitempty"`
	Source       string    `json:"source,omitempty"`
	Access       string    `json:"access,omitempty"`
	State        string    `json:"state"`
	Size         int64     `json:"size"`
	Present      int64     `json:"present"`
	Files        int       `json:"files"`
	Detail       string    `json:"detail,omitempty"`
	BytesFetched int64     `json:"bytesFetched"`
	Views        []string  `json:"views,omitempty"`
	NoViews      string    `json:"noViews,omitempty"` // why it has none
	Leases       int       `json:"leases"`
	LastUsed     time.Time `json:"lastUsed,omitzero"`
	FileList     []File    `json:"fileList,omitempty"`
}

// File is one file of a Model.
type File struct {
	Path   string        `json:"path"`
	Size   int64         `json:"size"`
	SHA256 string        `json:"sha256"`
	Kind   artifact.Kind `json:"kind"`
}

// Endpoint is a local engine.
type Endpoint struct {
	Name         string   `json:"name"`
	URL          string   `json:"url"`
	Engine       string   `json:"engine"`
	Pool         string   `json:"pool"`
	Accelerator  string   `json:"accelerator,omitempty"`
	Devices      []string `json:"devices,omitempty"`
	Ref          string   `json:"ref,omitempty"`
	ServedModels []string `json:"servedModels,omitempty"`
	Reachable    bool     `json:"reachable"`
	Incarnation  uint64   `json:"incarnation,omitempty"`
	Draining     bool     `json:"draining,omitempty"`
	Detail       string   `json:"detail,omitempty"`
	Load         Load     `json:"load"`
}

// Load is what an engine said of its work.
type Load struct {
	At               time.Time `json:"at,omitzero"`
	Running          uint32    `json:"running"`
	Waiting          uint32    `json:"waiting"`
	KVUsage          float64   `json:"kvUsage"` // 0..1
	KVCapacityTokens uint64    `json:"kvCapacityTokens"`
	BlockTokens      uint32    `json:"blockTokens"`
	PromptTokens     uint64    `json:"promptTokens"`
	CachedTokens     uint64    `json:"cachedTokens"`
	GeneratedTokens  uint64    `json:"generatedTokens"`
	MaxRunning       uint32    `json:"maxRunning"`
}

// Device is a device with what is known of it and its health.
type Device struct {
	ID      string `json:"id"`
	Product string `json:"product,omitempty"`
	device.Facts
	Claims     []string           `json:"claims,omitempty"` // that have it, "namespace/name"
	Health     string             `json:"health"`
	Conditions []device.Condition `json:"conditions,omitempty"`
	XIDs       map[int]uint64     `json:"xids,omitempty"`
}

// Lease says who holds an artifact.
type Lease struct {
	Digest  string   `json:"digest"`
	Ref     string   `json:"ref,omitempty"`
	Holders []string `json:"holders"`
}

// PullRequest asks for an artifact.
type PullRequest struct {
	Ref     string `json:"ref"`
	Refresh bool   `json:"refresh,omitempty"`
}

// RefRequest names an artifact.
type RefRequest struct {
	Ref string `json:"ref"`
}

// InjectRequest reports an XID of a device, or clears its conditions.
type InjectRequest struct {
	Device string `json:"device"`
	XID    int    `json:"xid,omitempty"`
	Clear  bool   `json:"clear,omitempty"`
}

// Progress is one line of a pull's answer.
type Progress struct {
	Model *Model `json:"model,omitempty"`
	Done  bool   `json:"done,omitempty"`
	Error *Error `json:"error,omitempty"`
}

// VerifyResult is what a verification found.
type VerifyResult struct {
	Files int      `json:"files"`
	Bytes int64    `json:"bytes"`
	Bad   []string `json:"bad,omitempty"` // paths
}

// Codes of Error.
const (
	CodeBadRequest     = "bad_request"
	CodeNotAllowed     = "not_allowed"
	CodeReadOnly       = "read_only"
	CodeInjectDisabled = "inject_disabled"
	CodeUnknownRef     = "unknown_ref"
	CodeUnknownDevice  = "unknown_device"
	CodeUnknownTenant  = "unknown_tenant"
	CodeUnknownBlock   = "unknown_block"
	CodeNotFound       = "not_found"
	CodeBadMethod      = "method_not_allowed"
	CodeLeased         = "leased"
	CodeBroken         = "broken"
	CodeNoSpace        = "no_space"
	CodeSourceFailed   = "source_failed"
	CodeBusy           = "busy"
	CodeUnavailable    = "unavailable"
	CodeInternal       = "internal"
)

// Error is a failed call.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
	Status  int    `json:"-"` // HTTP status
}

// Error gives code and message.
func (e *Error) Error() string { return fmt.Sprintf("%s: %s", e.Code, e.Message) }
