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
	"github.com/hearth-dev/hearth/test/sim/hub"
)

// Tokens of the tests. The agent's own is admitted to everything.
const (
	agentToken    = "hf_agent"
	admittedToken = "hf_admitted" // has an account at the origin, which admits it
	outsiderToken = "hf_outsider" // has an account that is not admitted
	madeUpToken   = "hf_made_up"  // nobody's
)

// strangers are those whom a restricted repository is closed to.
var strangers = map[string]string{"no token": "", "not admitted": outsiderToken, "made up": madeUpToken}

// newGuarded starts an origin where acme/tiny is gated and acme/mid private, and
// an agent that is admitted to both.
func newGuarded(ctx context.Context, t *testing.T, r *rig.Rig) (origin *hub.Origin, root string, rec *rig.Recorder) {
	t.Helper()
	origin, url, root := newOrigin(ctx, t, r)
	origin.SetGated("acme/tiny")
	origin.SetPrivate("acme/mid")
	origin.SetToken(agentToken, "*")
	origin.SetToken(admittedToken, "*")
	origin.SetToken(outsiderToken)
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url, Token: agentToken})
	return origin, root, startRecorder(t, r, node.Mirror)
}

// wantClosed fails where a client was sent a byte of a file, or heard what it
// does not bear.
func wantClosed(t *testing.T, seen []rig.Exchange) {
	t.Helper()
	wantBearable(t, seen)
	refused := 0
	for _, x := range seen {
		if strings.Contains(x.Path, "/resolve/") && x.Status < 400 {
			t.Errorf("%s %s was answered %d", x.Method, x.Path, x.Status)
		}
		if x.Status == http.StatusUnauthorized || x.Status == http.StatusForbidden || x.Status == http.StatusNotFound {
			refused++
		}
	}
	if refused == 0 {
		t.Errorf("nothing was refused: %+v", seen)
	}
}

// A gated repository is open to a client whose own token the origin admits, and
// to any other it is gated, in its own words; a private one does not exist.
func TestFullAGatedRepositoryIsOpenToTheAdmittedAndAnErrorClassToOthers(t *testing.T) {
	t.Parallel()
	for _, line := range hubLines {
		t.Run(line.version, func(t *testing.T) {
			t.Parallel()
			r, ctx := newRig(t)
			_, root, rec := newGuarded(ctx, t, r)
			user := func(name, token string) *hubClient {
				c := line.client(ctx, t, r, strings.ReplaceAll(name, " ", "-"), rec.URL)
				if token != "" {
					c.env = append(c.env, "HF_TOKEN="+token)
				}
				return c
			}
			admitted := user("admitted", admittedToken)
			wantSame(t, admitted.snapshot(t, "acme/tiny"), filepath.Join(root, "acme", "tiny"))
			wantSame(t, admitted.snapshot(t, "acme/mid"), filepath.Join(root, "acme", "mid"))
			wantBearable(t, rec.Take())
			for who, token := range strangers {
				c := user(who, token)
				for call, args := range map[string]map[string]any{
					"snapshot_download": {"repo_id": "acme/tiny"},
					"hf_hub_download":   {"repo_id": "acme/tiny", "filename": "config.json"},
				} {
					if got := c.call(t, call, args); !slices.Contains(got.Classes, "GatedRepoError") {
						t.Errorf("%s, %s: %q %s (%s), want GatedRepoError", who, call, got.OK, got.Error, got.Message)
					}
					wantClosed(t, rec.Take())
				}
				got := c.call(t, "snapshot_download", map[string]any{"repo_id": "acme/mid"})
				if !slices.Contains(got.Classes, "RepositoryNotFoundError") || slices.Contains(got.Classes, "GatedRepoError") {
					t.Errorf("%s, private: %q %s (%s), want RepositoryNotFoundError", who, got.OK, got.Error, got.Message)
				}
				wantClosed(t, rec.Take())
			}
		})
	}
}

func TestFullAGatedRepositoryIsOpenToTheAdmittedInOtherLanguages(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	_, root, rec := newGuarded(ctx, t, r)
	rust, js, runner := part(ctx, t, r, "hub-rust"), part(ctx, t, r, "hub-js"), part(ctx, t, r, "model-runner")
	config, err := os.ReadFile(filepath.Join(root, "acme", "tiny", "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	rustGet := func(t *testing.T, who, token string) (text []byte, failed string) {
		home := filepath.Join(r.Dir, "rust-"+strings.ReplaceAll(who, " ", "-"))
		if token != "" {
			writeFile(t, filepath.Join(home, "token"), token)
		}
		var out rustResult
		runJSON(ctx, t, r, rig.Command{
			Name: "hub-rust", Path: rust, Args: []string{"acme/tiny", "main", "config.json"},
			Env: []string{"HF_ENDPOINT=" + rec.URL, "HF_HOME=" + home},
		}, &out)
		text, _ = os.ReadFile(out.Files["config.json"].Path)
		return text, out.Files["config.json"].Error
	}
	jsGet := func(t *testing.T, who, token string) (text []byte, failed string) {
		cache := filepath.Join(r.Dir, "js-"+strings.ReplaceAll(who, " ", "-"))
		args := map[string]any{"hubUrl": rec.URL, "repo": "acme/tiny", "cacheDir": cache}
		if token != "" {
			args["accessToken"] = token
		}
		asked, err := json.Marshal(args)
		if err != nil {
			t.Fatal(err)
		}
		var out struct{ OK, Error, Message string }
		runJSON(ctx, t, r, rig.Command{Name: "hub-js", Path: "node", Args: []string{filepath.Join(js, "client.mjs"), "snapshotDownload", string(asked)}}, &out)
		text, _ = os.ReadFile(filepath.Join(out.OK, "config.json"))
		return text, strings.TrimSpace(out.Error + " " + out.Message)
	}
	runnerGet := func(t *testing.T, who, token string) (text []byte, failed string) {
		dir := filepath.Join(r.Dir, "runner-"+strings.ReplaceAll(who, " ", "-"))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		var out struct{ ID, Error string }
		c := rig.Command{Name: "model-runner", Path: runner, Args: []string{rec.URL, "acme/tiny", "main", dir}}
		if token != "" {
			c.Env = []string{"HF_TOKEN=" + token}
		}
		runJSON(ctx, t, r, c, &out)
		text, _ = os.ReadFile(filepath.Join(dir, "config.json"))
		return text, out.Error
	}
	for name, get := range map[string]func(*testing.T, string, string) ([]byte, string){"rust": rustGet, "javascript": jsGet, "model-runner": runnerGet} {
		t.Run(name, func(t *testing.T) {
			if text, failed := get(t, "admitted", admittedToken); failed != "" || string(text) != string(config) {
				t.Errorf("admitted: %d bytes, %s", len(text), failed)
			}
			wantBearable(t, rec.Take())
			for who, token := range strangers {
				text, failed := get(t, who, token)
				if failed == "" || len(text) > 0 {
					t.Errorf("%s: got %d bytes and no error", who, len(text))
				}
				t.Logf("%s: %.200s", who, failed)
				wantClosed(t, rec.Take())
			}
		})
	}
}

// llama-server shows its token with files alone, and asks for refs first: what is
// gated is closed to it, whoever runs it, and it ends with an error of its own.
func TestFullAGatedRepositoryIsClosedToLlamaServer(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	root := filepath.Join(r.Dir, "origin")
	if err := r.WriteGGUFRepo(root); err != nil {
		t.Fatal(err)
	}
	origin := hub.New(hub.Options{Dir: root})
	origin.SetGated(rig.GGUFRepo)
	origin.SetToken(agentToken, "*")
	origin.SetToken(admittedToken, "*")
	url, err := r.Serve(ctx, origin)
	if err != nil {
		t.Fatal(err)
	}
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url, Token: agentToken})
	rec := startRecorder(t, r, node.Mirror)
	_, err = r.StartLlama(ctx, rig.LlamaOptions{
		Name: "gated", Source: []string{"-hf", rig.GGUFRepo},
		Env: []string{"HF_ENDPOINT=" + rec.URL, "HF_HUB_CACHE=" + filepath.Join(r.Dir, "llama-cache"), "HF_TOKEN=" + admittedToken},
	})
	if err == nil || ctx.Err() != nil {
		t.Fatalf("it started: %v", err)
	}
	wantClosed(t, rec.Take())
}
