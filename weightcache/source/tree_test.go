package source

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// FuzzTreePage reads a page as Resolve does: what CheckFiles lets through has
// names that stay inside the artifact, sizes it can hold and digests of one
// form, whatever the page says.
func FuzzTreePage(f *testing.F) {
	git, sum := strings.Repeat("b", 40), strings.Repeat("a", 64)
	for _, seed := range []string{
		`[]`, `null`, `{}`, `[null]`,
		`[{"type":"file","oid":"` + git + `","size":1,"path":"a"}]`,
		`[{"type":"directory","oid":"` + git + `","size":0,"path":"d"},{"type":"file","oid":"` + git + `","size":1,"path":"d/a"}]`,
		`[{"type":"file","oid":"` + git + `","size":135,"path":"w.safetensors","lfs":{"oid":"` + sum + `","size":7,"pointerSize":135},"xetHash":"` + sum + `"}]`,
		`[{"type":"file","oid":"` + git + `","size":1e3,"path":"../a"}]`,
		`[{"type":"file","oid":"` + git + `","size":-1,"path":"a\u0000b"}]`,
		`[{"type":"file","oid":"` + git + `","size":1,"path":"a","lfs":{"oid":"sha256:` + sum + `","size":9223372036854775807}}]`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var page []treeEntry
		if json.Unmarshal(data, &page) != nil {
			return
		}
		files, err := appendFiles(nil, page)
		if err != nil || artifact.CheckFiles(files, false) != nil {
			return
		}
		seen := map[string]bool{}
		for _, file := range files {
			switch {
			case seen[file.Path], strings.HasPrefix(file.Path, "/"), strings.Contains("/"+file.Path+"/", "/../"), strings.ContainsRune(file.Path, 0):
				t.Errorf("path %q was accepted", file.Path)
			case file.Size < 0:
				t.Errorf("size %d was accepted", file.Size)
			case file.SHA256.IsZero() && len(file.GitSHA1) != 40:
				t.Errorf("file %q has no digest to check it by", file.Path)
			}
			seen[file.Path] = true
		}
	})
}

// FuzzNextPage follows any Link header: the next page is on the configured
// origin, without credentials, or refused.
func FuzzNextPage(f *testing.F) {
	for _, seed := range []string{
		`<http://hub.test/api?cursor=2>; rel="next"`, `<?cursor=2>; rel=next`, `<//evil.test/>; rel="next"`,
		`<http://u:p@hub.test/>; rel="next"`, `<http://hub.test/a>; rel="prev", <http://hub.test/b>; rel="next"`, `<`, `<>;rel=next`,
	} {
		f.Add(seed)
	}
	hub, err := NewHub(HubOptions{Name: "hub", URL: "http://hub.test"})
	if err != nil {
		f.Fatal(err)
	}
	at, err := url.Parse("http://hub.test/api/models/a/b/tree/main?recursive=true")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, link string) {
		next, err := hub.nextPage(at, http.Header{"Link": {link}})
		if err == nil && next != nil && (next.Scheme != "http" || next.Host != "hub.test" || next.User != nil) {
			t.Errorf("%q leads to %s", link, next)
		}
	})
}
