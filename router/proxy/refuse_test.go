package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

func TestAPathThatANextHopCouldReadOtherwiseReachesNoEngine(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, func(http.ResponseWriter, *http.Request) { t.Error("an engine was asked") })
	for _, path := range []string{
		"/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/./x", "/v1//metrics", "/v1/..%2f..%2fmetrics", "/v1/a/%2e%2e/%2e%2e/metrics",
		"/v1/responses/../../metrics", `/v1/..%5cmetrics`,
	} {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(r.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", path)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		_, _ = resp.Body.Close(), conn.Close()
		wantError(t, resp, string(body), 400, "invalid_url")
	}
}

func TestAClientThatSendsAllOfATooLargeBodyFirstReadsThe413(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{MaxBodyBytes: 1000}, echo)
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(r.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	body := strings.Repeat(" ", 16<<20) // far more than the sockets hold
	_, _ = fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", len(body))
	if _, err := io.WriteString(conn, body); err != nil {
		t.Fatalf("the body could not be sent: %v", err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	wantError(t, resp, string(answer), 413, "request_too_large")
	if !resp.Close {
		t.Error("the connection stays open")
	}
}

func TestBodiesPastTheSharedBoundWaitOutsideHoweverTheyAreSent(t *testing.T) {
	t.Parallel()
	hold := make(chan struct{})
	asked := make(chan struct{}, 8)
	r := newRig(t, Options{MaxBufferedBytes: 64 << 10}, func(w http.ResponseWriter, req *http.Request) {
		_, _ = io.Copy(io.Discard, req.Body)
		asked <- struct{}{}
		<-hold
		_, _ = io.WriteString(w, "{}")
	})
	body := chat + strings.Repeat(" ", 50<<10)
	first := make(chan int, 1)
	go func() {
		resp, _ := r.post(t, "/v1/completions", body)
		first <- resp.StatusCode
	}()
	<-asked
	send := func(chunked bool) (*http.Response, string) {
		var reader io.Reader = strings.NewReader(body)
		if chunked {
			reader = io.MultiReader(reader)
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/v1/completions", reader)
		if err != nil {
			t.Fatal(err)
		}
		return do(t, req)
	}
	for _, chunked := range []bool{false, true} {
		resp, got := send(chunked)
		wantError(t, resp, got, 503, "overloaded")
	}
	close(hold)
	if code := <-first; code != 200 {
		t.Fatalf("the first body got %d", code)
	}
	for _, chunked := range []bool{true, false, true} { // what was refused holds nothing
		if resp, got := send(chunked); resp.StatusCode != 200 {
			t.Fatalf("with room again: %d %s", resp.StatusCode, got)
		}
	}
}

func TestBodiesThatAreAnnouncedAndDoNotComeKeepNobodyOut(t *testing.T) {
	t.Parallel()
	const claims, room = 64, 1 << 20
	r := newRig(t, Options{MaxBufferedBytes: room}, echo)
	for range claims {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(r.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		_, _ = fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n{", room)
	}
	wantRoom(t, r, claims*firstBodyBytes)
	body := `{"model":"m","prompt":"` + strings.Repeat("x", 600<<10) + `"}`
	if resp, got := r.post(t, "/v1/completions", body); resp.StatusCode != 200 || len(got) < 600<<10 {
		t.Errorf("a body that comes gave %d and %d bytes", resp.StatusCode, len(got))
	}
	wantRoom(t, r, claims*firstBodyBytes)
}

// wantRoom waits until the bodies held come to the given bytes: a handler may
// end after its client has the answer.
func wantRoom(t *testing.T, r *rig, held int64) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	end := time.NewTimer(time.Minute)
	defer end.Stop()
	for r.proxy.buffered.Load() != held {
		select {
		case <-tick.C:
		case <-end.C:
			t.Fatalf("%d bytes are charged, want %d", r.proxy.buffered.Load(), held)
		}
	}
}

func TestReadBodyChargesAtMostTwiceWhatHasCome(t *testing.T) {
	t.Parallel()
	const size = 3 << 20
	for _, declared := range []int64{-1, size} {
		charged, came := 0, 0
		source := readerFunc(func(p []byte) (int, error) {
			if most := max(firstBodyBytes, 32<<10, 2*came); charged > most {
				t.Fatalf("declared %d: %d bytes are charged for %d", declared, charged, came)
			}
			n := min(len(p), size-came, 1000)
			came += n
			if n == 0 {
				return 0, io.EOF
			}
			return n, nil
		})
		b, err := readBody(source, declared, 4<<20, func(n int) bool { charged += n; return true })
		if err != nil || len(b) != size {
			t.Fatalf("declared %d: %d bytes, %v", declared, len(b), err)
		}
	}
}

func TestABodyAsLongAsTheSharedBoundFits(t *testing.T) {
	t.Parallel()
	const limit = 100 << 10
	r := newRig(t, Options{MaxBodyBytes: limit, MaxBufferedBytes: limit}, echo)
	body := chat + strings.Repeat(" ", limit-len(chat))
	for _, reader := range []io.Reader{strings.NewReader(body), io.MultiReader(strings.NewReader(body))} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/v1/completions", reader)
		if err != nil {
			t.Fatal(err)
		}
		if resp, got := do(t, req); resp.StatusCode != 200 {
			t.Errorf("got %d %.200s", resp.StatusCode, got)
		}
		wantRoom(t, r, 0)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestAClientThatAskedForUsageKeepsTheLastOneOfAContinuousPool(t *testing.T) {
	t.Parallel()
	const last = `data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}` + "\n\n"
	sent := make(chan string, 1)
	r := newRig(t, Options{}, func(w http.ResponseWriter, req *http.Request) {
		b, _ := io.ReadAll(req.Body)
		sent <- string(b)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, `data: {"choices":[{"delta":{"content":"a"}}],"usage":{"prompt_tokens":9,"completion_tokens":1}}`+"\n\n"+
			last+"data: [DONE]\n\n")
	})
	r.targets[0].ContinuousUsage = true
	_, got := r.post(t, "/v1/chat/completions", strings.TrimSuffix(chatStream, "}")+`,"stream_options":{"include_usage":true}}`)
	if want := `data: {"choices":[{"delta":{"content":"a"}}]}` + "\n\n" + last + "data: [DONE]\n\n"; got != want {
		t.Errorf("the client got\n%s\nwant\n%s", got, want)
	}
	if b := <-sent; !strings.Contains(b, `"continuous_usage_stats":true`) || !strings.Contains(b, `"include_usage":true`) {
		t.Errorf("the engine was asked %s", b)
	}
	select {
	case x := <-r.done:
		if x.CompletionTokens != 2 || x.PromptTokens != 9 || x.Estimated {
			t.Errorf("exchange %+v", x)
		}
	case <-time.After(time.Minute):
		t.Error("the exchange did not end")
	}
}

func TestABodyWithoutAModelGetsTheOnlyOneAndKeepsItsOtherBytes(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, echo)
	for body, want := range map[string]string{
		`{}`:      `{"model":"served"}`,
		" { \n} ": ` {"model":"served"` + " \n} ",
		`{"prompt":"h\u00e9", "seed":1.50}` + "\n": `{"model":"served","prompt":"h\u00e9", "seed":1.50}` + "\n",
		`{"prompt":"x","stream":true}`:             `{"model":"served",` + askUsage + `"prompt":"x","stream":true}`,
		`{"prompt":"x","model":""}`:                `{"prompt":"x","model":"served"}`,
	} {
		if resp, got := r.post(t, "/v1/completions", body); resp.StatusCode != 200 || got != want {
			t.Errorf("%q went on as %q with %d, want %q", body, got, resp.StatusCode, want)
		}
		if x := <-r.done; x.Model != "m" {
			t.Errorf("exchange %+v", x)
		}
	}
	r.models = []string{"m", "n"}
	resp, got := r.post(t, "/v1/completions", `{"prompt":"x"}`)
	wantError(t, resp, got, 400, "missing_model")
	if !strings.Contains(got, `"param":"model"`) {
		t.Errorf("the error does not name the parameter: %s", got)
	}
}

// A server of net/http reads on for what its handler left of a body, before the
// answer and after it, and sets no time for that.
func TestABodyThatNeverComesHoldsNoConnection(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{BodyTimeout: 30 * time.Millisecond}, echo)
	for head, want := range map[string]string{
		"GET /v1/models": "200", "HEAD /v1/models": "200", "GET /v1/models/m": "200", "GET /health": "200", "POST /health": "405", "GET /metrics": "200",
		"POST /nowhere": "404", "POST /v1//x": "400", "PUT /v1/chat/completions": "405", "TRACE /": "405",
		"POST /v1/chat/completions": "408", "POST /v1/files": "408", "GET /v1/responses/resp_1": "404",
	} {
		for _, framing := range []string{"Content-Length: 10", "Content-Length: 400000", "Transfer-Encoding: chunked", "Content-Length: 10\r\nContent-Type: text/plain"} {
			want := want
			if strings.HasSuffix(framing, "text/plain") && strings.HasPrefix(head, "POST /v1/chat") {
				want = "415"
			}
			t.Run(head+" with "+framing, func(t *testing.T) {
				t.Parallel()
				conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(r.url, "http://"))
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = conn.Close() }()
				_ = conn.SetDeadline(time.Now().Add(time.Minute))
				if _, err := io.WriteString(conn, head+" HTTP/1.1\r\nHost: x\r\n"+framing+"\r\n\r\n"); err != nil {
					t.Fatal(err)
				}
				got, err := io.ReadAll(conn)
				if err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 "+want) {
					t.Errorf("%q, %v, not %s and the connection's end", got, err, want)
				}
			})
		}
	}
}
