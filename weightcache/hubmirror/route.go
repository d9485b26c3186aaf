package hubmirror

import (
	"net/url"
	"path"
	"strings"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// routeKind is what a request asks for; it is also a metric label.
type routeKind int

const (
	routeOther   routeKind = iota // nothing we know
	routeForeign                  // data sets and spaces
	routeWhoami
	routeInfo
	routeTree
	routePaths
	routeRefs
	routeCommits
	routeAuth
	routeResolve
	routeRaw
	routeKinds // their number
)

var routeNames = [routeKinds]string{"other", "foreign", "whoami", "info", "tree", "paths-info", "refs", "commits", "auth-check", "resolve", "raw"}

func (k routeKind) String() string { return routeNames[k] }

// route is a parsed path. rev is never empty where repo is set.
type route struct {
	kind            routeKind
	repo, rev, path string
}

// apiWords may follow a repository in an API path.
var apiWords = map[string]routeKind{
	"revision": routeInfo, "tree": routeTree, "paths-info": routePaths, "refs": routeRefs,
	"commits": routeCommits, "auth-check": routeAuth, "xet-read-token": routeOther,
}

// parseRoute reads an escaped path. It is normalised first, so that an empty
// or dot segment never reaches a name; each segment is then unescaped by
// itself, so that a revision may hold slashes.
func parseRoute(escaped string) route {
	segs := strings.Split(strings.TrimPrefix(path.Clean("/"+escaped), "/"), "/")
	for i, s := range segs {
		plain, err := url.PathUnescape(s)
		if err != nil {
			return route{}
		}
		segs[i] = plain
	}
	switch {
	case segs[0] == "api":
		return parseAPI(segs[1:])
	case segs[0] == "datasets", segs[0] == "spaces":
		return route{kind: routeForeign}
	}
	for i := 1; i <= 2 && i < len(segs); i++ {
		kind := map[string]routeKind{"resolve": routeResolve, "raw": routeRaw}[segs[i]]
		if kind == routeOther {
			continue
		}
		rev, rest := cutRevision(segs[i+1:])
		if rev == "" || len(rest) == 0 {
			return route{}
		}
		return route{kind, strings.Join(segs[:i], "/"), rev, strings.Join(rest, "/")}
	}
	return route{}
}

func parseAPI(segs []string) route {
	if len(segs) == 1 && segs[0] == "whoami-v2" {
		return route{kind: routeWhoami}
	}
	if len(segs) < 2 {
		return route{}
	}
	switch segs[0] {
	case "datasets", "spaces":
		return route{kind: routeForeign}
	case "models":
	default:
		return route{}
	}
	segs = segs[1:]
	cut := min(2, len(segs))
	if len(segs) > 1 {
		if _, word := apiWords[segs[1]]; word {
			cut = 1 // a repository without an organisation
		}
	}
	repo, tail := strings.Join(segs[:cut], "/"), segs[cut:]
	if len(tail) == 0 {
		return route{routeInfo, repo, artifact.DefaultRevision, ""}
	}
	kind := apiWords[tail[0]]
	switch kind {
	case routeOther:
		return route{}
	case routeRefs, routeAuth:
		if len(tail) > 1 {
			return route{}
		}
		return route{kind, repo, artifact.DefaultRevision, ""}
	}
	rev, rest := cutRevision(tail[1:])
	if rev == "" || len(rest) > 0 && kind != routeTree {
		return route{}
	}
	return route{kind, repo, rev, strings.Join(rest, "/")}
}

// cutRevision takes the revision off the front: one segment, or three of the
// hub's own namespaces ("refs/pr/1", "refs/convert/parquet").
func cutRevision(segs []string) (rev string, rest []string) {
	if len(segs) >= 3 && segs[0] == "refs" && (segs[1] == "pr" || segs[1] == "convert") {
		return strings.Join(segs[:3], "/"), segs[3:]
	}
	if len(segs) == 0 {
		return "", nil
	}
	return segs[0], segs[1:]
}
