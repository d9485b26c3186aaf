package source_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// newAccessHub is an origin of acme/tiny and a source that reads it with a
// credential, or without one.
func newAccessHub(t *testing.T, credential bool, opts hub.Options, wrap func(http.Handler) http.Handler) (*hub.Origin, *source.Hub) {
	t.Helper()
	opts.Dir, opts.Token = t.TempDir(), secret
	writeFiles(t, filepath.Join(opts.Dir, "acme", "tiny"), content())
	origin := hub.New(opts)
	handler := http.Handler(origin)
	if wrap != nil {
		handler = wrap(origin)
	}
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	cdn := httptest.NewServer(origin.CDN())
	t.Cleanup(cdn.Close)
	origin.SetCDN(cdn.URL)
	options := source.HubOptions{Name: "test-hub", URL: server.URL}
	if credential {
		options.TokenFile = filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(options.TokenFile, []byte(secret), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	h, err := source.NewHub(options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return origin, h
}

var tinyRef = artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/tiny", Revision: "main"}

// silent makes an origin's info say that nothing is restricted, as mirrors do
// that know no access.
func silent(inner http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.Contains(r.URL.Path, "/revision/") {
			inner.ServeHTTP(w, r)
			return
		}
		recorded := httptest.NewRecorder()
		inner.ServeHTTP(recorded, r)
		var info map[string]any
		if err := json.Unmarshal(recorded.Body.Bytes(), &info); err != nil || recorded.Code != http.StatusOK {
			w.WriteHeader(recorded.Code)
			return
		}
		delete(info, "gated")
		delete(info, "private")
		_ = json.NewEncoder(w).Encode(info)
	})
}

func TestAccessIsWhatTheHubSaysOrRefusesToOneWithoutCredential(t *testing.T) {
	t.Parallel()
	all := []string{"*"}
	away := func(inner http.Handler) http.Handler {
		return silent(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") == "" {
				w.WriteHeader(http.StatusServiceUnavailable)
				return
			}
			inner.ServeHTTP(w, r)
		}))
	}
	login := func(inner http.Handler) http.Handler {
		return silent(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") == "" {
				http.Redirect(w, r, "http://login.invalid/", http.StatusFound)
				return
			}
			inner.ServeHTTP(w, r)
		}))
	}
	for name, c := range map[string]struct {
		credential bool
		opts       hub.Options
		wrap       func(http.Handler) http.Handler
		want       artifact.Access
	}{
		"open, read without a credential":          {false, hub.Options{}, nil, artifact.AccessOpen},
		"open, read with one":                      {true, hub.Options{}, nil, artifact.AccessOpen},
		"gated":                                    {true, hub.Options{Gated: all}, nil, artifact.AccessGated},
		"private":                                  {true, hub.Options{Private: all}, nil, artifact.AccessPrivate},
		"gated and not said":                       {true, hub.Options{Gated: all}, silent, artifact.AccessGated},
		"private and not said":                     {true, hub.Options{Private: all}, silent, artifact.AccessPrivate},
		"open and not said":                        {true, hub.Options{}, silent, artifact.AccessOpen},
		"the question has no answer":               {true, hub.Options{}, away, artifact.AccessUnknown},
		"the question leads to a place to sign in": {true, hub.Options{}, login, artifact.AccessUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, h := newAccessHub(t, c.credential, c.opts, c.wrap)
			l, err := h.Resolve(t.Context(), tinyRef)
			if err != nil || l.Access != c.want {
				t.Fatalf("access %q, %v, want %q", l.Access, err, c.want)
			}
			if again, err := h.Access(t.Context(), tinyRef, l.Commit); err != nil || again != c.want {
				t.Errorf("asked again %q, %v, want %q", again, err, c.want)
			}
		})
	}
}

func TestAFolderIsOpen(t *testing.T) {
	t.Parallel()
	f, _ := newDir(t)
	if l, err := f.Source.Resolve(t.Context(), f.Ref); err != nil || l.Access != artifact.AccessOpen {
		t.Errorf("%+v, %v", l, err)
	}
}

func TestAHubJudgesTheTokensOfOthers(t *testing.T) {
	t.Parallel()
	noRoute := func(inner http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/auth-check") {
				http.NotFound(w, r)
				return
			}
			inner.ServeHTTP(w, r)
		})
	}
	for name, c := range map[string]struct {
		redirect hub.Redirects
		wrap     func(http.Handler) http.Handler
	}{
		"direct": {hub.Direct, nil}, "redirect to another origin": {hub.RedirectAbsolute, nil},
		"redirect within": {hub.RedirectRelative, nil}, "no route to check by": {hub.Direct, noRoute},
	} {
		for _, private := range []bool{false, true} {
			opts := hub.Options{Redirect: c.redirect, Gated: []string{"*"}}
			if private {
				opts.Gated, opts.Private = nil, []string{"*"}
			}
			origin, h := newAccessHub(t, true, opts, c.wrap)
			origin.SetToken("alice", "acme/tiny")
			origin.SetToken("bob", "acme/other")
			l, err := h.Resolve(t.Context(), tinyRef)
			if err != nil {
				t.Fatal(err)
			}
			if err := h.AcceptsToken(t.Context(), l, "alice"); err != nil {
				t.Errorf("%s: one who is admitted: %v", name, err)
			}
			if err := h.KnowsToken(t.Context(), "bob"); err != nil {
				t.Errorf("%s: one with an account: %v", name, err)
			}
			refused := func(what string, err error) {
				t.Helper()
				if !errors.Is(err, source.ErrForbidden) && !errors.Is(err, source.ErrUnauthorized) && !errors.Is(err, source.ErrNotFound) {
					t.Errorf("%s: %s: %v", name, what, err)
				}
			}
			refused("one who is not admitted", h.AcceptsToken(t.Context(), l, "bob"))
			refused("a made-up token", h.AcceptsToken(t.Context(), l, "mallory"))
			refused("a made-up token's account", h.KnowsToken(t.Context(), "mallory"))
			refused("no token", h.AcceptsToken(t.Context(), l, ""))
			refused("no token's account", h.KnowsToken(t.Context(), ""))
			origin.RemoveToken("alice")
			refused("a revoked token", h.AcceptsToken(t.Context(), l, "alice"))
			other := *l
			other.Commit = strings.Repeat("0", 40)
			refused("a commit that is not there", h.AcceptsToken(t.Context(), &other, secret))
		}
	}
}

func TestWhatIsNoAnswerAboutATokenIsNeitherYesNorNo(t *testing.T) {
	t.Parallel()
	commit := strings.Repeat("ab", 20)
	l := &artifact.Listing{Ref: tinyRef, Commit: commit, Files: []artifact.File{{Path: "model.bin", Size: 1, Kind: artifact.Weights}}}
	for name, answer := range map[string]http.HandlerFunc{
		"unavailable": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) },
		"throttled":   func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTooManyRequests) },
		"a page of a proxy": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte("<html>please wait</html>"))
		},
		"another commit": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Repo-Commit", strings.Repeat("cd", 20))
		},
		"a place to sign in": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://login.invalid/", http.StatusFound)
		},
		"a loop": func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, r.URL.Path, http.StatusFound) },
		"cut":    func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, h := newAccessHub(t, false, hub.Options{}, func(http.Handler) http.Handler { return answer })
			for what, err := range map[string]error{
				"files": h.AcceptsToken(t.Context(), l, "hub_alice"), "account": h.KnowsToken(t.Context(), "hub_alice"),
			} {
				if err == nil || errors.Is(err, source.ErrForbidden) || errors.Is(err, source.ErrUnauthorized) || errors.Is(err, source.ErrNotFound) {
					t.Errorf("%s: %v", what, err)
				}
				if err != nil && strings.Contains(err.Error(), "hub_alice") {
					t.Errorf("%s: the error holds the token: %v", what, err)
				}
			}
		})
	}
}

func TestACallersTokenGoesToItsOriginAloneAndOursIsNeverBesideIt(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	seen := map[string][]string{} // by server
	see := func(server string, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		seen[server] = append(seen[server], r.Header.Get("Authorization"))
	}
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		see("elsewhere", r)
		w.Header().Set("X-Repo-Commit", strings.Repeat("ab", 20))
	}))
	t.Cleanup(elsewhere.Close)
	leads := func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			see("hub", r)
			http.Redirect(w, r, elsewhere.URL+r.URL.Path, http.StatusTemporaryRedirect)
		})
	}
	_, h := newAccessHub(t, true, hub.Options{}, leads)
	l := &artifact.Listing{Ref: tinyRef, Commit: strings.Repeat("ab", 20), Files: []artifact.File{{Path: "model.bin", Size: 1}}}
	ask := func(ctx context.Context) {
		if err := h.AcceptsToken(ctx, l, "hub_alice"); err == nil {
			t.Error("a redirect to another origin was taken for a yes")
		}
		if err := h.KnowsToken(ctx, "hub_alice"); err == nil {
			t.Error("a redirect to another origin was taken for an account")
		}
	}
	ask(t.Context())
	mu.Lock()
	defer mu.Unlock()
	if len(seen["elsewhere"]) > 0 {
		t.Errorf("another origin was asked, with %q", seen["elsewhere"])
	}
	for _, shown := range seen["hub"] {
		if shown != "Bearer hub_alice" {
			t.Errorf("the hub was shown %q", shown)
		}
	}
}

func TestAResolveDoesNotWaitLongForWhatIsToldToOneWithoutCredential(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	var once sync.Once
	free := func() { once.Do(func() { close(release) }) }
	_, h := newAccessHub(t, true, hub.Options{}, func(inner http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") == "" {
				select {
				case <-release:
				case <-r.Context().Done():
				}
			}
			inner.ServeHTTP(w, r)
		})
	})
	t.Cleanup(free)
	ctx, cancel := context.WithTimeout(t.Context(), 25*time.Second) // the answer's head alone may take 30 s
	defer cancel()
	l, err := h.Resolve(ctx, tinyRef)
	if err != nil || ctx.Err() != nil || l.Access != artifact.AccessUnknown {
		t.Errorf("listing %+v, %v, %v", l, err, ctx.Err())
	}
}
