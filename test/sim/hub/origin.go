// Package hub is a hub origin for demos, tests and benchmarks: it speaks the
// part of the model hub's HTTP API that pulls use, over plain folders, and can
// be told to misbehave. `hearth up` and the tests of the weight cache call it.
// It keeps no state on a drive, writes nothing into its folders and is never part
// of a production path.
//
// A folder "org/name" below the root is the branch main of that repository; a
// folder "org/name@rev" (rev percent-encoded) is another branch, or a tag where
// rev looks like "v1". Commit ids are digests of the content, so equal folders
// have equal commits.
package hub

import (
	"fmt"
	"maps"
	"net/http"
	"sync"
	"sync/atomic"

	"golang.org/x/time/rate"

	"github.com/hearth-dev/hearth/units"
)

// Redirects says how a resolve of an LFS file answers.
type Redirects int

// Styles of redirects.
const (
	Direct           Redirects = iota // 200 or 206 with the body
	RedirectAbsolute                  // 302 to Options.CDN, another origin
	RedirectRelative                  // 302 to a path of this origin
)

// Options configures an Origin. Dir is required.
type Options struct {
	Dir string // root that holds the repositories
	// PageSize is the number of tree entries per page; 0 means 1000.
	PageSize int
	// Redirect is the style of answers for LFS files.
	Redirect Redirects
	// Token, when set, is admitted to every repository. Gated and Private say
	// who else may read which ones, see SetGated and SetPrivate.
	Token          string
	Gated, Private []string
	// Rate bounds the bytes per second of all file bodies together; 0 is
	// unlimited.
	Rate units.Rate
}

// Origin serves the hub API. It is safe for concurrent use.
type Origin struct {
	opts     Options
	limiter  *rate.Limiter
	hashes   hashCache
	requests atomic.Int64
	bytes    atomic.Int64

	mu        sync.Mutex
	access    access
	cdn       string           // base URL of the second listener
	fault     FaultFunc        // consulted before every answer
	faultList []scheduledFault // one-shot faults, in order
	fileBytes map[string]int64 // "org/name/path" -> body bytes written
	routes    map[string]int64 // route -> requests
}

// New returns an Origin over opts.Dir. It starts nothing and reads nothing.
func New(opts Options) *Origin {
	if opts.PageSize <= 0 {
		opts.PageSize = 1000
	}
	o := &Origin{opts: opts, fileBytes: map[string]int64{}, routes: map[string]int64{}}
	o.access.gated, o.access.private = opts.Gated, opts.Private
	o.SetRate(opts.Rate)
	return o
}

// burst is the largest piece of a body written at once, in bytes.
const burst = 64 << 10

// SetRate changes Options.Rate for bodies from here on, also those in flight.
func (o *Origin) SetRate(r units.Rate) {
	limit := rate.Inf
	if r > 0 {
		limit = rate.Limit(r)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.limiter == nil {
		o.limiter = rate.NewLimiter(limit, burst)
		return
	}
	o.limiter.SetLimit(limit)
}

// SetCDN names the base URL at which CDN is served, for RedirectAbsolute.
func (o *Origin) SetCDN(base string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.cdn = base
}

// Requests counts the requests seen, those to the CDN included.
func (o *Origin) Requests() int64 { return o.requests.Load() }

// Bytes counts the bytes of file bodies written. Metadata answers are not
// counted.
func (o *Origin) Bytes() int64 { return o.bytes.Load() }

// FileBytes counts the body bytes written of one file, named "org/name/path".
func (o *Origin) FileBytes(name string) int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.fileBytes[name]
}

// Routes counts requests by kind: info, tree, refs, resolve, cdn, other.
func (o *Origin) Routes() map[string]int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.routes)
}

func (o *Origin) countRoute(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.routes[name]++
}

func (o *Origin) countBody(name string, n int64) {
	o.bytes.Add(n)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.fileBytes[name] += n
}

// CDN is the handler of the second listener, to which RedirectAbsolute sends
// clients. It refuses requests that carry Authorization, as a signed address
// does.
func (o *Origin) CDN() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		o.requests.Add(1)
		if r.Header.Get("Authorization") != "" {
			http.Error(w, "only one auth mechanism allowed", http.StatusBadRequest)
			return
		}
		o.serveCDN(w, r)
	})
}

// fail writes an error as the hub does: code and message as headers.
func fail(w http.ResponseWriter, status int, code, message, commit string) {
	h := w.Header()
	if code != "" {
		h.Set("X-Error-Code", code)
	}
	h.Set("X-Error-Message", message)
	if commit != "" {
		h.Set("X-Repo-Commit", commit)
	}
	h.Set("Content-Type", "application/json; charset=utf-8")
	w.WriteHeader(status)
	_, _ = fmt.Fprintf(w, "{\"error\":%q}", message)
}
