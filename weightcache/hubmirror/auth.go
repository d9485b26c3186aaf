package hubmirror

import (
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// AuthOptions say who may read what. The zero value suits loopback: everybody
// reads what is open, nobody what its source restricts.
type AuthOptions struct {
	// Demand refuses callers without an identity: a client certificate that the
	// listener checked, a token that Named knows, or one that the source of the
	// artifact accepts. A listener that more than this node reaches must have it.
	Demand bool
	// OpenMetadata answers metadata of what is not restricted to callers without
	// an identity although Demand is set, for clients that show their token with
	// file requests only.
	OpenMetadata bool
	// Named gives the name of a token that the mirror itself knows by its
	// SHA-256. Such a token is never shown to a source. Nil knows none. It
	// compares in constant time.
	Named func(sum [sha256.Size]byte) (name string, known bool)
	// Grants open restricted artifacts without asking their source.
	Grants []Grant
	// Restricted says whether the files of a manifest are for those admitted
	// only; nil means m.Access.Restricted().
	Restricted func(m *artifact.Manifest) bool
	// Tokens asks sources about the tokens of callers; nil accepts none.
	Tokens TokenAsker
	// AcceptedFor is how long a source's yes to a token holds (15 min) and
	// RefusedFor a no (1 min). A yes older than AcceptedFor holds up to StaleFor
	// (24 h) while the source cannot be asked.
	AcceptedFor, RefusedFor, StaleFor time.Duration
	// Remembered bounds the answers of each kind that are kept; 0 means 4096.
	// Past it an old one is forgotten and asked for again.
	Remembered int
}

// Grant opens what Covers covers to those it names: "client/NAME", "agent/NAME"
// or "router/NAME" by certificate, "token/NAME" by a token that Named knows, or
// "any", everybody whom the listener admits.
type Grant struct {
	Who    []string
	Covers func(ref artifact.Ref) bool
}

// Anybody in a Grant means every caller that the listener admits.
const Anybody = "any"

// TokenAsker asks sources about tokens. Errors wrap source.ErrUnauthorized,
// source.ErrForbidden or source.ErrNotFound where a source says no; any other
// means "not known now".
type TokenAsker interface {
	// AskBearer is asked by listeners that demand an identity, before a ref is
	// looked up: nil where the one source that would be asked for it has an
	// account for the token's bearer. source.ErrNotFound: nothing can be told, as
	// more than one source might be asked for it or the one knows no accounts.
	AskBearer(ctx context.Context, ref artifact.Ref, token string) error
	// AskToken gives nil where the source lets the bearer of the token read the
	// manifest's files or, files being false, has an account for the bearer.
	AskToken(ctx context.Context, m *artifact.Manifest, token string, files bool) error
}

// codeUnauthorized is unknown to clients; a 401 needs no more.
const codeUnauthorized = "Unauthorized"

// maxTokenBytes is the longest bearer token that is looked at.
const maxTokenBytes = 4 << 10

// auth is the judgement over AuthOptions.
type auth struct {
	opts  AuthOptions
	table tokenTable
}

func newAuth(opts AuthOptions, now func() time.Time) *auth {
	if opts.Named == nil {
		opts.Named = func([sha256.Size]byte) (string, bool) { return "", false }
	}
	if opts.Restricted == nil {
		opts.Restricted = func(m *artifact.Manifest) bool { return m.Access.Restricted() }
	}
	return &auth{opts: opts, table: newTokenTable(opts, now)}
}

// caller is who sent a request. Only its token may be secret; it is never
// logged, and kept as a hash.
type caller struct {
	peer  string // "client/NAME" of a checked certificate, or empty
	named string // "token/NAME" of a token that the mirror knows, or empty
	token string // any other bearer token, or empty
	sum   [sha256.Size]byte
}

// known says that the caller is somebody without asking a source.
func (c caller) known() bool { return c.peer != "" || c.named != "" }

// name is what a caller is called towards itself.
func (c caller) name() string {
	if c.peer != "" {
		return c.peer
	}
	return c.named
}

// callerOf reads a request. The listener has checked the certificate against
// its authorities; one without a name of ours is nobody's.
func (a *auth) callerOf(r *http.Request) caller {
	var c caller
	if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
		if peer, err := identity.PeerOf(r.TLS.PeerCertificates[0]); err == nil {
			c.peer = string(peer.Role) + "/" + peer.Name
		}
	}
	shown := r.Header["Authorization"]
	if len(shown) != 1 {
		return c
	}
	scheme, token, _ := strings.Cut(shown[0], " ")
	token = strings.TrimSpace(token)
	if !strings.EqualFold(scheme, "bearer") || token == "" || len(token) > maxTokenBytes ||
		strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return c
	}
	c.sum = sha256.Sum256([]byte(token))
	if name, known := a.opts.Named(c.sum); known {
		c.named = "token/" + name
		return c
	}
	c.token = token
	return c
}

// metadata are the routes that OpenMetadata opens.
var metadata = map[routeKind]bool{routeInfo: true, routeTree: true, routePaths: true, routeRefs: true, routeCommits: true}

// stranger says that a request is to be refused before anything is looked up.
func (a *auth) stranger(c caller, rt route) bool {
	return a.opts.Demand && !c.known() && c.token == "" && !a.opened(rt)
}

// granted says whether a grant opens a manifest, asked for as ref, to the
// caller by name, and whether one opens it to anybody.
func (a *auth) granted(c caller, mf *artifact.Manifest, ref artifact.Ref) (named, anybody bool) {
	for _, g := range a.opts.Grants {
		if !g.Covers(mf.Ref) && !g.Covers(ref) {
			continue
		}
		named = named || c.peer != "" && slices.Contains(g.Who, c.peer) || c.named != "" && slices.Contains(g.Who, c.named)
		anybody = anybody || slices.Contains(g.Who, Anybody)
	}
	return named, anybody
}

// Refusals of access.
var (
	noIdentity = refusal{http.StatusUnauthorized, codeUnauthorized, "this mirror wants a bearer token, or a client certificate with a URI SAN spiffe://DOMAIN/hearth/client/NAME", ""}
	noAccount  = refusal{http.StatusUnauthorized, codeUnauthorized, "neither this mirror nor the artifact's source knows this token", ""}
)

// judge says whether a caller may have what a route asks of a manifest, and if
// not, how to refuse. admitted says that the listener has let the caller in;
// where it has not yet, one who turns out to be nobody learns nothing else.
func (a *auth) judge(ctx context.Context, c caller, admitted bool, rt route, mf *artifact.Manifest) (refusal, bool) {
	ref := artifact.Ref{Scheme: artifact.SchemeHub, Name: rt.repo, Revision: rt.rev}
	restricted := a.opts.Restricted(mf)
	named, anybody := a.granted(c, mf, ref)
	switch {
	case named:
		return refusal{}, true
	case !restricted, anybody, rt.kind == routeInfo && mf.Access == artifact.AccessGated:
		if admitted || a.opened(rt) && !restricted {
			return refusal{}, true
		}
		return a.admit(ctx, c, mf, restricted)
	case c.token == "":
		return closed(c, mf), false
	}
	err := a.ask(ctx, c, mf, true)
	switch {
	case err == nil:
		return refusal{}, true
	case !definite(err):
		return refusedBy(err), false
	case admitted, a.opened(rt):
		return closed(c, mf), false
	case mf.Access != artifact.AccessGated:
		return noAccount, false
	}
	if err := a.ask(ctx, c, mf, false); err != nil {
		return refusedBy(err), false
	}
	return closed(c, mf), false
}

// opened says that a route is answered to callers without identity.
func (a *auth) opened(rt route) bool { return a.opts.OpenMetadata && metadata[rt.kind] }

// admit lets a caller in whom only the source of a manifest may know.
func (a *auth) admit(ctx context.Context, c caller, mf *artifact.Manifest, restricted bool) (refusal, bool) {
	switch {
	case c.token == "" && restricted:
		return closed(c, mf), false
	case c.token == "":
		return noIdentity, false
	}
	err := a.ask(ctx, c, mf, false)
	if err != nil && restricted {
		// One whom the source lets read the files is somebody to it as well.
		if files := a.ask(ctx, c, mf, true); !definite(files) {
			err = files
		}
	}
	if err != nil {
		return refusedBy(err), false
	}
	return refusal{}, true
}

// refusedBy refuses one of whom a source said no, or who could not be asked for.
func refusedBy(err error) refusal {
	if definite(err) {
		return noAccount
	}
	return refusalOf(errNotAsked)
}

// errNotAsked is a source that cannot be asked about a token.
var errNotAsked = errors.New("the source cannot be asked about the token")

// definite says that a source said no.
func definite(err error) bool {
	return errors.Is(err, source.ErrUnauthorized) || errors.Is(err, source.ErrForbidden) || errors.Is(err, source.ErrNotFound)
}

// closed refuses a restricted artifact: a gated one says so, any other is
// refused in the words of one that does not exist.
func closed(c caller, mf *artifact.Manifest) refusal {
	switch {
	case mf.Access != artifact.AccessGated:
		return refusalOf(source.ErrNotFound)
	case c.token == "" && !c.known():
		return refusal{http.StatusUnauthorized, codeGated, "the repository is gated: a token that its source accepts is wanted", mf.Commit}
	}
	return refusal{http.StatusForbidden, codeGated, "the repository is gated, and its source does not admit this caller", mf.Commit}
}

// ask asks the source of a manifest about the caller's token, or remembers.
func (a *auth) ask(ctx context.Context, c caller, mf *artifact.Manifest, files bool) error {
	if a.opts.Tokens == nil {
		return source.ErrUnauthorized
	}
	key := tokenKey{sum: c.sum, source: mf.Source, repo: mf.Ref.Name, commit: mf.Commit, files: files}
	return a.table.ask(ctx, key, func(ctx context.Context) error { return a.opts.Tokens.AskToken(ctx, mf, c.token, files) })
}

// serveWhoami names the callers that the mirror itself knows.
func (m *Mirror) serveWhoami(w http.ResponseWriter, r *http.Request) {
	c := m.auth.callerOf(r)
	if !c.known() {
		m.refuse(w, r, refusal{http.StatusUnauthorized, codeUnauthorized, "this mirror has no account for the caller", ""})
		return
	}
	m.writeJSON(w, r, "", map[string]any{"type": "user", "name": c.name(), "fullname": c.name(), "orgs": []string{}})
}

// welcome judges a caller before its request makes the mirror look for a
// repository with the mirror's credential. A token that the one source of a ref
// refuses goes no further.
func (a *auth) welcome(ctx context.Context, c caller, rt route) (admitted, refused bool) {
	switch {
	case !a.opts.Demand, c.known():
		return true, false
	case c.token == "", a.opened(rt), a.opts.Tokens == nil:
		return false, false
	}
	ref := artifact.Ref{Scheme: artifact.SchemeHub, Name: rt.repo, Revision: rt.rev}
	err := a.table.ask(ctx, tokenKey{sum: c.sum, repo: rt.repo, commit: rt.rev}, func(ctx context.Context) error {
		return a.opts.Tokens.AskBearer(ctx, ref, c.token)
	})
	return err == nil, errors.Is(err, source.ErrUnauthorized) || errors.Is(err, source.ErrForbidden)
}

// admitted resolves what a route names and judges the caller; the bool is false
// where the answer is written already.
func (m *Mirror) admitted(w http.ResponseWriter, r *http.Request, rt route) (*artifact.Manifest, bool) {
	c := m.auth.callerOf(r)
	if m.auth.stranger(c, rt) {
		m.deny(w, r, c, noIdentity)
		return nil, false
	}
	letIn, refused := m.auth.welcome(r.Context(), c, rt)
	if refused {
		m.deny(w, r, c, noAccount)
		return nil, false
	}
	mf, err := m.manifest(r.Context(), rt.repo, rt.rev)
	judged, missing := mf, error(nil)
	if errors.Is(err, source.ErrNoRevision) {
		// That there is no such revision tells that there is a repository: the
		// caller hears it where main is the caller's to read.
		missing = err
		if judged, err = m.manifest(r.Context(), rt.repo, artifact.DefaultRevision); err != nil {
			err = source.ErrNotFound
		}
	}
	if !letIn && !m.auth.opened(rt) && (definite(err) || errors.Is(err, ErrNotAllowed) || errors.Is(err, errBadRef)) {
		// Else made-up tokens would tell what is private from what is not there.
		m.deny(w, r, c, noAccount)
		return nil, false
	}
	if err != nil {
		m.refuseError(w, r, err)
		return nil, false
	}
	if no, ok := m.auth.judge(r.Context(), c, letIn, rt, judged); !ok {
		m.deny(w, r, c, no)
		return nil, false
	}
	if missing != nil {
		m.refuseError(w, r, missing)
		return nil, false
	}
	return mf, true
}

// deny refuses a caller.
func (m *Mirror) deny(w http.ResponseWriter, r *http.Request, c caller, no refusal) {
	if context.Cause(r.Context()) != nil {
		panic(http.ErrAbortHandler)
	}
	m.opts.Log.LogAttrs(r.Context(), slog.LevelInfo, "mirror request denied",
		slog.String("path", r.URL.Path), slog.String("caller", c.name()), slog.String("code", no.code))
	if no.status == http.StatusUnauthorized {
		w.Header().Set("Www-Authenticate", "Bearer")
	}
	m.refuse(w, r, no)
}
