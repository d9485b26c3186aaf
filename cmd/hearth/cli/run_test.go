package cli

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
)

// program runs a long-running command until stop, which gives its exit status
// and what it logged.
func program(t *testing.T, args ...string) (stop func() (terminal.Code, string)) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	var logged bytes.Buffer
	ended := make(chan terminal.Code, 1)
	go func() {
		ended <- Run(ctx, args, terminal.Streams{In: strings.NewReader(""), Out: &bytes.Buffer{}, Err: &logged})
	}()
	return func() (terminal.Code, string) {
		cancel()
		code := <-ended
		return code, logged.String()
	}
}

// answers waits until a command line succeeds.
func answers(t *testing.T, args ...string) string {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		out, complaint, code := hearth(t, args...)
		if code == terminal.ExitOK {
			return out
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("hearth %s: status %d: %s", strings.Join(args, " "), code, complaint)
		}
	}
}

// shortDir is a directory whose path leaves room for a socket's name.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "hearth") //nolint:usetesting // t.TempDir is too long a path for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func writeConfig(t *testing.T, format string, args ...any) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	text := "apiVersion: hearth.dev/v1alpha1\n" + fmt.Sprintf(format, args...)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestTheRouterRunsUntilToldToStopAndAnswersOnItsSocket(t *testing.T) {
	dir := shortDir(t)
	t.Setenv("XDG_RUNTIME_DIR", dir)
	socket := filepath.Join(dir, "router.sock")
	config := writeConfig(t, `kind: RouterConfig
name: router-7
listen: {ingress: "127.0.0.1:0", admin: "127.0.0.1:0", socket: %q}
metering: {file: %q}
`, socket, filepath.Join(dir, "usage.jsonl"))
	stop := program(t, "router", "--config", config)
	t.Setenv(envRouter, socket)
	if out := answers(t, "status"); !strings.Contains(out, "router-7") {
		t.Errorf("status:\n%s", out)
	}
	code, logged := stop()
	if code != terminal.ExitOK {
		t.Errorf("status %d after being told to stop:\n%s", code, logged)
	}
	if !strings.Contains(logged, `"msg":"router starts"`) {
		t.Errorf("log:\n%s", logged)
	}
}

func TestTheAgentPullsShowsVerifiesAndDropsAModelOverItsSocket(t *testing.T) {
	dir := shortDir(t)
	t.Setenv("XDG_RUNTIME_DIR", dir)
	model := t.TempDir()
	for name, text := range map[string]string{"config.json": `{"model_type":"llama"}`, "tokenizer.json": `{}`} {
		if err := os.WriteFile(filepath.Join(model, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	socket := filepath.Join(dir, "agent.sock")
	config := writeConfig(t, `kind: AgentConfig
listen: {mirror: "127.0.0.1:0", report: "127.0.0.1:0", admin: "127.0.0.1:0", socket: %[1]q}
weights: {dir: %[2]q, keepFree: 0}
sources:
- {name: folder, type: dir, root: %[3]q, refs: ["%[3]s"]}
devices:
- {id: gpu-0, product: Simulated}
health: {allowInject: true, stateDir: %[4]q}
`, socket, filepath.Join(dir, "weights"), model, filepath.Join(dir, "health"))
	stop := program(t, "agent", "--config", config, "--node", "node-7")
	t.Setenv(envAgent, socket)
	if out := answers(t, "nodes"); !strings.Contains(out, "node-7") || !strings.Contains(out, "gpu-0") {
		t.Errorf("nodes:\n%s", out)
	}
	ref := "dir://" + model
	for _, step := range []struct {
		args []string
		code terminal.Code
		want string
	}{
		{[]string{"models", "show", ref}, terminal.ExitNotFound, ""},
		{[]string{"models", "pull", ref}, terminal.ExitOK, "Ready"},
		{[]string{"models", "list"}, terminal.ExitOK, ref},
		{[]string{"models", "show", ref}, terminal.ExitOK, "tokenizer.json"},
		{[]string{"models", "verify", ref}, terminal.ExitOK, "2 files"},
		{[]string{"models", "rm", ref}, terminal.ExitOK, "removed"},
		{[]string{"models", "pull", "dir:///elsewhere"}, terminal.ExitRefused, ""},
		{[]string{"inject", "xid", "79", "--device", "gpu-0"}, terminal.ExitOK, "unhealthy"},
		{[]string{"inject", "xid", "79", "--device", "gpu-9"}, terminal.ExitNotFound, ""},
		{[]string{"inject", "clear", "--device", "gpu-0"}, terminal.ExitOK, "gpu-0"},
		{[]string{"status"}, terminal.ExitOK, "control+data"},
	} {
		out, complaint, code := hearth(t, step.args...)
		if code != step.code || !strings.Contains(out, step.want) {
			t.Errorf("hearth %s: status %d, want %d and %q:\n%s%s", strings.Join(step.args, " "), code, step.code, step.want, out, complaint)
		}
	}
	if code, logged := stop(); code != terminal.ExitOK {
		t.Errorf("status %d after being told to stop:\n%s", code, logged)
	}
}
