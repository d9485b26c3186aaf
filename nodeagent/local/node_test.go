package local_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/nodeagent/netattr"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// patience is far beyond what any step takes; it only ends a test that hangs.
const patience = time.Minute

func refOf(name string) artifact.Ref {
	return artifact.Ref{Scheme: artifact.SchemeHub, Name: "org/" + name, Revision: artifact.DefaultRevision}
}

// restricted has no view on a node of these tests.
var restricted = refOf("restricted")

// node is one node's data role, and the control role's way to it.
type node struct {
	t      *testing.T
	dir    string
	url    string
	budget kvtier.Budget
	weight units.Bytes // budget of the weights store; 0 is the drive's
	keep   []artifact.Ref
	began  func(weightcache.Flight) func(weightcache.FlightEnd)
	socket string // empty: both roles are one process

	store  *weightcache.Store
	puller *weightcache.Puller
	inside *local.InProcess
	data   local.Data
	stop   func()

	mu      sync.Mutex
	pods    []netattr.Pod
	network *local.Network
	records []scaleout.Record
}

// newOrigin serves small generated models as org/warm, org/cold and org/restricted.
func newOrigin(t *testing.T) (*hub.Origin, string) {
	t.Helper()
	dir := t.TempDir()
	for i, name := range []string{"warm", "cold", "restricted"} {
		if err := hub.WriteModel(filepath.Join(dir, "org", name), hub.ModelOptions{Size: units.MiB, Shards: 2, Seed: uint64(i + 1)}); err != nil {
			t.Fatal(err)
		}
	}
	origin := hub.New(hub.Options{Dir: dir})
	server := httptest.NewServer(origin)
	t.Cleanup(server.Close)
	return origin, server.URL
}

// socketDir is a directory with a short name: a socket's path holds 107 bytes.
func socketDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "local") //nolint:usetesting // a test's own directory may have a long name
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// newNode starts a node's data role; apart puts a socket between the roles.
func newNode(t *testing.T, url string, apart bool, change func(n *node)) *node {
	t.Helper()
	n := &node{t: t, dir: t.TempDir(), url: url}
	if apart {
		n.socket = filepath.Join(socketDir(t), "data.sock")
	}
	if change != nil {
		change(n)
	}
	n.start()
	t.Cleanup(func() { n.stop() })
	return n
}

func (n *node) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

// start opens the data role as a new process would.
func (n *node) start() {
	n.t.Helper()
	origin, err := source.NewHub(source.HubOptions{Name: "hub", URL: n.url})
	n.must(err)
	n.store, err = weightcache.Open(weightcache.Options{
		Dir: filepath.Join(n.dir, "weights"), Budget: n.weight, Keep: n.keep,
		MayView: func(m *artifact.Manifest) bool { return m.Ref != restricted },
	})
	n.must(err)
	n.puller, err = weightcache.NewPuller(weightcache.PullerOptions{
		Store: n.store, Sources: []weightcache.Rule{{Source: origin, Refs: []string{"org/*"}}}, ScrubEvery: -1,
		RetryBase: time.Millisecond, RetryMax: 10 * time.Millisecond, SegmentSize: 64 * units.KiB, Began: n.began,
	})
	n.must(err)
	space, err := kvtier.Open(kvtier.Options{Dir: filepath.Join(n.dir, "kv"), Budget: n.budget})
	n.must(err)
	n.inside, err = local.NewInProcess(local.Options{
		Store: n.store, Puller: n.puller, KV: space,
		SetPods: func(pods []netattr.Pod) { n.locked(func() { n.pods = pods }) },
		Network: func() (seen *local.Network) {
			n.locked(func() { seen = n.network })
			return seen
		},
		ScaleOuts: func() (list []scaleout.Record) {
			n.locked(func() { list = slices.Clone(n.records) })
			return list
		},
	})
	n.must(err)
	n.data = n.inside
	ctx, cancel := context.WithCancel(context.WithoutCancel(n.t.Context()))
	ends := []func(){}
	run := func(run func(context.Context) error) {
		done := make(chan error, 1)
		go func() { done <- run(ctx) }()
		ends = append(ends, func() {
			if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
				n.t.Error(err)
			}
		})
	}
	run(n.puller.Run)
	run(n.inside.Run)
	run(space.Run)
	var server *http.Server
	if n.socket != "" {
		listener, err := identity.ListenSocket(ctx, n.socket)
		n.must(err)
		server = &http.Server{Handler: local.NewHandler(local.HandlerOptions{Data: n.inside}), ReadHeaderTimeout: patience}
		run(func(context.Context) error {
			if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
				return err
			}
			return nil
		})
		remote := local.NewRemote(local.DialOptions{Socket: n.socket})
		run(remote.Run)
		n.data = remote
		n.until("the first state", func() bool { _, ok := remote.Snapshot(); return ok })
	}
	n.stop = func() {
		n.stop = func() {}
		cancel()
		if server != nil {
			_ = server.Close()
		}
		for _, end := range ends {
			end()
		}
		n.must(errors.Join(n.puller.Wait(context.WithoutCancel(ctx)), space.Close(), n.store.Close()))
	}
}

func (n *node) locked(do func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	do()
}

// toldPods are the pods that the data role was told last.
func (n *node) toldPods() (pods []netattr.Pod) {
	n.locked(func() { pods = n.pods })
	return pods
}

// see changes what the data role tells of the network.
func (n *node) see(seen local.Network, records []scaleout.Record) {
	n.locked(func() { n.network, n.records = &seen, slices.Clone(records) })
	n.inside.NetworkChanged()
}

// until waits for what comes by itself.
func (n *node) until(what string, holds func() bool) {
	n.t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline.C:
			n.t.Fatalf("waited in vain for %s", what)
		}
	}
}

// warm makes a model Ready as the mirror or an operator would.
func (n *node) warm(name string) *artifact.Manifest {
	n.t.Helper()
	m, err := n.inside.Ensure(n.t.Context(), refOf(name), weightcache.EnsureOptions{})
	n.must(err)
	return m
}

// remove takes an artifact off the node as an operator would.
func (n *node) remove(digest artifact.Digest) error {
	for _, m := range n.store.Manifests() {
		if m.Digest == digest {
			return n.inside.Remove(n.t.Context(), m.Ref)
		}
	}
	return errors.New("no ref means it")
}

func holders(leases []local.Lease) []string {
	var names []string
	for _, l := range leases {
		names = append(names, l.Holder)
	}
	slices.Sort(names)
	return names
}
