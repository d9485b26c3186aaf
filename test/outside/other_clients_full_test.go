//go:build outside

package outside

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/outside/rig"
)

// part finds an outside program, or fails with the name of what is missing.
func part(ctx context.Context, t *testing.T, r *rig.Rig, name string) string {
	t.Helper()
	path, err := rig.Part(ctx, r.Root, name)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// rustResult is what testdata/hub_rust prints.
type rustResult struct {
	Info struct {
		SHA   string   `json:"sha"`
		Files []string `json:"files"`
		Error string   `json:"error"`
	} `json:"info"`
	Files map[string]struct{ Path, Error string } `json:"files"`
}

func TestFullRustClientTakesFilesFreshWarmAndWithTheOriginGone(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	_, url, root, end := newOriginUntil(ctx, t, r)
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
	rec := startRecorder(t, r, node.Mirror)
	program := part(ctx, t, r, "hub-rust")
	tiny := filepath.Join(root, "acme", "tiny")
	shards, err := filepath.Glob(filepath.Join(tiny, "*.safetensors"))
	if err != nil || len(shards) == 0 {
		t.Fatal(shards, err)
	}
	shard := filepath.Base(shards[0])
	run := func(home, revision string, files ...string) rustResult {
		t.Helper()
		var out rustResult
		runJSON(ctx, t, r, rig.Command{
			Name: "hub-rust", Path: program, Args: append([]string{"acme/tiny", revision}, files...),
			Env: []string{"HF_ENDPOINT=" + rec.URL, "HF_HOME=" + filepath.Join(r.Dir, home)},
		}, &out)
		return out
	}
	check := func(name string, got rustResult, file, want string) {
		t.Helper()
		f := got.Files[file]
		if f.Error != "" {
			t.Errorf("%s: %s: %s", name, file, f.Error)
			return
		}
		a, errA := os.ReadFile(f.Path)
		b, errB := os.ReadFile(filepath.Join(want, file))
		if errA != nil || errB != nil || string(a) != string(b) {
			t.Errorf("%s: %s has other bytes (%v, %v)", name, file, errA, errB)
		}
	}

	fresh := run("home", "main", "config.json", shard, "nope.json")
	check("fresh", fresh, "config.json", tiny)
	check("fresh", fresh, shard, tiny)
	if !commitID.MatchString(fresh.Info.SHA) || !slices.Contains(fresh.Info.Files, shard) {
		t.Errorf("info is %+v", fresh.Info)
	}
	if !strings.Contains(fresh.Files["nope.json"].Error, "404") {
		t.Errorf("a missing file: %+v, want a 404", fresh.Files["nope.json"])
	}
	wantBearable(t, rec.Exchanges())
	wantRoutes(t, rec.Take(), "hub-rust-fresh")

	check("warm", run("home", "main", "config.json", shard), shard, tiny)
	wantRoutes(t, rec.Take(), "hub-rust-warm")

	check("branch", run("home", "dev/feature-1", "only-here.txt", "onnx/none"), "only-here.txt", filepath.Join(root, "acme", "tiny@dev%2Ffeature-1"))
	check("nested", run("home", "main", "onnx/sub/note.txt"), "onnx/sub/note.txt", tiny)
	rec.Take()
	// This client probes every file by its first byte, which an empty one lacks.
	check("empty", run("home", "main", "empty.txt"), "empty.txt", tiny)
	wantBearable(t, rec.Take())

	if _, err := node.HubView(ctx, "hub://acme/tiny"); err != nil {
		t.Fatal(err)
	}
	end()
	rec.Take()
	gone := run("other", "main", "config.json", shard)
	check("origin gone", gone, "config.json", tiny)
	check("origin gone", gone, shard, tiny)
	wantBearable(t, rec.Take())
}

func TestFullJavaScriptClientListsReadsAndTakesSnapshots(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	_, url, root, end := newOriginUntil(ctx, t, r)
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
	rec := startRecorder(t, r, node.Mirror)
	dir := part(ctx, t, r, "hub-js")
	mid := filepath.Join(root, "acme", "mid")
	call := func(name string, args map[string]any) (ok json.RawMessage, failed string) {
		t.Helper()
		args["hubUrl"] = rec.URL
		if args["repo"] == nil {
			args["repo"] = "acme/mid"
		}
		args["name"] = args["repo"]
		text, err := json.Marshal(args)
		if err != nil {
			t.Fatal(err)
		}
		var out struct {
			OK             json.RawMessage
			Error, Message string
			Status         int
		}
		runJSON(ctx, t, r, rig.Command{Name: "hub-js", Path: "node", Args: []string{filepath.Join(dir, "client.mjs"), name, string(text)}}, &out)
		if out.Error != "" {
			return nil, out.Error + ": " + out.Message
		}
		return out.OK, ""
	}
	snapshot := func(cache string, args map[string]any) string {
		t.Helper()
		args["cacheDir"] = filepath.Join(r.Dir, cache)
		ok, failed := call("snapshotDownload", args)
		var path string
		if failed != "" || json.Unmarshal(ok, &path) != nil {
			t.Fatalf("snapshotDownload %v: %s %s", args, failed, ok)
		}
		return path
	}

	ok, failed := call("all", map[string]any{"cacheDir": filepath.Join(r.Dir, "js")})
	var all struct {
		ModelInfo, Snapshot string
		Files               int
		Exists, Missing     bool
		Config              struct {
			Size   int
			SHA256 string
		}
		Slice    struct{ Size int }
		Metadata struct{ Sharded bool }
	}
	if failed != "" || json.Unmarshal(ok, &all) != nil {
		t.Fatalf("all calls: %s %s", failed, ok)
	}
	want := sums(t, mid)
	if all.ModelInfo != "acme/mid" || all.Files != len(want) || !all.Exists || all.Missing ||
		all.Config.SHA256 != want["config.json"] || all.Slice.Size != 92 || !all.Metadata.Sharded {
		t.Errorf("the calls gave %+v", all)
	}
	wantSame(t, all.Snapshot, mid)
	wantBearable(t, rec.Exchanges())
	wantRoutes(t, rec.Take(), "hub-js")

	wantSame(t, snapshot("js", map[string]any{}), mid)
	wantSame(t, snapshot("js", map[string]any{"repo": "acme/tiny", "revision": "dev/feature-1"}), filepath.Join(root, "acme", "tiny@dev%2Ffeature-1"))
	if ok, failed := call("downloadFile", map[string]any{"path": "nope"}); failed != "" || string(ok) != "null" {
		t.Errorf("a missing file: %s %s, want null", ok, failed)
	}
	// It probes every file by its first byte, which an empty one lacks.
	if ok, failed := call("downloadFile", map[string]any{"repo": "acme/tiny", "path": "empty.txt"}); failed != "" || !strings.Contains(string(ok), `"size":0`) {
		t.Errorf("an empty file: %s %s", failed, ok)
	}
	wantSame(t, snapshot("empty", map[string]any{"repo": "acme/tiny"}), filepath.Join(root, "acme", "tiny"))
	wantBearable(t, rec.Exchanges())
	if _, failed := call("parseSafetensorsMetadata", map[string]any{"repo": writeHollow(t, root)}); failed == "" {
		t.Error("an empty shard has metadata")
	}
	wantBearable(t, rec.Exchanges())
	if _, failed := call("listFiles", map[string]any{"repo": "acme/none"}); !strings.HasPrefix(failed, "HubApiError") {
		t.Errorf("a missing repository: %q, want HubApiError", failed)
	}
	if _, err := node.HubView(ctx, "hub://acme/mid"); err != nil {
		t.Fatal(err)
	}
	end()
	rec.Take()
	wantSame(t, snapshot("other", map[string]any{}), mid)
	wantBearable(t, rec.Take())
}

func TestFullModelRunnerBuildsAnArtifactThroughTheMirror(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	origin, url, root := newOrigin(ctx, t, r)
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
	rec := startRecorder(t, r, node.Mirror)
	program := part(ctx, t, r, "model-runner")
	run := func(repo, into string) (created, failed string) {
		t.Helper()
		dir := filepath.Join(r.Dir, into)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		var out struct{ ID, Created, Error string }
		runJSON(ctx, t, r, rig.Command{Name: "model-runner", Path: program, Args: []string{rec.URL, repo, "main", dir}}, &out)
		if out.Error == "" && !strings.HasPrefix(out.ID, "sha256:") {
			t.Errorf("the artifact is %q", out.ID)
		}
		return out.Created, out.Error
	}
	created, failed := run("acme/tiny", "fresh")
	if failed != "" {
		t.Fatal(failed)
	}
	got, want := sums(t, filepath.Join(r.Dir, "fresh")), sums(t, filepath.Join(root, "acme", "tiny"))
	for name, sum := range got {
		if want[name] != sum {
			t.Errorf("%s has other bytes than the origin's", name)
		}
	}
	for name := range want {
		if strings.HasSuffix(name, ".safetensors") && got[name] == "" {
			t.Errorf("%s was not fetched", name)
		}
	}
	wantBearable(t, rec.Exchanges())
	wantRoutes(t, rec.Take(), "model-runner-fresh")
	fetched := origin.Bytes()
	// It dates what it builds by the revision: one revision, one date, from an
	// agent started anew too.
	for _, into := range []string{"warm", "restarted"} {
		again, failed := run("acme/tiny", into)
		if failed != "" || again != created {
			t.Errorf("%s: the artifact is dated %q, want %q: %s", into, again, created, failed)
		}
		node.Process.End(30 * time.Second)
		if err := node.Restart(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if origin.Bytes() != fetched {
		t.Errorf("a second pull cost the origin %d bytes", origin.Bytes()-fetched)
	}
	rec.Take()
	if _, failed := run("acme/none", "missing"); !strings.Contains(failed, "not found") {
		t.Errorf("a missing repository: %q", failed)
	}
	wantRoutes(t, rec.Take(), "model-runner-missing")
}
