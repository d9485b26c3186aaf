//go:build outside

package outside

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
)

// writeHollow writes acme/hollow, whose one shard is empty, and gives its name.
func writeHollow(t *testing.T, root string) string {
	t.Helper()
	dir := filepath.Join(root, "acme", "hollow")
	writeFile(t, filepath.Join(dir, "config.json"), "{}\n")
	writeFile(t, filepath.Join(dir, "model.safetensors"), "")
	return "acme/hollow"
}

// What the mirror answers of an empty shard is right, so that what clients make
// of it is an error of theirs; mirror and agent go on.
func TestFullAnEmptyShardIsAnErrorOfTheHubClientsOwn(t *testing.T) {
	t.Parallel()
	for _, line := range hubLines {
		t.Run(line.version, func(t *testing.T) {
			t.Parallel()
			r, ctx := newRig(t)
			_, url, root := newOrigin(ctx, t, r)
			repo := writeHollow(t, root)
			node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
			rec := startRecorder(t, r, node.Mirror)
			c := line.client(ctx, t, r, "cache", rec.URL)
			got := c.call(t, "metadata", map[string]any{"repo_id": repo})
			if got.Error == "" {
				t.Errorf("an empty shard has metadata: %s", got.OK)
			}
			t.Logf("metadata of an empty shard: %s: %s", got.Error, got.Message)
			for _, x := range rec.Exchanges() {
				if x.Status >= 400 || x.Cut {
					t.Errorf("%s %s %q was answered %d, cut: %v", x.Method, x.Path, x.Range, x.Status, x.Cut)
				}
			}
			name := c.call(t, "hf_hub_download", map[string]any{"repo_id": repo, "filename": "model.safetensors"}).path(t)
			if st, err := os.Stat(name); err != nil || st.Size() != 0 {
				t.Errorf("the empty shard is %v, %v", st, err)
			}
			wantSame(t, c.snapshot(t, "acme/tiny"), filepath.Join(root, "acme", "tiny"))
		})
	}
}

// An index that names files outside its repository is refused before weights are
// fetched: its client ends with an error, nothing is written outside its cache,
// and other repositories are served.
func TestFullAnIndexThatPointsOutsideItsRepositoryEndsInAnError(t *testing.T) {
	t.Parallel()
	for _, line := range hubLines {
		for name, shard := range map[string]string{"upwards": "../other/x.safetensors", "absolute": "/etc/x.safetensors"} {
			t.Run(line.version+"/"+name, func(t *testing.T) {
				t.Parallel()
				r, ctx := newRig(t)
				origin, url, root := newOrigin(ctx, t, r)
				odd := filepath.Join(root, "acme", "odd")
				writeModel(t, odd, hub.ModelOptions{Size: units.MiB, Shards: 2, Seed: 9})
				index, err := json.Marshal(map[string]any{"metadata": map[string]any{}, "weight_map": map[string]string{"w": shard}})
				if err != nil {
					t.Fatal(err)
				}
				writeFile(t, filepath.Join(odd, "model.safetensors.index.json"), string(index))
				node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
				rec := startRecorder(t, r, node.Mirror)
				c := line.client(ctx, t, r, "cache", rec.URL)
				got := c.call(t, "snapshot_download", map[string]any{"repo_id": "acme/odd"})
				if got.Error == "" {
					t.Errorf("the repository was served: %s", got.OK)
				}
				t.Logf("snapshot_download: %s: %.300s", got.Error, got.Message)
				wantBearable(t, rec.Exchanges())
				got = c.call(t, "metadata", map[string]any{"repo_id": "acme/odd"})
				t.Logf("get_safetensors_metadata: %s: %.300s", got.Error, got.Message)
				if got.Error == "" {
					t.Errorf("its metadata was read: %s", got.OK)
				}
				wantBearable(t, rec.Exchanges())
				if out, _ := filepath.Glob(filepath.Join(r.Dir, "cache", "other")); len(out) > 0 {
					t.Errorf("the client wrote %v", out)
				}
				if got := origin.FileBytes("acme/odd/model-00001-of-00002.safetensors"); got > int64(units.MiB) {
					t.Errorf("the origin sent %d bytes of a shard of a refused model", got)
				}
				wantSame(t, c.snapshot(t, "acme/tiny"), filepath.Join(root, "acme", "tiny"))
			})
		}
	}
}
