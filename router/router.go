// Package router is the cluster's router: it wires pool, feed, proxy, meter
// and the admin listener into one process. cmd builds it from a Config and
// calls Run. The decisions are those of package pick, the data path is that of
// package proxy; this package only owns what starts and stops, the metrics and
// the configuration's reload.
package router

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/router/feed"
	"github.com/hearth-dev/hearth/router/kube"
	"github.com/hearth-dev/hearth/router/meter"
	"github.com/hearth-dev/hearth/router/pool"
	"github.com/hearth-dev/hearth/router/proxy"
	"github.com/hearth-dev/hearth/router/proxy/wire"
)

// Options are what a Config cannot say.
type Options struct {
	// ConfigFile is watched for changes; "" turns reloading off.
	ConfigFile string
	// Cluster reaches the API server where the configuration enables
	// Kubernetes; nil connects as it says.
	Cluster kube.Client
	Version string
	Log     *slog.Logger
	Now     func() time.Time
}

// Router is one router process.
type Router struct {
	cfg     Config // as it was at the start
	options Options
	log     *slog.Logger
	started time.Time

	pools     *pool.Pools
	feed      *feed.Feed
	cluster   *kube.Cluster // nil: none
	nodes     nodeSet
	proxy     *proxy.Proxy
	transport *wire.Transport
	meter     *meter.Meter // nil: no records
	metrics   *metrics
	consumers atomic.Pointer[meter.Consumers]
	recordIDs recordIDs
	fileHash  [sha256.Size]byte // of the configuration file at the start
	draining  atomic.Bool
	cutWait   time.Duration
	ready     chan struct{} // closed once every listener accepts

	mu        sync.Mutex
	effective Config            // guarded by mu
	loadedAt  time.Time         // guarded by mu
	loadError string            // guarded by mu
	listeners map[string]string // guarded by mu
}

// New builds a router from a valid Config. It opens the usage file and starts nothing.
func New(cfg Config, o Options) (*Router, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("make router: %w", err)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	r := &Router{
		cfg: cfg, effective: cfg, options: o, log: o.Log, started: o.Now(), loadedAt: o.Now(),
		ready: make(chan struct{}), listeners: map[string]string{}, recordIDs: newRecordIDs(), cutWait: cutWait,
	}
	if o.ConfigFile != "" {
		r.fileHash = hashFile(o.ConfigFile)
	}
	consumers, err := cfg.Metering.consumers()
	if err != nil {
		return nil, fmt.Errorf("make router: %w", err)
	}
	r.consumers.Store(consumers)
	r.nodes.listed = cfg.Nodes
	if r.pools, err = pool.New(cfg.pool(), pool.Options{Log: o.Log, Now: o.Now}); err != nil {
		return nil, fmt.Errorf("make router: %w", err)
	}
	if r.feed, err = r.newFeed(); err != nil {
		return nil, fmt.Errorf("make router: %w", err)
	}
	if err = r.newCluster(); err != nil {
		return nil, fmt.Errorf("make router: %w", err)
	}
	if cfg.Metering.File != "" {
		r.meter, err = meter.Open(meter.Options{Path: cfg.Metering.File, MaxFileBytes: int64(cfg.Metering.MaxFileBytes), Log: o.Log, Now: o.Now})
		if err != nil {
			return nil, fmt.Errorf("make router: %w", err)
		}
	}
	r.transport = wire.New(wire.Options{DialTimeout: cfg.Limits.DialTimeout.Std(), HeaderTimeout: cfg.Limits.HeaderTimeout.Std()})
	r.proxy = proxy.New(proxy.Options{
		Balancer: balancer{r.pools}, Transport: r.transport,
		MaxBodyBytes: int(cfg.Limits.BodyBytes), MaxBufferedBytes: int64(cfg.Limits.BufferedBytes),
		Consumer:       func(req *http.Request) string { return r.consumers.Load().Of(req) },
		ConsumerHeader: cfg.Metering.ConsumerHeader, Done: r.finished, Now: o.Now, Log: o.Log,
	})
	r.metrics = newMetrics(r)
	return r, nil
}

// newFeed makes the feed of the configured nodes' reports.
func (r *Router) newFeed() (*feed.Feed, error) {
	o := feed.Options{Nodes: r.cfg.Nodes, Sink: r.pools, Router: r.cfg.Name, Insecure: r.cfg.Listen.Insecure, Log: r.log, Now: r.options.Now}
	if r.cfg.TLS.set() {
		files := r.cfg.TLS.files()
		files.Failed = func(err error) { r.log.Error("reload certificates", slog.Any("error", err)) }
		config, err := identity.ClientTLS(files, identity.RoleAgent)
		if err != nil {
			return nil, fmt.Errorf("read certificates: %w", err)
		}
		o.TLS = config
	}
	return feed.New(o)
}

// Ready is closed once every listener accepts; Status then has their addresses.
func (r *Router) Ready() <-chan struct{} { return r.ready }

// Run serves until ctx is done, then stops accepting, lets streams finish
// within the drain timeout, and writes the last usage records. Until the last
// stream has ended, nodes are heard and the admin listener says that it drains.
func (r *Router) Run(ctx context.Context) error {
	tuneGC()
	if text, err := configfile.Marshal(r.cfg); err == nil {
		r.log.Info("router starts", slog.String("name", r.cfg.Name), slog.String("config", string(text)))
	}
	servers, err := r.listen(ctx)
	if err != nil {
		return r.abandon(ctx, err)
	}
	// The meter outlives the ingress: it takes the records of the last streams.
	meterCtx, stopMeter := context.WithCancel(context.WithoutCancel(ctx))
	defer stopMeter()
	meterDone := make(chan error, 1)
	go func() {
		if r.meter == nil {
			meterDone <- nil
			return
		}
		meterDone <- r.meter.Run(meterCtx)
	}()
	group, groupCtx := errgroup.WithContext(ctx)
	outlast, drained := context.WithCancel(context.WithoutCancel(ctx))
	defer drained()
	for _, s := range servers {
		if s.name == ingressName {
			group.Go(func() error {
				defer drained()
				return s.serve(groupCtx, r)
			})
			continue
		}
		group.Go(func() error { return s.serve(outlast, r) })
	}
	if r.options.ConfigFile != "" {
		group.Go(func() error { return r.watchConfig(groupCtx) })
	}
	group.Go(func() error { return r.feed.Run(outlast) })
	if r.cluster != nil {
		group.Go(func() error { return r.cluster.Run(outlast) })
	}
	close(r.ready)
	r.log.Info("router is ready", slog.String("name", r.cfg.Name), slog.String("ingress", r.cfg.Listen.Ingress))
	defer r.log.Info("router stopped")
	err = group.Wait()
	r.transport.CloseIdleConnections()
	stopMeter()
	return errors.Join(err, <-meterDone)
}

// abandon closes the usage file of a router that could not start.
func (r *Router) abandon(ctx context.Context, err error) error {
	if r.meter == nil {
		return err
	}
	stopped, cancel := context.WithCancel(ctx)
	cancel()
	return errors.Join(err, r.meter.Run(stopped))
}

// server is one listener with what it serves.
type server struct {
	name     string
	listener net.Listener
	http     *http.Server
	drain    time.Duration
	cut      context.CancelCauseFunc // of every request it has
}

// serve blocks until ctx is done and the server has drained.
func (s *server) serve(ctx context.Context, r *Router) error {
	defer s.cut(nil)
	done := make(chan error, 1)
	go func() {
		<-ctx.Done()
		r.draining.Store(true)
		bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.drain)
		defer cancel()
		err := s.http.Shutdown(bounded)
		if errors.Is(err, context.DeadlineExceeded) {
			r.log.Warn("streams cut at shutdown", slog.String("listener", s.name), slog.Duration("after", s.drain))
			s.cut(proxy.ErrCut)
			r.awaitCut(ctx) // handlers tell their clients
			err = s.http.Close()
			r.awaitCut(ctx) // those that could not
		}
		done <- err
	}()
	if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", s.name, err)
	}
	return <-done
}

// cutWait bounds the time that handlers of cut streams get for a last word to
// their clients, and once more for their records.
const cutWait = 2 * time.Second

// awaitCut waits until no request is handled any more: the server closes
// connections and does not wait for those who use them.
func (r *Router) awaitCut(ctx context.Context) {
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cutWait)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for r.proxy.InFlight() > 0 {
		select {
		case <-tick.C:
		case <-bounded.Done():
			return
		}
	}
}

// finished takes every exchange: metrics, and a usage record for what an
// endpoint was given.
func (r *Router) finished(x *proxy.Exchange) {
	r.metrics.observe(x)
	if r.meter == nil || x.EndpointID == "" {
		return
	}
	r.meter.Add(&meter.Record{
		ID: r.recordIDs.next(), RequestID: x.ID, Time: x.Start, Model: x.Model, ServedModel: x.ServedModel,
		Consumer: x.Consumer, Pool: x.Pool, Endpoint: x.EndpointID, Accelerator: x.Accelerator, Path: x.Path,
		PromptTokens: x.PromptTokens, CachedTokens: x.CachedTokens, CompletionTokens: x.CompletionTokens,
		Estimated: x.Estimated, Outcome: x.Outcome, Status: x.Status, Stream: x.Stream,
		TTFT: x.TTFT, Duration: x.Duration, Retries: x.Retries,
	})
}
