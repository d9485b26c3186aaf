package weightcache

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// slowSource answers what a ref means only when it is told to.
type slowSource struct {
	*memSource
	asked chan struct{} // one for each question
	tell  chan struct{}
	ended chan error // why a question was given up
}

func newSlowSource() *slowSource {
	return &slowSource{
		memSource: newMemSource(model(1, 100)),
		asked:     make(chan struct{}, 16), tell: make(chan struct{}), ended: make(chan error, 16),
	}
}

// rig is a rig over the slow source.
func (s *slowSource) rig(t *testing.T) *rig {
	t.Helper()
	return newRig(t, s.memSource, func(_ *Options, po *PullerOptions) { po.Sources[0].Source = s })
}

func (s *slowSource) Resolve(ctx context.Context, ref artifact.Ref) (*artifact.Listing, error) {
	s.asked <- struct{}{}
	select {
	case <-s.tell:
		return s.memSource.Resolve(ctx, ref)
	case <-ctx.Done():
		s.ended <- context.Cause(ctx)
		return nil, context.Cause(ctx)
	}
}

// Clients of the mirror leave after 10 s and come again; a source that takes
// longer would never be heard if each of them asked anew.
func TestAManifestThatItsCallerCouldNotAwaitIsThereForTheNext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := newSlowSource()
		r := src.rig(t)
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			if _, err := r.puller.Manifest(ctx, testRef); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("a manifest that the source has not told: %v", err)
			}
			cancel()
		}
		close(src.tell)
		if m, err := r.puller.Manifest(t.Context(), testRef); err != nil || len(m.Files) == 0 {
			t.Errorf("the manifest once it is told: %v, %v", m, err)
		}
		if n := len(src.asked); n != 1 {
			t.Errorf("the source was asked %d times, want once", n)
		}
	})
}

func TestAQuestionThatNobodyComesBackForEnds(t *testing.T) {
	t.Parallel()
	for _, stops := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			src := newSlowSource()
			r := src.rig(t)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if _, err := r.puller.Manifest(ctx, testRef); err == nil {
				t.Fatal("a manifest that the source has not told was given")
			}
			if !stops {
				time.Sleep(resolveLinger + time.Second)
			} else if err := r.puller.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if len(src.ended) != 1 {
				t.Errorf("the question goes on (puller stopped: %v)", stops)
			}
		})
	}
}

func TestQuestionsThatGoOnForNobodyAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := newSlowSource()
		src.asked, src.ended = make(chan struct{}, 2*maxLingering), make(chan error, 2*maxLingering)
		r := src.rig(t)
		for i := range maxLingering + 3 {
			ref := testRef
			ref.Revision = string(rune('a'+i%26)) + string(rune('a'+i/26))
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if _, err := r.puller.Manifest(ctx, ref); err == nil {
				t.Error("a manifest that the source has not told was given")
			}
			cancel()
		}
		synctest.Wait()
		if len(src.ended) != 3 {
			t.Errorf("%d of %d questions ended, want 3", len(src.ended), maxLingering+3)
		}
		if err := r.puller.Wait(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestARemovalEndsAQuestionThatGoesOnForNobody(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := newSlowSource()
		r := src.rig(t)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if _, err := r.puller.Manifest(ctx, testRef); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		if err := r.puller.Remove(t.Context(), testRef); !errors.Is(err, ErrUnknown) {
			t.Errorf("remove: %v", err)
		}
		if err := <-src.ended; !errors.Is(err, errAbandoned) {
			t.Errorf("the question ended with %v", err)
		}
		synctest.Wait()
		if _, found := r.store.pinned(testRef); found {
			t.Error("what was removed came back")
		}
	})
}
