package check

import (
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/hearth-dev/hearth/test/sim/engine"
)

func newEngine(t *testing.T) *engine.Engine {
	t.Helper()
	e, err := engine.New(engine.Options{ServedModel: "sim", Speedup: 1e6, KVTokens: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func serve(t *testing.T, h http.Handler) *client {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	c := newClient(s.URL)
	t.Cleanup(c.close)
	return c
}

func TestASingleEngineWithRoomReachesTheIdealExactly(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	got, err := converse(t.Context(), serve(t, e), "sim", 16)
	if err != nil {
		t.Fatal(err)
	}
	if hits := e.Stats().PrefixHits; got.idealHits == 0 || uint64(got.idealHits) != hits {
		t.Errorf("hits: engine counts %d, ideal is %d", hits, got.idealHits)
	}
}

func TestTakingTurnsMissesTheAimsOfTheCheck(t *testing.T) {
	t.Parallel()
	best, err := converse(t.Context(), serve(t, newEngine(t)), "sim", 16)
	if err != nil {
		t.Fatal(err)
	}
	engines := []*engine.Engine{newEngine(t), newEngine(t), newEngine(t), newEngine(t)}
	var next atomic.Uint64
	got, err := converse(t.Context(), serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		engines[next.Add(1)%4].ServeHTTP(w, r)
	})), "sim", 16)
	if err != nil {
		t.Fatal(err)
	}
	var hits uint64
	for _, e := range engines {
		hits += e.Stats().PrefixHits
	}
	if got.idealHits != best.idealHits {
		t.Errorf("the ideal depends on the routing: %d and %d", got.idealHits, best.idealHits)
	}
	if 2*hits > uint64(got.idealHits) || best.laterTTFTMS > 0.6*got.laterTTFTMS {
		t.Errorf("taking turns hits %d of %d, later turns wait %.1f ms against %.1f", hits, got.idealHits, got.laterTTFTMS, best.laterTTFTMS)
	}
}
