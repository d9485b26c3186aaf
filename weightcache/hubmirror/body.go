package hubmirror

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path"
	"strconv"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// serveFile answers HEAD and GET of resolve and raw. HEAD is answered from the
// manifest alone.
func (m *Mirror) serveFile(w http.ResponseWriter, r *http.Request, rt route, mf *artifact.Manifest) {
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
	if want := r.Header.Get("If-Match"); want != "" && !matches(want, tag, false) {
		m.refuse(w, r, refusal{http.StatusPreconditionFailed, "PreconditionFailed", "the file has another ETag", mf.Commit})
		return
	}
	if want := r.Header.Get("If-None-Match"); want != "" && matches(want, tag, true) {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	part := span{0, f.Size, http.StatusOK}
	if text := r.Header.Get("Range"); text != "" && r.Method == http.MethodGet {
		if cond := r.Header.Get("If-Range"); cond == "" || cond == tag {
			part = parseRange(text, f.Size)
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
	if err := m.stream(w, r, content, part); err != nil {
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
			slog.String("artifact", mf.Digest.String()), slog.String("file", f.Path), slog.Any("error", err))
	}
	panic(http.ErrAbortHandler)
}

// stream sends part of a file: bytes still arriving from ReadAt, and by
// sendfile from the moment the file is committed.
func (m *Mirror) stream(w http.ResponseWriter, r *http.Request, c Content, part span) error {
	control := http.NewResponseController(w)
	if part.n > SmallBody || c.File() == nil {
		// The headers go out before any wait: a client gives up on an answer
		// that does not begin within 10 s.
		if err := m.flush(control); err != nil {
			return err
		}
	}
	if part.n > SmallBody {
		m.stats.waiting.Add(1)
		select {
		case m.places <- struct{}{}:
			m.stats.waiting.Add(-1)
		case <-r.Context().Done():
			m.stats.waiting.Add(-1)
			return context.Cause(r.Context())
		}
		defer func() { <-m.places }()
	}
	m.stats.streams.Add(1)
	defer m.stats.streams.Add(-1)
	defer func() { _ = control.SetWriteDeadline(time.Time{}) }()
	buf, ok := m.buffers.Get().(*[]byte)
	if !ok {
		return errors.New("take buffer: wrong type")
	}
	defer m.buffers.Put(buf)
	filling := false // the last piece came from ReadAt
	for part.n > 0 {
		var sent int64
		var err error
		// The first piece after the commit still comes by ReadAt, which knows
		// whether the bytes sent so far are those of the committed file.
		if file := c.File(); file != nil && !filling {
			sent, err = m.sendCommitted(control, w, file, part)
		} else {
			sent, err = m.sendFilling(r.Context(), control, w, c, part, *buf)
			filling = file == nil
		}
		m.stats.bytes.Add(sent)
		part.from, part.n = part.from+sent, part.n-sent
		if err != nil {
			return err
		}
	}
	return nil
}

// sendCommitted sends one piece of a file on the drive. A LimitedReader over an
// *os.File is the form for which net/http uses sendfile.
func (m *Mirror) sendCommitted(control *http.ResponseController, w io.Writer, file *os.File, part span) (int64, error) {
	if _, err := file.Seek(part.from, io.SeekStart); err != nil {
		return 0, fmt.Errorf("seek file: %w", err)
	}
	n := min(part.n, pieceBytes)
	if err := m.allowWrite(control); err != nil {
		return 0, err
	}
	sent, err := io.Copy(w, &io.LimitedReader{R: file, N: n})
	if err != nil {
		return sent, fmt.Errorf("%w: %w", errClient, err)
	}
	if sent < n {
		return sent, fmt.Errorf("file ended %d bytes early", n-sent)
	}
	return sent, nil
}

// sendFilling sends what the next read yields of a file being filled.
func (m *Mirror) sendFilling(ctx context.Context, control *http.ResponseController, w io.Writer, c Content, part span, buf []byte) (int64, error) {
	n, readErr := c.ReadAt(ctx, buf[:min(part.n, int64(len(buf)))], part.from)
	if readErr != nil && !errors.Is(readErr, io.EOF) {
		return 0, fmt.Errorf("read file: %w", readErr)
	}
	if n > 0 {
		if err := m.allowWrite(control); err != nil {
			return 0, err
		}
		sent, err := w.Write(buf[:n])
		if err == nil {
			err = m.flush(control)
		}
		if err != nil {
			return int64(sent), fmt.Errorf("%w: %w", errClient, err)
		}
	}
	if readErr != nil && int64(n) < part.n {
		return int64(n), fmt.Errorf("read file: %w", io.ErrUnexpectedEOF)
	}
	if n == 0 {
		return 0, fmt.Errorf("read file: %w", io.ErrNoProgress)
	}
	return int64(n), nil
}

// allowWrite gives the client WriteTimeout for the next piece.
func (m *Mirror) allowWrite(control *http.ResponseController) error {
	err := control.SetWriteDeadline(time.Now().Add(m.opts.WriteTimeout))
	if err != nil && !errors.Is(err, http.ErrNotSupported) {
		return fmt.Errorf("%w: %w", errClient, err)
	}
	return nil
}

func (m *Mirror) flush(control *http.ResponseController) error {
	if err := m.allowWrite(control); err != nil {
		return err
	}
	if err := control.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return fmt.Errorf("%w: %w", errClient, err)
	}
	return nil
}
