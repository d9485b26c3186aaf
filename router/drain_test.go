package router

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/units"
)

// slowEngine begins a stream and ends it when told; what it began is announced.
func slowEngine(t *testing.T, end <-chan struct{}) (url string, began <-chan struct{}) {
	t.Helper()
	started := make(chan struct{}, 8)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, `data: {"choices":[{"delta":{"content":"hi"}}]}`+"\n\n")
		_ = http.NewResponseController(w).Flush()
		started <- struct{}{}
		select {
		case <-end:
			_, _ = io.WriteString(w, `data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}`+"\n\ndata: [DONE]\n\n")
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(s.Close)
	return s.URL, started
}

// openStream sends a streaming request and gives its body, whose first event was read.
func openStream(t *testing.T, r *Router) io.ReadCloser {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+r.Status().Listeners["ingress"]+"/v1/chat/completions",
		strings.NewReader(`{"model":"m","messages":[{"role":"user","content":"hello"}],"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := (&http.Client{Transport: &http.Transport{}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := resp.Body.Read(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	return resp.Body
}

func records(t *testing.T, path string) (list []map[string]any) {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(raw) {
		var record map[string]any
		if err := json.Unmarshal(line, &record); err != nil {
			t.Fatal(err)
		}
		list = append(list, record)
	}
	return list
}

func TestARouterThatIsToldToStopLetsStreamsEndAndSaysSo(t *testing.T) {
	t.Parallel()
	end := make(chan struct{})
	url, began := slowEngine(t, end)
	cfg := config(t, url)
	r, err := New(cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-r.Ready()
	body := openStream(t, r)
	defer func() { _ = body.Close() }()
	<-began
	at := r.Status().Listeners
	cancel()
	until(t, func() bool {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", at["ingress"])
		if err == nil {
			_ = conn.Close()
		}
		return err != nil
	})
	if code, got := request(t, http.MethodGet, "http://"+at["admin"]+"/readyz", ""); code != 503 || !strings.Contains(got, "draining") {
		t.Errorf("readyz gave %d %s while streams drain", code, got)
	}
	if !r.Status().Draining {
		t.Error("the status does not say that it drains")
	}
	close(end)
	rest, err := io.ReadAll(body)
	if err != nil || !bytes.HasSuffix(rest, []byte("data: [DONE]\n\n")) {
		t.Errorf("the stream ended with %q, %v", rest, err)
	}
	if err := <-done; err != nil {
		t.Errorf("run ended with %v", err)
	}
	if list := records(t, cfg.Metering.File); len(list) != 1 || list[0]["outcome"] != "ok" || list[0]["completionTokens"] != 3.0 {
		t.Errorf("records %v", list)
	}
}

// stopNow runs a router and gives what ends it, after a short drain, with all
// the time that its handlers may need.
func stopNow(t *testing.T, cfg Config) (*Router, func() error) {
	t.Helper()
	cfg.Limits.DrainTimeout = units.Duration(time.Millisecond)
	r, err := New(cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	r.cutWait = time.Minute
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-r.Ready()
	return r, func() error { cancel(); return <-done }
}

func TestStreamsThatOutlastTheDrainTimeoutAreCutToldAndMetered(t *testing.T) {
	t.Parallel()
	url, began := slowEngine(t, nil)
	cfg := config(t, url)
	r, stop := stopNow(t, cfg)
	var bodies []io.ReadCloser
	for range 4 {
		body := openStream(t, r)
		defer func() { _ = body.Close() }()
		bodies = append(bodies, body)
		<-began
	}
	if err := stop(); err != nil {
		t.Errorf("run ended with %v", err)
	}
	for _, body := range bodies {
		rest, err := io.ReadAll(body)
		if err == nil || !bytes.Contains(rest, []byte(`"code":"router_stopped"}}`+"\n\n")) {
			t.Errorf("a cut stream ended with %q, %v", rest, err)
		}
	}
	list := records(t, cfg.Metering.File)
	if len(list) != 4 {
		t.Fatalf("%d records of 4 cut streams", len(list))
	}
	for _, record := range list {
		if record["outcome"] != "cut" || record["estimated"] != true || record["completionTokens"] != 1.0 {
			t.Errorf("record %v", record)
		}
	}
}

func TestARequestThatIsCutBeforeItsAnswerGetsAnErrorThatHeals(t *testing.T) {
	t.Parallel()
	asked := make(chan struct{}, 1)
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		asked <- struct{}{}
		<-r.Context().Done()
	}))
	t.Cleanup(s.Close)
	cfg := config(t, s.URL)
	r, stop := stopNow(t, cfg)
	stopped := make(chan error, 1)
	go func() { <-asked; stopped <- stop() }()
	code, got := request(t, http.MethodPost, "http://"+r.Status().Listeners["ingress"]+"/v1/completions", `{"model":"m","prompt":"x"}`)
	if code != http.StatusServiceUnavailable || !strings.Contains(got, `"code":"router_stopped"`) {
		t.Errorf("got %d %s", code, got)
	}
	if err := <-stopped; err != nil {
		t.Errorf("run ended with %v", err)
	}
	if list := records(t, cfg.Metering.File); len(list) != 1 || list[0]["outcome"] != "cut" || list[0]["status"] != 503.0 {
		t.Errorf("records %v", list)
	}
}

func TestASecondRouterDoesNotTakeTheSocketOfARunningOne(t *testing.T) {
	t.Parallel()
	cfg := config(t, "http://127.0.0.1:1")
	start(t, cfg, Options{})
	other := config(t, "http://127.0.0.1:1")
	other.Listen.Socket = cfg.Listen.Socket
	r, err := New(other, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "another process answers") {
		t.Fatalf("run gave %v", err)
	}
}

func TestAClientThatReadsNothingIsGivenUp(t *testing.T) {
	t.Parallel()
	l, err := identity.ListenTCP(t.Context(), "127.0.0.1:0", 300*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	gone := make(chan struct{})
	s := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for piece := make([]byte, 64<<10); ; {
			if _, err := w.Write(piece); err != nil {
				close(gone)
				return
			}
		}
	})}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-gone:
	case <-time.After(time.Minute):
		t.Error("the handler still writes to a client that does not read")
	}
	_ = s.Close()
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		t.Errorf("serve ended with %v", err)
	}
}
