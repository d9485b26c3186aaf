//go:build outside

package outside

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"math"
	"net/http"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/hearth-dev/hearth/router/pool"
	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/sim/engine"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
)

// step is one call for testdata/openai_client.py.
type step struct {
	Name    string         `json:"name"`
	Call    string         `json:"call"`
	Args    map[string]any `json:"args"`
	Options map[string]any `json:"options,omitempty"`
}

// outcome is what a step came to.
type outcome struct {
	OK          json.RawMessage `json:"ok"`
	Error       string          `json:"error"`
	Classes     []string        `json:"classes"`
	Status      int             `json:"status"`
	Code        string          `json:"code"`
	Type        string          `json:"type"`
	Param       string          `json:"param"`
	Message     string          `json:"message"`
	RequestID   string          `json:"request_id"`
	RetryAfter  string          `json:"retry_after"`
	ShouldRetry string          `json:"should_retry"`
	Partial     string          `json:"partial"`
	Seconds     float64         `json:"seconds"`
}

// into decodes a value, or fails with the error that came instead.
func (o outcome) into(t *testing.T, name string, v any) {
	t.Helper()
	if o.Error != "" {
		t.Fatalf("%s raised %s (%d, %s): %s", name, o.Error, o.Status, o.Code, o.Message)
	}
	if err := json.Unmarshal(o.OK, v); err != nil {
		t.Fatalf("%s: %v: %s", name, err, o.OK)
	}
}

// front counts the tries of each step between the client and the router and
// changes nothing.
type front struct {
	*httputil.ReverseProxy
	mu    sync.Mutex
	tries map[string]int
}

func newFront(t *testing.T, to string) *front {
	t.Helper()
	u, err := url.Parse(to)
	if err != nil {
		t.Fatal(err)
	}
	f := &front{tries: map[string]int{}}
	f.ReverseProxy = &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(u) },
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0), // some streams are cut on purpose
	}
	return f
}

func (f *front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	f.tries[r.Header.Get("X-Test")]++
	f.mu.Unlock()
	// An answer may begin before the transport has seen the end of a body that
	// it reads from here; net/http then closes the body and the answer is cut.
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	f.ReverseProxy.ServeHTTP(w, r)
}

func (f *front) count(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.tries[name]
}

// application is the OpenAI client, the counting front and the router behind.
type application struct {
	t     *testing.T
	ctx   context.Context
	rig   *rig.Rig
	front *front
	url   string
}

func newApplication(ctx context.Context, t *testing.T, r *rig.Rig, opts rig.RouterOptions) *application {
	t.Helper()
	router, err := r.StartRouter(ctx, opts)
	if err != nil {
		t.Fatal(err)
	}
	f := newFront(t, router.URL)
	addr, err := r.Serve(ctx, f)
	if err != nil {
		t.Fatal(err)
	}
	return &application{t: t, ctx: ctx, rig: r, front: f, url: addr}
}

func (a *application) run(steps ...step) map[string]outcome {
	a.t.Helper()
	for i := range steps {
		if steps[i].Call == "raw" {
			steps[i].Args["name"] = steps[i].Name
		}
	}
	text, err := json.Marshal(steps)
	if err != nil {
		a.t.Fatal(err)
	}
	c := pythonCommand(a.rig, "openai_client", nil, a.url, "sk-secret-of-the-client")
	c.Stdin = bytes.NewReader(text)
	var raw map[string]json.RawMessage
	runJSON(a.ctx, a.t, a.rig, c, &raw)
	if string(raw["version"]) != `"3.57.0"` {
		a.t.Fatalf("client is version %s, want 3.57.0", raw["version"])
	}
	out := map[string]outcome{}
	for _, s := range steps {
		var o outcome
		if err := json.Unmarshal(raw[s.Name], &o); err != nil {
			a.t.Fatalf("%s: %v: %s", s.Name, err, raw[s.Name])
		}
		out[s.Name] = o
	}
	return out
}

// usage is the figure of chat, completions and embeddings.
type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
	Details    struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// simEngines serves n simulated engines and gives their URLs.
func simEngines(ctx context.Context, t *testing.T, r *rig.Rig, n int) []string {
	t.Helper()
	var urls []string
	for range n {
		e, err := engine.New(engine.Options{ServedModel: "sim", Speedup: 20, AllowFaults: true})
		if err != nil {
			t.Fatal(err)
		}
		u, err := r.Serve(ctx, e)
		if err != nil {
			t.Fatal(err)
		}
		urls = append(urls, u)
	}
	return urls
}

// logical is a model "chat-large" over the given engines, which serve "sim".
func logical(urls ...string) rig.RouterOptions {
	p := pool.PoolConfig{Name: "gpu"}
	for _, u := range urls {
		p.Endpoints = append(p.Endpoints, pool.EndpointConfig{URL: u, Engine: "sim", ServedModels: []string{"sim"}})
	}
	return rig.RouterOptions{
		Pools: []pool.PoolConfig{p},
		Models: []pool.ModelConfig{{Name: "chat-large", Targets: []pool.TargetConfig{
			{Pool: "gpu", ServedModel: "sim", Weight: 1},
		}}},
	}
}

var hello = []map[string]any{{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "What does the router do?"}}

func TestFastOpenAIClientTalksThroughTheRouter(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	app := newApplication(ctx, t, r, logical(simEngines(ctx, t, r, 2)...))
	out := app.run(
		step{Name: "models", Call: "models"},
		step{Name: "model", Call: "retrieve_model", Args: map[string]any{"model": "chat-large"}},
		step{Name: "chat", Call: "chat", Args: map[string]any{"model": "chat-large", "messages": hello, "max_tokens": 12}},
		step{Name: "again", Call: "chat", Args: map[string]any{"model": "chat-large", "messages": hello, "max_completion_tokens": 12}},
		step{Name: "own-id", Call: "chat", Args: map[string]any{
			"model": "chat-large", "messages": hello, "max_tokens": 4, "extra_headers": map[string]string{"x-request-id": "id-of-the-client"},
		}},
		step{Name: "stream", Call: "chat_stream", Args: map[string]any{"model": "chat-large", "messages": hello, "max_tokens": 12}},
		step{Name: "stream-usage", Call: "chat_stream", Args: map[string]any{
			"model": "chat-large", "messages": hello, "max_tokens": 12, "stream_options": map[string]any{"include_usage": true},
		}},
		step{Name: "completion", Call: "completion", Args: map[string]any{"model": "chat-large", "prompt": "Once upon a time", "max_tokens": 8}},
		step{Name: "responses", Call: "responses", Args: map[string]any{"model": "chat-large", "input": "hello", "max_output_tokens": 16}},
		step{Name: "responses-chain", Call: "responses_chain", Args: map[string]any{"model": "chat-large", "input": "hello", "max_output_tokens": 16}},
		step{Name: "responses-stream", Call: "responses_stream", Args: map[string]any{"model": "chat-large", "input": "hello", "max_output_tokens": 16}},
		step{Name: "embeddings", Call: "embeddings", Args: map[string]any{"model": "chat-large", "input": []string{"one", "two"}}},
		step{Name: "embeddings-float", Call: "embeddings", Args: map[string]any{"model": "chat-large", "input": []string{"one", "two"}, "encoding_format": "float"}},
		step{Name: "tokenize", Call: "raw", Args: map[string]any{"method": "POST", "path": "/tokenize", "body": `{"model":"chat-large","prompt":"four bytes"}`}},
	)

	var models struct{ IDs, Objects []string }
	out["models"].into(t, "models", &models)
	if !slices.Equal(models.IDs, []string{"chat-large"}) || !slices.Equal(models.Objects, []string{"model"}) {
		t.Errorf("models are %+v, want the logical name alone", models)
	}
	var model struct{ ID string }
	out["model"].into(t, "model", &model)
	if model.ID != "chat-large" {
		t.Errorf("model retrieved is %q", model.ID)
	}

	type chat struct {
		ID, Object, Model, Text, Finish string
		Usage                           *usage
		RequestID                       string `json:"request_id"`
	}
	var one, two chat
	out["chat"].into(t, "chat", &one)
	out["again"].into(t, "again", &two)
	if one.Object != "chat.completion" || one.Text == "" || one.Usage == nil || one.Usage.Completion == 0 || one.Usage.Prompt == 0 {
		t.Errorf("chat gave %+v", one)
	}
	if one.RequestID == "" || one.RequestID == two.RequestID {
		t.Errorf("request ids are %q and %q, want two that differ", one.RequestID, two.RequestID)
	}

	var own chat
	out["own-id"].into(t, "own-id", &own)
	if own.RequestID != "id-of-the-client" {
		t.Errorf("a client that sent a request id got back %q", own.RequestID)
	}

	type stream struct {
		Chunks       int
		Text, Finish string
		Usage        *usage
		EmptyChoices int    `json:"empty_choices"`
		RequestID    string `json:"request_id"`
		ContentType  string `json:"content_type"`
	}
	var plain, withUsage stream
	out["stream"].into(t, "stream", &plain)
	out["stream-usage"].into(t, "stream-usage", &withUsage)
	if plain.Text == "" || plain.Finish == "" || plain.Chunks < 3 || plain.RequestID == "" || !strings.HasPrefix(plain.ContentType, "text/event-stream") {
		t.Errorf("stream gave %+v", plain)
	}
	if plain.Usage != nil || plain.EmptyChoices != 0 {
		t.Errorf("a stream whose client asked for no usage has usage %+v and %d chunks without choices", plain.Usage, plain.EmptyChoices)
	}
	if withUsage.Usage == nil || withUsage.Usage.Completion == 0 || withUsage.EmptyChoices != 1 {
		t.Errorf("a stream whose client asked for usage gave %+v", withUsage)
	}

	var completion struct {
		Object, Text string
		Usage        usage
	}
	out["completion"].into(t, "completion", &completion)
	if completion.Object != "text_completion" || completion.Text == "" || completion.Usage.Completion == 0 {
		t.Errorf("completion gave %+v", completion)
	}

	var response struct{ ID, Object, Status, Text string }
	out["responses"].into(t, "responses", &response)
	// The cap on its tokens ends it early.
	if response.ID == "" || response.Object != "response" || response.Status != "incomplete" || response.Text == "" {
		t.Errorf("response is %+v", response)
	}
	var chain struct{ First, Second, Previous, Text string }
	out["responses-chain"].into(t, "responses-chain", &chain)
	if chain.First == "" || chain.First == chain.Second || chain.Previous != chain.First || chain.Text == "" {
		t.Errorf("a chain of responses is %+v", chain)
	}
	var events struct {
		Kinds []string
		Text  string
		Final string
	}
	out["responses-stream"].into(t, "responses-stream", &events)
	if !slices.Contains(events.Kinds, "response.created") || !slices.Contains(events.Kinds, "response.incomplete") || events.Text == "" || events.Final != events.Text {
		t.Errorf("streamed response is %+v", events)
	}

	var base64, floats struct {
		Count, Dimensions int
		Head              []float64
	}
	out["embeddings"].into(t, "embeddings", &base64)
	out["embeddings-float"].into(t, "embeddings-float", &floats)
	if base64.Count != 2 || base64.Dimensions == 0 || base64.Dimensions != floats.Dimensions ||
		!slices.EqualFunc(base64.Head, floats.Head, func(a, b float64) bool { return math.Abs(a-b) < 1e-6 }) {
		t.Errorf("embeddings are %+v in base64 and %+v as floats", base64, floats)
	}
	var tokenize struct {
		Status int
		Body   string
	}
	out["tokenize"].into(t, "tokenize", &tokenize)
	if tokenize.Status != http.StatusOK || !strings.Contains(tokenize.Body, "tokens") {
		t.Errorf("tokenize gave %d %s", tokenize.Status, tokenize.Body)
	}
}

// An engine that does not listen costs a client nothing while another does.
func TestFastOpenAIClientNeverSeesAnEngineThatRefusesConnections(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	gone, err := rig.FreeAddr(ctx)
	if err != nil {
		t.Fatal(err)
	}
	app := newApplication(ctx, t, r, logical("http://"+gone, simEngines(ctx, t, r, 1)[0]))
	var steps []step
	for i := range 8 {
		steps = append(steps, step{Name: fmt.Sprintf("chat-%d", i), Call: "chat", Args: map[string]any{
			"model": "chat-large", "max_tokens": 4, "messages": []map[string]any{{"role": "user", "content": fmt.Sprintf("question %d", i)}},
		}})
	}
	for name, got := range app.run(steps...) {
		if got.Error != "" || app.front.count(name) != 1 {
			t.Errorf("%s: raised %q (%s) after %d tries, want an answer at the first", name, got.Error, got.Message, app.front.count(name))
		}
	}
}

// scripted answers with a status and an OpenAI error body by the model's
// name, "NNN" being the status, and counts what reaches it.
type scripted struct {
	mu    sync.Mutex
	tries map[string]int
	auth  []string
}

func (s *scripted) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var body struct{ Model string }
	_ = json.NewDecoder(r.Body).Decode(&body)
	s.mu.Lock()
	s.tries[body.Model]++
	if v := r.Header.Get("Authorization"); v != "" {
		s.auth = append(s.auth, v)
	}
	s.mu.Unlock()
	var status int
	if _, err := fmt.Sscanf(body.Model, "engine-%d", &status); err != nil {
		status = http.StatusNotImplemented
	}
	w.Header().Set("Content-Type", "application/json")
	if status == http.StatusTooManyRequests {
		w.Header().Set("Retry-After", "1")
	}
	w.WriteHeader(status)
	_, _ = fmt.Fprintf(w, `{"error":{"message":"the engine says %d","type":"engine_error","param":"messages","code":"code_%d"}}`, status, status)
}

func (s *scripted) count(model string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tries[model]
}

func TestFastOpenAIClientSeesEachErrorClassAndRetriesOnlyWhatMayHeal(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	eng := &scripted{tries: map[string]int{}}
	u, err := r.Serve(ctx, eng)
	if err != nil {
		t.Fatal(err)
	}
	opts := rig.RouterOptions{Body: 256 * units.KiB}
	opts.Pools = []pool.PoolConfig{{Name: "gpu", Endpoints: []pool.EndpointConfig{{URL: u}}}}
	for _, status := range []int{400, 401, 403, 404, 413, 422, 429, 500, 503} {
		name := fmt.Sprintf("engine-%d", status)
		opts.Models = append(opts.Models, pool.ModelConfig{Name: name, Targets: []pool.TargetConfig{{Pool: "gpu", Weight: 1}}})
	}
	opts.Models = append(opts.Models, pool.ModelConfig{Name: "nobody", Targets: []pool.TargetConfig{{Pool: "empty", Weight: 1}}})
	app := newApplication(ctx, t, r, opts)

	chat := func(name, model string, options map[string]any) step {
		return step{Name: name, Call: "chat", Args: map[string]any{"model": model, "messages": hello}, Options: options}
	}
	big := []map[string]any{{"role": "user", "content": strings.Repeat("x", 300<<10)}}
	fast := map[string]any{"max_retries": 1}
	out := app.run(
		chat("engine-400", "engine-400", nil),
		chat("engine-401", "engine-401", nil),
		chat("engine-403", "engine-403", nil),
		chat("engine-404", "engine-404", nil),
		chat("engine-422", "engine-422", nil),
		chat("engine-429", "engine-429", fast),
		chat("engine-500", "engine-500", fast),
		chat("engine-503", "engine-503", fast),
		chat("unknown-model", "no-such-model", nil),
		chat("no-endpoint", "nobody", fast),
		step{Name: "too-large", Call: "chat", Args: map[string]any{"model": "engine-400", "messages": big}},
		step{Name: "bad-response-id", Call: "responses", Args: map[string]any{"model": "engine-400", "input": "x", "previous_response_id": "resp_of_nobody"}},
		step{Name: "bad-json", Call: "raw", Args: map[string]any{"method": "POST", "path": "/v1/chat/completions", "body": `{"model":"engine-400",`}},
		step{Name: "no-such-model-listed", Call: "retrieve_model", Args: map[string]any{"model": "no-such-model"}},
	)
	for _, tc := range []struct {
		name   string
		class  string
		status int
		code   string // "" = any
		tries  int    // by the client, as the front counts them
	}{
		{"engine-400", "BadRequestError", 400, "code_400", 1},
		{"engine-401", "AuthenticationError", 401, "code_401", 1},
		{"engine-403", "PermissionDeniedError", 403, "code_403", 1},
		{"engine-404", "NotFoundError", 404, "code_404", 1},
		{"engine-422", "UnprocessableEntityError", 422, "code_422", 1},
		{"engine-429", "RateLimitError", 429, "code_429", 2},
		{"engine-500", "InternalServerError", 500, "code_500", 2},
		{"engine-503", "InternalServerError", 503, "", 2},
		{"unknown-model", "NotFoundError", 404, "model_not_found", 1},
		{"no-endpoint", "InternalServerError", 503, "", 2},
		{"too-large", "APIStatusError", 413, "", 1},
		{"bad-response-id", "NotFoundError", 404, "", 1},
		{"no-such-model-listed", "NotFoundError", 404, "model_not_found", 1},
	} {
		got := out[tc.name]
		if got.Error != tc.class || got.Status != tc.status || tc.code != "" && got.Code != tc.code {
			t.Errorf("%s: raised %s, status %d, code %q (%s); want %s, %d, %q", tc.name, got.Error, got.Status, got.Code, got.Message, tc.class, tc.status, tc.code)
		}
		if n := app.front.count(tc.name); n != tc.tries {
			t.Errorf("%s: the client tried %d times, want %d", tc.name, n, tc.tries)
		}
		if got.Type == "" || got.Message == "" || got.RequestID == "" {
			t.Errorf("%s: error has type %q, message %q, request id %q: want all", tc.name, got.Type, got.Message, got.RequestID)
		}
	}
	for _, name := range []string{"unknown-model", "too-large", "bad-response-id"} {
		if out[name].ShouldRetry != "false" {
			t.Errorf("%s: x-should-retry is %q, want false", name, out[name].ShouldRetry)
		}
	}
	if out["unknown-model"].Param != "model" {
		t.Errorf("unknown model: param is %q, want model", out["unknown-model"].Param)
	}
	if out["engine-429"].RetryAfter != "1" {
		t.Errorf("the engine's retry-after is %q at the client, want 1", out["engine-429"].RetryAfter)
	}
	if out["no-endpoint"].RetryAfter == "" {
		t.Error("no endpoint: no retry-after")
	}
	var raw struct {
		Status  int
		Headers map[string]string
		Body    string
	}
	out["bad-json"].into(t, "bad-json", &raw)
	var body struct {
		Error struct{ Message, Type, Code string }
	}
	if err := json.Unmarshal([]byte(raw.Body), &body); err != nil || raw.Status != 400 || body.Error.Message == "" || raw.Headers["x-should-retry"] != "false" {
		t.Errorf("bad JSON is answered %d %v %s", raw.Status, raw.Headers, raw.Body)
	}
	// Retrying is the client's business once an engine has answered.
	if n := eng.count("engine-429"); n != 2 {
		t.Errorf("the engine saw %d tries of a request that it answered with 429, want the client's 2", n)
	}
	eng.mu.Lock()
	defer eng.mu.Unlock()
	if len(eng.auth) != 0 {
		t.Errorf("the client's Authorization reached the engine: %d times", len(eng.auth))
	}
}

func TestFastOpenAIClientIsToldWhenAStreamIsCut(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	urls := simEngines(ctx, t, r, 1)
	app := newApplication(ctx, t, r, logical(urls...))
	setFault(ctx, t, urls[0], engine.Fault{Mode: engine.FaultReset, Count: 1, AfterTokens: 4})
	wantCut(t, app)
	// The engine is well again, and the router lets it serve.
	again := step{Name: "after", Call: "chat_stream", Args: map[string]any{"model": "chat-large", "messages": hello, "max_tokens": 8}}
	err := rig.Until(ctx, "a whole stream after the cut", func(context.Context) (bool, error) {
		got := app.run(again)["after"]
		return got.Error == "", nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestFastOpenAIClientIsToldWhenTheEngineIsKilledInMidStream(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	model := filepath.Join(r.Dir, "model")
	writeModel(t, model, hub.ModelOptions{Size: units.MiB, Shards: 2})
	addr, err := rig.FreeAddr(ctx)
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := strings.Cut(addr, ":")
	eng, err := r.Start(rig.Command{
		Name: "engine-sim", Path: built.hearth,
		Args: []string{"engine-sim", "--model", model, "--port", port, "--served-model", "sim", "--allow-faults"},
	})
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + addr
	err = rig.Until(ctx, "engine-sim to answer", func(ctx context.Context) (bool, error) {
		return rig.Answers(ctx, url+"/health")
	}, eng)
	if err != nil {
		t.Fatal(err)
	}
	app := newApplication(ctx, t, r, logical(url))
	setFault(ctx, t, url, engine.Fault{Mode: engine.FaultDie, Count: 1, AfterTokens: 4})
	wantCut(t, app)
	select {
	case <-eng.Done():
	case <-ctx.Done():
		t.Error("the engine was not killed by the stream")
	}
}

// wantCut streams from an engine that breaks off and wants an error after some
// text, without a second try.
func wantCut(t *testing.T, app *application) {
	t.Helper()
	out := app.run(step{
		Name: "cut", Call: "chat_stream", Args: map[string]any{"model": "chat-large", "messages": hello, "max_tokens": 64},
	})["cut"]
	if out.Error == "" {
		t.Fatalf("a cut stream looked like success: %s", out.OK)
	}
	if !slices.Contains(out.Classes, "APIError") {
		t.Errorf("a cut stream raised %s %v (%s), want an APIError", out.Error, out.Classes, out.Message)
	}
	if out.Partial == "" {
		t.Error("the text before the cut did not arrive")
	}
	if n := app.front.count("cut"); n != 1 {
		t.Errorf("a stream cut after its first bytes was tried %d times, want 1", n)
	}
}

func setFault(ctx context.Context, t *testing.T, engineURL string, f engine.Fault) {
	t.Helper()
	text, err := json.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, engineURL+"/sim/fault", bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode >= 300 {
		t.Fatalf("set fault: %s", resp.Status)
	}
}
