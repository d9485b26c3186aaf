//go:build outside

package outside

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/units"
)

func TestFastHubClientTakesSnapshotsThroughTheMirrorFreshAndWarm(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	origin, url, root := newOrigin(ctx, t, r)
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
	tiny := filepath.Join(root, "acme", "tiny")
	c := newHubClient(ctx, r, "cache", node.Mirror)

	var facts struct{ Version, Endpoint string }
	if err := json.Unmarshal(c.call(t, "facts", nil).OK, &facts); err != nil || facts.Version != "2.4.0" || facts.Endpoint != node.Mirror {
		t.Fatalf("client is %+v (%v), want 2.4.0 at %s", facts, err, node.Mirror)
	}
	snapshot := c.call(t, "snapshot_download", map[string]any{"repo_id": "acme/tiny"}).path(t)
	wantSame(t, snapshot, tiny)
	commit := filepath.Base(snapshot)

	fetched := origin.Bytes()
	if again := c.call(t, "snapshot_download", map[string]any{"repo_id": "acme/tiny"}).path(t); again != snapshot {
		t.Errorf("a second snapshot is at %s, want %s", again, snapshot)
	}
	other := newHubClient(ctx, r, "other", node.Mirror)
	second := other.call(t, "snapshot_download", map[string]any{"repo_id": "acme/tiny"}).path(t)
	wantSame(t, second, tiny)
	if origin.Bytes() != fetched {
		t.Errorf("a second client cost the origin %d bytes, want none", origin.Bytes()-fetched)
	}

	byCommit := newHubClient(ctx, r, "commit", node.Mirror)
	p := byCommit.call(t, "snapshot_download", map[string]any{"repo_id": "acme/tiny", "revision": commit}).path(t)
	wantSame(t, p, tiny)
	if filepath.Base(p) != commit {
		t.Errorf("snapshot of commit %s is at %s", commit, p)
	}

	patterns := newHubClient(ctx, r, "patterns", node.Mirror)
	p = patterns.call(t, "snapshot_download", map[string]any{"repo_id": "acme/tiny", "allow_patterns": []string{"*.json"}}).path(t)
	wantSame(t, p, tiny, "*.json")

	// A token in the user's environment is sent along and asked by nobody.
	branch := newHubClient(ctx, r, "branch", node.Mirror)
	branch.env = append(branch.env, "HF_TOKEN=hf_of_the_user")
	p = branch.call(t, "snapshot_download", map[string]any{"repo_id": "acme/tiny", "revision": "dev/feature-1"}).path(t)
	wantSame(t, p, filepath.Join(root, "acme", "tiny@dev%2Ffeature-1"))

	// The command line is the same library behind another door.
	local := filepath.Join(r.Dir, "local")
	cli := newHubClient(ctx, r, "cli", node.Mirror)
	_, err := r.Run(ctx, rig.Command{
		Name: "hf", Path: filepath.Join(filepath.Dir(r.Deps.Python), "hf"), Env: cli.env,
		Args: []string{"download", "acme/tiny", "--local-dir", local},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(local, ".cache")); err != nil { // the client's notes
		t.Fatal(err)
	}
	wantSame(t, local, tiny)
}

func TestFastHubClientGetsFilesMetadataAndItsOwnErrorClasses(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	_, url, root := newOrigin(ctx, t, r)
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
	c := newHubClient(ctx, r, "cache", node.Mirror)

	name := c.call(t, "hf_hub_download", map[string]any{"repo_id": "acme/tiny", "filename": "onnx/sub/note.txt"}).path(t)
	if text, err := os.ReadFile(name); err != nil || string(text) != "nested file\n" {
		t.Errorf("hf_hub_download gave %q, %v", text, err)
	}
	name = c.call(t, "hf_hub_download", map[string]any{"repo_id": "acme/tiny", "filename": "empty.txt"}).path(t)
	if st, err := os.Stat(name); err != nil || st.Size() != 0 {
		t.Errorf("an empty file has %v, %v", st, err)
	}
	for _, tc := range []struct {
		call  string
		args  map[string]any
		class string
	}{
		{"hf_hub_download", map[string]any{"repo_id": "acme/tiny", "filename": "absent.json"}, "EntryNotFoundError"},
		{"hf_hub_download", map[string]any{"repo_id": "acme/tiny", "filename": "config.json", "revision": "no-such"}, "RevisionNotFoundError"},
		{"snapshot_download", map[string]any{"repo_id": "acme/no-such"}, "RepositoryNotFoundError"},
		{"metadata", map[string]any{"repo_id": "acme/no-such"}, "NotASafetensorsRepoError"},
	} {
		got := c.call(t, tc.call, tc.args)
		if !slices.Contains(got.Classes, tc.class) {
			t.Errorf("%s %v: raised %q %q (%s), want %s", tc.call, tc.args, got.Error, got.Classes, got.Message, tc.class)
		}
	}
	// The client remembers the missing file only if the answer carried the commit.
	if marks, _ := filepath.Glob(filepath.Join(c.dir, "models--acme--tiny", ".no_exist", "*", "absent.json")); len(marks) != 1 {
		t.Errorf("no .no_exist mark for a missing file: %v", marks)
	}

	var meta struct {
		Sharded    bool
		Tensors    int
		Files      []string
		Parameters map[string]int64
	}
	got := c.call(t, "metadata", map[string]any{"repo_id": "acme/tiny"})
	if err := json.Unmarshal(got.OK, &meta); err != nil {
		t.Fatalf("get_safetensors_metadata: %s %s: %v", got.Error, got.Message, err)
	}
	shards, err := filepath.Glob(filepath.Join(root, "acme", "tiny", "*.safetensors"))
	if err != nil || !meta.Sharded || len(meta.Files) != len(shards) || meta.Tensors == 0 || meta.Parameters["BF16"] == 0 {
		t.Errorf("safetensors metadata is %+v, want %d shards with BF16 tensors", meta, len(shards))
	}

	var listing struct {
		Commit string
		Files  map[string]struct {
			Size   int64
			SHA256 *string
		}
	}
	got = c.call(t, "list_files", map[string]any{"repo_id": "acme/tiny"})
	if err := json.Unmarshal(got.OK, &listing); err != nil {
		t.Fatalf("model_info: %s %s: %v", got.Error, got.Message, err)
	}
	for file, sum := range sums(t, filepath.Join(root, "acme", "tiny")) {
		f, ok := listing.Files[file]
		if !ok {
			t.Errorf("model_info lacks %s", file)
		}
		if f.SHA256 != nil && *f.SHA256 != sum {
			t.Errorf("model_info says %s has sha256 %s, want %s", file, *f.SHA256, sum)
		}
		if strings.HasSuffix(file, ".safetensors") && f.SHA256 == nil {
			t.Errorf("model_info gives no sha256 for %s", file)
		}
	}
}

// A client that is killed in mid-download and run again ends with the right
// bytes, whatever it kept; so does one whose mirror was killed as well.
func TestFastHubClientKilledInMidDownloadEndsWithTheRightBytes(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	origin, url, root := newOrigin(ctx, t, r)
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
	c := newHubClient(ctx, r, "cache", node.Mirror)
	args := map[string]any{"repo_id": "acme/big"}

	origin.SetRate(4 * units.Rate(units.MiB)) // slow enough to be met in the middle
	first, err := r.Start(c.command("snapshot_download", args))
	if err != nil {
		t.Fatal(err)
	}
	err = rig.Until(ctx, "a part of a shard at the client", func(context.Context) (bool, error) {
		return partBytes(c.dir) > 1<<20, nil
	}, first)
	if err != nil {
		t.Fatal(err)
	}
	first.Kill()
	node.Process.Kill()
	if err := node.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	origin.SetRate(0)
	snapshot := c.call(t, "snapshot_download", args).path(t)
	big := filepath.Join(root, "acme", "big")
	wantSame(t, snapshot, big)
	var size int64
	for name := range sums(t, big) {
		st, err := os.Stat(filepath.Join(big, name))
		if err != nil {
			t.Fatal(err)
		}
		size += st.Size()
	}
	// At most one segment of each stream is fetched again; the small files may be too.
	if most := size + rig.Streams*int64(rig.SegmentSize) + int64(units.MiB); origin.Bytes() > most {
		t.Errorf("the origin sent %d bytes of a model of %d, want at most %d", origin.Bytes(), size, most)
	}
}

func TestFastHubClientReadsTheMountedViewOfflineAsAnyUser(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	_, url, root := newOrigin(ctx, t, r)
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
	c := newPodClient(ctx, t, r, node, "hub://acme/tiny")
	if os.Geteuid() == 0 {
		var facts struct{ UID int }
		if err := json.Unmarshal(c.call(t, "facts", nil).OK, &facts); err != nil || facts.UID == 0 {
			t.Fatalf("the pod runs as uid %d (%v), want another than root", facts.UID, err)
		}
	}
	snapshot := c.call(t, "snapshot_download", map[string]any{"repo_id": "acme/tiny"}).path(t)
	var have map[string]string
	if err := json.Unmarshal(c.call(t, "sums", map[string]any{"folder": snapshot}).OK, &have); err != nil {
		t.Fatal(err)
	}
	wantSums(t, have, filepath.Join(root, "acme", "tiny"))
	p := c.call(t, "snapshot_download", map[string]any{"repo_id": "acme/tiny", "revision": filepath.Base(snapshot)}).path(t)
	if p != snapshot {
		t.Errorf("by its commit the snapshot is at %s, want %s", p, snapshot)
	}
	p = c.call(t, "hf_hub_download", map[string]any{"repo_id": "acme/tiny", "filename": "config.json"}).path(t)
	if !strings.HasPrefix(p, snapshot) {
		t.Errorf("config.json is at %s, want it in %s", p, snapshot)
	}
}

func TestFastTransformersLoadsConfigAndTokenizerThroughTheMirrorAndTheView(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	origin, url, _ := newOrigin(ctx, t, r)
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
	type loaded struct {
		Version   string `json:"version"`
		ModelType string `json:"model_type"`
		Hidden    int    `json:"hidden_size"`
		IDs       []int  `json:"ids"`
		Text      string `json:"text"`
		Chat      string `json:"chat"`
	}
	load := func(name string, c *hubClient) loaded {
		var out loaded
		runJSON(ctx, t, r, c.python("transformers_client", "acme/tiny"), &out)
		const text = "the cache holds weights on the node"
		if out.Version != "5.23.0" || out.ModelType != "llama" || out.Hidden == 0 || out.Text != text || len(out.IDs) == 0 ||
			!strings.Contains(out.Chat, "user: hello") {
			t.Errorf("%s: loaded %+v", name, out)
		}
		return out
	}
	c := newHubClient(ctx, r, "cache", node.Mirror)
	load("fresh", c)
	fetched := origin.Bytes()
	load("warm", c)
	if origin.Bytes() != fetched {
		t.Errorf("a warm load cost the origin %d bytes", origin.Bytes()-fetched)
	}

	load("view", newPodClient(ctx, t, r, node, "hub://acme/tiny"))
}

// The mirror's own answer to a tool that is no hub client.
func TestFastMirrorRefusesWhatNoSourceMayServe(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	_, url, _ := newOrigin(ctx, t, r)
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url, Refs: []string{"acme/tiny"}})
	c := newHubClient(ctx, r, "cache", node.Mirror)
	got := c.call(t, "snapshot_download", map[string]any{"repo_id": "acme/big"})
	if got.Error == "" {
		t.Fatalf("a repository outside the allow-list was served: %s", got.OK)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, node.Mirror+"/api/models/acme/big", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode < 400 || resp.StatusCode >= 500 || resp.Header.Get("X-Error-Code") == "" {
		t.Errorf("refusal is %d with X-Error-Code %q, want a 4xx with a code", resp.StatusCode, resp.Header.Get("X-Error-Code"))
	}
}
