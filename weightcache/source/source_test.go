package source_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
	"github.com/hearth-dev/hearth/weightcache/source/sourcetest"
)

const secret = "hf_secretsecret"

// content of the repository that the tests pull.
func content() map[string][]byte {
	big := make([]byte, 300_000)
	for i := range big {
		big[i] = byte(i ^ i>>8)
	}
	return map[string][]byte{
		"config.json": []byte("{}\n"), "model.safetensors": big, "empty.txt": nil,
		"sub dir/nåme+1#%2F?.txt": []byte("odd name"), "README.md": []byte("# model\n"),
	}
}

func writeFiles(t *testing.T, dir string, files map[string][]byte) {
	t.Helper()
	old := time.Now().Add(-time.Hour)
	for name, data := range files {
		path := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, old, old); err != nil {
			t.Fatal(err)
		}
	}
}

func flip(t *testing.T, path string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2] ^= 1
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

type hubRig struct {
	sourcetest.Fixture
	origin *hub.Origin
	hub    *source.Hub
	dir    string
}

func newHub(t *testing.T, opts hub.Options) hubRig {
	t.Helper()
	root := t.TempDir()
	dir := filepath.Join(root, "acme", "tiny")
	files := content()
	writeFiles(t, dir, files)
	opts.Dir, opts.Token, opts.Gated, opts.PageSize = root, secret, []string{"*"}, 2
	origin := hub.New(opts)
	server := httptest.NewServer(origin)
	t.Cleanup(server.Close)
	cdn := httptest.NewServer(origin.CDN())
	t.Cleanup(cdn.Close)
	origin.SetCDN(cdn.URL)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h, err := source.NewHub(source.HubOptions{Name: "test-hub", URL: server.URL, TokenFile: token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	ref := func(name, rev string) artifact.Ref {
		return artifact.Ref{Scheme: artifact.SchemeHub, Name: name, Revision: rev}
	}
	return hubRig{sourcetest.Fixture{
		Source: h, Ref: ref("acme/tiny", "main"), Files: files, Secret: secret,
		Missing: []artifact.Ref{ref("acme/none", "main"), ref("acme/tiny", "none"), {Scheme: artifact.SchemeDir, Name: "/x"}},
		Rewrite: func(t *testing.T, path string) {
			t.Helper()
			flip(t, filepath.Join(dir, path))
			// The old commit is served on, as a mirror that lost the race would.
			origin.SetFault(func(r *http.Request) *hub.Fault {
				if strings.HasSuffix(r.URL.Path, path) {
					return &hub.Fault{Status: 200, Header: http.Header{"Etag": {`"` + strings.Repeat("0", 64) + `"`}}}
				}
				return nil
			})
		},
	}, origin, h, dir}
}

func newDir(t *testing.T) (sourcetest.Fixture, string) {
	t.Helper()
	root := t.TempDir()
	dir := filepath.Join(root, "models", "tiny")
	files := content()
	writeFiles(t, dir, files)
	writeFiles(t, dir, map[string][]byte{".git/HEAD": []byte("x"), ".cache/huggingface/x.lock": nil})
	d, err := source.NewDir(source.DirOptions{Name: "test-dir", Root: root})
	if err != nil {
		t.Fatal(err)
	}
	return sourcetest.Fixture{
		Source: d, Ref: artifact.Ref{Scheme: artifact.SchemeDir, Name: dir}, Files: files,
		Missing: []artifact.Ref{{Scheme: artifact.SchemeDir, Name: dir + "x"}, {Scheme: artifact.SchemeHub, Name: "a/b", Revision: "main"}},
		Rewrite: func(t *testing.T, path string) { t.Helper(); flip(t, filepath.Join(dir, path)) },
	}, dir
}

func TestHubConforms(t *testing.T) {
	t.Parallel()
	for _, style := range []hub.Redirects{hub.Direct, hub.RedirectAbsolute, hub.RedirectRelative} {
		t.Run(fmt.Sprintf("redirects=%d", style), func(t *testing.T) {
			t.Parallel()
			sourcetest.Run(t, func(t *testing.T) sourcetest.Fixture {
				t.Helper()
				return newHub(t, hub.Options{Redirect: style}).Fixture
			})
		})
	}
}

func TestDirConforms(t *testing.T) {
	t.Parallel()
	sourcetest.Run(t, func(t *testing.T) sourcetest.Fixture { t.Helper(); f, _ := newDir(t); return f })
}

func readAll(ctx context.Context, s source.Source, l *artifact.Listing, path string, off, n int64) ([]byte, error) {
	i := slices.IndexFunc(l.Files, func(f artifact.File) bool { return f.Path == path })
	r, err := s.Open(ctx, l, l.Files[i], off, n)
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(r)
	return data, errors.Join(err, r.Close())
}

func TestEachBadAnswerOfAHubHasItsOwnError(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fault hub.Fault
		off   int64
		want  error
		after time.Duration
		clean bool // no byte may be given
	}{
		"401":                      {hub.Fault{Status: 401}, 0, source.ErrUnauthorized, 0, true},
		"403":                      {hub.Fault{Status: 403}, 0, source.ErrForbidden, 0, true},
		"404":                      {hub.Fault{Status: 404}, 0, source.ErrNotFound, 0, true},
		"429 with seconds":         {hub.Fault{Status: 429, Header: http.Header{"Retry-After": {"7"}}}, 0, source.ErrThrottled, 7 * time.Second, true},
		"429 with RateLimit":       {hub.Fault{Status: 429, Header: http.Header{"Ratelimit": {`"api";r=0;t=9`}}}, 0, source.ErrThrottled, 9 * time.Second, true},
		"500":                      {hub.Fault{Status: 500}, 0, source.ErrUnavailable, 0, true},
		"503 with seconds":         {hub.Fault{Status: 503, Header: http.Header{"Retry-After": {"3"}}}, 0, source.ErrUnavailable, 3 * time.Second, true},
		"418":                      {hub.Fault{Status: 418}, 0, source.ErrProtocol, 0, true},
		"412":                      {hub.Fault{Status: 412}, 0, source.ErrChanged, 0, true},
		"416":                      {hub.Fault{Status: 416}, 0, source.ErrChanged, 0, true},
		"204":                      {hub.Fault{Status: 204}, 0, source.ErrProtocol, 0, true},
		"dropped":                  {hub.Fault{Drop: true}, 0, source.ErrUnavailable, 0, true},
		"range ignored":            {hub.Fault{IgnoreRange: true}, 1000, source.ErrNoRange, 0, true},
		"wrong start":              {hub.Fault{ContentRange: "bytes 0-99/300000"}, 1000, source.ErrProtocol, 0, true},
		"wrong total":              {hub.Fault{ContentRange: "bytes 1000-1099/300001"}, 1000, source.ErrChanged, 0, true},
		"no total":                 {hub.Fault{ContentRange: "bytes 1000-1099/*"}, 1000, source.ErrProtocol, 0, true},
		"junk range":               {hub.Fault{ContentRange: "bytes -1-99/300000"}, 1000, source.ErrProtocol, 0, true},
		"encoded":                  {hub.Fault{Header: http.Header{"Content-Encoding": {"gzip"}}}, 0, source.ErrProtocol, 0, true},
		"redirect loop":            {hub.Fault{Status: 302, Header: http.Header{"Location": {"?x"}}}, 0, source.ErrProtocol, 0, true},
		"redirect to a file":       {hub.Fault{Status: 302, Header: http.Header{"Location": {"file:///etc/passwd"}}}, 0, source.ErrProtocol, 0, true},
		"redirect without address": {hub.Fault{Status: 302}, 0, source.ErrProtocol, 0, true},
		"redirect with credential": {hub.Fault{Status: 302, Header: http.Header{"Location": {"http://u:p@127.0.0.1/"}}}, 0, source.ErrProtocol, 0, true},
		"short body":               {hub.Fault{CutAfter: 50}, 1000, source.ErrUnavailable, 0, false},
		"echoed token":             {hub.Fault{Status: 403, Header: http.Header{"X-Error-Message": {"no: " + secret}}}, 0, source.ErrForbidden, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rig := newHub(t, hub.Options{})
			l, err := rig.hub.Resolve(t.Context(), rig.Ref)
			if err != nil {
				t.Fatal(err)
			}
			rig.origin.AddFault("/resolve/", 10, c.fault)
			got, err := readAll(t.Context(), rig.hub, l, "model.safetensors", c.off, 100)
			var typed *source.Error
			if !errors.Is(err, c.want) || !errors.As(err, &typed) {
				t.Fatalf("error %v, want %v", err, c.want)
			}
			if typed.RetryAfter != c.after {
				t.Errorf("asked to wait %v, want %v", typed.RetryAfter, c.after)
			}
			if c.clean && len(got) > 0 {
				t.Errorf("%d bytes were given", len(got))
			}
			if strings.Contains(err.Error(), secret) || !strings.Contains(err.Error(), "model.safetensors") {
				t.Errorf("error is %v", err)
			}
		})
	}
}

func TestAnETagThatChangesBetweenPartsIsNoticedOnceAndThenAccepted(t *testing.T) {
	t.Parallel()
	rig := newHub(t, hub.Options{Redirect: hub.RedirectAbsolute})
	l, err := rig.hub.Resolve(t.Context(), rig.Ref)
	if err != nil {
		t.Fatal(err)
	}
	get := func() error {
		_, err := readAll(t.Context(), rig.hub, l, "model.safetensors", 0, 10)
		return err
	}
	if err := get(); err != nil {
		t.Fatal(err)
	}
	rig.origin.AddFault("/cdn/", 100, hub.Fault{ETag: `"other"`})
	if err := get(); !errors.Is(err, source.ErrChanged) {
		t.Errorf("second part: %v", err)
	}
	if err := get(); err != nil {
		t.Errorf("new attempt: %v", err)
	}
}

func TestAnExpiredSignedAddressIsWorthAnotherTry(t *testing.T) {
	t.Parallel()
	rig := newHub(t, hub.Options{Redirect: hub.RedirectAbsolute})
	l, err := rig.hub.Resolve(t.Context(), rig.Ref)
	if err != nil {
		t.Fatal(err)
	}
	rig.origin.AddFault("/cdn/", 1, hub.Fault{Status: 403})
	if _, err := readAll(t.Context(), rig.hub, l, "model.safetensors", 0, 10); !errors.Is(err, source.ErrUnavailable) {
		t.Errorf("expired address: %v", err)
	}
	if _, err := readAll(t.Context(), rig.hub, l, "model.safetensors", 0, 10); err != nil {
		t.Errorf("next try: %v", err)
	}
}

func TestHostileListingsAreRefused(t *testing.T) {
	t.Parallel()
	sum := strings.Repeat("a", 64)
	git := strings.Repeat("b", 40)
	file := func(path string) string { return fmt.Sprintf(`{"type":"file","oid":%q,"size":1,"path":%q}`, git, path) }
	for name, c := range map[string]struct {
		info, tree string
		header     http.Header
	}{
		"commit of other form": {info: `{"sha":"main"}`},
		"no JSON":              {info: `<html>`},
		"traversal":            {tree: "[" + file("../x") + "]"},
		"absolute":             {tree: "[" + file("/etc/passwd") + "]"},
		"twice":                {tree: "[" + file("a") + "," + file("a") + "]"},
		"file and folder":      {tree: "[" + file("a") + "," + file("a/b") + "]"},
		"negative size":        {tree: `[{"type":"file","oid":"` + git + `","size":-1,"path":"a"}]`},
		"absurd size":          {tree: `[{"type":"file","oid":"` + git + `","size":9223372036854775807,"path":"a"}]`},
		"size past int64":      {tree: `[{"type":"file","oid":"` + git + `","size":92233720368547758070,"path":"a"}]`},
		"no digest":            {tree: `[{"type":"file","oid":"","size":1,"path":"a"}]`},
		"short lfs digest":     {tree: `[{"type":"file","oid":"` + git + `","size":1,"path":"a","lfs":{"oid":"` + sum[:10] + `","size":1}}]`},
		"nothing":              {tree: `[]`},
		"next page elsewhere":  {tree: "[" + file("a") + "]", header: http.Header{"Link": {`<http://203.0.113.1/x>; rel="next"`}}},
		"next page again":      {tree: "[" + file("a") + "]", header: http.Header{"Link": {`<?recursive=true&expand=false>; rel="next"`}}},
		"moved elsewhere":      {info: "moved"},
		"endless page":         {tree: "[" + strings.Repeat(" ", 17<<20) + "]"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if strings.Contains(r.URL.Path, "/tree/") {
					maps.Copy(w.Header(), c.header)
					_, _ = io.WriteString(w, c.tree)
					return
				}
				switch c.info {
				case "":
					_, _ = io.WriteString(w, `{"sha":"`+git+`"}`)
				case "moved":
					http.Redirect(w, r, "http://203.0.113.1/", http.StatusFound)
				default:
					_, _ = io.WriteString(w, c.info)
				}
			}))
			defer s.Close()
			h, err := source.NewHub(source.HubOptions{Name: "bad", URL: s.URL})
			if err != nil {
				t.Fatal(err)
			}
			defer h.Close()
			if _, err := h.Resolve(t.Context(), artifact.Ref{Scheme: artifact.SchemeHub, Name: "a/b", Revision: "main"}); !errors.Is(err, source.ErrProtocol) {
				t.Errorf("error %v, want %v", err, source.ErrProtocol)
			}
		})
	}
}

func TestATokenIsReadAgainForEveryRequestAndHeldBackFromOtherOrigins(t *testing.T) {
	t.Parallel()
	var elsewhere []string
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		elsewhere = append(elsewhere, r.Header.Get("Authorization"))
		w.Header().Set("Content-Range", "bytes 0-0/1")
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write([]byte("x"))
	}))
	defer other.Close()
	var here []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		here = append(here, r.Header.Get("Authorization"))
		http.Redirect(w, r, other.URL, http.StatusFound)
	}))
	defer s.Close()
	token := filepath.Join(t.TempDir(), "token")
	h, err := source.NewHub(source.HubOptions{Name: "hub", URL: s.URL, TokenFile: token})
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	l := &artifact.Listing{
		Ref: artifact.Ref{Scheme: artifact.SchemeHub, Name: "a/b", Revision: "main"}, Commit: strings.Repeat("a", 40),
		Files: []artifact.File{{Path: "f", Size: 1}},
	}
	if _, err := readAll(t.Context(), h, l, "f", 0, 1); !errors.Is(err, source.ErrUnauthorized) {
		t.Errorf("without a token file: %v", err)
	}
	for _, text := range []string{"one", "two"} {
		if err := os.WriteFile(token, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := readAll(t.Context(), h, l, "f", 0, 1); err != nil || string(got) != "x" {
			t.Errorf("token %s: %q %v", text, got, err)
		}
	}
	if want := []string{"Bearer one", "Bearer two"}; !slices.Equal(here, want) || !slices.Equal(elsewhere, []string{"", ""}) {
		t.Errorf("here %q, elsewhere %q", here, elsewhere)
	}
}

func TestConnectionsComeFromTheDialerGiven(t *testing.T) {
	t.Parallel()
	h, err := source.NewHub(source.HubOptions{Name: "hub", URL: "http://hub.invalid", DialContext: func(context.Context, string, string) (net.Conn, error) {
		return nil, errors.New("no route today")
	}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = h.Resolve(t.Context(), artifact.Ref{Scheme: artifact.SchemeHub, Name: "a/b", Revision: "main"})
	if !errors.Is(err, source.ErrUnavailable) || !strings.Contains(err.Error(), "no route today") {
		t.Errorf("got %v", err)
	}
}

func TestAFolderWithAnythingButFilesIsRefusedByName(t *testing.T) {
	t.Parallel()
	for name, add := range map[string]func(path string) error{
		"link.json": func(p string) error { return os.Symlink("/etc/passwd", p) },
		"dirlink":   func(p string) error { return os.Symlink("/etc", p) },
		"pipe":      func(p string) error { return syscall.Mkfifo(p, 0o644) },
		"socket": func(p string) error {
			l, err := new(net.ListenConfig).Listen(context.Background(), "unix", p)
			if err == nil {
				t.Cleanup(func() { _ = l.Close() })
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, dir := newDir(t)
			if err := add(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
			_, err := f.Source.Resolve(t.Context(), f.Ref)
			if !errors.Is(err, source.ErrProtocol) || !strings.Contains(err.Error(), name) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestAFolderOutsideTheRootOrBehindALinkIsRefused(t *testing.T) {
	t.Parallel()
	f, dir := newDir(t)
	root := filepath.Dir(filepath.Dir(dir))
	if err := os.Symlink(dir, filepath.Join(root, "alias")); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{"/etc": source.ErrForbidden, root + "x": source.ErrForbidden, root + "/alias": source.ErrProtocol} {
		if _, err := f.Source.Resolve(t.Context(), artifact.Ref{Scheme: artifact.SchemeDir, Name: path}); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
}

func TestAFileReplacedByALinkAfterResolveIsNotFollowed(t *testing.T) {
	t.Parallel()
	f, dir := newDir(t)
	l, err := f.Source.Resolve(t.Context(), f.Ref)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "config.json")
	if err := errors.Join(os.Remove(path), os.Symlink("README.md", path)); err != nil {
		t.Fatal(err)
	}
	if _, err := readAll(t.Context(), f.Source, l, "config.json", 0, 1); !errors.Is(err, source.ErrChanged) {
		t.Errorf("got %v", err)
	}
}

func TestAFolderGivesTheDigestsThatAHubWouldName(t *testing.T) {
	t.Parallel()
	f, _ := newDir(t)
	l, err := f.Source.Resolve(t.Context(), f.Ref)
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range l.Files {
		if file.SHA256.IsZero() || file.LFS == (file.GitSHA1 != "") {
			t.Errorf("%s: sha256 %s, lfs %v, git %q", file.Path, file.SHA256.Short(), file.LFS, file.GitSHA1)
		}
		if file.Path == "config.json" && file.GitSHA1 != "0967ef424bce6791893e9a57bb952f80fd536e93" {
			t.Errorf("git id of %q is %s", "{}\n", file.GitSHA1)
		}
	}
	if l.Commit != artifact.ComputeDigest(l.Files).String() {
		t.Error("commit is not the digest of the file lines")
	}
}
