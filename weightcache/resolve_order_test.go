package weightcache

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// lateSource says what it found when it was asked only once it is told to, and
// says it to those who left too.
type lateSource struct {
	*memSource
	asked chan chan struct{} // closing what comes tells the answer
}

func (s *lateSource) Resolve(ctx context.Context, ref artifact.Ref) (*artifact.Listing, error) {
	l, err := s.memSource.Resolve(ctx, ref)
	tell := make(chan struct{})
	s.asked <- tell
	<-tell
	return l, err
}

func newLateRig(t *testing.T) (*rig, *lateSource) {
	t.Helper()
	src := &lateSource{memSource: newMemSource(model(1, 100)), asked: make(chan chan struct{})}
	return newRig(t, src.memSource, func(_ *Options, po *PullerOptions) { po.Sources[0].Source = src }), src
}

// later is the commit that main moves to.
var later = strings.Repeat("cd", 20)

func TestAnAnswerOlderThanARefreshDoesNotMoveTheRefBack(t *testing.T) {
	t.Parallel()
	r, src := newLateRig(t)
	first := make(chan *artifact.Manifest)
	go func() {
		m, err := r.puller.Manifest(t.Context(), testRef)
		if err != nil {
			t.Error(err)
		}
		first <- m
	}()
	tellFirst := <-src.asked
	src.set(func() { src.commit, src.files["config.json"] = later, []byte("{}") })
	go func() { close(<-src.asked) }()
	if m, err := r.puller.Ensure(t.Context(), testRef, EnsureOptions{Refresh: true}); err != nil || m.Commit != later {
		t.Fatalf("the refresh: %v, %v", m, err)
	}
	close(tellFirst)
	if m := <-first; m != nil && m.Commit != later {
		t.Errorf("the question from before the refresh gives commit %s", m.Commit)
	}
	if m, found := r.store.pinned(testRef); !found || m.Commit != later {
		t.Errorf("the ref went back to %v", m)
	}
}

func TestARefreshThatWasGivenUpMovesNothing(t *testing.T) {
	t.Parallel()
	r, src := newLateRig(t)
	go func() { close(<-src.asked) }()
	before := r.ensure(t)
	src.set(func() { src.commit, src.files["config.json"] = later, []byte("{}") })
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error)
	go func() {
		_, err := r.puller.Ensure(ctx, testRef, EnsureOptions{Refresh: true})
		left <- err
	}()
	tell := <-src.asked
	cancel()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Errorf("a refresh that was given up: %v", err)
	}
	close(tell)
	ended, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	if err := r.puller.Wait(ended); err != nil {
		t.Fatal(err)
	}
	if m, found := r.store.pinned(testRef); !found || m.Commit != before.Commit {
		t.Errorf("the ref moved to %v for nobody", m)
	}
}
