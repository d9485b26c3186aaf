package proxy

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/router/proxy/wire"
)

const chat = `{"model":"m","messages":[{"role":"user","content":"hi"}]}`

const chatStream = `{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}`

// wantError checks the whole of an OpenAI error.
func wantError(t *testing.T, resp *http.Response, body string, status int, code string) {
	t.Helper()
	var got struct {
		Error struct {
			Message, Type string
			Param, Code   *string
		}
	}
	if err := json.Unmarshal([]byte(body), &got); err != nil || got.Error.Message == "" || got.Error.Type == "" {
		t.Fatalf("%d %s is no OpenAI error (%v)", resp.StatusCode, body, err)
	}
	if resp.StatusCode != status || got.Error.Code == nil || *got.Error.Code != code {
		t.Fatalf("%d %s, want %d with code %s", resp.StatusCode, body, status, code)
	}
	heals := resp.Header.Get("Retry-After") != ""
	if no := resp.Header.Get("X-Should-Retry") == "false"; no == heals {
		t.Fatalf("%d: Retry-After %q and x-should-retry %q", status, resp.Header.Get("Retry-After"), resp.Header.Get("X-Should-Retry"))
	}
	if resp.Header.Get(ReasonHeader) == "" || resp.Header.Get("X-Request-Id") == "" {
		t.Fatalf("%d: headers %v", status, resp.Header)
	}
}

func TestRefusalsAreOpenAIErrorsAndNeverReachAnEngine(t *testing.T) {
	t.Parallel()
	touched := make(chan struct{}, 100)
	r := newRig(t, Options{MaxBodyBytes: 1000}, func(http.ResponseWriter, *http.Request) { touched <- struct{}{} })
	for _, c := range []struct {
		method, path, body, kind string
		status                   int
		code                     string
	}{
		{"POST", "/v1/chat/completions", `{"model":"m"`, "", 400, "invalid_json"},
		{"POST", "/v1/chat/completions", ``, "", 400, "invalid_json"},
		{"POST", "/v1/chat/completions", `[]`, "", 400, "invalid_body"},
		{"POST", "/v1/completions", `{"model":"m","model":"x"}`, "", 400, "invalid_model"},
		{"POST", "/v1/chat/completions", `{"model":"nope"}`, "", 404, "model_not_found"},
		{"POST", "/v1/chat/completions", chat + strings.Repeat(" ", 1000), "", 413, "request_too_large"},
		{"POST", "/v1/chat/completions", chat, "text/plain", 415, "unsupported_media_type"},
		{"GET", "/v1/chat/completions", ``, "", 405, "method_not_allowed"},
		{"POST", "/v1/responses", `{"model":"m","previous_response_id":"resp_x"}`, "", 404, "response_not_found"},
		{"GET", "/v1/responses/resp_x", ``, "", 404, "response_not_found"},
		{"GET", "/v1/models/nope", ``, "", 404, "model_not_found"},
		{"GET", "/", ``, "", 404, "unknown_url"},
		{"GET", "/nope", ``, "", 404, "unknown_url"},
	} {
		req, err := http.NewRequestWithContext(t.Context(), c.method, r.url+c.path, strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		if c.kind != "" {
			req.Header.Set("Content-Type", c.kind)
		}
		resp, got := do(t, req)
		wantError(t, resp, got, c.status, c.code)
		if c.status == 405 && resp.Header.Get("Allow") != "POST" {
			t.Errorf("Allow %q", resp.Header.Get("Allow"))
		}
	}
	select {
	case <-touched:
		t.Fatal("an engine saw a refused request")
	default:
	}
}

func TestAChunkedBodyPastTheCapGets413(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{MaxBodyBytes: 1000}, echo)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/v1/chat/completions",
		io.MultiReader(strings.NewReader(chat), strings.NewReader(strings.Repeat(" ", 5000))))
	if err != nil {
		t.Fatal(err)
	}
	resp, got := do(t, req)
	wantError(t, resp, got, 413, "request_too_large")
}

func TestABodyThatTricklesIsGivenUp(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{BodyTimeout: 50 * time.Millisecond}, echo)
	body, never := io.Pipe()
	t.Cleanup(func() { _ = never.Close() })
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/v1/chat/completions", body)
	if err != nil {
		t.Fatal(err)
	}
	resp, got := do(t, req)
	wantError(t, resp, got, 408, "request_timeout")
}

func TestHeadersOfOneConnectionAndForgedOnesStayBehind(t *testing.T) {
	t.Parallel()
	seen := make(chan http.Header, 1)
	r := newRig(t, Options{ConsumerHeader: "x-team"}, func(w http.ResponseWriter, r *http.Request) {
		seen <- r.Header
		w.Header().Set("Connection", "X-Private")
		w.Header().Set("X-Private", "1")
		w.Header().Set("X-Hearth-Reason", "forged")
		w.Header().Add("Set-Cookie", "a=1")
		w.Header().Add("Set-Cookie", "b=2")
		w.WriteHeader(http.StatusTeapot)
	})
	resp, _ := r.post(t, "/v1/chat/completions?x=1", chat, "Authorization", "Bearer secret", "Connection", "X-Gone", "X-Gone", "1",
		"X-Team", "billing", "X-Hearth-Consumer", "me", "X-Kept", "1", "X-Request-Id", "abc-1", "X-Forwarded-For", "9.9.9.9", "Accept-Encoding", "gzip")
	h := <-seen
	for _, name := range []string{"Authorization", "X-Gone", "X-Team", "X-Hearth-Consumer", "Connection"} {
		if v := h.Get(name); v != "" {
			t.Errorf("the engine got %s: %s", name, v)
		}
	}
	for name, want := range map[string]string{"X-Kept": "1", "X-Request-Id": "abc-1", "Accept-Encoding": "identity", "X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "http"} {
		if v := h.Get(name); v != want {
			t.Errorf("the engine got %s %q, want %q", name, v, want)
		}
	}
	if resp.StatusCode != http.StatusTeapot || resp.Header.Get("X-Private") != "" || resp.Header.Get(ReasonHeader) != "prefix" ||
		len(resp.Header.Values("Set-Cookie")) != 2 || resp.Header.Get("X-Request-Id") != "abc-1" {
		t.Errorf("the client got %d %v", resp.StatusCode, resp.Header)
	}
}

func TestAPoolThatOptsInGetsTheClientsAuthorization(t *testing.T) {
	t.Parallel()
	seen := make(chan string, 1)
	r := newRig(t, Options{}, func(_ http.ResponseWriter, r *http.Request) { seen <- r.Header.Get("Authorization") })
	r.targets[0].ForwardAuthorization = true
	r.post(t, "/v1/chat/completions", chat, "Authorization", "Bearer secret")
	if got := <-seen; got != "Bearer secret" {
		t.Fatalf("the engine got %q", got)
	}
}

// streamer answers a stream event by event as the test says.
func streamer(events <-chan string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush()
		for {
			select {
			case e, ok := <-events:
				if !ok {
					return
				}
				if e == "die" {
					panic(http.ErrAbortHandler)
				}
				_, _ = io.WriteString(w, e)
				w.(http.Flusher).Flush()
			case <-r.Context().Done():
				return
			}
		}
	}
}

func (r *rig) open(ctx context.Context, t *testing.T, body string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

func TestAStreamIsFlushedChunkByChunkAndItsUsageMetered(t *testing.T) {
	t.Parallel()
	events := make(chan string, 1)
	r := newRig(t, Options{}, streamer(events))
	events <- event("a") // the headers come with it
	resp := r.open(t.Context(), t, chatStream)
	client := bufio.NewReader(resp.Body)
	for i, content := range []string{"a", "b"} {
		if i > 0 {
			events <- event(content)
		}
		if got := readEvent(t, client); got != event(content) {
			t.Fatalf("got %q", got)
		}
	}
	events <- usageEvent
	events <- "data: [DONE]\n\n"
	close(events)
	if rest, err := io.ReadAll(client); err != nil || string(rest) != "data: [DONE]\n\n" {
		t.Fatalf("rest %q, %v", rest, err)
	}
	x := <-r.done
	if x.Outcome != "ok" || x.PromptTokens != 10 || x.CachedTokens != 8 || x.CompletionTokens != 3 || x.Estimated || x.TTFT <= 0 || !x.Stream {
		t.Fatalf("exchange %+v", x)
	}
	if r.held != 0 || r.first != 1 || len(r.outcomes) != 1 || !r.outcomes[0].UsageKnown {
		t.Fatalf("held %d, first bytes %d, outcomes %+v", r.held, r.first, r.outcomes)
	}
}

func readEvent(t *testing.T, r *bufio.Reader) string {
	t.Helper()
	var b strings.Builder
	for {
		line, err := r.ReadString('\n')
		b.WriteString(line)
		if err != nil {
			t.Fatalf("read event: %v after %q", err, b.String())
		}
		if line == "\n" {
			return b.String()
		}
	}
}

func TestALostEngineEndsTheStreamWithAnErrorEventAndUncleanly(t *testing.T) {
	t.Parallel()
	events := make(chan string, 3)
	r := newRig(t, Options{}, streamer(events))
	events <- event("a")
	events <- `data: {"choices":[{"delta":{"content":"half`
	resp := r.open(t.Context(), t, chatStream)
	client := bufio.NewReader(resp.Body)
	readEvent(t, client)
	events <- "die"
	frame := readEvent(t, client)
	var got struct{ Error struct{ Code string } }
	if err := json.Unmarshal([]byte(strings.TrimPrefix(frame, "data: ")), &got); err != nil || got.Error.Code != "engine_lost" {
		t.Fatalf("frame %q, %v", frame, err)
	}
	if rest, err := io.ReadAll(client); err == nil {
		t.Fatalf("the stream ended cleanly after %q", rest)
	}
	x := <-r.done
	if x.Outcome != "engine_lost" || !x.Estimated || x.CompletionTokens != 1 || r.outcomes[0].Failure != FailureMidStream {
		t.Fatalf("exchange %+v, outcomes %+v", x, r.outcomes)
	}
}

func TestAnAnswerThatBreaksOffNeverLooksWhole(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100000")
		_, _ = io.WriteString(w, `{"half":"`+strings.Repeat("x", 50000))
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	if _, got := r.post(t, "/v1/chat/completions", chat); !strings.HasSuffix(got, "unexpected EOF>") {
		t.Fatalf("got %q", got)
	}
	if x := <-r.done; x.Outcome != "engine_lost" || r.held != 0 {
		t.Fatalf("exchange %+v", x)
	}
}

func TestAClientThatLeavesCancelsTheEngine(t *testing.T) {
	t.Parallel()
	ended := make(chan struct{})
	r := newRig(t, Options{}, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, event("a"))
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		close(ended)
	})
	ctx, cancel := context.WithCancel(t.Context())
	resp := r.open(ctx, t, chatStream)
	readEvent(t, bufio.NewReader(resp.Body))
	cancel()
	<-ended
	x := <-r.done
	if x.Outcome != "client_gone" || !x.Estimated || x.CompletionTokens != 1 || r.outcomes[0].Failure != FailureClientGone {
		t.Fatalf("exchange %+v, outcomes %+v", x, r.outcomes)
	}
}

// hangUp closes a connection before answering, as a dying engine does.
func hangUp(t *testing.T) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Read(make([]byte, 10))
			_ = c.Close()
		}
	}()
	return "http://" + l.Addr().String()
}

// refusing is an address where nothing listens; no other test is given its port.
func refusing(*testing.T) string { return "http://127.0.0.1:1" }

func TestARequestIsSentOnceMoreElsewhereWhenTheEngineWasLostBeforeAByte(t *testing.T) {
	t.Parallel()
	for name, lost := range map[string]func(*testing.T) string{"hangs up": hangUp, "refuses": refusing} {
		r := newRig(t, Options{}, echo)
		r.targets = append([]Target{{URL: lost(t), EndpointID: "lost", Pool: "p", LogicalModel: "m", ServedModel: "served"}}, r.targets...)
		resp, got := r.post(t, "/v1/chat/completions", chat)
		if resp.StatusCode != 200 || got != strings.Replace(chat, `"m"`, `"served"`, 1) {
			t.Fatalf("%s: %d %s", name, resp.StatusCode, got)
		}
		x := <-r.done
		if x.Retries != 1 || x.EndpointID != "e0" || len(r.outcomes) != 2 || r.outcomes[0].Failure == FailureNone || r.held != 0 {
			t.Fatalf("%s: exchange %+v, outcomes %+v", name, x, r.outcomes)
		}
	}
}

func TestALostEngineWithoutAnotherIsAnErrorThatMayHeal(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{})
	r.targets = []Target{{URL: refusing(t), EndpointID: "lost", Pool: "p", LogicalModel: "m"}}
	resp, got := r.post(t, "/v1/chat/completions", chat)
	wantError(t, resp, got, 503, "engine_unreachable")
	// The lost attempt is what a record shows, and no token is charged for it.
	if x := <-r.done; x.Outcome != "engine_lost" || x.EndpointID != "lost" || x.PromptTokens+x.CompletionTokens != 0 || x.Estimated || x.Retries != 0 {
		t.Fatalf("exchange %+v", x)
	}
	r.targets[0].URL = hangUp(t)
	resp, got = r.post(t, "/v1/chat/completions", chat)
	wantError(t, resp, got, 502, "engine_lost")
}

func TestAnEngineThatIsSlowToAnswerIsNeverAskedTwice(t *testing.T) {
	t.Parallel()
	slow := func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	}
	r := newRig(t, Options{Transport: wire.New(wire.Options{HeaderTimeout: 50 * time.Millisecond})}, slow, slow)
	resp, got := r.post(t, "/v1/chat/completions", chat)
	wantError(t, resp, got, 504, "engine_timeout")
	if x := <-r.done; x.Outcome != "timeout" || x.Retries != 0 || len(r.requests) != 1 {
		t.Fatalf("exchange %+v after %d choices", x, len(r.requests))
	}
}

func TestADialThatTakesTooLongIsTriedElsewhereLikeARefusedOne(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{Transport: wire.New(wire.Options{DialTimeout: 1})}, echo, echo)
	resp, got := r.post(t, "/v1/chat/completions", chat)
	wantError(t, resp, got, 503, "engine_unreachable")
	x := <-r.done
	if x.Outcome != "engine_lost" || x.Retries != 1 || len(r.outcomes) != 2 {
		t.Fatalf("exchange %+v, outcomes %+v", x, r.outcomes)
	}
	for _, o := range r.outcomes {
		if o.Failure != FailureDial {
			t.Errorf("an attempt that was never sent counts as %+v", o)
		}
	}
}

func TestResponseIdsLeadBackToTheirEndpoint(t *testing.T) {
	t.Parallel()
	who := func(name string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = fmt.Fprintf(w, `{"id":"resp_%s","from":"%s %s"}`, name, r.Method, r.URL.Path)
		}
	}
	r := newRig(t, Options{}, who("0"), who("1"))
	_, first := r.post(t, "/v1/responses", `{"model":"m","input":"a"}`)
	<-r.done // the id is known once the exchange has ended
	for range 3 {
		if _, got := r.post(t, "/v1/responses", `{"model":"m","input":"b","previous_response_id":"resp_0"}`); got != first {
			t.Fatalf("a follow-up went elsewhere: %s", got)
		}
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodDelete, r.url+"/v1/responses/resp_0", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, got := do(t, req); got != `{"id":"resp_0","from":"DELETE /v1/responses/resp_0"}` {
		t.Fatalf("delete gave %s", got)
	}
}

func TestClientsProbesAndModelListsWork(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, echo)
	for _, path := range []string{"/health", "/metrics", "/v1/models", "/v1/models/m"} {
		for _, method := range []string{http.MethodGet, http.MethodHead} {
			req, err := http.NewRequestWithContext(t.Context(), method, r.url+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			if resp, got := do(t, req); resp.StatusCode != 200 || (got == "") != (method == http.MethodHead) {
				t.Errorf("%s %s gave %d %q", method, path, resp.StatusCode, got)
			}
		}
	}
	// An unknown path goes through to the only model.
	if resp, got := r.post(t, "/v1/rerank?top=1", `{"query":"x"}`); resp.StatusCode != 200 || got != `{"query":"x"}` {
		t.Errorf("an unknown path gave %d %s", resp.StatusCode, got)
	}
}

func TestAClientThatWaitsForContinueGetsIt(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, echo)
	transport := &http.Transport{ExpectContinueTimeout: time.Minute}
	t.Cleanup(transport.CloseIdleConnections)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/v1/chat/completions", strings.NewReader(chat))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Expect", "100-continue")
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if got, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 || len(got) == 0 {
		t.Fatalf("%d %q %v", resp.StatusCode, got, err)
	}
}

func TestLargeBodiesArriveWhole(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, echo)
	for _, size := range []int{3 << 10, 5 << 10, 40 << 10, 3 << 20} {
		body := `{"model":"m","prompt":"` + strings.Repeat("0123456789abcdef", size/16) + `"}`
		if _, got := r.post(t, "/v1/completions", body); got != strings.Replace(body, `"m"`, `"served"`, 1) {
			t.Fatalf("a body of %d bytes came as %d", len(body), len(got))
		}
	}
}
