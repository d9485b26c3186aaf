package hubmirror

import (
	"context"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Limits of asking what kinds of names revisions are.
const (
	namesWithin = 2 * time.Second // llama-server begins with this question
	namesFor    = 5 * time.Minute // an answer, also that the source cannot be asked
	maxNames    = 256             // repositories whose names are remembered
)

// RefNamer is implemented by a Library whose sources tell what kinds of names
// there are. Without it, or while a source cannot be asked, a name is a branch.
type RefNamer interface {
	// RefNames maps names of a repository's revisions to full names
	// ("refs/heads/main", "refs/tags/v1").
	RefNames(ctx context.Context, repo string) (map[string]string, error)
}

// Dater is implemented by a Library that knows since when it knows a manifest.
type Dater interface {
	// Since is when the manifest's ref came to mean it; zero: unknown.
	Since(m *artifact.Manifest) time.Time
}

// refNames remembers what sources told. The zero value is ready.
type refNames struct {
	mu sync.Mutex
	m  map[string]toldNames // by repository
}

type toldNames struct {
	names map[string]string
	at    time.Time
}

// names asks what kinds of names a repository has, or remembers.
func (m *Mirror) names(ctx context.Context, repo string) map[string]string {
	namer, ok := m.opts.Library.(RefNamer)
	if !ok {
		return nil
	}
	now := m.opts.Now()
	m.refNames.mu.Lock()
	told, found := m.refNames.m[repo]
	m.refNames.mu.Unlock()
	if found && within(now, told.at, namesFor) {
		return told.names
	}
	limited, cancel := context.WithTimeout(ctx, namesWithin)
	defer cancel()
	names, err := namer.RefNames(limited, repo)
	if err != nil {
		if ctx.Err() != nil {
			return told.names
		}
		m.opts.Log.LogAttrs(ctx, slog.LevelInfo, "kinds of refs not known", slog.String("repo", repo), slog.Any("error", err))
		names = told.names // what was a tag still is one
	}
	m.refNames.mu.Lock()
	defer m.refNames.mu.Unlock()
	if m.refNames.m == nil || len(m.refNames.m) >= maxNames {
		m.refNames.m = map[string]toldNames{}
	}
	m.refNames.m[repo] = toldNames{names, now}
	return names
}

type refEntry struct {
	Name   string `json:"name"`
	Ref    string `json:"ref"`
	Target string `json:"targetCommit"`
}

// refLists are the answers to /refs.
type refLists struct {
	Branches     []refEntry `json:"branches"`
	Converts     []refEntry `json:"converts"`
	Tags         []refEntry `json:"tags"`
	PullRequests []refEntry `json:"pullRequests,omitempty"`
}

// listRefs sorts held revisions into lists: main first, by full name where one
// is known, commits in none.
func listRefs(main string, held, names map[string]string) refLists {
	l := refLists{
		Branches: []refEntry{{artifact.DefaultRevision, "refs/heads/" + artifact.DefaultRevision, main}},
		Converts: []refEntry{}, Tags: []refEntry{}, PullRequests: []refEntry{},
	}
	for rev, commit := range held {
		full := names[rev]
		if strings.HasPrefix(rev, "refs/") {
			full = rev
		}
		switch {
		case rev == artifact.DefaultRevision, len(rev) == 40 && artifact.ValidCommit(rev) == nil:
		case strings.HasPrefix(full, "refs/pr/"):
			l.PullRequests = append(l.PullRequests, refEntry{full, full, commit})
		case strings.HasPrefix(full, "refs/convert/"):
			l.Converts = append(l.Converts, refEntry{strings.TrimPrefix(full, "refs/convert/"), full, commit})
		case strings.HasPrefix(full, "refs/tags/"):
			l.Tags = append(l.Tags, refEntry{rev, full, commit})
		default:
			l.Branches = append(l.Branches, refEntry{rev, "refs/heads/" + rev, commit})
		}
	}
	for _, list := range [][]refEntry{l.Branches[1:], l.Converts, l.Tags, l.PullRequests} {
		slices.SortFunc(list, func(a, b refEntry) int { return strings.Compare(a.Name, b.Name) })
	}
	return l
}

// serveRefs names main and what else the Library holds of the repository.
// Clients take main, or else the first branch.
func (m *Mirror) serveRefs(w http.ResponseWriter, r *http.Request, rt route, mf *artifact.Manifest) {
	var held, names map[string]string
	if lister, ok := m.opts.Library.(RefLister); ok {
		var err error
		if held, err = lister.Refs(r.Context(), rt.repo); err != nil {
			m.opts.Log.LogAttrs(r.Context(), slog.LevelWarn, "list refs", slog.Any("error", err))
		}
	}
	maps.DeleteFunc(held, func(rev, _ string) bool {
		// Another source may have answered for it, which does not show it to all.
		other, err := m.opts.Library.Manifest(r.Context(), artifact.Ref{Scheme: artifact.SchemeHub, Name: rt.repo, Revision: rev})
		return err != nil || !m.judgedAlike(other, mf)
	})
	for rev := range held {
		if rev != artifact.DefaultRevision && artifact.ValidCommit(rev) != nil && !strings.HasPrefix(rev, "refs/") {
			names = m.names(r.Context(), rt.repo)
			break
		}
	}
	lists := listRefs(mf.Commit, held, names)
	if asked, _ := strconv.ParseBool(r.URL.Query().Get("include_prs")); !asked {
		lists.PullRequests = nil
	}
	m.writeJSON(w, r, mf.Commit, lists)
}

// hubTime is how the hub writes times, in UTC.
const hubTime = "2006-01-02T15:04:05.000Z"

// since is when the mirror learned what the ref of a manifest means, as it stands
// in answers; empty where that is not known any more.
func (m *Mirror) since(mf *artifact.Manifest) string {
	if dater, ok := m.opts.Library.(Dater); ok {
		if at := dater.Since(mf); !at.IsZero() {
			return at.UTC().Format(hubTime)
		}
	}
	return ""
}

// serveCommits names the one commit that is known. Its own date is not: the one
// given is when the mirror learned of it.
func (m *Mirror) serveCommits(w http.ResponseWriter, r *http.Request, mf *artifact.Manifest) {
	date := m.since(mf)
	if date == "" {
		date = m.opts.Now().UTC().Format(hubTime)
	}
	m.writeJSON(w, r, mf.Commit, []map[string]any{{
		"id": mf.Commit, "title": "", "message": "", "authors": []string{}, "date": date,
	}})
}
