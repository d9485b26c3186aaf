package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

const (
	// askTimeout bounds one list, and the begin of one watch: the API server
	// itself gives up after a minute.
	askTimeout = 75 * time.Second
	// quietFor is how long nothing is said of a read that has not been answered.
	quietFor = 10 * time.Second
	// sameFor is how long a failure that comes again is no news.
	sameFor = time.Minute
)

// errNoAnswer is the cause of a question that was given up.
var errNoAnswer = errors.New("no answer within " + askTimeout.String())

// following is one running watch.
type following struct {
	what     string // for people
	informer cache.SharedIndexInformer
	cancel   context.CancelFunc
	done     chan struct{}
	began    time.Time
	events   atomic.Uint64

	mu     sync.Mutex
	failed error     // of the last read that failed; nil once one succeeded; guarded by mu
	stale  time.Time // since when nothing is followed; zero: it is; guarded by mu
	told   string    // the last failure; guarded by mu
	toldAt time.Time // guarded by mu
}

// source is what one watch reads.
type source struct {
	example runtime.Object
	strip   cache.TransformFunc
	client  Client
	list    func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch   func(context.Context, metav1.ListOptions) (watch.Interface, error)
}

func podSource(client Client, at scope) source {
	pods := client.CoreV1().Pods(at.namespace)
	return source{
		example: &corev1.Pod{}, strip: stripPod, client: client,
		list: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = at.selector
			return pods.List(ctx, o)
		},
		watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = at.selector
			return pods.Watch(ctx, o)
		},
	}
}

func sliceSource(client Client, at scope) source {
	endpointSlices := client.DiscoveryV1().EndpointSlices(at.namespace)
	return source{
		example: &discoveryv1.EndpointSlice{}, strip: stripSlice, client: client,
		list: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = at.selector
			return endpointSlices.List(ctx, o)
		},
		watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = at.selector
			return endpointSlices.Watch(ctx, o)
		},
	}
}

// start runs one watch in a goroutine of its own, which ends with ctx or end.
func (c *Cluster) start(ctx context.Context, what string, from source) *following {
	inner, cancel := context.WithCancel(ctx)
	now := c.opts.Now()
	f := &following{what: what, cancel: cancel, done: make(chan struct{}), began: now, stale: now}
	f.informer = cache.NewSharedIndexInformer(cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			ctx, cancel := context.WithTimeoutCause(ctx, askTimeout, errNoAnswer)
			defer cancel()
			list, err := from.list(ctx, o)
			return list, c.heardOf(ctx, f, err)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			ctx, cancel := context.WithCancelCause(ctx)
			late := time.AfterFunc(askTimeout, func() { cancel(errNoAnswer) })
			stream, err := from.watch(ctx, o)
			late.Stop()
			if err = c.heardOf(ctx, f, err); err != nil {
				cancel(nil)
				return nil, err
			}
			return &ended{stream, func() {
				cancel(nil)
				f.lapse(c.opts.Now())
			}}, nil
		},
	}, from.client), from.example, 0, cache.Indexers{})
	// These fail for an informer that runs already, and this one does not.
	_ = f.informer.SetTransform(from.strip)
	_ = f.informer.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) { c.failed(f, err) })
	happened := func() {
		f.events.Add(1)
		c.signal()
	}
	_, _ = f.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { happened() },
		UpdateFunc: func(_, _ any) { happened() },
		DeleteFunc: func(any) { happened() },
	})
	var running sync.WaitGroup
	running.Go(func() { f.informer.RunWithContext(inner) })
	running.Go(func() {
		// An empty list brings no event.
		select {
		case <-f.informer.HasSyncedChecker().Done():
			c.signal()
		case <-inner.Done():
		}
	})
	go func() {
		defer close(f.done)
		running.Wait()
	}()
	return f
}

func (f *following) end() {
	f.cancel()
	<-f.done
}

// ended is a watch that says when it is over.
type ended struct {
	watch.Interface
	over func()
}

// Stop implements watch.Interface.
func (e *ended) Stop() {
	e.Interface.Stop()
	e.over()
}

// heardOf notes how a question ended, and gives its error with the cause.
func (c *Cluster) heardOf(ctx context.Context, f *following, err error) error {
	if err == nil {
		if f.succeed() {
			c.opts.Log.Info("read from the API server again", slog.String("what", f.what))
		}
		return nil
	}
	if cause := context.Cause(ctx); errors.Is(cause, errNoAnswer) {
		err = cause
	}
	// The library tells of a watch that a server refuses to begin nowhere else.
	if ctx.Err() == nil && !ordinary(err) {
		f.note(err, c.opts.Now())
	}
	return err
}

// failed takes a read that failed. That a watch ended in the ordinary way is no
// failure.
func (c *Cluster) failed(f *following, err error) {
	if ordinary(err) {
		return
	}
	news := f.fail(err, c.opts.Now())
	if f.refused() && !f.informer.HasSynced() {
		c.signal()
		if news {
			c.opts.Log.Warn("the API server refuses what the router is to read, it goes on without", slog.String("what", f.what), slog.Any("error", err))
		}
		return
	}
	if news {
		c.opts.Log.Warn("cannot read from the API server, the last state stands", slog.String("what", f.what), slog.Any("error", err))
	}
}

// succeed notes a read that succeeded and reports whether that is news.
func (f *following) succeed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	news := f.failed != nil
	f.failed, f.stale = nil, time.Time{}
	return news
}

// lapse notes that nothing is followed any more.
func (f *following) lapse(now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stale.IsZero() {
		f.stale = now
	}
}

// note notes a read that failed where none is noted yet.
func (f *following) note(err error, now time.Time) {
	f.lapse(now)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.failed == nil {
		f.failed = err
	}
}

// fail notes a read that failed and reports whether that is news.
func (f *following) fail(err error, now time.Time) bool {
	f.lapse(now)
	f.mu.Lock()
	defer f.mu.Unlock()
	news := f.told != err.Error() || now.Sub(f.toldAt) > sameFor
	f.failed, f.told, f.toldAt = err, err.Error(), now
	return news
}

// refused reports whether the API server said of the last read that the router
// has no right to it.
func (f *following) refused() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return apierrors.IsForbidden(f.failed)
}

// problem says for people why nothing is followed, "" where all is well.
// without is what follows from it where there is no earlier state.
func (f *following) problem(now time.Time, without string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	why := f.failed
	if why == nil && !f.stale.IsZero() && now.Sub(f.stale) >= quietFor {
		why = fmt.Errorf("no answer for %s", now.Sub(f.stale).Truncate(time.Second))
	}
	synced := f.informer.HasSynced()
	if reading := now.Sub(f.began); why == nil && !synced && reading >= quietFor {
		// The answer has begun, and some of what there is lacks yet.
		why = fmt.Errorf("not all has come within %s", reading.Truncate(time.Second))
	}
	switch {
	case why == nil:
		return ""
	case !synced:
		return fmt.Sprintf("%s were not read yet, %s: %v", f.what, without, why)
	}
	return fmt.Sprintf("%s cannot be followed, the last state stands: %v", f.what, why)
}

// WatchStats is how one watch stands.
type WatchStats struct {
	Pool    string        // whose pods are read; "" is the agents
	Listed  bool          // all there is was read at least once
	Refused bool          // the API server forbids it
	Stale   time.Duration // since when nothing is followed; 0 while it is
	Events  uint64        // changes since the watch began
}

// Stats gives the watches, that of the agents first, then by pool as configured.
func (c *Cluster) Stats() []WatchStats {
	now := c.opts.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	var list []WatchStats
	if c.opts.Agents.Service != "" {
		list = append(list, c.slices.stats("", now))
	}
	for i := range c.pools {
		list = append(list, c.watches[c.scopeOf(&c.pools[i])].stats(c.pools[i].Name, now))
	}
	return list
}

// stats gives those of a watch; nil is one that has not begun.
func (f *following) stats(pool string, now time.Time) WatchStats {
	if f == nil {
		return WatchStats{Pool: pool}
	}
	s := WatchStats{Pool: pool, Listed: f.informer.HasSynced(), Refused: f.refused(), Events: f.events.Load()}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.stale.IsZero() {
		s.Stale = now.Sub(f.stale)
	}
	return s
}
