package weightcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
)

// disturb plays a scene on a drive that arm has made to fail somewhere in its
// work, and holds what comes after to the ledger: in the same process once the
// drive is well again and its caches were dropped, and after a restart.
func (sc *scene) disturb(arm func(w *world), reached func(w *world) bool) (finished bool, err error) {
	w, err := newWorld(sc.options)
	if err != nil {
		return false, err
	}
	if err := w.open(); err != nil {
		return false, err
	}
	if sc.before != nil {
		if err := sc.before(w); err != nil {
			return false, err
		}
	}
	arm(w)
	workErr := sc.work(w)
	if err := w.puller.Wait(context.Background()); err != nil {
		return false, err
	}
	finished = !reached(w)
	if finished && workErr != nil {
		return true, fmt.Errorf("undisturbed work: %w", workErr)
	}
	if err := w.carryOn(); err != nil {
		return finished, fmt.Errorf("after %w: %w", errors.Join(workErr, errWork), err)
	}
	return finished, nil
}

var errWork = errors.New("the disturbed work")

// carryOn checks that a store whose drive failed goes on once it is well.
func (w *world) carryOn() error {
	w.fs.Heal()
	w.fs.DropCaches()
	for ref, p := range w.ledger {
		if p.may[""] && len(p.may) > 1 && len(p.whole) > 0 {
			// A removal failed: asked again, it is done.
			if err := w.remove(ref); err != nil && !errors.Is(err, ErrUnknown) {
				return fmt.Errorf("remove again: %w", err)
			}
		}
	}
	// As the next reservation does.
	if err := errors.Join(w.store.fs.clean(), w.converge()); err != nil {
		return err
	}
	w.fs.DropCaches()
	if err := w.checkDrive(); err != nil {
		return err
	}
	return errors.Join(w.close(), w.recover())
}

// eachFailure disturbs every scene at each operation in turn.
func eachFailure(t *testing.T, arm func(w *world, n int) (reached func(w *world) bool)) {
	t.Helper()
	for i := range scenes {
		sc := &scenes[i]
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			step, _ := stride()
			step = (step + 1) / 2
			for n := 1 + i%step; ; n += step {
				var reached func(w *world) bool
				finished, err := sc.disturb(func(w *world) { reached = arm(w, n) }, func(w *world) bool { return reached(w) })
				if err != nil {
					t.Fatalf("operation %d: %v", n, err)
				}
				if finished {
					return
				}
			}
		})
	}
}

func TestIOErrorAtAnyWriteSyncOrNameLeavesNothingWrong(t *testing.T) {
	t.Parallel()
	eachFailure(t, func(w *world, n int) func(w *world) bool {
		at := w.fs.Changes() + n
		w.fs.FailAt(at, syscall.EIO)
		return func(w *world) bool { return w.fs.Changes() >= at }
	})
}

func TestIOErrorAtAnyReadLeavesNothingWrong(t *testing.T) {
	t.Parallel()
	eachFailure(t, func(w *world, n int) func(w *world) bool {
		at := w.fs.Reads() + n
		w.fs.FailReadAt(at, syscall.EIO)
		return func(w *world) bool { return w.fs.Reads() >= at }
	})
}

func TestFailedSyncIsNeverTriedAgainOnTheSameBytes(t *testing.T) {
	t.Parallel()
	for n := 1; ; n++ {
		w, err := newWorld(nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.open(); err != nil {
			t.Fatal(err)
		}
		var syncs atomic.Int64 // a pull that failed leaves others syncing
		w.fs.FailWhen(func(op, path string) error {
			if (op == "sync" || op == "datasync") && syncs.Add(1) == int64(n) {
				return syscall.EIO
			}
			return nil
		})
		first := w.pull(refA, versionA)
		if syncs.Load() < int64(n) {
			if first != nil {
				t.Error(first)
			}
			return
		}
		if !errors.Is(first, syscall.EIO) {
			t.Errorf("sync %d failed and the pull gave %v", n, first)
		}
		if err := w.carryOn(); err != nil {
			t.Fatalf("after sync %d failed: %v", n, err)
		}
	}
}

func TestIOErrorAtAnyReadOfAnOpenCostsNothingThatWasPromised(t *testing.T) {
	t.Parallel()
	step, _ := stride()
	step = (step + 3) / 4 // the records are read in the first dozens
	for n := 1; ; n += step {
		w, err := newWorld(nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(w.open(), w.pull(refA, versionA), w.view(refA), w.pull(refB, versionB), w.close()); err != nil {
			t.Fatal(err)
		}
		at := w.fs.Reads() + n
		w.fs.FailReadAt(at, syscall.EIO)
		err = w.open()
		if err != nil && !errors.Is(err, syscall.EIO) {
			t.Fatalf("read %d: %v, want EIO", n, err)
		}
		if w.fs.Reads() < at {
			if err == nil {
				err = w.close()
			}
			if err != nil {
				t.Error(err)
			}
			return
		}
		if err != nil {
			if err := w.open(); err != nil {
				t.Fatalf("read %d failed once, then: %v", n, err)
			}
		}
		before := w.origin.bytes()
		if err := errors.Join(w.pull(refA, versionA), w.pull(refB, versionB), w.view(refA), w.checkDrive()); err != nil {
			t.Fatalf("read %d failed once: %v", n, err)
		}
		if got := w.origin.bytes() - before; got > 0 {
			t.Errorf("read %d failed once and cost %d bytes of stored files", n, got)
		}
		if err := errors.Join(w.close(), w.recover()); err != nil {
			t.Fatalf("read %d failed once: %v", n, err)
		}
	}
}

func TestReaderOfAFileTheDriveCannotReadGetsAnErrorAndTheFileIsFetchedAgain(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"read", "open"} {
		w, err := newWorld(nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(w.open(), w.pull(refA, versionA), w.view(refA)); err != nil {
			t.Fatal(err)
		}
		m, _ := w.store.pinned(refA)
		f, _ := m.File(shard1)
		broken := w.store.blobPath(f.SHA256)
		w.fs.FailReadWhen(func(o, path string) error {
			if o == op && path == broken {
				return syscall.EIO
			}
			return nil
		})
		got, err := readWhole(t.Context(), w.puller, m, shard1)
		if op == "read" && (!errors.Is(err, syscall.EIO) || len(got) > 0) {
			t.Errorf("%s: %d bytes, %v, want EIO and nothing short", op, len(got), err)
		}
		if err == nil && !bytes.Equal(got, versionA.files[shard1]) {
			t.Errorf("%s: wrong bytes", op)
		}
		w.fs.FailReadWhen(nil)
		if st, _ := w.puller.Status(refA); op == "read" && st.State != Suspect {
			t.Errorf("%s: the artifact is %s, want Suspect", op, st.State)
		}
		before := w.origin.bytes()
		if err := w.pull(refA, versionA); err != nil {
			t.Fatal(err)
		}
		if got := w.origin.bytes() - before; got > f.Size || op == "read" && got != f.Size {
			t.Errorf("%s: %d bytes were fetched, want the file's %d", op, got, f.Size)
		}
		if got, err := readWhole(t.Context(), w.puller, m, shard1); err != nil || !bytes.Equal(got, versionA.files[shard1]) {
			t.Errorf("%s: mended, a reader gets %d bytes, %v", op, len(got), err)
		}
		if err := errors.Join(w.carryOn(), w.checkDriveOpen()); err != nil {
			t.Error(err)
		}
	}
}

// checkDriveOpen opens the store once more and looks at the drive.
func (w *world) checkDriveOpen() error {
	return errors.Join(w.open(), w.checkDrive(), w.close())
}

func TestScrubTakesOutAFileTheDriveCannotRead(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"open", "read"} {
		w, err := newWorld(nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(w.open(), w.pull(refA, versionA), w.view(refA)); err != nil {
			t.Fatal(err)
		}
		m, _ := w.store.pinned(refA)
		f, _ := m.File(shard1)
		broken := w.store.blobPath(f.SHA256)
		w.fs.FailReadWhen(func(o, path string) error {
			if o == op && path == broken {
				return syscall.EIO
			}
			return nil
		})
		good, err := w.puller.checkFile(t.Context(), f.SHA256, NewLimiter(0), idly)
		if good || err != nil {
			t.Errorf("%s: the check says %v, %v", op, good, err)
		}
		if w.store.Ready(m.Digest) || w.store.has(f.SHA256) {
			t.Errorf("%s: a file that cannot be read is still there", op)
		}
		if err := w.carryOn(); err != nil {
			t.Error(err)
		}
	}
}

func TestReaderOfALandingFileTheDriveCannotReadBreaksOff(t *testing.T) {
	t.Parallel()
	w, err := newWorld(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.open(); err != nil {
		t.Fatal(err)
	}
	w.origin.set(refA, versionA)
	m, err := w.puller.Manifest(t.Context(), refA)
	if err != nil {
		t.Fatal(err)
	}
	w.promise(refA).may[versionA.commit] = true
	w.fs.FailReadWhen(func(op, path string) error {
		if op == "read" && strings.HasSuffix(path, partSuffix) {
			return syscall.EIO
		}
		return nil
	})
	got, err := readWhole(t.Context(), w.puller, m, shard1)
	want := versionA.files[shard1]
	if len(got) > len(want) || !bytes.Equal(got, want[:len(got)]) {
		t.Errorf("%d wrong bytes were given", len(got))
	}
	if len(got) < len(want) && (err == nil || errors.Is(err, io.EOF)) {
		t.Errorf("%d of %d bytes were given as the whole: %v", len(got), len(want), err)
	}
	if err := w.puller.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := w.carryOn(); err != nil {
		t.Error(err)
	}
}
