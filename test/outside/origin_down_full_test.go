//go:build outside

package outside

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/sim/hub"
)

// lastingFaults are origins that are of no use for as long as the test runs.
var lastingFaults = map[string]func(o *hub.Origin, end func()){
	"refuses connections": func(_ *hub.Origin, end func()) { end() },
	"answers 503":         always(hub.Fault{Status: http.StatusServiceUnavailable}),
	"answers 429":         always(hub.Fault{Status: http.StatusTooManyRequests, Header: retryAfter("1")}),
	"drops connections":   always(hub.Fault{Drop: true}),
}

func always(f hub.Fault) func(*hub.Origin, func()) {
	return func(o *hub.Origin, _ func()) {
		o.SetFault(func(*http.Request) *hub.Fault { given := f; return &given })
	}
}

// Without an origin the mirror answers from what it holds, after a restart too,
// to clients with nothing, with everything, and by every name; none asks twice.
func TestFullAWholeMirrorNeedsNoOrigin(t *testing.T) {
	t.Parallel()
	for _, line := range hubLines {
		for name, ends := range lastingFaults {
			t.Run(line.version+"/"+name, func(t *testing.T) {
				t.Parallel()
				r, ctx := newRig(t)
				origin, url, root, end := newOriginUntil(ctx, t, r)
				node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
				rec := startRecorder(t, r, node.Mirror)
				tiny := filepath.Join(root, "acme", "tiny")
				warm := line.client(ctx, t, r, "warm", rec.URL)
				snapshot := warm.snapshot(t, "acme/tiny")
				if _, err := node.HubView(ctx, "hub://acme/tiny"); err != nil { // all of it is held
					t.Fatal(err)
				}
				ends(origin, end)
				node.Process.Kill()
				if err := node.Restart(ctx); err != nil {
					t.Fatal(err)
				}
				rec.Take()

				if again := warm.snapshot(t, "acme/tiny"); again != snapshot {
					t.Errorf("the warm client's snapshot is at %s, want %s", again, snapshot)
				}
				wantRoutes(t, rec.Exchanges(), "hub-"+line.version+"-warm")
				if seen := rec.Take(); len(seen) != 1 {
					t.Errorf("a warm snapshot took %d requests, want 1", len(seen))
				}
				warm.call(t, "hf_hub_download", map[string]any{"repo_id": "acme/tiny", "filename": "config.json"}).path(t)
				if seen := rec.Take(); len(seen) != 1 || seen[0].Status != http.StatusOK {
					t.Errorf("a warm file took %+v, want one HEAD answered 200", seen)
				}
				fresh := line.client(ctx, t, r, "fresh", rec.URL)
				wantSame(t, fresh.snapshot(t, "acme/tiny"), tiny)
				wantNoRetries(t, rec.Exchanges())
				wantRoutes(t, rec.Take(), "hub-"+line.version+"-fresh")
				byCommit := line.client(ctx, t, r, "commit", rec.URL)
				p := byCommit.call(t, "snapshot_download", map[string]any{"repo_id": "acme/tiny", "revision": filepath.Base(snapshot)}).path(t)
				wantSame(t, p, tiny)
				wantNoRetries(t, rec.Exchanges())
				wantBearable(t, rec.Take())
			})
		}
	}
}

// What the mirror neither holds nor can ask for is refused at once, in words
// that clients take for a missing network: they fall back to what they have, and
// try nothing twice.
func TestFullAnOriginThatIsGoneCostsNoRetriesOfAHubClient(t *testing.T) {
	t.Parallel()
	for _, line := range hubLines {
		for name, ends := range lastingFaults {
			t.Run(line.version+"/"+name, func(t *testing.T) {
				t.Parallel()
				r, ctx := newRig(t)
				origin, url, _, end := newOriginUntil(ctx, t, r)
				node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
				rec := startRecorder(t, r, node.Mirror)
				c := line.client(ctx, t, r, "cache", rec.URL)
				ends(origin, end)
				for call, args := range map[string]map[string]any{
					"snapshot_download": {"repo_id": "acme/tiny"},
					"hf_hub_download":   {"repo_id": "acme/tiny", "filename": "config.json"},
				} {
					got := c.call(t, call, args)
					if !slices.Contains(got.Classes, "LocalEntryNotFoundError") {
						t.Errorf("%s raised %s (%s), want LocalEntryNotFoundError", call, got.Error, got.Message)
					}
					seen := rec.Take()
					if len(seen) != 1 || seen[0].Status != http.StatusNotFound {
						t.Errorf("%s took %+v, want one request answered 404", call, seen)
					}
					wantBearable(t, seen)
				}
			})
		}
	}
}

// A mirror that holds a part and has lost its origin says so in the middle: no
// client takes the part for the whole.
func TestFullAPartIsNeverTakenForTheWholeWhileTheOriginIsGone(t *testing.T) {
	t.Parallel()
	for _, line := range hubLines {
		t.Run(line.version, func(t *testing.T) {
			t.Parallel()
			r, ctx := newRig(t)
			origin, url, root := newOrigin(ctx, t, r)
			node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
			rec := startRecorder(t, r, node.Mirror)
			c := line.client(ctx, t, r, "cache", rec.URL)
			mid := filepath.Join(root, "acme", "mid")

			// The second shard breaks off, and from then on nothing comes.
			gone := make(chan struct{})
			origin.SetFault(func(req *http.Request) *hub.Fault {
				select {
				case <-gone:
					return &hub.Fault{Drop: true}
				default:
				}
				if strings.Contains(req.URL.Path, "/model-00002") {
					return &hub.Fault{StallAfter: 100 << 10, Release: gone}
				}
				return nil
			})
			first, err := r.Start(c.command("snapshot_download", map[string]any{"repo_id": "acme/mid"}))
			if err != nil {
				t.Fatal(err)
			}
			err = rig.Until(ctx, "the first shard at the client", func(context.Context) (bool, error) {
				_, err := os.Stat(firstShard(c))
				return err == nil, nil
			}, first)
			if err != nil {
				t.Fatal(err)
			}
			first.Kill()
			close(gone)
			node.Process.Kill()
			if err := node.Restart(ctx); err != nil {
				t.Fatal(err)
			}
			rec.Take()
			got := c.call(t, "snapshot_download", map[string]any{"repo_id": "acme/mid"})
			if got.Error == "" {
				t.Errorf("a part was taken for the whole: %s", got.OK)
			}
			wantBearable(t, rec.Exchanges())
			for _, x := range rec.Take() {
				if strings.HasPrefix(x.Path, "/api/") && x.Status != http.StatusOK {
					t.Errorf("%s was answered %d although it is known", x.Path, x.Status)
				}
			}

			origin.SetFault(nil)
			wantSame(t, c.snapshot(t, "acme/mid"), mid)
		})
	}
}

// firstShard is the first shard in the only snapshot of acme/mid.
func firstShard(c *hubClient) string {
	found, _ := filepath.Glob(filepath.Join(c.dir, "models--acme--mid", "snapshots", "*", "model-00001-of-00002.safetensors"))
	if len(found) == 0 {
		return filepath.Join(c.dir, "none")
	}
	return found[0]
}
