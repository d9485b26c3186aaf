package bench

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	drahealthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/test/sim/kubeapi"
)

// Aims of the control role's idle memory, in MiB.
const (
	idleAim  = 60
	idleGoal = 40
)

// idleSpan is how long the roles have nothing to do before memory is read, and
// idleStarts how many pairs of them are started, one after another.
const (
	idleSpan   = 15 * time.Second
	idleStarts = 3
)

// idleNode is a node's agent as the DaemonSet runs it: two processes, one of
// role control and one of role data, with a kubelet that has registered the
// driver, an API server, 8 simulated GPUs and nothing to do.
type idleNode struct {
	dir           string
	server        *http.Server
	control, data *process
	kubelet       *grpc.ClientConn
	client        *admin.Client
}

// controlRow is the memory of the control role once its slices are published
// and nothing changes.
func controlRow(ctx context.Context, dir string) (Row, error) {
	var anon, cpu []float64
	row, err := alone(Row{Name: "control_idle_rss", Unit: "MiB", Better: lower, Aim: idleAim}, idleStarts, func() (float64, error) {
		m, err := measureIdle(ctx, filepath.Join(dir, fmt.Sprint(len(anon))), idleSpan)
		anon, cpu = append(anon, m.anon), append(cpu, m.cpu)
		return m.rss, err
	})
	row.Note = fmt.Sprintf("role control beside role data, Kubernetes on, a kubelet and an API server, 8 simulated GPUs, nothing prepared, after %s; "+
		"%.1f MiB of it anonymous, %.2f %% of a core; goal %d", idleSpan, median(anon), median(cpu), idleGoal)
	return row, err
}

// idleFigures are MiB, and percent of a core.
type idleFigures struct{ rss, anon, cpu float64 }

func measureIdle(ctx context.Context, dir string, span time.Duration) (idleFigures, error) {
	n, err := startIdleNode(ctx, dir)
	if err != nil {
		return idleFigures{}, err
	}
	defer n.stop()
	var f idleFigures
	if f.cpu, err = idleCPU(ctx, n.control, span); err != nil {
		return f, err
	}
	rss, err := n.control.rss("VmRSS")
	if err != nil {
		return f, err
	}
	anon, err := n.control.rss("RssAnon")
	f.rss, f.anon = float64(rss)/(1<<20), float64(anon)/(1<<20)
	return f, err
}

// startIdleNode returns once the kubelet has registered the driver and every
// slice is published.
func startIdleNode(ctx context.Context, dir string) (*idleNode, error) {
	n := &idleNode{dir: dir}
	for _, sub := range []string{"plugins", "registry", "cdi"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o750); err != nil {
			return nil, fmt.Errorf("make node directory: %w", err)
		}
	}
	if err := n.start(ctx); err != nil {
		n.stop()
		text, _ := os.ReadFile(filepath.Join(dir, "log"))
		return nil, fmt.Errorf("start agent on Kubernetes: %w; it said: %s", err, text[max(0, len(text)-2000):])
	}
	return n, nil
}

func (n *idleNode) start(ctx context.Context) error {
	api := kubeapi.New()
	if err := api.Put(map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": draNode}}); err != nil {
		return err
	}
	var server string
	var err error
	if n.server, server, err = serveLocally(ctx, api); err != nil {
		return fmt.Errorf("start API server: %w", err)
	}
	files := map[string][]byte{
		"gpus.yaml":  []byte("apiVersion: hearth.dev/v1alpha1\nkind: SimInventory\ngpus: [{product: h100, count: 8}]\n"),
		"kubeconfig": kubeconfig(server),
		"agent.yaml": controlConfig(n.dir),
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(n.dir, name), text, 0o600); err != nil {
			return fmt.Errorf("write agent configuration: %w", err)
		}
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own program: %w", err)
	}
	log, err := os.Create(filepath.Join(n.dir, "log"))
	if err != nil {
		return fmt.Errorf("make log of agent: %w", err)
	}
	defer func() { _ = log.Close() }()
	role := func(name, socket string) (*process, error) {
		return startProgram(ctx, -1, filepath.Join(n.dir, socket), log, self, "agent", "--config", filepath.Join(n.dir, "agent.yaml"), "--node", draNode, "--role", name)
	}
	if n.data, err = role("data", "data.sock"); err != nil {
		return err
	}
	if n.control, err = role("control", "agent.sock"); err != nil {
		return err
	}
	if n.client, err = admin.NewClient(filepath.Join(n.dir, "agent.sock")); err != nil {
		return fmt.Errorf("reach agent: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := n.register(ctx); err != nil {
		return err
	}
	return n.published(ctx)
}

// register does as a kubelet that finds the driver, and reads the health of its
// devices from then on.
func (n *idleNode) register(ctx context.Context) error {
	dial := func(path string) (*grpc.ClientConn, error) {
		return grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	}
	conn, err := dial(filepath.Join(n.dir, "registry", dradriver.Name+"-reg.sock"))
	if err != nil {
		return fmt.Errorf("register driver: %w", err)
	}
	defer func() { _ = conn.Close() }()
	plugin := registration.NewRegistrationClient(conn)
	info, err := plugin.GetInfo(ctx, &registration.InfoRequest{}, grpc.WaitForReady(true))
	if err == nil {
		_, err = plugin.NotifyRegistrationStatus(ctx, &registration.RegistrationStatus{PluginRegistered: true})
	}
	if err == nil {
		n.kubelet, err = dial(info.GetEndpoint())
	}
	if err == nil {
		// The stream ends with its connection.
		_, err = drahealthv1.NewDRAResourceHealthClient(n.kubelet).NodeWatchResources(context.WithoutCancel(ctx), &drahealthv1.NodeWatchResourcesRequest{})
	}
	if err != nil {
		return fmt.Errorf("register driver: %w", err)
	}
	return nil
}

// published waits until the agent says that all its slice pools are published.
func (n *idleNode) published(ctx context.Context) error {
	retry := time.NewTicker(50 * time.Millisecond)
	defer retry.Stop()
	for {
		node, err := n.client.Node(ctx)
		if err == nil && node.Kubernetes != nil && node.Kubernetes.Registered && len(node.Kubernetes.Pools) == 3 &&
			!slices.ContainsFunc(node.Kubernetes.Pools, func(p admin.SlicePool) bool { return p.State != "published" }) {
			return nil
		}
		select {
		case <-retry.C:
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("wait for slices: the agent says %+v", node.Kubernetes), err)
		}
	}
}

func (n *idleNode) stop() {
	if n.kubelet != nil {
		_ = n.kubelet.Close()
	}
	if n.client != nil {
		n.client.Close()
	}
	for _, p := range []*process{n.control, n.data} {
		if p != nil {
			p.stop()
		}
	}
	if n.server != nil {
		_ = n.server.Close()
	}
}
