//go:build outside

package outside

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/hearth-dev/hearth/test/outside/rig"
)

// hubResult is what testdata/hub_client.py prints.
type hubResult struct {
	OK      json.RawMessage `json:"ok"`
	Error   string          `json:"error"`
	Classes []string        `json:"classes"`
	Message string          `json:"message"`
}

// path gives the result of a call that returns a path.
func (h hubResult) path(t *testing.T) string {
	t.Helper()
	var p string
	if h.Error != "" || json.Unmarshal(h.OK, &p) != nil {
		t.Fatalf("want a path, got %s: %s %s", h.Error, h.Message, h.OK)
	}
	return p
}

// hubClient is one user of the Python library with a cache of its own.
type hubClient struct {
	rig *rig.Rig
	ctx context.Context
	env []string
	dir string   // HF_HUB_CACHE
	pod *rig.Pod // where not nil, runs in it
	// interpreter has the library; empty means the one of the Rig.
	interpreter string
}

// hubLine is one of the two lines of the library that users have.
type hubLine struct{ version, part string }

var hubLines = []hubLine{{"2.4.0", "python"}, {"0.36.0", "hub-0.36"}}

// client is a user of this line with a cache of its own.
func (l hubLine) client(ctx context.Context, t *testing.T, r *rig.Rig, name, endpoint string) *hubClient {
	t.Helper()
	venv, err := rig.Part(ctx, r.Root, l.part)
	if err != nil {
		t.Fatal(err)
	}
	c := newHubClient(ctx, r, name, endpoint)
	c.interpreter = filepath.Join(venv, "bin", "python")
	return c
}

func newHubClient(ctx context.Context, r *rig.Rig, name, endpoint string) *hubClient {
	dir := filepath.Join(r.Dir, name)
	return &hubClient{rig: r, ctx: ctx, dir: dir, env: append(quietHub(),
		"HF_ENDPOINT="+endpoint, "HF_HOME="+filepath.Join(dir, "home"), "HF_HUB_CACHE="+dir)}
}

func startNode(ctx context.Context, t *testing.T, r *rig.Rig, opts rig.NodeOptions) *rig.Node {
	t.Helper()
	n, err := r.StartNode(ctx, opts)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// newPodClient is a user in a pod that sees a hub cache view and no network.
func newPodClient(ctx context.Context, t *testing.T, r *rig.Rig, node *rig.Node, ref string) *hubClient {
	t.Helper()
	view, err := node.HubView(ctx, ref)
	if err != nil {
		t.Fatal(err)
	}
	pod, err := r.NewPod(view)
	if err != nil {
		t.Fatal(err)
	}
	return &hubClient{rig: r, ctx: ctx, dir: pod.View, pod: pod, env: append(quietHub(),
		"HF_HUB_OFFLINE=1", "HF_ENDPOINT=http://127.0.0.1:9", "HF_HUB_CACHE="+pod.View, "HF_HOME="+pod.Home)}
}

// quietHub keeps the library off every host but HF_ENDPOINT.
func quietHub() []string {
	return []string{
		"HF_HUB_DISABLE_UPDATE_CHECK=1", "HF_HUB_DISABLE_TELEMETRY=1", "HF_HUB_DISABLE_PROGRESS_BARS=1",
		"TRANSFORMERS_VERBOSITY=error",
	}
}

func (c *hubClient) command(call string, args map[string]any) rig.Command {
	if args == nil {
		args = map[string]any{}
	}
	text, err := json.Marshal(args)
	if err != nil {
		panic(err)
	}
	return c.python("hub_client", call, string(text))
}

// python is a command that runs a script of testdata with the client's
// environment.
func (c *hubClient) python(script string, args ...string) rig.Command {
	if c.pod != nil {
		return c.pod.Python(script, script+".py", args, c.env...)
	}
	cmd := pythonCommand(c.rig, script, c.env, args...)
	if c.interpreter != "" {
		cmd.Path = c.interpreter
	}
	return cmd
}

func (c *hubClient) call(t *testing.T, call string, args map[string]any) hubResult {
	t.Helper()
	var out hubResult
	runJSON(c.ctx, t, c.rig, c.command(call, args), &out)
	return out
}

// snapshot calls snapshot_download, which must succeed, and gives the folder.
func (c *hubClient) snapshot(t *testing.T, repo string) string {
	t.Helper()
	return c.call(t, "snapshot_download", map[string]any{"repo_id": repo}).path(t)
}

// partBytes sums what the client has of files it has not finished.
func partBytes(dir string) int64 {
	var n int64
	parts, _ := filepath.Glob(filepath.Join(dir, "*", "blobs", "*.incomplete"))
	for _, p := range parts {
		if st, err := os.Stat(p); err == nil {
			n += st.Size()
		}
	}
	return n
}

// killInMidDownload starts a snapshot and kills its process once it has at
// least so many bytes of files that are not whole.
func killInMidDownload(t *testing.T, c *hubClient, repo string, bytes int64) {
	t.Helper()
	p, err := c.rig.Start(c.command("snapshot_download", map[string]any{"repo_id": repo}))
	if err != nil {
		t.Fatal(err)
	}
	err = rig.Until(c.ctx, "a part of a file at the client", func(context.Context) (bool, error) {
		return partBytes(c.dir) >= bytes, nil
	}, p)
	if err != nil {
		t.Fatal(err)
	}
	p.Kill()
}
