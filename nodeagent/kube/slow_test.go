package kube

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/test/sim/kubeapi"
)

// lagging is an API server at the end of a slow way; a negative lag never answers.
type lagging struct {
	api http.Handler
	lag time.Duration
}

// RoundTrip implements http.RoundTripper.
func (l lagging) RoundTrip(r *http.Request) (*http.Response, error) {
	var answer <-chan time.Time
	if l.lag >= 0 {
		timer := time.NewTimer(l.lag)
		defer timer.Stop()
		answer = timer.C
	}
	select {
	case <-answer:
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	w := httptest.NewRecorder()
	l.api.ServeHTTP(w, r)
	return w.Result(), nil
}

func laggingClient(t *testing.T, lag time.Duration) (*Client, *kubeapi.Server) {
	t.Helper()
	api := kubeapi.New()
	claim := newClaim()
	claim.TypeMeta = metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim"}
	if err := api.Put(claim); err != nil {
		t.Fatal(err)
	}
	clientset, err := kubernetes.NewForConfig(&rest.Config{Host: "http://api", Transport: lagging{api, lag}})
	if err != nil {
		t.Fatal(err)
	}
	return New(Options{Client: clientset, Node: "node-1"}), api
}

func TestAnAPIServerThatTakes20SecondsForEachRequestIsAskedAndToldAll(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client, _ := laggingClient(t, 20*time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- client.Run(ctx) }()
		for i := range 3 {
			client.Event(dradriver.Object{Kind: KindPod, Namespace: "llm", Name: fmt.Sprint("pod-", i), UID: fmt.Sprint(i)}, false, "Pulling", "pulling")
		}
		client.SetConditions(claimObject, condition(metav1.ConditionTrue, "Prepared", "prepared"))
		if state, err := client.Claim(ctx, claimObject); err != nil || !state.Exists || !state.AllocatedHere {
			t.Errorf("the claim is %+v, %v", state, err)
		}
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if s := client.Stats(); s.Sent != 4 || s.Dropped != 0 || s.Waiting != 0 {
			t.Errorf("stats %+v, problems %q", s, client.Problems())
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestAnAPIServerThatHangsHoldsNobodyUpAndNoEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client, _ := laggingClient(t, -1)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- client.Run(ctx) }()
		begin := time.Now()
		for i := range 2 * maxWaiting {
			client.Event(dradriver.Object{Kind: KindPod, Namespace: "llm", Name: fmt.Sprint("pod-", i), UID: fmt.Sprint(i)}, false, "Pulling", "pulling")
		}
		if took := time.Since(begin); took != 0 {
			t.Errorf("telling took %s", took)
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if s := client.Stats(); s.Waiting != maxWaiting || s.Dropped != maxWaiting || s.Sent != 0 {
			t.Errorf("stats %+v", s)
		}
		if problems := client.Problems(); len(problems) != 1 {
			t.Errorf("problems %q", problems)
		}
		begin = time.Now()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if took := time.Since(begin); took > drainTime {
			t.Errorf("the end took %s, want at most %s", took, drainTime)
		}
	})
}
