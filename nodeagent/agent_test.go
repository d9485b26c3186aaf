package nodeagent_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
)

// waitLimit is far beyond what any step takes; it only ends a test that hangs.
const waitLimit = time.Minute

const ref = "hub://org/tiny@main"

// newOrigin serves one small generated model as org/tiny.
func newOrigin(t *testing.T) (*hub.Origin, string) {
	t.Helper()
	dir := t.TempDir()
	if err := hub.WriteModel(filepath.Join(dir, "org", "tiny"), hub.ModelOptions{Size: units.MiB, Shards: 2, Seed: 1}); err != nil {
		t.Fatal(err)
	}
	origin := hub.New(hub.Options{Dir: dir})
	server := httptest.NewServer(origin)
	t.Cleanup(server.Close)
	return origin, server.URL
}

// newConfig is that of an agent with everything on free ports.
func newConfig(t *testing.T, origin string) nodeagent.Config {
	t.Helper()
	dir, err := os.MkdirTemp("", "agent") //nolint:usetesting // a socket's path holds 107 bytes, a test's directory may be longer
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	c := nodeagent.Default()
	c.Node = "node-a"
	c.Listen = nodeagent.Listen{Mirror: "127.0.0.1:0", Report: "127.0.0.1:0", Admin: "127.0.0.1:0", Socket: filepath.Join(dir, "a.sock")}
	c.Network.Enabled = false // tests of nodeagent/netattr have the kernel
	c.Weights.Dir = filepath.Join(dir, "weights")
	c.Weights.KeepFree = 0
	c.Health = nodeagent.Health{StateDir: filepath.Join(dir, "health"), AllowInject: true}
	c.Sources = []nodeagent.Source{{Name: "origin", Type: nodeagent.SourceHub, URL: origin, Refs: []string{"org/*"}}}
	c.Devices = []nodeagent.Device{{ID: "gpu-0", Product: "simulated"}}
	return c
}

type running struct {
	*nodeagent.Agent
	client    *admin.Client
	stop      func()
	addresses map[string]string // where the agent is in another process
}

// Listeners are the agent's, wherever it runs.
func (r running) Listeners() map[string]string {
	if r.Agent == nil {
		return r.addresses
	}
	return r.Agent.Listeners()
}

func run(t *testing.T, c nodeagent.Config) running {
	t.Helper()
	return runWith(t, c, nodeagent.Options{})
}

func runWith(t *testing.T, c nodeagent.Config, opts nodeagent.Options) running {
	t.Helper()
	opts.Version, opts.BootID = "test", "boot"
	agent, err := nodeagent.New(c, opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- agent.Run(ctx) }()
	select {
	case <-agent.Ready():
	case err := <-done:
		t.Fatalf("Run ended before it was ready: %v", err)
	}
	client, err := admin.NewClient(c.Listen.Socket)
	if err != nil {
		t.Fatal(err)
	}
	stopped := false
	r := running{Agent: agent, client: client, stop: func() {
		if stopped {
			return
		}
		stopped = true
		client.Close()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run gave %v", err)
		}
	}}
	t.Cleanup(r.stop)
	return r
}

var errSeen = errors.New("seen")

// await watches the agent's report until it shows something.
func await(t *testing.T, r running, creds credentials.TransportCredentials, shows func(*report.State) bool) {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+r.Listeners()["report"], append(report.DialOptions(), grpc.WithTransportCredentials(creds))...)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	var state report.State
	err = report.Watch(ctx, conn, report.Resume{Router: "test"}, func(m *report.Report) error {
		if err := state.Apply(m); err != nil {
			return err
		}
		if shows(&state) {
			return errSeen
		}
		return nil
	})
	if !errors.Is(err, errSeen) {
		t.Fatalf("the report did not show it: %v; artifacts %v, devices %v", err, state.Artifacts(), state.Devices())
	}
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(body)
}

func TestAnAgentPullsServesReportsAndTakesFacts(t *testing.T) {
	t.Parallel()
	origin, url := newOrigin(t)
	c := newConfig(t, url)
	r := run(t, c)
	ctx := t.Context()

	lines := 0
	model, err := r.client.Pull(ctx, admin.PullRequest{Ref: "hub://org/tiny"}, func(admin.Progress) { lines++ })
	if err != nil {
		t.Fatal(err)
	}
	if model.State != "Ready" || model.Present != model.Size || model.Digest == "" || lines == 0 || len(model.Views) != 2 {
		t.Errorf("pulled %+v in %d lines", model, lines)
	}
	await(t, r, insecure.NewCredentials(), func(s *report.State) bool {
		return s.Artifact(ref).GetState() == report.ArtifactState_ARTIFACT_STATE_READY
	})
	shown, err := r.client.Model(ctx, ref)
	if err != nil || len(shown.FileList) != shown.Files || shown.Files == 0 {
		t.Fatalf("show gave %+v, %v", shown, err)
	}
	before := origin.Bytes()
	for _, f := range shown.FileList {
		status, body := get(t, "http://"+r.Listeners()["mirror"]+"/org/tiny/resolve/main/"+f.Path)
		if status != http.StatusOK || int64(len(body)) != f.Size {
			t.Errorf("mirror gave %d and %d bytes of %s", status, len(body), f.Path)
		}
	}
	if after := origin.Bytes(); after != before {
		t.Errorf("the mirror asked the origin for %d bytes of a ready model", after-before)
	}

	dev, err := r.client.Inject(ctx, admin.InjectRequest{Device: "gpu-0", XID: 79})
	if err != nil || dev.Health != "unhealthy" || dev.XIDs[79] != 1 {
		t.Fatalf("inject gave %+v, %v", dev, err)
	}
	await(t, r, insecure.NewCredentials(), func(s *report.State) bool {
		d := s.Device("gpu-0")
		return d.GetHealth() == report.Health_HEALTH_UNHEALTHY && d.GetConditions()[0].GetValue() == "xid-79"
	})
	if dev, err = r.client.Inject(ctx, admin.InjectRequest{Device: "gpu-0", Clear: true}); err != nil || dev.Health != "healthy" {
		t.Fatalf("clear gave %+v, %v", dev, err)
	}
	await(t, r, insecure.NewCredentials(), func(s *report.State) bool {
		return s.Device("gpu-0").GetHealth() == report.Health_HEALTH_HEALTHY && s.Space().GetUsedBytes() > 0
	})
	if result, err := r.client.Verify(ctx, ref); err != nil || result.Files == 0 || len(result.Bad) != 0 {
		t.Errorf("verify gave %+v, %v", result, err)
	}
	if err := r.client.Remove(ctx, ref); err != nil {
		t.Errorf("rm gave %v", err)
	}
	await(t, r, insecure.NewCredentials(), func(s *report.State) bool { return s.Artifact(ref) == nil })
}

func TestRefusalsSayWhyAndWhatToDo(t *testing.T) {
	t.Parallel()
	_, url := newOrigin(t)
	c := newConfig(t, url)
	c.Health.AllowInject = false
	r := run(t, c)
	ctx := t.Context()
	tcp, err := admin.NewClient("http://" + r.Listeners()["admin"])
	if err != nil {
		t.Fatal(err)
	}
	_, pullOther := r.client.Pull(ctx, admin.PullRequest{Ref: "hub://else/where"}, nil)
	_, pullGone := r.client.Pull(ctx, admin.PullRequest{Ref: "hub://org/absent"}, nil)
	_, pullBad := r.client.Pull(ctx, admin.PullRequest{Ref: "nonsense"}, nil)
	_, pullTCP := tcp.Pull(ctx, admin.PullRequest{Ref: ref}, nil)
	_, inject := r.client.Inject(ctx, admin.InjectRequest{Device: "gpu-0", XID: 79})
	_, injectTCP := tcp.Inject(ctx, admin.InjectRequest{Device: "gpu-0", XID: 79})
	_, show := r.client.Model(ctx, "hub://org/never")
	for _, c := range []struct {
		err  error
		code string
		hint bool
	}{
		{pullOther, admin.CodeNotAllowed, true},
		{pullGone, admin.CodeUnknownRef, true},
		{pullBad, admin.CodeBadRequest, false},
		{pullTCP, admin.CodeReadOnly, true},
		{inject, admin.CodeInjectDisabled, true},
		{injectTCP, admin.CodeReadOnly, true},
		{show, admin.CodeUnknownRef, true},
		{r.client.Remove(ctx, "hub://org/never"), admin.CodeUnknownRef, true},
	} {
		var e *admin.Error
		if !errors.As(c.err, &e) || e.Code != c.code || c.hint != (e.Hint != "") {
			t.Errorf("got %v (%+v), want %s", c.err, e, c.code)
		}
	}
	if node, err := tcp.Node(ctx); err != nil || node.Name != "node-a" || node.Version != "test" || node.Listeners["socket"] != c.Listen.Socket {
		t.Errorf("node is %+v, %v", node, err)
	}
}

func TestAConfiguredModelIsKeptReadyAndARestartFetchesNothing(t *testing.T) {
	t.Parallel()
	origin, url := newOrigin(t)
	c := newConfig(t, url)
	c.Models = []string{"hub://org/tiny"}
	ready := func(s *report.State) bool {
		return s.Artifact(ref).GetState() == report.ArtifactState_ARTIFACT_STATE_READY
	}
	r := run(t, c)
	await(t, r, insecure.NewCredentials(), ready)
	if _, err := r.client.Inject(t.Context(), admin.InjectRequest{Device: "gpu-0", XID: 79}); err != nil {
		t.Fatal(err)
	}
	r.stop()
	if _, err := os.Stat(c.Listen.Socket); err == nil {
		t.Error("the socket stands after the agent ended")
	}
	fetched := origin.Bytes()
	if fetched == 0 {
		t.Error("the origin counted nothing")
	}
	r = run(t, c)
	await(t, r, insecure.NewCredentials(), func(s *report.State) bool {
		return ready(s) && s.Device("gpu-0").GetHealth() == report.Health_HEALTH_UNHEALTHY
	})
	if again := origin.Bytes(); again != fetched {
		t.Errorf("a restart fetched %d bytes", again-fetched)
	}
}

func TestTheAdminListenerServesMetricsProbesAndConfiguration(t *testing.T) {
	t.Parallel()
	_, url := newOrigin(t)
	c := newConfig(t, url)
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			_, _ = io.WriteString(w, "vllm:num_requests_running{engine=\"0\"} 3\n")
			return
		}
		_, _ = io.WriteString(w, `{"data":[{"id":"m"}]}`)
	}))
	t.Cleanup(engine.Close)
	c.Endpoints = []nodeagent.Endpoint{{Name: "e0", URL: engine.URL, Engine: "sim", Pool: "p", Devices: []string{"gpu-0"}}}
	r := run(t, c)
	await(t, r, insecure.NewCredentials(), func(s *report.State) bool {
		return len(s.Endpoints()) == 1 && s.Endpoints()[0].GetLoad().GetRunning() == 3 && s.Endpoints()[0].GetServedModels()[0] == "m"
	})
	base := "http://" + r.Listeners()["admin"]
	for path, want := range map[string]string{
		"/healthz": "ok", "/readyz": "ready", "/debug/config": "node: node-a", "/debug/pprof/": "goroutine",
		"/metrics": `hearth_endpoint_requests{endpoint="e0",state="running"} 3`, "/v1/endpoints": `"reachable":true`, "/v1/leases": `{"leases":[]}`,
		"/v1/network": `"totals":[],"owners":[],`,
	} {
		if status, body := get(t, base+path); status != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s gave %d, want %q in:\n%.2000s", path, status, want, body)
		}
	}
}

func TestTheReportWantsARouterCertificate(t *testing.T) {
	t.Parallel()
	_, url := newOrigin(t)
	c := newConfig(t, url)
	ca, err := identity.NewCA(identity.Domain, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	issue := func(role identity.Role, name string) identity.Files {
		f := identity.Files{Cert: filepath.Join(dir, name+".pem"), Key: filepath.Join(dir, name+".key"), CA: filepath.Join(dir, "ca.pem")}
		pair, err := ca.Issue(role, name, identity.IssueOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(identity.WritePair(f.Cert, f.Key, pair), os.WriteFile(f.CA, ca.Cert(), 0o600)); err != nil {
			t.Fatal(err)
		}
		return f
	}
	agent := issue(identity.RoleAgent, "node-a")
	c.TLS = nodeagent.TLS{Cert: agent.Cert, Key: agent.Key, CA: agent.CA}
	r := run(t, c)
	config, err := identity.ClientTLS(issue(identity.RoleRouter, "router-0"), identity.RoleAgent)
	if err != nil {
		t.Fatal(err)
	}
	await(t, r, credentials.NewTLS(config), func(s *report.State) bool { return s.Device("gpu-0") != nil })

	wrong, err := identity.ClientTLS(issue(identity.RoleClient, "someone"), identity.RoleAgent)
	if err != nil {
		t.Fatal(err)
	}
	for name, creds := range map[string]credentials.TransportCredentials{"another role": credentials.NewTLS(wrong), "plain text": insecure.NewCredentials()} {
		conn, err := grpc.NewClient("passthrough:///"+r.Listeners()["report"], append(report.DialOptions(), grpc.WithTransportCredentials(creds))...)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
		err = report.Watch(ctx, conn, report.Resume{}, func(*report.Report) error { return errSeen })
		cancel()
		_ = conn.Close()
		if errors.Is(err, errSeen) {
			t.Errorf("%s was let in", name)
		}
	}
}

func TestASecondAgentOnTheSameNodeIsRefusedAndAStaleSocketIsReplaced(t *testing.T) {
	t.Parallel()
	_, url := newOrigin(t)
	c := newConfig(t, url)
	stale, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", c.Listen.Socket)
	if err != nil {
		t.Fatal(err)
	}
	stale.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := stale.Close(); err != nil {
		t.Fatal(err)
	}
	r := run(t, c)
	info, err := os.Stat(c.Listen.Socket)
	if err != nil || info.Mode().Perm() != 0o660 {
		t.Errorf("socket mode %v, %v", info.Mode(), err)
	}
	if second, err := nodeagent.New(c, nodeagent.Options{}); err == nil {
		t.Error("a second agent took the same store", second.Close())
	}
	other := newConfig(t, url)
	other.Listen.Socket = c.Listen.Socket
	second, err := nodeagent.New(other, nodeagent.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("Run on a socket in use gave %v", err)
	}
	r.stop()
}

func TestManyCallersOfOnePullCauseOneFetch(t *testing.T) {
	t.Parallel()
	origin, url := newOrigin(t)
	r := run(t, newConfig(t, url))
	done := make(chan error, 8)
	for range cap(done) {
		go func() {
			_, err := r.client.Pull(t.Context(), admin.PullRequest{Ref: ref}, nil)
			done <- err
		}()
	}
	for range cap(done) {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	model, err := r.client.Model(t.Context(), ref)
	if err != nil || origin.Bytes() > model.Size {
		t.Errorf("the origin sent %d bytes for %d: %v", origin.Bytes(), model.Size, err)
	}
	if fmt.Sprint(model.State) != "Ready" {
		t.Errorf("model is %s", model.State)
	}
}

func TestAnAgentStopsWhileStreamsAreOpen(t *testing.T) {
	t.Parallel()
	origin, url := newOrigin(t)
	origin.SetRate(units.Rate(64 * units.KiB)) // the pull outlives the test
	r := run(t, newConfig(t, url))
	conn, err := grpc.NewClient("passthrough:///"+r.Listeners()["report"], append(report.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	open := make(chan struct{}, 1)
	ended := make(chan error, 2)
	go func() {
		ended <- report.Watch(t.Context(), conn, report.Resume{}, func(m *report.Report) error {
			if len(m.Artifacts) > 0 {
				select {
				case open <- struct{}{}:
				default:
				}
			}
			return nil
		})
	}()
	go func() {
		_, err := r.client.Pull(t.Context(), admin.PullRequest{Ref: ref}, nil)
		ended <- err
	}()
	<-open
	r.stop()
	for range 2 {
		if err := <-ended; err == nil {
			t.Error("a stream of a stopped agent ended well")
		}
	}
}

func TestABadTableOfCodesIsNamed(t *testing.T) {
	t.Parallel()
	_, url := newOrigin(t)
	c := newConfig(t, url)
	c.Health.XIDTable = filepath.Join(t.TempDir(), "xid.yaml")
	if err := os.WriteFile(c.Health.XIDTable, []byte("version: 1\nrows:\n  - {codes: [79], meaning: x, action: A, condition: odd}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := nodeagent.New(c, nodeagent.Options{}); err == nil || !strings.Contains(err.Error(), "xid.yaml") || !strings.Contains(err.Error(), "79") {
		t.Errorf("New gave %v", err)
	}
}
