// Package stock is what a node has to offer besides its devices, and what is
// held of it for claims: artifacts on the drive, and KV space. It holds the
// interfaces through which the driver reaches the two (nodeagent/local
// implements them, in process and over a socket) and the types that cross
// there. It has no state, no I/O and knows no Kubernetes.
//
// A hold is durable where the bytes are: once Hold, Pull or Reserve has
// answered well, neither a crash of either role nor a reboot gives the bytes
// away before Release. A claim is named by the UID of its ResourceClaim
// everywhere here.
package stock

import (
	"context"
	"errors"
	"time"

	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Errors that callers branch on.
var (
	// ErrUnavailable says that the role which has the stock cannot be asked now;
	// the same call may succeed later.
	ErrUnavailable = errors.New("the data role does not answer")
	// ErrNotReady says that the artifact is not, or no longer, whole on this node.
	ErrNotReady = errors.New("artifact is not ready on this node")
	// ErrRestricted says that the artifact's source restricts it, so that it has
	// no view that every program of the node may read.
	ErrRestricted = errors.New("artifact is restricted by its source")
	// ErrNoSpace says that what was asked for exceeds what is left.
	ErrNoSpace = errors.New("no space left")
)

// Artifact is one artifact that is Ready on this node.
type Artifact struct {
	Ref    artifact.Ref    `json:"ref"`
	Digest artifact.Digest `json:"digest"`
	Commit string          `json:"commit,omitempty"`
	// Model is the short name that people select by: the last part of the
	// repository's name, or the folder's.
	Model        string      `json:"model"`
	Format       string      `json:"format,omitempty"`       // "safetensors", "gguf"
	Quantization string      `json:"quantization,omitempty"` // as config.json's quantization_config names it, or the GGUF file type
	Size         units.Bytes `json:"size"`
}

// Drive is the drive that artifacts are on.
type Drive struct {
	Tier    string      `json:"tier"`               // "nvme", "disk", "ram"
	Free    units.Bytes `json:"free"`               // what further pulls may take, eviction of what nothing holds included
	PCIRoot string      `json:"pciRoot,omitempty"`  // "pci0000:17"
	NUMA    *int        `json:"numaNode,omitempty"` // nil where unknown
}

// Weights is the state of the weight cache. It is never changed after it was
// given out.
type Weights struct {
	Artifacts []Artifact `json:"artifacts"` // Ready and viewable ones, by ref
	Drive     Drive      `json:"drive"`
}

// Views are the read-only directories of one artifact, as absolute paths of
// the node.
type Views struct {
	Digest artifact.Digest `json:"digest"`
	Flat   string          `json:"flat"`          // the artifact's files by their paths
	Hub    string          `json:"hub,omitempty"` // a HF_HUB_CACHE; empty where the ref is no hub's
}

// Progress is how far a pull is.
type Progress struct {
	Views   Views         `json:"views"`   // its Digest is zero until the ref is resolved; Flat is empty until Ready
	Ready   bool          `json:"ready"`   // Views can be mounted and are held for the claim
	Present units.Bytes   `json:"present"` // landed so far
	Size    units.Bytes   `json:"size"`    // 0 until resolved
	Left    time.Duration `json:"left"`    // by the rate of late; 0 where nobody can tell
	// Failed is why the last try ended, for people; empty while nothing failed.
	Failed string `json:"failed,omitempty"`
	// Reason is a CamelCase token of Failed: Forbidden, NotFound, NoSpace,
	// BadDigest, NotAllowed, Unreachable, Restricted.
	Reason string `json:"reason,omitempty"`
	// Final says that trying again without a change of somebody's cannot help.
	Final bool `json:"final,omitempty"`
}

// Cache is what the driver asks of the weight cache. Implementations are safe
// for concurrent use.
type Cache interface {
	// Weights is the state as last known; ok is false where the data role has
	// not told any yet or cannot be reached, and then the state is the last one.
	Weights() (state Weights, ok bool)
	// Subscribe gives a channel that holds a signal after Weights changed, and
	// after the try of a claim's pull ended, well or not; and the func that ends
	// the subscription.
	Subscribe() (changed <-chan struct{}, cancel func())
	// Hold forbids the removal of a Ready artifact for a claim and gives its
	// views. The same call again gives the same answer. ErrNotReady,
	// ErrRestricted, ErrUnavailable.
	Hold(ctx context.Context, digest artifact.Digest, claim string) (Views, error)
	// Pull makes a ref Ready for a claim: it starts the pull, or joins the one
	// that runs, and answers at once. What it pulls is held for the claim from
	// its resolve on; the pull goes on without further calls until it is Ready,
	// fails, or is released. ErrUnavailable.
	Pull(ctx context.Context, ref artifact.Ref, claim string) (Progress, error)
	// Release ends all holds and pulls of a claim; a claim that has none is fine.
	Release(ctx context.Context, claim string) error
	// Holds lists the claims that hold anything.
	Holds(ctx context.Context) ([]string, error)
}

// Space is the KV space of a node, in bytes that claims may take.
type Space struct {
	Memory units.Bytes `json:"memory"`
	NVMe   units.Bytes `json:"nvme"`
	// NamespaceMemory and NamespaceNVMe bound what the claims of one namespace
	// take together on this node; 0 is no bound.
	NamespaceMemory units.Bytes `json:"namespaceMemory,omitempty"`
	NamespaceNVMe   units.Bytes `json:"namespaceNVMe,omitempty"`
}

// Reservation is KV space that a claim has.
type Reservation struct {
	Claim     string      `json:"claim"`     // UID of the ResourceClaim
	Namespace string      `json:"namespace"` // of the claim
	Memory    units.Bytes `json:"memory"`
	NVMe      units.Bytes `json:"nvme"`
}

// KV is what the driver asks of the KV tier. Implementations are safe for
// concurrent use.
type KV interface {
	// Space is the configured space as last known; ok as in Cache.
	Space() (space Space, ok bool)
	// Subscribe is as in Cache.
	Subscribe() (changed <-chan struct{}, cancel func())
	// Reserve gives a claim KV space and the absolute path of the directory that
	// is the claim's own. The same call again gives the same answer; a claim that
	// has other sizes is an error. ErrNoSpace names what is left, also of the
	// namespace; ErrUnavailable.
	Reserve(ctx context.Context, r Reservation) (dir string, err error)
	// Release ends a claim's reservation and removes its directory with what is
	// in it; a claim that has none is fine.
	Release(ctx context.Context, claim string) error
	// Reservations lists what is reserved, by claim.
	Reservations(ctx context.Context) ([]Reservation, error)
}
