package hubmirror

import (
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// holding is a Library that knows one commit of before.
type holding struct {
	*fakeLibrary
	held *artifact.Manifest
}

func (l holding) Held(_, commit string) (*artifact.Manifest, bool) {
	return l.held, l.held.Commit == commit
}
func (holding) Keep(*artifact.Manifest, time.Time) {}

func TestASessionGivesNobodyWhatAnotherSourceOrAccessWouldKeep(t *testing.T) {
	t.Parallel()
	ref := artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/tiny", Revision: "main"}
	told := func(source string, access artifact.Access, commit string) *artifact.Manifest {
		m := newManifest(t, ref, commit, artifact.File{Path: "a", Size: 1, SHA256: artifact.Digest{1}, LFS: true}).WithAccess(access)
		m.Source = source
		return m
	}
	before, now := testCommit, strings.Repeat("cd", 20)
	for name, c := range map[string]struct {
		held, now *artifact.Manifest
		kept      bool
	}{
		"open then and now":       {told("a", artifact.AccessOpen, before), told("b", artifact.AccessOpen, now), true},
		"gated then and now":      {told("a", artifact.AccessGated, before), told("a", artifact.AccessGated, now), true},
		"gated then, open now":    {told("a", artifact.AccessGated, before), told("a", artifact.AccessOpen, now), false},
		"gated then by another":   {told("a", artifact.AccessGated, before), told("b", artifact.AccessGated, now), false},
		"private then, gated now": {told("a", artifact.AccessPrivate, before), told("a", artifact.AccessGated, now), false},
	} {
		m := New(Options{Library: holding{&fakeLibrary{}, c.held}})
		r := httptest.NewRequest("GET", "/", nil)
		rt := route{kind: routeInfo, repo: ref.Name, rev: "main"}
		if first, _ := m.steady(r, rt, c.held); first != c.held {
			t.Errorf("%s: the session begins with %s", name, first.Commit)
		}
		if got, _ := m.steady(r, rt, c.now); (got == c.held) != c.kept {
			t.Errorf("%s: the session goes on with %s", name, got.Commit)
		}
	}
}

func TestRefsNameNoRevisionThatItsOwnSourceWouldKeepFromTheCaller(t *testing.T) {
	t.Parallel()
	l := &fakeLibrary{manifests: map[artifact.Ref]*artifact.Manifest{}}
	for rev, access := range map[string]artifact.Access{"main": artifact.AccessOpen, "dev": artifact.AccessOpen, "inside": artifact.AccessPrivate} {
		ref := artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/tiny", Revision: rev}
		l.manifests[ref] = newManifest(t, ref, testCommit, artifact.File{Path: "a", Size: 1, SHA256: artifact.Digest{1}, LFS: true}).WithAccess(access)
	}
	var got refLists
	newRecorder(t, New(Options{Library: l}), "GET", "/api/models/acme/tiny/refs").decode(t, &got)
	if len(got.Branches) != 2 || got.Branches[1].Name != "dev" {
		t.Errorf("branches %v", got.Branches)
	}
}
