//go:build vllm

// Package vllm proves Hearth against the real vLLM, built for CPU by
// scripts/vllm-root: three engines that took their weights through each of the
// agent's doors, behind the real router fed by the real agent. `make test-vllm`
// calls it. It measures no speed, since no GPU computes here, and skips
// nothing: what is lacking fails the tests and is named.
//
// The engines are started once and shared, and much is judged by their own
// counters, so the tests run one after the other.
package vllm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// patience is the deadline of a wait that takes moments on an idle machine.
const patience = 2 * time.Minute

// shared is the fabric once a test has asked for it.
var shared struct {
	once   sync.Once
	fabric *fabric
	err    error
}

func TestMain(m *testing.M) {
	status := m.Run()
	if f := shared.fabric; f != nil {
		f.rig.Close()
		if status == 0 {
			removeAll(f.rig.Dir)
		} else {
			fmt.Fprintln(os.Stderr, "logs and state of the run are in", f.rig.Dir)
		}
	}
	os.Exit(status)
}

// use gives a test the shared fabric, idle and whole.
func use(t *testing.T) (*fabric, context.Context) {
	t.Helper()
	shared.once.Do(func() { shared.fabric, shared.err = startFabric() })
	f := shared.fabric
	check(t, shared.err)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	if err := f.settle(ctx); err != nil {
		t.Fatal(err)
	}
	return f, ctx
}

// removeAll also removes folders without write permission.
func removeAll(dir string) {
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			_ = os.Chmod(path, 0o755)
		}
		return nil
	})
	_ = os.RemoveAll(dir)
}

// check fails a test with every error there is.
func check(t *testing.T, problems ...error) {
	t.Helper()
	if err := errors.Join(problems...); err != nil {
		t.Fatal(err)
	}
}
