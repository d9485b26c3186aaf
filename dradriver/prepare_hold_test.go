package dradriver

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// hung is the data role while it answers nothing: every question waits for its
// context.
type hung struct {
	stock.Cache
	stock.KV
	asked chan struct{} // capacity 1: somebody asked
}

func (h hung) Subscribe() (<-chan struct{}, func()) { return h.Cache.Subscribe() }
func (h hung) wait(ctx context.Context) error {
	select {
	case h.asked <- struct{}{}:
	default:
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

func (h hung) Hold(ctx context.Context, _ artifact.Digest, _ string) (stock.Views, error) {
	return stock.Views{}, h.wait(ctx)
}

func (h hung) Pull(ctx context.Context, _ artifact.Ref, _ string) (stock.Progress, error) {
	return stock.Progress{}, h.wait(ctx)
}

func (h hung) Reserve(ctx context.Context, _ stock.Reservation) (string, error) {
	return "", h.wait(ctx)
}

func (h hung) Release(ctx context.Context, _ string) error { return h.wait(ctx) }

// hang has the data role answer nothing until the func is called.
func (r *rig) hang() (h hung, over func()) {
	h = hung{r.cache, r.kv, make(chan struct{}, 1)}
	r.o.Cache, r.o.KV = h, h
	return h, func() { r.o.Cache, r.o.KV = r.cache, r.kv }
}

func TestADataRoleThatHangsCostsAPrepareItsBoundOnceAndIsNamed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := patient(t)
		_, over := r.hang()
		claims := []*resourceapi.ResourceClaim{everything(), withUID(allocated(weightsResult("model", mistral)), "team", "b")}
		start := time.Now()
		all, err := r.PrepareResourceClaims(t.Context(), claims)
		if err != nil {
			t.Fatal(err)
		}
		took(t, start, holdTimeout)
		text := all[claims[0].UID].Err.Error()
		for _, want := range []string{
			"the data role does not answer: asked to hold artifact " + llama.Digest.Short() + ", it said nothing for 10 s",
			"the data role does not answer: asked to reserve KV space, it said nothing for 10 s",
		} {
			if !strings.Contains(text, want) {
				t.Errorf("answer %q, want %q in it", text, want)
			}
		}
		for uid, result := range all {
			if !errors.Is(result.Err, stock.ErrUnavailable) {
				t.Errorf("%s: %v", uid, result.Err)
			}
		}
		// What is owed of before has no bound of its own.
		r.mustUnprepare(t, claims[0].UID, claims[1].UID)
		start = time.Now()
		if all, err = r.PrepareResourceClaims(t.Context(), claims); err != nil {
			t.Fatal(err)
		}
		took(t, start, holdTimeout)
		if text := all[claims[0].UID].Err.Error(); !strings.Contains(text, "not released yet") || !strings.Contains(text, "asked to release what the claim held before, it said nothing for 10 s") {
			t.Errorf("answer %q", text)
		}
		over()
		for _, c := range claims {
			r.mustPrepare(t, c)
			r.mustUnprepare(t, c.UID)
		}
		r.wantNothing(t)
	})
}

func TestARecoveryThatHangsMakesWayForThePrepareOfItsClaim(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := patient(t)
		c := everything()
		first := r.mustPrepare(t, c)
		h, over := r.hang()
		ended := make(chan error, 1)
		start := time.Now()
		go func() { ended <- r.Recover(t.Context()) }()
		<-h.asked
		synctest.Wait()
		if again := r.mustPrepare(t, c); len(again.Devices) != len(first.Devices) {
			t.Errorf("answer %+v, then %+v", first, again)
		}
		took(t, start, 0)
		if err := <-ended; err != nil {
			t.Errorf("what is left to the next recovery is told as an error: %v", err)
		}
		over()
		r.mustUnprepare(t, c.UID)
		r.wantNothing(t)
	})
}

func TestLookingAtPullsMakesWayForThePrepareOfTheirClaim(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := patient(t)
		r.o.PullWait = -1
		c := wants(vanished)
		if err := r.prepare(t, c).Err; !errors.Is(err, errWaiting) {
			t.Fatal(err)
		}
		h, over := r.hang()
		start := time.Now()
		polled := make(chan struct{})
		go func() {
			defer close(polled)
			r.pulls.poll(t.Context())
		}()
		<-h.asked
		if err := r.prepare(t, c).Err; !errors.Is(err, stock.ErrUnavailable) {
			t.Errorf("answer %v", err)
		}
		took(t, start, holdTimeout)
		<-polled
		over()
		r.mustUnprepare(t, c.UID)
		r.wantNothing(t)
	})
}
