package kube

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

const (
	// classicEvery is how often it is looked for a classic device plugin.
	classicEvery = time.Minute
	// classicSettle is how long a plugin that was seen must stay away: a kubelet
	// that restarts forgets its plugins until they register again, and gives up
	// one that is gone after five minutes.
	classicSettle = 6 * time.Minute
	// classicDomain is the domain of the resources of GPU device plugins.
	classicDomain = "nvidia.com/"
)

// Extended is a node's resource of a device plugin.
type Extended struct {
	Name  string   // "nvidia.com/gpu"
	Count int      // what the kubelet counts as allocatable
	IDs   []string // of its devices, where known
}

// ClassicOptions are what a Classic is told.
type ClassicOptions struct {
	// Client asks for the Node object where the kubelet does not answer.
	Client *Client
	// PodResources is the path of the kubelet's pod resources socket.
	PodResources string
	// GPUs gives the UUIDs of the GPUs that would be published.
	GPUs func() []string
	// Log receives changes; nil discards.
	Log *slog.Logger
}

// Classic watches for a classic device plugin that serves the GPUs which this
// node would publish: two that give the same GPU away give it away twice.
//
// What counts is what the kubelet has as allocatable now. Its pod resources
// socket tells that with the devices' ids, without the API server; where it is
// not there the Node object's status does, later and without ids. The sockets
// below device-plugins/ say nothing: their names are the plugins' own, and those
// of dead ones stay.
type Classic struct {
	opts ClassicOptions

	mu      sync.Mutex
	subs    map[chan struct{}]struct{}
	known   bool      // the first look succeeded
	problem string    // why GPUs are not published; empty where they may be
	seen    time.Time // when a plugin was last seen
}

// NewClassic makes a Classic; Run looks.
func NewClassic(opts ClassicOptions) *Classic {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	return &Classic{opts: opts, subs: map[chan struct{}]struct{}{}, problem: "it is not known yet whether a classic device plugin serves the GPUs"}
}

// MayPublish reports whether GPUs may be published, and if not, why, for people.
func (c *Classic) MayPublish() (bool, string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.problem == "", c.problem
}

// Subscribe gives a channel that holds a signal after the answer of MayPublish
// changed, and the func that ends the subscription.
func (c *Classic) Subscribe() (changed <-chan struct{}, cancel func()) {
	sub := make(chan struct{}, 1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.subs[sub] = struct{}{}
	return sub, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.subs, sub)
	}
}

// Run looks at once and then every minute until ctx is done.
func (c *Classic) Run(ctx context.Context) error {
	again := time.NewTicker(classicEvery)
	defer again.Stop()
	for {
		c.look(ctx, time.Now())
		select {
		case <-ctx.Done():
			return nil
		case <-again.C:
		}
	}
}

func (c *Classic) look(ctx context.Context, now time.Time) {
	found, err := c.extended(ctx)
	if ctx.Err() != nil {
		return
	}
	conflict := ""
	if err == nil {
		conflict = classicConflict(found, c.opts.GPUs())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.problem
	switch {
	case err != nil && c.known:
		return // what was known stands
	case err != nil:
		c.problem = "GPUs are not published, as nobody tells whether a classic device plugin serves them: " + err.Error()
	case conflict != "":
		c.known, c.seen, c.problem = true, now, conflict
	case !c.seen.IsZero() && now.Sub(c.seen) < classicSettle:
		c.known, c.problem = true, "GPUs are not published until the classic device plugin has stayed away for "+classicSettle.String()
	default:
		c.known, c.problem = true, ""
	}
	if c.problem == before {
		return
	}
	if c.problem != "" {
		c.opts.Log.Warn("GPUs are not published", slog.String("why", c.problem))
	} else {
		c.opts.Log.Info("GPUs may be published")
	}
	for sub := range c.subs {
		select {
		case sub <- struct{}{}:
		default:
		}
	}
}

// classicConflict says which resource stands in the way of publishing GPUs of
// these UUIDs, and what to switch off; empty where none does. A resource whose
// devices all have ids of other GPUs does not.
func classicConflict(found []Extended, uuids []string) string {
	for _, r := range found {
		if r.Count == 0 || !isGPU(r.Name) {
			continue
		}
		if len(r.IDs) > 0 && len(uuids) > 0 && !slices.ContainsFunc(r.IDs, func(id string) bool { return ours(id, uuids) }) {
			continue
		}
		return fmt.Sprintf("GPUs are not published: a classic device plugin serves %d %s on this node, and two that give the same GPU away give it away twice. "+
			"Switch it off here (devicePlugin.enabled=false of the GPU operator, or keep the plugin's DaemonSet from this node), or leave gpus out of kubernetes.devices", r.Count, r.Name)
	}
	return ""
}

// isGPU reports whether an extended resource is one of GPUs or of their parts:
// "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb".
func isGPU(name string) bool {
	kind, ok := strings.CutPrefix(name, classicDomain)
	return ok && (kind == "gpu" || strings.HasPrefix(kind, "gpu.") || strings.HasPrefix(kind, "mig-") || strings.HasPrefix(kind, "shared-gpu"))
}

// ours reports whether a plugin's device id may be one of the GPUs: it is its
// UUID (of a shared one with "::N" behind), or no UUID of a whole GPU at all.
func ours(id string, uuids []string) bool {
	id, _, _ = strings.Cut(id, "::")
	return !strings.HasPrefix(id, "GPU-") || slices.Contains(uuids, id)
}

// extended gives the node's extended resources.
func (c *Classic) extended(ctx context.Context) ([]Extended, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	found, kubelet := c.ofKubelet(ctx)
	if kubelet == nil {
		return found, nil
	}
	node, err := c.opts.Client.Node(ctx)
	if err != nil {
		if errors.Is(kubelet, fs.ErrNotExist) {
			return nil, fmt.Errorf("there is no %s, and %w", c.opts.PodResources, err)
		}
		return nil, errors.Join(kubelet, err)
	}
	return ofNode(node), nil
}

func (c *Classic) ofKubelet(ctx context.Context) ([]Extended, error) {
	if _, err := os.Stat(c.opts.PodResources); err != nil {
		return nil, fmt.Errorf("find the kubelet's pod resources: %w", err)
	}
	connection, err := grpc.NewClient("unix:"+c.opts.PodResources, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("ask the kubelet for its resources: %w", err)
	}
	defer func() { _ = connection.Close() }() // one call, answered
	answer, err := podresources.NewPodResourcesListerClient(connection).GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask the kubelet for its resources: %w", err)
	}
	byName := map[string]*Extended{}
	var found []*Extended
	for _, d := range answer.GetDevices() {
		r := byName[d.GetResourceName()]
		if r == nil {
			r = &Extended{Name: d.GetResourceName()}
			byName[r.Name] = r
			found = append(found, r)
		}
		r.IDs = append(r.IDs, d.GetDeviceIds()...)
		r.Count = len(r.IDs)
	}
	list := make([]Extended, 0, len(found))
	for _, r := range found {
		list = append(list, *r)
	}
	slices.SortFunc(list, func(a, b Extended) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

func ofNode(node *corev1.Node) []Extended {
	var list []Extended
	for name, quantity := range node.Status.Allocatable {
		if strings.Contains(string(name), "/") {
			list = append(list, Extended{Name: string(name), Count: int(quantity.Value())})
		}
	}
	slices.SortFunc(list, func(a, b Extended) int { return strings.Compare(a.Name, b.Name) })
	return list
}
