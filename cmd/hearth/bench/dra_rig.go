package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/test/sim/kubeapi"
)

// draNode is the node's name in the bench.
const draNode = "bench"

// draRig is the driver in a process of its own, an API server in this one, and
// the kubelet's side of the driver's socket.
type draRig struct {
	dir    string
	cdi    string // where CDI files are
	api    *kubeapi.Server
	server *http.Server
	url    string // of the API server
	child  *process
	conn   *grpc.ClientConn
	kube   drav1.DRAPluginClient
}

func startDRA(ctx context.Context, dir string) (*draRig, error) {
	r := &draRig{dir: dir, cdi: filepath.Join(dir, "cdi"), api: kubeapi.New()}
	// On a node CDI files are in /var/run/cdi, which is no drive.
	if memory, err := os.MkdirTemp("/dev/shm", "hearth-bench-"); err == nil {
		r.cdi = memory
	}
	for _, sub := range []string{r.cdi, filepath.Join(dir, "raw"), filepath.Join(dir, "registry")} {
		if err := os.MkdirAll(sub, 0o755); err != nil {
			r.stop()
			return nil, fmt.Errorf("make bench directory: %w", err)
		}
	}
	if err := r.api.Put(map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": draNode}}); err != nil {
		r.stop()
		return nil, err
	}
	var err error
	if r.server, r.url, err = serveLocally(ctx, r.api); err != nil {
		r.stop()
		return nil, fmt.Errorf("start API server: %w", err)
	}
	addr := filepath.Join(dir, "stats.sock")
	if r.child, err = start(ctx, -1, addr, "bench", "child-driver", "--addr", addr, "--dir", dir, "--cdi", r.cdi, "--api", r.url); err != nil {
		r.stop()
		return nil, err
	}
	r.conn, err = grpc.NewClient("unix://"+filepath.Join(dir, "plugin", "dra.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		r.stop()
		return nil, fmt.Errorf("reach driver: %w", err)
	}
	r.kube = drav1.NewDRAPluginClient(r.conn)
	return r, nil
}

// serveLocally serves on a free port of loopback, until the server is closed,
// and gives its URL.
func serveLocally(ctx context.Context, h http.Handler) (*http.Server, string, error) {
	l, err := identity.ListenTCP(ctx, "127.0.0.1:0", 0)
	if err != nil {
		return nil, "", fmt.Errorf("listen: %w", err)
	}
	server := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(l) }()
	return server, "http://" + l.Addr().String(), nil
}

func (r *draRig) stop() {
	if r.conn != nil {
		_ = r.conn.Close()
	}
	if r.child != nil {
		r.child.stop()
	}
	if r.server != nil {
		_ = r.server.Close()
	}
	_ = os.RemoveAll(r.cdi)
}

// claimOf makes an allocated claim as the scheduler leaves it. first is the
// node's first GPU that it has.
func claimOf(s shape, i, first int) *resourceapi.ResourceClaim {
	driver := dradriver.Name
	name := fmt.Sprintf("claim-%d-%s", i, uuid.NewUUID()) // like a pod's, it comes once
	claim := &resourceapi.ResourceClaim{
		TypeMeta:   metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: name, UID: uuid.NewUUID()},
	}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod-" + name, UID: uuid.NewUUID()}}
	var results []resourceapi.DeviceRequestAllocationResult
	for g := range s.gpus {
		results = append(results, resourceapi.DeviceRequestAllocationResult{
			Request: "gpus", Driver: driver, Pool: dradriver.PoolGPUs(draNode), Device: string(draDevices()[first+g].ID),
		})
	}
	if s.stock {
		weights, kv := types.UID(uuid.NewUUID()), types.UID(uuid.NewUUID())
		results = append(results,
			resourceapi.DeviceRequestAllocationResult{
				Request: "model", Driver: driver, Pool: dradriver.PoolWeights(draNode), Device: dradriver.WeightsDevice(draArtifact().Digest), ShareID: &weights,
			},
			resourceapi.DeviceRequestAllocationResult{
				Request: "kv", Driver: driver, Pool: dradriver.PoolKV(draNode), Device: dradriver.DeviceKV, ShareID: &kv,
				ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{dradriver.CapacityMemory: resource.MustParse("1Gi")},
			})
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
	return claim
}

// measure prepares and unprepares claims of a shape so many times.
func (r *draRig) measure(ctx context.Context, s shape, calls int) (figures, error) {
	var f figures
	for range calls {
		if err := ctx.Err(); err != nil {
			return f, err
		}
		if err := r.once(ctx, s, &f); err != nil {
			return f, err
		}
	}
	return f, nil
}

func (r *draRig) once(ctx context.Context, s shape, f *figures) error {
	var claims []*drav1.Claim
	for i := range s.claims {
		c := claimOf(s, i, i*s.gpus)
		if err := r.api.Put(c); err != nil {
			return err
		}
		claims = append(claims, &drav1.Claim{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)})
	}
	before, err := r.stats(ctx)
	if err != nil {
		return err
	}
	begin := time.Now()
	prepared, err := r.kube.NodePrepareResources(ctx, &drav1.NodePrepareResourcesRequest{Claims: claims})
	wall := time.Since(begin)
	if err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	for _, c := range claims {
		answer := prepared.GetClaims()[c.GetUid()]
		if got := len(answer.GetDevices()); answer.GetError() != "" || got != s.gpus && got != s.gpus+2 {
			return fmt.Errorf("prepare %s: %d devices, %s", c.GetName(), got, answer.GetError())
		}
	}
	after, err := r.stats(ctx)
	if err != nil {
		return err
	}
	begin = time.Now()
	unprepared, err := r.kube.NodeUnprepareResources(ctx, &drav1.NodeUnprepareResourcesRequest{Claims: claims})
	unprepare := time.Since(begin)
	if err != nil {
		return fmt.Errorf("unprepare: %w", err)
	}
	for _, c := range claims {
		if text := unprepared.GetClaims()[c.GetUid()].GetError(); text != "" {
			return fmt.Errorf("unprepare %s: %s", c.GetName(), text)
		}
		r.api.Delete(resourceapi.SchemeGroupVersion.String(), "resourceclaims", c.GetNamespace(), c.GetName())
	}
	syncs := after.SyncTime - before.SyncTime
	f.add(figures{[]float64{ms(wall)}, []float64{ms(syncs)}, []float64{ms(wall - syncs)}, []float64{ms(unprepare)}})
	return nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// stats asks the child what its ledger has waited for, and holds.
func (r *draRig) stats(ctx context.Context) (draStats, error) { return r.ask(ctx, "/") }

func (r *draRig) ask(ctx context.Context, path string) (draStats, error) {
	var stats draStats
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://driver"+path, nil)
	if err != nil {
		return stats, fmt.Errorf("ask driver: %w", err)
	}
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return dialAt(ctx, r.child.addr) },
	}}
	response, err := client.Do(request)
	if err != nil {
		return stats, fmt.Errorf("ask driver: %w", err)
	}
	defer func() { _ = response.Body.Close() }()
	if err := json.NewDecoder(response.Body).Decode(&stats); err != nil {
		return stats, fmt.Errorf("ask driver: %w", err)
	}
	return stats, nil
}
