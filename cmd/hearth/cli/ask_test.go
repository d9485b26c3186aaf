package cli

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
)

const testRef = "hub://org/name@main"

// fakeAgent answers the agent's local API with fixed content.
func fakeAgent(t *testing.T) string {
	t.Helper()
	model := admin.Model{Ref: testRef, Digest: strings.Repeat("ab", 32), State: "Ready", Size: 256 << 20, Present: 256 << 20, Files: 3, FileList: []admin.File{
		{Path: "config.json", Size: 12, SHA256: strings.Repeat("cd", 32)},
	}}
	answer := func(v any) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(v)
		}
	}
	refuse := func(w http.ResponseWriter, status int, code, message, hint string) {
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(map[string]any{"error": admin.Error{Code: code, Message: message, Hint: hint}})
	}
	mux := http.NewServeMux()
	mux.Handle("GET /v1/node", answer(admin.Node{
		Name: "node-1", Version: "v1", Roles: []string{"control", "data"}, Space: admin.Space{Capacity: 1 << 30, Used: 256 << 20},
		Network:  &admin.NetSight{Sight: "devices", Reason: "sockets: no BTF"},
		KV:       &admin.KVFill{MemoryUsed: 1 << 30, MemoryBudget: 4 << 30, NVMeUsed: 3 << 30, NVMeBudget: 10 << 30},
		Problems: []string{"the drive is slow", "the configuration is not taken: it has\n\tone fault\n\nand another\r\n"}, Kubernetes: &admin.Kubernetes{
			Registered: true, Server: "v1.37.2", Claims: map[string]int{"pulling": 1, "prepared": 2},
			Pools: []admin.SlicePool{{Name: "node-1", Devices: 2, State: "published"}, {Name: "node-1/kv", State: "off", Detail: "kubernetes.devices does not name kv"}},
		},
	}))
	mux.Handle("GET /v1/models", answer(map[string]any{"models": []admin.Model{model}}))
	mux.HandleFunc("GET /v1/models/show", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("ref") != testRef {
			refuse(w, http.StatusNotFound, admin.CodeUnknownRef, "no such model", "")
			return
		}
		answer(model)(w, r)
	})
	mux.Handle("GET /v1/endpoints", answer(map[string]any{"endpoints": []admin.Endpoint{
		{Name: "engine-1", Pool: "sim", Engine: "sim", URL: "http://127.0.0.1:9", Reachable: true, Load: admin.Load{Running: 2, KVUsage: 0.25}},
	}}))
	mux.Handle("GET /v1/devices", answer(map[string]any{"devices": []admin.Device{
		{ID: "gpu-0", Product: "Sim", Health: "unhealthy", Facts: device.Facts{Memory: 80 << 30, PCIRoot: "pci0000:17", NUMA: new(1), NVLinkGroup: "nvl-0"}, Claims: []string{"llm/smol"}},
		{ID: "gpu-1", Health: "healthy"},
	}}))
	mux.Handle("GET /v1/network", answer(fixedNetwork()))
	mux.HandleFunc("GET /v1/scaleouts", func(w http.ResponseWriter, r *http.Request) {
		list := fixedScaleOuts()
		if id := r.URL.Query().Get("id"); id != "" {
			list = slices.DeleteFunc(list, func(r scaleout.Record) bool { return r.ID != id })
		}
		answer(map[string]any{"scaleouts": list})(w, r)
	})
	mux.Handle("GET /v1/claims", answer(map[string]any{"claims": []admin.Claim{
		{
			Namespace: "llm", Name: "smol", State: "pulling", Pods: []string{"engine-0"}, Progress: "pulling org/name, 41 %, about 50 s left",
			Devices:   []admin.ClaimDevice{{Kind: "gpu", Device: "gpu-0"}, {Kind: "gpu", Device: "gpu-1"}, {Kind: "cold", Device: "cold"}},
			Artifacts: []admin.ClaimArtifact{{Ref: testRef, Present: 41, Size: 100}}, KV: &admin.ClaimKV{Memory: 40 << 30, NVMe: 100 << 30},
		},
	}}))
	mux.HandleFunc("POST /v1/models/pull", func(w http.ResponseWriter, _ *http.Request) {
		filling := model
		filling.State, filling.Present = "Filling", 128<<20
		encoder := json.NewEncoder(w)
		_ = encoder.Encode(admin.Progress{Model: &filling})
		_ = encoder.Encode(admin.Progress{Model: &model, Done: true})
	})
	mux.HandleFunc("POST /v1/models/rm", func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, http.StatusConflict, admin.CodeLeased, "in use by engine-1", "stop engine-1 first")
	})
	mux.Handle("POST /v1/models/verify", answer(admin.VerifyResult{Files: 3, Bytes: 10, Bad: []string{"a.safetensors"}}))
	mux.HandleFunc("POST /v1/inject", func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, http.StatusForbidden, admin.CodeInjectDisabled, "injection is off", "set health.allowInject: true")
	})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Hearth-API", admin.Version)
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// hearth runs one command line.
func hearth(t *testing.T, args ...string) (out, complaint string, code terminal.Code) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	code = Run(t.Context(), args, terminal.Streams{In: strings.NewReader(""), Out: &stdout, Err: &stderr})
	return stdout.String(), stderr.String(), code
}

func TestAnswersAreTablesForPeopleAndJSONForPrograms(t *testing.T) {
	t.Parallel()
	agent := fakeAgent(t)
	for _, test := range []struct {
		args  []string
		table []string
		keys  []string
	}{
		{[]string{"status"}, []string{"node-1  v1", "control+data", "1 healthy, 1 unhealthy", "256.0 MiB of 1.0 GiB  1.0 GiB of 4.0 GiB + 3.0 GiB of 10.0 GiB nvme", "engine-1", "serving", "25%", testRef, "PROBLEMS", "node-1: the drive is slow\nnode-1: the configuration is not taken: it has\n        one fault\n    and another\n", "SLICE POOL", "published", "2 prepared, 1 pulling", "nvme\nnode-1: network: devices only: sockets: no BTF\n", "kubernetes.devices does not name kv"}, []string{"nodes"}},
		{[]string{"devices"}, []string{"PCIE ROOT", "node-1  gpu-0", "80.0 GiB", "pci0000:17", "nvl-0", "unhealthy", "llm/smol"}, []string{"devices"}},
		{[]string{"claims"}, []string{"CLAIM", "node-1  llm", "smol", "pulling  2", testRef + "(41%)", "40.0 GiB + 100.0 GiB nvme", "engine-0", "node-1: llm/smol: pulling org/name, 41 %, about 50 s left"}, []string{"claims"}},
		{[]string{"nodes"}, []string{"NODE", "gpu-0", "unhealthy", "gpu-1"}, []string{"nodes"}},
		{[]string{"network"}, []string{"node-1: network: devices only: sockets: no BTF", "llm/engine-0 engine", "datagrams"}, []string{"nodes"}},
		{[]string{"scaleouts"}, []string{"OVERLAP", "f2  node-1  " + testRef}, []string{"scaleouts"}},
		{[]string{"scaleouts", "f1"}, []string{"live p90     before 0.40 ms", "llm/engine-0 engine", "received, by class"}, []string{"scaleouts"}},
		{[]string{"models", "list"}, []string{"REF", "node-1  " + testRef, "Ready", "100%", "abababababab"}, []string{"models"}},
		{[]string{"models", "show", testRef}, []string{"state    Ready", "config.json", "cdcdcdcdcdcd"}, []string{"models"}},
		{[]string{"models", "pull", "hub://org/name"}, []string{"node-1  " + testRef, "Ready"}, []string{"models"}},
	} {
		name := strings.Join(test.args, " ")
		out, complaint, code := hearth(t, append(test.args, "--addr", agent)...)
		if code != terminal.ExitOK {
			t.Errorf("%s: status %d: %s", name, code, complaint)
		}
		for _, want := range test.table {
			if !strings.Contains(out, want) {
				t.Errorf("%s: the table lacks %q:\n%s", name, want, out)
			}
		}
		out, complaint, code = hearth(t, append(test.args, "--addr", agent, "--json")...)
		var value map[string]any
		if err := json.Unmarshal([]byte(out), &value); err != nil || code != terminal.ExitOK {
			t.Errorf("%s --json: status %d, %v: %s%s", name, code, err, out, complaint)
		}
		for _, key := range test.keys {
			if _, ok := value[key]; !ok {
				t.Errorf("%s --json: no key %q in %s", name, key, out)
			}
		}
	}
}

func TestAnEndpointOnAnUnhealthyDeviceIsShownAsSuch(t *testing.T) {
	t.Parallel()
	devices := []admin.Device{{ID: "gpu-0", Health: "unhealthy"}, {ID: "gpu-1", Health: "degraded"}}
	for want, e := range map[string]admin.Endpoint{
		"unhealthy":   {Reachable: true, Devices: []string{"gpu-1", "gpu-0"}},
		"serving":     {Reachable: true, Devices: []string{"gpu-1"}},
		"draining":    {Reachable: true, Draining: true, Devices: []string{"gpu-0"}},
		"unreachable": {Devices: []string{"gpu-0"}},
	} {
		if got := endpointState(e, devices); got != want {
			t.Errorf("state of %+v is %q, want %q", e, got, want)
		}
	}
}

func TestTheStatusSaysWhyAModelFailedAndAnEndpointIsNotReached(t *testing.T) {
	t.Parallel()
	node := nodeState{
		Node: admin.Node{Name: "node-1", Problems: []string{"hub://org/kept@main is not ready"}},
		Models: []admin.Model{
			{Ref: testRef, State: "Failed", Detail: "no space"}, {Ref: "hub://org/kept@main", State: "Failed", Detail: "told"}, {Ref: "hub://org/other@main", State: "Ready", Detail: "of before"},
		},
		Endpoints: []admin.Endpoint{{Name: "e0", Detail: "connection refused"}, {Name: "e1", Reachable: true, Detail: "of before"}},
	}
	want := []string{"node-1: endpoint e0: connection refused", "node-1: model " + testRef + ": no space"}
	if got := whyNot(node); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestPullShowsItsProgressBesideTheAnswer(t *testing.T) {
	t.Parallel()
	out, complaint, _ := hearth(t, "models", "pull", testRef, "--addr", fakeAgent(t), "--json")
	if !strings.Contains(complaint, testRef+": filling 50% (128.0 MiB of 256.0 MiB)") || !strings.Contains(complaint, testRef+": ready") {
		t.Errorf("progress = %q", complaint)
	}
	if strings.Contains(out, "filling") {
		t.Errorf("progress is on standard output: %q", out)
	}
}

func TestFailuresHaveTheirExitStatusAndTheAgentsHint(t *testing.T) {
	t.Parallel()
	agent := fakeAgent(t)
	for _, test := range []struct {
		args []string
		code terminal.Code
		want string
	}{
		{[]string{"models", "show", "hub://org/other"}, terminal.ExitNotFound, "hearth: no such model"},
		{[]string{"models", "rm", testRef}, terminal.ExitRefused, "hearth: in use by engine-1\nhint: stop engine-1 first"},
		{[]string{"models", "verify", testRef}, terminal.ExitFailure, "wrong bytes in a.safetensors"},
		{[]string{"inject", "xid", "79", "--device", "gpu-0"}, terminal.ExitRefused, "hint: set health.allowInject: true"},
		{[]string{"inject", "xid", "many", "--device", "gpu-0"}, terminal.ExitUsage, `"many" is no XID`},
		{[]string{"models", "pull", "org/name"}, terminal.ExitUsage, "hint: for example hub://org/name@main"},
		{[]string{"models", "pull", "s3://bucket/x"}, terminal.ExitUsage, "unknown scheme"},
	} {
		out, complaint, code := hearth(t, append(test.args, "--addr", agent)...)
		if code != test.code || !strings.Contains(complaint, test.want) {
			t.Errorf("%v: status %d, want %d and %q: %s%s", test.args, code, test.code, test.want, out, complaint)
		}
	}
}

func TestAnAgentThatDoesNotAnswerIsUnreachableWithAHint(t *testing.T) {
	t.Parallel()
	const nobody = "http://127.0.0.1:1" // no other test is given this port
	for _, args := range [][]string{
		{"status", "--addr", nobody},
		{"models", "list", "--socket", t.TempDir() + "/agent.sock"},
		{"models", "pull", testRef, "--addr", nobody},
	} {
		_, complaint, code := hearth(t, args...)
		if code != terminal.ExitUnreachable || !strings.Contains(complaint, "hint: is the agent running?") {
			t.Errorf("%v: status %d: %s", args, code, complaint)
		}
	}
}

func TestAnotherListenerThanTheAdminOneIsCalledThat(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"object":"list","data":[]}`)) })
	ingress := httptest.NewServer(mux)
	t.Cleanup(ingress.Close)
	for want, args := range map[string][]string{
		"admin listener of an agent\nhint: the agent":  {"models", "list", "--addr", ingress.URL},
		"admin listener of a router\nhint: the router": {"explain", "x", "--addr", ingress.URL},
		"admin listener of an agent\nhint":             {"nodes", "--addr", startRouter(t, "demo")},
	} {
		_, complaint, code := hearth(t, args...)
		if code != terminal.ExitUnreachable || !strings.Contains(complaint, want) {
			t.Errorf("%v: status %d: %s", args, code, complaint)
		}
	}
}

func TestAddressesAreReadFromEveryForm(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"http://127.0.0.1:7412/": "http://127.0.0.1:7412", "127.0.0.1:7412": "http://127.0.0.1:7412",
		"/run/hearth/agent.sock": "/run/hearth/agent.sock", "unix:///run/a.sock": "/run/a.sock", "https://n:1": "https://n:1",
	} {
		if got, err := parsePlace(text, "--addr", identity.Files{}); err != nil || got.String() != want {
			t.Errorf("parsePlace(%q) = %v, %v; want %s", text, got, err, want)
		}
	}
	for _, text := range []string{"node-1", "ftp://x:1"} {
		if got, err := parsePlace(text, "--addr", identity.Files{}); terminal.CodeOf(err) != terminal.ExitUsage {
			t.Errorf("parsePlace(%q) = %v, %v; want a usage error", text, got, err)
		}
	}
}
