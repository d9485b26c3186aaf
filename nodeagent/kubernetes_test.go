package nodeagent

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/version"
	fakediscovery "k8s.io/client-go/discovery/fake"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/test/fakekubelet"
	"github.com/hearth-dev/hearth/units"
)

// onKubernetes is the configuration of a node on Kubernetes with two GPUs and
// KV space, all in a temporary directory.
func onKubernetes(t *testing.T) Config {
	t.Helper()
	dir, err := os.MkdirTemp("", "hk") //nolint:usetesting // t.TempDir is too long a path for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	c := Default()
	c.Node = "node-1"
	c.Network.Enabled = false
	c.Listen = Listen{Admin: "127.0.0.1:0", Socket: filepath.Join(dir, "a.sock"), DataSocket: filepath.Join(dir, "d.sock")}
	c.Weights.Dir, c.Weights.KeepFree = filepath.Join(dir, "weights"), units.MiB
	c.Health.StateDir = filepath.Join(dir, "health")
	c.KV.Dir, c.KV.Memory = filepath.Join(dir, "kv"), 64*units.GiB
	c.Inventory.Sim = filepath.Join(dir, "gpus.yaml")
	c.Kubernetes = Kubernetes{
		Enabled: true, Devices: []string{"gpus", "kv"}, CDIDir: filepath.Join(dir, "cdi"), PluginsDir: filepath.Join(dir, "plugins"),
		RegistrarDir: filepath.Join(dir, "registry"), ClaimsDir: filepath.Join(dir, "claims"), PodResources: filepath.Join(dir, "none.sock"),
		KubeletDir: "/proc", RuntimeDir: "/proc", PullDeadline: units.Duration(time.Minute),
	}
	for _, d := range []string{c.Kubernetes.PluginsDir, c.Kubernetes.RegistrarDir, c.Kubernetes.CDIDir} {
		if err := os.MkdirAll(d, 0o750); err != nil {
			t.Fatal(err)
		}
	}
	text := "apiVersion: hearth.dev/v1alpha1\nkind: SimInventory\ngpus:\n- {product: h100, count: 2}\n"
	if err := os.WriteFile(c.Inventory.Sim, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return c
}

// newServer is the API server of a cluster of Kubernetes 1.37, as far as slices
// and claims go.
func newServer(t *testing.T, objects ...runtime.Object) *fake.Clientset {
	t.Helper()
	server := fake.NewClientset(objects...)
	discovery, ok := server.Discovery().(*fakediscovery.FakeDiscovery)
	if !ok {
		t.Fatalf("discovery is a %T", server.Discovery())
	}
	discovery.FakedServerVersion = &version.Info{GitVersion: "v1.37.2"}
	var made atomic.Int64
	server.PrependReactor("create", "resourceslices", func(action ktesting.Action) (bool, runtime.Object, error) {
		create, ok := action.(ktesting.CreateActionImpl)
		if !ok {
			return false, nil, nil
		}
		slice, ok := create.GetObject().(*resourceapi.ResourceSlice)
		if !ok {
			return false, nil, nil
		}
		if len(create.CreateOptions.DryRun) > 0 {
			return true, slice, nil
		}
		slice.Name, slice.ResourceVersion = fmt.Sprint(slice.GenerateName, made.Add(1)), "1"
		return false, nil, nil
	})
	return server
}

// runAgent runs an agent until the test ends, or until the func is called.
func runAgent(t *testing.T, c Config, opts Options) (*Agent, func()) {
	t.Helper()
	a, err := New(c, opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	stopped := false
	stop := func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the agent ended with %v", err)
		}
	}
	t.Cleanup(stop)
	select {
	case <-a.Ready():
	case err := <-done:
		stopped = true
		cancel()
		t.Fatalf("the agent ended at once: %v", err)
	}
	return a, stop
}

// eventually waits until a condition holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for !holds() {
		select {
		case <-ctx.Done():
			t.Fatalf("this did not come true: %s", what)
		case <-again.C:
		}
	}
}

func fetch(t *testing.T, url string) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(body)
}

// newClaim has the first published GPU and 8 GiB of KV space allocated.
func newClaim(gpu string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "llm", Name: "smol", UID: "uid-1"},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{
			{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.hearth.dev", Count: 1}},
			{Name: "kv", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "kv.hearth.dev", Count: 1}},
		}}},
		Status: resourceapi.ResourceClaimStatus{
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "engine-0", UID: "pod-1"}},
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
				{Request: "gpu", Driver: dradriver.Name, Pool: "node-1", Device: gpu},
				{
					Request: "kv", Driver: dradriver.Name, Pool: "node-1/kv", Device: "kv", ShareID: new(types.UID("share-1")),
					ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("8Gi")},
				},
			}}},
		},
	}
}

func TestANodeOnKubernetesPublishesPreparesAndTells(t *testing.T) {
	t.Parallel()
	c := onKubernetes(t)
	server := newServer(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid"}})
	a, stop := runAgent(t, c, Options{Kubernetes: server, BootID: "boot-1"})
	base := "http://" + a.Listeners()["admin"]
	if code, _ := fetch(t, base+"/readyz"); code != http.StatusServiceUnavailable {
		t.Errorf("before a kubelet registered the driver /readyz is %d", code)
	}
	kubelet, err := fakekubelet.Register(t.Context(), c.Kubernetes.RegistrarDir, identity.Driver)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = kubelet.Close() }()
	eventually(t, "the agent is ready once registered", func() bool { code, _ := fetch(t, base+"/readyz"); return code == http.StatusOK })

	client, err := admin.NewClient(c.Listen.Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	var devices []admin.Device
	eventually(t, "both slice pools are published", func() bool {
		node, err := client.Node(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		devices, _ = client.Devices(t.Context())
		return node.Kubernetes != nil && node.Kubernetes.Registered && len(node.Kubernetes.Pools) == 3 &&
			node.Kubernetes.Pools[0].State == poolPublished && node.Kubernetes.Pools[0].Devices == 2 && node.Kubernetes.Pools[1].State == poolOff
	})
	if len(devices) != 2 || devices[0].Memory == 0 || devices[0].UUID == "" || devices[0].Product == "" {
		t.Fatalf("devices are %+v", devices)
	}

	if _, err := server.ResourceV1().ResourceClaims("llm").Create(t.Context(), newClaim(devices[0].ID), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	claim := fakekubelet.Claim{Namespace: "llm", Name: "smol", UID: "uid-1"}
	answer, err := kubelet.PrepareUntil(t.Context(), time.Second, claim)
	if err != nil || len(answer.Devices) != 2 {
		t.Fatalf("prepared are %+v, %v", answer, err)
	}
	claims, err := client.Claims(t.Context())
	if err != nil || len(claims) != 1 || claims[0].State != "prepared" || claims[0].KV == nil || claims[0].KV.Memory != 8<<30 || !slices.Equal(claims[0].Pods, []string{"engine-0"}) {
		t.Errorf("claims are %+v, %v", claims, err)
	}
	if devices, _ = client.Devices(t.Context()); !slices.Equal(devices[0].Claims, []string{"llm/smol"}) || len(devices[1].Claims) > 0 {
		t.Errorf("devices are had by %q and %q", devices[0].Claims, devices[1].Claims)
	}
	_, metrics := fetch(t, base+"/metrics")
	for _, want := range []string{
		`hearth_claims{state="prepared"} 1`, `hearth_claim_call_seconds_count{call="prepare"} 1`, "hearth_gpu_seconds_waiting_for_weights_total 0",
		`hearth_slice_pool_in_sync{pool="gpus"} 1`, "hearth_driver_registered 1", "hearth_claims_bad_files 0", "hearth_gpus_withheld 0",
	} {
		if !strings.Contains(metrics, want+"\n") {
			t.Errorf("metrics lack %s", want)
		}
	}
	stop()

	// The next agent knows the claim and gives it back.
	a, stop = runAgent(t, c, Options{Kubernetes: server, BootID: "boot-1"})
	defer stop()
	again, err := fakekubelet.Register(t.Context(), c.Kubernetes.RegistrarDir, identity.Driver)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = again.Close() }()
	if errs, err := again.Unprepare(t.Context(), claim); err != nil || errs["uid-1"] != "" {
		t.Errorf("unprepared: %v, %v", errs, err)
	}
	if entries, err := os.ReadDir(c.Kubernetes.CDIDir); err != nil || slices.ContainsFunc(entries, func(e os.DirEntry) bool { return strings.Contains(e.Name(), "uid-1") }) {
		t.Errorf("CDI files are left: %v, %v", entries, err)
	}
	eventually(t, "nothing is held", func() bool { return len(a.cluster.claims()) == 0 })
}

func TestANodeWithAClassicDevicePluginPublishesNoGPUsAndSaysWhatToSwitchOff(t *testing.T) {
	t.Parallel()
	c := onKubernetes(t)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid"}, Status: corev1.NodeStatus{
		Allocatable: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("2")},
	}}
	server := newServer(t, node)
	a, _ := runAgent(t, c, Options{Kubernetes: server})
	eventually(t, "KV space is published and GPUs are withheld", func() bool {
		pools := a.node().Kubernetes.Pools
		return pools[0].State == poolWithheld && pools[2].State == poolPublished
	})
	if problems := strings.Join(a.node().Problems, "\n"); !strings.Contains(problems, "2 nvidia.com/gpu") || !strings.Contains(problems, "devicePlugin.enabled=false") {
		t.Errorf("problems are %s", problems)
	}
	slices, err := server.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil || len(slices.Items) == 0 {
		t.Fatalf("slices are %v, %v", slices, err)
	}
	for _, s := range slices.Items {
		if s.Spec.Pool.Name == "node-1" {
			t.Errorf("GPUs are published: %v", s.Spec.Devices)
		}
	}
	eventually(t, "the node has an event", func() bool {
		list, err := server.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return false
		}
		for _, e := range list.Items { // what was not known yet may have been told before
			if e.Reason == "GPUsNotPublished" && e.InvolvedObject.Kind == "Node" {
				return true
			}
		}
		return false
	})
}

func TestAStoreOnTheKubeletsFileSystemKeepsTheAgentFromStarting(t *testing.T) {
	t.Parallel()
	c := onKubernetes(t)
	c.Kubernetes.KubeletDir = filepath.Dir(c.Weights.Dir)
	a, err := New(c, Options{Kubernetes: newServer(t)})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "set weights.keepFree to at least") {
		t.Errorf("Run gave %v", err)
	}
	c.Kubernetes.EvictionHard = map[string]string{"nodefs.available": "1Mi"}
	c.Weights.KeepFree = 2 * units.MiB
	_, stop := runAgent(t, c, Options{Kubernetes: newServer(t)})
	stop()
}

func TestAPlainNodeTouchesNothingOfKubernetes(t *testing.T) {
	t.Parallel()
	c := onKubernetes(t)
	c.Kubernetes.Enabled, c.Kubernetes.Devices = false, nil
	server := newServer(t)
	a, stop := runAgent(t, c, Options{Kubernetes: server})
	if n := a.node(); n.Kubernetes != nil || len(a.tracker.Snapshot()) != 2 {
		t.Errorf("it says %+v of Kubernetes, and has %d devices", n.Kubernetes, len(a.tracker.Snapshot()))
	}
	if code, body := fetch(t, "http://"+a.Listeners()["admin"]+"/metrics"); code != http.StatusOK || strings.Contains(body, "hearth_claims") {
		t.Errorf("metrics are %d and speak of claims", code)
	}
	stop()
	if len(server.Actions()) > 0 {
		t.Errorf("the API server was asked: %v", server.Actions())
	}
	for _, dir := range []string{c.Kubernetes.ClaimsDir, filepath.Join(c.Kubernetes.PluginsDir, identity.Driver)} {
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("%s was made: %v", dir, err)
		}
	}
}
