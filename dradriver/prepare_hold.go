package dradriver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
)

// asking bounds all that one call asks of the data role for its claims, so that
// a role which hangs costs the kubelet's call that bound once.
type asking struct {
	ctx   context.Context
	end   context.CancelFunc
	since time.Time
}

var errSlow = errors.New("the data role took too long")

func newAsking(ctx context.Context) *asking {
	a := &asking{since: time.Now()}
	a.ctx, a.end = context.WithTimeoutCause(ctx, holdTimeout, errSlow)
	return a
}

// told is the answer to a question, with what was asked and how long it was
// waited for where none came in time.
func (a *asking) told(what string, err error) error {
	if err == nil || !errors.Is(context.Cause(a.ctx), errSlow) || !errors.Is(err, errSlow) && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("%w: asked to %s, it said nothing for %s", stock.ErrUnavailable, what, leftText(time.Since(a.since)))
}

// holdAll takes what the plans say is to be held, a bounded number of claims at
// once.
func (d *Driver) holdAll(ctx context.Context, asking *asking, all []*preparing) {
	d.each(all, func(p *preparing) {
		switch {
		case p.err != nil:
		case p.retake:
			p.err = d.retake(ctx, asking, p)
		case !p.again:
			p.err = d.hold(ctx, asking, p)
		}
	})
}

// hold takes what one plan says, all of it that can be had, and puts what the
// container gets into p.final. The error says what is lacking.
func (d *Driver) hold(ctx context.Context, asking *asking, p *preparing) error {
	d.pulls.open(p)
	p.final = p.entry
	p.final.Results = append([]ledger.Result(nil), p.entry.Results...)
	p.final.Weights = append([]ledger.Weight(nil), p.entry.Weights...)
	view := d.view()
	var lacks []error
	weight := 0
	for i := range p.final.Results {
		r := &p.final.Results[i]
		var err error
		switch r.Kind {
		case ledger.KindGPU:
			state, ok := view.devices.Find(device.ID(r.Device))
			if !ok {
				err = fmt.Errorf("request %s: device %s is not on node %s", r.Request, r.Device, d.o.Node)
			}
			r.Edits = gpuEdits(state, d.o.DriverMounts)
		case ledger.KindWeights, ledger.KindCold:
			var views stock.Views
			views, err = d.holdWeights(ctx, asking, p, r, &p.final.Weights[weight])
			r.Edits = weightsEdits(views, p.words[i].path)
			weight++
		case ledger.KindKV:
			p.final.KV, err = d.reserve(asking, &p.final)
			if err == nil {
				r.Edits = kvEdits(p.final.KV, p.words[i].path)
			}
		}
		if err != nil {
			lacks = append(lacks, err)
		}
	}
	p.final = withNames(p.final)
	p.waits = onlyWaiting(lacks)
	return joined(lacks)
}

// retake takes again what a claim had before the node was booted: the answer
// stays what it was, and is given once that is true again. What it mounts is
// where the data role has it now.
func (d *Driver) retake(ctx context.Context, asking *asking, p *preparing) error {
	d.pulls.open(p)
	p.final = p.entry
	p.final.Results = append([]ledger.Result(nil), p.entry.Results...)
	var lacks []error
	weight := 0
	for i := range p.final.Results {
		r := &p.final.Results[i]
		var hosts []string
		var err error
		switch r.Kind {
		case ledger.KindWeights, ledger.KindCold:
			w := p.entry.Weights[weight]
			weight++
			var views stock.Views
			views, err = d.holdWeights(ctx, asking, p, r, &w)
			hosts = []string{views.Flat, views.Hub}
		case ledger.KindKV:
			if p.final.KV, err = d.reserve(asking, &p.final); err == nil {
				hosts = []string{p.final.KV.Dir}
			}
		}
		if err != nil {
			lacks = append(lacks, err)
			continue
		}
		r.Edits = withHosts(r.Edits, hosts)
	}
	p.waits = onlyWaiting(lacks)
	return joined(lacks)
}

// onlyWaiting reports whether what a claim lacks is on its way, all of it.
func onlyWaiting(lacks []error) bool {
	return len(lacks) > 0 && !slices.ContainsFunc(lacks, func(err error) bool { return !errors.Is(err, errWaiting) })
}

// joined is errors for one line.
func joined(errs []error) error {
	if len(errs) == 0 {
		return nil
	}
	err := errs[0]
	for _, next := range errs[1:] {
		err = fmt.Errorf("%w; %w", err, next)
	}
	return err
}

// holdWeights holds an artifact, and pulls what is not there.
func (d *Driver) holdWeights(ctx context.Context, asking *asking, p *preparing, r *ledger.Result, w *ledger.Weight) (stock.Views, error) {
	if d.o.Cache == nil {
		return stock.Views{}, fmt.Errorf("request %s: %w", r.Request, stock.ErrUnavailable)
	}
	if !w.Pull || p.again {
		views, err := d.o.Cache.Hold(asking.ctx, w.Digest, p.entry.UID)
		err = asking.told("hold artifact "+w.Digest.Short(), err)
		if err == nil || !errors.Is(err, stock.ErrNotReady) || w.Ref.IsZero() {
			return views, within(r.Request, err)
		}
		// It went after it was planned with: its ref says where to get it.
		w.Pull, w.Deadline = true, d.pulls.deadline(p.entry.UID, r.Request)
		if w.Deadline.IsZero() {
			w.Deadline = d.o.Now().Add(d.deadlineOf(p, r))
		}
		if a, ok := d.seen.all()[WeightsDevice(w.Digest)]; ok {
			w.Ref = exact(a)
		}
		if !p.again {
			if err := d.replan(ctx, p, w); err != nil {
				return stock.Views{}, err
			}
		}
	}
	progress, err := d.o.Cache.Pull(asking.ctx, w.Ref, p.entry.UID)
	if err != nil {
		return stock.Views{}, within(r.Request, asking.told("pull "+w.Ref.String(), err))
	}
	return progress.Views, within(r.Request, d.pulls.progress(p.entry.UID, r.Request, w, meant(r, w, p.again, progress)))
}

// meant notes what a ref was found to mean. Where the claim was allocated
// another artifact, or has had one, the pull cannot succeed.
func meant(r *ledger.Result, w *ledger.Weight, had bool, progress stock.Progress) stock.Progress {
	digest := progress.Views.Digest
	switch {
	case digest.IsZero():
		return progress
	case had && digest != w.Digest:
		return stock.Progress{Final: true, Reason: "Changed", Failed: fmt.Sprintf(
			"%s now means artifact %s, and the claim has had %s, which is gone; delete the pod and its claim", w.Ref, digest, w.Digest)}
	case r.Kind == ledger.KindWeights && WeightsDevice(digest) != r.Device:
		return stock.Progress{Final: true, Reason: "Changed", Failed: fmt.Sprintf(
			"%s now means artifact %s, and the claim was allocated device %s; delete the pod, so that it is placed anew", w.Ref, digest, r.Device)}
	}
	w.Digest, w.Size = digest, int64(progress.Size)
	return progress
}

func within(request string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("request %s: %w", request, err)
}

// replan lets the ledger know that an artifact is to be pulled after all.
func (d *Driver) replan(ctx context.Context, p *preparing, w *ledger.Weight) error {
	next := p.entry
	next.Weights = append([]ledger.Weight(nil), p.entry.Weights...)
	for i := range next.Weights {
		if next.Weights[i].Request == w.Request && next.Weights[i].Digest == w.Digest {
			next.Weights[i] = *w
		}
	}
	// The turn for the claim is ours, so no Unprepare came since it was begun.
	if err := joined(compact(d.o.Ledger.Begin(ctx, d.o.Ledger.Arrive(), next))); err != nil {
		return err
	}
	p.entry = next
	return nil
}

// compact leaves out what is nil.
func compact(errs []error) []error {
	var some []error
	for _, err := range errs {
		if err != nil {
			some = append(some, err)
		}
	}
	return some
}

// reserve takes the KV space of a plan.
func (d *Driver) reserve(asking *asking, entry *ledger.Entry) (*ledger.KV, error) {
	if d.o.KV == nil {
		return nil, stock.ErrUnavailable
	}
	dir, err := d.o.KV.Reserve(asking.ctx, reservation(entry))
	if err != nil {
		return entry.KV, asking.told("reserve KV space", err)
	}
	kv := *entry.KV
	kv.Dir = dir
	return &kv, nil
}

// reservation is what an entry has of the KV space.
func reservation(entry *ledger.Entry) stock.Reservation {
	return stock.Reservation{
		Claim: entry.UID, Namespace: entry.KV.Namespace,
		Memory: units.Bytes(entry.KV.Memory), NVMe: units.Bytes(entry.KV.NVMe),
	}
}
