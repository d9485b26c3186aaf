package fakekubelet_test

import (
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/test/fakekubelet"
)

// waiting starts a driver that waits for pulls longer than any test runs, and a
// Prepare of a claim whose weights are on their way. The claim is begun.
func waiting(t *testing.T) (m *machine, r *running, c *resourceapi.ResourceClaim, answer <-chan fakekubelet.Answer) {
	t.Helper()
	m = newMachine(t)
	if err := m.cache.Advance(cold.Ref, stock.Progress{Present: mib(1), Size: cold.Size, Left: time.Second}); err != nil {
		t.Fatal(err)
	}
	r = m.startWith(t, func(o *dradriver.Options) { o.PullWait = time.Hour })
	c = says(claim("a", gpu("gpu", 0), coldWeights("model", "share-a")), resourceapi.AllocationConfigSourceClaim, refConfig(cold.Ref.String()))
	m.api.Put(c)
	answers := make(chan fakekubelet.Answer, 1)
	go func() {
		all, err := r.kubelet.Prepare(t.Context(), named(c))
		if err != nil {
			all = map[string]fakekubelet.Answer{string(c.UID): {Err: err.Error()}}
		}
		answers <- all[string(c.UID)]
	}()
	until(t, "the claim to be begun", func() bool {
		entry, known := r.ledger.Get(string(c.UID))
		return known && entry.State == ledger.Begun
	})
	return m, r, c, answers
}

func TestThePrepareThatWaitedForAPullAnswersWithItsWeights(t *testing.T) {
	t.Parallel()
	m, r, c, answer := waiting(t)
	if err := m.cache.Advance(cold.Ref, stock.Progress{Present: cold.Size, Size: cold.Size}); err != nil {
		t.Fatal(err)
	}
	if a := within(t, "the answer", answer); a.Err != "" || len(a.Devices) != 2 || len(a.Devices[1].CDI) != 2 {
		t.Errorf("answer %+v", a)
	}
	unprepared(t, r.kubelet, c)
	m.wantNothingLeft(t, r.ledger)
}

func TestAnUnprepareIsNotKeptByThePrepareThatWaits(t *testing.T) {
	t.Parallel()
	m, r, c, answer := waiting(t)
	unprepared(t, r.kubelet, c)
	if a := within(t, "the answer", answer); !strings.Contains(a.Err, "pulling org/cold, 50 %, about 1 s left") {
		t.Errorf("answer %+v", a)
	}
	m.wantNothingLeft(t, r.ledger)
}

func TestADriverThatStopsEndsThePrepareThatWaits(t *testing.T) {
	t.Parallel()
	m, r, c, answer := waiting(t)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		r.stop()
	}()
	within(t, "the driver to stop", stopped)
	if a := within(t, "the answer", answer); a.Err == "" {
		t.Errorf("answer %+v", a)
	}
	if err := m.cache.Advance(cold.Ref, stock.Progress{Present: cold.Size, Size: cold.Size}); err != nil {
		t.Fatal(err)
	}
	next := m.start(t)
	prepared(t, next.kubelet, c)
	unprepared(t, next.kubelet, c)
	m.wantNothingLeft(t, next.ledger)
}
