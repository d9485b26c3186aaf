package weightcache

import (
	"bytes"
	"context"
	"errors"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/durable"
)

// A kernel that meets an error remounts the file system read-only: from one
// change on, every one fails with EROFS, and reading goes on.

func TestFileSystemThatTurnsReadOnlyServesWhatItHasAndGoesOnOnceItIsWritable(t *testing.T) {
	t.Parallel()
	step, _ := stride()
	for n := 1; ; n += step {
		w, err := newWorld(nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(w.open(), w.pull(refA, versionA), w.view(refA)); err != nil {
			t.Fatal(err)
		}
		changes := 0
		w.fs.FailWhen(func(string, string) error {
			if changes++; changes >= n {
				return syscall.EROFS
			}
			return nil
		})
		workErr := errors.Join(w.pull(refB, versionB), w.refresh(refA, versionNext), w.view(refA))
		if err := w.puller.Wait(context.Background()); err != nil {
			t.Fatal(err)
		}
		if workErr != nil && !errors.Is(workErr, syscall.EROFS) {
			t.Fatalf("read-only at change %d: %v, want EROFS", n, workErr)
		}
		w.fs.SetReadOnly(true)
		w.serves(t, n)
		w.fs.Heal()
		if err := errors.Join(w.pull(refB, versionB), w.refresh(refA, versionNext), w.view(refA), w.carryOn()); err != nil {
			t.Fatalf("read-only at change %d, then writable: %v", n, err)
		}
		if workErr == nil {
			return
		}
	}
}

// serves reads everything that is Ready, by reader and by view, and checks that
// calls which must write say why they cannot.
func (w *world) serves(t *testing.T, n int) {
	t.Helper()
	for _, m := range w.store.Manifests() {
		st, _ := w.puller.Status(m.Ref)
		v := w.origin.known[m.Commit]
		if st.State != Ready {
			if _, err := w.puller.Ensure(t.Context(), m.Ref, EnsureOptions{}); !errors.Is(err, syscall.EROFS) {
				t.Errorf("read-only at change %d: pull of %s: %v, want EROFS", n, m.Ref, err)
			}
			if st, _ := w.puller.Status(m.Ref); st.State != Failed || st.Detail == "" {
				t.Errorf("read-only at change %d: %s is %s (%s), want Failed and why", n, m.Ref, st.State, st.Detail)
			}
			continue
		}
		lease, err := w.store.Acquire(m.Digest)
		if err != nil {
			t.Errorf("read-only at change %d: lease: %v", n, err)
			continue
		}
		for path, want := range v.files {
			if got, err := readWhole(t.Context(), w.puller, m, path); err != nil || !bytes.Equal(got, want) {
				t.Errorf("read-only at change %d: reader of %s gives %d bytes, %v", n, path, len(got), err)
			}
		}
		lease.Release()
		if result, err := w.puller.Verify(t.Context(), m.Ref); err != nil && !errors.Is(err, syscall.EROFS) || err == nil && !result.OK() {
			t.Errorf("read-only at change %d: verify: %+v, %v", n, result, err)
		}
		if !w.store.Ready(m.Digest) {
			t.Errorf("read-only at change %d: %s is no longer Ready", n, m.Ref)
		}
	}
}

func TestStoreOnAReadOnlyFileSystemDoesNotOpenAndSaysWhy(t *testing.T) {
	t.Parallel()
	w, err := newWorld(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.open(), w.pull(refA, versionA), w.view(refA), w.close()); err != nil {
		t.Fatal(err)
	}
	before, err := w.tree("/var")
	if err != nil {
		t.Fatal(err)
	}
	w.fs.SetReadOnly(true)
	if err := w.open(); !errors.Is(err, syscall.EROFS) {
		t.Errorf("Open: %v, want EROFS", err)
	}
	after, err := w.tree("/var")
	if err != nil {
		t.Fatal(err)
	}
	if diff := diffTrees(before, after); len(diff) > 0 {
		t.Errorf("changed: %v", diff)
	}
	view := w.store.viewPath(flatKind, versionA.digest())
	if got, err := durable.ReadFile(w.fs, view+"/"+shard1, 1<<30); err != nil || !bytes.Equal(got, versionA.files[shard1]) {
		t.Errorf("the view has %d bytes, %v", len(got), err)
	}
	w.fs.SetReadOnly(false)
	if err := w.recover(); err != nil {
		t.Error(err)
	}
}
