package dradriver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// Times of a Publisher, where its options say nothing.
const (
	DefaultCoalesce = 10 * time.Second
	DefaultSettle   = 10 * time.Second
	// DefaultResync is how long slices stay wrong that somebody else changed,
	// and how long those of an earlier run stay that are not to be published.
	DefaultResync = 10 * time.Second
	// askAgain is the time between questions for the cluster's features: gates
	// change when an API server starts anew, which sends no signal.
	askAgain = 10 * time.Minute
	// askRetry and askRetryMost bound the time between such questions while
	// nobody answers.
	askRetry     = time.Second
	askRetryMost = 30 * time.Second
	// askWithin bounds one such answer: an API server that is slow, and takes
	// 20 s for each of its two questions, is heard.
	askWithin = time.Minute + 15*time.Second
)

// PublisherOptions configure a Publisher; Node and Client must be set.
type PublisherOptions struct {
	Node string
	// NodeUID makes the node the slices' owner without asking for it.
	NodeUID types.UID
	Client  kubernetes.Interface
	Pools   Pools
	// Features overrules what the cluster was found to have, by name. What the
	// API server then drops all the same is not had.
	Features map[string]bool
	Log      *slog.Logger // default slog.Default
	// Coalesce is the least time between two changes of a volatile slice pool
	// (weights, kv), Settle how long an artifact must be gone before its device
	// goes, Resync how long a slice that somebody else changed stays so. 0 is
	// the default of each.
	Coalesce, Settle, Resync time.Duration
}

// Publisher keeps the ResourceSlices of a node equal to what the node has. It
// is the only writer of the driver's slices of its node: kubeletplugin's own
// PublishResources must not be used beside it. While the API server does not
// answer it waits and loses nothing; the latest offer wins.
type Publisher struct {
	opts    PublisherOptions
	log     *slog.Logger
	offered chan struct{} // capacity 1: latest changed
	dropped chan struct{} // capacity 1: the API server dropped fields

	mu     sync.Mutex
	latest Offer
	books  books
	subs   map[chan struct{}]struct{}

	// What Run alone uses.
	settler    settler
	earlier    earlier
	queue      *poolQueue
	controller *resourceslice.Controller
	sent       map[string]resourceslice.Pool
	sendMu     sync.Mutex // held while the controller takes new pools
}

// NewPublisher makes a Publisher. It asks nothing and starts nothing.
func NewPublisher(opts PublisherOptions) (*Publisher, error) {
	if opts.Node == "" || opts.Client == nil {
		return nil, errors.New("make publisher: want a node's name and a client")
	}
	if _, err := (Features{}).With(opts.Features); err != nil {
		return nil, fmt.Errorf("make publisher: %w", err)
	}
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	for _, d := range []struct {
		value    *time.Duration
		standard time.Duration
	}{{&opts.Coalesce, DefaultCoalesce}, {&opts.Settle, DefaultSettle}, {&opts.Resync, DefaultResync}} {
		if *d.value <= 0 {
			*d.value = d.standard
		}
	}
	return &Publisher{
		opts:    opts,
		log:     opts.Log,
		offered: make(chan struct{}, 1),
		dropped: make(chan struct{}, 1),
		subs:    map[chan struct{}]struct{}{},
		books:   books{pools: map[string]*PoolState{}, masked: map[string]bool{}},
		settler: settler{coalesce: opts.Coalesce, settle: opts.Settle},
		earlier: earlier{settle: opts.Settle},
		sent:    map[string]resourceslice.Pool{},
	}, nil
}

// Set says what the node has now: GPUs, Weights, KV and Cold of an Offer, which
// must not be changed afterwards. It never blocks; of several calls the last
// counts.
func (p *Publisher) Set(o Offer) {
	p.mu.Lock()
	p.latest = o
	p.mu.Unlock()
	signal(p.offered)
}

// Run publishes until ctx is done and then returns nil; the slices stay. It
// begins when the first offer is set and the API server answers.
func (p *Publisher) Run(ctx context.Context) error {
	select {
	case <-p.offered:
		signal(p.offered)
	case <-ctx.Done():
		return nil
	}
	next, err := p.ask(ctx)
	if err != nil {
		return nil
	}
	if err := p.remember(ctx); err != nil {
		return nil
	}
	if err := p.start(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer p.controller.Stop()
	ask, wake := time.NewTimer(next), time.NewTimer(0)
	defer ask.Stop()
	defer wake.Stop()
	for {
		asked, dropped := false, false
		select {
		case <-ctx.Done():
			return nil
		case <-p.offered:
		case <-wake.C:
		case <-ask.C:
			asked = true
		case <-p.dropped:
			asked, dropped = true, true
		}
		if asked {
			if next, err = p.ask(ctx); err != nil {
				return nil
			}
			ask.Reset(next)
		}
		if dropped {
			p.maskDropped()
		}
		if at := p.publish(time.Now()); at.IsZero() {
			wake.Stop()
		} else {
			wake.Reset(time.Until(at))
		}
	}
}

// start starts the slice controller, which waits for the slices that there are.
func (p *Publisher) start(ctx context.Context) error {
	p.waiting("waiting for the slices of this node from the API server")
	p.queue = newPoolQueue(p)
	controller, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName:   Name,
		KubeClient:   p.opts.Client,
		Owner:        &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: p.opts.Node, UID: p.opts.NodeUID},
		Queue:        p.queue,
		SyncDelay:    &p.opts.Resync,
		ErrorHandler: p.failed,
	})
	if err != nil {
		return fmt.Errorf("start slice controller: %w", err)
	}
	p.controller = controller
	p.waiting("")
	return nil
}

// ask learns the cluster's features and gives the time until the next
// question. Until it has them once it retries; later a failure keeps what is
// known. The error is ctx's.
func (p *Publisher) ask(ctx context.Context) (time.Duration, error) {
	for retry := askRetry; ; retry = min(2*retry, askRetryMost) {
		one, cancel := context.WithTimeout(ctx, askWithin)
		cluster, err := AskCluster(one, p.opts.Client, p.opts.Node)
		cancel()
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		if err == nil {
			p.learned(cluster)
			return askAgain, nil
		}
		p.waiting(err.Error())
		if p.known() {
			return askRetryMost, nil
		}
		p.log.Warn("cluster does not answer; slices wait", slog.Any("error", err), slog.Duration("retry", retry))
		timer := time.NewTimer(retry)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return 0, context.Cause(ctx)
		}
	}
}

// publish sends the pools that differ from what was sent last, and gives the
// time at which to look again.
func (p *Publisher) publish(now time.Time) time.Time {
	p.mu.Lock()
	offer, features := p.latest, p.features()
	p.mu.Unlock()
	offer.Node, offer.Pools, offer.Features = p.opts.Node, p.opts.Pools, features
	offer, wake := p.settler.next(offer, now)
	plan := PlanSlices(offer)
	if at := p.earlier.keep(&plan, offer, now); !at.IsZero() && (wake.IsZero() || at.Before(wake)) {
		wake = at
	}
	wanted := map[string]resourceslice.Pool{}
	var refused []error
	for name, pool := range plan.Resources.Pools {
		if err := checkPool(name, pool); err != nil {
			refused = append(refused, err)
			last, ok := p.sent[name]
			if !ok {
				continue
			}
			pool = last
		}
		wanted[name] = pool
	}
	p.planned(plan, errors.Join(refused...))
	changed := changedPools(p.sent, wanted)
	if len(changed) == 0 {
		return wake
	}
	p.sent = wanted
	p.send(now, wanted, changed)
	return wake
}

// send hands pools to the controller. A sync that began before is not taken
// for one of these pools: sendMu keeps poolQueue.Get from reading the count
// between the two.
func (p *Publisher) send(now time.Time, wanted map[string]resourceslice.Pool, changed []string) {
	p.sendMu.Lock()
	defer p.sendMu.Unlock()
	p.wants(now, wanted, changed)
	p.controller.Update(&resourceslice.DriverResources{Pools: maps.Clone(wanted)})
}

// changedPools names the pools that one of the two has otherwise, sorted.
func changedPools(sent, wanted map[string]resourceslice.Pool) []string {
	var names []string
	for name, pool := range wanted {
		if last, ok := sent[name]; !ok || !apiequality.Semantic.DeepEqual(last, pool) {
			names = append(names, name)
		}
	}
	for name := range sent {
		if _, ok := wanted[name]; !ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
