package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/nodeagent/endpoints"
	"github.com/hearth-dev/hearth/nodeagent/health"
	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/hubmirror"
)

// stopLimit bounds the time from the end of Run's context to its return.
const stopLimit = 10 * time.Second

// Options are what an Agent is told apart from its Config.
type Options struct {
	// Version of the program, shown in /v1/node.
	Version string
	// Log receives all lines; nil discards.
	Log *slog.Logger
	// BootID identifies this boot of the node; empty reads the kernel's.
	BootID string
	// DialContext makes the connections of every source that has any, as the
	// one Limiter paces all their bytes: whoever gives it sees and shapes all
	// that pulls do on the network, and their bytes have no class. Nil dials TCP
	// with a limit of 10 s and keepalive probes, and marks the connections.
	DialContext func(ctx context.Context, network, address string) (net.Conn, error)
	// ConfigFile is the file that the configuration came from, and Load reads it
	// again as it was read first: what can change while running is taken when the
	// file changes. Either empty takes nothing.
	ConfigFile string
	Load       func() (Config, error)
	// Kubernetes is the API server's client; nil makes one as the configuration
	// says, where it enables Kubernetes.
	Kubernetes kubernetes.Interface
}

// dialer is what an Agent dials sources with where its options do not say.
var dialer = net.Dialer{
	Timeout:         10 * time.Second,
	KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 15 * time.Second, Count: 4},
}

// Agent is one node's agent. New makes it, Run runs it once.
type Agent struct {
	config  Config
	opts    Options
	log     *slog.Logger
	started time.Time

	// The data role as the control role sees it: inside when this process runs
	// it, else remote.
	data   local.Data
	cache  stock.Cache
	kv     stock.KV
	inside *local.InProcess
	remote *local.Remote
	// Of the data role, nil without it:
	store   *weightcache.Store
	puller  *weightcache.Puller
	space   *kvSpace
	mirror  *hubmirror.Mirror
	keeper  *keeper
	network *network
	// Of the control role, nil without it:
	tracker   *health.Tracker
	poller    *endpoints.Poller
	publisher *report.Publisher
	cluster   *cluster // nil without kubernetes.enabled, too

	keep []artifact.Ref
	// configured holds the refs of models and of endpoints.
	configured map[artifact.Ref]bool
	leftOut    atomic.Int64 // artifacts that the report has no room for

	ready chan struct{}

	mu        sync.Mutex
	listeners map[string]string
	stopping  bool
	problems  map[string]string // by the room that has it
}

// New checks the configuration, takes the stores of its roles (one process owns
// each) and builds the rooms. It starts nothing; an Agent that is not run is ended
// with Close.
func New(config Config, opts Options) (*Agent, error) {
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("check configuration: %w", err)
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.BootID == "" {
		// Without it a restart keeps conditions that a boot would end.
		id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
		opts.BootID = strings.TrimSpace(string(id))
	}
	a := &Agent{
		config: config, opts: opts, log: opts.Log, started: time.Now(), ready: make(chan struct{}),
		listeners: map[string]string{}, problems: map[string]string{}, configured: map[artifact.Ref]bool{},
	}
	for _, text := range config.Models {
		ref, err := artifact.ParseRef(text)
		if err != nil {
			return nil, fmt.Errorf("read models: %w", err)
		}
		a.keep = append(a.keep, ref)
		a.configured[ref] = true
	}
	for _, e := range config.Endpoints {
		if ref, err := artifact.ParseRef(e.Ref); err == nil {
			a.configured[ref] = true
		}
	}
	if err := a.build(); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return a, nil
}

// buildControl makes health, endpoints and the report.
func (a *Agent) buildControl() error {
	table, err := health.BuiltIn()
	if err != nil {
		return err
	}
	if path := a.config.Health.XIDTable; path != "" {
		text, err := durable.ReadFile(durable.OS, path, configfile.MaxSize)
		if err != nil {
			return fmt.Errorf("read health.xidTable: %w", err)
		}
		over, err := health.ParseTable(text)
		if err != nil {
			return fmt.Errorf("read health.xidTable %s: %w", path, err)
		}
		table = table.With(over)
	}
	path := ""
	if dir := a.config.Health.StateDir; dir != "" {
		if err := durable.MkdirAllSynced(durable.OS, dir, 0o700); err != nil {
			return fmt.Errorf("make health.stateDir: %w", err)
		}
		path = filepath.Join(dir, "health.json")
	}
	devices, err := a.config.inventory()
	if err != nil {
		return err
	}
	a.tracker, err = health.New(health.Options{
		Devices: devices, Table: table, Path: path, BootID: a.opts.BootID, Log: a.log,
	})
	if err != nil {
		return err
	}
	if bad := a.tracker.Quarantined(); bad != "" {
		a.setProblem("health", "the health state could not be read and was kept as "+bad+"; conditions of before are unknown")
	}
	if a.poller, err = endpoints.New(endpoints.Options{Endpoints: a.config.endpoints(), Log: a.log}); err != nil {
		return err
	}
	a.publisher, err = report.NewPublisher(report.PublisherOptions{Node: a.config.Node, Epoch: uint64(a.started.UnixNano()), Log: a.log})
	return err
}

// Ready is closed when every listener serves.
func (a *Agent) Ready() <-chan struct{} { return a.ready }

// Listeners gives the bound addresses by name (mirror, report, admin, socket)
// once Ready is closed.
func (a *Agent) Listeners() map[string]string { return a.node().Listeners }

// Run serves until ctx is done, or until a room fails, and returns within 10
// seconds after. Being told to stop is no error.
func (a *Agent) Run(ctx context.Context) error {
	if text, err := configfile.Marshal(a.config); err == nil {
		a.log.Info("effective configuration", slog.String("config", string(text)))
	}
	if err := a.checkStores(ctx); err != nil {
		return errors.Join(err, a.Close())
	}
	servers, err := a.listen(ctx)
	if err != nil {
		return errors.Join(err, a.Close())
	}
	group, running := errgroup.WithContext(ctx)
	left := parts{running: map[string]int{}}
	start := func(name string, run func() error) { group.Go(func() error { return left.run(name, run) }) }
	if a.runs(RoleData) {
		a.startData(running, start)
	}
	if a.runs(RoleControl) {
		a.startControl(running, start)
	}
	for _, s := range servers {
		start("servers", s.serve)
	}
	if a.opts.ConfigFile != "" && a.opts.Load != nil {
		start("configuration", func() error { return a.watchConfig(running) })
	}
	start("notify", func() error { return a.notify(running) })
	start("stop servers", func() error {
		<-running.Done()
		a.mu.Lock()
		a.stopping = true
		a.mu.Unlock()
		stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopLimit-time.Second)
		defer cancel()
		stopAll(stopping, servers)
		return nil
	})
	a.log.Info("agent is ready", slog.String("node", a.config.Node), slog.Any("roles", a.config.Roles), slog.Uint64("epoch", a.epoch()))
	close(a.ready)
	err = a.wait(ctx, group, &left)
	a.log.Info("agent stopped")
	return errors.Join(err, a.Close())
}

// wait gives the group's error, or gives up on it stopLimit after ctx ended.
func (a *Agent) wait(ctx context.Context, group *errgroup.Group, left *parts) error {
	done := make(chan error, 1)
	go func() { done <- group.Wait() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	late := time.NewTimer(stopLimit)
	defer late.Stop()
	select {
	case err := <-done:
		return err
	case <-late.C:
		return fmt.Errorf("stop agent: these did not end within %v: %s", stopLimit, strings.Join(left.names(), ", "))
	}
}

// parts are what runs.
type parts struct {
	mu      sync.Mutex
	running map[string]int
}

func (p *parts) run(name string, run func() error) error {
	p.mu.Lock()
	p.running[name]++
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.running[name]--; p.running[name] == 0 {
			delete(p.running, name)
		}
	}()
	return run()
}

func (p *parts) names() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Sorted(maps.Keys(p.running))
}

// ending turns a room's error into nil where it only says that it was told to stop.
func ending(ctx context.Context, err error) error {
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, ctx.Err())) {
		return nil
	}
	return err
}

// setProblem notes what people should know of a room, empty takes it back, and
// tells whether that is news.
func (a *Agent) setProblem(room, text string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	before := a.problems[room]
	if text == "" {
		delete(a.problems, room)
	} else {
		a.problems[room] = text
	}
	return text != before
}
