package weightcache

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// records lists the names of the store's records.
func records(t *testing.T, r *rig) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(r.store.Dir(), refsDir))
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

// moveMain gives the ref of a commit and main one artifact, opens the store
// anew, whose artifact is then known by either of them, and moves main on.
func moveMain(t *testing.T) (r *rig, src *memSource, fixed artifact.Ref, old, moved *artifact.Manifest) {
	t.Helper()
	src = newMemSource(model(1, testSegment))
	r = newRig(t, src)
	fixed = testRef
	fixed.Revision = src.commit
	old = r.ensure(t)
	if _, err := r.puller.Ensure(t.Context(), fixed, EnsureOptions{}); err != nil {
		t.Fatal(err)
	}
	r.reopen(t)
	src.set(func() {
		src.files = model(2, testSegment)
		src.commit = strings.Repeat("cd", 20)
	})
	moved, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{Refresh: true})
	if err != nil {
		t.Fatal(err)
	}
	return r, src, fixed, old, moved
}

func TestNoRecordIsLeftOfAnArtifactThatTwoRefsMeantInTurn(t *testing.T) {
	t.Parallel()
	r, _, fixed, old, moved := moveMain(t)
	if !r.store.Ready(old.Digest) || !r.store.Ready(moved.Digest) {
		t.Fatal("main and the commit are not both ready")
	}
	if err := r.puller.Remove(t.Context(), fixed); err != nil {
		t.Fatal(err)
	}
	if got := records(t, r); len(got) != 1 || strings.Contains(got[0], supersededTag) {
		t.Errorf("after the removal the records are %q, want main's alone", got)
	}
	if _, err := r.store.Acquire(old.Digest); err == nil {
		t.Error("the artifact that no ref means is still known")
	}
}

func TestARecordOfWhatAnotherRefStillMeansIsNotKeptTwice(t *testing.T) {
	t.Parallel()
	r, _, fixed, old, _ := moveMain(t)
	r.store.sweepSuperseded()
	if got := records(t, r); len(got) != 2 || strings.Contains(strings.Join(got, " "), supersededTag) {
		t.Errorf("two refs have the records %q", got)
	}
	if m, found := r.store.pinned(fixed); !found || m.Digest != old.Digest || !r.store.Ready(old.Digest) {
		t.Error("what the commit means is not ready any more")
	}
	if err := r.puller.Remove(t.Context(), fixed); err != nil {
		t.Fatal(err)
	}
	if _, err := r.store.Acquire(old.Digest); err == nil {
		t.Error("the artifact that no ref means is still known")
	}
}

func TestAnArtifactThatEachOfItsRefsHasLeftGoes(t *testing.T) {
	t.Parallel()
	r, src, fixed, old, _ := moveMain(t)
	// The hub never moves a commit; a folder that takes its name may.
	src.set(func() { src.files = model(3, testSegment) })
	if _, err := r.puller.Ensure(t.Context(), fixed, EnsureOptions{Refresh: true}); err != nil {
		t.Fatal(err)
	}
	r.store.sweepSuperseded()
	for _, name := range records(t, r) {
		if strings.Contains(name, supersededTag) {
			t.Errorf("record %s is left", name)
		}
	}
	if _, err := r.store.Acquire(old.Digest); err == nil {
		t.Error("the artifact that no ref means is still known")
	}
}

func TestRemovingARefTakesWhatItMeantBeforeToo(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, testSegment))
	r := newRig(t, src)
	old := r.ensure(t)
	lease, err := r.store.Acquire(old.Digest)
	if err != nil {
		t.Fatal(err)
	}
	src.set(func() {
		src.files = model(2, testSegment)
		src.commit = strings.Repeat("cd", 20)
	})
	if _, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{Refresh: true}); err != nil {
		t.Fatal(err)
	}
	if err := r.puller.Remove(t.Context(), testRef); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	ran := make(chan error, 1)
	changed, unsubscribe := r.store.Subscribe()
	defer unsubscribe()
	go func() { ran <- r.puller.Run(ctx) }()
	lease.Release()
	for len(records(t, r)) > 0 {
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("the records %q are left", records(t, r))
		}
	}
	cancel()
	if err := <-ran; err != nil {
		t.Fatal(err)
	}
}

// unlinking calls a hook at each removal of a name.
type unlinking struct {
	durable.FS
	hook func(path string)
}

func (u *unlinking) Remove(path string) error {
	u.hook(path)
	return u.FS.Remove(path)
}

func TestARefThatIsPinnedWhileItsRemovalUnlinksStaysKnown(t *testing.T) {
	t.Parallel()
	fsys := &unlinking{FS: durable.OS, hook: func(string) {}}
	r := newRig(t, newMemSource(model(1, testSegment)), func(o *Options, _ *PullerOptions) { o.FS = fsys })
	m := r.ensure(t)
	again := false
	fsys.hook = func(path string) {
		if again || !strings.Contains(path, blobsDir) {
			return
		}
		again = true
		if _, err := r.store.pin(t.Context(), m, false); err != nil {
			t.Error(err)
		}
	}
	if err := r.puller.Remove(t.Context(), testRef); err != nil {
		t.Fatal(err)
	}
	fsys.hook = func(string) {}
	if !again {
		t.Fatal("nothing was unlinked")
	}
	r.ensure(t)
	if err := r.puller.Remove(t.Context(), testRef); err != nil {
		t.Fatal(err)
	}
	if got := records(t, r); len(got) > 0 {
		t.Errorf("the records %q are left", got)
	}
}
