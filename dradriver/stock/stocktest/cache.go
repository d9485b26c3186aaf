// Package stocktest holds the conformance suites of stock.Cache and stock.KV.
// Every implementation runs them: the fakes that tests use, the one in the
// process of the data role, and the one over its socket. A rig says how an
// implementation is opened and what is on its node; the suites own no state.
package stocktest

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// patience bounds the wait for an event that comes by itself.
const patience = time.Minute

// CacheRig is one node to test a Cache on. Nothing is held on it at first.
type CacheRig struct {
	Cache stock.Cache
	// Warm is Ready on the node.
	Warm stock.Artifact
	// Cold is not on the node and becomes Ready by itself once pulled.
	Cold artifact.Ref
	// Forbidden is a ref whose source refuses it for good.
	Forbidden artifact.Ref
	// Restricted is Ready on the node but has no view, since its source
	// restricts it.
	Restricted artifact.Digest
	// Remove tries to take an artifact off the node as an operator would; it
	// fails where the artifact is held.
	Remove func(artifact.Digest) error
	// Reopen gives the cache as it is after a crash of the role that has it.
	Reopen func(t *testing.T) stock.Cache
}

// Cache checks that an implementation does what stock.Cache promises. open
// gives a fresh rig.
func Cache(t *testing.T, open func(t *testing.T) CacheRig) {
	t.Helper()
	for name, check := range map[string]func(t *testing.T, rig CacheRig){
		"WeightsTellsWhatIsReadyAndViewable":        checkWeights,
		"HoldGivesTheSameViewsEachTime":             checkHold,
		"HoldOfWhatIsNotThereIsNotReady":            checkHoldUnknown,
		"HoldOfARestrictedArtifactIsRefused":        checkHoldRestricted,
		"WhatIsHeldCannotBeRemovedUntilTheLast":     checkHoldForbidsRemoval,
		"PullMakesARefReadyAndHoldsIt":              checkPull,
		"PullOfWhatIsReadyIsReadyAtOnce":            checkPullReady,
		"PullThatCannotSucceedSaysSoForGood":        checkPullForbidden,
		"TwoClaimsPullOneRef":                       checkPullTwice,
		"ReleaseEndsEverythingOfAClaimAndOnlyOfIt":  checkRelease,
		"HoldsOutliveACrash":                        checkReopen,
		"AReleaseOutlivesACrash":                    checkReleaseReopen,
		"CallsEndWithTheirContext":                  checkContext,
		"ManyClaimsAtOnceLeaveNothing":              checkConcurrent,
		"ChangedSignalsANewArtifact":                checkSubscribe,
		"ChangedSignalsTheEndOfAPull":               checkSubscribePull,
		"ViewsAreDirectoriesThatHoldFilesByTheName": checkViews,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			check(t, open(t))
		})
	}
}

// until polls a condition; tests that wait for what comes by itself use it.
func until(t *testing.T, what string, holds func() bool) {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func holds(t *testing.T, c stock.Cache) []string {
	t.Helper()
	claims, err := c.Holds(t.Context())
	must(t, err)
	slices.Sort(claims)
	return claims
}

func wantHolds(t *testing.T, c stock.Cache, want ...string) {
	t.Helper()
	slices.Sort(want)
	if got := holds(t, c); !slices.Equal(got, want) {
		t.Errorf("claims that hold: %v, want %v", got, want)
	}
}

// known waits for the first state and finds an artifact in it.
func known(t *testing.T, c stock.Cache, digest artifact.Digest) (stock.Artifact, bool) {
	t.Helper()
	until(t, "the state of the weights", func() bool { _, ok := c.Weights(); return ok })
	state, _ := c.Weights()
	at := slices.IndexFunc(state.Artifacts, func(a stock.Artifact) bool { return a.Digest == digest })
	if at < 0 {
		return stock.Artifact{}, false
	}
	return state.Artifacts[at], true
}

// pull calls Pull until it is Ready.
func pull(t *testing.T, c stock.Cache, ref artifact.Ref, claim string) stock.Progress {
	t.Helper()
	var last stock.Progress
	until(t, "the end of the pull", func() bool {
		p, err := c.Pull(t.Context(), ref, claim)
		must(t, err)
		if p.Final {
			t.Fatalf("pull %s: %s (%s)", ref, p.Failed, p.Reason)
		}
		last = p
		return p.Ready
	})
	return last
}

func checkWeights(t *testing.T, rig CacheRig) {
	got, ok := known(t, rig.Cache, rig.Warm.Digest)
	if !ok || got != rig.Warm {
		t.Errorf("warm artifact is told as %+v, want %+v", got, rig.Warm)
	}
	if _, ok := known(t, rig.Cache, rig.Restricted); ok {
		t.Error("an artifact without a view is told as one that can be claimed")
	}
	state, _ := rig.Cache.Weights()
	if state.Drive.Free <= 0 || state.Drive.Tier == "" {
		t.Errorf("drive is told as %+v", state.Drive)
	}
	byRef := func(a, b stock.Artifact) int { return strings.Compare(a.Ref.String(), b.Ref.String()) }
	if !slices.IsSortedFunc(state.Artifacts, byRef) {
		t.Error("artifacts are not sorted by ref")
	}
}

func checkHold(t *testing.T, rig CacheRig) {
	first, err := rig.Cache.Hold(t.Context(), rig.Warm.Digest, "a")
	must(t, err)
	again, err := rig.Cache.Hold(t.Context(), rig.Warm.Digest, "a")
	must(t, err)
	other, err := rig.Cache.Hold(t.Context(), rig.Warm.Digest, "b")
	must(t, err)
	if first != again || first != other || first.Digest != rig.Warm.Digest || first.Flat == "" {
		t.Errorf("views %+v, then %+v, for another claim %+v", first, again, other)
	}
	wantHolds(t, rig.Cache, "a", "b")
}

func checkHoldUnknown(t *testing.T, rig CacheRig) {
	if _, err := rig.Cache.Hold(t.Context(), artifact.Digest{1, 2, 3}, "a"); !errors.Is(err, stock.ErrNotReady) {
		t.Errorf("hold: %v, want ErrNotReady", err)
	}
	wantHolds(t, rig.Cache)
}

func checkHoldRestricted(t *testing.T, rig CacheRig) {
	if _, err := rig.Cache.Hold(t.Context(), rig.Restricted, "a"); !errors.Is(err, stock.ErrRestricted) {
		t.Errorf("hold: %v, want ErrRestricted", err)
	}
	wantHolds(t, rig.Cache)
}

func checkHoldForbidsRemoval(t *testing.T, rig CacheRig) {
	for _, claim := range []string{"a", "b"} {
		_, err := rig.Cache.Hold(t.Context(), rig.Warm.Digest, claim)
		must(t, err)
	}
	for _, claim := range []string{"a", "b"} {
		if err := rig.Remove(rig.Warm.Digest); err == nil {
			t.Fatal("an artifact went while a claim held it")
		}
		must(t, rig.Cache.Release(t.Context(), claim))
	}
	if err := rig.Remove(rig.Warm.Digest); err != nil {
		t.Errorf("remove after the last release: %v", err)
	}
	if _, err := rig.Cache.Hold(t.Context(), rig.Warm.Digest, "c"); !errors.Is(err, stock.ErrNotReady) {
		t.Errorf("hold after removal: %v, want ErrNotReady", err)
	}
}

func checkPull(t *testing.T, rig CacheRig) {
	p, err := rig.Cache.Pull(t.Context(), rig.Cold, "a")
	must(t, err)
	if p.Final || p.Ready != (p.Views.Flat != "") {
		t.Errorf("first answer %+v", p)
	}
	p = pull(t, rig.Cache, rig.Cold, "a")
	if p.Views.Digest.IsZero() || p.Views.Flat == "" || p.Size <= 0 || p.Present != p.Size || p.Failed != "" {
		t.Errorf("at the end %+v", p)
	}
	wantHolds(t, rig.Cache, "a")
	if err := rig.Remove(p.Views.Digest); err == nil {
		t.Error("what was pulled for a claim went while the claim held it")
	}
	until(t, "the pulled artifact in the state", func() bool { _, ok := known(t, rig.Cache, p.Views.Digest); return ok })
	held, err := rig.Cache.Hold(t.Context(), p.Views.Digest, "a")
	must(t, err)
	if held != p.Views {
		t.Errorf("hold gives %+v, the pull gave %+v", held, p.Views)
	}
}

func checkPullReady(t *testing.T, rig CacheRig) {
	p, err := rig.Cache.Pull(t.Context(), rig.Warm.Ref, "a")
	must(t, err)
	if !p.Ready || p.Views.Digest != rig.Warm.Digest {
		t.Errorf("pull of what is there: %+v", p)
	}
	wantHolds(t, rig.Cache, "a")
}

func checkPullForbidden(t *testing.T, rig CacheRig) {
	var last stock.Progress
	until(t, "the final failure", func() bool {
		p, err := rig.Cache.Pull(t.Context(), rig.Forbidden, "a")
		must(t, err)
		last = p
		return p.Final
	})
	if last.Ready || last.Failed == "" || !slices.Contains([]string{"Forbidden", "NotFound", "NotAllowed"}, last.Reason) {
		t.Errorf("final answer %+v", last)
	}
	must(t, rig.Cache.Release(t.Context(), "a"))
	wantHolds(t, rig.Cache)
}

func checkPullTwice(t *testing.T, rig CacheRig) {
	var pulls sync.WaitGroup
	for _, claim := range []string{"a", "b"} {
		pulls.Go(func() {
			if _, err := rig.Cache.Pull(t.Context(), rig.Cold, claim); err != nil {
				t.Error(err)
			}
		})
	}
	pulls.Wait()
	a, b := pull(t, rig.Cache, rig.Cold, "a"), pull(t, rig.Cache, rig.Cold, "b")
	if a.Views != b.Views {
		t.Errorf("two claims of one ref see %+v and %+v", a.Views, b.Views)
	}
	must(t, rig.Cache.Release(t.Context(), "a"))
	if err := rig.Remove(b.Views.Digest); err == nil {
		t.Error("the release of one claim freed what another holds")
	}
	wantHolds(t, rig.Cache, "b")
}

func checkRelease(t *testing.T, rig CacheRig) {
	must(t, rig.Cache.Release(t.Context(), "nobody"))
	for _, claim := range []string{"a", "b"} {
		_, err := rig.Cache.Hold(t.Context(), rig.Warm.Digest, claim)
		must(t, err)
	}
	_, err := rig.Cache.Pull(t.Context(), rig.Cold, "a")
	must(t, err)
	must(t, rig.Cache.Release(t.Context(), "a"))
	must(t, rig.Cache.Release(t.Context(), "a"))
	wantHolds(t, rig.Cache, "b")
}

func checkReopen(t *testing.T, rig CacheRig) {
	before, err := rig.Cache.Hold(t.Context(), rig.Warm.Digest, "a")
	must(t, err)
	pulled := pull(t, rig.Cache, rig.Cold, "b")
	again := rig.Reopen(t)
	wantHolds(t, again, "a", "b")
	after, err := again.Hold(t.Context(), rig.Warm.Digest, "a")
	must(t, err)
	if after != before {
		t.Errorf("views %+v before the crash, %+v after", before, after)
	}
	if p := pull(t, again, rig.Cold, "b"); p.Views != pulled.Views {
		t.Errorf("pulled views %+v before the crash, %+v after", pulled.Views, p.Views)
	}
}

func checkReleaseReopen(t *testing.T, rig CacheRig) {
	_, err := rig.Cache.Hold(t.Context(), rig.Warm.Digest, "a")
	must(t, err)
	must(t, rig.Cache.Release(t.Context(), "a"))
	wantHolds(t, rig.Reopen(t))
}

func checkContext(t *testing.T, rig CacheRig) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := rig.Cache.Hold(ended, rig.Warm.Digest, "a"); !errors.Is(err, context.Canceled) {
		t.Errorf("hold: %v, want the context's error", err)
	}
	if _, err := rig.Cache.Pull(ended, rig.Cold, "a"); !errors.Is(err, context.Canceled) {
		t.Errorf("pull: %v, want the context's error", err)
	}
	wantHolds(t, rig.Cache)
}

func checkConcurrent(t *testing.T, rig CacheRig) {
	var calls sync.WaitGroup
	for i := range 16 {
		claim := string(rune('a' + i))
		calls.Go(func() {
			for range 5 {
				if _, err := rig.Cache.Hold(t.Context(), rig.Warm.Digest, claim); err != nil {
					t.Error(err)
				}
				if err := rig.Cache.Release(t.Context(), claim); err != nil {
					t.Error(err)
				}
			}
		})
	}
	calls.Wait()
	wantHolds(t, rig.Cache)
	if err := rig.Remove(rig.Warm.Digest); err != nil {
		t.Errorf("remove after all releases: %v", err)
	}
}

func checkSubscribe(t *testing.T, rig CacheRig) {
	known(t, rig.Cache, rig.Warm.Digest)
	changed, cancel := rig.Cache.Subscribe()
	defer cancel()
	p := pull(t, rig.Cache, rig.Cold, "a")
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		if _, ok := known(t, rig.Cache, p.Views.Digest); ok {
			return
		}
		select {
		case <-changed:
		case <-deadline.C:
			t.Fatal("no signal told of the new artifact")
		}
	}
}

// checkSubscribePull asks for pulls again only when a signal came.
func checkSubscribePull(t *testing.T, rig CacheRig) {
	known(t, rig.Cache, rig.Warm.Digest)
	changed, cancel := rig.Cache.Subscribe()
	defer cancel()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for claim, ref := range map[string]artifact.Ref{"a": rig.Cold, "b": rig.Forbidden} {
		for {
			p, err := rig.Cache.Pull(t.Context(), ref, claim)
			must(t, err)
			if p.Ready || p.Final {
				break
			}
			select {
			case <-changed:
			case <-deadline.C:
				t.Fatalf("no signal told of the end of the pull of %s", ref)
			}
		}
	}
}

func checkViews(t *testing.T, rig CacheRig) {
	views, err := rig.Cache.Hold(t.Context(), rig.Warm.Digest, "a")
	must(t, err)
	dirs := []string{views.Flat}
	if rig.Warm.Ref.Scheme == artifact.SchemeHub {
		dirs = append(dirs, views.Hub)
	}
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		must(t, err)
		if len(entries) == 0 {
			t.Errorf("%s is empty", dir)
		}
	}
}
