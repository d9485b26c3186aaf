package kube

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/hearth-dev/hearth/router/pool"
)

// enginePod is a Ready pod with an engine and a sidecar.
func enginePod(name, ip string, change ...func(*corev1.Pod)) *corev1.Pod {
	always := corev1.ContainerRestartPolicyAlways
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "llm", Name: name, UID: types.UID("uid-" + name), ResourceVersion: "1",
			Labels: map[string]string{"app": "m"}, Annotations: map[string]string{"note": "long"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubelet"}},
		},
		Spec: corev1.PodSpec{
			NodeName: "node-1",
			Containers: []corev1.Container{
				{Name: "proxy", Image: "proxy", Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: 9090}, {Name: "http", ContainerPort: 53, Protocol: corev1.ProtocolUDP}}},
				{Name: "engine", Image: "vllm", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8000, Protocol: corev1.ProtocolTCP}}},
			},
			InitContainers: []corev1.Container{{Name: "sidecar", RestartPolicy: &always, Ports: []corev1.ContainerPort{{Name: "side", ContainerPort: 7000}}}},
		},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: ip,
			Conditions:            []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}, {Type: corev1.PodReady, Status: corev1.ConditionTrue}},
			ContainerStatuses:     []corev1.ContainerStatus{{Name: "proxy", RestartCount: 4}, {Name: "engine", RestartCount: 2}},
			InitContainerStatuses: []corev1.ContainerStatus{{Name: "sidecar", RestartCount: 1}},
		},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func TestAPodBecomesWhatThePoolNeedsOfIt(t *testing.T) {
	t.Parallel()
	base := pool.Pod{UID: "uid-a", Namespace: "llm", Name: "a", Node: "node-1", URL: "http://10.0.0.1:8000", Ready: true, Restarts: 2}
	with := func(change func(*pool.Pod)) []pool.Pod { p := base; change(&p); return []pool.Pod{p} }
	for name, c := range map[string]struct {
		port   string
		change func(*corev1.Pod)
		want   []pool.Pod
		odd    bool
	}{
		"by name":            {"http", nil, []pool.Pod{base}, false},
		"by declared number": {"9090", nil, with(func(p *pool.Pod) { p.URL, p.Restarts = "http://10.0.0.1:9090", 4 }), false},
		"by any number":      {"8001", nil, with(func(p *pool.Pod) { p.URL, p.Restarts = "http://10.0.0.1:8001", 7 }), false},
		"of a sidecar":       {"side", nil, with(func(p *pool.Pod) { p.URL, p.Restarts = "http://10.0.0.1:7000", 1 }), false},
		"without the port":   {"grpc", nil, nil, true},
		"IPv6":               {"http", func(p *corev1.Pod) { p.Status.PodIP = "fd00::1" }, with(func(p *pool.Pod) { p.URL = "http://[fd00::1]:8000" }), false},
		"not ready":          {"http", func(p *corev1.Pod) { p.Status.Conditions[1].Status = corev1.ConditionFalse }, with(func(p *pool.Pod) { p.Ready = false }), false},
		"no condition":       {"http", func(p *corev1.Pod) { p.Status.Conditions = nil }, with(func(p *pool.Pod) { p.Ready = false }), false},
		"leaving":            {"http", func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }, with(func(p *pool.Pod) { p.Leaving = true }), false},
		"no address":         {"http", func(p *corev1.Pod) { p.Status.PodIP = "" }, nil, false},
		"ended":              {"http", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }, nil, false},
	} {
		p := enginePod("a", "10.0.0.1")
		if c.change != nil {
			c.change(p)
		}
		stripped, err := stripPod(p)
		if err != nil {
			t.Fatal(err)
		}
		pods, odd := podsOf([]any{stripped}, c.port)
		if diff := cmp.Diff(c.want, pods); diff != "" || (len(odd) > 0) != c.odd {
			t.Errorf("%s: odd %v, diff %s", name, odd, diff)
		}
	}
}

func TestPodsAreSorted(t *testing.T) {
	t.Parallel()
	pods, _ := podsOf([]any{enginePod("b", "10.0.0.2"), enginePod("a", "10.0.0.1"), "something else"}, "http")
	if len(pods) != 2 || pods[0].Name != "a" || !slices.IsSortedFunc(pods, func(a, b pool.Pod) int { return len(a.Name) - len(b.Name) }) {
		t.Errorf("pods %+v", pods)
	}
}

func TestAPodIsKeptSmall(t *testing.T) {
	t.Parallel()
	p := enginePod("a", "10.0.0.1")
	for range 200 {
		p.Spec.Containers[1].Env = append(p.Spec.Containers[1].Env, corev1.EnvVar{Name: "NAME", Value: "a long value that nobody needs"})
	}
	stripped, err := stripPod(p)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(stripped)
	if err != nil {
		t.Fatal(err)
	}
	if len(text) > 1100 {
		t.Errorf("a pod is kept in %d bytes: %s", len(text), text)
	}
}
