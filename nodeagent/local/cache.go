package local

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// cache is stock.Cache over the weight cache of the same process.
type cache struct{ w *InProcess }

var _ stock.Cache = cache{}

// Weights implements stock.Cache.
func (c cache) Weights() (stock.Weights, bool) {
	state := c.w.weights.Load()
	if state == nil {
		return stock.Weights{Drive: c.w.drive}, false
	}
	return *state, true
}

// Subscribe implements stock.Cache.
func (c cache) Subscribe() (<-chan struct{}, func()) { return c.w.changed.subscribe() }

// told makes an error of the store one of the sentinels of package stock.
func told(err error) error {
	for _, k := range []struct{ is, sentinel error }{
		{weightcache.ErrRestricted, stock.ErrRestricted},
		{weightcache.ErrUnknown, stock.ErrNotReady},
		{weightcache.ErrNotReady, stock.ErrNotReady},
		{weightcache.ErrNoSpace, stock.ErrNoSpace},
	} {
		if errors.Is(err, k.is) {
			return known{err, k.sentinel}
		}
	}
	return err
}

// Hold implements stock.Cache.
func (c cache) Hold(ctx context.Context, digest artifact.Digest, claim string) (stock.Views, error) {
	if err := ctx.Err(); err != nil {
		return stock.Views{}, fmt.Errorf("hold artifact: %w", err)
	}
	if err := weightcache.CheckClaim(claim); err != nil {
		return stock.Views{}, fmt.Errorf("hold artifact: %w", err)
	}
	m, found := c.w.store.ManifestOf(digest)
	if !found || !c.w.store.Ready(digest) {
		return stock.Views{}, fmt.Errorf("hold artifact %s: %w", digest.Short(), stock.ErrNotReady)
	}
	views, err := c.w.publish(m)
	if err != nil {
		return stock.Views{}, fmt.Errorf("hold artifact %s: %w", digest.Short(), told(err))
	}
	if err := c.w.claims.Set(ctx, claim, weightcache.ClaimLease{Digest: digest, Ready: true}); err != nil {
		return stock.Views{}, told(err)
	}
	if !c.w.store.Ready(digest) {
		// It went while nothing held it; what is held now is to be fetched anew.
		return stock.Views{}, fmt.Errorf("hold artifact %s: %w", digest.Short(), stock.ErrNotReady)
	}
	return views, nil
}

// Pull implements stock.Cache.
func (c cache) Pull(ctx context.Context, ref artifact.Ref, claim string) (stock.Progress, error) {
	w := c.w
	if err := weightcache.CheckClaim(claim); err != nil {
		return stock.Progress{}, fmt.Errorf("pull %s: %w", ref, err)
	}
	key := pullKey{claim, ref}
	w.mu.Lock()
	p := w.pulls[key]
	if p == nil {
		l, held := w.leaseOf(key) // Ready, else it would be among the pulls
		p = newClaimPull(key, held && !l.Digest.IsZero())
		w.pulls[key] = p
	}
	w.mu.Unlock()
	if err := w.begin(ctx, p); err != nil {
		return stock.Progress{}, fmt.Errorf("pull %s for claim %s: %w", ref, claim, told(err))
	}
	return w.progress(p)
}

// begin makes the wish of a claim durable, and lets the pull run.
func (w *InProcess) begin(ctx context.Context, p *claimPull) error {
	select {
	case p.slot <- struct{}{}:
		defer func() { <-p.slot }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	w.mu.Lock()
	begun := p.begun
	w.mu.Unlock()
	if !begun {
		if err := w.wish(ctx, p); err != nil {
			w.mu.Lock()
			if w.pulls[p.pullKey] == p {
				delete(w.pulls, p.pullKey)
			}
			w.mu.Unlock()
			return err
		}
	}
	l, _ := w.leaseOf(p.pullKey)
	if m, found := w.store.ManifestOf(l.Digest); found && !l.Ready && w.store.Ready(l.Digest) {
		// It became Ready just now, for this claim or for another.
		if err := w.settle(ctx, p.pullKey, named(w.store.Manifests(), p.ref, m)); err == nil {
			l.Ready = true
		} else if ctx.Err() != nil {
			return err
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	p.begun = true
	if l.Ready && w.store.Ready(l.Digest) {
		return nil
	}
	if p.failure != nil && time.Since(p.failed) >= finalStands {
		p.retryLocked()
	}
	w.startLocked(p)
	return nil
}

// retryLocked tries a pull once more that failed for good; until that has ended
// it counts as one that goes on.
func (p *claimPull) retryLocked() {
	if _, final := classify(p.failure); !final {
		return
	}
	p.failure = nil
	select {
	case p.again <- struct{}{}:
	default:
	}
}

// wish notes what a claim asks for, with its digest where the ref is known; an
// artifact that is Ready is the claim's at once.
func (w *InProcess) wish(ctx context.Context, p *claimPull) error {
	st, _ := w.puller.Status(p.ref)
	if m, found := w.store.ManifestOf(st.Digest); found && w.store.Ready(st.Digest) {
		m = named(w.store.Manifests(), p.ref, m)
		if err := w.settle(ctx, p.pullKey, m); err == nil || ctx.Err() != nil {
			return err
		}
		// The pull says what is in the way.
	}
	err := w.claims.Set(ctx, p.claim, weightcache.ClaimLease{Ref: p.ref, Digest: st.Digest})
	if errors.Is(err, weightcache.ErrUnknown) {
		err = w.claims.Set(ctx, p.claim, weightcache.ClaimLease{Ref: p.ref})
	}
	return err
}

// named gives the manifest that is of a ref, or else otherwise.
func named(list []*artifact.Manifest, ref artifact.Ref, otherwise *artifact.Manifest) *artifact.Manifest {
	for _, m := range list {
		if m.Ref == ref && m.Digest == otherwise.Digest {
			return m
		}
	}
	return otherwise
}

// progress tells how far a pull is.
func (w *InProcess) progress(p *claimPull) (stock.Progress, error) {
	l, _ := w.leaseOf(p.pullKey)
	pr := stock.Progress{Views: stock.Views{Digest: l.Digest}}
	m, known := w.store.ManifestOf(l.Digest)
	if known && l.Ready && w.store.Ready(l.Digest) {
		views, err := w.publish(named(w.store.Manifests(), p.ref, m))
		if err != nil {
			return stock.Progress{}, fmt.Errorf("pull %s for claim %s: %w", p.ref, p.claim, told(err))
		}
		size := units.Bytes(m.Size())
		return stock.Progress{Views: views, Ready: true, Present: size, Size: size}, nil
	}
	if st, _ := w.puller.Status(p.ref); st.Digest == l.Digest {
		pr.Present, pr.Size = units.Bytes(st.Present), units.Bytes(st.Size)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	pr.Left = left(p.landed, int64(pr.Present), int64(pr.Size), time.Now())
	if p.failure != nil {
		pr.Failed = p.failure.Error()
		pr.Reason, pr.Final = classify(p.failure)
	}
	return pr, nil
}

// Release implements stock.Cache.
func (c cache) Release(ctx context.Context, claim string) error {
	w := c.w
	w.mu.Lock()
	for key, p := range w.pulls {
		if key.claim != claim {
			continue
		}
		delete(w.pulls, key)
		p.ended = true
		if p.cancel != nil {
			p.cancel()
		}
	}
	w.mu.Unlock()
	if err := w.claims.Release(ctx, claim); err != nil {
		return err
	}
	// What the claim held makes room.
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.pulls {
		if reason, _ := classify(p.failure); p.failure != nil && reason == reasonNoSpace {
			p.retryLocked()
		}
	}
	return nil
}

// Holds implements stock.Cache.
func (c cache) Holds(context.Context) ([]string, error) { return c.w.claims.Claims(), nil }
