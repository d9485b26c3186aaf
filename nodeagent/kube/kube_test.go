package kube

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"

	"github.com/hearth-dev/hearth/dradriver"
)

var claimObject = dradriver.Object{Kind: KindClaim, Namespace: "llm", Name: "smol", UID: "uid-1"}

// newClaim has two devices of ours and one of another driver.
func newClaim() *resourceapi.ResourceClaim {
	share := types.UID("share-1")
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "llm", Name: "smol", UID: "uid-1"},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{
				{Request: "gpu", Driver: dradriver.Name, Pool: "node-1", Device: "gpu-0000-1b-00-0"},
				{Request: "weights/cold", Driver: dradriver.Name, Pool: "node-1/weights", Device: "cold", ShareID: &share},
				{Request: "net", Driver: "nic.example", Pool: "node-1", Device: "nic-0"},
			},
		}}, ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "engine-0", UID: "uid-of-engine-0"}}},
	}
}

// start runs a client over a fake API server; the func ends it and waits.
func start(t *testing.T, objects ...runtime.Object) (*Client, *fake.Clientset, func()) {
	t.Helper()
	server := fake.NewClientset(objects...)
	client := New(Options{Client: server, Node: "node-1"})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- client.Run(ctx) }()
	return client, server, func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func condition(status metav1.ConditionStatus, reason, message string) []dradriver.DeviceCondition {
	return []dradriver.DeviceCondition{
		{Pool: "node-1/weights", Device: "cold", ShareID: "share-1", Condition: metav1.Condition{Type: "Prepared", Status: status, Reason: reason, Message: message}},
		{Pool: "node-1/weights", Device: "w-0123", Condition: metav1.Condition{Type: "Prepared", Status: status, Reason: reason}},
	}
}

func TestAConditionStandsInTheStatusOfTheDeviceItIsAbout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client, server, stop := start(t, newClaim())
		defer stop()
		read := func() []resourceapi.AllocatedDeviceStatus {
			claim, err := server.ResourceV1().ResourceClaims("llm").Get(t.Context(), "smol", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			return claim.Status.Devices
		}
		client.SetConditions(claimObject, condition(metav1.ConditionFalse, "Forbidden", "hub://org/smol is gated"))
		synctest.Wait()
		got := read()
		if len(got) != 1 || got[0].Device != "cold" || got[0].ShareID == nil || *got[0].ShareID != "share-1" || len(got[0].Conditions) != 1 ||
			got[0].Conditions[0].Reason != "Forbidden" || got[0].Conditions[0].LastTransitionTime.IsZero() {
			t.Fatalf("the status has %+v; want one condition, and none of a device that is not allocated", got)
		}
		first := got[0].Conditions[0].LastTransitionTime
		time.Sleep(time.Hour)
		client.SetConditions(claimObject, condition(metav1.ConditionFalse, "Forbidden", "still gated"))
		synctest.Wait()
		if c := read()[0].Conditions[0]; c.Message != "still gated" || !c.LastTransitionTime.Equal(&first) {
			t.Errorf("the same condition with another text became %+v; want the time of its change kept", c)
		}
		writes := len(server.Actions())
		client.SetConditions(claimObject, condition(metav1.ConditionFalse, "Forbidden", "still gated"))
		synctest.Wait()
		for _, action := range server.Actions()[writes:] {
			if action.GetVerb() != "get" {
				t.Errorf("nothing new was written with %s", action.GetVerb())
			}
		}
	})
}

func TestAClaimOfAnotherUIDIsNeitherWrittenNorTakenForTheOne(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client, server, stop := start(t, newClaim())
		defer stop()
		other := claimObject
		other.UID = "uid-0"
		client.SetConditions(other, condition(metav1.ConditionTrue, "Prepared", ""))
		synctest.Wait()
		for _, action := range server.Actions() {
			if action.GetVerb() != "get" {
				t.Errorf("%s of a claim that took the name of another", action.GetVerb())
			}
		}
		if state, err := client.Claim(t.Context(), claimObject); err != nil || !state.Exists || !state.AllocatedHere ||
			len(state.Pods) != 1 || state.Pods[0].Name != "engine-0" || state.Pods[0].UID != "uid-of-engine-0" {
			t.Errorf("the claim is %+v, %v", state, err)
		}
		if state, err := client.Claim(t.Context(), other); err != nil || state.Exists || state.AllocatedHere {
			t.Errorf("a claim that took the name of another is %+v, %v", state, err)
		}
		gone := claimObject
		gone.Name = "gone"
		if state, err := client.Claim(t.Context(), gone); err != nil || state.Exists {
			t.Errorf("a claim that is gone is %+v, %v", state, err)
		}
		elsewhere := New(Options{Client: server, Node: "node-2"})
		if state, err := elsewhere.Claim(t.Context(), claimObject); err != nil || !state.Exists || state.AllocatedHere {
			t.Errorf("a claim that another node has is %+v, %v", state, err)
		}
		server.PrependReactor("get", "resourceclaims", func(ktesting.Action) (bool, runtime.Object, error) {
			return true, nil, errors.New("no route to host")
		})
		if _, err := client.Claim(t.Context(), claimObject); err == nil {
			t.Error("an API server that does not answer was taken for a claim that is gone")
		}
	})
}

func TestEqualEventsAreCountedAndShowTheirObject(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client, server, stop := start(t)
		defer stop()
		for range 3 {
			client.Event(claimObject, true, "PullFailed", "hub://org/smol is gated: ask its owners for access")
			synctest.Wait()
			time.Sleep(time.Second)
		}
		list, err := server.CoreV1().Events("llm").List(t.Context(), metav1.ListOptions{})
		if err != nil || len(list.Items) != 1 {
			t.Fatalf("there are %d events, %v; want one", len(list.Items), err)
		}
		e := list.Items[0]
		if e.Count != 3 || e.Type != corev1.EventTypeWarning || e.Reason != "PullFailed" || e.Source.Host != "node-1" ||
			e.InvolvedObject.Kind != "ResourceClaim" || e.InvolvedObject.UID != "uid-1" || e.InvolvedObject.APIVersion != "resource.k8s.io/v1" {
			t.Errorf("the event is %+v", e)
		}
	})
}

func TestAnEventOfAClaimWithALongNameHasANameThatIsTaken(t *testing.T) {
	t.Parallel()
	at := time.Unix(1700000000, 1)
	for _, about := range []string{"smol", strings.Repeat("n", 253), strings.Repeat("a.", 126), strings.Repeat("n", 235) + "-" + strings.Repeat("n", 17)} {
		name := eventName(about, at)
		if bad := validation.IsDNS1123Subdomain(name); len(bad) > 0 || !strings.HasPrefix(name, about[:4]) {
			t.Errorf("the event of %s is named %s: %v", about, name, bad)
		}
	}
	if a, b := eventName(strings.Repeat("n", 253), at), eventName(strings.Repeat("n", 253), at.Add(1)); a == b {
		t.Errorf("two events are both named %s", a)
	}
}

func TestALongMessageIsCutAtTheEndOfARune(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("ü", maxMessage)
	if got := cut(text, maxMessage); len(got) > maxMessage || !strings.HasSuffix(got, "ü...") {
		t.Errorf("%d bytes remain, ending in %q", len(got), got[len(got)-8:])
	}
	if got := cut("short", maxMessage); got != "short" {
		t.Errorf("a short text became %q", got)
	}
}

func TestAnAPIServerThatIsDownBlocksNobodyAndIsToldLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client, server, stop := start(t, newClaim())
		defer stop()
		var down atomic.Bool
		down.Store(true)
		server.PrependReactor("*", "*", func(ktesting.Action) (bool, runtime.Object, error) {
			if down.Load() {
				return true, nil, errors.New("connection refused")
			}
			return false, nil, nil
		})
		client.SetConditions(claimObject, condition(metav1.ConditionFalse, "Forbidden", "old"))
		synctest.Wait()
		client.SetConditions(claimObject, condition(metav1.ConditionFalse, "Forbidden", "new"))
		for i := range 2 * maxWaiting {
			client.Event(dradriver.Object{Kind: KindPod, Namespace: "llm", Name: fmt.Sprint("pod-", i), UID: fmt.Sprint(i)}, false, "Pulling", "pulling")
		}
		synctest.Wait()
		stats := client.Stats()
		if stats.Waiting != maxWaiting || stats.Dropped < maxWaiting || stats.Sent != 0 {
			t.Fatalf("with the API server down: %+v", stats)
		}
		if problems := client.Problems(); len(problems) != 2 || !strings.Contains(problems[0], "connection refused") {
			t.Errorf("problems are %q; want one of events and one of claims", problems)
		}
		down.Store(false)
		time.Sleep(2 * retryLast)
		synctest.Wait()
		if stats := client.Stats(); stats.Waiting != 0 {
			t.Errorf("with the API server up again: %+v", stats)
		}
		claim, err := server.ResourceV1().ResourceClaims("llm").Get(t.Context(), "smol", metav1.GetOptions{})
		if err != nil || len(claim.Status.Devices) != 1 || claim.Status.Devices[0].Conditions[0].Message != "new" {
			t.Errorf("the claim's status is %+v, %v; want the newest condition", claim.Status.Devices, err)
		}
		if problems := client.Problems(); len(problems) != 0 {
			t.Errorf("problems are still %q", problems)
		}
	})
}

func TestWhatTheAPIServerRefusesForGoodIsNotTriedAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client, server, stop := start(t)
		defer stop()
		tries := 0
		server.PrependReactor("create", "events", func(ktesting.Action) (bool, runtime.Object, error) {
			tries++
			return true, nil, apierrors.NewInvalid(schema.GroupKind{Kind: "Event"}, "x", nil)
		})
		client.Event(claimObject, false, "Pulling", "pulling")
		time.Sleep(time.Hour)
		synctest.Wait()
		if stats := client.Stats(); tries != 1 || stats.Dropped != 1 || stats.Waiting != 0 {
			t.Errorf("%d tries, %+v", tries, stats)
		}
	})
}

func TestWhatWaitsAtTheEndIsSentBeforeRunReturns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := fake.NewClientset()
		client := New(Options{Client: server, Node: "node-1"})
		client.Event(claimObject, false, "Unprepared", "released")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := client.Run(ctx); err != nil {
			t.Fatal(err)
		}
		if stats := client.Stats(); stats.Sent != 1 {
			t.Errorf("at the end: %+v", stats)
		}
	})
}

func TestOnlyThePodOfTheUIDIsDeleted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client, server, stop := start(t)
		defer stop()
		client.DeletePod(dradriver.Object{Kind: KindPod, Namespace: "llm", Name: "engine", UID: "pod-1"})
		synctest.Wait()
		actions := server.Actions()
		if len(actions) != 1 {
			t.Fatalf("actions are %v", actions)
		}
		options := actions[0].(ktesting.DeleteAction).GetDeleteOptions()
		if options.Preconditions == nil || options.Preconditions.UID == nil || *options.Preconditions.UID != "pod-1" {
			t.Errorf("it was deleted under %+v", options.Preconditions)
		}
		if stats := client.Stats(); stats.Waiting != 0 || stats.Dropped != 0 {
			t.Errorf("a pod that was gone already gave %+v", stats)
		}
	})
}
