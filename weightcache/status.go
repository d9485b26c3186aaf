package weightcache

import (
	"errors"
	"io/fs"
	"time"

	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Errors on which callers branch. Every error of the package that has one of
// these meanings wraps it.
var (
	// ErrNotAllowed: no rule of the allow-list covers the ref.
	ErrNotAllowed = errors.New("not allowed by any source rule")
	// ErrUnknown: the store has no such ref or artifact.
	ErrUnknown = errors.New("not in the store")
	// ErrMismatch: the bytes that arrived are not those the manifest names.
	ErrMismatch = errors.New("content differs from its digest")
	// ErrBroken: the artifact is complete but its files disagree with each
	// other (a shard is missing, a header does not fit its file).
	ErrBroken = errors.New("artifact is broken")
	// ErrLeased: a lease forbids removal.
	ErrLeased = errors.New("in use")
	// ErrNoSpace: budget or drive has no room and nothing may be evicted.
	ErrNoSpace = errors.New("no space")
	// ErrNewer: the store was written by a newer version; it is untouched.
	ErrNewer = errors.New("store was written by a newer version")
	// ErrRestricted: the artifact's source restricts it, and nothing lets every
	// program of the node read it.
	ErrRestricted = errors.New("access is restricted")
	// ErrNotReady: the artifact's bytes are not all there.
	ErrNotReady = errors.New("artifact is not ready")
)

// State is how far an artifact is.
type State string

// States of an artifact, in the order it passes them.
const (
	Absent    State = "Absent"    // known by name only
	Resolving State = "Resolving" // asking the source, or fetching metadata files
	Metadata  State = "Metadata"  // every metadata file is readable, no weight byte yet
	Filling   State = "Filling"   // weights are landing
	Verifying State = "Verifying" // all bytes are there, the structure is being checked
	Ready     State = "Ready"     // every file verified
	Suspect   State = "Suspect"   // was Ready; a file was found damaged and is fetched again
	Failed    State = "Failed"    // the last pull ended in an error, see Detail
	Evicting  State = "Evicting"  // being removed
)

// Status is the state of one ref at one moment.
type Status struct {
	Ref    artifact.Ref
	Digest artifact.Digest // zero until resolved
	Commit string
	Source string
	Access artifact.Access
	State  State
	// Size and Present are bytes: of all files, and of those landed so far.
	Size, Present int64
	Files         int
	// Detail says why for people: the error of a failed pull, the file at fault.
	Detail string
	// BytesFetched counts bytes received from the origin for this artifact
	// since the process started, refetches included.
	BytesFetched int64
	// Views are the directories published for this artifact.
	Views []string
	// ViewsWithheld says that the ref has none because its source restricts it.
	ViewsWithheld bool
	// Leases is the number of leases held on the artifact.
	Leases int
	// MetadataReady says that every metadata file is readable.
	MetadataReady bool
	// LastUsed is when a lease or reader last held the artifact.
	LastUsed time.Time
}

// VerifyResult is what a verification read.
type VerifyResult struct {
	Files int         // files read
	Bytes units.Bytes // bytes read
	Bad   []string    // paths of damaged or missing files
}

// OK reports whether every file was right.
func (r VerifyResult) OK() bool { return len(r.Bad) == 0 }

// isExist reports whether an error says that a file is there already.
func isExist(err error) bool { return errors.Is(err, fs.ErrExist) }

// notExist reports whether an error says that a file is absent.
func notExist(err error) bool { return errors.Is(err, fs.ErrNotExist) }
