package kube

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/hearth-dev/hearth/nodeagent/endpoints"
)

func engineOf(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "llm", Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{EngineLabel: "vllm", "app": "m"}},
		Spec: corev1.PodSpec{NodeName: "node-1", Containers: []corev1.Container{
			{Name: "proxy", Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: 9090}}},
			{Name: "engine", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8000}}},
		}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1"},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func TestAPodOfThisNodeBecomesAnEngine(t *testing.T) {
	t.Parallel()
	base := endpoints.Endpoint{Name: "pod.llm.a", Pod: "uid-a", URL: "http://10.0.0.1:8000", Engine: "vllm", Devices: []string{"gpu-0"}}
	with := func(change func(*endpoints.Endpoint)) []endpoints.Endpoint {
		e := base
		change(&e)
		return []endpoints.Endpoint{e}
	}
	annotated := func(key, value string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Annotations = map[string]string{key: value, "other": "x"} }
	}
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		want   []endpoints.Endpoint
		odd    bool
	}{
		"as it is":         {func(*corev1.Pod) {}, []endpoints.Endpoint{base}, false},
		"port by name":     {annotated(PortAnnotation, "metrics"), with(func(e *endpoints.Endpoint) { e.URL = "http://10.0.0.1:9090" }), false},
		"port by number":   {annotated(PortAnnotation, "8001"), with(func(e *endpoints.Endpoint) { e.URL = "http://10.0.0.1:8001" }), false},
		"accelerator":      {annotated(AcceleratorAnnotation, "H100"), with(func(e *endpoints.Endpoint) { e.Accelerator = "H100" }), false},
		"the first port":   {func(p *corev1.Pod) { p.Spec.Containers[1].Ports = nil }, with(func(e *endpoints.Endpoint) { e.URL = "http://10.0.0.1:9090" }), false},
		"IPv6":             {func(p *corev1.Pod) { p.Status.PodIP = "fd00::1" }, with(func(e *endpoints.Endpoint) { e.URL = "http://[fd00::1]:8000" }), false},
		"no such port":     {annotated(PortAnnotation, "grpc"), nil, true},
		"no port":          {annotated(PortAnnotation, "0"), nil, true},
		"unknown engine":   {func(p *corev1.Pod) { p.Labels[EngineLabel] = "ollama" }, nil, true},
		"no address yet":   {func(p *corev1.Pod) { p.Status.PodIP = "" }, nil, false},
		"one that is over": {func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }, nil, false},
	} {
		pod := engineOf("a", c.change)
		stripped, err := strip(pod.DeepCopy())
		if err != nil {
			t.Fatal(err)
		}
		for _, object := range []any{pod, stripped} {
			list, odd := enginesOf([]any{object, "something else"}, func(uid string) []string {
				if uid != "uid-a" {
					t.Errorf("asked for the devices of %s", uid)
				}
				return []string{"gpu-0"}
			})
			if diff := cmp.Diff(c.want, list); diff != "" || (len(odd) > 0) != c.odd {
				t.Errorf("%s: odd %v, diff %s", name, odd, diff)
			}
		}
	}
}

// engines collects what Engines tell.
type engines struct {
	mu    sync.Mutex
	list  []endpoints.Endpoint
	calls int
	news  chan struct{}
}

func (e *engines) set(list []endpoints.Endpoint) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = list
	e.calls++
	select {
	case e.news <- struct{}{}:
	default:
	}
	return nil
}

func (e *engines) until(t *testing.T, what string, accept func([]endpoints.Endpoint) bool) {
	t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	for {
		e.mu.Lock()
		ok := accept(e.list)
		e.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-e.news:
		case <-deadline.C:
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func names(list []endpoints.Endpoint) (names []string) {
	for _, e := range list {
		names = append(names, e.Name)
	}
	return names
}

func TestTheEnginesOfANodeAreFollowed(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset(engineOf("a"))
	asked := make(chan clienttesting.ListRestrictions, 8)
	client.PrependReactor("list", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		asked <- action.(clienttesting.ListAction).GetListRestrictions()
		return false, nil, nil
	})
	var mu sync.Mutex
	devices := map[string][]string{}
	devicesChanged := make(chan struct{}, 1)
	got := &engines{news: make(chan struct{}, 1)}
	pods := NewPods(PodsOptions{Client: client, Node: "node-1"})
	e := NewEngines(EnginesOptions{
		Pods: pods, Set: got.set, Room: 2, DevicesChanged: devicesChanged,
		Devices: func(uid string) []string { mu.Lock(); defer mu.Unlock(); return devices[uid] },
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	go func() { done <- pods.Run(ctx) }()
	go func() { done <- e.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-done, <-done); err != nil {
			t.Error(err)
		}
	})
	got.until(t, "a", func(l []endpoints.Endpoint) bool { return slices.Equal(names(l), []string{"pod.llm.a"}) })
	if r := <-asked; r.Fields.String() != "spec.nodeName=node-1" || !r.Labels.Empty() {
		t.Errorf("asked for pods with fields %s, labels %s", r.Fields, r.Labels)
	}
	mu.Lock()
	devices["uid-a"] = []string{"gpu-0"}
	mu.Unlock()
	devicesChanged <- struct{}{}
	got.until(t, "its device", func(l []endpoints.Endpoint) bool { return len(l) == 1 && slices.Equal(l[0].Devices, []string{"gpu-0"}) })
	for _, name := range []string{"c", "b"} {
		if _, err := client.CoreV1().Pods("llm").Create(t.Context(), engineOf(name), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	got.until(t, "as many as there is room for", func(l []endpoints.Endpoint) bool {
		return slices.Equal(names(l), []string{"pod.llm.a", "pod.llm.b"})
	})
	if err := client.CoreV1().Pods("llm").Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	got.until(t, "the next in the room", func(l []endpoints.Endpoint) bool {
		return slices.Equal(names(l), []string{"pod.llm.b", "pod.llm.c"})
	})
}

func TestEnginesAreNotTakenAwayWhileTheServerIsSilent(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset(engineOf("a"))
	client.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("connection refused")
	})
	got := &engines{news: make(chan struct{}, 1)}
	signal := make(chan struct{})
	pods := NewPods(PodsOptions{Client: client, Node: "node-1"})
	e := NewEngines(EnginesOptions{Pods: pods, Set: got.set, Room: 2, DevicesChanged: signal})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	go func() { done <- pods.Run(ctx) }()
	go func() { done <- e.Run(ctx) }()
	for range 3 { // it looks, and does not know yet
		signal <- struct{}{}
	}
	cancel()
	if err := errors.Join(<-done, <-done); err != nil || got.calls != 0 {
		t.Errorf("told %d times, %v", got.calls, err)
	}
}
