package hub

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"strings"
)

// ServeHTTP answers the hub's API, file routes and, below /cdn/, the bytes to
// which relative redirects point.
func (o *Origin) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	o.requests.Add(1)
	escaped := r.URL.EscapedPath()
	if strings.HasPrefix(escaped, "/cdn/") {
		o.serveCDN(w, r)
		return
	}
	o.countToken(r)
	f := o.faultFor(r)
	segs, err := splitPath(escaped)
	if err != nil {
		o.countRoute("other")
		fail(w, http.StatusBadRequest, "", err.Error(), "")
		return
	}
	if len(segs) >= 3 && segs[0] == "api" && segs[1] == "models" {
		o.serveAPI(w, r, segs[2:], f)
		return
	}
	for i := 1; i <= 2 && i+2 < len(segs); i++ {
		if segs[i] == "resolve" || segs[i] == "raw" {
			o.countRoute(segs[i])
			if f.apply(w) || o.noAccount(w, r) {
				return
			}
			o.serveFile(w, r, strings.Join(segs[:i], "/"), segs[i+1], strings.Join(segs[i+2:], "/"), segs[i] == "raw", f)
			return
		}
	}
	o.countRoute("other")
	if f.apply(w) {
		return
	}
	if r.URL.Path == "/api/whoami-v2" {
		o.whoami(w, r)
		return
	}
	fail(w, http.StatusNotFound, "", "not found", "")
}

func splitPath(escaped string) ([]string, error) {
	segs := strings.Split(strings.TrimPrefix(path.Clean(escaped), "/"), "/")
	for i, s := range segs {
		u, err := url.PathUnescape(s)
		if err != nil {
			return nil, fmt.Errorf("unescape path: %w", err)
		}
		segs[i] = u
	}
	return segs, nil
}

// apiRoutes are the words that may follow a repository.
var apiRoutes = map[string]bool{"revision": true, "tree": true, "refs": true, "paths-info": true, "auth-check": true}

func (o *Origin) serveAPI(w http.ResponseWriter, r *http.Request, segs []string, f *Fault) {
	cut := min(2, len(segs))
	if len(segs) > 1 && apiRoutes[segs[1]] {
		cut = 1
	}
	repo, tail := strings.Join(segs[:cut], "/"), segs[cut:]
	route := "info"
	if len(tail) > 0 && tail[0] != "revision" {
		route = tail[0]
	}
	if !apiRoutes[route] && route != "info" {
		route = "other"
	}
	o.countRoute(route)
	if f.apply(w) || o.noAccount(w, r) || o.hidden(w, r, repo) {
		return
	}
	rev := "main"
	if len(tail) > 1 {
		rev = tail[1]
	}
	revs, err := o.revisions(repo)
	if err != nil {
		fail(w, http.StatusNotFound, "RepoNotFound", "Repository not found", "")
		return
	}
	if route != "info" && o.refused(w, r, repo) {
		return
	}
	if route == "refs" {
		o.serveRefs(w, revs)
		return
	}
	c, err := o.lookup(repo, rev)
	if err != nil {
		failLookup(w, err, rev)
		return
	}
	switch route {
	case "info":
		o.serveInfo(w, r, repo, c)
	case "tree":
		o.serveTree(w, r, c, strings.Join(tail[2:], "/"))
	case "paths-info":
		servePaths(w, r, c)
	case "auth-check":
		w.WriteHeader(http.StatusOK)
	default:
		fail(w, http.StatusNotFound, "", "no such route", "")
	}
}

func failLookup(w http.ResponseWriter, err error, rev string) {
	if errors.Is(err, errAbsent) {
		fail(w, http.StatusNotFound, "RepoNotFound", "Repository not found", "")
		return
	}
	fail(w, http.StatusNotFound, "RevisionNotFound", "Invalid rev id: "+rev, "")
}

type lfsInfo struct {
	OID         string `json:"oid,omitempty"`
	SHA256      string `json:"sha256,omitempty"`
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

func (o *Origin) serveInfo(w http.ResponseWriter, r *http.Request, repo string, c *commit) {
	blobs, _ := strconv.ParseBool(r.URL.Query().Get("blobs"))
	siblings := make([]sibling, 0, len(c.files))
	for _, e := range c.files {
		s := sibling{Name: e.path}
		if blobs {
			s.Size, s.BlobID = &e.size, e.oid
			if e.lfs {
				s.LFS = &lfsInfo{SHA256: e.sha256, Size: e.size, PointerSize: len(e.pointer())}
			}
		}
		siblings = append(siblings, s)
	}
	gated, private := o.said(repo)
	writeJSON(w, map[string]any{
		"id": repo, "modelId": repo, "sha": c.id, "siblings": siblings, "private": private, "gated": gated,
		"disabled": false, "tags": []string{"safetensors"}, "pipeline_tag": "text-generation", "library_name": "transformers",
	})
}

func fileEntry(e entry) treeEntry {
	t := treeEntry{Type: "file", OID: e.oid, Size: e.size, Path: e.path}
	if e.lfs {
		t.LFS = &lfsInfo{OID: e.sha256, Size: e.size, PointerSize: len(e.pointer())}
	}
	return t
}

func (o *Origin) serveTree(w http.ResponseWriter, r *http.Request, c *commit, sub string) {
	q := r.URL.Query()
	recursive, _ := strconv.ParseBool(q.Get("recursive"))
	out, seen := []treeEntry{}, map[string]bool{}
	for _, e := range c.files {
		rel := e.path
		if sub != "" {
			var below bool
			if rel, below = strings.CutPrefix(e.path, sub+"/"); !below {
				continue
			}
		}
		dirs := strings.Split(rel, "/")
		dirs = dirs[:len(dirs)-1]
		for i := range dirs {
			dir := path.Join(sub, strings.Join(dirs[:i+1], "/"))
			if (recursive || i == 0) && !seen[dir] {
				seen[dir] = true
				out = append(out, treeEntry{Type: "directory", OID: gitID(dir), Path: dir})
			}
		}
		if recursive || len(dirs) == 0 {
			out = append(out, fileEntry(e))
		}
	}
	if sub != "" && len(out) == 0 {
		fail(w, http.StatusNotFound, "EntryNotFound", sub+" does not exist", c.id)
		return
	}
	from, err := strconv.Atoi(q.Get("cursor"))
	if err != nil || from < 0 || from > len(out) {
		from = 0
	}
	to := min(from+o.opts.PageSize, len(out))
	if to < len(out) {
		q.Set("cursor", strconv.Itoa(to))
		w.Header().Set("Link", fmt.Sprintf("<http://%s%s?%s>; rel=\"next\"", r.Host, r.URL.EscapedPath(), q.Encode()))
	}
	writeJSON(w, out[from:to])
}

func servePaths(w http.ResponseWriter, r *http.Request, c *commit) {
	var paths []string
	if strings.Contains(r.Header.Get("Content-Type"), "json") {
		var body struct {
			Paths []string `json:"paths"`
		}
		if err := json.NewDecoder(io.LimitReader(r.Body, 1<<20)).Decode(&body); err != nil {
			fail(w, http.StatusBadRequest, "", "bad body", "")
			return
		}
		paths = body.Paths
	} else if err := r.ParseForm(); err == nil {
		paths = r.Form["paths"]
	}
	out := []treeEntry{}
	for _, p := range paths {
		if e, ok := c.find(p); ok {
			out = append(out, fileEntry(e))
		}
	}
	writeJSON(w, out)
}

func (o *Origin) serveRefs(w http.ResponseWriter, revs map[string]string) {
	type ref struct {
		Name   string `json:"name"`
		Ref    string `json:"ref"`
		Target string `json:"targetCommit"`
	}
	branches, tags := []ref{}, []ref{}
	for rev, dir := range revs {
		c, err := o.scan(dir)
		if err != nil {
			fail(w, http.StatusInternalServerError, "", "scan failed", "")
			return
		}
		if tagName.MatchString(rev) {
			tags = append(tags, ref{rev, "refs/tags/" + rev, c.id})
		} else {
			branches = append(branches, ref{rev, "refs/heads/" + rev, c.id})
		}
	}
	writeJSON(w, map[string]any{"branches": branches, "tags": tags, "converts": []ref{}})
}

func writeJSON(w http.ResponseWriter, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		fail(w, http.StatusInternalServerError, "", "encode failed", "")
		return
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	_, _ = w.Write(body)
}
