//go:build outside

// Package outside proves Hearth against programs that others wrote: each test
// runs one of them, unmodified and at its pinned version, against the real
// binaries on loopback. `make outside-fast` calls it. Nothing here skips: what
// is lacking fails the test and is named.
package outside

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/outside/rig"
)

// built is what all tests share: one binary, and where the programs are.
var built struct {
	hearth string
	deps   *rig.Deps
	err    error
}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "hearth-outside-")
	if err != nil {
		built.err = err
	} else {
		defer func() { _ = os.RemoveAll(dir) }()
		built.err = build(dir)
	}
	m.Run()
}

func build(dir string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	r, err := rig.New(dir)
	if err != nil {
		return err
	}
	if built.deps, err = rig.FindDeps(ctx, r.Root); err != nil {
		return err
	}
	built.hearth, err = r.Hearth(ctx)
	return err
}

// newRig gives a test its rig, with a deadline no healthy machine needs.
func newRig(t *testing.T) (*rig.Rig, context.Context) {
	t.Helper()
	if built.err != nil {
		t.Fatal(built.err)
	}
	dir, err := os.MkdirTemp("", "hearth-outside-") //nolint:usetesting // kept where the test fails, short enough for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	r, err := rig.New(dir)
	if err != nil {
		t.Fatal(err)
	}
	r.Binary, r.Deps = built.hearth, built.deps
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	t.Cleanup(func() {
		cancel()
		r.Close()
		if t.Failed() {
			t.Logf("logs and state of the run are in %s", dir)
			return
		}
		removeAll(dir)
	})
	return r, ctx
}

// removeAll also removes folders without write permission.
func removeAll(dir string) {
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			_ = os.Chmod(path, 0o755)
		}
		return nil
	})
	_ = os.RemoveAll(dir)
}

// pythonCommand runs a script of testdata.
func pythonCommand(r *rig.Rig, script string, env []string, args ...string) rig.Command {
	path := filepath.Join(r.Root, "test", "outside", "testdata", script+".py")
	return rig.Command{Name: script, Path: r.Deps.Python, Env: env, Args: append([]string{path}, args...)}
}

// runJSON runs a command and decodes the JSON it prints.
func runJSON(ctx context.Context, t *testing.T, r *rig.Rig, c rig.Command, into any) {
	t.Helper()
	out, err := r.Run(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(out, into); err != nil {
		t.Fatalf("%s printed no JSON: %v: %q", c.Name, err, out)
	}
}
