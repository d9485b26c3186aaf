package hubmirror

import (
	"net/http"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

func TestEveryRefusalHasAStatusClientsGiveUpOnAndACode(t *testing.T) {
	t.Parallel()
	m, s := newSmall(t, Options{}, onDisk(t, pattern(10)))
	for _, c := range []struct {
		method, path string
		status       int
		code, commit string
	}{
		{"GET", "/api/models/acme/none", 404, "RepoNotFound", ""},
		{"GET", "/api/models/acme/tiny/revision/none", 404, "RevisionNotFound", ""},
		{"GET", "/api/models/acme/denied", 404, "RepoNotFound", ""},
		{"GET", "/api/models/acme/gated", 403, "GatedRepo", ""},
		{"GET", "/api/models/acme/gated/auth-check", 403, "GatedRepo", ""},
		{"GET", "/api/models/acme/closed", 403, "GatedRepo", ""},
		{"HEAD", "/acme/away/resolve/main/config.json", 404, "Unavailable", ""},
		{"GET", "/api/models/acme/..%2f..%2fetc", 404, "RepoNotFound", ""},
		{"GET", "/api/models/acme/tiny/revision/..%2Fx", 404, "RepoNotFound", ""},
		{"GET", "/acme/tiny/resolve/main/none", 404, "EntryNotFound", testCommit},
		{"HEAD", "/acme/tiny/resolve/main/none", 404, "EntryNotFound", testCommit},
		{"GET", "/acme/tiny/resolve/main/sub", 404, "EntryNotFound", testCommit},
		{"GET", "/acme/tiny/resolve/main/%2e%2e/%2e%2e/etc/passwd", 404, "EntryNotFound", testCommit},
		{"GET", "/acme/tiny/resolve/main//config.json/", 200, "", testCommit},
		{"HEAD", "/acme/tiny/raw/main/none", 404, "EntryNotFound", testCommit},
		{"GET", "/api/models/acme/tiny/tree/main/none", 404, "EntryNotFound", testCommit},
		{"GET", "/api/whoami-v2", 401, "Unauthorized", ""},
		{"GET", "/api/agent-harnesses", 404, "RouteNotFound", ""},
		{"GET", "/api/models/acme/tiny/xet-read-token/main", 404, "RouteNotFound", ""},
		{"GET", "/api/datasets/a/b", 404, "RepoNotFound", ""},
		{"GET", "/", 404, "RouteNotFound", ""},
		{"PUT", "/acme/tiny/resolve/main/config.json", 405, "MethodNotAllowed", ""},
		{"GET", "/api/models/acme/tiny/paths-info/main", 405, "MethodNotAllowed", ""},
		{"GET", "/" + strings.Repeat("x", maxPath), 414, "RequestTooLong", ""},
	} {
		a := ask(t, c.method, s.URL+c.path, "")
		if a.StatusCode != c.status || a.Header.Get("X-Error-Code") != c.code || a.Header.Get("X-Repo-Commit") != c.commit {
			t.Errorf("%s %.60s: %d %q commit %q, want %d %q %q", c.method, c.path, a.StatusCode,
				a.Header.Get("X-Error-Code"), a.Header.Get("X-Repo-Commit"), c.status, c.code, c.commit)
		}
		if c.code != "" && a.Header.Get("X-Error-Message") == "" {
			t.Errorf("%s %.60s: no message", c.method, c.path)
		}
	}
	if got := m.Stats().Refused["EntryNotFound"]; got != 6 {
		t.Errorf("counted %d missing entries, want 6", got)
	}
}

func TestTreesArePagedByAbsoluteAddresses(t *testing.T) {
	t.Parallel()
	_, s := newSmall(t, Options{PageSize: 2}, onDisk(t, pattern(10)))
	var names []string
	for next := s.URL + "/api/models/acme/tiny/tree/main?recursive=True&expand=False"; next != ""; {
		a := ask(t, http.MethodGet, next, "")
		var page []treeEntry
		a.decode(t, &page)
		if len(page) > 2 {
			t.Fatalf("page of %d entries", len(page))
		}
		for _, e := range page {
			names = append(names, e.Type[:1]+" "+e.Path)
		}
		link := a.Header.Get("Link")
		next, _, _ = strings.Cut(strings.TrimPrefix(link, "<"), ">")
		if link != "" && !strings.HasPrefix(next, s.URL+"/") {
			t.Fatalf("link %q is not absolute", link)
		}
	}
	want := "f config.json|f empty.bin|d sub|d sub/deep|f sub/deep/note.txt|f weights.bin"
	if got := strings.Join(names, "|"); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestTreesListOneLevelUnlessRecursive(t *testing.T) {
	t.Parallel()
	_, s := newSmall(t, Options{}, onDisk(t, pattern(10)))
	for query, want := range map[string]string{
		"/main":                           "config.json empty.bin sub weights.bin",
		"/main/sub":                       "sub/deep",
		"/main/sub/deep":                  "sub/deep/note.txt",
		"/main/sub?recursive=true":        "sub/deep sub/deep/note.txt",
		"/HEAD?recursive=false":           "config.json empty.bin sub weights.bin",
		"/main?limit=1":                   "config.json",
		"/main?cursor=junk":               "config.json empty.bin sub weights.bin",
		"/" + testCommit + "?recursive=1": "config.json empty.bin sub sub/deep sub/deep/note.txt weights.bin",
	} {
		a := ask(t, http.MethodGet, s.URL+"/api/models/acme/tiny/tree"+query, "")
		if query[1] >= '0' && query[1] <= '9' && a.StatusCode == 404 {
			continue // the commit was not asked for by branch yet
		}
		var page []treeEntry
		a.decode(t, &page)
		var names []string
		for _, e := range page {
			names = append(names, e.Path)
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("%s: got %q, want %q", query, got, want)
		}
	}
}

func TestPathsInfoReadsFormsAndJSONAndOmitsTheUnknown(t *testing.T) {
	t.Parallel()
	_, s := newSmall(t, Options{}, onDisk(t, pattern(10)))
	url := s.URL + "/api/models/acme/tiny/paths-info/main"
	for kind, body := range map[string]string{
		"application/x-www-form-urlencoded": "paths=config.json&paths=none&paths=sub&expand=true",
		"application/json":                  `{"paths":["config.json","none","sub"],"expand":true}`,
	} {
		a := ask(t, http.MethodPost, url, body, "Content-Type", kind)
		var out []treeEntry
		a.decode(t, &out)
		if len(out) != 2 || out[0].Path != "config.json" || out[1].Type != "directory" {
			t.Errorf("%s: got %+v", kind, out)
		}
	}
	for name, body := range map[string]string{"broken": `{"paths":`, "too long": strings.Repeat(" ", maxForm+1)} {
		if a := ask(t, http.MethodPost, url, body, "Content-Type", "application/json"); a.StatusCode != http.StatusBadRequest {
			t.Errorf("%s body: %s", name, a.Status)
		}
	}
}

func TestRawGivesThePointerOfLFSFilesAndTheBytesOfOthers(t *testing.T) {
	t.Parallel()
	_, s := newSmall(t, Options{}, onDisk(t, pattern(10)))
	a := ask(t, http.MethodGet, s.URL+"/acme/tiny/raw/main/weights.bin", "")
	if !strings.HasPrefix(string(a.body), "version https://git-lfs") || !strings.HasSuffix(string(a.body), "size 10\n") {
		t.Errorf("pointer %q", a.body)
	}
	if a := ask(t, http.MethodGet, s.URL+"/acme/tiny/raw/main/config.json", ""); string(a.body) != "{}" {
		t.Errorf("bytes %q", a.body)
	}
}

func TestACommitIsFoundByTheBranchThatLedToIt(t *testing.T) {
	t.Parallel()
	m, s := newSmall(t, Options{}, onDisk(t, pattern(10)))
	lib, ok := m.opts.Library.(*fakeLibrary)
	if !ok {
		t.Fatal("not the fake")
	}
	if a := ask(t, http.MethodGet, s.URL+"/api/models/acme/tiny/revision/HEAD", ""); a.StatusCode != http.StatusOK {
		t.Fatal(a.Status)
	}
	for range 3 {
		if a := ask(t, http.MethodHead, s.URL+"/acme/tiny/resolve/"+testCommit+"/config.json", ""); a.StatusCode != http.StatusOK {
			t.Fatal(a.Status)
		}
	}
	lib.mu.Lock()
	defer lib.mu.Unlock()
	for _, ref := range lib.asked {
		if ref.Revision != artifact.DefaultRevision {
			t.Errorf("library was asked for %s", ref)
		}
	}
}

func TestRefsNameMainFirst(t *testing.T) {
	t.Parallel()
	_, s := newSmall(t, Options{}, onDisk(t, pattern(10)))
	var refs struct{ Branches, Tags, Converts []refEntry }
	ask(t, http.MethodGet, s.URL+"/api/models/acme/tiny/refs", "").decode(t, &refs)
	if len(refs.Branches) != 1 || refs.Branches[0] != (refEntry{"main", "refs/heads/main", testCommit}) || refs.Tags == nil || refs.Converts == nil {
		t.Errorf("got %+v", refs)
	}
}
