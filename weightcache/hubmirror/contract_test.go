package hubmirror

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// teller is a fakeLibrary whose source knows what kinds of names there are.
type teller struct {
	*fakeLibrary
	mu    sync.Mutex
	names map[string]string
	err   error
	told  int
	since time.Time
}

func (l *teller) RefNames(ctx context.Context, _ string) (map[string]string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.told++
	if _, bounded := ctx.Deadline(); !bounded {
		return nil, errors.New("asked without a limit")
	}
	return l.names, l.err
}

func (l *teller) Since(*artifact.Manifest) time.Time { return l.since }

func TestRefsTellBranchesTagsAndPullRequestsApartAsTheSourceDoes(t *testing.T) {
	t.Parallel()
	now := time.Unix(1e9, 0)
	l := &teller{
		fakeLibrary: &fakeLibrary{manifests: map[artifact.Ref]*artifact.Manifest{}},
		names:       map[string]string{"v1": "refs/tags/v1", "main": "refs/heads/main", "parquet": "refs/convert/parquet"},
	}
	for _, rev := range []string{"main", "v1", "dev/one", "refs/pr/1", "refs/convert/parquet", testCommit} {
		ref := artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/tiny", Revision: rev}
		l.manifests[ref] = newManifest(t, ref, testCommit, artifact.File{Path: "a", Size: 1, SHA256: artifact.Digest{1}, LFS: true})
	}
	m := New(Options{Library: l, Now: func() time.Time { return now }})
	lists := func(query string) refLists {
		t.Helper()
		w := newRecorder(t, m, http.MethodGet, "/api/models/acme/tiny/refs"+query)
		var got refLists
		w.decode(t, &got)
		return got
	}
	said := func(list []refEntry) string {
		var names []string
		for _, e := range list {
			names = append(names, e.Name+"="+e.Ref)
			if e.Target != testCommit {
				t.Errorf("%s targets %s", e.Name, e.Target)
			}
		}
		return strings.Join(names, " ")
	}
	got := lists("?include_prs=1")
	for want, list := range map[string][]refEntry{
		"main=refs/heads/main dev/one=refs/heads/dev/one": got.Branches,
		"v1=refs/tags/v1":              got.Tags,
		"parquet=refs/convert/parquet": got.Converts,
		"refs/pr/1=refs/pr/1":          got.PullRequests,
	} {
		if said(list) != want {
			t.Errorf("got %q, want %q", said(list), want)
		}
	}
	if got := lists(""); got.PullRequests != nil || got.Tags == nil {
		t.Errorf("pull requests are listed unasked: %+v", got)
	}
	if l.told != 1 {
		t.Errorf("the source was asked %d times", l.told)
	}
	// What was a tag still is one while the source is away, and a herd waits once.
	l.err, l.names = errors.New("away"), nil
	now = now.Add(namesFor)
	for range 3 {
		if got := lists(""); said(got.Tags) != "v1=refs/tags/v1" {
			t.Errorf("tags without the source: %q", said(got.Tags))
		}
	}
	if l.told != 2 {
		t.Errorf("the source was asked %d times", l.told)
	}
}

func TestCommitsAreDatedByWhenTheyBecameKnown(t *testing.T) {
	t.Parallel()
	ref := artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/tiny", Revision: "main"}
	l := &teller{fakeLibrary: &fakeLibrary{manifests: map[artifact.Ref]*artifact.Manifest{
		ref: newManifest(t, ref, testCommit, artifact.File{Path: "a", Size: 1, SHA256: artifact.Digest{1}, LFS: true}),
	}}, since: time.Date(2026, 11, 1, 2, 3, 4, 5e6, time.UTC)}
	var got []struct{ ID, Date string }
	newRecorder(t, New(Options{Library: l}), http.MethodGet, "/api/models/acme/tiny/commits/main").decode(t, &got)
	if len(got) != 1 || got[0].ID != testCommit || got[0].Date != "2026-11-01T02:03:04.005Z" {
		t.Errorf("got %+v", got)
	}
	// The repository's info has the same, always the same, and none where it is
	// not known: clients name what they build by it.
	for since, want := range map[time.Time]string{l.since: "2026-11-01T02:03:04.005Z", {}: ""} {
		l.since = since
		var info struct{ LastModified string }
		newRecorder(t, New(Options{Library: l}), http.MethodGet, "/api/models/acme/tiny").decode(t, &info)
		if info.LastModified != want {
			t.Errorf("lastModified is %q, want %q", info.LastModified, want)
		}
	}
}

// newRecorder asks a Mirror over a connection of its own.
func newRecorder(t *testing.T, m *Mirror, method, target string) answer {
	t.Helper()
	s := serverOf(t, m)
	return ask(t, method, s+target, "")
}

// serverOf serves m as NewServer does, on loopback.
func serverOf(t *testing.T, m *Mirror) string {
	t.Helper()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := NewServer(m)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(listener)
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-done
	})
	return "http://" + listener.Addr().String()
}

// raw sends bytes and reads an answer.
func raw(t *testing.T, base, text string) *http.Response {
	t.Helper()
	u, err := url.Parse(base)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", u.Host)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := fmt.Fprint(conn, text); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatalf("%.40q: %v", text, err)
	}
	_ = conn.Close() // before the body, which may promise more than comes
	_ = resp.Body.Close()
	return resp
}

func TestEveryRouteThatAnswersGETAnswersHEADWithoutABody(t *testing.T) {
	t.Parallel()
	_, s := newSmall(t, Options{}, onDisk(t, pattern(10)))
	for _, path := range []string{
		"/api/models/acme/tiny", "/api/models/acme/tiny/revision/main", "/api/models/acme/tiny/tree/main",
		"/api/models/acme/tiny/refs", "/api/models/acme/tiny/commits/main", "/api/models/acme/tiny/auth-check",
		"/acme/tiny/resolve/main/config.json", "/acme/tiny/resolve/main/weights.bin", "/acme/tiny/raw/main/weights.bin",
		"/acme/tiny/raw/main/config.json", "/api/whoami-v2", "/api/models/acme/tiny/tree/main/additional_chat_templates", "/nothing",
	} {
		get, head := ask(t, http.MethodGet, s.URL+path, ""), ask(t, http.MethodHead, s.URL+path, "")
		if head.StatusCode != get.StatusCode || len(head.body) != 0 || head.ContentLength != int64(len(get.body)) {
			t.Errorf("%s: HEAD %d of %d bytes, GET %d of %d", path, head.StatusCode, head.ContentLength, get.StatusCode, len(get.body))
		}
		for _, name := range []string{"Etag", "X-Repo-Commit", "X-Error-Code", "X-Error-Message", "Content-Type", "X-Linked-Etag", "Accept-Ranges"} {
			if head.Header.Get(name) != get.Header.Get(name) {
				t.Errorf("%s: %s is %q and %q", path, name, head.Header.Get(name), get.Header.Get(name))
			}
		}
	}
}

func TestConditionsTakeEveryFormOfATag(t *testing.T) {
	t.Parallel()
	_, s := newSmall(t, Options{}, onDisk(t, pattern(100)))
	tag := ask(t, http.MethodHead, s.URL+weights, "").Header.Get("Etag")
	bare := strings.Trim(tag, `"`)
	for _, form := range []string{tag, "W/" + tag, bare, `"x", ` + tag, `"x",W/` + tag} {
		for _, c := range []struct {
			header []string
			status int
		}{
			{[]string{"If-None-Match", form}, http.StatusNotModified},
			{[]string{"If-Match", form}, http.StatusOK},
			{[]string{"If-Range", form, "Range", "bytes=0-9"}, http.StatusPartialContent},
		} {
			a := ask(t, http.MethodGet, s.URL+weights, "", c.header...)
			if a.StatusCode != c.status || a.Header.Get("X-Repo-Commit") != testCommit || a.Header.Get("Etag") != tag {
				t.Errorf("%v: %d, want %d, with headers %v", c.header, a.StatusCode, c.status, a.Header)
			}
		}
	}
	for _, c := range []struct {
		header []string
		status int
		code   string
	}{
		{[]string{"If-Match", "W/" + `"other"`}, http.StatusPreconditionFailed, "PreconditionFailed"},
		{[]string{"If-None-Match", "*"}, http.StatusNotModified, ""},
		{[]string{"If-Match", "*"}, http.StatusOK, ""},
		{[]string{"If-Range", "Sun, 01 Nov 2026 12:00:09 GMT", "Range", "bytes=0-9"}, http.StatusOK, ""},
		{[]string{"Range", "bytes=100-"}, http.StatusRequestedRangeNotSatisfiable, "RangeNotSatisfiable"},
	} {
		a := ask(t, http.MethodGet, s.URL+weights, "", c.header...)
		if a.StatusCode != c.status || a.Header.Get("X-Error-Code") != c.code || a.Header.Get("X-Repo-Commit") != testCommit {
			t.Errorf("%v: %d %q, want %d %q", c.header, a.StatusCode, a.Header.Get("X-Error-Code"), c.status, c.code)
		}
	}
}

func TestRequestsThatNoClientSendsAreRefusedWithACode(t *testing.T) {
	t.Parallel()
	m := newMirror(t, Options{}, onDisk(t, pattern(10)))
	base := serverOf(t, m)
	for text, status := range map[string]int{
		"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n":                                        http.StatusMethodNotAllowed,
		"DELETE /acme/tiny/resolve/main/config.json HTTP/1.1\r\nHost: x\r\n\r\n":       http.StatusMethodNotAllowed,
		"POST /api/models/acme/tiny HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n":  http.StatusMethodNotAllowed,
		"HEAD /api/models/acme/tiny/paths-info/main HTTP/1.1\r\nHost: x\r\n\r\n":       http.StatusMethodNotAllowed,
		"CONNECT x:1 HTTP/1.1\r\nHost: x:1\r\n\r\n":                                    http.StatusMethodNotAllowed,
		"GET /" + strings.Repeat("x", maxPath) + " HTTP/1.1\r\nHost: x\r\n\r\n":        http.StatusRequestURITooLong,
		"GET /acme/tiny/resolve/main/none HTTP/1.0\r\n\r\n":                            http.StatusNotFound,
		"GET http://other/acme/tiny/resolve/main/none HTTP/1.1\r\nHost: other\r\n\r\n": http.StatusNotFound,
	} {
		resp := raw(t, base, text)
		code := resp.Header.Get("X-Error-Code")
		if resp.StatusCode != status || code == "" {
			t.Errorf("%.60q: %d %q, want %d and a code", text, resp.StatusCode, code, status)
		}
	}
}

func TestPagesHaveAbsoluteAddressesForEveryClient(t *testing.T) {
	t.Parallel()
	m := newMirror(t, Options{PageSize: 1}, onDisk(t, pattern(10)))
	base := serverOf(t, m)
	for text, want := range map[string]string{
		"GET /api/models/acme/tiny/tree/main HTTP/1.1\r\nHost: hub.test\r\n\r\n": "<http://hub.test/api/",
		"GET /api/models/acme/tiny/tree/main HTTP/1.0\r\n\r\n":                   "<" + base + "/api/",
	} {
		if got := raw(t, base, text).Header.Get("Link"); !strings.HasPrefix(got, want) {
			t.Errorf("%.50q: link %q, want it to begin with %q", text, got, want)
		}
	}
}

func TestTheClientsOwnIDOfARequestIsLogged(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var logged bytes.Buffer
	log := slog.New(slog.NewJSONHandler(writerFunc(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return logged.Write(p)
	}), &slog.HandlerOptions{Level: slog.LevelDebug}))
	_, s := newSmall(t, Options{Log: log}, onDisk(t, pattern(10)))
	ask(t, http.MethodHead, s.URL+weights, "", "X-Amzn-Trace-Id", "trace-of-a-head")
	ask(t, http.MethodGet, s.URL+"/api/models/acme/none", "", "X-Amzn-Trace-Id", "trace-of-a-refusal"+strings.Repeat("x", 1000))
	mu.Lock()
	defer mu.Unlock()
	for _, want := range []string{`"trace":"trace-of-a-head"`, "mirror request refused", "trace-of-a-refusal"} {
		if !strings.Contains(logged.String(), want) {
			t.Errorf("the log lacks %s", want)
		}
	}
	if strings.Contains(logged.String(), strings.Repeat("x", maxTrace+1)) {
		t.Error("an id of any length is logged")
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
