// Package local is the seam between the two roles of an agent: what the
// control role asks of the data role, which keeps weights and KV space.
// InProcess joins them inside one process, Remote over a unix socket
// (PROTOCOL.md); both pass the suites in localtest and in dradriver/stock. The
// package moves no byte of a model and decides nothing about what is cached.
package local

import (
	"context"
	"sync"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/nodeagent/netattr"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Data is the data role as the control role sees it. Implementations are safe
// for concurrent use.
type Data interface {
	// Snapshot is the state as last known; ok is false where the data role has
	// not told any yet or cannot be reached, and then the state is the last one.
	Snapshot() (state State, ok bool)
	// Subscribe gives a channel that holds a signal after Snapshot changed, and
	// the func that ends the subscription.
	Subscribe() (changed <-chan struct{}, cancel func())
	// Lend sets what is leased, by holder, in place of what the last Lend set; a
	// holder named before keeps its lease until its new artifact is leased. The
	// leases stand until the next Lend, whether or not the caller lives, and end
	// with the data role: a new Epoch in the state asks for them again. missing
	// are the holders whose artifact the store does not know. Errors wrap
	// stock.ErrUnavailable.
	Lend(ctx context.Context, holders map[string]artifact.Digest) (missing []string, err error)
	// SetPods says which pods are on this node: all of them each time, at most
	// MaxPods. They are forgotten with the data role: a new Epoch asks for them
	// again. Errors wrap stock.ErrUnavailable, or artifact.ErrInvalid for what is
	// no list of pods.
	SetPods(ctx context.Context, pods []netattr.Pod) error
	// Cache is the weight cache as claims see it, KV the KV space.
	Cache() stock.Cache
	KV() stock.KV
}

// State is what the data role says of itself. It is never changed after it was
// given out.
type State struct {
	// Epoch is another one after each start of the data role.
	Epoch int64
	// Models is the state of every ref, by ref.
	Models []weightcache.Status
	// Space is that of the weights store; 0 where it cannot be read.
	Space Space
	// PullsEnded counts the tries of pulls for claims that ended in this epoch,
	// well or not.
	PullsEnded int64
	// KV is the fill of the KV store; nil where the node has none.
	KV *KVFill
	// Network is how much is seen of who moves bytes over the network; nil where
	// the data role does not say.
	Network *Network
	// ScaleOuts are the records of pulls without their series: those that run,
	// then at most 16 that ended, the latest first, as far as 256 KiB hold them.
	ScaleOuts []scaleout.Record
	// Problems are texts for people; empty where both roles are one process,
	// which has them already.
	Problems []string
}

// Space is the room of the weights store, in bytes.
type Space struct {
	Capacity units.Bytes `json:"capacity"` // budget, or the drive's size
	Used     units.Bytes `json:"used"`
	Free     units.Bytes `json:"free"`
}

// KVFill is the fill of a node's KV store, all tenants together, and what it
// counted since the data role began. It is looked at every few seconds.
type KVFill struct {
	RAM     KVTier `json:"ram"`
	NVMe    KVTier `json:"nvme"`
	Blocks  int64  `json:"blocks"` // one that is on both tiers counts once
	Misses  int64  `json:"misses"`
	Dropped int64  `json:"dropped"` // blocks that were to be stored and were not
}

// KVTier is one tier of a KVFill.
type KVTier struct {
	Used        units.Bytes `json:"used"`
	Budget      units.Bytes `json:"budget"`
	Blocks      int64       `json:"blocks"`
	Hits        int64       `json:"hits"`
	SavedTokens int64       `json:"savedTokens"`
	Damaged     int64       `json:"damaged"`
}

// Lease says that a holder forbids the removal of an artifact.
type Lease struct {
	Digest artifact.Digest
	Holder string // "endpoint NAME", "claim UID", or whoever asked
}

// signals wakes subscribers; the zero value is ready.
type signals struct {
	mu       sync.Mutex
	watchers map[chan struct{}]bool
}

func (s *signals) subscribe() (changed <-chan struct{}, cancel func()) {
	ch := make(chan struct{}, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.watchers == nil {
		s.watchers = map[chan struct{}]bool{}
	}
	s.watchers[ch] = true
	return ch, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.watchers, ch)
	}
}

func (s *signals) notify() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ch := range s.watchers {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// known is an error with its own text that is also one of the sentinels of
// package stock.
type known struct {
	err      error
	sentinel error
}

func (k known) Error() string   { return k.err.Error() }
func (k known) Unwrap() []error { return []error{k.err, k.sentinel} }
