package weightcache

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

func TestOnePauseAskedForHoldsEveryStreamOfThatSource(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := newMemSource(model(4, 3*testSegment))
		var mu sync.Mutex
		var until time.Time
		early, opens := 0, 0
		src.fault = func(_ artifact.File, _, _ int64, body []byte) (io.Reader, error) {
			mu.Lock()
			defer mu.Unlock()
			if opens++; opens == 6 {
				until = time.Now().Add(90 * time.Second)
				return nil, &source.Error{Source: "mem", Op: "open", Status: 429, RetryAfter: 90 * time.Second, Err: source.ErrThrottled}
			}
			if time.Now().Before(until) {
				early++
			}
			// Its body takes a second, which passes only once nobody has anything else
			// to do: whoever is to hear of the pause has heard of it by then.
			return &late{body: bytes.NewReader(body)}, nil
		}
		fsys := durabletest.New()
		if err := fsys.Mkdir("/var", 0o755); err != nil {
			t.Fatal(err)
		}
		s, err := startSession(fsys, src)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.puller.Ensure(t.Context(), testRef, EnsureOptions{}); err != nil {
			t.Fatal(err)
		}
		// Requests that had begun when the answer came may still be under way.
		if early > cap(s.puller.tokens) {
			t.Errorf("%d requests were sent into the pause", early)
		}
		if opens < 10 || until.IsZero() {
			t.Errorf("%d requests in all: the pause was never met", opens)
		}
	})
}

// late is a body that begins a second after it was asked for.
type late struct {
	body  io.Reader
	begun bool
}

// Read implements io.Reader.
func (l *late) Read(p []byte) (int, error) {
	if !l.begun {
		l.begun = true
		second := time.NewTimer(time.Second)
		<-second.C
	}
	return l.body.Read(p)
}

// hubRig is a puller over a real Hub source and an origin with faults.
func hubRig(t *testing.T) (*rig, *hub.Origin, string) {
	t.Helper()
	root := t.TempDir()
	files := model(2, 5*testSegment)
	for name, data := range files {
		path := filepath.Join(root, "acme", "tiny", filepath.FromSlash(name))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, data, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	origin := hub.New(hub.Options{Dir: root, Redirect: hub.RedirectAbsolute, Token: "first", Gated: []string{"*"}})
	server, cdn := httptest.NewServer(origin), httptest.NewServer(origin.CDN())
	t.Cleanup(server.Close)
	t.Cleanup(cdn.Close)
	origin.SetCDN(cdn.URL)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("first"), 0o600); err != nil {
		t.Fatal(err)
	}
	h, err := source.NewHub(source.HubOptions{Name: "hub", URL: server.URL, TokenFile: token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	r := newRig(t, newMemSource(files), func(_ *Options, po *PullerOptions) {
		po.Sources = []Rule{{Source: h, Refs: []string{"acme/*"}}}
	})
	return r, origin, token
}

// TestFaultsOfAnOriginInMidPullEndInTheRightFiles gives each fault to a
// few answers in the middle of a pull that must come to its end all the same.
func TestFaultsOfAnOriginInMidPullEndInTheRightFiles(t *testing.T) {
	t.Parallel()
	soon := http.Header{"Retry-After": {"0.01"}}
	for name, c := range map[string]struct {
		where string // part of the path
		fault hub.Fault
	}{
		"signed address expired":       {"/cdn/", hub.Fault{Status: 403}},
		"signed address unauthorised":  {"/cdn/", hub.Fault{Status: 401}},
		"credential refused for a bit": {"/resolve/", hub.Fault{Status: 401}},
		"429 with Retry-After":         {"/resolve/", hub.Fault{Status: 429, Header: soon}},
		"429 with RateLimit":           {"/resolve/", hub.Fault{Status: 429, Header: http.Header{"Ratelimit": {`"resolvers";r=0;t=0.01`}}}},
		"500":                          {"/cdn/", hub.Fault{Status: 500}},
		"503 with Retry-After":         {"/resolve/", hub.Fault{Status: 503, Header: soon}},
		"dropped before an answer":     {"/cdn/", hub.Fault{Drop: true}},
		"body cut":                     {"/cdn/", hub.Fault{CutAfter: 1000}},
		"whole file for a range":       {"/cdn/", hub.Fault{IgnoreRange: true}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, origin, _ := hubRig(t)
			var met, given atomic.Int64
			origin.SetFault(func(req *http.Request) *hub.Fault {
				// The first answers are good: the fault comes in mid-pull.
				if strings.Contains(req.URL.Path, c.where) && strings.HasSuffix(req.URL.Path, ".safetensors") &&
					met.Add(1) > 3 && given.Add(1) <= 3 {
					f := c.fault
					return &f
				}
				return nil
			})
			m := r.ensure(t)
			if given.Load() < 3 {
				t.Fatalf("the fault was met %d times", given.Load())
			}
			if v, err := r.puller.Verify(t.Context(), testRef); err != nil || !v.OK() {
				t.Errorf("verify: %+v, %v", v, err)
			}
			// Nothing whole is fetched again: what was cut goes on where it ended.
			if got, size := r.puller.Stats().OriginBytes, m.Size(); got != size {
				t.Errorf("%d bytes fetched of %d", got, size)
			}
		})
	}
}

func TestACredentialReplacedInMidPullIsTakenUpAndThePullGoesOn(t *testing.T) {
	t.Parallel()
	r, origin, token := hubRig(t)
	var asked atomic.Int64
	var once sync.Once
	origin.SetFault(func(req *http.Request) *hub.Fault {
		if !strings.Contains(req.URL.Path, "/resolve/") || !strings.HasSuffix(req.URL.Path, ".safetensors") || asked.Add(1) < 8 {
			return nil
		}
		if req.Header.Get("Authorization") == "Bearer second" {
			req.Header.Set("Authorization", "Bearer first") // what the origin knows
			return nil
		}
		once.Do(func() {
			if err := os.WriteFile(token, []byte("second"), 0o600); err != nil {
				t.Error(err)
			}
		})
		return &hub.Fault{Status: 401}
	})
	m := r.ensure(t)
	if got := r.puller.Stats().OriginBytes; got != m.Size() {
		t.Errorf("%d bytes fetched of %d", got, m.Size())
	}
}

func TestACredentialRefusedFromTheStartIsFinalAtOnce(t *testing.T) {
	t.Parallel()
	r, origin, _ := hubRig(t)
	var asked atomic.Int64
	origin.SetFault(func(req *http.Request) *hub.Fault {
		asked.Add(1)
		return &hub.Fault{Status: 401}
	})
	_, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{})
	if !errors.Is(err, source.ErrUnauthorized) || asked.Load() != 1 {
		t.Errorf("%v after %d requests", err, asked.Load())
	}
}
