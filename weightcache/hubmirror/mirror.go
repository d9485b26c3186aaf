// Package hubmirror is the facade behind HF_ENDPOINT: it answers the model
// hub's API and file routes for artifacts of a Library, as the hub's own
// clients expect. The agent mounts it on a listener; hub clients and engines
// call it. It never talks to an origin, keeps no bytes, never compresses and
// never hints at another way to fetch (xet).
//
// Metadata is answered from manifests, so a HEAD never waits for bytes. What
// is known is never answered with a 5xx, and no status is used as
// backpressure: clients give up on some and retry the others too fast.
// CONTRACT.md lists the routes.
package hubmirror

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Library holds the artifacts. Its errors wrap ErrNotAllowed, source.ErrNotFound
// (source.ErrNoRevision for a missing revision), source.ErrUnauthorized or
// source.ErrForbidden where the answer is definite; any other error means "not
// known now".
type Library interface {
	// Manifest resolves a hub ref: from the drive where it is pinned, else from its
	// source. The result is not changed by anybody.
	Manifest(ctx context.Context, ref artifact.Ref) (*artifact.Manifest, error)
	// Open gives access to a file of m, also while it is still being filled.
	Open(ctx context.Context, m *artifact.Manifest, path string) (Content, error)
}

// RefLister is implemented by a Library that knows which revisions of a
// repository it holds. Without it /refs names main alone, and a commit that no
// client led to since the start is asked for like any other revision.
type RefLister interface {
	// Refs maps revision names of a repository to commits.
	Refs(ctx context.Context, repo string) (map[string]string, error)
}

// Doubter is implemented by a Library that knows when bytes turn out wrong while
// nobody reads them. Without it only clients that are broken off start again.
type Doubter interface {
	// Doubtful says that a client may hold bytes of a file which are not those
	// of the file as it is now.
	Doubtful(file artifact.Digest) bool
}

// Content is one file being served.
type Content interface {
	// Size is the final length in bytes.
	Size() int64
	// File is the whole verified file once it is committed, nil before, and nil
	// for good where bytes that ReadAt handed out are not those of that file. It
	// was opened for this Content: its offset belongs to the caller, Close closes
	// it.
	File() *os.File
	// ReadAt gives at least one byte from off, waiting for it where it is not
	// there yet, and as many more as are there, up to len(p). Where bytes handed
	// out before turned out wrong, this and every later call gives an error that
	// wraps ErrMismatch, also once the file is committed.
	ReadAt(ctx context.Context, p []byte, off int64) (int, error)
	Close() error
}

// Errors by which a Library tells the mirror what happened.
var (
	// ErrNotAllowed means that no source may be asked for the ref.
	ErrNotAllowed = errors.New("not allowed")
	// ErrMismatch means that a file's bytes did not have its digest.
	ErrMismatch = errors.New("digest mismatch")
)

// Options configures a Mirror. Library is required.
type Options struct {
	Library Library
	// Auth says who may read what.
	Auth AuthOptions
	// Log receives what clients cannot be told; nil discards it.
	Log *slog.Logger
	// PublicURL is the base of the addresses in Link headers; empty means the
	// request's own scheme and Host.
	PublicURL string
	// PageSize is the number of tree entries per page; 0 means 1000.
	PageSize int
	// Streams bounds the bodies over SmallBody bytes served at once; 0 means
	// 64. Those beyond it have their headers and wait for a place.
	Streams int
	// WriteTimeout bounds the time a client may take for one piece of 4 MiB; 0
	// means 60 s. It ends streams to clients that are gone or stuck.
	WriteTimeout time.Duration
	// Now tells the time; nil means time.Now.
	Now func() time.Time
}

// Limits of the facade.
const (
	SmallBody    = 1 << 20   // bytes up to which a body needs no place
	maxPath      = 8 << 10   // bytes of a request's path and query
	maxForm      = 1 << 20   // bytes of a paths-info body
	maxAsked     = 10_000    // paths of one paths-info
	maxCommits   = 4096      // commits remembered with the ref that led there
	maxSuspect   = 1024      // files remembered as broken off
	suspectFor   = time.Hour // how long ranges of such a file restart at 0
	maxFamilies  = 32        // client families counted apart
	pieceBytes   = 4 << 20   // bytes per sendfile call and write deadline
	bufferBytes  = 256 << 10 // bytes per read of a file being filled
	maxHeader    = 32 << 10  // bytes of a request's headers
	headerWithin = 10 * time.Second
	idleFor      = 2 * time.Minute
)

// Mirror is the facade. It is an http.Handler, safe for concurrent use.
type Mirror struct {
	opts    Options
	places  places
	buffers sync.Pool
	stats   counters
	auth    *auth

	sessions sessions
	refNames refNames

	mu      sync.Mutex
	commits map[commitKey]artifact.Ref // the ref whose manifest had the commit
	suspect map[artifact.Digest]time.Time
}

type commitKey struct{ repo, commit string }

// New returns a Mirror. It starts nothing.
func New(opts Options) *Mirror {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.PageSize <= 0 {
		opts.PageSize = 1000
	}
	if opts.Streams <= 0 {
		opts.Streams = 64
	}
	if opts.WriteTimeout <= 0 {
		opts.WriteTimeout = 60 * time.Second
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	opts.PublicURL = strings.TrimRight(opts.PublicURL, "/")
	return &Mirror{
		opts: opts, places: places{free: opts.Streams},
		buffers: sync.Pool{New: func() any { b := make([]byte, bufferBytes); return &b }},
		commits: map[commitKey]artifact.Ref{}, suspect: map[artifact.Digest]time.Time{},
		auth: newAuth(opts.Auth, opts.Now),
	}
}

// NewServer wraps a Mirror with the limits a listener needs: header size,
// header time, the time for what a request sends behind them, and idle time. Bodies have no overall deadline: WriteTimeout ends
// those that make no progress.
func NewServer(m *Mirror) *http.Server {
	return &http.Server{
		Handler: identity.BodyWithin(m, headerWithin), ReadHeaderTimeout: headerWithin, IdleTimeout: idleFor, MaxHeaderBytes: maxHeader,
		DisableGeneralOptionsHandler: true, // OPTIONS * is refused like any other
		ErrorLog:                     slog.NewLogLogger(m.opts.Log.Handler(), slog.LevelDebug),
	}
}

// ServeHTTP answers one request.
func (m *Mirror) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	rt := parseRoute(r.URL.EscapedPath())
	m.stats.request(rt.kind, family(r.UserAgent()))
	m.opts.Log.LogAttrs(r.Context(), slog.LevelDebug, "mirror request",
		slog.String("method", r.Method), slog.String("path", r.URL.Path), traceOf(r))
	if len(r.RequestURI) > maxPath {
		m.refuse(w, r, refusal{http.StatusRequestURITooLong, "RequestTooLong", "path and query are longer than 8 KiB", ""})
		return
	}
	allowed := r.Method == http.MethodGet || r.Method == http.MethodHead
	if rt.kind == routePaths {
		allowed = r.Method == http.MethodPost
	}
	if !allowed {
		m.refuse(w, r, refusal{http.StatusMethodNotAllowed, "MethodNotAllowed", "this mirror is read only", ""})
		return
	}
	switch rt.kind {
	case routeWhoami:
		m.serveWhoami(w, r)
	case routeForeign:
		m.refuse(w, r, refusal{http.StatusNotFound, codeRepo, "this mirror holds models only", ""})
	case routeOther:
		m.refuse(w, r, refusal{http.StatusNotFound, "RouteNotFound", "this mirror has no such route", ""})
	default:
		m.serveRepo(w, r, rt)
	}
}

// serveRepo answers the routes that need a manifest.
func (m *Mirror) serveRepo(w http.ResponseWriter, r *http.Request, rt route) {
	manifest, ok := m.admitted(w, r, rt)
	if !ok {
		return
	}
	manifest, touch := m.steady(r, rt, manifest)
	switch rt.kind {
	case routeInfo:
		m.serveInfo(w, r, rt, manifest)
	case routeTree:
		m.serveTree(w, r, rt, manifest)
	case routePaths:
		m.servePaths(w, r, manifest)
	case routeRefs:
		m.serveRefs(w, r, rt, manifest)
	case routeCommits:
		m.serveCommits(w, r, manifest)
	case routeAuth:
		m.writeJSON(w, r, manifest.Commit, map[string]any{})
	case routeRaw, routeResolve:
		m.serveFile(w, r, rt, manifest, touch)
	}
}

// revisionOf is the name under which a revision is looked up.
func revisionOf(rev string) string {
	if rev == "HEAD" {
		return artifact.DefaultRevision
	}
	return rev
}

// manifest resolves a revision. Commits that a branch led to are found by way
// of that branch, so that one allowed ref is enough for the whole of a client's
// session and never asks the source again.
func (m *Mirror) manifest(ctx context.Context, repo, rev string) (*artifact.Manifest, error) {
	rev = revisionOf(rev)
	ref, err := artifact.ParseRef(artifact.Ref{Scheme: artifact.SchemeHub, Name: repo, Revision: rev}.String())
	if err != nil || ref.Name != repo || ref.Revision != rev {
		return nil, errBadRef
	}
	if holder, ok := m.opts.Library.(Holder); ok && len(rev) == 40 && artifact.ValidCommit(rev) == nil {
		if held, found := holder.Held(repo, rev); found {
			return held, nil
		}
	}
	m.mu.Lock()
	by, known := m.commits[commitKey{repo, rev}]
	m.mu.Unlock()
	if !known {
		by, known = m.heldAs(ctx, repo, rev)
	}
	if known && by != ref {
		if found, err := m.opts.Library.Manifest(ctx, by); err == nil && found.Commit == rev {
			return found, nil
		}
	}
	found, err := m.opts.Library.Manifest(ctx, ref)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for k := range m.commits {
		if len(m.commits) < maxCommits {
			break
		}
		delete(m.commits, k)
	}
	m.commits[commitKey{repo, found.Commit}] = ref
	return found, nil
}

// heldAs finds the ref by which the Library holds a commit, so that a client
// that kept the commit is answered after a restart too.
func (m *Mirror) heldAs(ctx context.Context, repo, commit string) (artifact.Ref, bool) {
	lister, ok := m.opts.Library.(RefLister)
	if !ok || len(commit) != 40 || artifact.ValidCommit(commit) != nil {
		return artifact.Ref{}, false
	}
	refs, err := lister.Refs(ctx, repo)
	if err != nil {
		m.opts.Log.LogAttrs(ctx, slog.LevelWarn, "list refs", slog.Any("error", err))
		return artifact.Ref{}, false
	}
	for name, at := range refs {
		if at == commit {
			return artifact.Ref{Scheme: artifact.SchemeHub, Name: repo, Revision: name}, true
		}
	}
	return artifact.Ref{}, false
}

// isSuspect says whether a client may hold wrong bytes of a file.
func (m *Mirror) isSuspect(d artifact.Digest) bool {
	if library, ok := m.opts.Library.(Doubter); ok && library.Doubtful(d) {
		return true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	at, found := m.suspect[d]
	if found && m.opts.Now().Sub(at) > suspectFor {
		delete(m.suspect, d)
		found = false
	}
	return found
}

// markSuspect remembers a file whose body was broken off. Past maxSuspect an
// arbitrary one is forgotten.
func (m *Mirror) markSuspect(d artifact.Digest) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for k := range m.suspect {
		if len(m.suspect) < maxSuspect {
			break
		}
		delete(m.suspect, k)
	}
	m.suspect[d] = m.opts.Now()
}
