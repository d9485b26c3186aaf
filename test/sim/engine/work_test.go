package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// worked is an engine on a real socket with what it told of its work.
type worked struct {
	url string
	mu  sync.Mutex
	all []Work
}

func serveWorked(t *testing.T) *worked {
	t.Helper()
	w := &worked{}
	e := newEngine(t, func(o *Options) {
		o.AllowFaults, o.Speedup, o.DecodeStep = true, 1e6, time.Millisecond
		o.Worked = func(got Work) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.all = append(w.all, got)
		}
	})
	s := httptest.NewServer(e)
	t.Cleanup(s.Close)
	w.url = s.URL
	return w
}

func (w *worked) ask(t *testing.T, path, body string) (*http.Response, []byte, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Request-Id", "r1")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	got, err := io.ReadAll(resp.Body)
	return resp, got, err
}

// last is the last thing told, once there are as many.
func (w *worked) last(t *testing.T, count int) Work {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		w.mu.Lock()
		all := w.all
		w.mu.Unlock()
		if len(all) >= count {
			return all[count-1]
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("told %+v, want %d", all, count)
		}
	}
}

func TestWorkIsToldBeforeTheAnswersEndWithItsUsage(t *testing.T) {
	t.Parallel()
	text, tokens := Text([]byte("abcdefgh"), 0, 100)
	for path, c := range map[string]struct {
		body string
		want Work
	}{
		"/v1/completions": {`{"model":"m","prompt":"abcdefgh","max_tokens":100}`, Work{Prompt: 2, Completion: tokens, Finish: WorkWhole}},
		"/v1/embeddings":  {`{"model":"m","input":["abcdefgh","xyz"]}`, Work{Prompt: 3, Finish: WorkWhole}},
		"/v1/responses":   {`{"model":"m","input":"a","stream":true,"max_output_tokens":3}`, Work{Prompt: 8, Completion: 3, Finish: WorkWhole}},
		"/v1/unknown":     {`{}`, Work{Finish: WorkRefused}},
	} {
		w := serveWorked(t)
		_, got, err := w.ask(t, path, c.body)
		if err != nil {
			t.Fatal(err)
		}
		if path == "/v1/completions" && !bytes.Contains(got, []byte(text)) {
			t.Errorf("got %s, want the text %q", got, text)
		}
		c.want.Phase, c.want.Request, c.want.Path = WorkEnded, "r1", path
		if diff := cmp.Diff(c.want, w.last(t, 2)); diff != "" {
			t.Errorf("%s: %s", path, diff)
		}
		if first := w.last(t, 1); first.Phase != WorkBegun || first.Request != "r1" {
			t.Errorf("%s: first told %+v", path, first)
		}
	}
}

func TestAFaultedAnswerIsToldWithWhatWasGenerated(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{FaultEnd, FaultRST, FaultReset} {
		for _, stream := range []bool{true, false} {
			w := serveWorked(t)
			if _, _, err := w.ask(t, "/sim/fault", fmt.Sprintf(`{"mode":%q,"count":1,"afterTokens":3}`, mode)); err != nil {
				t.Fatal(err)
			}
			_, got, err := w.ask(t, "/v1/completions", fmt.Sprintf(`{"model":"m","prompt":"abcdefgh","stream":%t}`, stream))
			work := w.last(t, 2)
			if work.Finish != WorkAborted || work.Completion != 3 || work.Prompt != 2 || work.Fault != mode {
				t.Errorf("%s, stream %t: told %+v", mode, stream, work)
			}
			switch clean := mode == FaultEnd && stream; {
			case clean != (err == nil):
				t.Errorf("%s, stream %t: ended with %v", mode, stream, err)
			case mode == FaultRST && !errors.Is(err, syscall.ECONNRESET):
				t.Errorf("%s, stream %t: ended with %v, want a reset", mode, stream, err)
			case bytes.Contains(got, []byte("[DONE]")):
				t.Errorf("%s, stream %t: the answer has its end", mode, stream)
			}
		}
	}
}

func TestAnEarlyAnswerDoesNotWaitForTheBody(t *testing.T) {
	t.Parallel()
	w := serveWorked(t)
	if _, _, err := w.ask(t, "/sim/fault", `{"mode":"early","count":1,"status":429,"retryAfter":"7"}`); err != nil {
		t.Fatal(err)
	}
	body, sending := io.Pipe() // never sends
	defer func() { _ = sending.Close() }()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.url+"/v1/completions", body)
	if err != nil {
		t.Fatal(err)
	}
	req.ContentLength = 1 << 20
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != 429 || resp.Header.Get("Retry-After") != "7" {
		t.Errorf("got %s %v", resp.Status, resp.Header)
	}
}

func TestHintsComeBeforeAWholeAnswerAndATrailerAfter(t *testing.T) {
	t.Parallel()
	w := serveWorked(t)
	if _, _, err := w.ask(t, "/sim/fault", `{"mode":"hints","count":1}`); err != nil {
		t.Fatal(err)
	}
	hints := 0
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(int, textproto.MIMEHeader) error { hints++; return nil },
	})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url+"/v1/completions", strings.NewReader(`{"model":"m","prompt":"abcdefgh","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	got, err := io.ReadAll(resp.Body)
	if err != nil || hints != 1 || !bytes.HasSuffix(got, []byte("data: [DONE]\n\n")) || resp.Trailer.Get("X-Sim-Trailer") != "end" {
		t.Errorf("%d hints, trailer %v, %v, %s", hints, resp.Trailer, err, got)
	}
}
