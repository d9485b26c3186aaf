package hubmirror

import (
	"crypto/sha1" // git names its objects by SHA-1
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

type lfsInfo struct {
	OID         string `json:"oid,omitempty"`    // in trees
	SHA256      string `json:"sha256,omitempty"` // in repository infos
	Size        int64  `json:"size"`
	PointerSize int    `json:"pointerSize"`
}

type treeEntry struct {
	Type string   `json:"type"`
	OID  string   `json:"oid"`
	Size int64    `json:"size"`
	Path string   `json:"path"`
	LFS  *lfsInfo `json:"lfs,omitempty"`
}

type sibling struct {
	Name   string   `json:"rfilename"`
	Size   *int64   `json:"size,omitempty"`
	BlobID string   `json:"blobId,omitempty"`
	LFS    *lfsInfo `json:"lfs,omitempty"`
}

// isLFS says whether clients name the file's blob by SHA-256. A file whose git
// id is unknown can have no other name.
func isLFS(f artifact.File) bool { return f.LFS || f.GitSHA1 == "" }

// blobName is the ETag without its quotes.
func blobName(f artifact.File) string {
	if isLFS(f) {
		return f.SHA256.String()
	}
	return f.GitSHA1
}

// pointer is the text that git holds in place of an LFS file
// (git-lfs specification, version 1).
func pointer(f artifact.File) string {
	return fmt.Sprintf("version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n", f.SHA256, f.Size)
}

// gitID is the git blob id of a text.
func gitID(text string) string {
	sum := sha1.Sum(fmt.Appendf(nil, "blob %d\x00%s", len(text), text))
	return hex.EncodeToString(sum[:])
}

func entryOf(f artifact.File) treeEntry {
	e := treeEntry{Type: "file", OID: f.GitSHA1, Size: f.Size, Path: f.Path}
	if isLFS(f) {
		text := pointer(f)
		e.OID = gitID(text)
		e.LFS = &lfsInfo{OID: f.SHA256.String(), Size: f.Size, PointerSize: len(text)}
	}
	return e
}

func (m *Mirror) serveInfo(w http.ResponseWriter, r *http.Request, rt route, mf *artifact.Manifest) {
	blobs, _ := strconv.ParseBool(r.URL.Query().Get("blobs"))
	siblings := make([]sibling, len(mf.Files))
	for i, f := range mf.Files {
		siblings[i].Name = f.Path
		if blobs {
			e := entryOf(f)
			siblings[i].Size, siblings[i].BlobID = &mf.Files[i].Size, e.OID
			if e.LFS != nil {
				siblings[i].LFS = &lfsInfo{SHA256: e.LFS.OID, Size: e.LFS.Size, PointerSize: e.LFS.PointerSize}
			}
		}
	}
	var gated any = false
	if mf.Access == artifact.AccessGated {
		gated = "manual"
	}
	info := map[string]any{
		"id": rt.repo, "modelId": rt.repo, "sha": mf.Commit, "siblings": siblings,
		"private": mf.Access == artifact.AccessPrivate, "gated": gated, "disabled": false, "tags": []string{}, "downloads": 0, "likes": 0,
	}
	if date := m.since(mf); date != "" {
		info["lastModified"] = date
	}
	m.writeJSON(w, r, mf.Commit, info)
}

// treeOf lists what lies below sub: directories before what they hold.
func treeOf(files []artifact.File, sub string, recursive bool) []treeEntry {
	out, seen := []treeEntry{}, map[string]bool{}
	for _, f := range files {
		rel := f.Path
		if sub != "" {
			var below bool
			if rel, below = strings.CutPrefix(f.Path, sub+"/"); !below {
				continue
			}
		}
		nested := false
		for i, c := range rel {
			if c != '/' {
				continue
			}
			dir := path.Join(sub, rel[:i])
			if (recursive || !nested) && !seen[dir] {
				seen[dir] = true
				out = append(out, treeEntry{Type: "directory", OID: gitID(dir), Path: dir})
			}
			nested = true
		}
		if recursive || !nested {
			out = append(out, entryOf(f))
		}
	}
	return out
}

func (m *Mirror) serveTree(w http.ResponseWriter, r *http.Request, rt route, mf *artifact.Manifest) {
	q := r.URL.Query()
	recursive, _ := strconv.ParseBool(q.Get("recursive"))
	entries := treeOf(mf.Files, rt.path, recursive)
	if rt.path != "" && len(entries) == 0 {
		m.refuse(w, r, refusal{http.StatusNotFound, codeEntry, "the revision has no such folder", mf.Commit})
		return
	}
	from, err := strconv.Atoi(q.Get("cursor"))
	if err != nil || from < 0 || from > len(entries) {
		from = 0
	}
	size := m.opts.PageSize
	if limit, err := strconv.Atoi(q.Get("limit")); err == nil && limit > 0 {
		size = min(size, limit)
	}
	to := min(from+size, len(entries))
	if to < len(entries) {
		q.Set("cursor", strconv.Itoa(to))
		w.Header().Set("Link", "<"+m.base(r)+r.URL.EscapedPath()+"?"+q.Encode()+`>; rel="next"`)
	}
	m.writeJSON(w, r, mf.Commit, entries[from:to])
}

// base is the scheme and host by which the client reached us. Clients refuse
// relative addresses of further pages.
func (m *Mirror) base(r *http.Request) string {
	if m.opts.PublicURL != "" {
		return m.opts.PublicURL
	}
	host := r.Host
	if at, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok && host == "" {
		host = at.String() // HTTP/1.0 needs no Host
	}
	if r.TLS != nil {
		return "https://" + host
	}
	return "http://" + host
}

func (m *Mirror) servePaths(w http.ResponseWriter, r *http.Request, mf *artifact.Manifest) {
	// A body that does not come is not waited for, by the server neither: the
	// deadline stands until the body's end.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(headerWithin))
	paths, ok := askedPaths(r)
	if !ok {
		m.refuse(w, r, refusal{http.StatusBadRequest, "BadRequest", "want paths as a form or as JSON, at most 10000 of them in 1 MiB", mf.Commit})
		return
	}
	out := []treeEntry{}
	for _, p := range paths {
		p = strings.Trim(p, "/")
		if f, found := mf.File(p); found {
			out = append(out, entryOf(f))
		} else if i, _ := slices.BinarySearchFunc(mf.Files, p+"/", func(f artifact.File, p string) int {
			return strings.Compare(f.Path, p)
		}); i < len(mf.Files) && strings.HasPrefix(mf.Files[i].Path, p+"/") {
			out = append(out, treeEntry{Type: "directory", OID: gitID(p), Path: p})
		}
	}
	m.writeJSON(w, r, mf.Commit, out)
}

// askedPaths reads the body of a paths-info: a form from Python clients, JSON
// from JavaScript ones.
func askedPaths(r *http.Request) ([]string, bool) {
	data, err := io.ReadAll(io.LimitReader(r.Body, maxForm+1))
	if err != nil || len(data) > maxForm {
		return nil, false
	}
	var paths []string
	if kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); kind == "application/json" {
		var body struct {
			Paths []string `json:"paths"`
		}
		if json.Unmarshal(data, &body) != nil {
			return nil, false
		}
		paths = body.Paths
	} else {
		r.Body = io.NopCloser(strings.NewReader(string(data)))
		if r.ParseForm() != nil {
			return nil, false
		}
		paths = r.PostForm["paths"]
	}
	return paths, len(paths) <= maxAsked
}

func (m *Mirror) writeJSON(w http.ResponseWriter, r *http.Request, commit string, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		m.refuseError(w, r, fmt.Errorf("encode answer: %w", err))
		return
	}
	h := w.Header()
	if commit != "" {
		h.Set("X-Repo-Commit", commit)
	}
	h.Set("Content-Type", "application/json; charset=utf-8")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if r.Method != http.MethodHead {
		_, _ = w.Write(body)
	}
}
