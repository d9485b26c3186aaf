package hub

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
)

// serveFile answers resolve and raw.
func (o *Origin) serveFile(w http.ResponseWriter, r *http.Request, repo, rev, name string, raw bool, f *Fault) {
	if _, err := o.revisions(repo); err != nil {
		failLookup(w, err, rev)
		return
	}
	if o.hidden(w, r, repo) || o.refused(w, r, repo) {
		return
	}
	c, err := o.lookup(repo, rev)
	if err != nil {
		failLookup(w, err, rev)
		return
	}
	e, ok := c.find(name)
	if !ok {
		fail(w, http.StatusNotFound, "EntryNotFound", "Entry not found", c.id)
		return
	}
	h := w.Header()
	h.Set("X-Repo-Commit", c.id)
	if raw && e.lfs {
		h.Set("Etag", strconv.Quote(e.oid))
		h.Set("Content-Type", "text/plain; charset=utf-8")
		h.Set("Content-Length", strconv.Itoa(len(e.pointer())))
		if r.Method != http.MethodHead {
			_, _ = io.WriteString(w, e.pointer())
		}
		return
	}
	if e.lfs {
		h.Set("X-Linked-Etag", strconv.Quote(e.etag()))
		h.Set("X-Linked-Size", strconv.FormatInt(e.size, 10))
	}
	if e.lfs && o.opts.Redirect != Direct {
		target := fmt.Sprintf("/cdn/%s/%s/%s?sig=%s", url.PathEscape(repo), c.id, escapePath(e.path), c.id[:8])
		if o.opts.Redirect == RedirectAbsolute {
			o.mu.Lock()
			target = o.cdn + target
			o.mu.Unlock()
		}
		h.Set("Location", target)
		w.WriteHeader(http.StatusFound)
		return
	}
	h.Set("Etag", strconv.Quote(e.etag()))
	o.serveBytes(w, r, repo, e, f)
}

// serveCDN answers /cdn/{repo}/{commit}/{path}, the target of redirects.
func (o *Origin) serveCDN(w http.ResponseWriter, r *http.Request) {
	o.countRoute("cdn")
	f := o.faultFor(r)
	if f.apply(w) {
		return
	}
	segs, err := splitPath(r.URL.EscapedPath())
	if err != nil || len(segs) < 4 || r.URL.Query().Get("sig") != segs[2][:min(8, len(segs[2]))] {
		http.Error(w, "signature expired", http.StatusForbidden)
		return
	}
	c, err := o.lookup(segs[1], segs[2])
	if err != nil {
		http.NotFound(w, r)
		return
	}
	e, ok := c.find(strings.Join(segs[3:], "/"))
	if !ok {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Etag", strconv.Quote("cdn-"+e.sha256[:16]))
	o.serveBytes(w, r, segs[1], e, f)
}

func escapePath(p string) string {
	segs := strings.Split(p, "/")
	for i, s := range segs {
		segs[i] = url.PathEscape(s)
	}
	return strings.Join(segs, "/")
}

// serveBytes writes the file or the one range asked for.
func (o *Origin) serveBytes(w http.ResponseWriter, r *http.Request, repo string, e entry, f *Fault) {
	h := w.Header()
	h.Set("Accept-Ranges", "bytes")
	h.Set("Content-Type", "application/octet-stream")
	if f.ETag != "" {
		h.Set("Etag", f.ETag)
	}
	if want := r.Header.Get("If-Match"); want != "" && want != "*" && want != h.Get("Etag") {
		w.WriteHeader(http.StatusPreconditionFailed)
		return
	}
	from, n, status := int64(0), e.size, http.StatusOK
	if text := r.Header.Get("Range"); text != "" && !f.IgnoreRange {
		var ok bool
		if from, n, ok = oneRange(text, e.size); !ok {
			h.Set("Content-Range", fmt.Sprintf("bytes */%d", e.size))
			w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
			return
		}
		status = http.StatusPartialContent
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, from+n-1, e.size))
		if f.ContentRange != "" {
			h.Set("Content-Range", f.ContentRange)
		}
	}
	h.Set("Content-Length", strconv.FormatInt(n, 10))
	w.WriteHeader(status)
	if r.Method == http.MethodHead {
		return
	}
	o.writeBody(w, r, repo+"/"+e.path, e.file, from, n, f)
}

// oneRange reads "bytes=a-b", "bytes=a-" and "bytes=-n".
func oneRange(text string, size int64) (from, n int64, ok bool) {
	spec, found := strings.CutPrefix(text, "bytes=")
	a, b, dash := strings.Cut(spec, "-")
	if !found || !dash {
		return 0, 0, false
	}
	if a == "" {
		last, err := strconv.ParseInt(b, 10, 64)
		if err != nil || last <= 0 || size == 0 {
			return 0, 0, false
		}
		last = min(last, size)
		return size - last, last, true
	}
	from, err := strconv.ParseInt(a, 10, 64)
	if err != nil || from < 0 || from >= size {
		return 0, 0, false
	}
	to := size - 1
	if b != "" {
		if to, err = strconv.ParseInt(b, 10, 64); err != nil || to < from {
			return 0, 0, false
		}
		to = min(to, size-1)
	}
	return from, to - from + 1, true
}

// writeBody sends n bytes of a file from an offset, paced and with the fault's
// damage. A body that cannot be completed breaks the connection.
func (o *Origin) writeBody(w http.ResponseWriter, r *http.Request, name, file string, from, n int64, f *Fault) {
	in, err := os.Open(file)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer func() { _ = in.Close() }()
	o.mu.Lock()
	limiter := o.limiter
	o.mu.Unlock()
	buf := make([]byte, burst)
	flusher, _ := w.(http.Flusher)
	for sent := int64(0); sent < n; {
		piece := min(burst, n-sent)
		if f.CutAfter > 0 {
			piece = min(piece, f.CutAfter-sent)
		}
		if f.StallAfter > 0 && sent < f.StallAfter {
			piece = min(piece, f.StallAfter-sent)
		}
		if err := limiter.WaitN(r.Context(), int(piece)); err != nil {
			return
		}
		if _, err := in.ReadAt(buf[:piece], from+sent); err != nil {
			panic(http.ErrAbortHandler)
		}
		if f.WrongBytes {
			buf[0] ^= 1
		}
		wrote, err := w.Write(buf[:piece])
		o.countBody(name, int64(wrote))
		if err != nil {
			return
		}
		sent += piece
		if f.CutAfter > 0 && sent >= f.CutAfter && sent < n {
			if flusher != nil {
				flusher.Flush()
			}
			panic(http.ErrAbortHandler)
		}
		if f.StallAfter > 0 && sent == f.StallAfter {
			if flusher != nil {
				flusher.Flush()
			}
			select {
			case <-r.Context().Done():
				panic(http.ErrAbortHandler)
			case <-f.Release:
			}
		}
	}
}
