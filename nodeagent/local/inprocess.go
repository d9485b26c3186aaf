package local

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/nodeagent/netattr"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Options are what an InProcess joins.
type Options struct {
	Store  *weightcache.Store
	Puller *weightcache.Puller // not running yet
	// KV is the node's KV space; nil is none.
	KV KVSpace
	// KVFill tells the fill of the KV store as it is told last; nil is none.
	KVFill func() *KVFill
	// SetPods takes the pods of this node; nil takes none.
	SetPods func([]netattr.Pod)
	// Network and ScaleOuts tell of the network, NetworkChanged when they differ;
	// nil is nothing.
	Network   func() *Network
	ScaleOuts func() []scaleout.Record
	// Sysfs is where the kernel shows its devices; empty means /sys.
	Sysfs string
	Log   *slog.Logger
}

// InProcess is Data over a store, a puller and a KV space of the same process.
type InProcess struct {
	store  *weightcache.Store
	puller *weightcache.Puller
	space  KVSpace
	fill   func() *KVFill
	pods   func([]netattr.Pod)
	net    func() *Network
	scaled func() []scaleout.Record
	claims *weightcache.ClaimLeases
	log    *slog.Logger
	epoch  int64

	drive   stock.Drive // without Free
	weights atomic.Pointer[stock.Weights]
	state   signals      // of all that Snapshot gives
	changed signals      // of weights, and of ended
	budget  signals      // of what claims may take of the KV space
	ended   atomic.Int64 // pulls for claims that ended, whatever their end
	told    map[artifact.Digest]description
	viewed  chan struct{} // capacity 1: views stand, of which the store gives no signal
	lending chan struct{} // capacity 1: taken to change lent

	mu    sync.Mutex
	lent  map[string]*weightcache.Lease // by holder
	base  context.Context               // of Run; nil while it does not run
	all   sync.WaitGroup                // pulls for claims
	pulls map[pullKey]*claimPull
}

var _ Data = (*InProcess)(nil)

// NewInProcess joins the roles. It takes what claims held when the store was
// last used, and is to be called before the puller runs.
func NewInProcess(opts Options) (*InProcess, error) {
	claims, err := weightcache.OpenClaimLeases(opts.Store)
	if err != nil {
		return nil, err
	}
	if opts.Sysfs == "" {
		opts.Sysfs = "/sys"
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	w := &InProcess{
		store: opts.Store, puller: opts.Puller, space: opts.KV, fill: opts.KVFill, pods: opts.SetPods, net: opts.Network, scaled: opts.ScaleOuts, claims: claims, log: opts.Log, epoch: time.Now().UnixNano(),
		drive: driveOf(opts.Store.Dir(), opts.Sysfs), told: map[artifact.Digest]description{},
		viewed: make(chan struct{}, 1), lending: make(chan struct{}, 1), lent: map[string]*weightcache.Lease{}, pulls: map[pullKey]*claimPull{},
	}
	for _, claim := range claims.Claims() {
		for _, l := range claims.Of(claim) {
			if !l.Ref.IsZero() && !l.Ready {
				key := pullKey{claim, l.Ref}
				w.pulls[key] = newClaimPull(key, true)
			}
		}
	}
	return w, nil
}

// Bad are the files of claims that could not be understood: what they held is
// held no more until the claim asks again.
func (w *InProcess) Bad() []string {
	bad := w.claims.Bad()
	if w.space != nil {
		bad = append(bad, w.space.Bad()...)
	}
	return bad
}

// freeEvery is how often the room on the drive is looked at.
const freeEvery = 10 * time.Second

// Run carries the store's state to the claims' side and goes on with the pulls
// of claims, until ctx ends.
func (w *InProcess) Run(ctx context.Context) error {
	w.mu.Lock()
	w.base = ctx
	for _, p := range w.pulls {
		w.startLocked(p)
	}
	w.mu.Unlock()
	defer w.all.Wait()
	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.base = nil
	}()
	w.all.Go(func() { w.pass(ctx) })
	changed, cancel := w.store.Subscribe()
	defer cancel()
	look := time.NewTicker(freeEvery)
	defer look.Stop()
	for {
		w.claims.Retake()
		w.tellWeights()
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-w.viewed:
		case <-look.C:
		}
	}
}

// pass carries the store's signals to subscribers at once, however long Run takes
// to look at an artifact.
func (w *InProcess) pass(ctx context.Context) {
	changed, cancel := w.store.Subscribe()
	defer cancel()
	for {
		w.state.notify()
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// Snapshot implements Data.
func (w *InProcess) Snapshot() (State, bool) {
	state := State{Epoch: w.epoch, Models: w.Models(), Space: w.usage(), PullsEnded: w.ended.Load()}
	if w.fill != nil {
		state.KV = w.fill()
	}
	if w.net != nil {
		state.Network = w.net()
	}
	if w.scaled != nil {
		state.ScaleOuts = toldScaleOuts(w.scaled())
	}
	return state, true
}

// KVChanged says that the KV space's budget is another one.
func (w *InProcess) KVChanged() { w.budget.notify() }

// usage is the room of the store; 0 where it cannot be read.
func (w *InProcess) usage() Space {
	usage, err := w.store.Usage()
	if err != nil {
		return Space{}
	}
	s := Space{Capacity: usage.Total, Used: usage.Used, Free: usage.Free}
	if usage.Budget > 0 && usage.Budget < s.Capacity {
		s.Capacity = usage.Budget
		s.Free = min(s.Free, max(0, usage.Budget-usage.Used))
	}
	return s
}

// Models is the state of every ref, by ref.
func (w *InProcess) Models() []weightcache.Status { return w.puller.List() }

// Subscribe implements Data. What the store signals comes while Run runs.
func (w *InProcess) Subscribe() (<-chan struct{}, func()) { return w.state.subscribe() }

// Ensure waits until a ref is Ready and engines can read its views, where it
// may have any.
func (w *InProcess) Ensure(ctx context.Context, ref artifact.Ref, opts weightcache.EnsureOptions) (*artifact.Manifest, error) {
	m, err := w.puller.Ensure(ctx, ref, opts)
	if err != nil {
		return nil, err
	}
	if _, err := w.publish(m); err != nil && !errors.Is(err, weightcache.ErrRestricted) {
		return nil, err
	}
	return m, nil
}

// PublishViews gives a Ready artifact its directories; it is harmless where
// they stand, or where the artifact is restricted and has none.
func (w *InProcess) PublishViews(ref artifact.Ref) error {
	for _, m := range w.store.Manifests() {
		if m.Ref == ref {
			if _, err := w.publish(m); !errors.Is(err, weightcache.ErrRestricted) {
				return err
			}
			return nil
		}
	}
	return fmt.Errorf("publish views of %s: %w", ref, weightcache.ErrUnknown)
}

// publish gives an artifact its views, and has them told. Errors wrap
// weightcache.ErrRestricted where it may have none.
func (w *InProcess) publish(m *artifact.Manifest) (stock.Views, error) {
	views, err := w.views(m)
	if err == nil && !w.offers(m.Digest) {
		select {
		case w.viewed <- struct{}{}:
		default:
		}
	}
	return views, err
}

func (w *InProcess) views(m *artifact.Manifest) (stock.Views, error) {
	v := stock.Views{Digest: m.Digest}
	var err error
	if v.Flat, err = w.store.FlatView(m.Digest); err != nil {
		return stock.Views{}, fmt.Errorf("publish views of %s: %w", m.Ref, err)
	}
	if m.Ref.Scheme != artifact.SchemeHub {
		return v, nil
	}
	if v.Hub, err = w.store.HubView(m); err != nil && !errors.Is(err, weightcache.ErrRestricted) {
		return stock.Views{}, fmt.Errorf("publish views of %s: %w", m.Ref, err)
	}
	return v, nil
}

// Remove drops a ref; weightcache.ErrLeased where a lease forbids it.
func (w *InProcess) Remove(ctx context.Context, ref artifact.Ref) error {
	return w.puller.Remove(ctx, ref)
}

// Verify reads every file of an artifact again.
func (w *InProcess) Verify(ctx context.Context, ref artifact.Ref) (weightcache.VerifyResult, error) {
	return w.puller.Verify(ctx, ref)
}

// Lend implements Data.
func (w *InProcess) Lend(ctx context.Context, holders map[string]artifact.Digest) (missing []string, err error) {
	select {
	case w.lending <- struct{}{}:
		defer func() { <-w.lending }()
	case <-ctx.Done():
		return nil, fmt.Errorf("lend artifacts: %w", context.Cause(ctx))
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("lend artifacts: %w", err)
	}
	for holder, digest := range holders {
		w.mu.Lock()
		old := w.lent[holder]
		w.mu.Unlock()
		if old != nil && old.Digest == digest {
			continue
		}
		lease, err := w.store.AcquireFor(digest, holder)
		if err != nil {
			missing = append(missing, holder)
			continue
		}
		w.mu.Lock()
		w.lent[holder] = lease
		w.mu.Unlock()
		if old != nil {
			old.Release()
		}
	}
	var ended []*weightcache.Lease
	w.mu.Lock()
	for holder, lease := range w.lent {
		if _, wanted := holders[holder]; !wanted {
			delete(w.lent, holder)
			ended = append(ended, lease)
		}
	}
	w.mu.Unlock()
	for _, lease := range ended {
		lease.Release()
	}
	slices.Sort(missing)
	return missing, nil
}

// Leases lists what is leased to endpoints and claims, by digest and holder.
func (w *InProcess) Leases() []Lease {
	list := []Lease{}
	w.mu.Lock()
	for holder, lease := range w.lent {
		list = append(list, Lease{Digest: lease.Digest, Holder: holder})
	}
	w.mu.Unlock()
	for _, claim := range w.claims.Claims() {
		for _, l := range w.claims.Of(claim) {
			if !l.Digest.IsZero() {
				list = append(list, Lease{Digest: l.Digest, Holder: "claim " + claim})
			}
		}
	}
	slices.SortFunc(list, func(a, b Lease) int {
		return cmp.Or(slices.Compare(a.Digest[:], b.Digest[:]), cmp.Compare(a.Holder, b.Holder))
	})
	return list
}

// Cache implements Data.
func (w *InProcess) Cache() stock.Cache { return cache{w} }

// KV implements Data.
func (w *InProcess) KV() stock.KV { return kv{w.space, &w.budget} }
