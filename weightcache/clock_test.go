package weightcache

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// jumps are what happens to clocks: set right, set wrong, batteries that end.
var jumps = map[string]time.Duration{
	"forward ten years":   10 * 365 * 24 * time.Hour,
	"back ten years":      -10 * 365 * 24 * time.Hour,
	"to before the epoch": -60 * 365 * 24 * time.Hour,
	"back a second":       -time.Second,
}

// clock is one that jumps.
type clock struct {
	mu sync.Mutex
	at time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *clock) jump(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

// eachJump runs a test for every jump of a store's clock.
func eachJump(t *testing.T, test func(t *testing.T, w *world, clock *clock, jump time.Duration)) {
	t.Helper()
	for name, jump := range jumps {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := &clock{at: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
			w, err := newWorld(func(o *Options) { o.Now, o.Budget = c.now, 300*units.KiB })
			if err != nil {
				t.Fatal(err)
			}
			w.fs.SetNow(c.now)
			if err := w.open(); err != nil {
				t.Fatal(err)
			}
			test(t, w, c, jump)
			if err := w.close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// small is an artifact of about 100 KiB; the budget has room for two.
func small(name string, seed uint64) *version {
	return newVersion(name, map[string][]byte{"config.json": fmt.Appendf(nil, `{"name":%q}`, name), "w.safetensors": tensorFile(name, 100<<10, seed)})
}

func TestClockJumpsDoNotChangeWhatIsEvictedFirst(t *testing.T) {
	t.Parallel()
	eachJump(t, func(t *testing.T, w *world, clock *clock, jump time.Duration) {
		t.Helper()
		refC := crashRef("c")
		use := func(ref artifact.Ref) {
			t.Helper()
			m, _ := w.store.pinned(ref)
			lease, err := w.store.Acquire(m.Digest)
			if err != nil {
				t.Fatal(err)
			}
			lease.Release()
		}
		if err := errors.Join(w.pull(refA, small("a", 1)), w.pull(refB, small("b", 2))); err != nil {
			t.Fatal(err)
		}
		// b is used in the wrong time, a after the clock was set right: b goes.
		clock.jump(jump)
		use(refB)
		clock.jump(time.Minute - jump)
		use(refA)
		if err := w.pull(refC, small("c", 3), refA, refB); err != nil {
			t.Fatal(err)
		}
		a, _ := w.store.pinned(refA)
		b, _ := w.store.pinned(refB)
		if !w.store.Ready(a.Digest) || w.store.Ready(b.Digest) {
			t.Error("what was used last was evicted first")
		}
		// The other way round: c is used before the clock jumps for good, a after.
		use(refC)
		clock.jump(jump)
		use(refA)
		if err := w.pull(refB, small("b", 2), refA, refC); err != nil {
			t.Fatal(err)
		}
		c, _ := w.store.pinned(refC)
		if !w.store.Ready(a.Digest) || w.store.Ready(c.Digest) {
			t.Error("after the jump, what was used last was evicted first")
		}
	})
}

func TestClockJumpsEndNoLeaseAndLoseNoArtifact(t *testing.T) {
	t.Parallel()
	eachJump(t, func(t *testing.T, w *world, clock *clock, jump time.Duration) {
		t.Helper()
		if err := errors.Join(w.pull(refA, small("a", 1)), w.view(refA)); err != nil {
			t.Fatal(err)
		}
		m, _ := w.store.pinned(refA)
		lease, err := w.store.Acquire(m.Digest)
		if err != nil {
			t.Fatal(err)
		}
		clock.jump(jump)
		if err := w.remove(refA); !errors.Is(err, ErrLeased) {
			t.Errorf("remove: %v, want ErrLeased", err)
		}
		lease.Release()
		w.promise(refA).may, w.promise(refA).views = map[string]bool{m.Commit: true}, map[string]bool{flatKind: true, hubKind: true}
		// A restart in the new time finds everything, and another in the old.
		for range 2 {
			if err := errors.Join(w.close(), w.recover(), w.open()); err != nil {
				t.Fatal(err)
			}
			st, _ := w.puller.Status(refA)
			if st.State != Ready || st.LastUsed.After(clock.now()) {
				t.Errorf("the artifact is %s, last used %s at %s", st.State, st.LastUsed, clock.now())
			}
			clock.jump(-jump)
		}
	})
}

func TestClockJumpsPutNoScrubOff(t *testing.T) {
	t.Parallel()
	const every = 7 * 24 * time.Hour
	eachJump(t, func(t *testing.T, w *world, clock *clock, jump time.Duration) {
		t.Helper()
		if err := w.pull(refA, small("a", 1)); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			sha, due, found := w.store.nextScrub(every)
			if !found || due.Sub(clock.now()) > every {
				t.Errorf("the next check is due at %s, more than %s after %s", due, every, clock.now())
			}
			if err := w.store.keepCheck(sha, clock.now()); err != nil {
				t.Fatal(err)
			}
			clock.jump(jump)
			jump = -jump
		}
		if err := errors.Join(w.close(), w.open()); err != nil {
			t.Fatal(err)
		}
		if _, due, found := w.store.nextScrub(every); !found || due.Sub(clock.now()) > every {
			t.Errorf("after a restart the next check is due at %s", due)
		}
	})
}

func TestClockJumpsInMidPullChangeNothing(t *testing.T) {
	t.Parallel()
	eachJump(t, func(t *testing.T, w *world, clock *clock, jump time.Duration) {
		t.Helper()
		changes := 0
		w.fs.FailWhen(func(string, string) error {
			if changes++; changes%7 == 0 {
				clock.jump(jump)
				jump = -jump
			}
			return nil
		})
		if err := errors.Join(w.pull(refA, small("a", 1)), w.view(refA), w.refresh(refA, small("a, next", 4)), w.verify(refA)); err != nil {
			t.Fatal(err)
		}
		w.fs.FailWhen(nil)
		if err := errors.Join(w.close(), w.recover(), w.open()); err != nil {
			t.Error(err)
		}
	})
}
