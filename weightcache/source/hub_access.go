package source

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// askTimeout bounds each question about access or a token, so that a client
// that waits for the answer does not give up first (hub clients: 10 s).
const askTimeout = 5 * time.Second

// maxWhoBytes bounds what is read of the answer to a question.
const maxWhoBytes = 16 << 10

// repoInfo is what a repository's info says of itself; gated is false, or a
// word that says how access is granted.
type repoInfo struct {
	SHA     string          `json:"sha"`
	Private bool            `json:"private"`
	Gated   json.RawMessage `json:"gated"`
}

// said is the access that an info names; open where it names none.
func (i repoInfo) said() artifact.Access {
	switch gated := string(i.Gated); {
	case i.Private:
		return artifact.AccessPrivate
	case gated != "" && gated != "false" && gated != "null" && gated != `""`:
		return artifact.AccessGated
	}
	return artifact.AccessOpen
}

// Access asks again to whom the source serves what ref meant at a commit.
// Errors are those of Resolve.
func (h *Hub) Access(ctx context.Context, ref artifact.Ref, commit string) (artifact.Access, error) {
	what := describe(ref, "")
	if ref.Scheme != artifact.SchemeHub {
		return artifact.AccessUnknown, h.refuse("access", what, fmt.Errorf("%w: a hub source knows hub:// refs", ErrNotFound))
	}
	ctx, cancel := context.WithTimeoutCause(ctx, h.opts.ListTimeout,
		h.refuse("access", what, fmt.Errorf("%w: the answer took longer than %v", ErrUnavailable, h.opts.ListTimeout)))
	defer cancel()
	var info repoInfo
	at := h.address("api/models/" + escapePath(ref.Name) + "/revision/" + url.PathEscape(commit))
	if _, err := h.getJSON(ctx, what, at, maxInfoBytes, &info); err != nil {
		return artifact.AccessUnknown, err
	}
	return h.accessOf(ctx, ref, commit, info), nil
}

// accessOf judges a repository that could be read. What a source says is
// believed where it restricts; where it does not, and our credential was shown,
// the files are asked for without one. AccessUnknown where that has no answer
// within askTimeout: a client may wait for the Resolve.
func (h *Hub) accessOf(ctx context.Context, ref artifact.Ref, commit string, info repoInfo) artifact.Access {
	if said := info.said(); said != artifact.AccessOpen || h.opts.TokenFile == "" {
		return said
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	at := h.address("api/models/" + escapePath(ref.Name) + "/tree/" + commit)
	at.RawQuery = "recursive=false&expand=false&limit=1"
	err := h.question(ctx, http.MethodGet, at, "", commit, nil)
	switch {
	case err == nil:
		return artifact.AccessOpen
	case errors.Is(err, errGated):
		return artifact.AccessGated
	case errors.Is(err, ErrUnauthorized), errors.Is(err, ErrForbidden), errors.Is(err, ErrNotFound):
		return artifact.AccessPrivate
	}
	return artifact.AccessUnknown
}

// AcceptsToken asks whether the source lets the bearer of a token read a file of
// a listing at its commit. Nil means yes; errors wrap ErrUnauthorized,
// ErrForbidden or ErrNotFound where it says no, and anything else means that it
// could not be asked. The token goes to the configured origin alone, never
// along a redirect to another, and is in no error.
func (h *Hub) AcceptsToken(ctx context.Context, l *artifact.Listing, token string) error {
	what := describe(l.Ref, "")
	if token == "" {
		return h.refuse("token", what, ErrUnauthorized)
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	repo := escapePath(l.Ref.Name)
	err := h.question(ctx, http.MethodGet, h.address("api/models/"+repo+"/auth-check"), token, "", nil)
	if err != nil && !errors.Is(err, errNoRoute) || len(l.Files) == 0 {
		return h.refuseUnless("token", what, err)
	}
	// A file of weights is what a gate stands before, whatever else is open.
	file := l.Files[0]
	for _, f := range l.Files {
		if f.Kind == artifact.Weights {
			file = f
			break
		}
	}
	at := h.address(repo + "/resolve/" + url.PathEscape(l.Commit) + "/" + escapePath(file.Path))
	return h.refuseUnless("token", what, h.question(ctx, http.MethodHead, at, token, l.Commit, nil))
}

// KnowsToken asks whether the source has an account for the bearer of a token.
// What a source serves to anybody proves nothing about a token, so it is asked
// for the account behind it. Errors are those of AcceptsToken.
func (h *Hub) KnowsToken(ctx context.Context, token string) error {
	if token == "" {
		return h.refuse("token", "account", ErrUnauthorized)
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	var account struct {
		Name string `json:"name"`
	}
	err := h.question(ctx, http.MethodGet, h.address("api/whoami-v2"), token, "", &account)
	if err == nil && account.Name == "" {
		err = fmt.Errorf("%w: the source names no account", ErrUnauthorized)
	}
	return h.refuseUnless("token", "account", err)
}

func (h *Hub) refuseUnless(op, what string, err error) error {
	if err == nil {
		return nil
	}
	return h.refuse(op, what, err)
}

// Answers that mean more than their status.
var (
	errGated   = fmt.Errorf("gated: %w", ErrForbidden)
	errNoRoute = fmt.Errorf("no such route: %w", ErrNotFound)
)

// question sends one request with another's token, or none, and judges the
// answer by its status; no text of it gets into an error. Redirects are followed
// at the configured origin only. One that leads away is an answer like a body
// where it says which commit it is of, as the hub's own do; commit, where given,
// must be the one the answer names.
func (h *Hub) question(ctx context.Context, method string, at *url.URL, token, commit string, into any) error {
	r := request{method: method, header: http.Header{"Accept": {"application/json"}}}
	told := "" // the commit that an answer named
	for range maxRedirects + 1 {
		resp, err := h.hop(ctx, r, at, token)
		if err != nil {
			return err
		}
		if c := resp.Header.Get("X-Repo-Commit"); c != "" {
			told = c
		}
		next, err := h.redirect(resp, false)
		switch {
		case err == nil && sameOrigin(next, h.base):
			discard(resp)
			at = next
			continue
		case err == nil && told == "":
			err = fmt.Errorf("%w: redirected to another origin, host %.100q", ErrProtocol, next.Host)
		case err == nil || resp.StatusCode < 300:
			err = answered(resp, into)
			if told != commit && commit != "" && (told != "" || method == http.MethodHead) {
				err = fmt.Errorf("%w: the answer is of another commit", ErrProtocol)
			}
		case errors.Is(err, errNoRedirect):
			err = refused(resp)
		}
		discard(resp)
		return err
	}
	return fmt.Errorf("%w: more than %d redirects", ErrProtocol, maxRedirects)
}

// answered reads what is asked for of a welcome answer.
func answered(resp *http.Response, into any) error {
	if into == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxWhoBytes)).Decode(into); err != nil {
		return fmt.Errorf("%w: answer is not the JSON expected", ErrProtocol)
	}
	return nil
}

// refused turns a refusing answer into its sentinel, without its text.
func refused(resp *http.Response) error {
	code := resp.Header.Get("X-Error-Code")
	switch {
	case code == "GatedRepo":
		return errGated
	case resp.StatusCode == http.StatusMethodNotAllowed,
		resp.StatusCode == http.StatusNotFound && (code == "" || code == "RouteNotFound"):
		return errNoRoute
	}
	return classify(resp.StatusCode, code, false)
}
