package hubmirror

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"path"
	"strconv"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// serveFile answers HEAD and GET of resolve and raw. HEAD is answered from the
// manifest alone.
func (m *Mirror) serveFile(w http.ResponseWriter, r *http.Request, rt route, mf *artifact.Manifest, touch func()) {
	f, found := mf.File(rt.path)
	if !found {
		m.refuse(w, r, refusal{http.StatusNotFound, codeEntry, "the revision has no such file", mf.Commit})
		return
	}
	h := w.Header()
	h.Set("X-Repo-Commit", mf.Commit)
	if rt.kind == routeRaw && isLFS(f) {
		servePointer(w, r, f)
		return
	}
	tag := strconv.Quote(blobName(f))
	h.Set("Etag", tag)
	h.Set("Accept-Ranges", "bytes")
	h.Set("Content-Type", "application/octet-stream")
	if path.Ext(f.Path) == ".json" {
		h.Set("Content-Type", "application/json")
	}
	if isLFS(f) {
		h.Set("X-Linked-Etag", tag)
		h.Set("X-Linked-Size", strconv.FormatInt(f.Size, 10))
	}
	if want := r.Header.Get("If-Match"); want != "" && !matches(want, tag) {
		m.refuse(w, r, refusal{http.StatusPreconditionFailed, "PreconditionFailed", "the file has another ETag", mf.Commit})
		return
	}
	if want := r.Header.Get("If-None-Match"); want != "" && matches(want, tag) {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	part := span{0, f.Size, http.StatusOK}
	if text := r.Header.Get("Range"); text != "" && r.Method == http.MethodGet {
		if cond := r.Header.Get("If-Range"); cond == "" || cond != "*" && matches(cond, tag) {
			part = parseRange(text, f.Size)
			if f.Size == 0 && part.status == http.StatusOK {
				// Clients that ask by a range read the size from here.
				h.Set("Content-Range", "bytes */0")
			}
		}
		if part.from > 0 && m.isSuspect(f.SHA256) {
			// The client may hold bytes that turned out wrong: only a whole
			// answer makes it start again.
			part = span{0, f.Size, http.StatusOK}
		}
	}
	switch part.status {
	case http.StatusRequestedRangeNotSatisfiable:
		h.Set("Content-Range", fmt.Sprintf("bytes */%d", f.Size))
		m.refuse(w, r, refusal{part.status, "RangeNotSatisfiable", "the range lies past the end of the file", mf.Commit})
		return
	case http.StatusPartialContent:
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", part.from, part.from+part.n-1, f.Size))
	}
	if r.Method == http.MethodHead {
		h.Set("Content-Length", strconv.FormatInt(part.n, 10))
		w.WriteHeader(part.status)
		return
	}
	content, err := m.opts.Library.Open(r.Context(), mf, f.Path)
	if err != nil {
		for _, name := range []string{"Content-Range", "Etag", "X-Linked-Etag", "X-Linked-Size"} {
			h.Del(name)
		}
		m.refuseError(w, r, fmt.Errorf("open %s: %w", f.Path, err))
		return
	}
	defer func() { _ = content.Close() }()
	h.Set("Content-Length", strconv.FormatInt(part.n, 10))
	w.WriteHeader(part.status)
	var suspect func() bool
	if part.from > 0 {
		suspect = func() bool { return m.isSuspect(f.SHA256) }
	}
	if err := m.stream(r.Context(), w, content, part, touch, suspect); err != nil {
		m.breakOff(r, mf, f, err)
	}
}

func servePointer(w http.ResponseWriter, r *http.Request, f artifact.File) {
	text := pointer(f)
	h := w.Header()
	h.Set("Etag", strconv.Quote(gitID(text)))
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("Content-Length", strconv.Itoa(len(text)))
	w.WriteHeader(http.StatusOK)
	if r.Method != http.MethodHead {
		_, _ = io.WriteString(w, text)
	}
}

// errClient marks failures of the client's side of a stream.
var errClient = errors.New("client is gone")

// breakOff ends a body that cannot be completed, so that the client sees it
// cut and never takes it for whole.
func (m *Mirror) breakOff(r *http.Request, mf *artifact.Manifest, f artifact.File, err error) {
	if errors.Is(err, ErrMismatch) {
		m.markSuspect(f.SHA256)
	}
	if !errors.Is(err, errClient) && context.Cause(r.Context()) == nil {
		m.stats.broken.Add(1)
		m.opts.Log.LogAttrs(r.Context(), slog.LevelWarn, "mirror body broken off",
			slog.String("artifact", mf.Digest.String()), slog.String("file", f.Path), traceOf(r), slog.Any("error", err))
	}
	panic(http.ErrAbortHandler)
}
