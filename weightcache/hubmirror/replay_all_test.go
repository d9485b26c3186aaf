package hubmirror

import (
	"cmp"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
)

// recorded is one run of a client: what it asked, by which routes, and, where
// the hub it ran against had no faults, what satisfied it.
type recorded struct {
	Fixture, Client string
	Faults          bool
	Routes          []string // "METHOD kind", read off the recording by its own rules
	Requests        []struct {
		Method, Target, Range, ContentType, Body string
		Status                                   int
		Code, Commit, ContentRange, ETag         string
	}
}

// Routes that recorded clients asked for and that the mirror refuses on purpose.
var refusedRoutes = map[string]bool{
	"GET other":  true, // agent harnesses, xet tokens, targets of a hub's redirects
	"HEAD other": true,
}

func TestEveryRecordedRequestIsAnsweredDefinitelyByItsRoute(t *testing.T) {
	t.Parallel()
	var all []recorded
	readJSON(t, "replay_all.json", &all)
	if len(all) < 100 {
		t.Fatalf("%d recordings", len(all))
	}
	for _, rec := range all {
		t.Run(rec.Fixture, func(t *testing.T) {
			t.Parallel()
			m := New(Options{Library: libraryOf(t, "repos_all.json")})
			routes := map[string]bool{}
			for _, q := range rec.Requests {
				req := httptest.NewRequestWithContext(t.Context(), q.Method, q.Target, strings.NewReader(q.Body))
				for name, value := range map[string]string{"Range": q.Range, "Content-Type": q.ContentType} {
					if value != "" {
						req.Header.Set(name, value)
					}
				}
				kind := parseRoute(req.URL.EscapedPath()).kind
				routes[q.Method+" "+kind.String()] = true
				before := m.Stats().Requests[kind.String()]
				w := httptest.NewRecorder()
				m.ServeHTTP(w, req)
				name := q.Method + " " + q.Target + " " + q.Range
				if m.Stats().Requests[kind.String()] != before+1 {
					t.Errorf("%s: not counted as %s", name, kind)
				}
				h := w.Header()
				if w.Code >= 500 || w.Code >= 300 && w.Code < 400 {
					t.Errorf("%s: status %d", name, w.Code)
				}
				if w.Code >= 400 && (h.Get("X-Error-Code") == "" || h.Get("X-Error-Message") == "") {
					t.Errorf("%s: status %d without a code", name, w.Code)
				}
				for _, hint := range []string{"X-Xet-Hash", "X-Xet-Refresh-Route", "Content-Encoding", "Location"} {
					if h.Get(hint) != "" {
						t.Errorf("%s: sends %s", name, hint)
					}
				}
				if rec.Faults || strings.Contains(q.Target, "/gated-llama") || strings.HasSuffix(q.Target, "/auth-check") {
					continue // what the recording hub said is not what is right
				}
				if w.Code != q.Status {
					t.Errorf("%s: status %d, want %d", name, w.Code, q.Status)
				}
				for header, want := range map[string]string{
					"X-Error-Code": q.Code, "X-Repo-Commit": q.Commit, "Content-Range": q.ContentRange, "Etag": q.ETag,
				} {
					if want != "" && h.Get(header) != want {
						t.Errorf("%s: %s is %q, want %q", name, header, h.Get(header), want)
					}
				}
			}
			if got := slices.Sorted(maps.Keys(routes)); !slices.Equal(got, rec.Routes) {
				t.Errorf("its routes are %q, the recording has %q", got, rec.Routes)
			}
		})
	}
}

func TestTheRecordingsCoverEveryRouteThatTheMirrorServes(t *testing.T) {
	t.Parallel()
	var all []recorded
	readJSON(t, "replay_all.json", &all)
	seen := map[string]bool{}
	families := map[string]bool{}
	for _, rec := range all {
		for _, r := range rec.Routes {
			seen[r] = true
		}
		client, _, _ := strings.Cut(rec.Client, " ")
		families[strings.TrimRight(client, "-.0123456789")] = true
	}
	for kind := routeInfo; kind < routeKinds; kind++ {
		method := http.MethodGet
		switch kind {
		case routePaths:
			method = http.MethodPost
		case routeRaw:
			method = http.MethodHead
		}
		if !seen[method+" "+kind.String()] {
			t.Errorf("no recording has %s %s", method, kind)
		}
	}
	for r := range seen {
		if strings.HasSuffix(r, " other") && !refusedRoutes[r] {
			t.Errorf("a recorded client asks by %q, which is no route", r)
		}
	}
	for _, want := range []string{"hub", "transformers", "vllm", "llama-server", "@huggingface/hub", "hf-hub", "docker/model-runner"} {
		if !families[want] {
			t.Errorf("no recording of %s; there are %v", want, slices.SortedFunc(maps.Keys(families), cmp.Compare))
		}
	}
}
