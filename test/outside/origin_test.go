//go:build outside

package outside

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"testing"

	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
)

// newOrigin serves what writeRepos writes.
func newOrigin(ctx context.Context, t *testing.T, r *rig.Rig) (*hub.Origin, string, string) {
	t.Helper()
	origin, url, root, _ := newOriginUntil(ctx, t, r)
	return origin, url, root
}

// newOriginUntil is newOrigin with a way to end it.
func newOriginUntil(ctx context.Context, t *testing.T, r *rig.Rig) (origin *hub.Origin, url, root string, end func()) {
	t.Helper()
	root = filepath.Join(r.Dir, "origin")
	writeRepos(t, root)
	origin = hub.New(hub.Options{Dir: root})
	url, end, err := r.ServeUntil(ctx, origin)
	if err != nil {
		t.Fatal(err)
	}
	return origin, url, root, end
}

// writeRepos writes acme/tiny (three shards, a nested file, an empty file, a
// branch with a slash in its name), acme/mid (two shards of six segments),
// acme/big (four of twelve), and tinygpt of no organisation.
func writeRepos(t *testing.T, root string) {
	t.Helper()
	tiny := filepath.Join(root, "acme", "tiny")
	writeModel(t, tiny, hub.ModelOptions{Size: units.MiB, Shards: 3, Seed: 1})
	writeFile(t, filepath.Join(tiny, "onnx", "sub", "note.txt"), "nested file\n")
	writeFile(t, filepath.Join(tiny, "empty.txt"), "")
	branch := filepath.Join(root, "acme", "tiny@dev%2Ffeature-1")
	writeModel(t, branch, hub.ModelOptions{Size: units.MiB, Shards: 3, Seed: 1})
	writeFile(t, filepath.Join(branch, "only-here.txt"), "a branch\n")
	writeModel(t, filepath.Join(root, "acme", "mid"), hub.ModelOptions{Size: 12 * units.MiB, Shards: 2, Seed: 3})
	writeModel(t, filepath.Join(root, "acme", "big"), hub.ModelOptions{Size: 48 * units.MiB, Shards: 4, Seed: 2})
	writeFile(t, filepath.Join(root, "tinygpt", "config.json"), "{}\n")
}

func writeModel(t *testing.T, dir string, opts hub.ModelOptions) {
	t.Helper()
	if err := hub.WriteModel(dir, opts); err != nil {
		t.Fatal(err)
	}
}

func writeFile(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// sums gives the sha256 of every file below dir by relative path, links
// followed.
func sums(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		h := sha256.New()
		if _, err := io.Copy(h, f); err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, name)
		out[filepath.ToSlash(rel)] = hex.EncodeToString(h.Sum(nil))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// wantSame fails where the files of got differ in any byte from those of want
// that match keep, or where there are more or fewer.
func wantSame(t *testing.T, got, want string, keep ...string) {
	t.Helper()
	wantSums(t, sums(t, got), want, keep...)
}

// wantSums is wantSame for digests that someone else made.
func wantSums(t *testing.T, have map[string]string, want string, keep ...string) {
	t.Helper()
	origin := sums(t, want)
	for name := range origin {
		if len(keep) > 0 && !slices.ContainsFunc(keep, func(p string) bool { ok, _ := path.Match(p, name); return ok }) {
			delete(origin, name)
		}
	}
	if len(origin) == 0 {
		t.Fatalf("no file of %s matches %q", want, keep)
	}
	for name, sum := range origin {
		if have[name] != sum {
			t.Errorf("%s: sha256 is %q, want %q", name, have[name], sum)
		}
	}
	for name := range have {
		if _, ok := origin[name]; !ok {
			t.Errorf("%s: not in the origin's list", name)
		}
	}
}
