package weightcache

import (
	"errors"
	"os"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

func TestAStoreWhoseDirectoryIsRemovedSaysSoAndServesNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, newMemSource(model(1, 100)))
	m := r.ensure(t)
	if err := os.RemoveAll(r.store.Dir()); err != nil {
		t.Fatal(err)
	}
	if rd, err := r.puller.Open(t.Context(), m, "config.json"); !errors.Is(err, ErrLost) {
		t.Errorf("open: %v, %v; want ErrLost", rd, err)
	}
	if st, _ := r.puller.Status(testRef); st.State != Failed || st.Detail == "" {
		t.Errorf("status: %+v", st)
	}
	if _, err := r.puller.Ensure(t.Context(), artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/more", Revision: "main"}, EnsureOptions{}); err == nil {
		t.Error("a pull into nothing ended well")
	}
	// Whoever starts anew has a store again.
	r.reopen(t)
	r.ensure(t)
}

func TestNothingReadyIsEvictedOnADriveThatTakesNoWrites(t *testing.T) {
	t.Parallel()
	w, err := newWorld(func(o *Options) { o.Budget = 1 })
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.open()); err != nil {
		t.Fatal(err)
	}
	w.store.budget = 0
	if err := w.pull(refA, versionA); err != nil {
		t.Fatal(err)
	}
	w.store.budget = w.store.usedLocked() // room for no more
	w.fs.SetReadOnly(true)
	if _, err := w.store.reserve(t.Context(), 1, "a test"); !errors.Is(err, syscall.EROFS) {
		t.Errorf("reserve: %v, want EROFS", err)
	}
	if !w.store.Ready(versionA.digest()) {
		t.Error("the artifact was given up")
	}
	w.fs.SetReadOnly(false)
	room, err := w.store.reserve(t.Context(), 1, "a test")
	if err != nil {
		t.Fatal(err)
	}
	room.release()
	if w.store.Ready(versionA.digest()) {
		t.Error("nothing was evicted once the drive takes writes")
	}
}

func TestFilesThatAnEarlierProcessLeftUnfinishedAreInDoubt(t *testing.T) {
	t.Parallel()
	r := newRig(t, newMemSource(model(1, 100)))
	m, err := r.puller.Manifest(t.Context(), testRef)
	if err != nil {
		t.Fatal(err)
	}
	f, _ := m.File(shard1)
	if r.puller.Doubtful(f.SHA256) {
		t.Error("a file of which nothing was given out is in doubt")
	}
	r.reopen(t)
	r.ensure(t)
	if !r.puller.Doubtful(f.SHA256) {
		t.Error("a file that an earlier process may have begun to give out is not in doubt")
	}
	r.reopen(t)
	if r.puller.Doubtful(f.SHA256) {
		t.Error("a file that was proven before the start is in doubt")
	}
}
