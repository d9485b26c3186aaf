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
	dir, err := os.MkdirTemp("", "hearth")
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
