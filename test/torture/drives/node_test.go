//go:build root

package drives

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/test/torture/victim"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache"
)

// limit bounds every wait of these tests.
const limit = 60 * time.Second

// node is an agent whose store is on a volume of its own, and its origin.
type node struct {
	*victim.Agent
	t      *testing.T
	ctx    context.Context
	origin *hub.Origin
	repos  string
	store  string // below the volume
}

// start makes an origin with the models small and big, and an agent.
func start(t *testing.T, v *volume) *node {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*limit)
	t.Cleanup(cancel)
	base, err := os.MkdirTemp("", "drives-") //nolint:usetesting // short enough for a socket's path, and unmounted before it goes
	if err != nil {
		t.Fatal(err)
	}
	r := &rig.Rig{Dir: base}
	t.Cleanup(func() { r.Close(); _ = os.RemoveAll(base) })
	n := &node{t: t, ctx: ctx, repos: filepath.Join(base, "repositories"), store: filepath.Join(v.dir, "store")}
	n.publish("org/small", 4<<20, 1)
	n.publish("org/big", 12<<20, 2)
	n.origin = hub.New(hub.Options{Dir: n.repos})
	url, err := r.Serve(ctx, n.origin)
	if err != nil {
		t.Fatal(err)
	}
	program := os.Getenv("HEARTH_AGENT")
	if program == "" {
		t.Fatal("HEARTH_AGENT names no agent: run make test-root")
	}
	if n.Agent, err = victim.New(ctx, r, victim.Options{
		Dir: base, Weights: filepath.Join(n.store, "weights"), Views: filepath.Join(n.store, "views"), Origin: url, Program: program,
	}); err != nil {
		t.Fatal(err)
	}
	n.restart()
	return n
}

func (n *node) restart() {
	n.t.Helper()
	if err := n.Launch(); err != nil {
		n.t.Fatal(err)
	}
	if _, err := n.Ready(n.ctx); err != nil {
		n.t.Fatal(err)
	}
}

// publish writes a repository of two weights files of so many bytes each.
func (n *node) publish(repo string, size int64, seed byte) {
	n.t.Helper()
	dir := filepath.Join(n.repos, repo)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		n.t.Fatal(err)
	}
	files := map[string][]byte{"config.json": fmt.Appendf(nil, `{"seed": %d}`, seed)}
	for i := range byte(2) {
		data := make([]byte, size)
		_, _ = rand.NewChaCha8([32]byte{seed, i}).Read(data)
		files[fmt.Sprintf("weights-%d.bin", i)] = data
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			n.t.Fatal(err)
		}
	}
}

// pull makes a repository Ready.
func (n *node) pull(repo string) {
	n.t.Helper()
	m, err := n.try(repo)
	if err != nil || m.State != string(weightcache.Ready) {
		n.t.Fatalf("pull %s: state %q, %v; the agent said %s", repo, m.State, err, n.LogTail())
	}
}

// try pulls and gives what the agent says.
func (n *node) try(repo string) (admin.Model, error) {
	ctx, cancel := context.WithTimeout(n.ctx, limit)
	defer cancel()
	return n.Client.Pull(ctx, admin.PullRequest{Ref: "hub://" + repo}, nil)
}

// failure pulls, and wants the agent to refuse with a code, in the call and in
// what it lists.
func (n *node) failure(repo string, codes ...string) {
	n.t.Helper()
	_, err := n.try(repo)
	said, ok := errors.AsType[*admin.Error](err)
	if !ok {
		n.t.Fatalf("pull %s: %v, want an error of the agent's", repo, err)
	}
	found := false
	for _, code := range codes {
		found = found || said.Code == code
	}
	if !found {
		n.t.Errorf("pull %s: code %s (%s), want one of %q", repo, said.Code, said.Message, codes)
	}
	m, err := n.Client.Model(n.ctx, "hub://"+repo)
	if err != nil || m.State != string(weightcache.Failed) || m.Detail == "" {
		n.t.Errorf("%s is listed as %q with detail %q, %v; want Failed with the reason", repo, m.State, m.Detail, err)
	}
	n.t.Logf("%s: %s", repo, m.Detail)
}

// begin starts a pull that the origin slows down, waits until bytes have come,
// and gives a function that waits for its end.
func (n *node) begin(repo string) func() error {
	n.t.Helper()
	n.origin.SetRate(units.Rate(2 * units.MiB))
	ended := make(chan error, 1)
	before := n.origin.Bytes()
	go func() {
		_, err := n.try(repo)
		ended <- err
	}()
	ctx, cancel := context.WithTimeout(n.ctx, limit)
	defer cancel()
	if err := rig.Until(ctx, "bytes from the origin", func(context.Context) (bool, error) {
		return n.origin.Bytes() > before+1<<20, nil
	}, n.Process); err != nil {
		n.t.Fatal(err)
	}
	return func() error {
		n.origin.SetRate(0)
		select {
		case err := <-ended:
			return err
		case <-n.ctx.Done():
			return n.ctx.Err()
		}
	}
}

// serves compares every file of a repository through the mirror with what was
// published.
func (n *node) serves(repo string) {
	n.t.Helper()
	if err := n.mirrored(repo); err != nil {
		n.t.Errorf("mirror: %v", err)
	}
}

func (n *node) mirrored(repo string) error {
	for _, name := range []string{"config.json", "weights-0.bin", "weights-1.bin"} {
		want, err := os.ReadFile(filepath.Join(n.repos, repo, name))
		if err != nil {
			return err
		}
		request, err := http.NewRequestWithContext(n.ctx, http.MethodGet, n.Mirror+"/"+repo+"/resolve/main/"+name, nil)
		if err != nil {
			return err
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return err
		}
		got, err := io.ReadAll(response.Body)
		_ = response.Body.Close()
		if err != nil {
			return fmt.Errorf("%s of %s: %w", name, repo, err)
		}
		if response.StatusCode != http.StatusOK || !bytes.Equal(got, want) {
			return fmt.Errorf("%s of %s: status %d, %d bytes of %d, right: %v", name, repo, response.StatusCode, len(got), len(want), bytes.Equal(got, want))
		}
	}
	return nil
}

// alive fails where the agent has ended.
func (n *node) alive() {
	n.t.Helper()
	select {
	case <-n.Done():
		n.t.Fatalf("the agent ended: %v: %s", n.Err(), n.LogTail())
	default:
	}
	if _, err := n.Client.Models(n.ctx); err != nil {
		n.t.Fatalf("the agent does not answer: %v", err)
	}
}
