package hubmirror

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

type recording struct {
	Fixture  string
	Client   string
	Requests []struct {
		Method, Target, Body string
		Header               map[string]string
		Want                 struct {
			Status int
			Header map[string]string
			Bytes  int64
			Body   json.RawMessage
		}
	}
}

func readJSON(t *testing.T, name string, into any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, into); err != nil {
		t.Fatal(err)
	}
}

// recordedLibrary holds the repositories of the recordings; contents are
// zeros of the right size.
func recordedLibrary(t *testing.T) *fakeLibrary { return libraryOf(t, "repos.json") }

func libraryOf(t *testing.T, list string) *fakeLibrary {
	t.Helper()
	var repos []struct {
		ID, Revision, Commit string
		Files                []artifact.File
	}
	readJSON(t, list, &repos)
	l := &fakeLibrary{manifests: map[artifact.Ref]*artifact.Manifest{}, errs: map[string]error{"acme/gated-llama": source.ErrUnauthorized}}
	for _, r := range repos {
		ref := artifact.Ref{Scheme: artifact.SchemeHub, Name: r.ID, Revision: r.Revision}
		l.manifests[ref] = newManifest(t, ref, r.Commit, r.Files...)
	}
	dir := t.TempDir()
	l.open = func(m *artifact.Manifest, path string) (Content, error) {
		f, _ := m.File(path)
		file, err := os.CreateTemp(dir, "zeros")
		if err != nil {
			return nil, err
		}
		return committed{file}, file.Truncate(f.Size)
	}
	return l
}

// Recordings that ask for a commit do so after the branch led there in
// another run; the mirror learns that from a first question.
func TestRecordedClientsGetTheAnswersThatSatisfiedThem(t *testing.T) {
	t.Parallel()
	var recordings []recording
	readJSON(t, "replay.json", &recordings)
	server := httptest.NewServer(New(Options{Library: recordedLibrary(t)}))
	t.Cleanup(server.Close)
	for _, repo := range []string{"acme/tiny-llama", "acme/smol-gguf"} {
		if a := ask(t, http.MethodGet, server.URL+"/api/models/"+repo+"/revision/main", ""); a.StatusCode != http.StatusOK {
			t.Fatalf("revision of %s: %s", repo, a.Status)
		}
	}
	for _, rec := range recordings {
		t.Run(rec.Fixture, func(t *testing.T) {
			t.Parallel()
			for _, q := range rec.Requests {
				name := q.Method + " " + q.Target + " " + q.Header["Range"]
				var header []string
				for k, v := range q.Header {
					header = append(header, k, v)
				}
				a := ask(t, q.Method, server.URL+q.Target, q.Body, header...)
				want := q.Want
				if a.err != nil {
					t.Errorf("%s: body: %v", name, a.err)
				}
				if strings.Contains(q.Target, "/gated-llama/") {
					if (a.StatusCode != 401 && a.StatusCode != 403) || a.Header.Get("X-Error-Code") != "GatedRepo" {
						t.Errorf("%s: %s, code %q", name, a.Status, a.Header.Get("X-Error-Code"))
					}
					continue
				}
				if strings.Contains(q.Target, "/auth-check") {
					want.Status = http.StatusOK // the recording hub lacked the route
				}
				if a.StatusCode != want.Status {
					t.Errorf("%s: status %d, want %d", name, a.StatusCode, want.Status)
					continue
				}
				file := strings.Contains(q.Target, "/resolve/") && want.Status < 300
				if file && int64(len(a.body)) != want.Bytes {
					t.Errorf("%s: %d bytes, want %d", name, len(a.body), want.Bytes)
				}
				for k, v := range want.Header {
					if (k == "Content-Length" || k == "Content-Type") && !file {
						continue
					}
					if k == "ETag" && strings.Contains(q.Target, "README.md") && strings.Contains(q.Target, "smol") {
						continue
					}
					if got := a.Header.Get(k); got != v {
						t.Errorf("%s: %s is %q, want %q", name, k, got, v)
					}
				}
				if want.Status >= 400 && a.Header.Get("X-Error-Code") == "" {
					t.Errorf("%s: an error without a code", name)
				}
				for _, hint := range []string{"X-Xet-Hash", "X-Xet-Refresh-Route", "Content-Encoding", "Transfer-Encoding"} {
					if a.Header.Get(hint) != "" {
						t.Errorf("%s: sends %s", name, hint)
					}
				}
				if len(want.Body) > 0 {
					compareBody(t, name, a.body, want.Body)
				}
			}
		})
	}
}

// compareBody compares what clients read: trees and paths entry by entry, and
// of infos and refs the keys they use.
func compareBody(t *testing.T, name string, got, want []byte) {
	t.Helper()
	if strings.Contains(name, "/commits/") {
		return
	}
	var g, w any
	if err := json.Unmarshal(got, &g); err != nil {
		t.Errorf("%s: %v", name, err)
		return
	}
	if err := json.Unmarshal(want, &w); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(needed(w), needed(g)); diff != "" {
		t.Errorf("%s: body differs (-want +got):\n%s", name, diff)
	}
}

// needed reduces a body to the keys of the contract. Object ids of folders
// have no meaning to clients.
func needed(v any) any {
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			if m, ok := e.(map[string]any); ok && m["type"] == "directory" {
				delete(m, "oid")
			}
		}
		return v
	case map[string]any:
		out := map[string]any{}
		for _, k := range []string{"id", "sha", "siblings", "private", "gated"} {
			if x, ok := v[k]; ok {
				out[k] = x
			}
		}
		if branches, ok := v["branches"].([]any); ok {
			i := slices.IndexFunc(branches, func(b any) bool {
				m, isMap := b.(map[string]any)
				return isMap && m["name"] == "main"
			})
			if i >= 0 {
				out["main"] = branches[i]
			}
		}
		return out
	}
	return v
}
