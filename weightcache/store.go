// Package weightcache keeps model weights on one node: a Store of verified
// files with leases and eviction, and a Puller that fills it from sources.
// The node agent owns one of each and hands readers, views and leases to the
// mirror, the driver and the command line. The package never serves a byte
// whose digest it has not proven (or is not about to prove before the last
// segment leaves), never decides what should be cached, and knows no HTTP
// route and no Kubernetes. The formats on the drive are in FORMAT.md.
package weightcache

import (
	"log/slog"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Options configure a Store.
type Options struct {
	// Dir is the root; it is made 0700. One process owns it at a time.
	Dir string
	// ViewsDir holds the directories that engines read. It must be on Dir's
	// file system (views are hard links) and is world-readable. Empty means
	// Dir with "-views" appended, a sibling.
	ViewsDir string
	// FS is the file system; nil means durable.OS.
	FS durable.FS
	// Budget is the most bytes the blobs may occupy; 0 means what the drive has.
	Budget units.Bytes
	// KeepFree is what a pull leaves free on the drive.
	KeepFree units.Bytes
	Log      *slog.Logger
	Now      func() time.Time
}

// Store is the verified bytes of one node.
type Store struct{}

// Open opens or makes the store.
func Open(opts Options) (*Store, error) { return nil, ErrNewer }

// Close gives the store back.
func (s *Store) Close() error { return nil }

// Lease forbids removal and eviction of an artifact until Release.
type Lease struct{}

// Release ends the lease; more than once is harmless.
func (l *Lease) Release() {}

// Acquire leases an artifact.
func (s *Store) Acquire(digest artifact.Digest) (*Lease, error) { return nil, ErrUnknown }

// FlatView publishes a directory with the artifact's files.
func (s *Store) FlatView(digest artifact.Digest) (string, error) { return "", ErrUnknown }

// HubView publishes a hub cache with the artifact's files.
func (s *Store) HubView(m *artifact.Manifest) (string, error) { return "", ErrUnknown }
