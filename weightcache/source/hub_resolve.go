package source

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Resolve asks what the revision means now and lists the files of that commit.
// SHA256 is known for LFS files only; the others have a git id. Every answer is
// bounded in length and time and checked: names, sizes, counts, and that pages
// stay on the configured origin.
func (h *Hub) Resolve(ctx context.Context, ref artifact.Ref) (*artifact.Listing, error) {
	what := describe(ref, "")
	if ref.Scheme != artifact.SchemeHub {
		return nil, h.refuse("resolve", what, fmt.Errorf("%w: a hub source resolves hub:// refs", ErrNotFound))
	}
	if _, err := artifact.ParseRef(ref.String()); err != nil {
		return nil, h.refuse("resolve", what, fmt.Errorf("%w: %w", ErrNotFound, err))
	}
	ctx, cancel := context.WithTimeoutCause(ctx, h.opts.ListTimeout,
		h.refuse("resolve", what, fmt.Errorf("%w: the listing took longer than %v", ErrUnavailable, h.opts.ListTimeout)))
	defer cancel()
	var info repoInfo
	at := h.address("api/models/" + escapePath(ref.Name) + "/revision/" + url.PathEscape(ref.Revision))
	if _, err := h.getJSON(ctx, what, at, maxInfoBytes, &info); err != nil {
		return nil, err
	}
	if len(info.SHA) != 40 || artifact.ValidCommit(info.SHA) != nil {
		return nil, h.refuse("resolve", what, fmt.Errorf("%w: commit %.60q is not 40 lower-case hex digits", ErrProtocol, info.SHA))
	}
	files, err := h.tree(ctx, ref, info.SHA)
	if err != nil {
		return nil, err
	}
	return &artifact.Listing{
		Ref: ref, Source: h.opts.Name, Commit: info.SHA, Files: files, Access: h.accessOf(ctx, ref, info.SHA, info),
	}, nil
}

// treeEntry is one object of a tree page; what else it holds is not needed.
type treeEntry struct {
	Type string `json:"type"`
	OID  string `json:"oid"`
	Size int64  `json:"size"`
	Path string `json:"path"`
	LFS  *struct {
		OID  string `json:"oid"`
		Size int64  `json:"size"`
	} `json:"lfs"`
}

// tree reads all pages of the recursive listing of a commit.
func (h *Hub) tree(ctx context.Context, ref artifact.Ref, commit string) ([]artifact.File, error) {
	what := describe(ref, "")
	at := h.address("api/models/" + escapePath(ref.Name) + "/tree/" + commit)
	at.RawQuery = "recursive=true&expand=false"
	var files []artifact.File
	seen := map[string]bool{}
	for range maxPages {
		if seen[at.String()] {
			return nil, h.refuse("resolve", what, fmt.Errorf("%w: tree pages form a loop", ErrProtocol))
		}
		seen[at.String()] = true
		var page []treeEntry
		header, err := h.getJSON(ctx, what, at, maxPageBytes, &page)
		if err != nil {
			return nil, err
		}
		if files, err = appendFiles(files, page); err != nil {
			return nil, h.refuse("resolve", what, err)
		}
		if len(files) > artifact.MaxFiles {
			return nil, h.refuse("resolve", what, fmt.Errorf("%w: more than %d files", ErrProtocol, artifact.MaxFiles))
		}
		next, err := h.nextPage(at, header)
		if err != nil {
			return nil, h.refuse("resolve", what, err)
		}
		if next == nil {
			slices.SortFunc(files, func(a, b artifact.File) int { return strings.Compare(a.Path, b.Path) })
			if err := artifact.CheckFiles(files, false); err != nil {
				return nil, h.refuse("resolve", what, fmt.Errorf("%w: %w", ErrProtocol, err))
			}
			return files, nil
		}
		at = next
	}
	return nil, h.refuse("resolve", what, fmt.Errorf("%w: more than %d tree pages", ErrProtocol, maxPages))
}

// appendFiles adds the files of a page; its folders are implied by them.
func appendFiles(files []artifact.File, page []treeEntry) ([]artifact.File, error) {
	for _, e := range page {
		if e.Type != "file" {
			continue
		}
		f, err := e.file()
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	return files, nil
}

func (e treeEntry) file() (artifact.File, error) {
	f := artifact.File{Path: e.Path, Size: e.Size, Kind: artifact.KindOf(e.Path)}
	if e.LFS == nil {
		f.GitSHA1, f.Validator = e.OID, e.OID
		return f, nil
	}
	sum, err := artifact.ParseDigest(strings.TrimPrefix(e.LFS.OID, "sha256:"))
	if err != nil {
		return f, fmt.Errorf("%w: file %.200q: %w", ErrProtocol, e.Path, err)
	}
	// The oid of an LFS entry is that of its pointer, not of its bytes.
	f.Size, f.LFS, f.SHA256, f.Validator = e.LFS.Size, true, sum, sum.String()
	return f, nil
}

// nextPage reads the Link header; nil means the last page. A page on another
// origin is refused.
func (h *Hub) nextPage(at *url.URL, header http.Header) (*url.URL, error) {
	for _, line := range header.Values("Link") {
		for item := range strings.SplitSeq(line, ",") {
			target, params, _ := strings.Cut(strings.TrimSpace(item), ">")
			if !strings.HasPrefix(target, "<") || !strings.Contains(strings.ReplaceAll(params, `"`, ""), "rel=next") {
				continue
			}
			next, err := at.Parse(target[1:])
			if err != nil {
				return nil, fmt.Errorf("%w: unreadable address of the next tree page", ErrProtocol)
			}
			if !sameOrigin(next, h.base) || next.User != nil {
				return nil, fmt.Errorf("%w: next tree page is on another origin, host %.100q", ErrProtocol, next.Host)
			}
			next.Fragment, next.RawFragment = "", ""
			return next, nil
		}
	}
	return nil, nil //nolint:nilnil // no next page is an answer, not an error
}

// errSilent ends an answer whose body stopped coming.
var errSilent = errors.New("the answer stopped coming")

// getJSON reads one JSON answer from the configured origin, of at most limit
// bytes and without a pause of BodyTimeout.
func (h *Hub) getJSON(ctx context.Context, what string, at *url.URL, limit int64, into any) (http.Header, error) {
	reading, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	resp, err := h.do(reading, request{
		op: "resolve", what: what, url: at, stay: true, header: http.Header{"Accept": {"application/json"}},
	})
	if err != nil {
		return nil, err
	}
	defer discard(resp)
	silence := time.AfterFunc(h.opts.BodyTimeout, func() { cancel(errSilent) })
	body, err := io.ReadAll(io.LimitReader(heard{resp.Body, silence, h.opts.BodyTimeout}, limit+1))
	silence.Stop()
	if err != nil && ctx.Err() == nil && errors.Is(context.Cause(reading), errSilent) {
		return nil, h.refuse("resolve", what, fmt.Errorf("%w: %w for %v", ErrUnavailable, errSilent, h.opts.BodyTimeout))
	}
	if err != nil {
		return nil, h.refuse("resolve", what, transportError(ctx, err))
	}
	if int64(len(body)) > limit {
		return nil, h.refuse("resolve", what, fmt.Errorf("%w: answer is longer than %d bytes", ErrProtocol, limit))
	}
	if err := json.Unmarshal(body, into); err != nil {
		return nil, h.refuse("resolve", what, fmt.Errorf("%w: answer is not the JSON expected: %w", ErrProtocol, jsonCause(err)))
	}
	return resp.Header, nil
}

// heard puts a timer off with each read that gave bytes.
type heard struct {
	io.Reader
	silence *time.Timer
	limit   time.Duration
}

func (r heard) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if n > 0 {
		r.silence.Reset(r.limit)
	}
	return n, err
}

// jsonCause keeps the kind of a decoding error and drops the quoted input.
func jsonCause(err error) error {
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		return fmt.Errorf("syntax error at byte %d", syntax.Offset)
	}
	if kind, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Errorf("wrong type of field %.60q", kind.Field)
	}
	return errors.New("unreadable")
}

// address appends an already escaped path to the configured base.
func (h *Hub) address(escaped string) *url.URL {
	at := *h.base
	at.RawPath = h.base.EscapedPath() + "/" + escaped
	plain, err := url.PathUnescape(at.RawPath)
	if err != nil {
		plain = at.RawPath
	}
	at.Path = plain
	return &at
}

// escapePath escapes each segment of a slash separated path.
func escapePath(p string) string {
	segments := strings.Split(p, "/")
	for i, s := range segments {
		segments[i] = url.PathEscape(s)
	}
	return strings.Join(segments, "/")
}
