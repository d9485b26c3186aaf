package dradriver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/hearth-dev/hearth/dradriver/cdi"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
)

// Defaults of Options.
const (
	defaultPullDeadline = 30 * time.Minute
	defaultRecoverEvery = 2 * time.Minute
)

// holdTimeout bounds what a Prepare asks of the data role for its claims, all of
// it, so that a role that hangs costs the kubelet's call no more than a part of
// its 45 s.
const holdTimeout = 10 * time.Second

// releaseTimeout bounds the releases of Unprepare; what they leave is owed.
const releaseTimeout = 3 * time.Second

// Options is what New needs. Cache, KV, Devices and Cluster may be nil: this
// node has none.
type Options struct {
	Node  string // name of the Node object
	Pools Pools
	Kube  kubernetes.Interface // reads the claims that the kubelet names

	Ledger  *ledger.Ledger // opened and closed by the caller
	CDI     *cdi.Specs
	Cache   stock.Cache
	KV      stock.KV
	Devices Inventory
	Cluster Cluster

	PluginDir    string // the driver's own folder, of the kubelet's plugins; made by Run
	RegistrarDir string // the kubelet's folder of registration sockets; must exist
	CDIDir       string // where the metadata of devices has its CDI files
	// DriverMounts are the library mounts that every GPU brings.
	DriverMounts []ledger.Mount

	PullDeadline time.Duration // of pulls where no class says otherwise; 0 is 30 min
	// PullWait is how long a Prepare may wait for pulls that end soon, from the
	// arrival of its call on; 0 is 20 s, less than 0 not at all.
	PullWait     time.Duration
	RecoverEvery time.Duration // 0 is 2 min
	// HandleError is told what fails in the background of the kubelet's plugin
	// library; what is not recoverable ends Run as well.
	HandleError func(ctx context.Context, err error, text string)
	Now         func() time.Time // nil is time.Now
	Log         *slog.Logger     // nil is slog.Default
}

// Driver answers the kubelet. It is safe for concurrent use; calls for one
// claim go one after another, others side by side.
type Driver struct {
	o       Options
	calls   *calls
	pulls   *openings
	seen    *memory
	owed    *owing
	answers *answers

	held          chan struct{} // capacity 1: claims may have other devices
	presence      presence
	claimed       chan struct{}
	claimedOnce   sync.Once
	started       chan struct{}
	startedOnce   sync.Once
	fatal         chan error
	recoverFailed atomic.Uint64
}

var _ kubeletplugin.DRAPlugin = (*Driver)(nil)

// New makes a driver; it starts nothing and touches no file.
func New(o Options) (*Driver, error) {
	switch {
	case o.Node == "":
		return nil, errors.New("make driver: no node name")
	case o.Ledger == nil || o.CDI == nil:
		return nil, errors.New("make driver: no ledger or no CDI folder")
	case o.Pools.GPUs && o.Devices == nil:
		return nil, errors.New("make driver: it is to offer GPUs and has no inventory")
	case o.Pools.Weights && o.Cache == nil:
		return nil, errors.New("make driver: it is to offer weights and has no weight cache")
	case o.Pools.KV && o.KV == nil:
		return nil, errors.New("make driver: it is to offer KV space and has no KV tier")
	}
	if o.PullDeadline == 0 {
		o.PullDeadline = defaultPullDeadline
	}
	if o.PullWait == 0 {
		o.PullWait = defaultPullWait
	}
	if o.RecoverEvery == 0 {
		o.RecoverEvery = defaultRecoverEvery
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.Cluster == nil {
		o.Cluster = noCluster{}
	}
	d := &Driver{
		o: o, calls: newCalls(), seen: newMemory(), owed: newOwing(o.Ledger.Gone()), answers: newAnswers(),
		held: make(chan struct{}, 1), claimed: make(chan struct{}), started: make(chan struct{}), fatal: make(chan error, 1),
	}
	d.pulls = newOpenings(d)
	return d, nil
}

// Run makes right what a crash may have left, serves the kubelet and keeps the
// node and the ledger equal until ctx ends; then it returns nil. It ends with
// ErrServed where another agent does so, and with ErrUnmounted where a new
// process is needed to see the kubelet's folders.
func (d *Driver) Run(ctx context.Context) error {
	if d.o.Kube == nil || d.o.PluginDir == "" || d.o.RegistrarDir == "" || d.o.CDIDir == "" {
		return errors.New("run driver: it lacks a client or the kubelet's folders")
	}
	served := &service{d: d}
	defer func() { served.stop() }()
	if err := served.take(ctx); err != nil {
		return fmt.Errorf("run driver: %w", err)
	}
	d.note()
	d.Restore()
	if err := served.start(ctx); err != nil {
		return fmt.Errorf("run driver: %w", err)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		select {
		case <-ctx.Done():
			return nil
		case err := <-d.fatal:
			return err
		}
	})
	group.Go(func() error { return served.keep(ctx) })
	group.Go(func() error { d.follow(ctx); return nil })
	group.Go(func() error { d.pulls.run(ctx); return nil })
	group.Go(func() error { d.recoverAlways(ctx); return nil })
	if err := group.Wait(); err != nil {
		return fmt.Errorf("run driver: %w", err)
	}
	return nil
}

// Started is closed once a kubelet has registered the driver for the first time.
func (d *Driver) Started() <-chan struct{} { return d.started }

// HandleError implements kubeletplugin.DRAPlugin.
func (d *Driver) HandleError(ctx context.Context, err error, text string) {
	if d.o.HandleError != nil {
		d.o.HandleError(ctx, err, text)
	} else {
		d.o.Log.Error("the kubelet's plugin library failed", slog.String("doing", text), slog.Any("error", err))
	}
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		select {
		case d.fatal <- fmt.Errorf("%s: %w", text, err):
		default:
		}
	}
}

// view is the node as it is now.
func (d *Driver) view() *nodeView {
	v := &nodeView{node: d.o.Node, pools: d.o.Pools, deadline: d.o.PullDeadline, now: d.o.Now(), known: d.seen.all()}
	if d.o.Devices != nil {
		v.devices, v.devicesKnown = d.o.Devices.Devices()
	}
	if d.o.Cache != nil {
		v.weights, v.weightsKnown = d.o.Cache.Weights()
	}
	return v
}

// follow keeps in mind which artifacts were Ready, so that one that goes before
// its claim is prepared can be pulled again.
func (d *Driver) follow(ctx context.Context) {
	if d.o.Cache == nil {
		return
	}
	changed, end := d.o.Cache.Subscribe()
	defer end()
	for {
		d.note()
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

func (d *Driver) note() {
	if d.o.Cache != nil {
		weights, _ := d.o.Cache.Weights()
		d.seen.add(weights.Artifacts)
	}
	for _, entry := range d.o.Ledger.Entries() {
		for _, w := range entry.Weights {
			if !w.Digest.IsZero() && !w.Ref.IsZero() {
				d.seen.addIfNew(stock.Artifact{Ref: w.Ref, Digest: w.Digest})
			}
		}
	}
}

// maxSeen bounds the artifacts that are kept in mind.
const maxSeen = 1024

// memory keeps artifacts that were Ready once, by the name of their device.
// When it is full, the one that came first goes.
type memory struct {
	mu    sync.Mutex
	known map[string]stock.Artifact // replaced, never changed
	order []string
}

func newMemory() *memory { return &memory{known: map[string]stock.Artifact{}} }

func (m *memory) all() map[string]stock.Artifact {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.known
}

func (m *memory) add(artifacts []stock.Artifact) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.addLocked(artifacts)
}

func (m *memory) addIfNew(a stock.Artifact) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.known[WeightsDevice(a.Digest)]; !ok {
		m.addLocked([]stock.Artifact{a})
	}
}

func (m *memory) addLocked(artifacts []stock.Artifact) {
	next := make(map[string]stock.Artifact, len(m.known)+len(artifacts))
	maps.Copy(next, m.known)
	for _, a := range artifacts {
		name := WeightsDevice(a.Digest)
		if _, ok := next[name]; !ok {
			m.order = append(m.order, name)
		}
		next[name] = a
	}
	for len(m.order) > maxSeen {
		delete(next, m.order[0])
		m.order = m.order[1:]
	}
	m.known = next
}
