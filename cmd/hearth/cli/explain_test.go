package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/cmd/hearth/upstate"
	"github.com/hearth-dev/hearth/router/admin"
	"github.com/hearth-dev/hearth/router/pick"
	"github.com/hearth-dev/hearth/router/pool"
)

// fakeRouter answers the router's questions with fixed content.
type fakeRouter struct{ models []admin.Model }

func (fakeRouter) Status() admin.Status {
	return admin.Status{
		Name: "router-1", Listeners: map[string]string{"ingress": "127.0.0.1:7400"}, InFlight: 3, Endpoints: 2, Models: 1,
		Nodes:    []admin.Node{{Node: "node-1", Connected: true}, {Node: "node-2", Address: "127.0.0.1:7411", AgeSeconds: 12, LastError: "refused"}},
		Config:   admin.Config{Error: "the new file is invalid\n> 3 | models: x"},
		Problems: []string{"not taken: the new file is invalid\n> 3 | models: x"},
	}
}

func (fakeRouter) Endpoints() []admin.Endpoint {
	return []admin.Endpoint{
		{ID: "node-1/engine-1", Pool: "sim", Health: "healthy", Reachable: true, Served: []string{"demo-v1"}},
		{ID: "node-2/engine-3", Pool: "sim", Health: "healthy", Reachable: true, Suspended: true},
		{ID: "node-2/engine-4", Pool: "other", Health: "healthy", Reachable: true},
	}
}

func (fakeRouter) ScaleOuts() admin.ScaleOuts { return routerScaleOuts() }

func (f fakeRouter) Models() []admin.Model { return f.models }

func (fakeRouter) Explain(body []byte) (admin.Explanation, error) {
	var request struct {
		Model    string
		Messages []struct{ Role, Content string }
	}
	if err := json.Unmarshal(body, &request); err != nil {
		return admin.Explanation{}, errors.New("the body is not JSON")
	}
	if request.Model != "demo" {
		return admin.Explanation{Model: request.Model, Error: "no logical model " + request.Model}, nil
	}
	return admin.Explanation{
		Model: "demo", Pool: "sim", Served: "demo-v1", Chosen: "node-1/engine-1", Reason: "prefix", Credit: 64,
		Targets: []pool.TargetExplanation{{Pool: "sim", ServedModel: "demo-v1", Weight: 1, Ready: true, Candidates: []pick.Term{
			{ID: "node-1/engine-1", Tier: "usable", Chosen: true, Cost: 0.0125, CreditTokens: 64},
			{ID: "node-2/engine-3", Tier: "usable", Cost: 0.5, Prefill: 0.05, Sticky: 0.4, Handicap: 0.05},
		}}},
	}, nil
}

func startRouter(t *testing.T, names ...string) string {
	t.Helper()
	var f fakeRouter
	for _, name := range names {
		f.models = append(f.models, admin.Model{Name: name, Targets: []pool.TargetStats{{Pool: "sim", ServedModel: name + "-v1", Weight: 1, Ready: true, Endpoints: 2}}})
	}
	server := httptest.NewServer(admin.Handler(f))
	t.Cleanup(server.Close)
	return server.URL
}

func TestExplainSaysWhereAPromptWouldGoAndWhy(t *testing.T) {
	t.Parallel()
	out, complaint, code := hearth(t, "explain", "Tell me a story", "--addr", startRouter(t, "demo"))
	if code != terminal.ExitOK {
		t.Fatalf("status %d: %s", code, complaint)
	}
	for _, want := range []string{
		"demo goes to node-1/engine-1 in pool sim as demo-v1: prefix, about 64 prompt tokens are warm there",
		"target demo-v1 in pool sim, weight 1, artifact ready: yes", "*  node-1/engine-1", "12.5 ms", "500.0 ms", "serving", "OTHER", "450.0 ms",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("explanation lacks %q:\n%s", want, out)
		}
	}
}

func TestExplainReadsAWholeRequestAndAnswersInJSON(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "body.json")
	if err := os.WriteFile(file, []byte(`{"model":"demo"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	out, complaint, code := hearth(t, "explain", "--request", file, "--json", "--addr", startRouter(t, "demo", "other"))
	var e admin.Explanation
	if err := json.Unmarshal([]byte(out), &e); err != nil || code != terminal.ExitOK || e.Chosen != "node-1/engine-1" {
		t.Errorf("status %d, %v: %s%s", code, err, out, complaint)
	}
	var stdout, stderr bytes.Buffer
	code = Run(t.Context(), []string{"explain", "--request", "-", "--addr", startRouter(t, "demo")},
		terminal.Streams{In: strings.NewReader(`{"model":"demo"}`), Out: &stdout, Err: &stderr})
	if code != terminal.ExitOK || !strings.Contains(stdout.String(), "demo goes to") {
		t.Errorf("request on standard input: status %d: %s", code, stderr.String())
	}
}

func TestExplainRefusesWhatItCannotAsk(t *testing.T) {
	t.Parallel()
	two := startRouter(t, "demo", "other")
	for _, test := range []struct {
		args []string
		code terminal.Code
		want string
	}{
		{[]string{"explain", "--addr", two}, terminal.ExitUsage, "want a prompt or --request"},
		{[]string{"explain", "x", "--addr", two}, terminal.ExitUsage, "demo, other\nhint: say which with --model"},
		{[]string{"explain", "x", "--model", "gone", "--addr", two}, terminal.ExitNotFound, "no logical model gone"},
		{[]string{"explain", "--request", "/nowhere/body.json", "--addr", two}, terminal.ExitNotFound, "no such file"},
		{[]string{"explain", "--request", t.TempDir(), "--addr", two}, terminal.ExitFailure, "read request: "},
		{[]string{"explain", "x", "--addr", "http://127.0.0.1:1"}, terminal.ExitUnreachable, "hint: is the router running?"},
	} {
		_, complaint, code := hearth(t, test.args...)
		if code != test.code || !strings.Contains(complaint, test.want) {
			t.Errorf("%v: status %d, want %d and %q: %s", test.args, code, test.code, test.want, complaint)
		}
	}
}

func TestStatusShowsTheRouterBesideTheNodes(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	if err := upstate.Write(upstate.State{PID: os.Getpid(), RouterAdmin: startRouter(t, "demo"), Agents: []upstate.Agent{{Node: "node-1", Admin: fakeAgent(t)}}}); err != nil {
		t.Fatal(err)
	}
	out, complaint, code := hearth(t, "status")
	if code != terminal.ExitOK {
		t.Errorf("status %d: %s", code, complaint)
	}
	for _, want := range []string{"router-1", "1 of 2", "demo-v1", "LOST NODE", "12s ago", "1 of 2", "router-1: not taken: the new file is invalid\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("status lacks %q:\n%s", want, out)
		}
	}
	out, _, _ = hearth(t, "status", "--json")
	var said struct {
		Nodes  []map[string]any `json:"nodes"`
		Router map[string]any   `json:"router"`
	}
	if err := json.Unmarshal([]byte(out), &said); err != nil || len(said.Nodes) != 1 || said.Router["name"] != "router-1" {
		t.Errorf("status --json: %v: %s", err, out)
	}
	out, complaint, _ = hearth(t, "status", "--addr", fakeAgent(t))
	if strings.Contains(out, "router-1") || !strings.Contains(complaint, "--addr names the agent, so the running 'hearth up' is not shown") {
		t.Errorf("status of a named agent beside a 'hearth up':\n%s%s", out, complaint)
	}
	if err := upstate.Write(upstate.State{PID: os.Getppid(), StartedAt: time.Now(), Router: "http://newest", RouterAdmin: startRouter(t, "other")}); err != nil {
		t.Fatal(err)
	}
	out, complaint, _ = hearth(t, "status")
	if !strings.Contains(out, "other-v1") || strings.Contains(out, "demo-v1") || strings.Count(complaint, "2 'hearth up' are running") != 1 {
		t.Errorf("status beside two 'hearth up':\n%s%s", out, complaint)
	}
}
