package kube

import (
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ktesting "k8s.io/client-go/testing"
)

func TestAConditionOfTheNodeIsWrittenWhenItChangesAndWithAHeartbeatEveryFiveMinutes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ready := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"}
		client, server, stop := start(t, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "node-1"}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{ready}},
		})
		defer stop()
		var writes atomic.Int64
		var refused atomic.Bool
		server.PrependReactor("patch", "nodes", func(action ktesting.Action) (bool, runtime.Object, error) {
			if action.GetSubresource() != "status" {
				t.Errorf("%q of a node is patched", action.GetSubresource())
			}
			writes.Add(1)
			return refused.Load(), nil, apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "node-1", nil)
		})
		// set gives the node's condition after it was set, and how many writes that took.
		set := func(status corev1.ConditionStatus, reason, message string) (corev1.NodeCondition, int64) {
			t.Helper()
			writes.Store(0)
			client.SetNodeCondition(corev1.NodeCondition{Type: "hearth.dev/X", Status: status, Reason: reason, Message: message})
			synctest.Wait()
			node, err := server.CoreV1().Nodes().Get(t.Context(), "node-1", metav1.GetOptions{})
			if err != nil || len(node.Status.Conditions) != 2 || !slices.Contains(node.Status.Conditions, ready) {
				t.Fatalf("the node is %+v, %v; want the conditions of others as they were", node.Status, err)
			}
			at := slices.IndexFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == "hearth.dev/X" })
			return node.Status.Conditions[at], writes.Load()
		}
		first, n := set(corev1.ConditionTrue, "Full", "all")
		if n != 1 || first.Status != corev1.ConditionTrue || first.Reason != "Full" || first.LastTransitionTime.IsZero() || first.LastHeartbeatTime.IsZero() {
			t.Fatalf("%d writes gave %+v", n, first)
		}
		time.Sleep(time.Minute)
		if c, n := set(corev1.ConditionTrue, "Full", "all"); n != 0 || c != first {
			t.Errorf("what had not changed was written %d times: %+v", n, c)
		}
		time.Sleep(HeartbeatEvery)
		if c, n := set(corev1.ConditionTrue, "Full", "all"); n != 1 || !c.LastTransitionTime.Equal(&first.LastTransitionTime) || c.LastHeartbeatTime.Equal(&first.LastHeartbeatTime) {
			t.Errorf("a heartbeat that was due took %d writes and gave %+v", n, c)
		}
		if c, n := set(corev1.ConditionTrue, "Fuller", "more"); n != 1 || c.Reason != "Fuller" || !c.LastTransitionTime.Equal(&first.LastTransitionTime) {
			t.Errorf("another reason took %d writes and gave %+v", n, c)
		}
		if c, n := set(corev1.ConditionFalse, "Partial", strings.Repeat("x", 5000)); n != 1 || c.LastTransitionTime.Equal(&first.LastTransitionTime) || len(c.Message) != 1024 {
			t.Errorf("another status took %d writes and gave %+v", n, c)
		}
		refused.Store(true)
		if _, n := set(corev1.ConditionTrue, "Full", "all"); n != 1 || len(client.Problems()) != 1 {
			t.Errorf("a refusal took %d writes, problems %q", n, client.Problems())
		}
		refused.Store(false)
		time.Sleep(time.Minute)
		synctest.Wait()
		if c, _ := set(corev1.ConditionTrue, "Full", "all"); c.Reason != "Full" || len(client.Problems()) != 0 {
			t.Errorf("after the right was given the condition is %+v, problems %q", c, client.Problems())
		}
	})
}
