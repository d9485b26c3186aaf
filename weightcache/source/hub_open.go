package source

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Open asks for exactly [off, off+n) of a file at the listing's commit. A 206
// must name that range and the listed size; a 200 is taken only for off 0 and
// the listed size. A validator that differs from the listing's, or from the
// one seen at the same address before, gives ErrChanged. Reads end with
// ErrUnavailable where the body is short, and with ctx's cause once it is done.
func (h *Hub) Open(ctx context.Context, l *artifact.Listing, f artifact.File, off, n int64) (io.ReadCloser, error) {
	what := describe(l.Ref, f.Path)
	if off < 0 || n < 0 || off > f.Size || n > f.Size-off {
		return nil, h.refuse("open", what, fmt.Errorf("%w: range of %d bytes at %d is outside the file's %d", ErrProtocol, n, off, f.Size))
	}
	if n == 0 {
		return io.NopCloser(strings.NewReader("")), nil
	}
	first := true
	resp, err := h.do(ctx, request{
		op: "open", what: what,
		url:    h.address(escapePath(l.Ref.Name) + "/resolve/" + url.PathEscape(l.Commit) + "/" + escapePath(f.Path)),
		header: http.Header{"Range": {fmt.Sprintf("bytes=%d-%d", off, off+n-1)}},
		prepare: func(req *http.Request) {
			if tag := h.knownETag(req.URL); tag != "" && !strings.HasPrefix(tag, "W/") {
				req.Header.Set("If-Match", tag)
			}
		},
		hop: func(resp *http.Response) error {
			atHub := first
			first = false
			return h.checkIdentity(resp, l, f, atHub)
		},
	})
	if err != nil {
		if errors.Is(err, ErrChanged) {
			h.forgetETags(l, f)
		}
		return nil, err
	}
	if err := checkRange(resp, f.Size, off, n); err != nil {
		// What is left of an unwanted body may be long: drop the connection.
		_ = resp.Body.Close()
		return nil, &Error{Source: h.opts.Name, Op: "open", What: what, Status: resp.StatusCode, Err: h.redact(err)}
	}
	return &body{ctx: ctx, hub: h, what: what, in: resp.Body, left: n}, nil
}

// checkIdentity refuses an answer about other bytes than the listed ones.
func (h *Hub) checkIdentity(resp *http.Response, l *artifact.Listing, f artifact.File, atHub bool) error {
	if resp.StatusCode >= 400 {
		return nil
	}
	if atHub {
		if c := resp.Header.Get("X-Repo-Commit"); c != "" && c != l.Commit {
			return fmt.Errorf("%w: answer is of commit %.40q", ErrChanged, c)
		}
		if s := resp.Header.Get("X-Linked-Size"); s != "" && s != strconv.FormatInt(f.Size, 10) {
			return fmt.Errorf("%w: size is %.20q bytes, listed with %d", ErrChanged, s, f.Size)
		}
		if tag := bareETag(resp.Header.Get("X-Linked-Etag")); tag != "" && comparable40or64(tag, f.Validator) && tag != f.Validator {
			return fmt.Errorf("%w: validator differs from the listing's", ErrChanged)
		}
	}
	if resp.StatusCode >= 300 {
		return nil
	}
	raw := resp.Header.Get("Etag")
	if tag := bareETag(raw); atHub && resp.Header.Get("X-Linked-Etag") == "" && comparable40or64(tag, f.Validator) && tag != f.Validator {
		return fmt.Errorf("%w: validator differs from the listing's", ErrChanged)
	}
	return h.rememberETag(resp.Request.URL, raw)
}

// comparable40or64 says that both are hex digests of one length, so that a
// difference means other bytes and not another way to name them.
func comparable40or64(a, b string) bool {
	return len(a) == len(b) && (len(a) == 40 || len(a) == 64) && artifact.ValidCommit(a) == nil && artifact.ValidCommit(b) == nil
}

// bareETag drops W/ and the quotes.
func bareETag(tag string) string {
	return strings.Trim(strings.TrimPrefix(tag, "W/"), `"`)
}

// etagKey leaves the query out: signatures change, the object does not.
func etagKey(at *url.URL) string { return at.Host + "\x00" + at.EscapedPath() }

func (h *Hub) knownETag(at *url.URL) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.etags[etagKey(at)]
}

// rememberETag keeps the first validator of an address and refuses another.
// Past maxETags an arbitrary address is forgotten: it is then only compared
// with the listing.
func (h *Hub) rememberETag(at *url.URL, tag string) error {
	if tag == "" || len(tag) > artifact.MaxValidatorBytes {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	key := etagKey(at)
	if known, ok := h.etags[key]; ok {
		if bareETag(known) != bareETag(tag) {
			delete(h.etags, key)
			return fmt.Errorf("%w: ETag differs from that of an earlier part", ErrChanged)
		}
		return nil
	}
	for k := range h.etags {
		if len(h.etags) < maxETags {
			break
		}
		delete(h.etags, k)
	}
	h.etags[key] = tag
	return nil
}

// forgetETags lets the next attempt at a file start anew, wherever its bytes
// come from.
func (h *Hub) forgetETags(l *artifact.Listing, f artifact.File) {
	base := f.Path[strings.LastIndexByte(f.Path, '/')+1:]
	h.mu.Lock()
	defer h.mu.Unlock()
	for k := range h.etags {
		if strings.Contains(k, l.Commit) && strings.HasSuffix(k, url.PathEscape(base)) || strings.Contains(k, f.Validator) && f.Validator != "" {
			delete(h.etags, k)
		}
	}
}

// checkRange accepts an answer that holds exactly the bytes asked for.
func checkRange(resp *http.Response, size, off, n int64) error {
	if enc := resp.Header.Get("Content-Encoding"); enc != "" && enc != "identity" {
		return fmt.Errorf("%w: body is encoded as %.20q", ErrProtocol, enc)
	}
	switch resp.StatusCode {
	case http.StatusPartialContent:
		from, to, total, ok := parseContentRange(resp.Header.Get("Content-Range"))
		switch {
		case !ok:
			return fmt.Errorf("%w: unreadable Content-Range", ErrProtocol)
		case total != size:
			return fmt.Errorf("%w: size is %d bytes, listed with %d", ErrChanged, total, size)
		case from != off || to != off+n-1:
			return fmt.Errorf("%w: asked for bytes %d-%d, answered %d-%d", ErrProtocol, off, off+n-1, from, to)
		case resp.ContentLength >= 0 && resp.ContentLength != n:
			return fmt.Errorf("%w: body of %d bytes for a range of %d", ErrProtocol, resp.ContentLength, n)
		}
		return nil
	case http.StatusOK:
		switch {
		case resp.ContentLength >= 0 && resp.ContentLength != size:
			return fmt.Errorf("%w: size is %d bytes, listed with %d", ErrChanged, resp.ContentLength, size)
		case off != 0:
			return fmt.Errorf("%w: whole file in answer to bytes %d-%d", ErrNoRange, off, off+n-1)
		}
		return nil
	}
	return fmt.Errorf("%w: unexpected status", ErrProtocol)
}

// parseContentRange reads "bytes a-b/total" with all three numbers present.
func parseContentRange(text string) (from, to, total int64, ok bool) {
	spec, found := strings.CutPrefix(text, "bytes ")
	bounds, size, slash := strings.Cut(spec, "/")
	a, b, dash := strings.Cut(bounds, "-")
	if !found || !slash || !dash {
		return 0, 0, 0, false
	}
	var numbers [3]int64
	for i, s := range []string{a, b, size} {
		n, err := strconv.ParseUint(s, 10, 63)
		if err != nil {
			return 0, 0, 0, false
		}
		numbers[i] = int64(n)
	}
	from, to, total = numbers[0], numbers[1], numbers[2]
	return from, to, total, from <= to && to < total
}

// body yields exactly left bytes or an error.
type body struct {
	ctx  context.Context // of the call that opened the reader
	hub  *Hub
	what string
	in   io.ReadCloser
	left int64
}

// Read yields the next bytes. A body that ends early is ErrUnavailable.
func (b *body) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, io.EOF
	}
	n, err := b.in.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	switch {
	case b.left == 0 && (err == nil || errors.Is(err, io.EOF)):
		return n, nil
	case err == nil:
		return n, nil
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		err = fmt.Errorf("%w: body ended %d bytes early", ErrUnavailable, b.left)
	default:
		err = transportError(b.ctx, err)
	}
	return n, b.hub.refuse("open", b.what, err)
}

// Close gives the connection back where the body was read to its end.
func (b *body) Close() error {
	if err := b.in.Close(); err != nil && b.left == 0 {
		return fmt.Errorf("close body: %w", err)
	}
	return nil
}
