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
	"github.com/hearth-dev/hearth/dradriver/ledger"
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
	retake bool // and before the node was booted: its holds are to be had again
	waits  bool // err says only that weights are on their way
	likely bool // they were once likely to be there within the call
}

// open reports whether a claim is to be begun.
func (p *preparing) open() bool { return p.err == nil && !p.again }

// each acts for claims side by side, a bounded number at once.
func (d *Driver) each(all []*preparing, act func(p *preparing)) {
	if len(all) == 1 {
		act(all[0])
		return
	}
	var group errgroup.Group
	group.SetLimit(maxHolds)
	for _, p := range all {
		group.Go(func() error { act(p); return nil })
	}
	_ = group.Wait()
}

// PrepareResourceClaims implements kubeletplugin.DRAPlugin: CLAIMS.md has its
// steps. The answer has one entry for each claim; what one of them lacks fails
// none of the others. An error is that of ctx.
func (d *Driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	uids := make([]string, 0, len(claims))
	for _, claim := range claims {
		uids = append(uids, string(claim.UID))
	}
	ended := d.calls.begin(CallPrepare)
	arrived, leave, err := d.arrive(ctx, uids, rankPrepare)
	if err != nil {
		ended(len(claims), len(claims), 0)
		return nil, fmt.Errorf("prepare claims: %w", err)
	}
	defer leave()

	all := make([]*preparing, 0, len(claims))
	for _, claim := range claims {
		all = append(all, &preparing{claim: claim, ticket: arrived.ticket})
	}
	asking := newAsking(ctx)
	defer asking.end()
	d.each(all, func(p *preparing) { p.err = d.consider(ctx, asking, p) })
	d.beginAll(ctx, all)
	d.holdAll(ctx, asking, all)
	d.commitAll(ctx, all)
	d.await(ctx, arrived, all)

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
func (d *Driver) consider(ctx context.Context, asking *asking, p *preparing) error {
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
		if p.retake = had.Boot != d.o.Ledger.BootID(); p.retake {
			// The claim says nothing new. What a class says of failing pulls is all
			// that is asked of it, and may be missing.
			if p.words, _, err = readWords(p.claim, d.o.Node, d.o.Pools); err != nil {
				p.words, err = make([]words, len(had.Results)), nil
			}
		}
	case known:
		p.entry = had
		p.entry.Pods = withPods(had.Pods, PodsOf(p.claim), d.o.Now())
		p.words, _, err = readWords(p.claim, d.o.Node, d.o.Pools)
	default:
		if err := asking.told("release what the claim held before", d.releaseOwed(asking.ctx, uid)); err != nil {
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
			if !p.retake {
				p.final = p.entry
			}
			p.final = withDevicesNow(p.final, view.devices, d.o.DriverMounts)
			p.final.Pods = withPods(p.entry.Pods, PodsOf(p.claim), d.o.Now())
		}
		if _, p.err = d.o.CDI.Write(p.final.UID, cdi.DevicesOf(p.final)); p.err != nil {
			continue
		}
		// What was prepared in this boot and is as it was needs no commit.
		if !p.again || p.retake || !reflect.DeepEqual(p.final, p.entry) {
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
