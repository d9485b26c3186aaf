package kube

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/nodeagent/netattr"
)

func TestAPodIsToldByTheUIDThatItsCgroupHas(t *testing.T) {
	t.Parallel()
	const hash = "0123456789abcdef0123456789abcdef"
	static := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "kube-system", Name: "etcd-node-1", UID: "uid-of-the-mirror",
		Annotations: map[string]string{"kubernetes.io/config.hash": hash, "kubernetes.io/config.mirror": hash, "kubernetes.io/config.source": "file"},
	}}
	plain := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "llm", Name: "tool", UID: "uid-1", Labels: map[string]string{"app": "tool"}, Annotations: map[string]string{"kubernetes.io/config.hash": "odd"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i", Ports: []corev1.ContainerPort{{ContainerPort: 80}}}}},
		Status:     corev1.PodStatus{PodIP: "10.0.0.1"},
	}
	for _, c := range []struct {
		pod  *corev1.Pod
		want netattr.Pod
	}{
		{static, netattr.Pod{UID: hash, Namespace: "kube-system", Name: "etcd-node-1"}},
		{plain, netattr.Pod{UID: "uid-1", Namespace: "llm", Name: "tool"}},
		{engineOf("a"), netattr.Pod{UID: "uid-a", Namespace: "llm", Name: "a", Engine: true}},
	} {
		kept, err := strip(c.pod.DeepCopy())
		if err != nil {
			t.Fatal(err)
		}
		if got := podOf(kept.(*corev1.Pod)); got != c.want || podOf(c.pod) != c.want {
			t.Errorf("told as %+v, want %+v", got, c.want)
		}
	}
	kept, err := strip(plain.DeepCopy())
	want := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "llm", Name: "tool", UID: "uid-1", Annotations: map[string]string{"kubernetes.io/config.hash": "odd"}}}
	if diff := cmp.Diff(want, kept); diff != "" || err != nil {
		t.Errorf("of a pod that is no engine more than its name is kept: %v %s", err, diff)
	}
}

func TestOfManyPodsThatWentTheLatestAreRemembered(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := NewPods(PodsOptions{Client: fake.NewClientset(), Node: "node-1"})
		const many = 3 * local.MaxPods
		for i := range many {
			p.forget(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "jobs", Name: fmt.Sprint("job-", i), UID: types.UID(fmt.Sprintf("uid-%06d", i))}})
			time.Sleep(time.Millisecond)
		}
		list := p.list(time.Now())
		if first := fmt.Sprintf("uid-%06d", many-local.MaxPods); len(list) != local.MaxPods || list[0].UID != first {
			t.Errorf("%d are told, from %s, want %d from %s", len(list), list[0].UID, local.MaxPods, first)
		}
	})
}

// dataRole takes pods.
type dataRole struct {
	mu      sync.Mutex
	epoch   int64 // 0: it does not answer
	refuse  error
	calls   int
	pods    []netattr.Pod
	changed chan struct{}
}

func (d *dataRole) Snapshot() (local.State, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return local.State{Epoch: d.epoch}, d.epoch != 0
}

func (d *dataRole) Subscribe() (<-chan struct{}, func()) { return d.changed, func() {} }

func (d *dataRole) SetPods(_ context.Context, pods []netattr.Pod) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls++
	if d.refuse != nil {
		return d.refuse
	}
	d.pods = pods
	return nil
}

// become changes the data role and signals.
func (d *dataRole) become(epoch int64, refuse error) {
	d.mu.Lock()
	d.epoch, d.refuse = epoch, refuse
	d.mu.Unlock()
	select {
	case d.changed <- struct{}{}:
	default:
	}
}

// told are the names of the pods, and in how many calls since the last look.
func (d *dataRole) told() (names []string, calls int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, p := range d.pods {
		names = append(names, p.Name)
	}
	calls, d.calls = d.calls, 0
	return names, calls
}

func TestTheDataRoleIsToldThePodsOfItsNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := fake.NewClientset(engineOf("a"))
		pods := NewPods(PodsOptions{Client: server, Node: "node-1"})
		data := &dataRole{changed: make(chan struct{}, 1)}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 2)
		go func() { done <- pods.Run(ctx) }()
		go func() { done <- pods.Tell(ctx, data) }()
		defer func() {
			cancel()
			if err := errors.Join(<-done, <-done); err != nil {
				t.Error(err)
			}
		}()
		expect := func(when string, names []string, calls int) {
			t.Helper()
			synctest.Wait()
			if got, n := data.told(); !slices.Equal(got, names) || n != calls {
				t.Errorf("%s: told %v in %d calls, want %v in %d", when, got, n, names, calls)
			}
		}
		add := func(name string) {
			t.Helper()
			if _, err := server.CoreV1().Pods("llm").Create(ctx, engineOf(name), metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		time.Sleep(time.Minute)
		expect("while the data role does not answer", nil, 0)
		data.become(1, nil)
		expect("when it answers", []string{"a"}, 1)
		time.Sleep(time.Minute)
		data.become(1, nil)
		expect("while nothing changes", []string{"a"}, 0)
		add("b")
		add("c")
		add("d")
		expect("after the first change", []string{"a", "b"}, 1)
		time.Sleep(2 * time.Second)
		expect("a second later", []string{"a", "b", "c", "d"}, 1)
		data.become(2, nil)
		expect("after another start of the data role", []string{"a", "b", "c", "d"}, 1)
		time.Sleep(time.Minute)
		data.become(2, errors.New("no"))
		add("e")
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if got, n := data.told(); len(got) != 4 || n < 5 || n > 20 {
			t.Errorf("what is refused is told %d times in 10 minutes and gave %v", n, got)
		}
		data.become(2, nil)
		time.Sleep(2 * time.Minute)
		expect("when it is taken", []string{"a", "b", "c", "d", "e"}, 1)
		if err := server.CoreV1().Pods("llm").Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		expect("a minute after a deletion", []string{"a", "b", "c", "d", "e"}, 0)
		time.Sleep(remembered)
		add("f")
		time.Sleep(time.Second)
		expect("long after it", []string{"b", "c", "d", "e", "f"}, 1)
	})
}

func TestOfTooManyPodsEnginesAreTold(t *testing.T) {
	t.Parallel()
	pods := NewPods(PodsOptions{Client: fake.NewClientset(), Node: "node-1"})
	for i := range local.MaxPods + 8 {
		p := engineOf(fmt.Sprintf("%04d", i), func(p *corev1.Pod) {
			if i < local.MaxPods {
				p.Labels = nil
			}
		})
		if err := pods.informer.GetStore().Add(p); err != nil {
			t.Fatal(err)
		}
	}
	pods.forget(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: types.UID("gone")}})
	list := pods.list(time.Now())
	engines := 0
	for _, p := range list {
		if p.Engine {
			engines++
		}
		if p.UID == "gone" {
			t.Error("a pod that is gone has the room of one that is there")
		}
	}
	if len(list) != local.MaxPods || engines != 8 {
		t.Errorf("told %d pods, %d of them engines", len(list), engines)
	}
}
