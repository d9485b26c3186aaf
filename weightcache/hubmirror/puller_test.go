package hubmirror_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/hubmirror"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// library adapts a Puller as the agent does.
type library struct{ p *weightcache.Puller }

func (l library) Manifest(ctx context.Context, ref artifact.Ref) (*artifact.Manifest, error) {
	m, err := l.p.Manifest(ctx, ref)
	return m, translate(err)
}

func (l library) Open(ctx context.Context, m *artifact.Manifest, path string) (hubmirror.Content, error) {
	r, err := l.p.Open(ctx, m, path, weightcache.OpenOptions{})
	if err != nil {
		return nil, translate(err)
	}
	return content{r}, nil
}

func (l library) Refs(_ context.Context, repo string) (map[string]string, error) {
	out := map[string]string{}
	for _, s := range l.p.List() {
		if s.Ref.Scheme == artifact.SchemeHub && s.Ref.Name == repo && s.Commit != "" {
			out[s.Ref.Revision] = s.Commit
		}
	}
	return out, nil
}

func (l library) Held(repo, commit string) (*artifact.Manifest, bool) { return l.p.Held(repo, commit) }

func (l library) RefNames(ctx context.Context, repo string) (map[string]string, error) {
	return l.p.RefNames(ctx, repo)
}

func (l library) Doubtful(file artifact.Digest) bool { return l.p.Doubtful(file) }

func (l library) Since(m *artifact.Manifest) time.Time { return l.p.Since(m) }

func (l library) Keep(m *artifact.Manifest, until time.Time) { l.p.Keep(m.Digest, until) }

type content struct{ *weightcache.Reader }

func (c content) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	n, err := c.Reader.ReadAt(ctx, p, off)
	return n, translate(err)
}

func translate(err error) error {
	switch {
	case errors.Is(err, weightcache.ErrNotAllowed):
		return fmt.Errorf("%w: %w", hubmirror.ErrNotAllowed, err)
	case errors.Is(err, weightcache.ErrMismatch):
		return fmt.Errorf("%w: %w", hubmirror.ErrMismatch, err)
	}
	return err
}

type rig struct {
	origin *hub.Origin
	repo   string // folder at the origin
	store  string // folder of the store
	url    string
	stop   func()
}

// start runs origin, store, puller and mirror on loopback.
func start(t *testing.T, originURL, store string) (url string, stop func()) {
	t.Helper()
	src, err := source.NewHub(source.HubOptions{Name: "sim", URL: originURL})
	if err != nil {
		t.Fatal(err)
	}
	st, err := weightcache.Open(weightcache.Options{Dir: store})
	if err != nil {
		t.Fatal(err)
	}
	p, err := weightcache.NewPuller(weightcache.PullerOptions{
		Store: st, SegmentSize: units.MiB, Sources: []weightcache.Rule{{Source: src, Refs: []string{"acme/*"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	server := httptest.NewServer(hubmirror.New(hubmirror.Options{Library: library{p}}))
	var once sync.Once
	stop = func() {
		once.Do(func() {
			server.CloseClientConnections()
			server.Close()
			cancel()
			if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			err := p.Wait(context.Background())
			src.Close()
			if err := errors.Join(err, st.Close()); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(stop)
	return server.URL, stop
}

func newRig(t *testing.T) rig {
	t.Helper()
	root := t.TempDir()
	r := rig{repo: filepath.Join(root, "acme", "tiny"), store: filepath.Join(t.TempDir(), "store")}
	if err := hub.WriteModel(r.repo, hub.ModelOptions{Size: 12 * units.MiB, Shards: 2, Seed: 3}); err != nil {
		t.Fatal(err)
	}
	r.origin = hub.New(hub.Options{Dir: root})
	server := httptest.NewServer(r.origin)
	t.Cleanup(server.Close)
	r.url, r.stop = start(t, server.URL, r.store)
	return r
}

func fetch(t *testing.T, url string) (*http.Response, []byte, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	return resp, body, err
}

func TestColdAndWarmReadsThroughTheMirrorCostOneDownload(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	names, err := os.ReadDir(r.repo)
	if err != nil {
		t.Fatal(err)
	}
	var total int64
	for round := range 2 {
		var wg sync.WaitGroup
		for _, e := range names {
			wg.Go(func() {
				want, err := os.ReadFile(filepath.Join(r.repo, e.Name()))
				if err != nil {
					t.Error(err)
					return
				}
				resp, got, err := fetch(t, r.url+"/acme/tiny/resolve/main/"+e.Name())
				if err != nil || resp.StatusCode != http.StatusOK || string(got) != string(want) {
					t.Errorf("round %d, %s: %s, %d bytes of %d, %v", round, e.Name(), resp.Status, len(got), len(want), err)
				}
				sum := sha256.Sum256(want)
				if strings.HasSuffix(e.Name(), ".safetensors") && resp.Header.Get("Etag") != `"`+hex.EncodeToString(sum[:])+`"` {
					t.Errorf("%s: ETag %s", e.Name(), resp.Header.Get("Etag"))
				}
			})
		}
		wg.Wait()
	}
	for _, e := range names {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		total += info.Size()
	}
	if got := r.origin.Bytes(); got != total {
		t.Errorf("origin served %d bytes, the model has %d", got, total)
	}
	if resp, _, _ := fetch(t, r.url+"/other/tiny/resolve/main/config.json"); resp.StatusCode != http.StatusNotFound || resp.Header.Get("X-Error-Code") != "RepoNotFound" {
		t.Errorf("repository outside the allow-list: %s", resp.Status)
	}
}

func TestACommitKeptByAClientIsAnsweredAfterARestartWithTheOriginGone(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	resp, _, err := fetch(t, r.url+"/acme/tiny/resolve/main/config.json")
	if err != nil {
		t.Fatal(err)
	}
	commit := resp.Header.Get("X-Repo-Commit")
	r.stop()
	url, _ := start(t, "http://127.0.0.1:1", r.store)
	for _, path := range []string{"/api/models/acme/tiny/tree/" + commit, "/acme/tiny/resolve/" + commit + "/config.json", "/api/models/acme/tiny/revision/main"} {
		if resp, _, err := fetch(t, url+path); err != nil || resp.StatusCode != http.StatusOK {
			t.Errorf("%s: %s %v", path, resp.Status, err)
		}
	}
}

func TestWrongBytesAtTheOriginNeverMakeAWholeBody(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	name := "model-00001-of-00002.safetensors"
	want, err := os.ReadFile(filepath.Join(r.repo, name))
	if err != nil {
		t.Fatal(err)
	}
	r.origin.AddFault(name, 3, hub.Fault{WrongBytes: true})
	resp, got, err := fetch(t, r.url+"/acme/tiny/resolve/main/"+name)
	if err == nil && string(got) != string(want) {
		t.Errorf("%s: a whole body of wrong bytes", resp.Status)
	}
	if resp, got, err := fetch(t, r.url+"/acme/tiny/resolve/main/"+name); err == nil && string(got) != string(want) {
		t.Errorf("%s: a whole body of wrong bytes at the second try", resp.Status)
	}
}

func TestATagOfTheOriginIsListedAsOneAndACommitNotAtAll(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	if err := hub.WriteModel(r.repo+"@v1", hub.ModelOptions{Size: units.MiB, Shards: 1, Seed: 4}); err != nil {
		t.Fatal(err)
	}
	commit := ""
	for _, rev := range []string{"main", "v1"} {
		resp, _, err := fetch(t, r.url+"/acme/tiny/resolve/"+rev+"/config.json")
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s %v", rev, resp.Status, err)
		}
		commit = resp.Header.Get("X-Repo-Commit")
	}
	if resp, _, err := fetch(t, r.url+"/api/models/acme/tiny/revision/"+commit); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("by commit: %s %v", resp.Status, err)
	}
	_, body, err := fetch(t, r.url+"/api/models/acme/tiny/refs")
	want := `"tags":[{"name":"v1","ref":"refs/tags/v1","targetCommit":"` + commit + `"}]`
	if err != nil || !strings.Contains(string(body), want) || strings.Count(string(body), `"name"`) != 2 {
		t.Errorf("refs %s, want main and %s", body, want)
	}
}
