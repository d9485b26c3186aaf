// Package rig starts what a proof against outside programs needs: hearth's own
// binary, the hub origin, and programs that others wrote, each as a child
// process in a group of its own with its output in a file. The tests of
// test/outside and the program demoreal call it. It installs nothing (that is
// scripts/outside-deps), knows no testing package and never leaves a child
// behind: Close ends every group that Start began, by its id.
package rig

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// Rig owns the child processes and servers of one run.
type Rig struct {
	// Dir holds logs, configs and state of the run; the caller removes it.
	Dir string
	// Root is the top of the source tree.
	Root string
	// Deps are the outside programs; nil where only Hearth's own parts run.
	Deps *Deps
	// Binary is the hearth binary; where empty, Hearth finds or builds it.
	Binary string

	mu   sync.Mutex
	ends []func()
}

// New returns a Rig that works in dir. It starts nothing.
func New(dir string) (*Rig, error) {
	root, err := sourceRoot()
	if err != nil {
		return nil, err
	}
	return &Rig{Dir: dir, Root: root}, nil
}

// Close ends everything that was started, last first. It is safe to call twice.
func (r *Rig) Close() {
	r.mu.Lock()
	ends := r.ends
	r.ends = nil
	r.mu.Unlock()
	for _, end := range slices.Backward(ends) {
		end()
	}
}

// OnClose adds to what Close does.
func (r *Rig) OnClose(end func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ends = append(r.ends, end)
}

// Hearth is the path of the hearth binary: Binary, $HEARTH_BIN, or one that is
// built from the source tree into Dir on the first call.
func (r *Rig) Hearth(ctx context.Context) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.Binary != "" {
		return r.Binary, nil
	}
	if given := os.Getenv("HEARTH_BIN"); given != "" {
		r.Binary = given
		return given, nil
	}
	out := filepath.Join(r.Dir, "bin", "hearth")
	build := exec.CommandContext(ctx, "go", "build", "-o", out, "./cmd/hearth")
	build.Dir = r.Root
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build hearth: %w: %s", err, strings.TrimSpace(string(text)))
	}
	r.Binary = out
	return out, nil
}

// Serve serves a handler on a free loopback port until Close and returns its
// base URL without a trailing slash.
func (r *Rig) Serve(ctx context.Context, h http.Handler) (string, error) {
	url, _, err := r.ServeUntil(ctx, h)
	return url, err
}

// ServeUntil is Serve with a way to end the server before Close: from then on
// its port refuses connections, and those it has are cut.
func (r *Rig) ServeUntil(ctx context.Context, h http.Handler) (url string, end func(), err error) {
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, fmt.Errorf("listen for a test server: %w", err)
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: 30 * time.Second}
	go func() { _ = srv.Serve(ln) }()
	end = func() { _ = srv.Close() }
	r.OnClose(end)
	return "http://" + ln.Addr().String(), end, nil
}

// sourceRoot is the folder of the go.mod above the working directory.
func sourceRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the source tree: %w", err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("find the source tree: no go.mod here or above; run from a checkout of hearth")
		}
		dir = parent
	}
}
