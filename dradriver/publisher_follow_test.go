package dradriver_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
)

// source is a Cache, a KV, an Inventory and a ColdSource that a test sets.
type source struct {
	stock.Cache
	stock.KV

	mu      sync.Mutex
	gpus    device.Snapshot
	weights stock.Weights
	space   stock.Space
	known   bool
	failure string
	taken   units.Bytes
	changed chan struct{}
	ended   int
}

func (s *source) set(change func()) {
	s.mu.Lock()
	change()
	s.mu.Unlock()
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// Weights implements stock.Cache.
func (s *source) Weights() (stock.Weights, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.weights, s.known
}

// Release implements stock.Cache and stock.KV.
func (s *source) Release(context.Context, string) error { return nil }

// Subscribe implements stock.Cache, stock.KV and dradriver.Inventory.
func (s *source) Subscribe() (<-chan struct{}, func()) {
	return s.changed, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.ended++
	}
}

// Space implements stock.KV.
func (s *source) Space() (stock.Space, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.space, s.known
}

// Devices implements dradriver.Inventory.
func (s *source) Devices() (device.Snapshot, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gpus, s.known
}

// ColdFailure implements dradriver.ColdSource.
func (s *source) ColdFailure() (dradriver.ColdFailure, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return dradriver.ColdFailure{Reason: s.failure}, s.failure != ""
}

// ColdTaken implements dradriver.ColdSource.
func (s *source) ColdTaken() units.Bytes {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.taken
}

// ColdFailureChanged implements dradriver.ColdSource.
func (s *source) ColdFailureChanged() <-chan struct{} { return s.changed }

func TestAPublisherFollowsItsSources(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(37)
		p, stop := start(t, api, dradriver.PublisherOptions{Pools: everything})
		defer stop()
		s := &source{changed: make(chan struct{}, 1)}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- p.Follow(ctx, dradriver.Sources{Devices: s, Cache: s, KV: s, Cold: s}) }()
		settle(t, 5*time.Second)
		if got := api.pools(t); got != "" {
			t.Errorf("before anything is known:\n%s", got)
		}
		s.set(func() {
			s.gpus, s.weights = twoGPUs(t), *weightsOf(100*units.GiB, model(t, "llama", 1, units.GiB))
			s.space, s.known = stock.Space{Memory: 64 * units.GiB}, true
		})
		settle(t, time.Second)
		if got := api.pools(t); got != fullPools {
			t.Errorf("stored:\n%s", got)
		}
		s.set(func() { s.failure = "Forbidden" })
		settle(t, 11*time.Second)
		if !tainted(t, api) {
			t.Error("the failed pull left no taint")
		}
		s.set(func() { s.failure = "" })
		settle(t, 11*time.Second)
		if tainted(t, api) {
			t.Error("the taint stays")
		}
		// The data role goes away: what it told last stays.
		s.set(func() { s.known = false })
		settle(t, time.Hour)
		if got := api.pools(t); got != fullPools {
			t.Errorf("stored:\n%s", got)
		}
		cancel()
		if err := <-done; err != nil || s.ended != 3 {
			t.Errorf("ended with %v, %d subscriptions ended", err, s.ended)
		}
	})
}

func tainted(t *testing.T, api *apiServer) bool {
	t.Helper()
	slice := poolNamed(t, api, "n/weights")
	return slices.ContainsFunc(slice, func(d deviceView) bool {
		return d.name == "cold" && strings.Join(d.taints, " ") == "hearth.dev/pull-failed=Forbidden:NoSchedule"
	})
}

type deviceView struct {
	name   string
	taints []string
}

func poolNamed(t *testing.T, api *apiServer, name string) []deviceView {
	t.Helper()
	list, err := api.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var views []deviceView
	for _, slice := range list.Items {
		if slice.Spec.Pool.Name != name {
			continue
		}
		for _, d := range slice.Spec.Devices {
			view := deviceView{name: d.Name}
			for _, taint := range d.Taints {
				view.taints = append(view.taints, taint.Key+"="+taint.Value+":"+string(taint.Effect))
			}
			views = append(views, view)
		}
	}
	return views
}
