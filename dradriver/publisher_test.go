package dradriver_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/apimachinery/pkg/watch"
	fakediscovery "k8s.io/client-go/discovery/fake"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
)

// apiServer is client-go's fake API server with what matters to a publisher:
// names and versions of slices, gates that drop fields, dry runs, and being
// down.
type apiServer struct {
	*fake.Clientset

	mu     sync.Mutex
	gates  structured.Features
	down   bool
	refuse error // of a dry run
	writes []string
	names  int
}

func newAPIServer(minor int, objects ...runtime.Object) *apiServer {
	objects = append(objects, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: "uid-of-n"}})
	a := &apiServer{Clientset: fake.NewClientset(objects...), gates: gatesOf(minor)}
	a.Discovery().(*fakediscovery.FakeDiscovery).FakedServerVersion = &version.Info{GitVersion: fmt.Sprintf("v1.%d.2", minor)}
	a.PrependReactor("create", "resourceslices", a.create)
	a.PrependReactor("update", "resourceslices", a.update)
	a.PrependReactor("delete", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		a.note("delete", action.(clienttesting.DeleteAction).GetName())
		return false, nil, nil
	})
	a.PrependReactor("*", "*", func(clienttesting.Action) (bool, runtime.Object, error) { return a.answer() })
	a.PrependWatchReactor("*", func(clienttesting.Action) (bool, watch.Interface, error) {
		handled, _, err := a.answer()
		return handled, nil, err
	})
	return a
}

func (a *apiServer) answer() (bool, runtime.Object, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.down {
		return true, nil, errors.New("connection refused")
	}
	return false, nil, nil
}

func (a *apiServer) set(change func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change()
}

func (a *apiServer) note(verb, name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.writes = append(a.writes, verb+" "+name)
}

// written gives the writes since it was asked last.
func (a *apiServer) written() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	writes := strings.Join(a.writes, ", ")
	a.writes = nil
	return writes
}

func (a *apiServer) create(action clienttesting.Action) (bool, runtime.Object, error) {
	create := action.(clienttesting.CreateActionImpl)
	slice := create.GetObject().(*resourceapi.ResourceSlice)
	a.mu.Lock()
	defer a.mu.Unlock()
	slice.Spec.Devices = keptBy(a.gates, slice.Spec.Devices)
	if len(create.CreateOptions.DryRun) > 0 {
		return true, slice, a.refuse
	}
	slice.Name = fmt.Sprintf("%s%d", slice.GenerateName, a.names)
	slice.ResourceVersion = "1"
	a.names++
	a.writes = append(a.writes, "create "+slice.Spec.Pool.Name)
	return false, nil, nil
}

func (a *apiServer) update(action clienttesting.Action) (bool, runtime.Object, error) {
	slice := action.(clienttesting.UpdateAction).GetObject().(*resourceapi.ResourceSlice)
	a.mu.Lock()
	defer a.mu.Unlock()
	var n int
	if _, err := fmt.Sscan(slice.ResourceVersion, &n); err != nil {
		return true, nil, err
	}
	slice.ResourceVersion = fmt.Sprint(n + 1)
	slice.Spec.Devices = keptBy(a.gates, slice.Spec.Devices)
	a.writes = append(a.writes, "update "+slice.Spec.Pool.Name)
	return false, nil, nil
}

// pools lists what is stored as "pool: device device", sorted.
func (a *apiServer) pools(t *testing.T) string {
	t.Helper()
	list, err := a.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pools := map[string][]string{}
	for _, slice := range list.Items {
		names := pools[slice.Spec.Pool.Name]
		for _, d := range slice.Spec.Devices {
			names = append(names, d.Name)
		}
		pools[slice.Spec.Pool.Name] = names
	}
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(pools)) {
		lines = append(lines, name+": "+strings.Join(pools[name], " "))
	}
	return strings.Join(lines, "\n")
}

func (a *apiServer) deleteAll(t *testing.T) {
	t.Helper()
	list, err := a.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, slice := range list.Items {
		if err := a.ResourceV1().ResourceSlices().Delete(t.Context(), slice.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

var everything = dradriver.Pools{GPUs: true, Weights: true, KV: true}

// start runs a Publisher of node "n" and gives the func that ends it.
func start(t *testing.T, client kubernetes.Interface, opts dradriver.PublisherOptions) (*dradriver.Publisher, func()) {
	t.Helper()
	opts.Node, opts.Client, opts.Log = "n", client, slog.New(slog.DiscardHandler)
	p, err := dradriver.NewPublisher(opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	return p, func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	}
}

func twoGPUs(t *testing.T) device.Snapshot {
	t.Helper()
	return simulated(t, "n", "gpus: [{product: h100, count: 2}]\n")
}

func fullOffer(t *testing.T) dradriver.Offer {
	t.Helper()
	return dradriver.Offer{
		GPUs: twoGPUs(t), Weights: weightsOf(100*units.GiB, model(t, "llama", 1, units.GiB)), KV: &stock.Space{Memory: 64 * units.GiB},
	}
}

const fullPools = "n: gpu-0000-1b-00-0 gpu-0000-43-00-0\nn/kv: kv\nn/weights: cold w-0101020300000000"

// settle lets d pass and everything that follows from it happen.
func settle(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
	synctest.Wait()
}

func TestANodeIsPublishedAndTheSameStockIsNoWrite(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(37)
		p, stop := start(t, api, dradriver.PublisherOptions{Pools: everything})
		defer stop()
		p.Set(fullOffer(t))
		settle(t, 2*time.Second)
		if got := api.pools(t); got != fullPools {
			t.Fatalf("stored:\n%s", got)
		}
		s := p.State()
		if !s.InSync() || s.Cluster.From != "probe" || s.Cluster.Version != "v1.37.2" || len(s.Lacking) > 0 || s.Creates != 3 || len(s.Pools) != 3 || s.Pools[0].Devices != 2 {
			t.Errorf("state: %+v", s)
		}
		api.written()
		for range 50 {
			p.Set(fullOffer(t))
			settle(t, 7*time.Second)
		}
		if got := api.written(); got != "" {
			t.Errorf("writes of the same stock: %s", got)
		}
		list, _ := api.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
		for _, slice := range list.Items {
			if owner := slice.OwnerReferences; len(owner) != 1 || owner[0].Kind != "Node" || owner[0].UID != "uid-of-n" || *slice.Spec.NodeName != "n" {
				t.Errorf("slice %s: owner %v, node %v", slice.Name, owner, slice.Spec.NodeName)
			}
		}
	})
}

func TestGPUsAreWrittenAtOnceAndVolatilePoolsCoalesced(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(37)
		p, stop := start(t, api, dradriver.PublisherOptions{Pools: everything})
		defer stop()
		o := fullOffer(t)
		p.Set(o)
		settle(t, 2*time.Second)
		api.written()
		o.GPUs = o.GPUs[:1]
		for i := range byte(5) {
			o.Weights = weightsOf(100*units.GiB, append(slices.Clone(o.Weights.Artifacts), model(t, fmt.Sprint("m", i), 10+i, units.GiB))...)
			p.Set(o)
			settle(t, time.Second)
		}
		if got := api.written(); got != "update n" {
			t.Errorf("within ten seconds: %s", got)
		}
		settle(t, 10*time.Second)
		if got := api.written(); got != "update n/weights" {
			t.Errorf("after: %s", got)
		}
		if got := api.pools(t); !strings.Contains(got, "w-0a") || !strings.Contains(got, "w-0e") {
			t.Errorf("stored:\n%s", got)
		}
	})
}

func TestAnAPIServerThatIsDownHoldsNothingUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(37)
		api.set(func() { api.down = true })
		p, stop := start(t, api, dradriver.PublisherOptions{Pools: everything})
		defer stop()
		for range 100 {
			p.Set(fullOffer(t)) // never blocks
			settle(t, time.Second)
		}
		if s := p.State(); s.InSync() || !strings.Contains(s.Waiting, "connection refused") {
			t.Errorf("state: %+v", s)
		}
		api.set(func() { api.down = false })
		settle(t, time.Minute)
		if got := api.pools(t); got != fullPools {
			t.Errorf("stored once it is up:\n%s", got)
		}

		// Down again: the last offer arrives once it is up, soon after a long time.
		api.set(func() { api.down = true })
		o := fullOffer(t)
		o.GPUs = o.GPUs[:1]
		p.Set(o)
		settle(t, 3*time.Hour)
		s := p.State()
		if s.InSync() || !strings.Contains(s.Pools[0].Failure, "connection refused") || s.Pools[0].Failures == 0 {
			t.Errorf("state: %+v", s.Pools)
		}
		api.set(func() { api.down = false })
		settle(t, 20*time.Second)
		if got := api.pools(t); strings.Contains(got, "gpu-0000-43") {
			t.Errorf("stored:\n%s", got)
		}
		if s := p.State(); !s.InSync() || s.Pools[0].Failure != "" {
			t.Errorf("state: %+v", s.Pools)
		}
	})
}

func TestAPublisherThatNeverReachedTheAPIServerStops(t *testing.T) {
	t.Parallel()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }() // accepts and never answers
	client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://" + listener.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	p, stop := start(t, client, dradriver.PublisherOptions{Pools: everything})
	p.Set(fullOffer(t))
	if _, err := listener.Accept(); err != nil { // it asks
		t.Fatal(err)
	}
	stop()
}

func TestSlicesThatSomebodyDeletesComeBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(37)
		p, stop := start(t, api, dradriver.PublisherOptions{Pools: everything})
		defer stop()
		p.Set(fullOffer(t))
		settle(t, 2*time.Minute)
		api.deleteAll(t)
		settle(t, 15*time.Second)
		if got := api.pools(t); got != fullPools {
			t.Errorf("stored:\n%s", got)
		}
	})
}

func TestPoolsThatAreNoLongerPublishedGo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(37)
		p, stop := start(t, api, dradriver.PublisherOptions{Pools: everything})
		p.Set(fullOffer(t))
		settle(t, 2*time.Second)
		o := fullOffer(t)
		o.KV = &stock.Space{}
		p.Set(o)
		settle(t, 11*time.Second)
		if got := api.pools(t); strings.Contains(got, "n/kv") || !strings.Contains(got, "n/weights") {
			t.Errorf("without KV space:\n%s", got)
		}
		if s := p.State(); !s.InSync() || len(s.Pools) != 2 {
			t.Errorf("state: %+v", s.Pools)
		}
		stop()
		if got := api.pools(t); !strings.Contains(got, "n/weights") {
			t.Errorf("stopping removed slices:\n%s", got)
		}

		// The next run publishes GPUs only.
		p, stop = start(t, api, dradriver.PublisherOptions{Pools: dradriver.Pools{GPUs: true}})
		defer stop()
		api.written()
		p.Set(fullOffer(t))
		settle(t, 15*time.Second)
		if got := api.pools(t); got != "n: gpu-0000-1b-00-0 gpu-0000-43-00-0" {
			t.Errorf("stored:\n%s", got)
		}
		if got := api.written(); !strings.HasPrefix(got, "delete ") || strings.Contains(got, ",") {
			t.Errorf("writes: %s", got)
		}
	})
}

func TestAClusterWithoutTheGatesGetsNoSharedDevices(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(35)
		p, stop := start(t, api, dradriver.PublisherOptions{Pools: everything})
		defer stop()
		p.Set(fullOffer(t))
		settle(t, 2*time.Second)
		if got := api.pools(t); got != "n: gpu-0000-1b-00-0 gpu-0000-43-00-0" {
			t.Errorf("stored:\n%s", got)
		}
		if got := strings.Join(p.State().Lacking, " "); got != "DRAConsumableCapacity DRADeviceTaints DRAExtendedResource" {
			t.Errorf("lacking %q", got)
		}
		// Somebody switches the gates on and starts the API server anew.
		api.set(func() { api.gates = gatesOf(37) })
		settle(t, 11*time.Minute)
		if got := api.pools(t); got != fullPools {
			t.Errorf("with the gates:\n%s", got)
		}
		if got := strings.Join(p.State().Lacking, " "); got != "DRAExtendedResource" {
			t.Errorf("lacking %q", got)
		}
		// And off again. The next change of a volatile pool is dropped in part.
		api.set(func() { api.gates = gatesOf(35) })
		o := fullOffer(t)
		o.Weights = weightsOf(units.GiB)
		p.Set(o)
		settle(t, time.Minute)
		if got := api.pools(t); got != "n: gpu-0000-1b-00-0 gpu-0000-43-00-0" {
			t.Errorf("without them:\n%s", got)
		}
		if s := p.State(); !s.InSync() || !slices.Contains(s.Dropped, "DRAConsumableCapacity") {
			t.Errorf("state: %+v", s)
		}
	})
}

func TestWhatIsDroppedInSpiteOfTheConfigurationIsNotUsed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(35)
		p, stop := start(t, api, dradriver.PublisherOptions{
			Pools: everything, Features: map[string]bool{dradriver.FeatureConsumableCapacity: true},
		})
		defer stop()
		p.Set(fullOffer(t))
		settle(t, time.Minute)
		if got := api.pools(t); got != "n: gpu-0000-1b-00-0 gpu-0000-43-00-0" {
			t.Errorf("stored:\n%s", got)
		}
		if s := p.State(); !slices.Contains(s.Dropped, dradriver.FeatureConsumableCapacity) || s.Features.ConsumableCapacity {
			t.Errorf("state: %+v", s)
		}
	})
}

func TestADryRunThatIsRefusedLeavesTheFeaturesToTheMinor(t *testing.T) {
	t.Parallel()
	for _, minor := range minors {
		api := newAPIServer(minor)
		api.refuse = errors.New("admission webhook does not support dry run")
		c, err := dradriver.AskCluster(t.Context(), api, "n")
		if err != nil || c.From != "minor" || !strings.Contains(c.Problem, "does not support dry run") || c.Features != dradriver.FeaturesOf(minor) {
			t.Errorf("1.%d: %+v, %v", minor, c, err)
		}
	}
}

func TestAProbeStoresNothing(t *testing.T) {
	t.Parallel()
	api := newAPIServer(37)
	c, err := dradriver.AskCluster(t.Context(), api, "n")
	if err != nil || c.From != "probe" || c.Features != dradriver.FeaturesOf(37) {
		t.Errorf("got %+v, %v", c, err)
	}
	if got := api.pools(t); got != "" {
		t.Errorf("stored:\n%s", got)
	}
}

func TestAPoolThatTheAPIServerWouldRefuseStaysAsItWas(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(37)
		p, stop := start(t, api, dradriver.PublisherOptions{Pools: everything})
		defer stop()
		p.Set(fullOffer(t))
		settle(t, 2*time.Second)
		api.PrependReactor("update", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, errors.New("Invalid value")
		})
		o := fullOffer(t)
		o.GPUs = o.GPUs[:1]
		p.Set(o)
		settle(t, time.Minute)
		s := p.State()
		if s.InSync() || !strings.Contains(s.Pools[0].Failure, "Invalid value") || s.Pools[1].Failure != "" || !s.Pools[2].InSync {
			t.Errorf("state: %+v", s.Pools)
		}
	})
}

func TestPublishersAreRefusedWithoutANodeOrWithAnUnknownFeature(t *testing.T) {
	t.Parallel()
	if _, err := dradriver.NewPublisher(dradriver.PublisherOptions{Client: newAPIServer(37)}); err == nil {
		t.Error("a publisher without a node")
	}
	if _, err := dradriver.NewPublisher(dradriver.PublisherOptions{Node: "n"}); err == nil {
		t.Error("a publisher without a client")
	}
	_, err := dradriver.NewPublisher(dradriver.PublisherOptions{Node: "n", Client: newAPIServer(37), Features: map[string]bool{"x": true}})
	if err == nil || !strings.Contains(err.Error(), `"x"`) {
		t.Errorf("got %v", err)
	}
}

func TestAnAPIServerThatTakes20SecondsForEachQuestionIsHeard(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(37)
		api.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
			if create, ok := action.(clienttesting.CreateActionImpl); ok && len(create.CreateOptions.DryRun) > 0 {
				time.Sleep(40 * time.Second) // for the version and the dry run
			}
			return false, nil, nil
		})
		p, stop := start(t, api, dradriver.PublisherOptions{Pools: everything})
		defer stop()
		p.Set(fullOffer(t))
		settle(t, time.Minute)
		if got := api.pools(t); got != fullPools {
			t.Errorf("stored:\n%s, state %+v", got, p.State())
		}
	})
}
