package hubmirror

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/weightcache/source"
)

func newTable(opts AuthOptions) *tokenTable {
	t := newTokenTable(opts, time.Now)
	return &t
}

func tokenOf(i int) tokenKey {
	return tokenKey{sum: [32]byte{byte(i), byte(i >> 8)}, repo: "acme/tiny", commit: testCommit, files: true}
}

func says(err error) func(context.Context) error { return func(context.Context) error { return err } }

func TestAHundredCallsAtOnceAskTheSourceOnce(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]error{"yes": nil, "no": source.ErrForbidden, "cannot be asked": source.ErrUnavailable} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				table := newTable(AuthOptions{})
				var asked atomic.Int64
				release := make(chan struct{})
				var all sync.WaitGroup
				for range 100 {
					all.Go(func() {
						err := table.ask(t.Context(), tokenOf(1), func(context.Context) error {
							asked.Add(1)
							<-release
							return want
						})
						if !errors.Is(err, want) {
							t.Errorf("told %v, want %v", err, want)
						}
					})
				}
				synctest.Wait()
				close(release)
				all.Wait()
				if n := asked.Load(); n != 1 {
					t.Errorf("asked %d times", n)
				}
			})
		})
	}
}

func TestACallerThatLeavesDoesNotEndTheQuestionOfOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		table := newTable(AuthOptions{})
		release := make(chan struct{})
		put := func(ctx context.Context) error {
			select {
			case <-release:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		first, leave := context.WithCancel(t.Context())
		var both sync.WaitGroup
		both.Go(func() {
			if err := table.ask(first, tokenOf(1), put); !errors.Is(err, context.Canceled) {
				t.Errorf("the one that left was told %v", err)
			}
		})
		synctest.Wait()
		both.Go(func() {
			if err := table.ask(t.Context(), tokenOf(1), put); err != nil {
				t.Errorf("the one that stayed was told %v", err)
			}
		})
		synctest.Wait()
		leave()
		synctest.Wait()
		close(release)
		both.Wait()
	})
}

func TestAnAnswerHoldsItsTimeAndNoLonger(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		table := newTable(AuthOptions{AcceptedFor: 10 * time.Minute, RefusedFor: time.Minute, StaleFor: time.Hour})
		expect := func(what string, answer, want error, questions int64) {
			t.Helper()
			before := table.asked
			if err := table.ask(t.Context(), tokenOf(1), says(answer)); !errors.Is(err, want) || want == nil && err != nil {
				t.Errorf("%s: told %v, want %v", what, err, want)
			}
			if n := table.asked - before; n != questions {
				t.Errorf("%s: %d questions, want %d", what, n, questions)
			}
		}
		pass := func(d time.Duration) { t.Helper(); timer := time.NewTimer(d); <-timer.C }
		expect("first", nil, nil, 1)
		pass(9 * time.Minute)
		expect("a yes within its time", source.ErrForbidden, nil, 0)
		pass(time.Minute)
		expect("a yes past its time, while the source is away", source.ErrUnavailable, nil, 1)
		expect("and at once again", source.ErrUnavailable, nil, 0)
		pass(askAgainAfter)
		expect("and after the pause", source.ErrUnavailable, nil, 1)
		pass(49 * time.Minute)
		expect("just before it is too old", source.ErrUnavailable, nil, 1)
		pass(time.Minute)
		expect("a yes too old, while the source is away", source.ErrUnavailable, source.ErrUnavailable, 1)
		expect("and at once again", nil, source.ErrUnavailable, 0)
		pass(askAgainAfter)
		expect("once it is back", nil, nil, 1)
		pass(10 * time.Minute)
		expect("a token revoked", source.ErrUnauthorized, source.ErrUnauthorized, 1)
		pass(59 * time.Second)
		expect("a no within its time", nil, source.ErrUnauthorized, 0)
		pass(time.Second)
		expect("a no past its time, while the source is away", source.ErrUnavailable, source.ErrUnavailable, 1)
		pass(askAgainAfter)
		expect("admitted again", nil, nil, 1)
	})
}

func TestASourceThatDoesNotAnswerIsGivenUpWithinTheClientsPatience(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		table := newTable(AuthOptions{})
		begun := time.Now()
		var now, most atomic.Int64
		silent := func(ctx context.Context) error {
			if n := now.Add(1); n > most.Load() {
				most.Store(n)
			}
			<-ctx.Done()
			now.Add(-1)
			return context.Cause(ctx)
		}
		var all sync.WaitGroup
		// More questions than places: those that wait for one end in time too.
		for i := range 3 * askParallel {
			all.Go(func() {
				if err := table.ask(t.Context(), tokenOf(i), silent); err == nil || definite(err) {
					t.Errorf("told %v", err)
				}
			})
		}
		all.Wait()
		if took := time.Since(begun); took > 8*time.Second {
			t.Errorf("took %v, clients wait 10 s for headers", took)
		}
		if n := most.Load(); n != askParallel {
			t.Errorf("%d questions at once, want %d", n, askParallel)
		}
	})
}

func TestTheTableIsBoundedAndMadeUpTokensPushNoYesOut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		table := newTable(AuthOptions{Remembered: 8})
		if err := table.ask(t.Context(), tokenOf(0), says(nil)); err != nil {
			t.Fatal(err)
		}
		for i := 1; i < 1000; i++ {
			if err := table.ask(t.Context(), tokenOf(i), says(source.ErrUnauthorized)); !errors.Is(err, source.ErrUnauthorized) {
				t.Fatal(err)
			}
		}
		if len(table.yes) != 1 || len(table.no) != 8 || len(table.flight) != 0 {
			t.Errorf("%d yes, %d no, %d in flight", len(table.yes), len(table.no), len(table.flight))
		}
		if err := table.ask(t.Context(), tokenOf(0), says(source.ErrUnauthorized)); err != nil {
			t.Errorf("the yes was pushed out: %v", err)
		}
		for i := 2000; i < 3000; i++ {
			if err := table.ask(t.Context(), tokenOf(i), says(nil)); err != nil {
				t.Fatal(err)
			}
		}
		if len(table.yes) != 8 {
			t.Errorf("%d yes", len(table.yes))
		}
	})
}

func TestATokenOpensOnlyWhatItWasAskedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		table := newTable(AuthOptions{})
		key := tokenOf(1)
		if err := table.ask(t.Context(), key, says(nil)); err != nil {
			t.Fatal(err)
		}
		for name, change := range map[string]func(*tokenKey){
			"another token": func(k *tokenKey) { k.sum[0]++ }, "another repository": func(k *tokenKey) { k.repo = "acme/other" },
			"another commit": func(k *tokenKey) { k.commit = fmt.Sprintf("%040d", 1) }, "another source": func(k *tokenKey) { k.source = "other" },
			"the account": func(k *tokenKey) { k.files = false },
		} {
			other := key
			change(&other)
			if err := table.ask(t.Context(), other, says(source.ErrForbidden)); !errors.Is(err, source.ErrForbidden) {
				t.Errorf("%s is accepted as well: %v", name, err)
			}
		}
	})
}
