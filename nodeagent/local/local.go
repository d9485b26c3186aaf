// Package local is the seam between the two roles of an agent: the control
// role asks here for weights, which the data role keeps. InProcess joins them
// inside one process; every implementation passes the suite in localtest. The
// package moves no byte and decides nothing about what is cached.
package local

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Weights is what the control role asks of the data role. Implementations are
// safe for concurrent use; errors wrap those of package weightcache.
type Weights interface {
	// Snapshot is the state of every ref, by ref.
	Snapshot() []weightcache.Status
	// Subscribe gives a channel that holds a signal after Snapshot changed, and
	// the func that ends the subscription.
	Subscribe() (changed <-chan struct{}, cancel func())
	// Ensure waits until a ref is Ready and engines can read its views, where it
	// may have any; refresh asks its source again first.
	Ensure(ctx context.Context, ref artifact.Ref, refresh bool) (*artifact.Manifest, error)
	// Remove drops a ref; ErrLeased where a lease forbids it.
	Remove(ctx context.Context, ref artifact.Ref) error
	// Verify reads every file of an artifact again.
	Verify(ctx context.Context, ref artifact.Ref) (weightcache.VerifyResult, error)
	// Acquire forbids removal of an artifact that the store knows until the
	// release func is called; more than one call of it is harmless.
	Acquire(ctx context.Context, digest artifact.Digest, holder string) (release func(), err error)
	// Leases lists what Acquire gave and nobody released, by digest and holder.
	Leases() []Lease
}

// Lease says that a holder forbids the removal of an artifact.
type Lease struct {
	Digest artifact.Digest
	Holder string // the claim, or whoever asked
}

// InProcess is Weights over a store and a puller of the same process.
type InProcess struct {
	store  *weightcache.Store
	puller *weightcache.Puller

	mu     sync.Mutex
	leases map[*weightcache.Lease]Lease
}

var _ Weights = (*InProcess)(nil)

// NewInProcess joins the roles over a store and its puller.
func NewInProcess(store *weightcache.Store, puller *weightcache.Puller) *InProcess {
	return &InProcess{store: store, puller: puller, leases: map[*weightcache.Lease]Lease{}}
}

// Snapshot implements Weights.
func (w *InProcess) Snapshot() []weightcache.Status { return w.puller.List() }

// Subscribe implements Weights.
func (w *InProcess) Subscribe() (<-chan struct{}, func()) { return w.puller.Subscribe() }

// Ensure implements Weights. The views stand when it returns.
func (w *InProcess) Ensure(ctx context.Context, ref artifact.Ref, refresh bool) (*artifact.Manifest, error) {
	m, err := w.puller.Ensure(ctx, ref, weightcache.EnsureOptions{Refresh: refresh})
	if err != nil {
		return nil, err
	}
	if err := w.publish(m); err != nil {
		return nil, err
	}
	return m, nil
}

// PublishViews gives a Ready artifact its directories; it is harmless where
// they stand, or where the artifact is restricted and has none.
func (w *InProcess) PublishViews(ref artifact.Ref) error {
	for _, m := range w.store.Manifests() {
		if m.Ref == ref {
			return w.publish(m)
		}
	}
	return fmt.Errorf("publish views of %s: %w", ref, weightcache.ErrUnknown)
}

func (w *InProcess) publish(m *artifact.Manifest) error {
	if _, err := w.store.FlatView(m.Digest); err != nil && !errors.Is(err, weightcache.ErrRestricted) {
		return fmt.Errorf("publish views of %s: %w", m.Ref, err)
	}
	if m.Ref.Scheme != artifact.SchemeHub {
		return nil
	}
	if _, err := w.store.HubView(m); err != nil && !errors.Is(err, weightcache.ErrRestricted) {
		return fmt.Errorf("publish views of %s: %w", m.Ref, err)
	}
	return nil
}

// Remove implements Weights.
func (w *InProcess) Remove(ctx context.Context, ref artifact.Ref) error {
	return w.puller.Remove(ctx, ref)
}

// Verify implements Weights.
func (w *InProcess) Verify(ctx context.Context, ref artifact.Ref) (weightcache.VerifyResult, error) {
	return w.puller.Verify(ctx, ref)
}

// Acquire implements Weights.
func (w *InProcess) Acquire(ctx context.Context, digest artifact.Digest, holder string) (func(), error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("acquire artifact: %w", err)
	}
	lease, err := w.store.AcquireFor(digest, holder)
	if err != nil {
		return nil, fmt.Errorf("acquire artifact: %w", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.leases[lease] = Lease{Digest: digest, Holder: holder}
	return func() {
		w.mu.Lock()
		delete(w.leases, lease)
		w.mu.Unlock()
		lease.Release()
	}, nil
}

// Leases implements Weights.
func (w *InProcess) Leases() []Lease {
	w.mu.Lock()
	list := slices.Collect(maps.Values(w.leases))
	w.mu.Unlock()
	slices.SortFunc(list, func(a, b Lease) int {
		return cmp.Or(slices.Compare(a.Digest[:], b.Digest[:]), cmp.Compare(a.Holder, b.Holder))
	})
	return list
}
