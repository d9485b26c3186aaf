package pool

import (
	"testing"

	"github.com/hearth-dev/hearth/nodeagent/report"
)

func TestARestartedEngineStartsWithEmptyMemoryAndCounts(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	restart := func(n uint64) func(*report.Endpoint) { return func(e *report.Endpoint) { e.Incarnation = n } }
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "p", restart(1))}})
	old := f.acquire(ask(1, 10))
	f.pools.Remember("resp_1", "n/a")
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "p", restart(2))}})
	if e := f.endpoint("n/a"); e.InFlight != 0 || e.HeldBlocks != 0 {
		t.Fatalf("the new incarnation begins with %+v", e)
	}
	if _, found := f.pools.Holder("resp_1"); found {
		t.Error("a response outlived its engine")
	}
	old.Done(Outcome{Failure: FailureReset})
	if e := f.endpoint("n/a"); e.InFlight != 0 || e.InFlightDecodeTokens != 0 || e.Ended != 0 {
		t.Errorf("an old reservation changed the new incarnation: %+v", e)
	}
}

func TestAnEngineThatItsNodeHasNotReadYetKeepsItsMemory(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	says := func(n uint64) {
		f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "p", func(e *report.Endpoint) { e.Incarnation = n })}})
	}
	says(0)
	r := f.acquire(ask(1, 10))
	held := f.endpoint("n/a").HeldBlocks
	if held == 0 {
		t.Fatal("the endpoint remembers no block of its request")
	}
	for _, n := range []uint64{7, 0, 7} { // read, the agent restarts, read again
		says(n)
		if e := f.endpoint("n/a"); e.InFlight != 1 || e.HeldBlocks != held {
			t.Fatalf("once its node says incarnation %d it has %+v, want one in flight and %d blocks", n, e, held)
		}
	}
	r.Done(Outcome{})
	says(8)
	if e := f.endpoint("n/a"); e.HeldBlocks != 0 {
		t.Errorf("the next incarnation begins with %d blocks", e.HeldBlocks)
	}
}

func TestAnAgentsRestartKeepsAnEnginesMemoryUnlessItsCountersFell(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	says := func(n, prompt uint64) {
		f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("a", "p", func(e *report.Endpoint) {
			e.Incarnation, e.Load.PromptTokensTotal = n, prompt
		})}})
	}
	says(report.RunFound, 100)
	f.acquire(ask(1, 10)).Done(Outcome{})
	held := f.endpoint("n/a").HeldBlocks
	for _, state := range [][2]uint64{{report.RunFound, 140}, {0, 140}, {report.RunFound, 140}} {
		says(state[0], state[1])
		if e := f.endpoint("n/a"); held == 0 || e.HeldBlocks != held {
			t.Fatalf("after %v it holds %d blocks, want %d", state, e.HeldBlocks, held)
		}
	}
	says(report.RunFound, 20)
	if e := f.endpoint("n/a"); e.HeldBlocks != 0 {
		t.Errorf("an engine whose counters fell begins with %d blocks", e.HeldBlocks)
	}
	says(5000, 21) // its agent saw it come up
	f.acquire(ask(2, 10)).Done(Outcome{})
	says(report.RunFound, 30) // and was itself restarted
	if e := f.endpoint("n/a"); e.HeldBlocks == 0 {
		t.Error("the agent's restart voided the memory")
	}
}
