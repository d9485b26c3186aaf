package endpoints

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/hearth-dev/hearth/nodeagent/report"
)

func page(t testing.TB, name string) []byte {
	t.Helper()
	data, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestParseReadsTheFewLinesOfEachEngine(t *testing.T) {
	t.Parallel()
	for file, c := range map[string]struct {
		engine string
		want   reading
	}{
		"vllm-0.32.0.txt": {EngineVLLM, reading{
			capacity: 576, block: 32, prompt: 5210, cached: 160, generated: 42, started: 1.79596883536e+09, found: true,
		}},
		"vllm-dp2.txt": {EngineSim, reading{
			running: 7, waiting: 3, usage: 0.375, capacity: 32000, block: 16, prompt: 2000, cached: 700, generated: 50,
			started: 1.79596883536e+09, found: true,
		}},
		"sglang.txt": {EngineSGLang, reading{
			running: 5, waiting: 2, usage: 0.28, capacity: 6400, block: 64, prompt: 8000, cached: 6000, generated: 700, maxRunning: 128, found: true,
		}},
		"llama-server.txt": {EngineLlamaServer, reading{running: 2, waiting: 1, prompt: 200, cached: 80, generated: 64, found: true}},
	} {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			got := parse(page(t, file), namesOf[c.engine])
			if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(reading{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestParsePassesOverWhatItCannotRead(t *testing.T) {
	t.Parallel()
	text := strings.Join([]string{
		"", "#", "{", "}", "vllm:num_requests_running", "vllm:num_requests_running{", `vllm:num_requests_running{a="b} 3`,
		"vllm:num_requests_running NaN", "vllm:num_requests_running +Inf", "vllm:num_requests_running -5", "vllm:num_requests_running 1e300",
		"vllm:kv_cache_usage_perc 7", `vllm:cache_config_info{block_size="None",num_gpu_blocks="99999999999999999999"} 1`,
		"vllm:generation_tokens_total 3\r", "vllm:prompt_tokens_total\t4 17",
	}, "\n")
	got := parse([]byte(text), vllmNames)
	want := reading{running: 1<<32 - 1, usage: 1, generated: 3, prompt: 4, found: true}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(reading{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func FuzzMetricsPage(f *testing.F) {
	for _, name := range []string{"vllm-dp2.txt", "sglang.txt", "llama-server.txt"} {
		f.Add(page(f, name))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, names := range namesOf {
			r := parse(data, names)
			if !(r.usage >= 0 && r.usage <= 1) || r.cached > 1<<53 {
				t.Fatalf("usage %v, cached %d", r.usage, r.cached)
			}
		}
	})
}

func BenchmarkParse(b *testing.B) {
	data := page(b, "vllm-0.32.0.txt")
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		parse(data, vllmNames)
	}
}

func TestThePeriodKeepsReadsUnderHalfAPercent(t *testing.T) {
	t.Parallel()
	ms := time.Millisecond
	for _, c := range []struct {
		recent []time.Duration
		want   time.Duration
	}{
		{nil, time.Second},
		{[]time.Duration{ms}, time.Second},
		{[]time.Duration{900 * ms, 5 * ms, 300 * ms}, time.Second},
		{[]time.Duration{10 * ms, 8 * ms}, 1600 * ms},
		{[]time.Duration{90 * ms}, 10 * time.Second},
	} {
		if got := period(c.recent); got != c.want {
			t.Errorf("period(%v) = %v, want %v", c.recent, got, c.want)
		}
	}
	for failures, want := range []time.Duration{1: 1 * time.Second, 2: 2 * time.Second, 3: 4 * time.Second, 4: 8 * time.Second, 5: 10 * time.Second, 6: 10 * time.Second} {
		if got := backoff(failures, false); failures > 0 && got != want {
			t.Errorf("backoff(%d) = %v, want %v", failures, got, want)
		}
	}
	if got := backoff(50, true); got != time.Second {
		t.Errorf("an engine that does not listen is tried again after %v", got)
	}
}

func TestAnIncarnationChangesWhenTheEngineRestarts(t *testing.T) {
	t.Parallel()
	now := time.UnixMilli(5000)
	for name, c := range map[string]struct {
		present uint64
		last, r reading
		refused bool
		same    bool
	}{
		"the first reading":             {0, reading{}, reading{prompt: 5}, false, false},
		"it came up after the agent":    {0, reading{}, reading{}, true, false},
		"counters grow":                 {7, reading{prompt: 5}, reading{prompt: 6}, false, true},
		"counters stand":                {7, reading{prompt: 5}, reading{prompt: 5}, false, true},
		"a counter falls":               {7, reading{prompt: 5, generated: 9}, reading{prompt: 5, generated: 8}, false, false},
		"nobody listened meanwhile":     {7, reading{}, reading{}, true, false},
		"the start time stays":          {100000, reading{started: 100}, reading{started: 100.2}, true, true},
		"the start time moves":          {100000, reading{started: 100, prompt: 5}, reading{started: 130, prompt: 9}, false, false},
		"the clock stands at an old id": {6000, reading{prompt: 5}, reading{prompt: 4}, false, false},
	} {
		got := incarnation(c.present, c.last, c.r, c.refused, now)
		if got == 0 || (got == c.present) != c.same {
			t.Errorf("%s: incarnation %d after %d", name, got, c.present)
		}
	}
	// Two agents that find the same run give it the same number.
	if a, b := incarnation(0, reading{}, reading{prompt: 5}, false, now), incarnation(0, reading{}, reading{prompt: 9}, false, now.Add(time.Hour)); a != b || a != report.RunFound {
		t.Errorf("a run that was found is %d and then %d", a, b)
	}
	if got := incarnation(0, reading{}, reading{}, true, now); got == report.RunFound {
		t.Error("a run whose start was seen passes for one that was found")
	}
}

// fakeEngine answers as an engine does, with pages the test sets.
type fakeEngine struct {
	mu    sync.Mutex
	pages map[string]string
	asked map[string]int
}

func (f *fakeEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked[r.URL.Path]++
	text, found := f.pages[r.URL.Path]
	if !found {
		http.NotFound(w, r)
		return
	}
	_, _ = w.Write([]byte(text))
}

func (f *fakeEngine) set(path, text string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pages[path] = text
}

func (f *fakeEngine) count(path string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked[path]
}

func newFake(t *testing.T) (*fakeEngine, *httptest.Server) {
	t.Helper()
	f := &fakeEngine{pages: map[string]string{}, asked: map[string]int{}}
	server := httptest.NewServer(f)
	t.Cleanup(server.Close)
	return f, server
}

func one(t *testing.T, config Endpoint) *engine {
	t.Helper()
	p, err := New(Options{Endpoints: []Endpoint{config}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.client.CloseIdleConnections)
	return p.polled[0].engine
}

func TestLlamaServerIsReadFromMetricsAndSlots(t *testing.T) {
	t.Parallel()
	fake, server := newFake(t)
	fake.set("/metrics", string(page(t, "llama-server.txt")))
	fake.set("/slots", string(page(t, "llama-server-slots.json")))
	fake.set("/v1/models", `{"data":[{"id":"smollm2"}],"object":"list"}`)
	e := one(t, Endpoint{Name: "e", URL: server.URL + "/", Engine: EngineLlamaServer})
	for range 3 {
		e.read(t.Context())
	}
	s := e.state
	if !s.Reachable || s.Load.MaxRunning != 4 || s.Load.KVCapacityTokens != 8192 || !slices.Equal(s.ServedModels, []string{"smollm2"}) || s.Load.Running != 2 {
		t.Errorf("state is %+v", s)
	}
	if fake.count("/slots") != 1 || fake.count("/v1/models") != 1 || fake.count("/metrics") != 3 {
		t.Errorf("asked: %v", fake.asked)
	}
}

func TestServedModelsAreAskedOncePerIncarnationAndUntilTheyAnswer(t *testing.T) {
	t.Parallel()
	fake, server := newFake(t)
	metrics := func(start, prompt int) string {
		return fmt.Sprintf("process_start_time_seconds %d\nvllm:prompt_tokens_total %d\n", start, prompt)
	}
	fake.set("/metrics", metrics(1000, 5))
	fake.set("/v1/models", "not json")
	e := one(t, Endpoint{Name: "e", URL: server.URL, Engine: EngineVLLM})
	e.read(t.Context())
	fake.set("/v1/models", `{"data":[{"id":"a"},{"id":""},{"id":"b"}]}`)
	e.read(t.Context())
	e.read(t.Context())
	if !slices.Equal(e.state.ServedModels, []string{"a", "b"}) || fake.count("/v1/models") != 2 || e.state.Incarnation != 1000000 {
		t.Errorf("state is %+v after %d questions", e.state, fake.count("/v1/models"))
	}
	fake.set("/metrics", metrics(2000, 1))
	fake.set("/v1/models", `{"data":[{"id":"c"}]}`)
	e.read(t.Context())
	if !slices.Equal(e.state.ServedModels, []string{"c"}) || e.state.Incarnation != 2000000 {
		t.Errorf("after a restart the state is %+v", e.state)
	}
}

func TestConfiguredModelsAreNotAskedFor(t *testing.T) {
	t.Parallel()
	fake, server := newFake(t)
	fake.set("/metrics", "")
	e := one(t, Endpoint{Name: "e", URL: server.URL, Engine: EngineVLLM, Models: []string{"m"}})
	e.read(t.Context())
	if !e.state.Reachable || !slices.Equal(e.state.ServedModels, []string{"m"}) || fake.count("/v1/models") != 0 || !e.state.Load.At.IsZero() {
		t.Errorf("state is %+v", e.state)
	}
}

func TestAnEngineWithoutMetricsIsReachableWithUnknownLoad(t *testing.T) {
	t.Parallel()
	fake, server := newFake(t)
	fake.set("/v1/models", `{"data":[{"id":"m"}]}`)
	e := one(t, Endpoint{Name: "e", URL: server.URL, Engine: EngineLlamaServer})
	e.read(t.Context())
	if !e.state.Reachable || !e.state.Load.At.IsZero() || e.state.Incarnation == 0 {
		t.Errorf("state is %+v", e.state)
	}
}

func TestAnEngineThatDoesNotListenIsUnreachableAtOnceAndNewWhenItIsBack(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	e := one(t, Endpoint{Name: "e", URL: "http://" + addr, Engine: EngineSim, Models: []string{"m"}})
	e.state.Reachable, e.state.Incarnation = true, 7
	state, pause := e.read(t.Context())
	if state.Reachable || state.Detail == "" || pause != time.Second || !e.refused {
		t.Errorf("state is %+v, pause %v", state, pause)
	}
	fake, server := newFake(t)
	fake.set("/metrics", "vllm:num_requests_running 0\n")
	e.config.URL = server.URL
	if state, _ = e.read(t.Context()); !state.Reachable || state.Incarnation == 7 || state.Detail != "" {
		t.Errorf("back: %+v", state)
	}
}

func TestASlowEngineKeepsItsPlaceForSomeReads(t *testing.T) {
	t.Parallel()
	fake, server := newFake(t)
	fake.set("/metrics", "vllm:num_requests_running 3\n")
	e := one(t, Endpoint{Name: "e", URL: server.URL, Engine: EngineVLLM, Models: []string{"m"}})
	e.read(t.Context())
	fake.set("/metrics", strings.Repeat("x", maxPage+1))
	for i := range patience {
		state, _ := e.read(t.Context())
		if state.Reachable != (i+1 < patience) || state.Load.Running != 3 || !strings.Contains(state.Detail, "past") {
			t.Errorf("after %d failures: %+v", i+1, state)
		}
	}
}

func TestRunReadsEveryEngineAndSignals(t *testing.T) {
	t.Parallel()
	var list []Endpoint
	for i := range 3 {
		fake, server := newFake(t)
		fake.set("/metrics", fmt.Sprintf("vllm:num_requests_running %d\n", i+1))
		list = append(list, Endpoint{Name: fmt.Sprint("e", i), URL: server.URL, Engine: EngineSim, Models: []string{"m"}})
	}
	p, err := New(Options{Endpoints: list})
	if err != nil {
		t.Fatal(err)
	}
	changed, unsubscribe := p.Subscribe()
	defer unsubscribe()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	for {
		running := 0
		for _, s := range p.Snapshot() {
			running += int(s.Load.Running)
		}
		if running == 6 {
			break
		}
		select {
		case <-changed:
		case <-t.Context().Done():
			t.Fatal("the engines were not read")
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run gave %v", err)
	}
}

func TestNewRefusesEndpointsThatCannotBe(t *testing.T) {
	t.Parallel()
	good := Endpoint{Name: "a", URL: "http://127.0.0.1:1", Engine: EngineSim}
	for want, list := range map[string][]Endpoint{
		"empty or used twice": {good, good},
		"not of the form":     {{Name: "a", URL: "http://u:p@h", Engine: EngineSim}},
		"want one of":         {{Name: "a", URL: "http://h:1", Engine: "other"}},
		"at most":             make([]Endpoint, MaxEndpoints+1),
	} {
		if _, err := New(Options{Endpoints: list}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("gave %v, want %q", err, want)
		}
	}
}
