package pool

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/router/pick"
)

func TestNothingStaysReservedAfterAStormOfRequestsRestartsAndReloads(t *testing.T) {
	t.Parallel()
	cfg := Config{
		Models: []ModelConfig{{Name: "m", Targets: []TargetConfig{{Pool: "p", Weight: 3}, {Pool: "q", Weight: 1}}}},
		Pools:  []PoolConfig{{Name: "q", Endpoints: []EndpointConfig{{URL: "http://127.0.0.1:1"}, {URL: "http://127.0.0.1:2"}}}},
	}
	pools, err := New(cfg, Options{MaxBlocks: 5000})
	if err != nil {
		t.Fatal(err)
	}
	apply := func(seq, incarnation uint64, running uint32) {
		s := &report.State{}
		r := &report.Report{Version: report.Version, Node: "n", Epoch: 1, Seq: seq, Snapshot: true, UnixMillis: int64(seq)}
		for _, name := range []string{"a", "bb", "ccc"} {
			r.Endpoints = append(r.Endpoints, engine(name, "p", func(e *report.Endpoint) {
				e.Incarnation, e.Load.Running, e.Load.UnixMillis = incarnation, running, int64(seq)
			}))
		}
		if err := s.Apply(r); err != nil {
			t.Error(err)
		}
		pools.Apply(s, time.Now())
	}
	apply(1, 1, 0)
	var wg sync.WaitGroup
	for g := range uint64(6) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(g, 1))
			for i := range 300 {
				req := ask(rng.Uint64N(30), 1+rng.IntN(200))
				r, err := pools.Acquire(req, nil)
				if err != nil {
					if !errors.Is(err, ErrNoEndpoint) {
						t.Error(err)
					}
					continue
				}
				if i%3 == 0 {
					r.FirstByte()
				}
				pools.Remember("resp", r.EndpointID)
				pools.Explain(req)
				end := Outcome{Failure: Failure(rng.IntN(int(FailureClient) + 1)), Usage: true, PromptTokens: 1000, TTFT: time.Millisecond}
				wg.Go(func() { r.Done(end) })
				r.Done(end)
			}
		})
	}
	wg.Go(func() {
		for seq := range uint64(200) {
			apply(seq+2, 1+seq/20, uint32(seq%7))
			if seq%10 == 0 {
				if err := pools.SetModels(cfg); err != nil {
					t.Error(err)
				}
				pools.Stats()
			}
		}
	})
	wg.Wait()
	s := pools.Stats()
	if len(s.Endpoints) != 5 {
		t.Errorf("%d endpoints, want 5", len(s.Endpoints))
	}
	for _, e := range s.Endpoints {
		if e.InFlight != 0 || e.InFlightPromptTokens != 0 || e.InFlightDecodeTokens != 0 {
			t.Errorf("%s still holds %+v", e.ID, e)
		}
	}
	if s.Blocks > 5000 {
		t.Errorf("%d blocks held, the bound is 5000", s.Blocks)
	}
}

func BenchmarkAcquireParallel(b *testing.B) {
	cfg := oneModel()
	cfg.Pools = []PoolConfig{{Name: "p"}}
	for _, host := range []string{"1", "2", "3", "4", "5", "6", "7", "8"} {
		cfg.Pools[0].Endpoints = append(cfg.Pools[0].Endpoints, EndpointConfig{URL: "http://127.0.0." + host + ":80"})
	}
	pools, err := New(cfg, Options{})
	if err != nil {
		b.Fatal(err)
	}
	requests := make([]*pick.Request, 256)
	for i := range requests {
		requests[i] = ask(uint64(i), 8)
	}
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for i := rand.Int(); pb.Next(); i++ {
			r, err := pools.Acquire(requests[i&255], nil)
			if err != nil {
				b.Error(err)
				return
			}
			r.FirstByte()
			r.Done(Outcome{})
		}
	})
}

// BenchmarkAcquire100 is one request after the other over 100 endpoints, a
// quarter of which hold its prefix.
func BenchmarkAcquire100(b *testing.B) {
	cfg := oneModel()
	cfg.Pools = []PoolConfig{{Name: "p"}}
	for i := range 100 {
		cfg.Pools[0].Endpoints = append(cfg.Pools[0].Endpoints, EndpointConfig{URL: fmt.Sprintf("http://127.0.1.%d:80", i)})
	}
	pools, err := New(cfg, Options{})
	if err != nil {
		b.Fatal(err)
	}
	req := ask(1, 40)
	for i, e := range pools.routes.Load().pools[0].members() {
		if i%4 == 0 {
			pools.index.Insert(e.slot, req.Keys, pools.routes.Load().models["m"].targets[0].salt)
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		r, err := pools.Acquire(req, nil)
		if err != nil {
			b.Fatal(err)
		}
		r.Done(Outcome{})
	}
}
