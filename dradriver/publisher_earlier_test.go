package dradriver_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
)

// afterARestart publishes an offer and ends, and gives the Publisher that comes
// after it.
func afterARestart(t *testing.T, api *apiServer, before dradriver.Offer) (*dradriver.Publisher, func()) {
	t.Helper()
	p, stop := start(t, api, dradriver.PublisherOptions{Pools: everything})
	p.Set(before)
	settle(t, 30*time.Second)
	stop()
	api.written()
	return start(t, api, dradriver.PublisherOptions{Pools: everything})
}

func TestARestartWritesNoVolatilePoolBeforeNorAfterTheDataRoleAnswers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(37)
		o := fullOffer(t)
		p, stop := afterARestart(t, api, o)
		defer stop()
		p.Set(dradriver.Offer{GPUs: o.GPUs})
		settle(t, time.Hour)
		if got := api.pools(t); got != fullPools {
			t.Errorf("while the data role is away:\n%s", got)
		}
		// It answers, and its free space moved by less than counts.
		weights := *o.Weights
		weights.Drive.Free += units.GiB
		o.Weights = &weights
		p.Set(o)
		settle(t, time.Hour)
		if got := api.written(); got != "" {
			t.Errorf("writes: %s", got)
		}
		if s := p.State(); !s.InSync() || len(s.Pools) != 3 {
			t.Errorf("state: %+v", s.Pools)
		}
	})
}

func TestAnArtifactThatARestartedStoreHasNotReadYetStays(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(37)
		llama, mistral, gone := model(t, "llama", 1, units.GiB), model(t, "mistral", 2, units.GiB), model(t, "gone", 3, units.GiB)
		o := fullOffer(t)
		o.Weights = weightsOf(100*units.GiB, llama, mistral, gone)
		p, stop := afterARestart(t, api, o)
		defer stop()
		o.Weights = weightsOf(100*units.GiB, llama)
		p.Set(o)
		settle(t, 5*time.Second)
		o.Weights = weightsOf(100*units.GiB, llama, mistral)
		p.Set(o)
		settle(t, 4*time.Second)
		if got := api.written(); got != "" {
			t.Errorf("writes while the store is read: %s", got)
		}
		settle(t, 2*time.Second)
		if got := api.written(); got != "update n/weights" {
			t.Errorf("writes once that has settled: %s", got)
		}
		if got := api.pools(t); !strings.Contains(got, "n/weights: cold w-01") || !strings.Contains(got, "w-02") || strings.Contains(got, "w-03") {
			t.Errorf("stored:\n%s", got)
		}
	})
}

func TestWhatARestartedNodeOffersNoMoreGoes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := newAPIServer(37)
		o := fullOffer(t)
		p, stop := afterARestart(t, api, o)
		o.KV = &stock.Space{}
		p.Set(o)
		settle(t, 15*time.Second)
		if got := api.pools(t); strings.Contains(got, "n/kv") || !strings.Contains(got, "n/weights") {
			t.Errorf("without KV space:\n%s", got)
		}
		// The gate of shared devices was switched off while nobody looked.
		stop()
		api.set(func() { api.gates = gatesOf(35) })
		p, stop = start(t, api, dradriver.PublisherOptions{Pools: everything})
		defer stop()
		p.Set(dradriver.Offer{GPUs: o.GPUs})
		settle(t, 15*time.Second)
		if got := api.pools(t); got != "n: gpu-0000-1b-00-0 gpu-0000-43-00-0" {
			t.Errorf("without the gate:\n%s", got)
		}
	})
}
