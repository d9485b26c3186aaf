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
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
)

// A warm transformers asks for metadata at every start. A mirror that answered
// 5xx would cost it 46 s of retries; ours answers each question once, with the
// origin gone and the agent newly started.
func TestFullWarmTransformersAsksOnceForEachThingWhileTheOriginIsGone(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	_, url, _, end := newOriginUntil(ctx, t, r)
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
	rec := startRecorder(t, r, node.Mirror)
	c := newHubClient(ctx, r, "cache", rec.URL)
	load := func() {
		t.Helper()
		var out struct{ Text string }
		runJSON(ctx, t, r, c.python("transformers_client", "acme/tiny"), &out)
		if out.Text == "" {
			t.Error("no tokenizer was loaded")
		}
	}
	load()
	wantBearable(t, rec.Take())
	end()
	node.Process.Kill()
	if err := node.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	load()
	seen := rec.Take()
	wantBearable(t, seen)
	wantRoutes(t, seen, "transformers-warm")
	// As many as were recorded of a hub in good health: nothing is tried again.
	if len(seen) != 5 {
		t.Errorf("a warm start took %d requests, want 5: %+v", len(seen), seen)
	}
}

// hf is the library's command line, in both lines.
func TestFullHubCommandLineDownloadsByTheRecordedRoutes(t *testing.T) {
	t.Parallel()
	for _, line := range hubLines {
		t.Run(line.version, func(t *testing.T) {
			t.Parallel()
			r, ctx := newRig(t)
			_, url, root := newOrigin(ctx, t, r)
			node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
			rec := startRecorder(t, r, node.Mirror)
			c := line.client(ctx, t, r, "cache", rec.URL)
			run := func(args ...string) (string, error) {
				out, err := r.Run(ctx, rig.Command{
					Name: "hf", Path: filepath.Join(filepath.Dir(c.interpreter), "hf"), Env: c.env, Args: args,
				})
				return string(out), err
			}
			if _, err := run("download", "acme/tiny"); err != nil {
				t.Fatal(err)
			}
			snapshots, _ := filepath.Glob(filepath.Join(c.dir, "models--acme--tiny", "snapshots", "*"))
			if len(snapshots) != 1 {
				t.Fatalf("the cache has snapshots %v", snapshots)
			}
			wantSame(t, snapshots[0], filepath.Join(root, "acme", "tiny"))
			wantRoutes(t, rec.Take(), "cli-"+line.version+"-fresh")
			if out, err := run("download", "acme/none"); err == nil {
				t.Errorf("a missing repository was downloaded: %s", out)
			}
			wantBearable(t, rec.Take())
		})
	}
}

// Every call of HfApi that reads, and the file system.
func TestFullHubApiAndFileSystemOfBothLinesReadThroughTheMirror(t *testing.T) {
	t.Parallel()
	for _, line := range hubLines {
		t.Run(line.version, func(t *testing.T) {
			t.Parallel()
			r, ctx := newRig(t)
			_, url, root := newOrigin(ctx, t, r)
			node := startNode(ctx, t, r, rig.NodeOptions{Origin: url, Refs: []string{"*/*", "tinygpt"}})
			rec := startRecorder(t, r, node.Mirror)
			c := line.client(ctx, t, r, "cache", rec.URL)
			want := sums(t, filepath.Join(root, "acme", "tiny"))
			got := c.call(t, "api", map[string]any{"repo_id": "acme/tiny", "revision": "dev/feature-1", "folder": "onnx"})
			var api struct {
				FileExists      bool `json:"file_exists"`
				FileMissing     bool `json:"file_missing"`
				RepoExists      bool `json:"repo_exists"`
				RepoMissing     bool `json:"repo_missing"`
				RevisionMissing bool `json:"revision_missing"`
				Sizes           bool
				SHA, Branch     string
				Files, Paths    []string
				Folder          []string
				Refs            []string
				NoFolder        string `json:"no_folder"`
				Whoami, Auth    string
				Metadata        int
				OneSegment      string `json:"one_segment"`
			}
			if got.Error != "" || json.Unmarshal(got.OK, &api) != nil {
				t.Fatalf("api: %s %s %s", got.Error, got.Message, got.OK)
			}
			if !api.FileExists || api.FileMissing || !api.RepoExists || api.RepoMissing || api.RevisionMissing || !api.Sizes ||
				!commitID.MatchString(api.SHA) || !commitID.MatchString(api.Branch) || api.SHA == api.Branch ||
				len(api.Files) != len(want) || !slices.Equal(api.Paths, []string{"config.json", "onnx"}) ||
				!slices.Equal(api.Folder, []string{"onnx/sub"}) || !slices.Contains(api.Refs, "main") ||
				api.NoFolder == "" || api.Auth != "" || api.Whoami == "" || api.Metadata == 0 || api.OneSegment != "tinygpt" {
				t.Errorf("the calls gave %+v", api)
			}
			wantBearable(t, rec.Exchanges())
			wantRoutes(t, rec.Take(), "hub-"+line.version+"-api")

			shard := ""
			for name := range want {
				if strings.HasPrefix(name, "model-00001") {
					shard = name
				}
			}
			got = c.call(t, "file_system", map[string]any{"repo_id": "acme/tiny", "filename": shard, "revision": "main"})
			var fs struct {
				Names, Branch        []string
				SHA256               string
				Head, Middle, Exists bool
			}
			if got.Error != "" || json.Unmarshal(got.OK, &fs) != nil {
				t.Fatalf("file system: %s %s %s", got.Error, got.Message, got.OK)
			}
			if fs.SHA256 != want[shard] || !fs.Head || !fs.Middle || fs.Exists || !slices.Contains(fs.Names, "config.json") ||
				!slices.Contains(fs.Branch, "only-here.txt") {
				t.Errorf("the file system gave %+v", fs)
			}
			wantBearable(t, rec.Take())
		})
	}
}

// llama-server by name: the routes are those recorded; a second start fetches
// nothing; an agent that dies in mid-body is asked for the rest.
func TestFullLlamaServerByNameFreshWarmAndCut(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	root := filepath.Join(r.Dir, "origin")
	if err := r.WriteGGUFRepo(root); err != nil {
		t.Fatal(err)
	}
	origin := hub.New(hub.Options{Dir: root})
	url, end, err := r.ServeUntil(ctx, origin)
	if err != nil {
		t.Fatal(err)
	}
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})
	rec := startRecorder(t, r, node.Mirror)
	want := sums(t, filepath.Dir(r.Deps.GGUF))[filepath.Base(r.Deps.GGUF)]
	env := func(cache string) []string {
		return []string{"HF_ENDPOINT=" + rec.URL, "HF_HUB_CACHE=" + filepath.Join(r.Dir, cache)}
	}
	start := func(name, cache string) {
		t.Helper()
		l, err := r.StartLlama(ctx, rig.LlamaOptions{Name: name, Source: []string{"-hf", rig.GGUFRepo}, Env: env(cache)})
		if err != nil {
			t.Fatal(err)
		}
		l.End(20 * time.Second)
		snapshots, _ := filepath.Glob(filepath.Join(r.Dir, cache, "models--*", "snapshots", "*"))
		if len(snapshots) != 1 {
			t.Fatalf("llama-server made snapshots %v", snapshots)
		}
		if got := sums(t, snapshots[0])[filepath.Base(r.Deps.GGUF)]; got != want {
			t.Errorf("%s: the model has sha256 %q, want %s", name, got, want)
		}
	}

	// Cut: the agent dies while the body comes, and is back for the next try.
	origin.SetRate(20 * units.Rate(units.MiB))
	var died sync.WaitGroup
	died.Go(func() {
		err := rig.Until(ctx, "the middle of the body", func(context.Context) (bool, error) { return origin.Bytes() > 30<<20, nil }, node.Process)
		if err != nil {
			t.Error(err)
			return
		}
		// Its three tries take 6 s; the agent's start may take longer.
		resume := rec.Pause()
		defer resume()
		node.Process.Kill()
		if err := node.Restart(ctx); err != nil {
			t.Error(err)
		}
		origin.SetRate(0)
	})
	start("cut", "cut")
	died.Wait()
	wantBearable(t, rec.Exchanges())
	resumed := slices.ContainsFunc(rec.Take(), func(x rig.Exchange) bool {
		return x.Method == http.MethodGet && x.Status == http.StatusPartialContent
	})
	if !resumed {
		t.Error("the body was not resumed by a range")
	}

	start("fresh", "fresh")
	wantRoutes(t, rec.Take(), "llama-fresh")
	st, err := os.Stat(r.Deps.GGUF)
	if err != nil {
		t.Fatal(err)
	}
	end()
	start("warm", "fresh")
	wantBearable(t, rec.Exchanges())
	wantRoutes(t, rec.Take(), "llama-warm")
	if most := st.Size() + rig.Streams*int64(rig.SegmentSize); origin.FileBytes(rig.GGUFRepo+"/"+filepath.Base(r.Deps.GGUF)) > most {
		t.Errorf("the origin sent more than %d bytes of the model", most)
	}
}
