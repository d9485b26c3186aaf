package dradriver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/hearth-dev/hearth/dradriver/cdi"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
)

// maxHolds bounds the claims of one call that ask the data role at once.
const maxHolds = 8

// preparing is one claim on its way through Prepare.
type preparing struct {
	claim *resourceapi.ResourceClaim
	words []words
	// ticket is newer than the call's where something had to be undone first;
	// another claim of the call must not profit from that.
	ticket ledger.Ticket
	entry  ledger.Entry // what the ledger has, or is to begin with
	final  ledger.Entry // what it is to be committed with
	err    error
	again  bool // it was prepared before
}

// open reports whether a claim still needs a step.
func (p *preparing) open() bool { return p.err == nil && !p.again }

// PrepareResourceClaims implements kubeletplugin.DRAPlugin: CLAIMS.md has its
// steps. The answer has one entry for each claim; what one of them lacks fails
// none of the others. An error is that of ctx.
func (d *Driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	uids := make([]string, 0, len(claims))
	for _, claim := range claims {
		uids = append(uids, string(claim.UID))
	}
	ended := d.calls.begin(CallPrepare)
	ticket, leave, err := d.arrive(ctx, uids)
	if err != nil {
		ended(len(claims), len(claims), 0)
		return nil, fmt.Errorf("prepare claims: %w", err)
	}
	defer leave()

	all := make([]*preparing, 0, len(claims))
	for _, claim := range claims {
		p := &preparing{claim: claim, ticket: ticket}
		p.err = d.consider(ctx, p)
		all = append(all, p)
	}
	d.beginAll(ctx, all)
	d.holdAll(ctx, all)
	d.commitAll(ctx, all)

	results := make(map[types.UID]kubeletplugin.PrepareResult, len(all))
	failed, waiting := 0, 0
	for _, p := range all {
		results[p.claim.UID] = d.answer(p)
		if p.err != nil {
			failed++
		}
		if errors.Is(p.err, errWaiting) {
			waiting++
		}
	}
	ended(len(claims), failed, waiting)
	return results, nil
}

// consider finds out what a claim needs: nothing, the rest of what was begun,
// or a plan.
func (d *Driver) consider(ctx context.Context, p *preparing) error {
	uid := string(p.claim.UID)
	had, known := d.o.Ledger.Get(uid)
	if known && !sameAllocation(&had, p.claim) {
		// The claim lost its allocation unseen and got another: what it had is no
		// longer its own.
		if err := d.undo(ctx, uid); err != nil {
			return err
		}
		p.ticket, known = d.o.Ledger.Arrive(), false
	}
	var err error
	switch {
	case known && had.State == ledger.Prepared:
		p.entry, p.again = had, true
	case known:
		p.entry = had
		p.entry.Pods = withPods(had.Pods, PodsOf(p.claim))
		p.words, _, err = readWords(p.claim, d.o.Node, d.o.Pools)
	default:
		if err := d.releaseOwed(ctx, uid); err != nil {
			return fmt.Errorf("what the claim held before is not released yet: %w", err)
		}
		p.entry, p.words, err = planClaim(p.claim, d.view())
	}
	return err
}

// beginAll writes the plans, those of one ticket at once.
func (d *Driver) beginAll(ctx context.Context, all []*preparing) {
	entries, of := map[ledger.Ticket][]ledger.Entry{}, map[ledger.Ticket][]*preparing{}
	for _, p := range all {
		if p.open() {
			entries[p.ticket], of[p.ticket] = append(entries[p.ticket], p.entry), append(of[p.ticket], p)
		}
	}
	if len(entries) == 0 {
		return
	}
	for _, ticket := range slices.Sorted(maps.Keys(entries)) {
		for i, err := range d.o.Ledger.Begin(ctx, ticket, entries[ticket]...) {
			of[ticket][i].err = err
		}
	}
	d.pulls.taken()
}

// holdAll takes what the plans say is to be held, a bounded number of claims at
// once.
func (d *Driver) holdAll(ctx context.Context, all []*preparing) {
	var group errgroup.Group
	group.SetLimit(maxHolds)
	for _, p := range all {
		if !p.open() {
			continue
		}
		group.Go(func() error {
			p.err = d.hold(ctx, p)
			return nil
		})
	}
	_ = group.Wait()
}

// hold takes what one plan says, all of it that can be had, and puts what the
// container gets into p.final. The error says what is lacking.
func (d *Driver) hold(ctx context.Context, p *preparing) error {
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
			views, err = d.holdWeights(ctx, p, r, &p.final.Weights[weight])
			r.Edits = weightsEdits(views, p.words[i].path)
			weight++
		case ledger.KindKV:
			p.final.KV, err = d.reserve(ctx, &p.final)
			if err == nil {
				r.Edits = kvEdits(p.final.KV, p.words[i].path)
			}
		}
		if err != nil {
			lacks = append(lacks, err)
		}
	}
	p.final = withNames(p.final)
	return joined(lacks)
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
func (d *Driver) holdWeights(ctx context.Context, p *preparing, r *ledger.Result, w *ledger.Weight) (stock.Views, error) {
	if d.o.Cache == nil {
		return stock.Views{}, fmt.Errorf("request %s: %w", r.Request, stock.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(ctx, holdTimeout)
	defer cancel()
	if !w.Pull {
		views, err := d.o.Cache.Hold(ctx, w.Digest, p.entry.UID)
		if err == nil || !errors.Is(err, stock.ErrNotReady) || w.Ref.IsZero() {
			return views, within(r.Request, err)
		}
		// It went after it was planned with: its ref says where to get it.
		w.Pull, w.Deadline = true, d.o.Now().Add(d.deadlineOf(p, r))
		if a, ok := d.seen.all()[r.Device]; ok {
			w.Ref = exact(a)
		}
		if err := d.replan(ctx, p, w); err != nil {
			return stock.Views{}, err
		}
	}
	progress, err := d.o.Cache.Pull(ctx, w.Ref, p.entry.UID)
	if err != nil {
		return stock.Views{}, within(r.Request, err)
	}
	if digest := progress.Views.Digest; !digest.IsZero() {
		if r.Kind == ledger.KindWeights && WeightsDevice(digest) != r.Device {
			progress = stock.Progress{Final: true, Reason: "Changed", Failed: fmt.Sprintf(
				"%s now means artifact %s, and the claim was allocated device %s; delete the pod, so that it is placed anew", w.Ref, digest, r.Device)}
		} else {
			w.Digest, w.Size = digest, int64(progress.Size)
		}
	}
	return progress.Views, within(r.Request, d.pulls.progress(p.entry.UID, r.Request, w, progress))
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
func (d *Driver) reserve(ctx context.Context, entry *ledger.Entry) (*ledger.KV, error) {
	if d.o.KV == nil {
		return nil, stock.ErrUnavailable
	}
	ctx, cancel := context.WithTimeout(ctx, holdTimeout)
	defer cancel()
	dir, err := d.o.KV.Reserve(ctx, reservation(entry))
	if err != nil {
		return entry.KV, err
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

// commitAll writes the CDI files and then what is prepared. A claim that was
// prepared before gets its file again, with the device nodes of now.
func (d *Driver) commitAll(ctx context.Context, all []*preparing) {
	view := d.view()
	var entries []ledger.Entry
	var of []*preparing
	for _, p := range all {
		if p.err != nil {
			continue
		}
		if p.again {
			p.final = withDevicesNow(p.entry, view.devices, d.o.DriverMounts)
			p.final.Pods = withPods(p.entry.Pods, PodsOf(p.claim))
		}
		if _, p.err = d.o.CDI.Write(p.final.UID, cdi.DevicesOf(p.final)); p.err != nil {
			continue
		}
		// What was prepared and is as it was needs no commit.
		if !p.again || !reflect.DeepEqual(p.final, p.entry) {
			entries, of = append(entries, p.final), append(of, p)
		}
	}
	if len(entries) == 0 {
		return
	}
	for i, err := range d.o.Ledger.Commit(ctx, entries...) {
		if of[i].err = err; err == nil {
			d.pulls.done(of[i])
		}
	}
}

// answer is what the kubelet is told of a claim.
func (d *Driver) answer(p *preparing) kubeletplugin.PrepareResult {
	if p.err != nil {
		d.answers.failed(p.claim, p.err, d.o.Now())
		return kubeletplugin.PrepareResult{Err: fmt.Errorf("prepare claim %s/%s: %w", p.claim.Namespace, p.claim.Name, p.err)}
	}
	d.answers.forget(string(p.claim.UID))
	view := d.view()
	var result kubeletplugin.PrepareResult
	weight := 0
	for _, r := range p.final.Results {
		var w *ledger.Weight
		if r.Kind == ledger.KindWeights || r.Kind == ledger.KindCold {
			w = &p.final.Weights[weight]
			weight++
		}
		prepared := kubeletplugin.Device{
			Requests: []string{r.Request}, PoolName: r.Pool, DeviceName: r.Device,
			Metadata: d.metadata(view, &r, w),
		}
		if r.CDI != "" {
			prepared.CDIDeviceIDs = []string{cdi.Qualified(r.CDI)}
		}
		if r.ShareID != "" {
			share := types.UID(r.ShareID)
			prepared.ShareID = &share
		}
		result.Devices = append(result.Devices, prepared)
	}
	return result
}
