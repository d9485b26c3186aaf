package kube

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
)

// slow is a client whose questions for pods of a namespace wait before they are
// answered. A reactor of the fake could not: it has the fake's lock.
type slow struct {
	kubernetes.Interface
	namespace string
	wait      func(context.Context) error
}

func (s slow) CoreV1() corev1client.CoreV1Interface { return slowCore{s.Interface.CoreV1(), s} }

// IsWatchListSemanticsUnSupported says what the fake inside says.
func (slow) IsWatchListSemanticsUnSupported() bool { return true }

type slowCore struct {
	corev1client.CoreV1Interface
	of slow
}

func (c slowCore) Pods(namespace string) corev1client.PodInterface {
	pods := c.CoreV1Interface.Pods(namespace)
	if namespace != c.of.namespace {
		return pods
	}
	return slowPods{pods, c.of.wait}
}

type slowPods struct {
	corev1client.PodInterface
	wait func(context.Context) error
}

func (p slowPods) List(ctx context.Context, o metav1.ListOptions) (*corev1.PodList, error) {
	if err := p.wait(ctx); err != nil {
		return nil, err
	}
	return p.PodInterface.List(ctx, o)
}

func (p slowPods) Watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	if err := p.wait(ctx); err != nil {
		return nil, err
	}
	return p.PodInterface.Watch(ctx, o)
}

// after waits for a time, or for the end of who asks.
func after(d time.Duration) func(context.Context) error {
	return func(ctx context.Context) error {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func never(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

func TestASlowAPIServerIsWaitedForAndFollowed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		inner := fake.NewClientset(enginePod("a", "10.0.0.1"))
		o := newTold()
		c, stop := run(t, Options{Client: slow{inner, "llm", after(20 * time.Second)}, Namespace: "llm", SetPods: o.setPods, SetNodes: o.setNodes}, poolOf("m", "app=m"))
		defer stop()
		time.Sleep(15 * time.Second)
		synctest.Wait()
		if texts := strings.Join(c.Problems(), "\n"); c.Listed() || !strings.Contains(texts, "no answer for 15s") {
			t.Errorf("while nothing is answered it is ready: %t, and says %q", c.Listed(), texts)
		}
		time.Sleep(6 * time.Second)
		synctest.Wait()
		o.untilPods(t, "m", "a")
		if !c.Listed() {
			t.Error("it is not ready with the list")
		}
		time.Sleep(time.Minute)
		if _, err := inner.CoreV1().Pods("llm").Create(t.Context(), enginePod("b", "10.0.0.2"), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		o.untilPods(t, "m", "a", "b")
		if texts := c.Problems(); len(texts) > 0 {
			t.Errorf("problems %q", texts)
		}
	})
}

// begun is a client whose lists come as watches that begin and bring nothing.
type begun struct{ kubernetes.Interface }

func (b begun) CoreV1() corev1client.CoreV1Interface { return begunCore{b.Interface.CoreV1()} }

type begunCore struct{ corev1client.CoreV1Interface }

func (c begunCore) Pods(namespace string) corev1client.PodInterface {
	return begunPods{c.CoreV1Interface.Pods(namespace)}
}

type begunPods struct{ corev1client.PodInterface }

func (begunPods) Watch(context.Context, metav1.ListOptions) (watch.Interface, error) {
	return watch.NewFake(), nil
}

func TestAListThatBeginsAndDoesNotEndIsTold(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		o := newTold()
		c, stop := run(t, Options{Client: begun{fake.NewClientset()}, Namespace: "llm", SetPods: o.setPods, SetNodes: o.setNodes}, poolOf("m", "app=m"))
		defer stop()
		time.Sleep(15 * time.Second)
		synctest.Wait()
		const want = "were not read yet, pool m has no endpoints: not all has come within 15s"
		if texts := strings.Join(c.Problems(), "\n"); c.Listed() || !strings.Contains(texts, want) {
			t.Errorf("it is ready: %t, and says %q, want %q", c.Listed(), texts, want)
		}
	})
}
