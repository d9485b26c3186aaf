package pool

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/router/pick"
)

// fleet feeds a pool the states of nodes.
type fleet struct {
	t     *testing.T
	pools *Pools
	now   time.Time
	seq   uint64
}

func newFleet(t *testing.T, cfg Config) *fleet {
	t.Helper()
	f := &fleet{t: t, now: time.Unix(1_800_000_000, 0)}
	pools, err := New(cfg, Options{Now: func() time.Time { return f.now }})
	if err != nil {
		t.Fatal(err)
	}
	f.pools = pools
	return f
}

// snapshot replaces all state of a node.
func (f *fleet) snapshot(node string, r *report.Report) {
	f.t.Helper()
	f.seq++
	r.Version, r.Node, r.Epoch, r.Seq, r.Snapshot = report.Version, node, 1, f.seq, true
	r.UnixMillis = f.now.UnixMilli()
	s := &report.State{}
	if err := s.Apply(r); err != nil {
		f.t.Fatal(err)
	}
	f.pools.Apply(s, f.now)
}

func engine(name, pool string, change ...func(*report.Endpoint)) *report.Endpoint {
	e := &report.Endpoint{
		Name: name, Url: "http://127.0.0.1:" + fmt.Sprint(8000+len(name)), Pool: pool, Reachable: true, Incarnation: 1,
		Engine: report.EngineKind_ENGINE_KIND_SIM, ServedModels: []string{"m"}, Devices: []string{"gpu-" + name},
		Load: &report.Load{UnixMillis: 1, KvCapacityTokens: 100_000},
	}
	for _, c := range change {
		c(e)
	}
	return e
}

func oneModel() Config {
	return Config{Models: []ModelConfig{{Name: "m", Targets: []TargetConfig{{Pool: "p"}}}}}
}

func promptKeys(seed uint64, n int) []pick.Key {
	rng := rand.New(rand.NewPCG(seed, 0))
	keys := make([]pick.Key, n)
	for i := range keys {
		keys[i] = rng.Uint64()
	}
	return keys
}

func ask(seed uint64, blocks int) *pick.Request {
	return &pick.Request{
		Model: "m", Keys: promptKeys(seed, blocks), PromptBytes: blocks * pick.BlockBytes, PromptTokens: blocks * 64, Tie: seed,
	}
}

func (f *fleet) acquire(req *pick.Request) *Reservation {
	f.t.Helper()
	r, err := f.pools.Acquire(req, nil)
	if err != nil {
		f.t.Fatal(err)
	}
	return r
}

func (f *fleet) endpoint(id string) EndpointStats {
	f.t.Helper()
	for _, e := range f.pools.Stats().Endpoints {
		if e.ID == id {
			return e
		}
	}
	f.t.Fatalf("no endpoint %s", id)
	return EndpointStats{}
}

func TestAnUnknownModelIsItsOwnError(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	if _, err := f.pools.Acquire(&pick.Request{Model: "other"}, nil); !errors.Is(err, ErrUnknownModel) {
		t.Errorf("got %v", err)
	}
	_, err := f.pools.Acquire(ask(1, 1), nil)
	if none := new(NoEndpointError); !errors.As(err, &none) || !errors.Is(err, ErrNoEndpoint) || len(none.Causes) != 1 {
		t.Errorf("got %v", err)
	}
}

func TestAConversationReturnsToTheEndpointThatHoldsIt(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "p"), engine("bb", "p"), engine("ccc", "p")}})
	keys := promptKeys(1, 40)
	home := ""
	for turn := 10; turn <= 40; turn += 10 {
		req := &pick.Request{Model: "m", Keys: keys[:turn], PromptBytes: turn * 256, PromptTokens: turn * 64, Tie: uint64(turn)}
		r := f.acquire(req)
		if home != "" && (r.EndpointID != home || r.Decision().Reason != pick.ReasonPrefix || r.Decision().MatchedBlocks != turn-10) {
			t.Fatalf("turn %d went to %s by %+v, want %s", turn, r.EndpointID, r.Decision(), home)
		}
		home = r.EndpointID
		r.FirstByte()
		r.Done(Outcome{})
	}
}

func TestAReservationIsReleasedOnce(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "p")}})
	r := f.acquire(ask(1, 10))
	if e := f.endpoint("n/a"); e.InFlight != 1 || e.InFlightPromptTokens != 640 || e.InFlightDecodeTokens < 640 {
		t.Fatalf("reserved %+v", e)
	}
	r.FirstByte()
	r.FirstByte()
	if e := f.endpoint("n/a"); e.InFlight != 1 || e.InFlightPromptTokens != 0 {
		t.Fatalf("after the first byte %+v", e)
	}
	r.Done(Outcome{})
	r.Done(Outcome{Failure: FailureConnect})
	r.FirstByte()
	if e := f.endpoint("n/a"); e.InFlight != 0 || e.InFlightPromptTokens != 0 || e.InFlightDecodeTokens != 0 || e.Suspended {
		t.Fatalf("after the end %+v", e)
	}
}

func TestAnUnhealthyDeviceStopsNewRequestsAndNeverEmptiesThePool(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	both := []*report.Endpoint{engine("a", "p"), engine("bb", "p")}
	sick := func(ids ...string) *report.Report {
		r := &report.Report{Endpoints: both}
		for _, id := range []string{"gpu-a", "gpu-bb"} {
			h := report.Health_HEALTH_HEALTHY
			if slices.Contains(ids, id) {
				h = report.Health_HEALTH_UNHEALTHY
			}
			r.Devices = append(r.Devices, &report.Device{Id: id, Health: h})
		}
		return r
	}
	f.snapshot("n", sick("gpu-a"))
	for i := range uint64(20) {
		r := f.acquire(ask(i, 4))
		if r.EndpointID != "n/bb" || r.Decision().Alarm {
			t.Fatalf("went to %s, %+v", r.EndpointID, r.Decision())
		}
		r.Done(Outcome{})
	}
	f.snapshot("n", sick("gpu-a", "gpu-bb"))
	if r := f.acquire(ask(99, 4)); !r.Decision().Alarm || r.Decision().Reason != pick.ReasonLeastBad {
		t.Fatalf("the least bad answered by %+v", r.Decision())
	}
	if a := f.pools.Stats().Pools[0].Alarms; a != 1 {
		t.Errorf("%d alarms, want 1", a)
	}
}

func TestARefusedConnectionSuspendsUntilAProbeSucceeds(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "p"), engine("bb", "p")}})
	onlyA := func(id string) bool { return id != "n/a" }
	first, err := f.pools.Acquire(ask(1, 4), onlyA)
	if err != nil {
		t.Fatal(err)
	}
	first.Done(Outcome{Failure: FailureConnect})
	if e := f.endpoint("n/a"); !e.Suspended || e.HeldBlocks != 0 {
		t.Fatalf("after a refused connection: %+v", e)
	}
	for i := range uint64(10) {
		if r := f.acquire(ask(i, 4)); r.EndpointID != "n/bb" {
			t.Fatal("a suspended endpoint got a request")
		}
	}
	f.now = f.now.Add(firstPause)
	probe, err := f.pools.Acquire(ask(2, 4), onlyA)
	if err != nil || probe.Decision().Alarm {
		t.Fatalf("no probe after the pause: %v", err)
	}
	if e := f.endpoint("n/a"); !e.Suspended {
		t.Error("two probes at once")
	}
	probe.Done(Outcome{Failure: FailureConnect})
	f.now = f.now.Add(firstPause)
	if e := f.endpoint("n/a"); !e.Suspended {
		t.Error("the pause did not grow after a failed probe")
	}
	f.now = f.now.Add(firstPause)
	again, err := f.pools.Acquire(ask(3, 4), onlyA)
	if err != nil {
		t.Fatal(err)
	}
	again.Done(Outcome{})
	if e := f.endpoint("n/a"); e.Suspended {
		t.Error("still suspended after a successful probe")
	}
}

func TestClientErrorsNeverSuspend(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "p")}})
	for i := range uint64(50) {
		failure := FailureClient
		if i%2 == 0 {
			failure = FailureCanceled
		}
		f.acquire(ask(i, 1)).Done(Outcome{Failure: failure})
	}
	if e := f.endpoint("n/a"); e.Suspended {
		t.Error("4xx answers and clients that left suspended the endpoint")
	}
}

func TestOneServerErrorNeverSuspendsAndFiveInARowDo(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "p"), engine("bb", "p")}})
	onlyA := func(id string) bool { return id != "n/a" }
	fail := func(failure Failure) {
		r, err := f.pools.Acquire(ask(1, 1), onlyA)
		if err != nil {
			t.Fatal(err)
		}
		r.Done(Outcome{Failure: failure})
	}
	for range 20 {
		fail(FailureServer)
		fail(FailureNone)
	}
	if f.endpoint("n/a").Suspended {
		t.Fatal("suspended though every other answer was good")
	}
	for range 5 {
		fail(FailureServer)
	}
	if !f.endpoint("n/a").Suspended {
		t.Error("five server errors in a row do not suspend")
	}
}

func TestATargetWaitsForItsArtifactAndKeepsItWhileItIsMended(t *testing.T) {
	t.Parallel()
	cfg := Config{Models: []ModelConfig{{Name: "m", Targets: []TargetConfig{{Pool: "p", Ref: "hub://org/m"}}}}}
	f := newFleet(t, cfg)
	state := func(s report.ArtifactState) *report.Report {
		return &report.Report{
			Endpoints: []*report.Endpoint{engine("a", "p")},
			Artifacts: []*report.Artifact{{Ref: "hub://org/m@main", State: s}},
		}
	}
	for _, step := range []struct {
		state report.ArtifactState
		want  bool
	}{
		{report.ArtifactState_ARTIFACT_STATE_FILLING, false},
		{report.ArtifactState_ARTIFACT_STATE_READY, true},
		{report.ArtifactState_ARTIFACT_STATE_SUSPECT, true},
		{report.ArtifactState_ARTIFACT_STATE_FILLING, true},
		{report.ArtifactState_ARTIFACT_STATE_EVICTING, false},
		{report.ArtifactState_ARTIFACT_STATE_FILLING, false},
	} {
		f.snapshot("n", state(step.state))
		r, err := f.pools.Acquire(ask(1, 1), nil)
		if (err == nil) != step.want {
			t.Errorf("%s: acquire says %v", step.state, err)
		}
		if err == nil {
			r.Done(Outcome{})
		} else if !errors.Is(err, ErrNoEndpoint) {
			t.Errorf("%s: %v", step.state, err)
		}
	}
}

func TestWeightsShareRequestsAndOrderStandsIn(t *testing.T) {
	t.Parallel()
	cfg := Config{Models: []ModelConfig{{Name: "m", Targets: []TargetConfig{
		{Pool: "spare"}, {Pool: "old", Weight: 90}, {Pool: "new", Weight: 10, Ref: "hub://org/new"},
	}}}}
	f := newFleet(t, cfg)
	count := func() map[string]int {
		got := map[string]int{}
		for i := range uint64(2000) {
			r := f.acquire(&pick.Request{Model: "m", Tie: i})
			got[r.Pool]++
			r.Done(Outcome{})
		}
		return got
	}
	f.snapshot("s", &report.Report{Endpoints: []*report.Endpoint{engine("a", "spare")}})
	if got := count(); got["spare"] != 2000 {
		t.Errorf("with the spare alone: %v", got)
	}
	f.snapshot("o", &report.Report{Endpoints: []*report.Endpoint{engine("a", "old")}})
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "new")}})
	if got := count(); got["old"] != 2000 {
		t.Errorf("while the canary is not ready: %v", got)
	}
	f.snapshot("n", &report.Report{
		Endpoints: []*report.Endpoint{engine("a", "new")},
		Artifacts: []*report.Artifact{{Ref: "hub://org/new@main", State: report.ArtifactState_ARTIFACT_STATE_READY}},
	})
	if got := count(); got["new"] < 140 || got["new"] > 260 || got["spare"] != 0 {
		t.Errorf("with a canary of a tenth: %v", got)
	}
	f.pools.Forget("o")
	if got := count(); got["new"] != 2000 {
		t.Errorf("after the old pool is gone: %v", got)
	}
}

func TestATargetThatStandsInGoesBeforeTheLeastBad(t *testing.T) {
	t.Parallel()
	f := newFleet(t, Config{Models: []ModelConfig{{Name: "m", Targets: []TargetConfig{{Pool: "p"}, {Pool: "q"}}}}})
	sick := func(pool string) *report.Report {
		return &report.Report{
			Endpoints: []*report.Endpoint{engine("a", pool)},
			Devices:   []*report.Device{{Id: "gpu-a", Health: report.Health_HEALTH_UNHEALTHY}},
		}
	}
	f.snapshot("one", sick("p"))
	f.snapshot("two", &report.Report{Endpoints: []*report.Endpoint{engine("a", "q")}})
	x := f.pools.Explain(ask(1, 4))
	if r := f.acquire(ask(1, 4)); r.Pool != "q" || r.Decision().Alarm || x.Pool != "q" || x.Targets[1].Skipped != "" || x.Targets[0].Skipped == "" {
		t.Errorf("went to %s, explained %+v", r.Pool, x)
	}
	f.snapshot("two", sick("q"))
	x = f.pools.Explain(ask(1, 4))
	if r := f.acquire(ask(1, 4)); r.Pool != "p" || !r.Decision().Alarm || x.Pool != "p" || !x.Alarm {
		t.Errorf("went to %s, explained %+v", r.Pool, x)
	}
}

func TestUnmetNeedsNameWhatIsMissing(t *testing.T) {
	t.Parallel()
	f := newFleet(t, Config{Models: []ModelConfig{{Name: "m", Targets: []TargetConfig{
		{Pool: "p", Capabilities: []string{"json"}, ContextTokens: 1000},
		{Pool: "q", Capabilities: []string{"tools", "json"}, ContextTokens: 4000},
	}}}})
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "p"), engine("bb", "q")}})
	_, err := f.pools.Acquire(&pick.Request{Model: "m", Needs: []string{"tools", "vision"}}, nil)
	if unmet := new(UnmetNeedsError); !errors.As(err, &unmet) || !errors.Is(err, ErrUnmetNeeds) || !slices.Equal(unmet.Missing, []string{"vision"}) {
		t.Errorf("got %v", err)
	}
	if r := f.acquire(&pick.Request{Model: "m", Needs: []string{"tools"}}); r.Pool != "q" {
		t.Errorf("tools went to %s", r.Pool)
	}
	if r := f.acquire(&pick.Request{Model: "m", PromptTokens: 1500}); r.Pool != "q" {
		t.Errorf("a prompt past the first context went to %s", r.Pool)
	}
	_, err = f.pools.Acquire(&pick.Request{Model: "m", PromptTokens: 9000}, nil)
	if unmet := new(UnmetNeedsError); !errors.As(err, &unmet) || unmet.ContextTokens != 4000 {
		t.Errorf("got %v", err)
	}
}

func TestAvoidedEndpointsAreNotTriedAgain(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "p"), engine("bb", "p")}})
	tried := []string{}
	avoid := func(id string) bool { return slices.Contains(tried, id) }
	for range 2 {
		r, err := f.pools.Acquire(ask(1, 5), avoid)
		if err != nil || avoid(r.EndpointID) {
			t.Fatalf("tried %v: %v", tried, err)
		}
		tried = append(tried, r.EndpointID)
	}
	_, err := f.pools.Acquire(ask(1, 5), avoid)
	if none := new(NoEndpointError); !errors.As(err, &none) || !none.Tried {
		t.Errorf("got %v", err)
	}
}

func TestSilenceNeverStopsTraffic(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{
		engine("a", "p", func(e *report.Endpoint) {
			e.Load.UnixMillis, e.Load.Running, e.Load.Waiting = f.now.UnixMilli(), 200, 50
		}),
		engine("bb", "p", func(e *report.Endpoint) { e.Reachable = false }),
	}})
	if r := f.acquire(&pick.Request{Model: "m"}); r.EndpointID != "n/a" {
		t.Error("an unreachable endpoint got a request")
	}
	f.now = f.now.Add(24 * time.Hour)
	seen := map[string]int{}
	for i := range uint64(40) {
		seen[f.acquire(&pick.Request{Model: "m", Tie: i}).EndpointID]++
	}
	if seen["n/a"] < 10 || seen["n/bb"] < 10 {
		t.Errorf("after a day of silence requests went to %v", seen)
	}
}

func TestAReloadKeepsMemoryAndABadOneChangesNothing(t *testing.T) {
	t.Parallel()
	static := func(urls ...string) Config {
		c := oneModel()
		c.Pools = []PoolConfig{{Name: "p"}}
		for _, u := range urls {
			c.Pools[0].Endpoints = append(c.Pools[0].Endpoints, EndpointConfig{URL: u})
		}
		return c
	}
	f := newFleet(t, static("http://127.0.0.1:1/", "http://127.0.0.1:2"))
	r := f.acquire(ask(1, 8))
	if err := f.pools.SetModels(static(r.EndpointID, "http://127.0.0.1:3")); err != nil {
		t.Fatal(err)
	}
	if e := f.endpoint(r.EndpointID); e.HeldBlocks != 8 || e.InFlight != 1 {
		t.Errorf("after a reload: %+v", e)
	}
	if n := len(f.pools.Stats().Endpoints); n != 2 {
		t.Errorf("%d endpoints, want 2", n)
	}
	bad := Config{Policy: "x", Models: []ModelConfig{{Name: "m"}}, Pools: []PoolConfig{{Endpoints: []EndpointConfig{{URL: "ftp://x"}}}}}
	err := f.pools.SetModels(bad)
	if err == nil || f.acquire(ask(1, 8)).Pool != "p" {
		t.Errorf("a bad configuration was taken: %v", err)
	}
	r.Done(Outcome{})
}

func TestResponseIDsAreBoundedByTheLeastRecentlyUsed(t *testing.T) {
	t.Parallel()
	pools, err := New(Config{Pools: []PoolConfig{{Name: "p", Endpoints: []EndpointConfig{{URL: "http://127.0.0.1:1"}}}}}, Options{MaxResponses: 3})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		pools.Remember(fmt.Sprint("r", i), "http://127.0.0.1:1")
	}
	pools.Holder("r0")
	pools.Remember("r3", "http://127.0.0.1:1")
	pools.Remember("r4", "nobody")
	for id, want := range map[string]bool{"r0": true, "r1": false, "r2": true, "r3": true, "r4": false} {
		if _, found := pools.Holder(id); found != want {
			t.Errorf("%s: found %v", id, found)
		}
	}
}

func TestExplainReservesNothingAndNamesTheChoice(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "p"), engine("bb", "p")}})
	x := f.pools.Explain(ask(1, 8))
	r := f.acquire(ask(1, 8))
	if x.Chosen != r.EndpointID || x.Reason != pick.ReasonCold || len(x.Targets) != 1 || len(x.Targets[0].Candidates) != 2 {
		t.Errorf("explained %+v, acquired %s", x, r.EndpointID)
	}
	if x = f.pools.Explain(ask(1, 8)); x.Chosen != r.EndpointID || x.Reason != pick.ReasonPrefix || x.Credit == 0 {
		t.Errorf("explained %+v", x)
	}
	if n := f.endpoint(r.EndpointID).InFlight; n != 1 {
		t.Errorf("%d in flight, want 1", n)
	}
	if x = f.pools.Explain(&pick.Request{Model: "none"}); x.Error == "" {
		t.Error("an unknown model has no error")
	}
}

func TestPrefillRateAndTextLengthAreLearnedFromAnswers(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "p")}})
	for i := range uint64(80) {
		r := f.acquire(ask(i, 40))
		r.Done(Outcome{Usage: true, PromptTokens: 5120, CachedTokens: 0, TTFT: time.Second})
	}
	p := f.pools.Stats().Pools[0]
	if p.PrefillRate < 5000 || p.PrefillRate > 5200 || p.BytesPerToken < 1.9 || p.BytesPerToken > 2.1 {
		t.Errorf("learned %+v", p)
	}
}

func TestAReportOfOurOwnRequestsDoesNotOutliveThem(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	report5 := func(running uint32) {
		f.now = f.now.Add(time.Second)
		f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "p", func(e *report.Endpoint) {
			e.Load.UnixMillis, e.Load.Running = f.now.UnixMilli(), running
		})}})
	}
	report5(0)
	var open []*Reservation
	for i := range uint64(5) {
		open = append(open, f.acquire(ask(i, 1)))
	}
	report5(7)
	if load := f.pools.Explain(ask(9, 1)).Targets[0].Candidates[0].Load; load != 7 {
		t.Errorf("with five of our own and two of others the load is %v", load)
	}
	for _, r := range open {
		r.Done(Outcome{})
	}
	if load := f.pools.Explain(ask(9, 1)).Targets[0].Candidates[0].Load; load != 2 {
		t.Errorf("after the end of our own the load is %v, want the two of others", load)
	}
}

func TestNodesCannotNamePoolsPastTheBoundNorKeepOutConfiguredOnes(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	name := func(i int) string { return fmt.Sprintf("named-%d", i) }
	for n := range 12 {
		r := &report.Report{}
		for i := range 100 {
			r.Endpoints = append(r.Endpoints, engine(fmt.Sprintf("e%d", i), name(n*100+i)))
		}
		f.snapshot(fmt.Sprintf("node-%d", n), r)
	}
	if s := f.pools.Stats(); len(s.Pools) != MaxPools || s.LeftOut != 1200-MaxPools+1 {
		t.Fatalf("%d pools, %d endpoints left out", len(s.Pools), s.LeftOut)
	}
	cfg := oneModel()
	cfg.Pools = []PoolConfig{{Name: "configured", Endpoints: []EndpointConfig{{URL: "http://127.0.0.1:1"}}}}
	cfg.Models[0].Targets[0].Pool = "configured"
	if err := f.pools.SetModels(cfg); err != nil {
		t.Fatal(err)
	}
	f.acquire(ask(1, 1)).Done(Outcome{})
	for n := range 12 {
		f.snapshot(fmt.Sprintf("node-%d", n), &report.Report{})
	}
	if s := f.pools.Stats(); len(s.Pools) != 1 {
		t.Errorf("%d pools are left of those that nobody names", len(s.Pools))
	}
	many := Config{Models: []ModelConfig{{Name: "m", Targets: []TargetConfig{{Pool: "p"}}}}}
	for i := range MaxPools {
		many.Pools = append(many.Pools, PoolConfig{Name: name(i)})
	}
	if err := many.Validate(); err == nil {
		t.Error("one pool too many was taken, since a model names it")
	}
}
