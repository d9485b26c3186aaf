//go:build outside

package outside

import (
	"encoding/json"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/units"
)

// Both lines of the library, each in a Python of its own: fresh, warm, a branch
// with a slash that shares files with main. What they ask is what they were
// recorded to ask.
func TestFastBothHubLinesTakeSnapshotsFreshAndWarmByTheRecordedRoutes(t *testing.T) {
	t.Parallel()
	for _, line := range hubLines {
		t.Run(line.version, func(t *testing.T) {
			t.Parallel()
			r, ctx := newRig(t)
			origin, url, root := newOrigin(ctx, t, r)
			node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
			rec := startRecorder(t, r, node.Mirror)
			c := line.client(ctx, t, r, "cache", rec.URL)
			var facts struct{ Version, Endpoint string }
			if err := json.Unmarshal(c.call(t, "facts", nil).OK, &facts); err != nil || facts.Version != line.version || facts.Endpoint != rec.URL {
				t.Fatalf("client is %+v (%v), want %s at %s", facts, err, line.version, rec.URL)
			}

			snapshot := c.snapshot(t, "acme/tiny")
			wantSame(t, snapshot, filepath.Join(root, "acme", "tiny"))
			wantBearable(t, rec.Exchanges())
			wantRoutes(t, rec.Take(), "hub-"+line.version+"-fresh")

			fetched := origin.Bytes()
			if again := c.snapshot(t, "acme/tiny"); again != snapshot {
				t.Errorf("a second snapshot is at %s, want %s", again, snapshot)
			}
			if seen := rec.Exchanges(); len(seen) != 1 {
				t.Errorf("a warm snapshot took %d requests, want 1", len(seen))
			}
			wantRoutes(t, rec.Take(), "hub-"+line.version+"-warm")
			if origin.Bytes() != fetched {
				t.Errorf("a warm snapshot cost the origin %d bytes", origin.Bytes()-fetched)
			}

			branch := c.call(t, "snapshot_download", map[string]any{"repo_id": "acme/tiny", "revision": "dev/feature-1"}).path(t)
			wantSame(t, branch, filepath.Join(root, "acme", "tiny@dev%2Ffeature-1"))
			wantRoutes(t, rec.Take(), "hub-"+line.version+"-branch")
		})
	}
}

// The older line keeps what it has of a file and asks for the rest.
func TestFastOlderHubLineResumesAfterItWasKilled(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	origin, url, root := newOrigin(ctx, t, r)
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
	rec := startRecorder(t, r, node.Mirror)
	c := hubLines[1].client(ctx, t, r, "cache", rec.URL)

	// It writes 10 MiB at a time, and may end the file before the kill comes.
	const written = 10 << 20
	origin.SetRate(8 * units.Rate(units.MiB))
	for killInMidDownload(t, c, "acme/big", written); partBytes(c.dir) < written; {
		killInMidDownload(t, c, "acme/big", written)
	}
	origin.SetRate(0)
	rec.Take()
	wantSame(t, c.snapshot(t, "acme/big"), filepath.Join(root, "acme", "big"))
	resumed := false
	for _, x := range rec.Exchanges() {
		resumed = resumed || regexp.MustCompile(`^bytes=[1-9][0-9]*-$`).MatchString(x.Range) && x.Status == 206
	}
	if !resumed {
		t.Errorf("no file was resumed: %+v", rec.Exchanges())
	}
}
