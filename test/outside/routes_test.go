//go:build outside

package outside

import (
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/test/outside/rig"
)

var (
	commitID = regexp.MustCompile(`^[0-9a-f]{40}$`)
	digits   = regexp.MustCompile(`[0-9]+`)
	apiWords = []string{"revision", "tree", "paths-info", "refs", "commits", "auth-check"}
)

// routeOf writes a request as the recordings in testdata/routes do: names
// replaced by what they are, flags in lower case, positions by N.
func routeOf(x rig.Exchange) string {
	words := []string{x.Method, routePath(strings.Split(strings.Trim(x.Path, "/"), "/"), x.Path)}
	if x.Query != "" {
		pairs := strings.Split(x.Query, "&")
		for i, pair := range pairs {
			if low := strings.ToLower(pair); strings.HasSuffix(low, "=true") || strings.HasSuffix(low, "=false") {
				pairs[i] = low
			}
		}
		slices.Sort(pairs)
		words[1] += "?" + strings.Join(pairs, "&")
	}
	switch x.Range {
	case "":
	case "bytes=0-0", "bytes=0-":
		words = append(words, x.Range)
	default:
		words = append(words, digits.ReplaceAllString(x.Range, "N"))
	}
	if x.Status == 0 {
		return strings.Join(append(words, "none"), " ")
	}
	return strings.Join(append(words, strconv.Itoa(x.Status)), " ")
}

func routePath(segs []string, escaped string) string {
	if len(segs) > 2 && segs[0] == "api" && segs[1] == "models" {
		cut := min(2, len(segs)-2)
		if len(segs) > 3 && slices.Contains(apiWords, segs[3]) {
			cut = 1
		}
		path, tail := "/api/models/{repo}", segs[2+cut:]
		if len(tail) > 0 {
			path += "/" + tail[0]
		}
		if len(tail) > 1 {
			path += "/" + revisionKind(tail[1])
		}
		if len(tail) > 2 {
			path += "/{path}"
		}
		return path
	}
	if len(segs) > 4 && (segs[2] == "resolve" || segs[2] == "raw") {
		return "/{repo}/" + segs[2] + "/" + revisionKind(segs[3]) + "/{file}"
	}
	return escaped
}

func revisionKind(rev string) string {
	switch {
	case rev == "main" || rev == "HEAD":
		return rev
	case commitID.MatchString(rev):
		return "{commit}"
	}
	return "{branch}"
}

// wantRoutes compares what a client asked, and how it was answered, with a
// recording, as sets.
func wantRoutes(t *testing.T, seen []rig.Exchange, recording string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "routes", recording+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			want = append(want, line)
		}
	}
	for _, x := range seen {
		got = append(got, routeOf(x))
	}
	for _, list := range []*[]string{&want, &got} {
		slices.Sort(*list)
		*list = slices.Compact(*list)
	}
	for _, line := range got {
		if !slices.Contains(want, line) {
			t.Errorf("%s: the client asked for %q, which the recording lacks", recording, line)
		}
	}
	for _, line := range want {
		if !slices.Contains(got, line) {
			t.Errorf("%s: the recording has %q, which the client did not ask for", recording, line)
		}
	}
}

// wantBearable fails where the mirror answered what clients do not bear: any
// 5xx or 429, or an error without a code of its own.
func wantBearable(t *testing.T, seen []rig.Exchange) {
	t.Helper()
	for _, x := range seen {
		switch {
		case x.Status >= http.StatusInternalServerError, x.Status == http.StatusTooManyRequests:
			t.Errorf("the mirror answered %s %s with %d", x.Method, x.Path, x.Status)
		case x.Status >= http.StatusBadRequest && x.Code == "":
			t.Errorf("the mirror answered %s %s with %d and no X-Error-Code", x.Method, x.Path, x.Status)
		}
	}
}

// wantNoRetries fails where a client asked for anything twice, or left a body.
func wantNoRetries(t *testing.T, seen []rig.Exchange) {
	t.Helper()
	asked := map[string]int{}
	for _, x := range seen {
		request := strings.Join([]string{x.Method, x.Path, x.Query, x.Range}, " ")
		if asked[request]++; asked[request] == 2 {
			t.Errorf("%s was asked again", request)
		}
		if x.Cut || x.Status == 0 {
			t.Errorf("%s broke off after %d bytes with status %d", request, x.Bytes, x.Status)
		}
	}
}

// startRecorder puts a Recorder before a mirror.
func startRecorder(t *testing.T, r *rig.Rig, mirror string) *rig.Recorder {
	t.Helper()
	rec, err := r.Record(t.Context(), mirror)
	if err != nil {
		t.Fatal(err)
	}
	return rec
}
