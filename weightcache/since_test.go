package weightcache

import (
	"os"
	"testing"
	"time"
)

// Clients name what they build by the date of a revision: it changes with the
// meaning alone.
func TestARefKeepsItsDateWhileItMeansTheSame(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, testSegment))
	r := newRig(t, src)
	m := r.ensure(t)
	learned := time.Now().Add(-time.Hour).Truncate(time.Second)
	if err := os.Chtimes(r.store.recordPath(testRef), learned, learned); err != nil {
		t.Fatal(err)
	}
	refresh := func() {
		t.Helper()
		var err error
		if m, err = r.puller.Ensure(t.Context(), testRef, EnsureOptions{Refresh: true}); err != nil {
			t.Fatal(err)
		}
	}
	refresh()
	r.reopen(t)
	refresh()
	if got := r.puller.Since(m); !got.Equal(learned) {
		t.Errorf("the date is %v, want %v", got, learned)
	}
	// A record that was damaged is written again.
	if err := os.WriteFile(r.store.recordPath(testRef), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	refresh()
	r.reopen(t)
	if _, found := r.store.pinned(testRef); !found {
		t.Error("the ref is lost")
	}
	src.set(func() { src.files = model(2, testSegment) })
	refresh()
	if got := r.puller.Since(m); !got.After(learned) {
		t.Errorf("a ref that means something else is dated %v", got)
	}
}
