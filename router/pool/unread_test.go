package pool

import (
	"testing"

	"github.com/hearth-dev/hearth/nodeagent/report"
)

// unread is how a node reports an engine that it has not read yet.
func unread(e *report.Endpoint) {
	e.Reachable, e.Incarnation, e.Load, e.ServedModels = false, 0, nil, nil
}

// noLoad is how a node reports an engine that answers and tells no load.
func noLoad(e *report.Endpoint) { e.Load = &report.Load{} }

// running is how a node reports an engine that it read just now.
func (f *fleet) running(n uint32) func(*report.Endpoint) {
	return func(e *report.Endpoint) { e.Load.UnixMillis, e.Load.Running = f.now.UnixMilli(), n }
}

func TestAnEndpointThatItsNodeHasNotReadServesOnlyWhereNoneIsRead(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("new", "p", unread)}})
	f.acquire(ask(1, 4)).Done(Outcome{})
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("new", "p", unread), engine("known", "p", f.running(200))}})
	for seed := range uint64(50) {
		if r := f.acquire(ask(seed, 4)); r.EndpointID != "n/known" {
			t.Fatalf("request %d went to %s: %s", seed, r.EndpointID, r.Decision().Reason)
		}
	}
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("new", "p", f.running(0)), engine("known", "p", f.running(200))}})
	for seed := range uint64(50) {
		if f.acquire(ask(100+seed, 4)).EndpointID == "n/new" {
			return
		}
	}
	t.Error("an endpoint that was read gets nothing")
}

func TestAnEndpointWithoutALoadIsTakenForABusyOneAndNotForAnIdleOne(t *testing.T) {
	t.Parallel()
	f := newFleet(t, oneModel())
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{
		engine("silent", "p", noLoad), engine("idle", "p", f.running(0)), engine("busy", "p", f.running(200)),
	}})
	for seed := range uint64(50) {
		r := f.acquire(ask(seed, 4))
		if r.EndpointID != "n/idle" {
			t.Fatalf("request %d went to %s: %s", seed, r.EndpointID, r.Decision().Reason)
		}
		r.Done(Outcome{})
	}
	// It only weighs: what is left, and what has even more to do, comes after it.
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("silent", "p", noLoad), engine("busy", "p", f.running(200))}})
	count := map[string]int{}
	for seed := range uint64(60) {
		count[f.acquire(ask(100+seed, 4)).EndpointID]++
	}
	if count["n/silent"] == 0 || count["n/busy"] == 0 {
		t.Errorf("requests went to %v", count)
	}
	f.snapshot("n", &report.Report{Endpoints: []*report.Endpoint{engine("silent", "p", noLoad)}})
	f.acquire(ask(200, 4))
}
