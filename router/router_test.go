package router

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/router/admin"
	"github.com/hearth-dev/hearth/router/feed"
	"github.com/hearth-dev/hearth/router/pool"
)

// engine is an OpenAI-compatible fake that answers a fixed text and usage.
func engine(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	const usage = `"usage":{"prompt_tokens":40,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":32}}`
	if !bytes.Contains(body, []byte(`"stream":true`)) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprintf(w, `{"id":"c","choices":[{"message":{"content":"hi"}}],%s}`, usage)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = io.WriteString(w, `data: {"choices":[{"delta":{"content":"hi"}}]}`+"\n\n")
	if bytes.Contains(body, []byte(`"include_usage":true`)) {
		_, _ = io.WriteString(w, `data: {"choices":[],`+usage+"}\n\n")
	}
	_, _ = io.WriteString(w, "data: [DONE]\n\n")
}

// config is a router on free loopback ports in front of one engine.
func config(t *testing.T, engineURL string) Config {
	t.Helper()
	dir := t.TempDir()
	cfg := Default()
	cfg.Listen = Listen{Ingress: "127.0.0.1:0", Admin: "127.0.0.1:0", Socket: filepath.Join(dir, "router.sock")}
	cfg.Metering.File = filepath.Join(dir, "usage.jsonl")
	cfg.Pools = []pool.PoolConfig{{Name: "p", Endpoints: []pool.EndpointConfig{{URL: engineURL, Accelerator: "h100"}}}}
	cfg.Models = []pool.ModelConfig{{Name: "m", Targets: []pool.TargetConfig{{Pool: "p", ServedModel: "served", Weight: 1}}}}
	return cfg
}

// start runs a router until the test ends; stop ends it and gives Run's error.
func start(t *testing.T, cfg Config, o Options) (r *Router, stop func() error) {
	t.Helper()
	r, err := New(cfg, o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	select {
	case <-r.Ready():
	case err := <-done:
		t.Fatalf("run: %v", err)
	}
	var result error
	stopped := false
	stop = func() error {
		if !stopped {
			stopped = true
			cancel()
			result = <-done
		}
		return result
	}
	t.Cleanup(func() { _ = stop() })
	return r, stop
}

func request(t *testing.T, method, url, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(raw)
}

func TestARouterServesMetersAndExplains(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(engine))
	t.Cleanup(s.Close)
	cfg := config(t, s.URL)
	r, stop := start(t, cfg, Options{})
	at := r.Status().Listeners
	ingress, adminURL := "http://"+at["ingress"], "http://"+at["admin"]

	const chat = `{"model":"m","messages":[{"role":"user","content":"hello"}]`
	if code, got := request(t, http.MethodPost, ingress+"/v1/chat/completions", chat+"}"); code != 200 || !strings.Contains(got, `"hi"`) {
		t.Fatalf("chat gave %d %s", code, got)
	}
	if code, got := request(t, http.MethodPost, ingress+"/v1/chat/completions", chat+`,"stream":true}`); code != 200 || strings.Contains(got, "usage") || !strings.HasSuffix(got, "data: [DONE]\n\n") {
		t.Fatalf("stream gave %d %q", code, got)
	}
	if code, _ := request(t, http.MethodGet, adminURL+"/readyz", ""); code != 200 {
		t.Fatalf("readyz gave %d", code)
	}
	client, err := admin.NewClient(cfg.Listen.Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if x, err := client.Explain(t.Context(), []byte(chat+"}")); err != nil || x.Chosen != s.URL {
		t.Fatalf("explain gave %+v, %v", x, err)
	}
	if _, got := request(t, http.MethodGet, adminURL+"/metrics", ""); !strings.Contains(got, `hearth_router_tokens_total{kind="completion",model="m"} 4`) {
		t.Fatalf("metrics lack the tokens:\n%s", got)
	}
	if code, got := request(t, http.MethodGet, adminURL+"/debug/config", ""); code != 200 || !strings.Contains(got, "servedModel: served") {
		t.Fatalf("debug config gave %d %s", code, got)
	}
	if err := stop(); err != nil {
		t.Fatalf("run ended with %v", err)
	}
	raw, err := os.ReadFile(cfg.Metering.File)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	if len(lines) != 2 {
		t.Fatalf("%d usage records, want 2:\n%s", len(lines), raw)
	}
	for _, line := range lines {
		var record map[string]any
		if err := json.Unmarshal([]byte(line), &record); err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string]any{
			"schema": "hearth.dev/usage/v1", "model": "m", "servedModel": "served", "accelerator": "h100", "consumer": "anonymous",
			"promptTokens": 40.0, "cachedTokens": 32.0, "completionTokens": 2.0, "estimated": false, "outcome": "ok",
		} {
			if record[name] != want {
				t.Errorf("record has %s %v, want %v", name, record[name], want)
			}
		}
	}
}

func TestAChangedFileIsTakenAndAnInvalidOneKeepsTheOld(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(engine))
	t.Cleanup(s.Close)
	cfg := config(t, s.URL)
	path := filepath.Join(t.TempDir(), "router.yaml")
	write := func(model string) {
		t.Helper()
		text := fmt.Sprintf("apiVersion: hearth.dev/v1alpha1\nkind: RouterConfig\nlisten: {ingress: '127.0.0.1:0', admin: '127.0.0.1:0'}\n"+
			"pools: [{name: p, endpoints: [{url: '%s'}]}]\nmodels: [{name: %s, targets: [{pool: p, weight: 1}]}]\n", s.URL, model)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("m")
	r, _ := start(t, cfg, Options{ConfigFile: path})
	write("other")
	until(t, func() bool { m := r.Models(); return len(m) == 1 && m[0].Name == "other" })
	write("'' # empty name")
	until(t, func() bool { return r.Status().Config.Error != "" })
	if m := r.Models(); len(m) != 1 || m[0].Name != "other" {
		t.Fatalf("models %+v after an invalid file", m)
	}
}

// until waits for a state that a signal would only hint at.
func until(t *testing.T, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal("the state did not come")
		}
	}
}

func TestClientsCannotGrowTheMetrics(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(engine))
	t.Cleanup(s.Close)
	r, _ := start(t, config(t, s.URL), Options{})
	at := r.Status().Listeners
	series := func(round int) int {
		for _, c := range [][3]string{
			{http.MethodPost, "/v1/chat/completions", fmt.Sprintf(`{"model":"m%d","messages":[]}`, round)},
			{http.MethodPost, fmt.Sprint("/v1/p", round), `{"model":"m"}`},
			{fmt.Sprint("M", round), fmt.Sprint("/p", round), ""},
			{fmt.Sprint("M", round), "/v1/chat/completions", ""},
			{http.MethodGet, fmt.Sprint("/v1/models/m", round), ""},
		} {
			request(t, c[0], "http://"+at["ingress"]+c[1], c[2])
		}
		_, page := request(t, http.MethodGet, "http://"+at["admin"]+"/metrics", "")
		count := 0
		for line := range strings.Lines(page) {
			if strings.HasPrefix(line, namespace) {
				count++
			}
		}
		return count
	}
	first := series(0)
	for round := 1; round < 10; round++ {
		if got := series(round); got != first {
			t.Fatalf("%d series after round %d, %d after the first", got, round, first)
		}
	}
}

func TestAReloadTakesAllOfAFileOrNothing(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(engine))
	t.Cleanup(s.Close)
	cfg := config(t, s.URL)
	r, _ := start(t, cfg, Options{})
	// The file gives certificates, which need a restart, and a node that wants them.
	next := cfg
	next.TLS = TLS{Cert: "/c", Key: "/k", CA: "/a"}
	next.Nodes = []feed.Node{{Address: "192.0.2.1:7411"}}
	next.Models = []pool.ModelConfig{{Name: "other", Targets: []pool.TargetConfig{{Pool: "p", Weight: 1}}}}
	if err := r.apply(next); err == nil || !strings.Contains(err.Error(), "nodes[0].address") {
		t.Fatalf("apply gave %v", err)
	}
	if m := r.Models(); len(m) != 1 || m[0].Name != "m" {
		t.Errorf("models %+v of a file that was not taken", m)
	}
	// A consumer header needs a restart: until then it would go to the engines too.
	next = cfg
	next.Metering.ConsumerHeader, next.Metering.TrustedClients = "X-Team", []string{"gateway"}
	token := sha256.Sum256([]byte("secret"))
	next.Metering.Tokens = []Token{{Name: "team-b", SHA256: hex.EncodeToString(token[:])}}
	if err := r.apply(next); err != nil {
		t.Fatal(err)
	}
	shown := &http.Request{Header: http.Header{"X-Team": {"a"}}, TLS: &tls.ConnectionState{
		PeerCertificates: []*x509.Certificate{{Subject: pkix.Name{CommonName: "gateway"}}},
	}}
	if got := r.consumers.Load().Of(shown); got != "gateway" {
		t.Errorf("the consumer is %q before the restart", got)
	}
	if got := r.consumers.Load().Of(&http.Request{Header: http.Header{"Authorization": {"Bearer secret"}}}); got != "team-b" {
		t.Errorf("the bearer of a new token is %q", got)
	}
	if r.effective.Metering.ConsumerHeader != "" || len(r.effective.Metering.Tokens) != 1 {
		t.Errorf("effective metering %+v", r.effective.Metering)
	}
}

func TestTheModelListShowsTheLongestContextThatATargetDeclares(t *testing.T) {
	t.Parallel()
	cfg := config(t, "http://127.0.0.1:1")
	cfg.Models = append(cfg.Models, pool.ModelConfig{Name: "long", Targets: []pool.TargetConfig{
		{Pool: "p", Weight: 1, ContextTokens: 8192}, {Pool: "p", ContextTokens: 131072}, {Pool: "p"},
	}})
	r, _ := start(t, cfg, Options{})
	ingress := "http://" + r.Status().Listeners["ingress"]
	const long = `{"id":"long","object":"model","created":0,"owned_by":"hearth","max_model_len":131072}`
	const undeclared = `{"id":"m","object":"model","created":0,"owned_by":"hearth"}`
	for path, want := range map[string]string{
		"/v1/models": `{"object":"list","data":[` + long + "," + undeclared + `]}`, "/v1/models/long": long, "/v1/models/m": undeclared,
	} {
		if code, got := request(t, http.MethodGet, ingress+path, ""); code != 200 || got != want {
			t.Errorf("%s gave %d %s, want %s", path, code, got, want)
		}
	}
}

func TestTheAdminListenerAnswersUnknownRoutesInTheApisForm(t *testing.T) {
	t.Parallel()
	r, _ := start(t, config(t, "http://127.0.0.1:1"), Options{})
	at := "http://" + r.Status().Listeners["admin"]
	for _, c := range []struct {
		method, path string
		code         int
	}{
		{"GET", "/", 404}, {"GET", "/nope", 404}, {"GET", "/v1/nope", 404}, {"POST", "/v1/status", 405}, {"GET", "/v1/explain", 405}, {"PUT", "/metrics", 405},
	} {
		code, got := request(t, c.method, at+c.path, "")
		var failed struct{ Error struct{ Message string } }
		if err := json.Unmarshal([]byte(got), &failed); err != nil || code != c.code || failed.Error.Message == "" {
			t.Errorf("%s %s gave %d %s", c.method, c.path, code, got)
		}
	}
}

func TestARouterWithoutAScaleOutSaysSo(t *testing.T) {
	t.Parallel()
	r, _ := start(t, config(t, "http://127.0.0.1:1"), Options{})
	client, err := admin.NewClient("http://" + r.Status().Listeners["admin"])
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if got, err := client.ScaleOuts(t.Context()); err != nil || got.ScaleOuts == nil || len(got.ScaleOuts)+got.More != 0 {
		t.Errorf("scale-outs are %+v, %v", got, err)
	}
}
