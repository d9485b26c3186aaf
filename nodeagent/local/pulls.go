package local

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// Pauses of a claim's pull after failures: the first, doubled up to the last;
// and how long a final failure stands before a Pull tries once more.
const (
	pullFirst   = time.Second
	pullLast    = time.Minute
	finalStands = time.Minute
)

// The rate of a pull is that of its last rateSamples, one every rateEvery.
const (
	rateEvery   = time.Second
	rateSamples = 15
)

// Reasons of stock.Progress.
const (
	reasonForbidden   = "Forbidden"
	reasonNotFound    = "NotFound"
	reasonNoSpace     = "NoSpace"
	reasonBadDigest   = "BadDigest"
	reasonNotAllowed  = "NotAllowed"
	reasonUnreachable = "Unreachable"
	reasonRestricted  = "Restricted"
)

// errMoved says that an artifact a claim was given lost bytes which its ref
// cannot bring back.
var errMoved = fmt.Errorf("its ref means another artifact by now: %w", source.ErrNotFound)

// classify gives the reason of a failed pull and whether trying again cannot help.
func classify(err error) (reason string, final bool) {
	for _, c := range []struct {
		is     error
		reason string
		final  bool
	}{
		{weightcache.ErrNotAllowed, reasonNotAllowed, true},
		{weightcache.ErrRestricted, reasonRestricted, true},
		{weightcache.ErrNoSpace, reasonNoSpace, true},
		{weightcache.ErrMismatch, reasonBadDigest, true},
		{weightcache.ErrBroken, reasonBadDigest, true},
		{source.ErrUnauthorized, reasonForbidden, true},
		{source.ErrForbidden, reasonForbidden, true},
		{source.ErrNotFound, reasonNotFound, true},
	} {
		if errors.Is(err, c.is) {
			return c.reason, c.final
		}
	}
	return reasonUnreachable, false
}

type pullKey struct {
	claim string
	ref   artifact.Ref
}

// claimPull makes a ref Ready for a claim.
type claimPull struct {
	pullKey
	slot  chan struct{} // capacity 1, taken to begin
	again chan struct{} // capacity 1: try a final failure once more

	// Guarded by InProcess.mu:
	begun   bool               // its lease is on the drive
	cancel  context.CancelFunc // ends it
	ended   bool               // it was released
	running bool
	failure error
	failed  time.Time
	landed  []sample
}

// sample is what had landed at a moment.
type sample struct {
	at    time.Time
	bytes int64
}

func newClaimPull(key pullKey, begun bool) *claimPull {
	return &claimPull{pullKey: key, begun: begun, slot: make(chan struct{}, 1), again: make(chan struct{}, 1)}
}

// startLocked lets a pull run where it does not.
func (w *InProcess) startLocked(p *claimPull) {
	if w.base == nil || w.base.Err() != nil || p.running || p.ended || !p.begun {
		return
	}
	ctx, cancel := context.WithCancel(w.base)
	p.cancel, p.running = cancel, true
	w.all.Go(func() {
		defer cancel()
		w.runPull(ctx, p)
		w.mu.Lock()
		defer w.mu.Unlock()
		p.running = false
	})
}

// runPull tries until the ref is Ready or the claim is released.
func (w *InProcess) runPull(ctx context.Context, p *claimPull) {
	log := w.log.With(slog.String("claim", p.claim), slog.String("artifact", p.ref.String()))
	pause := pullFirst
	for {
		err := w.pullOnce(ctx, p)
		if ctx.Err() != nil {
			return
		}
		w.mu.Lock()
		p.failure, p.failed, p.landed = err, time.Now(), nil
		w.mu.Unlock()
		w.ended.Add(1)
		w.changed.notify()
		if err == nil {
			log.Info("artifact is ready for a claim")
			return
		}
		reason, final := classify(err)
		log.Warn("artifact not ready for a claim", slog.String("reason", reason), slog.Bool("final", final), slog.Any("error", err))
		if !w.waitAgain(ctx, p, final, pause) {
			return
		}
		pause = min(2*pause, pullLast)
	}
}

// waitAgain waits for the next try: for the pause, or where the failure is
// final until somebody asks for it. It is false where ctx ended.
func (w *InProcess) waitAgain(ctx context.Context, p *claimPull, final bool, pause time.Duration) bool {
	var due <-chan time.Time
	if !final {
		timer := time.NewTimer(pause)
		defer timer.Stop()
		due = timer.C
	}
	select {
	case <-ctx.Done():
		return false
	case <-p.again:
	case <-due:
	}
	return true
}

// pullOnce resolves the ref, holds what it means, fetches it and gives it its
// views. What a claim was told to be Ready it never trades for another artifact.
func (w *InProcess) pullOnce(ctx context.Context, p *claimPull) error {
	m, err := w.puller.Manifest(ctx, p.ref)
	if err != nil {
		return err
	}
	if l, found := w.leaseOf(p.pullKey); found && l.Ready && l.Digest != m.Digest {
		return fmt.Errorf("pull %s for claim %s again: %w", p.ref, p.claim, errMoved)
	}
	if st, _ := w.puller.Status(p.ref); st.Digest == m.Digest && st.ViewsWithheld {
		return fmt.Errorf("pull %s for claim %s: %w", p.ref, p.claim, weightcache.ErrRestricted)
	}
	if err := w.claims.Set(ctx, p.claim, weightcache.ClaimLease{Ref: p.ref, Digest: m.Digest}); err != nil {
		return err
	}
	sampling, end := context.WithCancel(ctx)
	w.all.Go(func() { w.sampleRate(sampling, p) })
	got, err := w.puller.Ensure(ctx, p.ref, weightcache.EnsureOptions{Reason: weightcache.ReasonClaim + p.claim})
	end()
	if err != nil {
		return err
	}
	return w.settle(ctx, p.pullKey, got)
}

// settle notes that a claim may use an artifact, once its views stand.
func (w *InProcess) settle(ctx context.Context, key pullKey, m *artifact.Manifest) error {
	if _, err := w.publish(m); err != nil {
		return err
	}
	return w.claims.Set(ctx, key.claim, weightcache.ClaimLease{Ref: key.ref, Digest: m.Digest, Ready: true})
}

func (w *InProcess) leaseOf(key pullKey) (weightcache.ClaimLease, bool) {
	held := w.claims.Of(key.claim)
	i := slices.IndexFunc(held, func(l weightcache.ClaimLease) bool { return l.Ref == key.ref })
	if i < 0 {
		return weightcache.ClaimLease{}, false
	}
	return held[i], true
}

// sampleRate notes from time to time how much has landed.
func (w *InProcess) sampleRate(ctx context.Context, p *claimPull) {
	tick := time.NewTicker(rateEvery)
	defer tick.Stop()
	for {
		st, _ := w.puller.Status(p.ref)
		w.mu.Lock()
		p.landed = append(p.landed, sample{time.Now(), st.Present})
		if len(p.landed) > rateSamples {
			p.landed = slices.Delete(p.landed, 0, 1)
		}
		w.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// left is how long the rest takes at the rate of the samples; 0 where they do
// not tell.
func left(landed []sample, present, size int64, now time.Time) time.Duration {
	if len(landed) == 0 || size <= present {
		return 0
	}
	// A pull that asks its source first, or has stalled, goes on from here.
	base := landed[0]
	for _, s := range landed[1:] {
		if s.bytes != base.bytes {
			break
		}
		base = s
	}
	over, bytes := now.Sub(base.at), present-base.bytes
	if over <= 0 || bytes <= 0 {
		return 0
	}
	rest := float64(size-present) / float64(bytes) * float64(over)
	if rest > float64(maxLeft) {
		return maxLeft
	}
	return time.Duration(rest)
}

// maxLeft is the longest time that is told.
const maxLeft = 1000 * time.Hour
