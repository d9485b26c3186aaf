package weightcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// session is one process's life on a crashable file system.
type session struct {
	fs     *durabletest.FS
	store  *Store
	puller *Puller
}

func startSession(fsys *durabletest.FS, src *memSource) (*session, error) {
	store, err := Open(Options{Dir: "/var/weights", FS: fsys, Boot: fmt.Sprintf("%p", fsys)})
	if err != nil {
		return nil, err
	}
	puller, err := NewPuller(PullerOptions{
		Store: store, Sources: []Rule{{Source: src, Refs: []string{"acme/*"}}}, SegmentSize: testSegment,
		Streams: 3, RetryBase: time.Millisecond, RetryMax: time.Millisecond, ScrubEvery: -1,
	})
	return &session{fsys, store, puller}, err
}

// checkContent reads every file of the artifact, and of its view.
func (s *session) checkContent(t *testing.T, m *artifact.Manifest, src *memSource) {
	t.Helper()
	view, err := s.store.FlatView(m.Digest)
	if err != nil {
		t.Fatal(err)
	}
	hub, err := s.store.HubView(m)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range src.files {
		for _, name := range []string{view + "/" + path, hub + "/models--acme--tiny/snapshots/" + m.Commit + "/" + path} {
			got, err := durable.ReadFile(s.fs, name, 1<<30)
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("file %s is wrong: %d bytes, %v", name, len(got), err)
			}
		}
	}
}

// crashRun does work that crashes at change n, boots again and hands the
// session to check. It reports whether the work finished before the crash.
func crashRun(t *testing.T, n int, random *rand.Rand, src *memSource, work func(s *session) error, check func(s *session)) bool {
	t.Helper()
	fsys := durabletest.New()
	if err := fsys.MkdirAll("/var", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := fsys.SyncDir("/"); err != nil {
		t.Fatal(err)
	}
	fsys.CrashAt(fsys.Changes()+n, n%2 == 0)
	s, err := startSession(fsys, src)
	if err == nil {
		err = work(s)
		if waitErr := s.puller.Wait(context.Background()); waitErr != nil {
			t.Fatal(waitErr)
		}
	}
	next, openErr := startSession(fsys.Crash(random), src)
	if openErr != nil {
		t.Fatalf("crash at change %d: the store does not open: %v", n, openErr)
	}
	check(next)
	return err == nil
}

func eachCrash(t *testing.T, src *memSource, work func(s *session) error, check func(t *testing.T, n int, s *session)) {
	t.Helper()
	step, _ := stride()
	for _, mode := range []string{"OnlySyncedSurvives", "SomeUnsyncedSurvives"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			for n := 1; ; n += step {
				var random *rand.Rand
				if mode == "SomeUnsyncedSurvives" {
					random = rand.New(rand.NewPCG(uint64(n), 3))
				}
				if crashRun(t, n, random, src, work, func(s *session) { check(t, n, s) }) {
					return
				}
			}
		})
	}
}

func TestPullSurvivesACrashAtEveryChange(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(2, 2*testSegment+100))
	src.noSHA["config.json"] = true
	work := func(s *session) error {
		m, err := s.puller.Ensure(context.Background(), testRef, EnsureOptions{})
		if err != nil {
			return err
		}
		if _, err := s.store.FlatView(m.Digest); err != nil {
			return err
		}
		_, err = s.store.HubView(m)
		return err
	}
	eachCrash(t, src, work, func(t *testing.T, n int, s *session) {
		t.Helper()
		if m, found := s.store.pinned(testRef); found && s.store.Ready(m.Digest) {
			s.checkContent(t, m, src)
		}
		m, err := s.puller.Ensure(context.Background(), testRef, EnsureOptions{})
		if err != nil {
			t.Fatalf("crash at change %d: pull after it: %v", n, err)
		}
		s.checkContent(t, m, src)
	})
}

func TestRemovalSurvivesACrashAtEveryChange(t *testing.T) {
	t.Parallel()
	src := newMemSource(model(1, testSegment+100))
	src.noSHA["README.md"] = true
	other := artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/other", Revision: "main"}
	work := func(s *session) error {
		ctx := context.Background()
		m, err := s.puller.Ensure(ctx, testRef, EnsureOptions{})
		if err != nil {
			return err
		}
		if _, err := s.store.FlatView(m.Digest); err != nil {
			return err
		}
		if err := s.puller.Remove(ctx, testRef); err != nil {
			return err
		}
		if _, err := s.fs.Stat(s.store.blobPath(m.Files[0].SHA256)); !notExist(err) {
			return fmt.Errorf("file survived its removal: %w", err)
		}
		return nil
	}
	eachCrash(t, src, work, func(t *testing.T, n int, s *session) {
		t.Helper()
		if _, found := s.store.pinned(testRef); !found {
			if u, err := s.store.Usage(); err != nil || u.Used != 0 {
				t.Fatalf("crash at change %d: %d bytes are left of a removed artifact, %v", n, u.Used, err)
			}
		}
		for _, ref := range []artifact.Ref{testRef, other} {
			m, err := s.puller.Ensure(context.Background(), ref, EnsureOptions{})
			if err != nil {
				t.Fatalf("crash at change %d: pull after it: %v", n, err)
			}
			if ref == testRef {
				s.checkContent(t, m, src)
			}
		}
	})
}

func TestFullDriveAtAnyWriteIsNamedAndThePullCanBeResumed(t *testing.T) {
	t.Parallel()
	failEachWrite(t, syscall.ENOSPC, func(n int, err error) {
		if err != nil && !errors.Is(err, ErrNoSpace) {
			t.Errorf("full at change %d: %v, want ErrNoSpace", n, err)
		}
	})
}

func TestFailedWriteAnywhereLeavesAPullThatCanBeResumed(t *testing.T) {
	t.Parallel()
	failEachWrite(t, errors.New("the drive fails"), func(int, error) {})
}

func failEachWrite(t *testing.T, cause error, check func(n int, err error)) {
	t.Helper()
	src := newMemSource(model(1, 2*testSegment+100))
	src.noSHA["config.json"] = true
	for n := 1; ; n++ {
		fsys := durabletest.New()
		if err := fsys.MkdirAll("/var", 0o755); err != nil {
			t.Fatal(err)
		}
		s, err := startSession(fsys, src)
		if err != nil {
			t.Fatal(err)
		}
		before := fsys.Changes()
		fsys.FailAt(before+n, cause)
		_, first := s.puller.Ensure(t.Context(), testRef, EnsureOptions{})
		check(n, first)
		m, err := s.puller.Ensure(t.Context(), testRef, EnsureOptions{})
		if err != nil {
			t.Fatalf("failure at change %d: pull after it: %v", n, err)
		}
		if err := s.puller.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		reached := fsys.Changes()-before >= n
		fsys.FailAt(before+n, nil)
		s.checkContent(t, m, src)
		if first == nil && !reached {
			return
		}
	}
}
