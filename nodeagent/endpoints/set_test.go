package endpoints

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"
)

// running is a Poller that runs until the test ends.
func running(t *testing.T, opts Options) *Poller {
	t.Helper()
	p, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return p
}

// reached waits until exactly the named endpoints are there, and all of them answer.
func reached(t *testing.T, p *Poller, names ...string) []State {
	t.Helper()
	changed, end := p.Subscribe()
	defer end()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	for {
		list := p.Snapshot()
		var have []string
		for _, s := range list {
			if s.Reachable {
				have = append(have, s.Name)
			}
		}
		if slices.Equal(have, names) && len(list) == len(names) {
			return list
		}
		select {
		case <-changed:
		case <-deadline.C:
			t.Fatalf("waited in vain for %v: %+v", names, list)
		}
	}
}

// metricsAt serves a metrics page of an engine that started at a time.
func metricsAt(t *testing.T, started int64) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, "vllm:num_requests_running 3\nprocess_start_time_seconds %d\n", started)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func TestEnginesThatComeAndGoAreReadBesideThoseThatStay(t *testing.T) {
	t.Parallel()
	p := running(t, Options{Endpoints: []Endpoint{{Name: "always", URL: metricsAt(t, 1_800_000_000), Engine: EngineVLLM}}})
	reached(t, p, "always")
	a := Endpoint{Name: "a", URL: metricsAt(t, 1_800_000_001), Engine: EngineVLLM, Pod: "uid-a", Models: []string{"m"}}
	b := Endpoint{Name: "b", URL: metricsAt(t, 1_800_000_002) + "/", Engine: EngineVLLM, Pod: "uid-b", Models: []string{"m"}}
	if err := p.Set([]Endpoint{a, b}); err != nil {
		t.Fatal(err)
	}
	list := reached(t, p, "always", "a", "b")
	if list[1].Load.Running != 3 || list[1].Pod != "uid-a" || list[1].Incarnation == 0 {
		t.Errorf("state %+v", list[1])
	}
	// Other words about the same engine keep what was read of it.
	a.Devices, a.Accelerator = []string{"gpu-0"}, "H100"
	if err := p.Set([]Endpoint{a}); err != nil {
		t.Fatal(err)
	}
	after := p.Snapshot()
	if len(after) != 2 || after[1].Incarnation != list[1].Incarnation || !after[1].Reachable || after[1].Devices[0] != "gpu-0" || after[1].Accelerator != "H100" {
		t.Errorf("states %+v", after)
	}
	// The same name for another pod is another engine, of which nothing is known.
	a.Pod = "uid-again"
	if err := p.Set([]Endpoint{a}); err != nil {
		t.Fatal(err)
	}
	if s := p.Snapshot()[1]; s.Pod != "uid-again" || s.Reachable && s.Incarnation == 0 {
		t.Errorf("state %+v", s)
	}
	reached(t, p, "always", "a")
	if err := p.Set(nil); err != nil {
		t.Fatal(err)
	}
	reached(t, p, "always")
}

func TestASetThatIsWrongChangesNothing(t *testing.T) {
	t.Parallel()
	p, err := New(Options{Endpoints: []Endpoint{{Name: "a", URL: "http://127.0.0.1:1", Engine: EngineSim}}})
	if err != nil {
		t.Fatal(err)
	}
	good := Endpoint{Name: "b", URL: "http://127.0.0.1:2", Engine: EngineSim}
	if err := p.Set([]Endpoint{good}); err != nil {
		t.Fatal(err)
	}
	many := make([]Endpoint, MaxEndpoints)
	for i := range many {
		many[i] = Endpoint{Name: fmt.Sprint("e", i), URL: "http://127.0.0.1:2", Engine: EngineSim}
	}
	for _, list := range [][]Endpoint{
		{{Name: "a", URL: "http://127.0.0.1:2", Engine: EngineSim}},
		{{Name: "b", URL: "nonsense", Engine: EngineSim}},
		{good, good},
		many,
	} {
		if err := p.Set(list); err == nil {
			t.Errorf("took %d endpoints", len(list))
		}
		if s := p.Snapshot(); len(s) != 2 || s[1].Name != "b" {
			t.Errorf("states %+v", s)
		}
	}
}
