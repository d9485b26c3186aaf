package kube

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

func TestOnlyAPluginThatServesTheGPUsWePublishIsAConflict(t *testing.T) {
	t.Parallel()
	uuids := []string{"GPU-aaaa", "GPU-bbbb"}
	for _, c := range []struct {
		what  string
		found []Extended
		want  bool
	}{
		{"nothing", nil, false},
		{"a plugin that is gone", []Extended{{Name: "nvidia.com/gpu", Count: 0}}, false},
		{"other devices", []Extended{{Name: "rdma/ib", Count: 8}, {Name: "nvidia.com/nic", Count: 8}}, false},
		{"a plugin, ids not known", []Extended{{Name: "nvidia.com/gpu", Count: 2}}, true},
		{"our GPUs", []Extended{{Name: "nvidia.com/gpu", Count: 2, IDs: []string{"GPU-cccc", "GPU-bbbb"}}}, true},
		{"our GPUs in shares", []Extended{{Name: "nvidia.com/gpu.shared", Count: 4, IDs: []string{"GPU-aaaa::0", "GPU-aaaa::1"}}}, true},
		{"other GPUs", []Extended{{Name: "nvidia.com/gpu", Count: 2, IDs: []string{"GPU-cccc", "GPU-dddd::0"}}}, false},
		{"slices of some GPU", []Extended{{Name: "nvidia.com/mig-1g.10gb", Count: 1, IDs: []string{"MIG-eeee"}}}, true},
		{"ids that name none", []Extended{{Name: "nvidia.com/gpu", Count: 1, IDs: []string{"nvidia0"}}}, true},
	} {
		got := classicConflict(c.found, uuids)
		if (got != "") != c.want {
			t.Errorf("%s: %q", c.what, got)
		}
		if c.want && !strings.Contains(got, "devicePlugin.enabled=false") {
			t.Errorf("%s: %q does not say what to switch off", c.what, got)
		}
	}
}

// kubelet answers for pod resources as a kubelet does.
type kubelet struct {
	podresources.UnimplementedPodResourcesListerServer
	devices []*podresources.ContainerDevices
}

// GetAllocatableResources implements the service.
func (k *kubelet) GetAllocatableResources(context.Context, *podresources.AllocatableResourcesRequest) (*podresources.AllocatableResourcesResponse, error) {
	return &podresources.AllocatableResourcesResponse{Devices: k.devices}, nil
}

// serveKubelet gives the socket of a kubelet.
func serveKubelet(t *testing.T, k *kubelet) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubelet.sock")
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(server, k)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return path
}

func newNode(resources map[string]string) *corev1.Node {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}, Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{}}}
	for name, quantity := range resources {
		node.Status.Allocatable[corev1.ResourceName(name)] = resource.MustParse(quantity)
	}
	return node
}

func TestGPUsAreWithheldWhileAClassicPluginServesThemAndForAWhileAfter(t *testing.T) {
	t.Parallel()
	k := &kubelet{}
	client := New(Options{Client: fake.NewClientset(), Node: "node-1"}) // no Node object: only the kubelet can tell
	c := NewClassic(ClassicOptions{Client: client, PodResources: serveKubelet(t, k), GPUs: func() []string { return []string{"GPU-aaaa"} }})
	if may, why := c.MayPublish(); may || why == "" {
		t.Error("GPUs may be published before anybody looked")
	}
	changed, cancel := c.Subscribe()
	defer cancel()
	now := time.Now()
	c.look(t.Context(), now)
	if may, why := c.MayPublish(); !may {
		t.Fatalf("without a plugin GPUs are withheld: %s", why)
	}
	<-changed
	k.devices = []*podresources.ContainerDevices{
		{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-bbbb"}}, {ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-aaaa"}},
	}
	c.look(t.Context(), now.Add(time.Minute))
	if may, why := c.MayPublish(); may || !strings.Contains(why, "2 nvidia.com/gpu") {
		t.Fatalf("with a plugin: %t, %q", may, why)
	}
	<-changed
	k.devices = nil
	c.look(t.Context(), now.Add(2*time.Minute))
	if may, _ := c.MayPublish(); may {
		t.Error("a plugin that may be registering again was taken for gone")
	}
	<-changed
	c.look(t.Context(), now.Add(time.Minute+classicSettle))
	if may, why := c.MayPublish(); !may {
		t.Errorf("long after the plugin went GPUs are withheld: %s", why)
	}
	<-changed
}

func TestWithoutTheKubeletsSocketTheNodeTells(t *testing.T) {
	t.Parallel()
	server := fake.NewClientset(newNode(map[string]string{"nvidia.com/gpu": "8", "cpu": "4", "rdma/ib": "1"}))
	client := New(Options{Client: server, Node: "node-1"})
	none := filepath.Join(t.TempDir(), "none.sock")
	c := NewClassic(ClassicOptions{Client: client, PodResources: none, GPUs: func() []string { return []string{"GPU-aaaa"} }})
	c.look(t.Context(), time.Now())
	if may, why := c.MayPublish(); may || !strings.Contains(why, "8 nvidia.com/gpu") {
		t.Errorf("a node with 8 GPUs of a plugin: %t, %q", may, why)
	}

	server.PrependReactor("get", "nodes", func(ktesting.Action) (bool, runtime.Object, error) { return true, nil, errors.New("forbidden") })
	c.look(t.Context(), time.Now())
	if may, why := c.MayPublish(); may || !strings.Contains(why, "8 nvidia.com/gpu") {
		t.Errorf("what was known did not stand when nobody told: %t, %q", may, why)
	}
	c = NewClassic(ClassicOptions{Client: client, PodResources: none, GPUs: func() []string { return nil }})
	c.look(t.Context(), time.Now())
	if may, why := c.MayPublish(); may || !strings.Contains(why, none) || !strings.Contains(why, "forbidden") {
		t.Errorf("where nobody tells: %t, %q; want both reasons", may, why)
	}
}

func TestResourcesOfANodeAreThoseWithADomain(t *testing.T) {
	t.Parallel()
	got := ofNode(newNode(map[string]string{"cpu": "4", "memory": "1Gi", "rdma/ib": "1", "nvidia.com/gpu": "2"}))
	want := []Extended{{Name: "nvidia.com/gpu", Count: 2}, {Name: "rdma/ib", Count: 1}}
	if !slices.EqualFunc(got, want, func(a, b Extended) bool { return a.Name == b.Name && a.Count == b.Count }) {
		t.Errorf("resources are %v", got)
	}
}
