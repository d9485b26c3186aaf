package weightcache

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// tellingSource is a memSource whose access can be asked and changed.
type tellingSource struct {
	*memSource
	mu     sync.Mutex
	access artifact.Access
	err    error
	asked  int
}

func newTellingSource(files map[string][]byte, access artifact.Access) *tellingSource {
	s := &tellingSource{memSource: newMemSource(files), access: access}
	s.listing = func(l *artifact.Listing) { l.Access, _ = s.now() }
	return s
}

func (s *tellingSource) now() (artifact.Access, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.access, s.err
}

func (s *tellingSource) tell(access artifact.Access, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.access, s.err = access, err
}

func (s *tellingSource) Access(context.Context, artifact.Ref, string) (artifact.Access, error) {
	s.mu.Lock()
	s.asked++
	s.mu.Unlock()
	return s.now()
}

func newTellingRig(t *testing.T, src *tellingSource, change ...func(*Options, *PullerOptions)) *rig {
	t.Helper()
	return newRig(t, src.memSource, append([]func(*Options, *PullerOptions){func(_ *Options, po *PullerOptions) {
		po.Sources[0].Source = src
	}}, change...)...)
}

// viewsOf lists what stands below the views directory, down to repositories.
func viewsOf(t *testing.T, r *rig) []string {
	t.Helper()
	var list []string
	for _, pattern := range []string{"flat/*", "hub/*/models--*"} {
		found, err := filepath.Glob(filepath.Join(r.store.ViewsDir(), pattern))
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, found...)
	}
	return list
}

func publishBoth(t *testing.T, r *rig, m *artifact.Manifest) (flat, hub error) {
	t.Helper()
	_, flat = r.store.FlatView(m.Digest)
	_, hub = r.store.HubView(m)
	return flat, hub
}

func TestARestrictedArtifactHasNoViewUnlessThePolicySaysSo(t *testing.T) {
	t.Parallel()
	for _, access := range []artifact.Access{artifact.AccessGated, artifact.AccessPrivate} {
		t.Run(string(access), func(t *testing.T) {
			t.Parallel()
			r := newTellingRig(t, newTellingSource(model(1, testSegment), access))
			m := r.ensure(t)
			flat, hub := publishBoth(t, r, m)
			if !errors.Is(flat, ErrRestricted) || !errors.Is(hub, ErrRestricted) || len(viewsOf(t, r)) > 0 {
				t.Errorf("views gave %v and %v, there are %v", flat, hub, viewsOf(t, r))
			}
			if st, _ := r.puller.Status(testRef); !st.ViewsWithheld || st.Access != access || len(st.Views) > 0 {
				t.Errorf("status %+v", st)
			}
			grant := func(so *Options, _ *PullerOptions) {
				so.MayView = func(m *artifact.Manifest) bool { return m.Ref.Name == "acme/tiny" }
			}
			src := newTellingSource(model(1, testSegment), access)
			granted := newTellingRig(t, src, grant)
			m = granted.ensure(t)
			if flat, hub := publishBoth(t, granted, m); flat != nil || hub != nil {
				t.Errorf("granted views gave %v and %v", flat, hub)
			}
			if got := len(viewsOf(t, granted)); got != 2 {
				t.Errorf("%d views, want 2", got)
			}
			// A grant that is taken back takes the views of before with it.
			granted.reopen(t, func(_ *Options, po *PullerOptions) { po.Sources[0].Source = src })
			if left := viewsOf(t, granted); len(left) > 0 {
				t.Errorf("left after the grant: %v", left)
			}
			if st, _ := granted.puller.Status(testRef); len(st.Views) > 0 || !st.ViewsWithheld || st.State != Ready {
				t.Errorf("status %+v", st)
			}
		})
	}
}

func TestAccessIsOnTheDriveAndFollowsItsRepository(t *testing.T) {
	t.Parallel()
	src := newTellingSource(model(1, testSegment), artifact.AccessOpen)
	r := newTellingRig(t, src)
	old := r.ensure(t)
	if _, err := r.puller.Ensure(t.Context(), artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/tiny", Revision: "v1"}, EnsureOptions{}); err != nil {
		t.Fatal(err)
	}
	if flat, hub := publishBoth(t, r, old); flat != nil || hub != nil {
		t.Fatal(flat, hub)
	}
	// main moves on, and the repository is gated by then: what v1 and the old
	// main mean is of the same repository.
	src.set(func() {
		src.files["config.json"] = []byte(`{"model_type":"other"}`)
		src.commit = strings.Repeat("cd", 20)
	})
	src.tell(artifact.AccessGated, nil)
	if _, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{Refresh: true}); err != nil {
		t.Fatal(err)
	}
	check := func() {
		t.Helper()
		for _, m := range r.store.Manifests() {
			if m.Access != artifact.AccessGated {
				t.Errorf("%s is %q", m.Ref, m.Access)
			}
		}
		if left := viewsOf(t, r); len(left) > 0 {
			t.Errorf("views %v", left)
		}
	}
	check()
	r.reopen(t, func(_ *Options, po *PullerOptions) { po.Sources[0].Source = src })
	check()
	records, err := filepath.Glob(r.dir + "/weights/refs/*.json")
	if err != nil || len(records) < 2 {
		t.Fatalf("records %v, %v", records, err)
	}
	for _, path := range records {
		data, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(data), `"access": "gated"`) {
			t.Errorf("%s, %v: %.200s", path, err, data)
		}
	}
}

func TestASupersededArtifactLosesItsViewsWithItsRepository(t *testing.T) {
	t.Parallel()
	src := newTellingSource(model(1, testSegment), artifact.AccessOpen)
	r := newTellingRig(t, src)
	old := r.ensure(t)
	if flat, hub := publishBoth(t, r, old); flat != nil || hub != nil {
		t.Fatal(flat, hub)
	}
	lease, err := r.store.AcquireFor(old.Digest, "engine")
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Release()
	src.set(func() {
		src.files["config.json"] = []byte(`{"model_type":"other"}`)
		src.commit = strings.Repeat("cd", 20)
	})
	if _, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{Refresh: true}); err != nil {
		t.Fatal(err)
	}
	if got := len(viewsOf(t, r)); got != 2 {
		t.Fatalf("%d views of what an engine reads, want 2", got)
	}
	src.tell(artifact.AccessPrivate, nil)
	if unknown, err := r.puller.CheckAccess(t.Context(), false); unknown != 0 || err != nil {
		t.Fatal(unknown, err)
	}
	if left := viewsOf(t, r); len(left) > 0 {
		t.Errorf("views %v", left)
	}
}

func TestEqualBytesOfAnOpenRefAreViewedAndTheRestrictedNameIsNot(t *testing.T) {
	t.Parallel()
	files := model(1, testSegment)
	open, closed := newTellingSource(files, artifact.AccessOpen), newTellingSource(files, artifact.AccessPrivate)
	closed.name = "closed"
	sources := func(so *Options, po *PullerOptions) {
		po.Sources = []Rule{{Source: open, Refs: []string{"acme/*"}}, {Source: closed, Refs: []string{"secret/*"}}}
	}
	r := newRig(t, open.memSource, sources)
	hidden := artifact.Ref{Scheme: artifact.SchemeHub, Name: "secret/tiny", Revision: "main"}
	m, err := r.puller.Ensure(t.Context(), hidden, EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if flat, hub := publishBoth(t, r, m); !errors.Is(flat, ErrRestricted) || !errors.Is(hub, ErrRestricted) {
		t.Fatal(flat, hub)
	}
	shown := r.ensure(t)
	if shown.Digest != m.Digest {
		t.Fatal("not the same artifact")
	}
	if flat, hub := publishBoth(t, r, shown); flat != nil || hub != nil {
		t.Fatal(flat, hub)
	}
	if _, err := r.store.HubView(m); !errors.Is(err, ErrRestricted) {
		t.Errorf("the hub view of the restricted ref gave %v", err)
	}
	views := viewsOf(t, r)
	if len(views) != 2 || slices.ContainsFunc(views, func(v string) bool { return strings.Contains(v, "secret") }) {
		t.Errorf("views %v", views)
	}
	// What the open ref allowed goes with it.
	if err := r.puller.Remove(t.Context(), testRef); err != nil {
		t.Fatal(err)
	}
	if left := viewsOf(t, r); len(left) > 0 {
		t.Errorf("views %v", left)
	}
}

func TestOfAHubViewOnlyTheRestrictedRepositoryIsTakenAway(t *testing.T) {
	t.Parallel()
	files := model(1, testSegment)
	open, other := newTellingSource(files, artifact.AccessOpen), newTellingSource(files, artifact.AccessOpen)
	other.name = "other"
	r := newRig(t, open.memSource, func(_ *Options, po *PullerOptions) {
		po.Sources = []Rule{{Source: open, Refs: []string{"acme/*"}}, {Source: other, Refs: []string{"beta/*"}}}
	})
	second := artifact.Ref{Scheme: artifact.SchemeHub, Name: "beta/tiny", Revision: "main"}
	m, err := r.puller.Ensure(t.Context(), second, EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	shown := r.ensure(t)
	for _, each := range []*artifact.Manifest{m, shown} {
		if flat, hub := publishBoth(t, r, each); flat != nil || hub != nil {
			t.Fatal(flat, hub)
		}
	}
	other.tell(artifact.AccessGated, nil)
	if _, err := r.puller.CheckAccess(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	views := viewsOf(t, r)
	if len(views) != 2 || !strings.HasSuffix(views[1], "models--acme--tiny") {
		t.Errorf("views %v", views)
	}
	if st, _ := r.puller.Status(second); !st.ViewsWithheld || slices.ContainsFunc(st.Views, func(v string) bool { return strings.Contains(v, "/hub/") }) {
		t.Errorf("status %+v", st)
	}
	// Open again, it may come back.
	other.tell(artifact.AccessOpen, nil)
	if _, err := r.puller.CheckAccess(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	if _, err := r.store.HubView(m); err != nil || len(viewsOf(t, r)) != 3 {
		t.Errorf("%v, views %v", err, viewsOf(t, r))
	}
}

func TestAccessIsAskedOncePerRepositoryAndAFailedAnswerChangesNothing(t *testing.T) {
	t.Parallel()
	src := newTellingSource(model(1, testSegment), artifact.AccessUnknown)
	r := newTellingRig(t, src)
	r.ensure(t)
	if _, err := r.puller.Ensure(t.Context(), artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/tiny", Revision: "v1"}, EnsureOptions{}); err != nil {
		t.Fatal(err)
	}
	if unknown, err := r.puller.CheckAccess(t.Context(), false); unknown != 1 || err != nil || src.asked != 1 {
		t.Errorf("%d unknown, %v, asked %d times", unknown, err, src.asked)
	}
	src.tell(artifact.AccessGated, nil)
	if unknown, err := r.puller.CheckAccess(t.Context(), false); unknown != 0 || err != nil {
		t.Errorf("%d unknown, %v", unknown, err)
	}
	src.tell(artifact.AccessUnknown, errors.New("away"))
	if unknown, err := r.puller.CheckAccess(t.Context(), false); unknown != 0 || err == nil {
		t.Errorf("%d unknown, %v", unknown, err)
	}
	// Nor does a refresh that does not learn it.
	src.tell(artifact.AccessUnknown, nil)
	if _, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{Refresh: true}); err != nil {
		t.Fatal(err)
	}
	for _, m := range r.store.Manifests() {
		if m.Access != artifact.AccessGated {
			t.Errorf("%s is %q", m.Ref, m.Access)
		}
	}
}

func TestRecordsThatACrashLeftAtOddsAgreeOnTheStrictest(t *testing.T) {
	t.Parallel()
	src := newTellingSource(model(1, testSegment), artifact.AccessOpen)
	r := newTellingRig(t, src)
	old := r.ensure(t)
	v1 := artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/tiny", Revision: "v1"}
	other := artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/other", Revision: "main"}
	for _, ref := range []artifact.Ref{v1, other} {
		if _, err := r.puller.Ensure(t.Context(), ref, EnsureOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if flat, hub := publishBoth(t, r, old); flat != nil || hub != nil {
		t.Fatal(flat, hub)
	}
	path := r.store.recordPath(v1)
	r.close(t)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(strings.Replace(string(text), `"open"`, `"gated"`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 { // it is on the drive as well
		r.reopen(t, func(_ *Options, po *PullerOptions) { po.Sources[0].Source = src })
		for _, m := range r.store.Manifests() {
			want := artifact.AccessGated
			if m.Ref == other {
				want = artifact.AccessOpen
			}
			if m.Access != want {
				t.Errorf("%s is %q, want %q", m.Ref, m.Access, want)
			}
		}
		// The bytes are open by the other repository, the name is not.
		if views := viewsOf(t, r); len(views) != 1 || !strings.Contains(views[0], "/flat/") {
			t.Errorf("views %v", views)
		}
	}
}
