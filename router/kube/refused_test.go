package kube

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/hearth-dev/hearth/router/pool"
)

// lines is a log that is counted.
type lines struct {
	mu   sync.Mutex
	text []string
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, string(p))
	return len(p), nil
}

func (l *lines) count(part string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.text {
		if strings.Contains(line, part) {
			n++
		}
	}
	return n
}

// forbid lets the lists of a resource in a namespace fail while err gives an error.
func forbid(client *fake.Clientset, resource, namespace string, err func() error) {
	client.PrependReactor("list", resource, func(action clienttesting.Action) (bool, runtime.Object, error) {
		if action.GetNamespace() != namespace {
			return false, nil, nil
		}
		why := err()
		return why != nil, nil, why
	})
}

func forbidden(resource string) error {
	return apierrors.NewForbidden(corev1.Resource(resource), "", errors.New("no RoleBinding gives it"))
}

// statsOf gives the watch of a pool, "" that of the agents.
func statsOf(t *testing.T, c *Cluster, poolName string) WatchStats {
	t.Helper()
	for _, s := range c.Stats() {
		if s.Pool == poolName {
			return s
		}
	}
	t.Fatalf("no watch of pool %q in %+v", poolName, c.Stats())
	return WatchStats{}
}

func TestAForbiddenPoolKeepsNoOtherFromBeingServed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset(enginePod("a", "10.0.0.1"), enginePod("b", "10.0.0.2", func(p *corev1.Pod) { p.Namespace = "team" }))
		var allowed atomic.Bool
		no := func(resource string) func() error {
			return func() error {
				if allowed.Load() {
					return nil
				}
				return forbidden(resource)
			}
		}
		forbid(client, "pods", "team", no("pods"))
		forbid(client, "endpointslices", "hearth-system", no("endpointslices"))
		o, log := newTold(), &lines{}
		theirs := poolOf("theirs", "app=m")
		theirs.Pods.Namespace = "team"
		c, stop := run(t, Options{
			Client: client, Namespace: "llm", Agents: Agents{Namespace: "hearth-system", Service: "hearth-agents", Port: "report"},
			SetPods: o.setPods, SetNodes: o.setNodes, Log: slog.New(slog.NewTextHandler(log, nil)),
		}, poolOf("ours", "app=m"), theirs)
		defer stop()
		synctest.Wait()
		if !c.Listed() {
			t.Error("a pool that is forbidden keeps the router from being ready")
		}
		time.Sleep(5 * time.Minute) // it is asked again and again
		synctest.Wait()
		o.untilPods(t, "ours", "a")
		if _, some := o.pods["theirs"]; some {
			t.Errorf("pods %v of a pool that is forbidden", o.pods["theirs"])
		}
		texts := strings.Join(c.Problems(), "\n")
		for _, want := range []string{`namespace team were not read yet, pool theirs has no endpoints`, "service hearth-system/hearth-agents were not read yet, no agents are found", "no RoleBinding gives it"} {
			if !strings.Contains(texts, want) {
				t.Errorf("problems %q do not say %q", texts, want)
			}
		}
		if n := log.count("the API server refuses what the router is to read"); n != 2 {
			t.Errorf("it was logged %d times, want once for the pool and once for the agents", n)
		}
		if s := statsOf(t, c, "theirs"); s.Listed || !s.Refused || s.Stale != 5*time.Minute {
			t.Errorf("the forbidden pool's watch is %+v", s)
		}
		if s := statsOf(t, c, ""); s.Listed || !s.Refused {
			t.Errorf("the agents' watch is %+v", s)
		}
		if s := statsOf(t, c, "ours"); !s.Listed || s.Refused || s.Stale != 0 || s.Events != 1 {
			t.Errorf("the allowed pool's watch is %+v", s)
		}
		allowed.Store(true)
		time.Sleep(time.Minute)
		synctest.Wait()
		o.untilPods(t, "theirs", "b")
		if texts := c.Problems(); len(texts) > 0 {
			t.Errorf("problems %q are left", texts)
		}
	})
}

func TestAPoolThatCannotBeListedHoldsTheRouterUpForABoundedTime(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]func(context.Context) error{
		"fails": func(context.Context) error { return apierrors.NewInternalError(errors.New("etcd is away")) },
		"hangs": never,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				client := slow{fake.NewClientset(enginePod("a", "10.0.0.1")), "team", answer}
				o := newTold()
				theirs := poolOf("theirs", "app=m")
				theirs.Pods.Namespace = "team"
				c, stop := run(t, Options{Client: client, Namespace: "llm", SetPods: o.setPods, SetNodes: o.setNodes}, poolOf("ours", "app=m"), theirs)
				defer stop()
				time.Sleep(answerWithin - time.Second)
				synctest.Wait()
				if c.Listed() {
					t.Error("it does not wait for a pool that may yet be listed")
				}
				time.Sleep(time.Second)
				synctest.Wait()
				if !c.Listed() {
					t.Error("a pool that cannot be listed keeps the router from being ready")
				}
				if texts := c.Problems(); len(texts) != 1 || !strings.Contains(texts[0], "pool theirs has no endpoints") {
					t.Errorf("problems %q", texts)
				}
			})
		})
	}
}

func TestARouterWhoseServerAnswersForNoPoolIsNotReady(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset()
		forbid(client, "pods", "llm", func() error { return errors.New("connection refused") })
		o := newTold()
		c, stop := run(t, Options{Client: client, Namespace: "llm", SetPods: o.setPods, SetNodes: o.setNodes}, poolOf("m", "app=m"), poolOf("n", "app=n"))
		defer stop()
		time.Sleep(time.Hour)
		synctest.Wait()
		if c.Listed() {
			t.Error("it counts as listed what nobody answered for")
		}
	})
}

func TestAQuestionThatIsNotAnsweredIsGivenUpAndAskedAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		from := podSource(slow{fake.NewClientset(enginePod("a", "10.0.0.1")), "llm", func(ctx context.Context) error {
			if asked++; asked < 3 {
				return never(ctx)
			}
			return nil
		}}, scope{"llm", "app=m"})
		c, err := New(Options{Client: from.client, SetPods: newTold().setPods, SetNodes: newTold().setNodes})
		if err != nil {
			t.Fatal(err)
		}
		f := c.start(t.Context(), "pods", from)
		defer f.end()
		time.Sleep(quietFor)
		synctest.Wait()
		if text := f.problem(time.Now(), "none"); text != "pods were not read yet, none: no answer for 10s" {
			t.Errorf("while nothing is answered it says %q", text)
		}
		time.Sleep(askTimeout)
		synctest.Wait()
		if text := f.problem(time.Now(), "none"); !strings.Contains(text, errNoAnswer.Error()) {
			t.Errorf("after it gave up it says %q", text)
		}
		time.Sleep(askTimeout + time.Minute)
		synctest.Wait()
		if text := f.problem(time.Now(), "none"); text != "" || !f.informer.HasSynced() {
			t.Errorf("after an answer it says %q", text)
		}
	})
}

// run runs a Cluster until stop is called, which a bubble needs before it ends.
func run(t *testing.T, opts Options, pools ...pool.PoolConfig) (c *Cluster, stop func()) {
	t.Helper()
	c, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	c.SetPools(pools)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	return c, func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run ended with %v", err)
		}
	}
}
