package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/nodeagent/endpoints"
	"github.com/hearth-dev/hearth/nodeagent/health"
	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// newOptions runs the rooms behind the handlers, with one model in a folder.
func newOptions(t *testing.T) (opts Options, good artifact.Ref) {
	t.Helper()
	root := t.TempDir()
	model := filepath.Join(root, "models", "tiny")
	if err := hub.WriteModel(model, hub.ModelOptions{Size: units.MiB, Shards: 2, Seed: 1}); err != nil {
		t.Fatal(err)
	}
	origin, err := source.NewDir(source.DirOptions{Name: "folder", Root: filepath.Join(root, "models")})
	if err != nil {
		t.Fatal(err)
	}
	store, err := weightcache.Open(weightcache.Options{Dir: filepath.Join(root, "weights")})
	if err != nil {
		t.Fatal(err)
	}
	puller, err := weightcache.NewPuller(weightcache.PullerOptions{
		Store: store, Sources: []weightcache.Rule{{Source: origin, Refs: []string{filepath.Join(root, "models") + "/*"}}}, ScrubEvery: -1,
	})
	if err != nil {
		t.Fatal(err)
	}
	inside, err := local.NewInProcess(local.Options{Store: store, Puller: puller})
	if err != nil {
		t.Fatal(err)
	}
	table, err := health.BuiltIn()
	if err != nil {
		t.Fatal(err)
	}
	tracker, err := health.New(health.Options{Devices: []device.Device{{ID: "gpu-0"}}, Table: table})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 2)
	go func() { done <- puller.Run(ctx) }()
	go func() { done <- tracker.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-done, <-done, puller.Wait(context.WithoutCancel(t.Context())), store.Close()); err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	return Options{
		Node: func() Node { return Node{Name: "node-a"} }, Weights: inside,
		Manifest: func(artifact.Ref) (*artifact.Manifest, bool) { return nil, false },
		Endpoints: func() []endpoints.State {
			return []endpoints.State{{Endpoint: endpoints.Endpoint{Name: "b"}}, {Endpoint: endpoints.Endpoint{Name: "a"}}}
		},
		Tracker: tracker, AllowInject: true,
	}, artifact.Ref{Scheme: artifact.SchemeDir, Name: model}
}

func serve(t *testing.T, handler http.Handler) (*Client, string) {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	client, err := NewClient(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	return client, server.URL
}

func call(t *testing.T, method, url, body string) (status int, code string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	var answer errorAnswer
	if err := json.Unmarshal(data, &answer); err != nil || answer.Error == nil || response.Header.Get("Hearth-API") != Version {
		t.Fatalf("%s %s gave %d %q, no error of the API: %v", method, url, response.StatusCode, data, err)
	}
	return response.StatusCode, answer.Error.Code
}

func TestMalformedCallsAreRefusedByName(t *testing.T) {
	t.Parallel()
	opts, _ := newOptions(t)
	_, socket := serve(t, NewSocket(opts))
	_, open := serve(t, NewReadOnly(opts))
	for _, c := range []struct {
		method, url, body string
		status            int
		code              string
	}{
		{"POST", socket + "/v1/models/rm", "", 400, CodeBadRequest},
		{"POST", socket + "/v1/models/rm", `{"ref":"dir:///x","force":true}`, 400, CodeBadRequest},
		{"POST", socket + "/v1/models/rm", `{"ref":"dir:///x"} {}`, 400, CodeBadRequest},
		{"POST", socket + "/v1/models/rm", `{"ref":"` + strings.Repeat("x", maxBody) + `"}`, 400, CodeBadRequest},
		{"POST", socket + "/v1/models/verify", `{"ref":"dir:///x"}`, 404, CodeUnknownRef},
		{"POST", socket + "/v1/models/pull", `{"ref":"s3://x"}`, 400, CodeBadRequest},
		{"POST", socket + "/v1/inject", `{"device":"gpu-0"}`, 400, CodeBadRequest},
		{"POST", socket + "/v1/inject", `{"device":"gpu-0","xid":79,"clear":true}`, 400, CodeBadRequest},
		{"POST", socket + "/v1/inject", `{"device":"gpu-0","xid":-1}`, 400, CodeBadRequest},
		{"POST", socket + "/v1/inject", `{"device":"gpu-9","xid":79}`, 404, CodeUnknownDevice},
		{"GET", socket + "/v1/models/rm", "", 405, CodeBadMethod},
		{"DELETE", socket + "/v1/models", "", 405, CodeBadMethod},
		{"GET", socket + "/v2/node", "", 404, CodeNotFound},
		{"GET", socket + "/v1/models/show", "", 400, CodeBadRequest},
		{"GET", open + "/v1/models/pull", "", 405, CodeBadMethod},
		{"POST", open + "/v1/models/pull", `{}`, 403, CodeReadOnly},
		{"PUT", open + "/v1/node", `{}`, 403, CodeReadOnly},
	} {
		if status, code := call(t, c.method, c.url, c.body); status != c.status || code != c.code {
			t.Errorf("%s %s %.60s gave %d %s, want %d %s", c.method, c.url, c.body, status, code, c.status, c.code)
		}
	}
}

func TestChangingCallsPastTheLimitAreBusyAndReadsGoOn(t *testing.T) {
	t.Parallel()
	opts, _ := newOptions(t)
	a := newAPI(opts)
	for range maxChanging {
		a.slots <- struct{}{}
	}
	recorder := httptest.NewRecorder()
	request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/models/rm", bytes.NewReader([]byte(`{}`)))
	a.changing(a.remove)(recorder, request)
	if recorder.Code != http.StatusServiceUnavailable || !strings.Contains(recorder.Body.String(), CodeBusy) {
		t.Errorf("gave %d %s", recorder.Code, recorder.Body)
	}
	mux := http.NewServeMux()
	a.reads(mux)
	recorder = httptest.NewRecorder()
	mux.ServeHTTP(recorder, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/v1/node", nil))
	if recorder.Code != http.StatusOK {
		t.Errorf("a read gave %d", recorder.Code)
	}
}

func TestLeasesShowHoldersAndForbidRemoval(t *testing.T) {
	t.Parallel()
	opts, ref := newOptions(t)
	client, _ := serve(t, NewSocket(opts))
	ctx := t.Context()
	model, err := client.Pull(ctx, PullRequest{Ref: ref.String()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	digest, err := artifact.ParseDigest(model.Digest)
	if err != nil {
		t.Fatal(err)
	}
	inside, ok := opts.Weights.(*local.InProcess)
	if !ok {
		t.Fatalf("weights are a %T", opts.Weights)
	}
	if _, err := inside.Lend(ctx, map[string]artifact.Digest{"endpoint b": digest}); err != nil {
		t.Fatal(err)
	}
	if _, err := inside.Cache().Hold(ctx, digest, "a"); err != nil {
		t.Fatal(err)
	}
	held, err := get[leaseList](ctx, client, "/v1/leases")
	if leases := held.Leases; err != nil || fmt.Sprint(leases) != fmt.Sprint([]Lease{{Digest: model.Digest, Ref: ref.String(), Holders: []string{"claim a", "endpoint b"}}}) {
		t.Errorf("leases are %v, %v", leases, err)
	}
	var e *Error
	if err := client.Remove(ctx, ref.String()); !errors.As(err, &e) || e.Code != CodeLeased || e.Status != http.StatusConflict {
		t.Errorf("rm gave %v", err)
	}
	list, err := client.Endpoints(ctx)
	if err != nil || len(list) != 2 || list[0].Name != "a" {
		t.Errorf("endpoints are %v, %v", list, err)
	}
}

func TestAPullThatIsCutSaysSo(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{
		"after a line": `{"model":{"ref":"r","state":"Filling"}}` + "\n", "at once": "", "in a line": `{"model":`,
	} {
		client, _ := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Hearth-API", Version)
			_, _ = io.WriteString(w, body)
		}))
		if _, err := client.Pull(t.Context(), PullRequest{Ref: "r"}, nil); err == nil || name != "in a line" && !errors.Is(err, ErrCut) {
			t.Errorf("%s: Pull gave %v", name, err)
		}
	}
}

func TestAClientWantsASocketPathOrAnHTTPAddress(t *testing.T) {
	t.Parallel()
	for _, addr := range []string{"", "host:7412", "ftp://h", "http://", "http://h/path", "relative.sock"} {
		if _, err := NewClient(addr); err == nil {
			t.Errorf("%q was accepted", addr)
		}
	}
	for _, addr := range []string{"/run/a.sock", "unix:///run/a.sock", "http://127.0.0.1:1", "https://h:1/"} {
		if _, err := NewClient(addr); err != nil {
			t.Errorf("%q gave %v", addr, err)
		}
	}
	client, err := NewClient(filepath.Join(t.TempDir(), "none.sock"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Node(t.Context()); err == nil || !strings.Contains(err.Error(), "none.sock") {
		t.Errorf("a socket that is not there gave %v", err)
	}
}
