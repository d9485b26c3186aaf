package hubmirror

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strconv"

	"github.com/hearth-dev/hearth/weightcache/source"
)

// Codes that the hub's clients branch on.
const (
	codeRepo     = "RepoNotFound"
	codeRevision = "RevisionNotFound"
	codeEntry    = "EntryNotFound"
	codeGated    = "GatedRepo"
	// codeUnavailable is unknown to clients on purpose: with a 404 they read
	// it as "no network" and fall back to what they have at once.
	codeUnavailable = "Unavailable"
)

// refusal is an error answer. Its texts are ours, never an origin's.
type refusal struct {
	status                int
	code, message, commit string
}

var errBadRef = errors.New("malformed repository or revision")

// refusalOf maps a Library's error to an answer.
func refusalOf(err error) refusal {
	switch {
	case errors.Is(err, errBadRef):
		return refusal{http.StatusNotFound, codeRepo, "not a repository and revision", ""}
	case errors.Is(err, ErrNotAllowed):
		return refusal{http.StatusNotFound, codeRepo, "not among the repositories that the sources of this mirror allow", ""}
	case errors.Is(err, source.ErrNoRevision):
		return refusal{http.StatusNotFound, codeRevision, "the repository has no such revision", ""}
	case errors.Is(err, source.ErrNotFound):
		return refusal{http.StatusNotFound, codeRepo, "repository not found at its source", ""}
	case errors.Is(err, source.ErrUnauthorized), errors.Is(err, source.ErrForbidden):
		return refusal{http.StatusForbidden, codeGated, "the source refuses the credential of this mirror", ""}
	}
	// A file that the drive lacks is none that the repository lacks: a client that
	// was told so would go on without it.
	return refusal{http.StatusNotFound, codeUnavailable, "not held here, and its source cannot be asked now", ""}
}

// refuseError answers a Library's error. Where the request itself was given
// up there is nothing true to say: the connection is cut.
func (m *Mirror) refuseError(w http.ResponseWriter, r *http.Request, err error) {
	if context.Cause(r.Context()) != nil {
		panic(http.ErrAbortHandler)
	}
	m.opts.Log.LogAttrs(r.Context(), slog.LevelInfo, "mirror request refused",
		slog.String("path", r.URL.Path), traceOf(r), slog.Any("error", err))
	m.refuse(w, r, refusalOf(err))
}

// maxTrace bounds what is logged of a client's own id of a request, in bytes.
const maxTrace = 128

// traceOf is the id by which a client knows its request.
func traceOf(r *http.Request) slog.Attr {
	id := r.Header.Get("X-Amzn-Trace-Id")
	return slog.String("trace", id[:min(len(id), maxTrace)])
}

// refuse writes an error answer: code and message as headers, as the hub does.
func (m *Mirror) refuse(w http.ResponseWriter, r *http.Request, no refusal) {
	m.stats.refused(no.code)
	h := w.Header()
	h.Set("X-Error-Code", no.code)
	h.Set("X-Error-Message", no.message)
	if no.commit != "" {
		h.Set("X-Repo-Commit", no.commit)
	}
	if no.status == http.StatusMethodNotAllowed {
		h.Set("Allow", "GET, HEAD, POST")
	}
	body := `{"error":` + strconv.Quote(no.message) + `}`
	h.Set("Content-Type", "application/json; charset=utf-8")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(no.status)
	if r.Method != http.MethodHead {
		_, _ = w.Write([]byte(body))
	}
}
