package kube

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/hearth-dev/hearth/router/feed"
	"github.com/hearth-dev/hearth/router/pool"
)

// told is what a Cluster told last.
type told struct {
	mu    sync.Mutex
	pods  map[string][]pool.Pod // by pool; a pool that is left out keeps what it had
	nodes []feed.Node
	calls int
	news  chan struct{}
}

func newTold() *told { return &told{pods: map[string][]pool.Pod{}, news: make(chan struct{}, 1)} }

func (o *told) note() {
	o.calls++
	select {
	case o.news <- struct{}{}:
	default:
	}
}

func (o *told) setPods(pods map[string][]pool.Pod) {
	o.mu.Lock()
	defer o.mu.Unlock()
	maps.Copy(o.pods, pods)
	o.note()
}

func (o *told) setNodes(nodes []feed.Node) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.nodes = nodes
	o.note()
}

// until waits for a state that the condition accepts.
func (o *told) until(t *testing.T, what string, accept func(o *told) bool) {
	t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	for {
		o.mu.Lock()
		ok := accept(o)
		o.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-o.news:
		case <-deadline.C:
			o.mu.Lock()
			defer o.mu.Unlock()
			t.Fatalf("waited in vain for %s: pods %+v, nodes %+v", what, o.pods, o.nodes)
		}
	}
}

func (o *told) untilPods(t *testing.T, poolName string, names ...string) {
	t.Helper()
	o.until(t, strings.Join(names, ", "), func(o *told) bool {
		list, some := o.pods[poolName]
		var have []string
		for _, p := range list {
			have = append(have, p.Name)
		}
		return some && slices.Equal(have, names)
	})
}

// eventually waits for what brings no call.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func follow(t *testing.T, client Client, o *told, pools ...pool.PoolConfig) *Cluster {
	t.Helper()
	return followWith(t, Options{
		Client: client, Namespace: "llm", Agents: Agents{Namespace: "hearth-system", Service: "hearth-agents", Port: "report"},
		SetPods: o.setPods, SetNodes: o.setNodes,
	}, pools)
}

func followWith(t *testing.T, opts Options, pools []pool.PoolConfig) *Cluster {
	t.Helper()
	c, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	c.SetPools(pools)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run ended with %v", err)
		}
	})
	return c
}

func poolOf(name, selector string) pool.PoolConfig {
	return pool.PoolConfig{Name: name, Pods: pool.PodsConfig{Selector: selector, Port: "http"}}
}

func TestPodsAreFollowed(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset(enginePod("a", "10.0.0.1"))
	o := newTold()
	c := follow(t, client, o, poolOf("m", "app=m"), pool.PoolConfig{Name: "static"})
	o.untilPods(t, "m", "a")
	eventually(t, "the list", c.Listed)
	pods := client.CoreV1().Pods("llm")
	if _, err := pods.Create(t.Context(), enginePod("b", "10.0.0.2"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	o.untilPods(t, "m", "a", "b")
	unready := enginePod("b", "10.0.0.2", func(p *corev1.Pod) { p.Status.Conditions[1].Status = corev1.ConditionFalse })
	if _, err := pods.UpdateStatus(t.Context(), unready, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	o.until(t, "b unready", func(o *told) bool { return len(o.pods["m"]) == 2 && !o.pods["m"][1].Ready })
	if err := pods.Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	o.untilPods(t, "m", "b")
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, some := o.pods["static"]; some {
		t.Error("a pool without pods was told of")
	}
}

func TestAPoolWithoutPodsIsListedToo(t *testing.T) {
	t.Parallel()
	o := newTold()
	c := follow(t, fake.NewClientset(), o, poolOf("m", "app=m"))
	o.untilPods(t, "m")
	eventually(t, "the list", c.Listed)
}

func TestAServerThatCannotBeAskedIsToldAndAskedAgain(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset(enginePod("a", "10.0.0.1"))
	var up atomic.Bool
	client.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		return !up.Load(), nil, errors.New("connection refused")
	})
	o := newTold()
	c := follow(t, client, o, poolOf("m", "app=m"))
	eventually(t, "the problem", func() bool {
		texts := c.Problems()
		return len(texts) == 1 && strings.Contains(texts[0], "were not read yet") && strings.Contains(texts[0], "connection refused")
	})
	o.mu.Lock()
	if _, some := o.pods["m"]; some || c.Listed() {
		t.Errorf("told %v of pods that nobody listed", o.pods)
	}
	o.mu.Unlock()
	up.Store(true)
	o.untilPods(t, "m", "a")
	eventually(t, "the list", c.Listed)
}

func TestWhileTheServerIsAwayTheLastStateStands(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset(enginePod("a", "10.0.0.1"), enginePod("b", "10.0.0.2"))
	var down atomic.Bool
	watches := make(chan *watch.RaceFreeFakeWatcher, 16)
	client.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		return down.Load(), nil, errors.New("connection refused")
	})
	client.PrependWatchReactor("pods", func(clienttesting.Action) (bool, watch.Interface, error) {
		if down.Load() {
			return true, nil, errors.New("connection refused")
		}
		w := watch.NewRaceFreeFake()
		watches <- w
		return true, w, nil
	})
	o := newTold()
	c := follow(t, client, o, poolOf("m", "app=m"))
	o.untilPods(t, "m", "a", "b")
	w := <-watches
	down.Store(true)
	w.Error(&metav1.Status{Status: metav1.StatusFailure, Code: 410, Reason: metav1.StatusReasonExpired})
	eventually(t, "the problem", func() bool {
		texts := c.Problems()
		return len(texts) == 1 && strings.Contains(texts[0], "the last state stands")
	})
	// Whatever else happens meanwhile, the pods stay.
	c.SetPools([]pool.PoolConfig{poolOf("m", "app=m"), poolOf("again", "app=m")})
	o.untilPods(t, "again", "a", "b")
	o.untilPods(t, "m", "a", "b")
	if !c.Listed() {
		t.Error("what was listed once is listed")
	}
	if err := client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "llm", "a"); err != nil {
		t.Fatal(err)
	}
	down.Store(false)
	o.untilPods(t, "m", "b")
}

func TestANewSelectorTakesOverOnceItIsListed(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset(enginePod("a", "10.0.0.1"), enginePod("b", "10.0.0.2", func(p *corev1.Pod) { p.Labels["app"] = "other" }))
	hold := make(chan struct{})
	client.PrependReactor("list", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if action.(clienttesting.ListAction).GetListRestrictions().Labels.String() == "app=other" {
			<-hold
		}
		return false, nil, nil
	})
	o := newTold()
	c := follow(t, client, o, poolOf("m", "app=m"))
	o.untilPods(t, "m", "a")
	o.mu.Lock()
	calls := o.calls
	o.mu.Unlock()
	c.SetPools([]pool.PoolConfig{poolOf("m", "app=other")})
	o.until(t, "another look", func(o *told) bool { return o.calls > calls })
	o.untilPods(t, "m", "a")
	close(hold)
	o.untilPods(t, "m", "b")
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.watches) != 1 {
		t.Errorf("%d watches for one pool", len(c.watches))
	}
}

func TestAgentsAreFollowed(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset(slice("a", agentAt("node-1", "10.0.0.1", false)))
	o := newTold()
	follow(t, client, o)
	o.until(t, "node-1", func(o *told) bool {
		return slices.Equal(o.nodes, []feed.Node{{Address: "10.0.0.1:7411", Name: "node-1"}})
	})
	moved := slice("a", agentAt("node-1", "10.0.0.7", false), agentAt("node-2", "10.0.0.2", false))
	if _, err := client.DiscoveryV1().EndpointSlices("hearth-system").Update(t.Context(), moved, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	o.until(t, "node-1 elsewhere", func(o *told) bool {
		return slices.Equal(o.nodes, []feed.Node{{Address: "10.0.0.7:7411", Name: "node-1"}, {Address: "10.0.0.2:7411", Name: "node-2"}})
	})
}

func TestAClusterNeedsAClientAndSomebodyToTell(t *testing.T) {
	t.Parallel()
	if _, err := New(Options{}); err == nil {
		t.Error("made without a client")
	}
}
