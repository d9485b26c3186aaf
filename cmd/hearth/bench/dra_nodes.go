package bench

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
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

// apiToken is the administrator of the API server that the bench starts.
const apiToken = "bench"

// errNoKubernetes says that there is no real API server to measure against.
var errNoKubernetes = errors.New("no real API server here: `make lab` builds one")

// findKubernetes finds the program of the lab that is etcd and API server in
// one, the one built last.
func findKubernetes() (string, error) {
	cache := os.Getenv("KUBELAB_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", errNoKubernetes
		}
		cache = filepath.Join(user, "hearth", "kubelab")
	}
	found, err := filepath.Glob(filepath.Join(cache, "programs", "*", "kubernetes"))
	if err != nil {
		return "", fmt.Errorf("find API server: %w", err)
	}
	newest, when := "", time.Time{}
	for _, path := range found {
		if info, err := os.Stat(path); err == nil && info.ModTime().After(when) {
			newest, when = path, info.ModTime()
		}
	}
	if newest == "" {
		return "", errNoKubernetes
	}
	return newest, nil
}

// realAPI is etcd and an API server of their own, on loopback.
type realAPI struct {
	etcd, server *process
	config       *rest.Config
}

func startRealAPI(ctx context.Context, program, dir string) (*realAPI, error) {
	var addrs [3]string
	for i := range addrs {
		addr, err := freeAddr(ctx)
		if err != nil {
			return nil, err
		}
		addrs[i] = addr
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make API server's directory: %w", err)
	}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, fmt.Errorf("make API server's key: %w", err)
	}
	keyFile, tokens := filepath.Join(dir, "accounts.key"), filepath.Join(dir, "tokens.csv")
	pemKey := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
	if err := errors.Join(os.WriteFile(keyFile, pemKey, 0o600), os.WriteFile(tokens, []byte(apiToken+",bench,bench,system:masters\n"), 0o600)); err != nil {
		return nil, fmt.Errorf("write API server's files: %w", err)
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, fmt.Errorf("write API server's log: %w", err)
	}
	defer func() { _ = log.Close() }()
	api := &realAPI{}
	client, peer := "http://"+addrs[0], "http://"+addrs[1]
	if api.etcd, err = startProgram(ctx, -1, addrs[0], log, program, "etcd", "--name=bench", "--data-dir="+filepath.Join(dir, "etcd"), "--log-level=warn",
		"--listen-client-urls="+client, "--advertise-client-urls="+client, "--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=bench="+peer); err != nil {
		return nil, err
	}
	_, port, err := net.SplitHostPort(addrs[2])
	if err != nil {
		api.etcd.stop()
		return nil, fmt.Errorf("start API server: %w", err)
	}
	if api.server, err = startProgram(ctx, -1, addrs[2], log, program, "kube-apiserver", "--etcd-servers="+client, "--bind-address=127.0.0.1", "--secure-port="+port,
		"--cert-dir="+filepath.Join(dir, "certs"), "--token-auth-file="+tokens, "--authorization-mode=RBAC", "--service-cluster-ip-range=10.0.0.0/24",
		"--service-account-key-file="+keyFile, "--service-account-signing-key-file="+keyFile, "--service-account-issuer=https://bench.invalid"); err != nil {
		api.etcd.stop()
		return nil, err
	}
	api.config = &rest.Config{Host: "https://" + addrs[2], BearerToken: apiToken, QPS: -1, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	return api, api.ready(ctx)
}

// ready waits until the API server has what it makes for itself at its start.
func (a *realAPI) ready(ctx context.Context) error {
	client, err := kubernetes.NewForConfig(a.config)
	if err != nil {
		return fmt.Errorf("make client: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	retry := time.NewTicker(100 * time.Millisecond)
	defer retry.Stop()
	for {
		text, err := client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-retry.C:
		case <-ctx.Done():
			a.stop()
			return fmt.Errorf("wait for API server: %s: %w", text, err)
		}
	}
}

func (a *realAPI) stop() {
	a.server.stop()
	a.etcd.stop()
}

// nodesRows publish for many nodes at once, each by a Publisher of its own.
func nodesRows(ctx context.Context, dir string) ([]Row, error) {
	first := Row{Name: fmt.Sprintf("nodes_%d_first", manyNodes), Unit: "s", Better: lower, Met: true, Note: fmt.Sprintf(
		"from a cold start until the slices of %d nodes (8 GPUs, 20 artifacts, KV space: 3 slices each) are at a real API server, publishers on the same machine", manyNodes)}
	change := Row{Name: fmt.Sprintf("nodes_%d_change_p99", manyNodes), Unit: "ms", Better: lower, Met: true, Note: "a GPU of every node changes at once: until a node's slice is there"}
	program, err := findKubernetes()
	if errors.Is(err, errNoKubernetes) {
		for _, row := range []*Row{&first, &change} {
			row.Met, row.Note = false, "not measured: "+errNoKubernetes.Error()
		}
		return []Row{first, change}, nil
	}
	if err != nil {
		return nil, err
	}
	api, err := startRealAPI(ctx, program, filepath.Join(dir, "api"))
	if err != nil {
		return nil, err
	}
	defer api.stop()
	n, err := newNodes(api.config)
	if err != nil {
		return nil, err
	}
	running, end := context.WithCancel(ctx)
	defer end()
	group, running := errgroup.WithContext(running)
	for _, p := range n.publishers {
		group.Go(func() error { return p.Run(running) })
	}
	begin := time.Now()
	if _, err := n.offer(ctx, 0); err != nil {
		return nil, err
	}
	took := time.Since(begin).Seconds()
	first.Value, first.Pairs, first.Spread = took, 1, [2]float64{took, took}
	cpu0, err := api.server.cpu()
	if err != nil {
		return nil, err
	}
	times, err := n.offer(ctx, 1)
	if err != nil {
		return nil, err
	}
	cpu1, err := api.server.cpu()
	if err != nil {
		return nil, err
	}
	change.Value, change.Pairs = quantile(times, 0.99), 1
	change.Spread = [2]float64{slices.Min(times), slices.Max(times)}
	change.Note += fmt.Sprintf("; %.1f s of CPU in the API server for all of them", (cpu1 - cpu0).Seconds())
	end()
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return []Row{first, change}, nil
}

// nodes are the publishers of many nodes.
type nodes struct{ publishers []*dradriver.Publisher }

func newNodes(config *rest.Config) (*nodes, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make client: %w", err)
	}
	n := &nodes{}
	for i := range manyNodes {
		p, err := dradriver.NewPublisher(dradriver.PublisherOptions{
			Node: fmt.Sprintf("node-%03d", i), NodeUID: types.UID(uuid.NewUUID()), Client: client,
			Pools: dradriver.Pools{GPUs: true, Weights: true, KV: true}, Log: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			return nil, err
		}
		n.publishers = append(n.publishers, p)
	}
	return n, nil
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
