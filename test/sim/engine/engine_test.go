package engine

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func newEngine(t *testing.T, change func(*Options)) *Engine {
	t.Helper()
	o := Options{ServedModel: "m", PrefillRate: 1000, DecodeStep: 10 * time.Millisecond, DecodeSlope: time.Millisecond}
	if change != nil {
		change(&o)
	}
	e, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// reply is the union of what the routes answer.
type reply struct {
	Status  int         `json:"-"`
	Header  http.Header `json:"-"`
	ID      string
	Choices []struct {
		Text    string
		Message struct{ Content string }
		Delta   struct {
			Role    string
			Content *string
		}
		FinishReason *string `json:"finish_reason"`
	}
	Usage   *usage
	Timings *timings
	Raw     string `json:"-"`
	Error   struct {
		Message, Type, Param string
		Code                 int
	}
	Data []struct{ Embedding json.RawMessage }
}

func post(ctx context.Context, e http.Handler, path, body string) *reply {
	r := httptest.NewRequestWithContext(ctx, http.MethodPost, path, strings.NewReader(body))
	w := httptest.NewRecorder()
	e.ServeHTTP(w, r)
	out := &reply{Status: w.Code, Header: w.Header(), Raw: w.Body.String()}
	_ = json.Unmarshal(w.Body.Bytes(), out) // streams are no JSON; the test reads Raw
	return out
}

// chunks decodes the data lines of a stream, without the terminator.
func chunks(t *testing.T, raw string) []reply {
	t.Helper()
	var out []reply
	s := bufio.NewScanner(strings.NewReader(raw))
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		data, ok := strings.CutPrefix(s.Text(), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var c reply
		if err := json.Unmarshal([]byte(data), &c); err != nil {
			t.Fatalf("chunk %q: %v", data, err)
		}
		out = append(out, c)
	}
	return out
}

func chat(turns ...string) string {
	var messages []map[string]string
	for i, text := range turns {
		messages = append(messages, map[string]string{"role": []string{"user", "assistant"}[i%2], "content": text})
	}
	b, err := json.Marshal(map[string]any{"model": "m", "messages": messages, "max_tokens": 30, "ignore_eos": true})
	if err != nil {
		return ""
	}
	return string(b)
}

func TestNextTurnFindsThePromptAndTheAnswerOfTheLastInTheCache(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, nil)
		question := strings.Repeat("a question of some length. ", 40)
		first := post(t.Context(), e, "/v1/chat/completions", chat(question))
		if first.Usage.Details["cached_tokens"] != 0 {
			t.Fatalf("cold prompt: %s", first.Raw)
		}
		text := first.Choices[0].Message.Content
		second := post(t.Context(), e, "/v1/chat/completions", chat(question, text, "and then?"))
		// Everything up to the end of the first answer, in full blocks.
		known := len("<|user|><|end|>\n<|assistant|>") + len(question) + len(text)
		want := known / (16 * TokenBytes) * 16
		if got := second.Usage.Details["cached_tokens"]; got != want {
			t.Errorf("cached tokens of the second turn: got %d, want %d", got, want)
		}
		ms := float64(second.Usage.Prompt-want) / 1000 * 1000
		if second.Timings.PromptMS != ms || second.Header.Get(HeaderPrefill) != fmt.Sprintf("%.3f", ms) {
			t.Errorf("prefill time: got %v and %q, want %v", second.Timings.PromptMS, second.Header.Get(HeaderPrefill), ms)
		}
	})
}

func TestPrefillAndDecodeTakeTheModelledTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(o *Options) { o.Speedup = 2 })
		begin := time.Now()
		r := post(t.Context(), e, "/v1/completions", `{"model":"m","prompt":"`+strings.Repeat("abcd", 500)+`","max_tokens":10,"ignore_eos":true}`)
		// 500 tokens at 1000/s and ten steps of 10 ms, twice as fast.
		if got, want := time.Since(begin), 300*time.Millisecond; got != want {
			t.Errorf("elapsed: got %v, want %v", got, want)
		}
		if r.Usage.Prompt != 500 || r.Usage.Completion != 10 || *r.Choices[0].FinishReason != "length" {
			t.Errorf("answer: %s", r.Raw)
		}
	})
}

func TestRequestsPastTheBatchWaitInOrderAndPastTheQueueAreRefused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(o *Options) { o.MaxRunning, o.MaxWaiting = 1, 1 })
		var wg sync.WaitGroup
		var mu sync.Mutex
		var order []string
		send := func(name string) {
			wg.Go(func() {
				r := post(t.Context(), e, "/v1/completions", `{"model":"m","prompt":"`+name+`","max_tokens":5}`)
				mu.Lock()
				defer mu.Unlock()
				order = append(order, fmt.Sprintf("%s %d", name, r.Status))
			})
			synctest.Wait()
		}
		send("first")
		send("second")
		if s := e.Stats(); s.Running != 1 || s.Waiting != 1 {
			t.Errorf("load: %+v", s)
		}
		send("third")
		wg.Wait()
		if diff := cmp.Diff([]string{"third 503", "first 200", "second 200"}, order); diff != "" {
			t.Error(diff)
		}
		if s := e.Stats(); s.Running != 0 || s.Waiting != 0 || s.KVUsage != 0 {
			t.Errorf("load at rest: %+v", s)
		}
	})
}

func TestAClientThatLeavesFreesItsPlace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(o *Options) { o.MaxRunning = 1 })
		server := func(ctx context.Context, prompt string) <-chan struct{} {
			done := make(chan struct{})
			go func() {
				defer close(done)
				defer func() { _ = recover() }() // an aborted handler panics, as net/http expects
				post(ctx, e, "/v1/completions", `{"model":"m","prompt":"`+prompt+`","max_tokens":200,"ignore_eos":true}`)
			}()
			synctest.Wait()
			return done
		}
		runCtx, leaveRunning := context.WithCancel(t.Context())
		waitCtx, leaveWaiting := context.WithCancel(t.Context())
		running, waiting := server(runCtx, "a"), server(waitCtx, "b")
		leaveWaiting()
		<-waiting
		if s := e.Stats(); s.Running != 1 || s.Waiting != 0 {
			t.Errorf("after the waiting one left: %+v", s)
		}
		leaveRunning()
		<-running
		if s := e.Stats(); s.Running != 0 || s.KVUsage != 0 {
			t.Errorf("after the running one left: %+v", s)
		}
	})
}

func TestStreamBeginsWithAnEmptyRoleChunkAndEndsWithUsage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, nil)
		r := post(t.Context(), e, "/v1/chat/completions",
			`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"stream":true,"max_completion_tokens":3,"ignore_eos":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`)
		if !strings.HasSuffix(r.Raw, "data: [DONE]\n\n") {
			t.Errorf("end of stream: %q", r.Raw)
		}
		list := chunks(t, r.Raw)
		first, last := list[0], list[len(list)-1]
		if d := first.Choices[0].Delta; d.Role != "assistant" || d.Content == nil || *d.Content != "" {
			t.Errorf("first chunk: %+v", first)
		}
		if len(list) != 6 || len(last.Choices) != 0 || last.Usage.Completion != 3 || last.Timings == nil {
			t.Errorf("chunks: %s", r.Raw)
		}
		if list[2].Usage == nil || list[2].Usage.Completion != 2 {
			t.Errorf("usage of the second token: %+v", list[2].Usage)
		}
		without := post(t.Context(), e, "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":3}`)
		if strings.Contains(without.Raw, `"usage"`) {
			t.Errorf("usage that nobody asked for: %s", without.Raw)
		}
	})
}

func TestSameRequestAndSeedGiveTheSameText(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		say := func(engineSeed uint64, body string) string {
			e := newEngine(t, func(o *Options) { o.Seed = engineSeed })
			return post(t.Context(), e, "/v1/completions", body).Choices[0].Text
		}
		plain := `{"model":"m","prompt":"tell","max_tokens":20}`
		seeded := `{"model":"m","prompt":"tell","max_tokens":20,"seed":7}`
		for _, body := range []string{plain, seeded} {
			first, again := say(1, body), say(1, body)
			if first != again {
				t.Errorf("the same request gave %q, then %q", first, again)
			}
		}
		if say(1, plain) == say(2, plain) || say(1, plain) == say(1, seeded) {
			t.Error("another seed gave the same text")
		}
	})
}

func TestPromptShapesOfTheSameTextAreOnePrompt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, nil)
		var tokens struct{ Tokens []uint32 }
		if err := json.Unmarshal([]byte(post(t.Context(), e, "/tokenize", `{"model":"m","prompt":"eight by"}`).Raw), &tokens); err != nil {
			t.Fatal(err)
		}
		ids, err := json.Marshal(tokens.Tokens)
		if err != nil {
			t.Fatal(err)
		}
		var texts []string
		for _, prompt := range []string{`"eight by"`, `["eight by"]`, string(ids), "[" + string(ids) + "]"} {
			r := post(t.Context(), e, "/v1/completions", `{"model":"m","prompt":`+prompt+`,"max_tokens":4}`)
			if r.Usage == nil || r.Usage.Prompt != 2 {
				t.Fatalf("prompt %s: %s", prompt, r.Raw)
			}
			texts = append(texts, r.Choices[0].Text)
		}
		if diff := cmp.Diff([]string{texts[0], texts[0], texts[0], texts[0]}, texts); diff != "" {
			t.Error(diff)
		}
		two := post(t.Context(), e, "/v1/completions", `{"model":"m","prompt":["one","two"],"max_tokens":4,"stream":true,"stream_options":{"include_usage":true}}`)
		list := chunks(t, two.Raw)
		if got := list[len(list)-1].Usage.Completion; got != 8 {
			t.Errorf("completion tokens of two prompts: got %d, want 8", got)
		}
	})
}

func TestMistakesAreAnsweredWithOpenAIErrors(t *testing.T) {
	t.Parallel()
	e := newEngine(t, func(o *Options) { o.KVTokens, o.BodyLimit = 64, 1000 })
	for _, c := range []struct {
		path, body string
		status     int
		param      string
	}{
		{"/v1/chat/completions", `{"model":"other","messages":[]}`, 404, "model"},
		{"/v1/chat/completions", `{"model":"m"}`, 400, "messages"},
		{"/v1/chat/completions", `{"model":"m",`, 400, ""},
		{"/v1/completions", `{"model":"m","prompt":3}`, 400, "prompt"},
		{"/v1/completions", `{"model":"m","prompt":"a","max_tokens":0}`, 400, "max_tokens"},
		{"/v1/completions", `{"model":"m","prompt":"a","max_tokens":100}`, 400, "input_tokens"},
		{"/v1/completions", `{"model":"m","prompt":"` + strings.Repeat("a", 2000) + `"}`, 413, ""},
		{"/v1/responses", `{"model":"m","input":"a","previous_response_id":"resp_unknown"}`, 404, "response_id"},
		{"/v1/nothing", `{}`, 404, ""},
		{"/sim/fault", `{"mode":"die"}`, 404, ""},
	} {
		r := post(t.Context(), e, c.path, c.body)
		if r.Status != c.status || r.Error.Code != c.status || r.Error.Param != c.param || r.Error.Message == "" {
			t.Errorf("%s %s: %d %s", c.path, c.body, r.Status, r.Raw)
		}
	}
}

func TestEmbeddingsAgreeInBothEncodings(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, nil)
		list := post(t.Context(), e, "/v1/embeddings", `{"model":"m","input":["a","b"],"dimensions":8}`)
		packed := post(t.Context(), e, "/v1/embeddings", `{"model":"m","input":"b","dimensions":8,"encoding_format":"base64"}`)
		var floats []float32
		var text string
		if err := json.Unmarshal(list.Data[1].Embedding, &floats); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(packed.Data[0].Embedding, &text); err != nil {
			t.Fatal(err)
		}
		raw, err := base64.StdEncoding.DecodeString(text)
		if err != nil || len(floats) != 8 || len(raw) != 32 {
			t.Fatalf("lengths %d, %d: %v", len(floats), len(raw), err)
		}
		if diff := cmp.Diff(embed([]byte("b"), 0, 8), floats); diff != "" {
			t.Error(diff)
		}
	})
}

func TestResponsesContinueOnlyWhereTheyBegan(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, nil)
		first := post(t.Context(), e, "/v1/responses", `{"model":"m","input":"`+strings.Repeat("long ", 100)+`"}`)
		if first.Status != http.StatusOK || !strings.HasPrefix(first.ID, "resp_") {
			t.Fatalf("create: %s", first.Raw)
		}
		next := post(t.Context(), e, "/v1/responses", `{"model":"m","input":"more","stream":true,"previous_response_id":"`+first.ID+`"}`)
		for _, want := range []string{
			"event: response.created\n", "event: response.output_text.delta\n", "event: response.completed\n", `"previous_response_id":"` + first.ID,
		} {
			if !strings.Contains(next.Raw, want) {
				t.Errorf("stream lacks %q: %s", want, next.Raw)
			}
		}
		if s := e.Stats(); s.PrefixHits == 0 {
			t.Errorf("the continued conversation was not cached: %+v", s)
		}
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/v1/responses/"+first.ID, nil)
		w := httptest.NewRecorder()
		e.ServeHTTP(w, r)
		if w.Code != http.StatusOK || !bytes.Equal(w.Body.Bytes(), []byte(first.Raw)) {
			t.Errorf("get: %d %s", w.Code, w.Body)
		}
		if other := post(t.Context(), newEngine(t, nil), "/v1/responses", `{"model":"m","input":"x","previous_response_id":"`+first.ID+`"}`); other.Status != 404 {
			t.Errorf("another engine knows the response: %d", other.Status)
		}
	})
}

func TestMetricsPageHasTheNamesAndFiguresOfTheEngine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, nil)
		body := `{"model":"m","prompt":"` + strings.Repeat("abcd", 100) + `","max_tokens":4}`
		post(t.Context(), e, "/v1/completions", body)
		post(t.Context(), e, "/v1/completions", body)
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil)
		w := httptest.NewRecorder()
		e.ServeHTTP(w, r)
		page, err := io.ReadAll(w.Body)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{
			`vllm:num_requests_running{engine="0",model_name="m"} 0`,
			`vllm:prefix_cache_queries_total{engine="0",model_name="m"} 200`,
			`vllm:prefix_cache_hits_total{engine="0",model_name="m"} 96`,
			`vllm:generation_tokens_total{engine="0",model_name="m"} 8`,
			`block_size="16"`, `num_gpu_blocks="4096"`,
			"process_start_time_seconds 946684800.000",
		} {
			if !strings.Contains(string(page), want) {
				t.Errorf("metrics lack %s:\n%s", want, page)
			}
		}
	})
}

func TestFaultsHitTheNextRequestsOnly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		died := 0
		e := newEngine(t, func(o *Options) { o.AllowFaults = true; o.Die = func() { died++ } })
		body := `{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":3,"ignore_eos":true}`
		run := func(fault string) (r *reply, broken bool) {
			if got := post(t.Context(), e, "/sim/fault", fault); got.Status != http.StatusOK {
				t.Fatalf("set %s: %s", fault, got.Raw)
			}
			defer func() { broken = recover() != nil }()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			return post(ctx, e, "/v1/chat/completions", body), false
		}
		if r, _ := run(`{"mode":"status","count":1,"status":503,"retryAfter":"2"}`); r.Status != 503 || r.Header.Get("Retry-After") != "2" {
			t.Errorf("status: %+v", r)
		}
		if r := post(t.Context(), e, "/v1/chat/completions", body); r.Status != http.StatusOK {
			t.Errorf("after the fault: %+v", r)
		}
		if r, _ := run(`{"mode":"garbage","count":1}`); !strings.Contains(r.Raw, "not json") {
			t.Errorf("garbage: %+v", r)
		}
		begin := time.Now()
		if r, broken := run(`{"mode":"trickle","count":1,"delay":"5s"}`); broken || len(chunks(t, r.Raw)) != 5 || time.Since(begin) < 15*time.Second {
			t.Errorf("trickle: %+v after %v", r, time.Since(begin))
		}
		for _, fault := range []string{`{"mode":"hang","count":1,"afterTokens":1}`, `{"mode":"reset","count":1,"afterTokens":1}`, `{"mode":"die","count":1}`} {
			if _, broken := run(fault); !broken {
				t.Errorf("%s: the answer ended cleanly", fault)
			}
		}
		if died != 1 {
			t.Errorf("deaths: %d", died)
		}
	})
}
