package source_test

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// TestResolveEndsWhereTheOriginFallsSilent has origins that begin an answer
// and never end it; a Resolve without a bound hangs the test.
func TestResolveEndsWhereTheOriginFallsSilent(t *testing.T) {
	t.Parallel()
	flush := func(w http.ResponseWriter, text string) {
		_, _ = io.WriteString(w, text)
		_ = http.NewResponseController(w).Flush()
	}
	commit := `{"sha":"` + strings.Repeat("a", 40) + `"}`
	stall := func(w http.ResponseWriter, r *http.Request) {
		flush(w, "[")
		<-r.Context().Done()
	}
	for name, c := range map[string]struct {
		info, tree http.HandlerFunc
		opts       source.HubOptions
	}{
		"commit stalls": {info: stall, opts: source.HubOptions{BodyTimeout: 20 * time.Millisecond}},
		"tree stalls":   {tree: stall, opts: source.HubOptions{BodyTimeout: 20 * time.Millisecond}},
		"refusal stalls": {info: func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusServiceUnavailable)
			stall(w, r)
		}},
		"tree trickles": {tree: func(w http.ResponseWriter, r *http.Request) {
			again := time.NewTicker(time.Millisecond)
			defer again.Stop()
			for r.Context().Err() == nil {
				flush(w, " ")
				<-again.C
			}
		}, opts: source.HubOptions{ListTimeout: 50 * time.Millisecond}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch tree := strings.Contains(r.URL.Path, "/tree/"); {
				case tree && c.tree != nil:
					c.tree(w, r)
				case !tree && c.info != nil:
					c.info(w, r)
				default:
					_, _ = io.WriteString(w, commit)
				}
			}))
			defer s.Close()
			c.opts.Name, c.opts.URL = "silent", s.URL
			h, err := source.NewHub(c.opts)
			if err != nil {
				t.Fatal(err)
			}
			defer h.Close()
			_, err = h.Resolve(t.Context(), artifact.Ref{Scheme: artifact.SchemeHub, Name: "a/b", Revision: "main"})
			var failed *source.Error
			if !errors.Is(err, source.ErrUnavailable) || !errors.As(err, &failed) || failed.Source != "silent" {
				t.Errorf("error %v, want %v", err, source.ErrUnavailable)
			}
		})
	}
}
