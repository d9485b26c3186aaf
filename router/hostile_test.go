package router

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/router/pool"
	"github.com/hearth-dev/hearth/units"
)

// corpusSize is how many requests TestHostileRequests… sends.
const corpusSize = 10_000

// hostileBodyLimit is limits.bodyBytes of the router under test.
const hostileBodyLimit = 1 << 20

// verdict is what must become of a request.
type verdict int

const (
	mustRefuse verdict = iota // 4xx or 501 with an OpenAI error, and no engine hears of it
	mustPass                  // an engine gets it, byte for byte but for the splices
	mustHangUp                // the connection ends, with a refusal or without a word, and no engine hears of it
	mustAnswer                // the router answers itself with 200
)

// hostile is one malformed or odd request, as it goes on the wire.
type hostile struct {
	family string
	raw    []byte
	want   verdict
	method string // of the request line; "" = POST
	body   []byte // where it is passed on: what the engine must get
	fin    bool   // the client closes its sending side behind raw
	also   int    // further answers that raw brings about, each of them a refusal
}

// heard is one request as the engine got it.
type heard struct {
	method, target string
	header         http.Header
	body           []byte
}

// recorder is an engine that keeps what it hears and echoes nothing of it.
type recorder struct {
	mu   sync.Mutex
	list []heard
}

func (e *recorder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		body = append(body, "<cut short>"...)
	}
	e.mu.Lock()
	e.list = append(e.list, heard{r.Method, r.RequestURI, r.Header, body})
	e.mu.Unlock()
	answer := `{"engine":"` + r.Header.Get("X-Canary") + `","usage":{"prompt_tokens":1,"completion_tokens":1}}`
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, answer)
}

func (e *recorder) take() []heard {
	e.mu.Lock()
	defer e.mu.Unlock()
	list := e.list
	e.list = nil
	return list
}

// TestHostileRequestsAreRefusedInWordsOrPassedOnUnchanged sends the corpus to a
// real router, each request over a connection of its own and a plain one behind
// it, which must neither be misread nor get another's answer.
func TestHostileRequestsAreRefusedInWordsOrPassedOnUnchanged(t *testing.T) {
	t.Parallel()
	corpus := hostileCorpus()
	if len(corpus) != corpusSize {
		t.Fatalf("the corpus has %d requests, want %d", len(corpus), corpusSize)
	}
	families := map[string]int{}
	for i := range corpus {
		families[corpus[i].family]++
	}
	t.Logf("families: %v", families)
	pprof.Do(t.Context(), pprof.Labels("corpus", "hostile"), func(ctx context.Context) {
		const lanes = 2
		var wait sync.WaitGroup
		for lane := range lanes {
			wait.Go(func() {
				engine := new(recorder)
				server := httptest.NewServer(engine)
				defer server.Close()
				cfg := config(t, server.URL)
				cfg.Limits.BodyBytes = hostileBodyLimit
				cfg.Limits.BufferedBytes = 8 * units.MiB
				cfg.Models = append(cfg.Models, pool.ModelConfig{Name: "n", Targets: cfg.Models[0].Targets})
				r, stop := start(t, cfg, Options{})
				ingress := r.Status().Listeners["ingress"]
				usage := 0
				step := lanes
				if testing.Short() {
					step *= 23
				}
				for i := lane; i < len(corpus); i += step {
					usage += sendHostile(ctx, t, ingress, engine, i, &corpus[i])
					if t.Failed() {
						break
					}
				}
				until(t, func() bool { return r.proxy.InFlight() == 0 })
				if held := inFlight(r); held != 0 {
					t.Errorf("%d reservations are left", held)
				}
				if err := stop(); err != nil {
					t.Errorf("run ended with %v", err)
				}
				if got := len(records(t, cfg.Metering.File)); got != usage {
					t.Errorf("%d usage records for %d requests that the engine got", got, usage)
				}
			})
		}
		wait.Wait()
	})
	until(t, func() bool {
		var b bytes.Buffer
		_ = pprof.Lookup("goroutine").WriteTo(&b, 1)
		return !strings.Contains(b.String(), `"corpus":"hostile"`) // nothing that the routers started is left
	})
}

// inFlight is the sum of the load that the router's pools hold.
func inFlight(r *Router) (sum int) {
	for _, e := range r.Endpoints() {
		sum += e.InFlight
	}
	return sum
}

// sendHostile sends one request and its canary, and gives the number of
// requests that the engine got.
func sendHostile(ctx context.Context, t *testing.T, ingress string, engine *recorder, i int, h *hostile) (usage int) {
	t.Helper()
	fail := func(format string, args ...any) {
		t.Errorf("case %d (%s): %s\nrequest: %.600q", i, h.family, fmt.Sprintf(format, args...), h.raw)
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", ingress)
	if err != nil {
		fail("dial: %v", err)
		return 0
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = conn.Write(h.raw) // the router may answer and close before it has all
		if h.fin {
			_ = conn.(*net.TCPConn).CloseWrite()
		}
	}()
	in := bufio.NewReader(conn)
	closed := false
	for n := 0; n <= h.also && !closed; n++ {
		resp, body, err := readAnswer(in, h.method)
		if err != nil {
			if h.want != mustHangUp || n > 0 || !errors.Is(err, io.EOF) && !isReset(err) {
				fail("answer %d: %v", n, err)
			}
			closed = true
			break
		}
		want := h.want
		if n > 0 {
			want = mustRefuse
		}
		if problem := judge(resp, body, want); problem != "" {
			fail("answer %d: %s: %d %v %q", n, problem, resp.StatusCode, resp.Header, body)
			return 0
		}
		closed = resp.Close
		if closed && n < h.also {
			h.also = n // the rest is not read
		}
	}
	<-sent
	got := engine.take()
	switch {
	case h.want == mustPass && len(got) != 1, h.want != mustPass && len(got) != 0:
		fail("the engine got %d requests: %.300q", len(got), got)
		return len(got)
	case h.want == mustPass && !bytes.Equal(got[0].body, h.body):
		fail("the engine got the body %.300q, want %.300q", got[0].body, h.body)
	}
	usage = len(got)
	if h.fin && !closed {
		return usage // nothing more can be sent, and the end is read below by others
	}
	if closed {
		if b, err := io.ReadAll(in); len(b) > 0 || err != nil && !isReset(err) {
			fail("behind the last answer came %q, %v", b, err)
		}
		return usage
	}
	return usage + canary(conn, in, engine, i, fail)
}

// canary sends a plain request on the same connection.
func canary(conn net.Conn, in *bufio.Reader, engine *recorder, i int, fail func(string, ...any)) (usage int) {
	id := "c" + strconv.Itoa(i)
	const body = `{"model":"m","messages":[{"role":"user","content":"canary"}]}`
	_, _ = fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Canary: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", id, len(body), body)
	resp, answer, err := readAnswer(in, http.MethodPost)
	got := engine.take()
	switch {
	case err != nil:
		fail("the request behind it: %v", err)
	case resp.StatusCode != 200 || !strings.Contains(answer, `"engine":"`+id+`"`):
		fail("the request behind it got %d %s", resp.StatusCode, answer)
	case len(got) != 1 || got[0].header.Get("X-Canary") != id || string(got[0].body) != strings.Replace(body, `"m"`, `"served"`, 1):
		fail("the request behind it came as %q", got)
	}
	return len(got)
}

// readAnswer reads one whole response, past interim ones.
func readAnswer(in *bufio.Reader, method string) (*http.Response, string, error) {
	if method == "" {
		method = http.MethodPost
	}
	for {
		resp, err := http.ReadResponse(in, &http.Request{Method: method})
		if err != nil {
			return nil, "", err
		}
		if resp.StatusCode == http.StatusContinue {
			continue
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		return resp, string(body), err
	}
}

func isReset(err error) bool {
	return err != nil && (strings.Contains(err.Error(), "reset") || strings.Contains(err.Error(), "broken pipe"))
}

// judge says what is wrong with an answer, "" for nothing.
func judge(resp *http.Response, body string, want verdict) string {
	if want == mustPass || want == mustAnswer {
		if resp.StatusCode != 200 {
			return "it was not served"
		}
		return ""
	}
	if resp.StatusCode < 400 || resp.StatusCode > 499 && resp.StatusCode != http.StatusNotImplemented && resp.StatusCode != http.StatusHTTPVersionNotSupported {
		return "no 4xx"
	}
	if resp.Request.Method == http.MethodHead {
		return "" // has no body
	}
	var e struct {
		Error struct {
			Message, Type string
			Param, Code   *string
		}
	}
	if err := json.Unmarshal([]byte(body), &e); err != nil || e.Error.Message == "" || e.Error.Type == "" || e.Error.Code == nil ||
		!strings.Contains(body, `"param":`) {
		return "no OpenAI error"
	}
	if resp.Header.Get("Content-Type") != "application/json" || resp.Header.Get("X-Hearth-Reason") == "" || resp.Header.Get("X-Request-Id") == "" {
		return "a header is missing"
	}
	if heals := resp.Header.Get("Retry-After") != ""; heals == (resp.Header.Get("X-Should-Retry") == "false") {
		return "it does not say whether trying again can help"
	}
	return ""
}
