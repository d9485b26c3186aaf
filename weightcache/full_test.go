package weightcache

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// checking has the error of a scene's work checked.
func (sc scene) checking(check func(err error) error) *scene {
	work := sc.work
	sc.work = func(w *world) error {
		err := work(w)
		if err == nil {
			return nil
		}
		return errors.Join(err, check(err))
	}
	return &sc
}

var errUnclear = errors.New("the error does not say what is wrong")

// eachErrno fails every change of every scene in turn with one errno.
func eachErrno(t *testing.T, errno syscall.Errno, want error) {
	t.Helper()
	for i := range scenes {
		unclear := 0
		sc := scenes[i].checking(func(err error) error {
			if errors.Is(err, errno) && !errors.Is(err, want) {
				unclear++
				return errUnclear
			}
			return nil
		})
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			step, _ := stride()
			for n := 1 + i%step; ; n += step {
				at := 0
				finished, err := sc.disturb(func(w *world) {
					at = w.fs.Changes() + n
					w.fs.FailAt(at, errno)
				}, func(w *world) bool { return w.fs.Changes() >= at })
				if err != nil || unclear > 0 {
					t.Fatalf("change %d: %v, %d errors do not wrap %v", n, err, unclear, want)
				}
				if finished {
					return
				}
			}
		})
	}
}

func TestFullDriveAtAnyChangeIsNoSpaceAndLeavesNothingHalfDone(t *testing.T) {
	t.Parallel()
	eachErrno(t, syscall.ENOSPC, ErrNoSpace)
}

func TestSpentQuotaAtAnyChangeIsNoSpaceAndLeavesNothingHalfDone(t *testing.T) {
	t.Parallel()
	eachErrno(t, syscall.EDQUOT, ErrNoSpace)
}

// notHalfDone says what is visible of a pull that had no room.
func (w *world) notHalfDone(ref artifact.Ref, v *version) error {
	st, _ := w.puller.Status(ref)
	if st.State == Ready {
		return errors.New("the artifact is Ready")
	}
	for _, path := range []string{w.store.viewPath(flatKind, v.digest()), w.store.viewPath(hubKind, v.digest())} {
		if _, err := w.fs.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			return errors.Join(errors.New("a view is there"), err)
		}
	}
	return nil
}

func TestReservationRefusesEarlyAndNamesTheBytesThatAreMissing(t *testing.T) {
	t.Parallel()
	w, err := newWorld(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.open(), w.pull(refB, versionB)); err != nil {
		t.Fatal(err)
	}
	lease, err := w.store.Acquire(versionB.digest())
	if err != nil {
		t.Fatal(err)
	}
	usage, err := w.store.Usage()
	if err != nil {
		t.Fatal(err)
	}
	// Room for half of a shard, after what the drive holds beside the store.
	w.fs.SetCapacity(int64(usage.Used) + 100<<10)
	before := w.origin.bytes()
	err = w.pull(refA, versionA)
	if !errors.Is(err, ErrNoSpace) || !strings.Contains(err.Error(), "too few") {
		t.Errorf("pull: %v, want ErrNoSpace and the bytes that are missing", err)
	}
	if got := w.origin.bytes() - before; got > 0 {
		t.Errorf("%d bytes were fetched for a pull that has no room", got)
	}
	if err := w.notHalfDone(refA, versionA); err != nil {
		t.Error(err)
	}
	if got, err := readWhole(t.Context(), w.puller, mustPinned(t, w, refB), "b.safetensors"); err != nil || !slices.Equal(got, versionB.files["b.safetensors"]) {
		t.Errorf("what is there is not served: %d bytes, %v", len(got), err)
	}
	if usage, err := w.store.Usage(); err != nil || usage.Reserved != 0 {
		t.Errorf("%d bytes stay reserved, %v", usage.Reserved, err)
	}
	lease.Release()
	w.fs.SetCapacity(0)
	if err := errors.Join(w.pull(refA, versionA), w.view(refA), w.carryOn()); err != nil {
		t.Errorf("with room: %v", err)
	}
}

func mustPinned(t *testing.T, w *world, ref artifact.Ref) *artifact.Manifest {
	t.Helper()
	m, found := w.store.pinned(ref)
	if !found {
		t.Fatalf("%s is not pinned", ref)
	}
	return m
}

func TestDriveThatFillsUpInMidPullIsNoSpaceAndThePullGoesOnWithRoom(t *testing.T) {
	t.Parallel()
	limits := map[string]func(fsys *durabletest.FS, used int64, n int){
		// Free tells of room in both: the reservation cannot know.
		"quota":  func(fsys *durabletest.FS, used int64, n int) { fsys.SetQuota(used + int64(n)*9000) },
		"inodes": func(fsys *durabletest.FS, _ int64, n int) { fsys.SetInodes(fsys.Inodes() + n) },
	}
	for name, limit := range limits {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			step, _ := stride()
			step = (step + 9) / 10
			for n := 0; ; n += step {
				w, err := newWorld(nil)
				if err != nil {
					t.Fatal(err)
				}
				if err := w.open(); err != nil {
					t.Fatal(err)
				}
				limit(w.fs, 200, n)
				first := w.pull(refA, versionA)
				if err := w.puller.Wait(context.Background()); err != nil {
					t.Fatal(err)
				}
				if first != nil {
					if !errors.Is(first, ErrNoSpace) {
						t.Fatalf("limit %d: %v, want ErrNoSpace", n, first)
					}
					if err := w.notHalfDone(refA, versionA); err != nil {
						t.Fatalf("limit %d: %v", n, err)
					}
				}
				w.fs.SetQuota(0)
				w.fs.SetInodes(0)
				if err := errors.Join(w.pull(refA, versionA), w.view(refA), w.carryOn()); err != nil {
					t.Fatalf("limit %d, then room: %v", n, err)
				}
				if first == nil {
					return
				}
			}
		})
	}
}
