package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
)

// manyNodes is how many nodes' slices the API server gets.
const manyNodes = 500

// offerWithin bounds how long the slices of all nodes take together.
const offerWithin = 5 * time.Minute

// steadySpan is how long nothing changes while requests are counted. It is more
// than a Publisher waits before it publishes settled states again.
const steadySpan = time.Minute

// nodesRows publish for many nodes at once, each by a Publisher of its own:
// against the cluster of a kubeconfig file, or without one against a real API
// server of the bench's own.
func nodesRows(ctx context.Context, dir, kubeconfig string, pairs int) ([]Row, error) {
	if kubeconfig != "" {
		config, err := clusterConfig(kubeconfig)
		if err != nil {
			return nil, err
		}
		return measureNodes(ctx, config, nil, manyNodes, pairs, steadySpan)
	}
	program, err := findKubernetes()
	if errors.Is(err, errNoKubernetes) {
		row := nodeRow(manyNodes, "first", "s", "not measured: "+err.Error())
		row.Met = false
		return []Row{row}, nil
	}
	if err != nil {
		return nil, err
	}
	api, err := startRealAPI(ctx, program, filepath.Join(dir, "api"))
	if err != nil {
		return nil, err
	}
	defer api.stop()
	return measureNodes(ctx, api.config, api.server, manyNodes, pairs, steadySpan)
}

func nodeRow(nodes int, name, unit, note string) Row {
	return Row{Name: fmt.Sprintf("nodes_%d_%s", nodes, name), Unit: unit, Better: lower, Met: true, Note: note}
}

// measureNodes gives the rows of so many nodes, and leaves nothing of theirs at
// a cluster. server is the process of the bench's own API server, nil for a cluster.
func measureNodes(ctx context.Context, config *rest.Config, server *process, many, pairs int, steady time.Duration) (rows []Row, err error) {
	n, err := newNodes(config, many)
	if err != nil {
		return nil, err
	}
	if server == nil { // a server of the bench's own goes with all it has
		if err := removeSlices(ctx, n.client); err != nil { // of a run that was killed
			return nil, err
		}
		defer func() { err = errors.Join(err, removeSlices(ctx, n.client)) }()
	}
	if err := n.allowed(ctx); err != nil {
		return nil, err
	}
	running, end := context.WithCancel(ctx)
	group, running := errgroup.WithContext(running)
	// Before the slices are removed nobody may be there who makes them again.
	defer func() {
		end()
		err = errors.Join(err, group.Wait())
	}()

	var made traffic
	row, err := rounds(nodeRow(many, "first", "s", ""), 1, func() (float64, error) {
		before, start := n.requests.now(), time.Now()
		for _, p := range n.publishers {
			group.Go(func() error { return p.Run(running) })
		}
		_, err := n.offer(running, 0)
		made = n.requests.now().since(before)
		return time.Since(start).Seconds(), err
	}, contender{"the same slices created with nothing around", func() (float64, error) { return n.plainCreates(ctx) }})
	if err != nil {
		return nil, err
	}
	row.Note = fmt.Sprintf("from a cold start until the slices of %d nodes (8 GPUs, 20 artifacts, KV space: 3 slices each) are at a real API server, publishers on the same machine; "+
		"%.1f requests a node: %s", many, float64(made.all())/float64(many), made)
	rows = append(rows, row)

	if rows, err = n.steadyRow(ctx, rows, steady); err != nil {
		return nil, err
	}
	return n.changeRow(ctx, rows, server, pairs)
}

// steadyRow counts what is sent while nothing changes.
func (n *nodes) steadyRow(ctx context.Context, rows []Row, span time.Duration) ([]Row, error) {
	var sent traffic
	row, err := alone(nodeRow(len(n.publishers), "steady_writes", "writes/min", ""), 1, func() (float64, error) {
		before := n.requests.now()
		if err := pass(ctx, span); err != nil {
			return 0, err
		}
		sent = n.requests.now().since(before)
		return float64(sent.writes) / span.Minutes(), nil
	})
	row.Met = row.Value == 0
	row.Note = fmt.Sprintf("while nothing changes, over %s (%s); besides, each node asks for the cluster's features every 10 minutes (a read and a dry run), and its watch is renewed every 5 to 10", span, sent)
	return append(rows, row), err
}

// changeRow changes a GPU of every node at once.
func (n *nodes) changeRow(ctx context.Context, rows []Row, server *process, pairs int) ([]Row, error) {
	many := len(n.publishers)
	var sent traffic
	var cpu time.Duration
	changes := 0
	own := func() (float64, error) {
		changes++
		before, cpu0, err := n.requests.now(), time.Duration(0), error(nil)
		if server != nil {
			if cpu0, err = server.cpu(); err != nil {
				return 0, err
			}
		}
		times, err := n.offer(ctx, int64(changes))
		if err != nil {
			return 0, err
		}
		sent = n.requests.now().since(before)
		if server != nil {
			var cpu1 time.Duration
			cpu1, err = server.cpu()
			cpu = cpu1 - cpu0
		}
		return quantile(times, 0.99), err
	}
	row, err := rounds(nodeRow(many, "change_p99", "ms", ""), pairs, own,
		contender{"one update of each node's slice with nothing around", func() (float64, error) { return n.plainUpdates(ctx) }})
	if err != nil {
		return nil, err
	}
	row.Note = "a GPU of every node changes at once: until a node's slice is there"
	if server != nil {
		row.Note += fmt.Sprintf("; %.1f ms of the API server's CPU a node", ms(cpu)/float64(many))
	}
	writes := nodeRow(many, "change_requests", "requests/node", fmt.Sprintf("for one such change: %s", sent))
	writes.Value, writes.Pairs = float64(sent.all())/float64(many), 1
	writes.Spread = [2]float64{writes.Value, writes.Value}
	return append(rows, row, writes), nil
}

// pass waits while nothing is to happen.
func pass(ctx context.Context, span time.Duration) error {
	timer := time.NewTimer(span)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// nodes are the publishers of many nodes. All of them have one client.
type nodes struct {
	client     kubernetes.Interface
	requests   *counter
	publishers []*dradriver.Publisher
	plain      []*resourceapi.ResourceSlice // one of each node, of nobody's driver
}

func newNodes(config *rest.Config, many int) (*nodes, error) {
	config, requests := counted(config)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make client: %w", err)
	}
	n := &nodes{client: markedClient{client}, requests: requests}
	for i := range many {
		p, err := dradriver.NewPublisher(dradriver.PublisherOptions{
			Node: fmt.Sprintf("hearth-bench-%03d", i), NodeUID: types.UID(uuid.NewUUID()), Client: n.client,
			Pools: dradriver.Pools{GPUs: true, Weights: true, KV: true}, Log: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			return nil, err
		}
		n.publishers = append(n.publishers, p)
	}
	return n, nil
}

// allowed asks whether slices may be made at all: a Publisher tries for ever.
func (n *nodes) allowed(ctx context.Context) error {
	slice := plainSlice(0, dradriver.Name, nil)
	if _, err := n.client.ResourceV1().ResourceSlices().Create(ctx, slice, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
		return fmt.Errorf("publish slices of driver %s at this cluster: %w", dradriver.Name, err)
	}
	return nil
}

// offer changes a GPU of every node and gives the ms until each node's slices
// were in sync.
func (n *nodes) offer(ctx context.Context, change int64) ([]float64, error) {
	weights := &stock.Weights{Drive: stock.Drive{Tier: "nvme", Free: units.TiB}}
	for i := range 20 {
		a := draArtifact()
		a.Ref.Name, a.Digest[0] = fmt.Sprintf("bench/model-%d", i), byte(i+1)
		weights.Artifacts = append(weights.Artifacts, a)
	}
	var mu sync.Mutex
	var times []float64
	ctx, cancel := context.WithTimeout(ctx, offerWithin)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	for _, p := range n.publishers {
		states := make(device.Snapshot, 0, 8)
		for _, d := range draDevices()[:8] {
			states = append(states, device.State{Device: d})
		}
		states[0].Device.Memory += change
		group.Go(func() error {
			took, err := until(ctx, p, dradriver.Offer{GPUs: states, Weights: weights, KV: &stock.Space{Memory: units.TiB}})
			mu.Lock()
			defer mu.Unlock()
			times = append(times, ms(took))
			return err
		})
	}
	err := group.Wait()
	return times, err
}
