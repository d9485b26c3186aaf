package bench

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/test/sim/kubeapi"
)

// newCluster is an API server that has a slice of somebody else.
func newCluster(t *testing.T, around func(http.Handler) http.Handler) (*rest.Config, kubernetes.Interface) {
	t.Helper()
	server, url, err := serveLocally(t.Context(), around(kubeapi.New()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	config := &rest.Config{Host: url, QPS: -1}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.ResourceV1().ResourceSlices().Create(t.Context(), plainSlice(0, dradriver.Name, nil), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return config, client
}

func asItIs(h http.Handler) http.Handler { return h }

// left are the slices that an API server has.
func left(t *testing.T, client kubernetes.Interface) []resourceapi.ResourceSlice {
	t.Helper()
	all, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return all.Items
}

func TestManyNodesPublishTheirSlicesAndLeaveNothingAtTheCluster(t *testing.T) {
	t.Parallel()
	config, client := newCluster(t, asItIs)
	// A run that was killed has left this one.
	if _, err := (markedClient{client}).ResourceV1().ResourceSlices().Create(t.Context(), plainSlice(1, dradriver.Name, nil), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	rows, err := measureNodes(t.Context(), config, nil, 3, 2, time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]Row{}
	for _, row := range rows {
		by[row.Name] = row
	}
	first, steady, change, requests := by["nodes_3_first"], by["nodes_3_steady_writes"], by["nodes_3_change_p99"], by["nodes_3_change_requests"]
	// Each node: the version, a dry run, its earlier slices, a list or a watch, and three slices.
	if first.Value <= 0 || first.Ratio <= 0 || !strings.Contains(first.Note, "3 dry runs, 9 writes") {
		t.Errorf("first publish: %+v", first)
	}
	if steady.Value != 0 || !steady.Met {
		t.Errorf("while nothing changes: %+v", steady)
	}
	if change.Value <= 0 || change.Ratio <= 0 || change.Pairs != 2 || requests.Value != 1 || !strings.Contains(requests.Note, "0 dry runs, 3 writes") {
		t.Errorf("a change: %+v, %+v", change, requests)
	}
	if found := left(t, client); len(found) != 1 || found[0].Labels[sliceLabel] != "" {
		t.Errorf("left are %d slices: %+v", len(found), found)
	}
}

func TestSlicesOfManyNodesAreRemovedAfterCtrlC(t *testing.T) {
	t.Parallel()
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	config, client := newCluster(t, func(h http.Handler) http.Handler {
		var made atomic.Int64
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			h.ServeHTTP(w, r)
			if r.Method == http.MethodPost && r.URL.Query().Get("dryRun") == "" {
				if made.Add(1) == 3 {
					interrupt()
				}
			}
		})
	})
	if _, err := measureNodes(ctx, config, nil, 2, 1, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("the interrupted bench says %v", err)
	}
	if found := left(t, client); len(found) != 1 || found[0].Labels[sliceLabel] != "" {
		t.Errorf("left are %d slices: %+v", len(found), found)
	}
}

func TestAClusterThatForbidsSlicesEndsTheBenchWithItsReason(t *testing.T) {
	t.Parallel()
	config, _ := newCluster(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Query().Get("dryRun") != "" {
				http.Error(w, "only the agent publishes slices", http.StatusForbidden)
				return
			}
			h.ServeHTTP(w, r)
		})
	})
	if _, err := measureNodes(t.Context(), config, nil, 2, 1, time.Hour); err == nil || !strings.Contains(err.Error(), "only the agent publishes slices") {
		t.Errorf("the bench says %v", err)
	}
}

func TestSlicesOfManyNodesHaveNoOwnerWhichAClusterWouldMiss(t *testing.T) {
	t.Parallel()
	_, client := newCluster(t, asItIs)
	slice := plainSlice(1, dradriver.Name, nil)
	slice.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "hearth-bench-001", UID: "none"}}
	made, err := markedClient{client}.ResourceV1().ResourceSlices().Create(t.Context(), slice, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(made.OwnerReferences) > 0 || made.Labels[sliceLabel] == "" || len(slice.OwnerReferences) != 1 {
		t.Errorf("made %+v of %+v", made.ObjectMeta, slice.ObjectMeta)
	}
}
