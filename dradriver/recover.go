package dradriver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/hearth-dev/hearth/dradriver/cdi"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
)

// recoverTimeout bounds what recovery does for one claim, with the wait for its
// turn, which a Prepare that waits for weights may have for defaultPullWait.
const recoverTimeout = 40 * time.Second

const (
	// stateTimeout bounds a question to the API server, which may be slow.
	stateTimeout = 30 * time.Second
	// askTimeout bounds those of one recovery.
	askTimeout = 2 * time.Minute
	// maxAsked bounds those at once.
	maxAsked = 8
)

// Restore makes the CDI folder what the ledger says: the folder is often in
// memory and does not outlive a boot. Run does it before the kubelet is
// answered, and nothing else may run meanwhile. What fails is tried again by
// Recover and by every Prepare.
func (d *Driver) Restore() {
	view := d.view()
	for _, entry := range d.o.Ledger.Entries() {
		if entry.State != ledger.Prepared {
			continue
		}
		if _, err := d.o.CDI.Write(entry.UID, cdi.DevicesOf(withDevicesNow(entry, view.devices, d.o.DriverMounts))); err != nil {
			d.o.Log.Error("a prepared claim's CDI file cannot be written", slog.String("claim", entry.UID), slog.Any("error", err))
		}
	}
	if _, err := d.o.CDI.Sweep(d.live); err != nil {
		d.o.Log.Error("the CDI folder cannot be swept", slog.Any("error", err))
	}
}

// recoverAlways recovers every few minutes until ctx ends, and sooner after the
// weight cache became reachable again.
func (d *Driver) recoverAlways(ctx context.Context) {
	tick := time.NewTicker(d.o.RecoverEvery)
	defer tick.Stop()
	var weights <-chan struct{}
	reachable := true
	if d.o.Cache != nil {
		changed, end := d.o.Cache.Subscribe()
		defer end()
		weights, reachable = changed, false
	}
	for {
		if err := d.Recover(ctx); err != nil && ctx.Err() == nil {
			d.recoverFailed.Add(1)
			d.o.Log.Warn("the node and the claims differ and are compared again", slog.Any("error", err))
		}
		signal(d.held)
		if !d.waitToRecover(ctx, tick.C, weights, &reachable) {
			return
		}
	}
}

// waitToRecover reports whether it is time to recover; false means that ctx
// ended.
func (d *Driver) waitToRecover(ctx context.Context, tick <-chan time.Time, weights <-chan struct{}, reachable *bool) bool {
	for {
		select {
		case <-ctx.Done():
			return false
		case <-tick:
			return true
		case <-weights:
			_, ok := d.o.Cache.Weights()
			came := ok && !*reachable
			if *reachable = ok; came {
				return true
			}
		}
	}
}

// Recover compares what the ledger says with what the node has, and mends what
// differs: CDI files and holds of prepared claims, claims that were begun and
// are wanted no more, what is owed for claims that are gone, and what is held
// for claims that nobody knows. It is safe at any time; what it cannot do now is
// in its error and is done by the next call.
func (d *Driver) Recover(ctx context.Context) error {
	var errs []error
	// What is held is listed before what is known: a claim that began in between
	// is known by the time it is looked for.
	held, err := d.heldBy(ctx)
	errs = append(errs, err)
	// What needs nobody's answer comes first.
	for _, uid := range d.owed.all() {
		errs = append(errs, d.inTurn(ctx, uid, d.recoverOwed))
	}
	for _, uid := range held {
		if !d.live(uid) {
			errs = append(errs, d.inTurn(ctx, uid, d.recoverUnknown))
		}
	}
	entries := d.o.Ledger.Entries()
	states := d.askAll(ctx, entries)
	for i := range entries {
		entry, state := &entries[i], states[i]
		gone := state != nil && unwanted(entry, *state, d.o.Ledger.BootID())
		if entry.State == ledger.Begun && !gone {
			continue // its Prepare goes on with it, and may have its turn for long
		}
		if state == nil {
			state = &ClaimState{}
		}
		errs = append(errs, d.inTurn(ctx, entry.UID, func(ctx context.Context, uid string) error {
			return d.recoverClaim(ctx, entry, *state, gone)
		}))
	}
	errs = append(errs, d.sweepSpecs(ctx), d.sweepMetadata(ctx), d.o.Ledger.Sweep(ctx))
	return errors.Join(errs...)
}

// inTurn acts for one claim while nobody else does. Where the kubelet calls for
// the claim meanwhile, what is not done is left to the next recovery.
func (d *Driver) inTurn(ctx context.Context, uid string, act func(context.Context, string) error) error {
	ctx, cancel := context.WithTimeout(ctx, recoverTimeout)
	defer cancel()
	visit, err := d.calls.enter(ctx, []string{uid}, rankBackground)
	if err != nil {
		return fmt.Errorf("recover claim %s: %w", uid, err)
	}
	defer visit.leave()
	ctx, end := visit.within(ctx)
	defer end()
	if err := act(ctx, uid); err != nil && !errors.Is(context.Cause(ctx), errHurried) {
		return fmt.Errorf("recover claim %s: %w", uid, err)
	}
	return nil
}

// live reports whether a claim may have something: the ledger knows it, or its
// entry is damaged and nobody has unprepared it since.
func (d *Driver) live(uid string) bool {
	if _, known := d.o.Ledger.Get(uid); known {
		return true
	}
	return slices.Contains(d.o.Ledger.Unsettled(), uid)
}

// heldBy lists the claims that hold anything.
func (d *Driver) heldBy(ctx context.Context) ([]string, error) {
	var uids []string
	var errs []error
	if d.o.Cache != nil {
		held, err := d.o.Cache.Holds(ctx)
		uids, errs = append(uids, held...), append(errs, err)
	}
	if d.o.KV != nil {
		reserved, err := d.o.KV.Reservations(ctx)
		for _, r := range reserved {
			uids = append(uids, r.Claim)
		}
		errs = append(errs, err)
	}
	slices.Sort(uids)
	return slices.Compact(uids), errors.Join(errs...)
}

// recoverClaim mends one claim that the ledger knows. What was asked of the API
// server counts for the claim as it was then: it may have moved on since.
func (d *Driver) recoverClaim(ctx context.Context, asked *ledger.Entry, state ClaimState, gone bool) error {
	entry, known := d.o.Ledger.Get(asked.UID)
	if !known {
		return nil
	}
	if same := entry.State == asked.State && entry.Begun.Equal(asked.Begun) && entry.Boot == asked.Boot; gone && same {
		d.o.Log.Info("a claim is undone that nobody wants any more", slog.String("claim", entry.UID), slog.String("state", string(entry.State)))
		return d.undo(ctx, entry.UID)
	}
	if entry.State != ledger.Prepared {
		return nil
	}
	// What a call learnt of its pods since is newer.
	state.Exists = state.Exists && reflect.DeepEqual(entry.Pods, asked.Pods)
	return d.restore(ctx, entry, state)
}

// askAll asks the API server for claims, maxAsked at once; nil is for those that
// it did not answer for, which stay what they are. After one of them, or past
// askTimeout, no more are asked. The order is another one each time, so that a
// slow server answers for each in the end. Nobody waits for a turn meanwhile.
func (d *Driver) askAll(ctx context.Context, entries []ledger.Entry) []*ClaimState {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	states := make([]*ClaimState, len(entries))
	var silent atomic.Bool
	var group errgroup.Group
	group.SetLimit(maxAsked)
	for _, i := range rand.Perm(len(entries)) {
		group.Go(func() error {
			if !silent.Load() {
				states[i] = d.ask(ctx, &entries[i])
			}
			if states[i] == nil {
				silent.Store(true)
			}
			return nil
		})
	}
	_ = group.Wait()
	return states
}

// ask asks the API server for a claim; nil is no answer.
func (d *Driver) ask(ctx context.Context, entry *ledger.Entry) *ClaimState {
	ctx, cancel := context.WithTimeout(ctx, stateTimeout)
	defer cancel()
	state, err := d.o.Cluster.Claim(ctx, Object{Kind: "ResourceClaim", Namespace: entry.Namespace, Name: entry.Name, UID: entry.UID})
	if err != nil {
		d.o.Log.Debug("a claim cannot be asked for", slog.String("claim", entry.UID), slog.Any("error", err))
		return nil
	}
	return &state
}

// unwanted reports whether a claim that was begun, or was prepared before the
// node was booted, is wanted no more. One that was prepared since is the
// kubelet's to end: its containers may run.
func unwanted(entry *ledger.Entry, state ClaimState, boot string) bool {
	if entry.State == ledger.Prepared {
		return !state.Exists && entry.Boot != boot
	}
	return !state.Exists || !state.AllocatedHere
}

// restore gives a prepared claim back what it lacks, and notes the pods that
// came to share it since, or ceased to.
func (d *Driver) restore(ctx context.Context, entry ledger.Entry, state ClaimState) error {
	now := withDevicesNow(entry, d.view().devices, d.o.DriverMounts)
	if state.Exists { // of a claim that is gone, or not answered for, nobody knows
		now.Pods = withPods(entry.Pods, state.Pods, d.o.Now())
	}
	_, err := d.o.CDI.Write(entry.UID, cdi.DevicesOf(now))
	errs := []error{err}
	// Of another boot it stays: only a Prepare makes it one of this boot, which is
	// the kubelet's to end.
	if entry.Boot == d.o.Ledger.BootID() && !reflect.DeepEqual(now, entry) {
		errs = append(errs, d.o.Ledger.Commit(ctx, now)...)
	}
	for _, w := range entry.Weights {
		if d.o.Cache == nil {
			continue
		}
		_, err := d.o.Cache.Hold(ctx, w.Digest, entry.UID)
		if errors.Is(err, stock.ErrNotReady) {
			d.o.Log.Error("an artifact that a claim uses is no longer whole on this node", slog.String("claim", entry.UID), slog.String("digest", w.Digest.String()))
		}
		errs = append(errs, err)
	}
	if entry.KV != nil && d.o.KV != nil {
		_, err := d.o.KV.Reserve(ctx, reservation(&entry))
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// recoverOwed releases what a claim that is gone holds.
func (d *Driver) recoverOwed(ctx context.Context, uid string) error {
	if d.live(uid) {
		d.owed.remove(uid)
		return nil
	}
	return d.releaseOwed(ctx, uid)
}

// recoverUnknown releases what is held for a claim that nobody knows.
func (d *Driver) recoverUnknown(ctx context.Context, uid string) error {
	if d.live(uid) {
		return nil
	}
	d.o.Log.Info("what an unknown claim held is released", slog.String("claim", uid))
	d.owed.add(uid)
	return d.releaseOwed(ctx, uid)
}

// sweepSpecs removes CDI files of claims that nobody knows, each in its turn: a
// claim may become known, and get its file, while the folder is listed.
func (d *Driver) sweepSpecs(ctx context.Context) error {
	uids, err := d.o.CDI.List()
	errs := []error{err}
	for _, uid := range uids {
		if d.live(uid) {
			continue
		}
		errs = append(errs, d.inTurn(ctx, uid, func(context.Context, string) error {
			if d.live(uid) {
				return nil
			}
			d.o.Log.Info("the CDI file of an unknown claim is removed", slog.String("claim", uid))
			return d.o.CDI.Remove(uid)
		}))
	}
	return errors.Join(errs...)
}
