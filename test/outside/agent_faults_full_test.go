//go:build outside

package outside

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
)

// phase is how far a client has come when something happens to the agent.
type phase struct {
	name string
	// reached says whether the client is there.
	reached func(o *hub.Origin, c *hubClient) bool
	// slow makes the origin slow enough for that, until release is closed.
	slow func(o *hub.Origin, release <-chan struct{})
}

var phases = []phase{
	{
		name:    "while the origin is asked what the ref means",
		reached: func(o *hub.Origin, _ *hubClient) bool { return o.Requests() > 0 },
		slow: func(o *hub.Origin, release <-chan struct{}) {
			o.SetFault(func(req *http.Request) *hub.Fault {
				select {
				case <-release:
				case <-req.Context().Done():
				}
				return nil
			})
		},
	},
	{
		name:    "in the middle of a body",
		reached: func(o *hub.Origin, _ *hubClient) bool { return o.Bytes() > 3<<20 },
		slow: func(o *hub.Origin, release <-chan struct{}) {
			o.SetRate(units.Rate(units.MiB))
			go func() { <-release; o.SetRate(0) }()
		},
	},
	{
		name: "between two files",
		reached: func(_ *hub.Origin, c *hubClient) bool {
			found, _ := filepath.Glob(filepath.Join(c.dir, "*", "snapshots", "*", "config.json"))
			return len(found) > 0
		},
		slow: func(o *hub.Origin, release <-chan struct{}) {
			o.SetFault(func(req *http.Request) *hub.Fault {
				if !strings.Contains(req.URL.Path, "/model-") {
					return nil
				}
				select {
				case <-release:
				case <-req.Context().Done():
				}
				return nil
			})
		},
	},
}

// blows are what happens to the agent. Each leaves it running.
var blows = map[string]func(ctx context.Context, n *rig.Node) error{
	"killed": func(ctx context.Context, n *rig.Node) error { n.Process.Kill(); return n.Restart(ctx) },
	"stopped in order": func(ctx context.Context, n *rig.Node) error {
		n.Process.End(30 * time.Second)
		return n.Restart(ctx)
	},
	"frozen for 12 s": func(ctx context.Context, n *rig.Node) error {
		n.Signal(syscall.SIGSTOP)
		defer n.Signal(syscall.SIGCONT)
		timer := time.NewTimer(longSilence)
		defer timer.Stop()
		select {
		case <-timer.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	},
}

// Whatever happens to the agent in whatever phase of a client's download, the
// client ends with the right bytes: in the same call, or in the next, which
// never costs more than a fresh one.
func TestFullAnAgentLostInAnyPhaseLeavesAHubClientThatEndsRight(t *testing.T) {
	t.Parallel()
	for _, line := range hubLines {
		for _, at := range phases {
			for how, blow := range blows {
				t.Run(fmt.Sprintf("%s/%s/%s", line.version, at.name, how), func(t *testing.T) {
					t.Parallel()
					r, ctx := newRig(t)
					origin, url, root := newOrigin(ctx, t, r)
					node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
					c := line.client(ctx, t, r, "cache", node.Mirror)
					args := map[string]any{"repo_id": "acme/mid"}
					release := make(chan struct{})
					at.slow(origin, release)
					first, err := r.Start(c.command("snapshot_download", args))
					if err != nil {
						t.Fatal(err)
					}
					err = rig.Until(ctx, at.name, func(context.Context) (bool, error) { return at.reached(origin, c), nil }, first)
					if err != nil {
						t.Fatal(err)
					}
					if err := blow(ctx, node); err != nil {
						t.Fatal(err)
					}
					close(release)
					select {
					case <-first.Done():
					case <-ctx.Done():
						t.Fatalf("the client neither ends nor fails: %s", first.LogTail())
					}
					said := first.LogTail()
					t.Logf("the call under which it happened said: %.200s", said)
					// A frozen agent loses nothing, and both lines outwait it.
					if strings.HasPrefix(how, "frozen") && strings.Contains(said, `"error"`) {
						t.Errorf("the client did not outwait an agent frozen for %v: %s", longSilence, said)
					}
					wantSame(t, c.snapshot(t, "acme/mid"), filepath.Join(root, "acme", "mid"))
				})
			}
		}
	}
}

// An agent that is not there: what a client has is used at once or, by the older
// line, after its own tries; what it lacks is an error, and a part is one for
// the newer line alone.
func TestFullWithoutAnAgentAHubClientUsesWhatItHas(t *testing.T) {
	t.Parallel()
	for _, line := range hubLines {
		t.Run(line.version, func(t *testing.T) {
			t.Parallel()
			r, ctx := newRig(t)
			origin, url, root := newOrigin(ctx, t, r)
			node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
			whole := line.client(ctx, t, r, "whole", node.Mirror)
			snapshot := whole.snapshot(t, "acme/tiny")
			part := line.client(ctx, t, r, "part", node.Mirror)
			origin.SetRate(4 * units.Rate(units.MiB))
			killInMidDownload(t, part, "acme/big", 1<<20)
			origin.SetRate(0)
			node.Process.Kill()

			if again := whole.snapshot(t, "acme/tiny"); again != snapshot {
				t.Errorf("the snapshot is at %s, want %s", again, snapshot)
			}
			whole.call(t, "hf_hub_download", map[string]any{"repo_id": "acme/tiny", "filename": "config.json"}).path(t)
			got := whole.call(t, "snapshot_download", map[string]any{"repo_id": "acme/mid"})
			if !slices.Contains(got.Classes, "LocalEntryNotFoundError") {
				t.Errorf("without agent and files: %s (%s)", got.Error, got.Message)
			}
			got = part.call(t, "snapshot_download", map[string]any{"repo_id": "acme/big"})
			switch line.version {
			case "2.4.0":
				if got.Error != "IncompleteSnapshotError" {
					t.Errorf("a part without an agent: %s %s, want IncompleteSnapshotError", got.Error, got.OK)
				}
			default: // the library's own hazard: it returns the part
				if got.Error != "" && !slices.Contains(got.Classes, "LocalEntryNotFoundError") {
					t.Errorf("a part without an agent: %s (%s)", got.Error, got.Message)
				}
			}
			if err := node.Restart(ctx); err != nil {
				t.Fatal(err)
			}
			wantSame(t, part.snapshot(t, "acme/big"), filepath.Join(root, "acme", "big"))
		})
	}
}

// A client that is killed and run again, in both lines and however often.
func TestFullAHubClientKilledAgainAndAgainEndsRight(t *testing.T) {
	t.Parallel()
	for _, line := range hubLines {
		t.Run(line.version, func(t *testing.T) {
			t.Parallel()
			r, ctx := newRig(t)
			origin, url, root := newOrigin(ctx, t, r)
			node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
			c := line.client(ctx, t, r, "cache", node.Mirror)
			origin.SetRate(8 * units.Rate(units.MiB))
			for _, bytes := range []int64{1, 2 << 20, 11 << 20} {
				killInMidDownload(t, c, "acme/big", bytes)
			}
			origin.SetRate(0)
			big := filepath.Join(root, "acme", "big")
			wantSame(t, c.snapshot(t, "acme/big"), big)
			var size int64
			for name := range sums(t, big) {
				st, err := os.Stat(filepath.Join(big, name))
				if err != nil {
					t.Fatal(err)
				}
				size += st.Size()
			}
			if most := size + int64(units.MiB); origin.Bytes() > most {
				t.Errorf("the origin sent %d bytes of a model of %d: what clients lost the agent kept", origin.Bytes(), size)
			}
		})
	}
}
