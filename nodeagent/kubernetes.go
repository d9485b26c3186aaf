package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/cdi"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/endpoints"
	"github.com/hearth-dev/hearth/nodeagent/health"
	"github.com/hearth-dev/hearth/nodeagent/kube"
	"github.com/hearth-dev/hearth/units"
)

// cluster is the agent's side of Kubernetes, of the role control.
type cluster struct {
	client    *kube.Client
	ledger    *ledger.Ledger
	driver    *dradriver.Driver
	publisher *dradriver.Publisher
	classic   *kube.Classic // nil where no GPUs are published
	devices   dradriver.Inventory
	offered   *offered // what is published of devices; nil without classic
	pods      *kube.Pods
	engines   *kube.Engines
}

// buildCluster opens the ledger and makes driver and publisher; nothing where
// Kubernetes is not configured. It asks nobody.
func (a *Agent) buildCluster() error {
	k := a.config.Kubernetes
	if !k.Enabled || !a.runs(RoleControl) {
		return nil
	}
	clientset := a.opts.Kubernetes
	if clientset == nil {
		var err error
		if clientset, err = kube.NewClientset(k.Kubeconfig, identity.Name+"/"+a.opts.Version); err != nil {
			return err
		}
	}
	book, err := ledger.Open(ledger.Options{Dir: k.ClaimsDir, BootID: a.opts.BootID, Log: a.log})
	if err != nil {
		return fmt.Errorf("open kubernetes.claimsDir: %w", err)
	}
	a.cluster = &cluster{ledger: book, devices: tracked{a.tracker}}
	if err := a.cluster.build(a, clientset); err != nil {
		return errors.Join(err, book.Close())
	}
	return nil
}

func (c *cluster) build(a *Agent, clientset kubernetes.Interface) error {
	k := a.config.Kubernetes
	pools, err := dradriver.ParsePools(k.Devices)
	if err != nil {
		return err
	}
	c.client = kube.New(kube.Options{Client: clientset, Node: a.config.Node, Log: a.log})
	mounts, err := driverMounts(k.DriverRoot)
	if err != nil {
		a.setProblem("driver root", err.Error())
	}
	c.driver, err = dradriver.New(dradriver.Options{
		Node: a.config.Node, Pools: pools, Kube: clientset, Ledger: c.ledger, CDI: cdi.New(cdi.Options{Dir: k.CDIDir, Log: a.log}),
		Cache: a.cache, KV: a.kv, Devices: c.devices, Cluster: c.client,
		PluginDir: k.pluginDir(), RegistrarDir: k.RegistrarDir, CDIDir: k.CDIDir, DriverMounts: mounts,
		PullDeadline: k.PullDeadline.Std(), Log: a.log,
	})
	if err != nil {
		return err
	}
	c.publisher, err = dradriver.NewPublisher(dradriver.PublisherOptions{
		Node: a.config.Node, Client: clientset, Pools: pools, Features: k.Features, Log: a.log,
	})
	if err != nil {
		return err
	}
	c.pods = kube.NewPods(kube.PodsOptions{Client: clientset, Node: a.config.Node, Log: a.log})
	c.engines = kube.NewEngines(kube.EnginesOptions{
		Pods: c.pods, Devices: c.driver.DevicesOfPod, DevicesChanged: c.driver.HeldChanged(), Set: a.poller.Set,
		Room: endpoints.MaxEndpoints - len(a.config.Endpoints), Log: a.log,
	})
	if pools.GPUs {
		c.classic = kube.NewClassic(kube.ClassicOptions{Client: c.client, PodResources: k.PodResources, GPUs: c.uuids, Log: a.log})
		c.offered = &offered{inner: c.devices, classic: c.classic, subs: map[chan struct{}]struct{}{}}
	}
	return nil
}

// uuids are those of the node's GPUs, as far as they are known.
func (c *cluster) uuids() []string {
	snapshot, _ := c.devices.Devices()
	var list []string
	for _, s := range snapshot {
		if s.Device.UUID != "" {
			list = append(list, s.Device.UUID)
		}
	}
	return list
}

// run starts everything of the cluster under the agent's group.
func (c *cluster) run(ctx context.Context, a *Agent, start func(name string, run func() error)) {
	start("driver", func() error { return ending(ctx, c.driver.Run(ctx)) })
	start("slices", func() error {
		// An agent beside another one of its node publishes nothing.
		select {
		case <-ctx.Done():
			return nil
		case <-c.driver.Claimed():
		}
		return ending(ctx, c.publisher.Run(ctx))
	})
	start("API server", func() error { return c.client.Run(ctx) })
	start("pods", func() error { return c.pods.Run(ctx) })
	start("names of pods", func() error { return c.pods.Tell(ctx, a.data) })
	start("network condition", func() error { return c.tellAccounting(ctx, a) })
	start("engines of pods", func() error { return c.engines.Run(ctx) })
	sources := dradriver.Sources{Devices: c.devices, Cache: a.cache, KV: a.kv, Cold: c.driver}
	if c.classic != nil {
		sources.Devices = c.offered
		start("classic device plugin", func() error { return c.classic.Run(ctx) })
		start("offered devices", func() error { return c.offered.run(ctx) })
	}
	start("slice sources", func() error { return c.publisher.Follow(ctx, sources) })
	start("cluster state", func() error { return c.watch(ctx, a) })
}

// stateEvery is how often the problems of the cluster's rooms are looked at,
// besides after a change that is signalled.
const stateEvery = 5 * time.Second

// watch makes what the rooms say problems of the node, and tells of the graver
// ones where `kubectl describe node` shows them.
func (c *cluster) watch(ctx context.Context, a *Agent) error {
	published, end := c.publisher.Subscribe()
	defer end()
	var classic <-chan struct{}
	if c.classic != nil {
		changed, end := c.classic.Subscribe()
		defer end()
		classic = changed
	}
	again := time.NewTicker(stateEvery)
	defer again.Stop()
	for {
		for _, p := range c.problems() {
			if news := a.setProblem(p.room, p.text); news && p.text != "" {
				a.log.Warn("problem on Kubernetes", slog.String("what", p.room), slog.String("why", p.text))
				if p.reason != "" {
					c.client.Event(dradriver.Object{Kind: kube.KindNode, Name: a.config.Node, UID: a.config.Node}, true, p.reason, p.text)
				}
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-published:
		case <-classic:
		case <-again.C:
		}
	}
}

// problem is what people should know of a room; reason makes it an event of the
// node. An empty text takes back what was said before.
type problem struct{ room, text, reason string }

func (c *cluster) problems() []problem {
	var classic, slices, book string
	if c.classic != nil {
		_, classic = c.classic.MayPublish()
	}
	state := c.publisher.State()
	parts := []string{state.Refused, state.Waiting}
	for _, p := range state.Pools {
		if p.Failure != "" {
			parts = append(parts, "slice pool "+p.Name+": "+p.Failure)
		}
	}
	slices = joined(parts)
	if bad := c.ledger.Problems(); len(bad) > 0 {
		book = fmt.Sprintf("%d files of kubernetes.claimsDir could not be read and were put aside, the last as %s: %s", len(bad), bad[len(bad)-1].File, bad[len(bad)-1].Reason)
	}
	known, registered := c.driver.Registered()
	if !known && registered == "" {
		registered = "no kubelet has registered the driver yet: does kubernetes.registrarDir name its plugins_registry?"
	}
	return []problem{
		{"classic device plugin", classic, "GPUsNotPublished"},
		{"slices", slices, ""},
		{"ledger", book, "ClaimFilesBad"},
		{"registration", registered, ""},
		{"API server", joined(c.client.Problems()), ""},
	}
}

// joined gives the parts that say something.
func joined(parts []string) string {
	var said []string
	for _, part := range parts {
		if part != "" {
			said = append(said, part)
		}
	}
	return strings.Join(said, "; ")
}

// registered reports whether a kubelet has registered the driver.
func (c *cluster) registered() bool {
	known, _ := c.driver.Registered()
	return known
}

func (c *cluster) close() error {
	if c == nil {
		return nil
	}
	return c.ledger.Close()
}

// checkStores refuses a store of the data role that could make the kubelet evict pods.
func (a *Agent) checkStores(ctx context.Context) error {
	k := a.config.Kubernetes
	if !k.Enabled || !a.runs(RoleData) {
		return nil
	}
	thresholds := kube.DefaultThresholds
	var err error
	switch {
	case len(k.EvictionHard) > 0:
		thresholds, err = kube.ParseThresholds(k.EvictionHard)
	case a.cluster != nil:
		thresholds, err = a.cluster.client.Thresholds(ctx)
	}
	if err != nil {
		a.log.Info("the kubelet does not tell its eviction thresholds, its defaults are taken", slog.Any("error", err))
	}
	w := a.config.Weights
	list := []kube.Store{{Field: "weights.dir", Dir: w.Dir, Reserve: w.KeepFree, ReserveField: "weights.keepFree"}}
	if usage, err := a.store.Usage(); err == nil && w.Budget > 0 {
		list[0].Takes, list[0].TakesField = max(1, w.Budget-usage.Used), "weights.budget"
	}
	if kv, _ := a.config.KV.within(a.space.capacity, 0); kv.NVMe > 0 {
		// Segments are spread over the drives.
		share := kv.NVMe / units.Bytes(1+len(kv.Drives))
		list = append(list, kube.Store{Field: "kv.dir", Dir: kv.Dir, Takes: share, TakesField: "kv.nvme"})
		for i, dir := range kv.Drives {
			list = append(list, kube.Store{Field: fmt.Sprintf("kv.drives[%d]", i), Dir: dir, Takes: share, TakesField: "kv.nvme"})
		}
	}
	for _, store := range list {
		if err := kube.CheckStore(store, kube.KubeletPaths{Root: k.KubeletDir, Runtime: k.RuntimeDir}, thresholds); err != nil {
			return err
		}
	}
	return nil
}

// tracked is the health tracker's devices as the driver's inventory.
type tracked struct{ *health.Tracker }

// Devices implements dradriver.Inventory.
func (t tracked) Devices() (device.Snapshot, bool) { return t.Snapshot(), true }

// claimsByState counts claims.
func claimsByState(claims []dradriver.ClaimStatus) map[string]int {
	count := map[string]int{}
	for _, c := range claims {
		count[c.State]++
	}
	return count
}
