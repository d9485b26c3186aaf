package segment

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/durable/durabletest"
)

// CRASH=full tries every crash of every change (`make crash`); without it a
// sample of them takes seconds.
var everyCrash = os.Getenv("CRASH") == "full"

// scene is a piece of work that crashes at each of its changes in turn; before
// happens undisturbed.
type scene struct {
	name    string
	options func(*Options)
	before  func(c *caller) error
	work    func(c *caller) error
}

// fill puts keys from one number to another, in batches.
func fill(from, to, version int) func(c *caller) error {
	return func(c *caller) error {
		for i := from; i < to; {
			values := map[name][]byte{}
			for ; len(values) < 3 && i < to; i++ {
				values[keyOf(i)] = valueOf(i, version)
			}
			if err := c.put(values); err != nil {
				return err
			}
		}
		return nil
	}
}

func endAll(keys ...int) func(c *caller) error {
	return func(c *caller) error {
		for _, i := range keys {
			if err := c.end(keyOf(i)); err != nil {
				return err
			}
		}
		return nil
	}
}

func all(steps ...func(c *caller) error) func(c *caller) error {
	return func(c *caller) error {
		for _, step := range steps {
			if err := step(c); err != nil {
				return err
			}
		}
		return nil
	}
}

func sealAll(c *caller) error { return c.seal() }
func reopen(c *caller) error  { return c.restart() }

func resize(segments int64) func(c *caller) error {
	return func(c *caller) error {
		clear(c.sure) // what goes is the oldest, and is told
		return c.log.SetBytes(c.context(), segments*smallSegment)
	}
}

var scenes = []scene{
	{name: "Beginning", work: fill(0, 12, 0)},
	{name: "Sealing", before: fill(0, 20, 0), work: all(sealAll, fill(20, 26, 0), sealAll)},
	{name: "Ending", before: all(fill(0, 20, 0), sealAll, fill(20, 24, 0)), work: endAll(1, 2, 21, 3)},
	{name: "Replacing", before: all(fill(0, 12, 0), sealAll), work: all(fill(0, 6, 1), fill(0, 3, 2))},
	{name: "Reclaiming", before: all(fill(0, 70, 0), sealAll, endAll(2, 30)), work: all(fill(70, 100, 0), fill(30, 34, 1))},
	{name: "ReclaimingTombstones", before: all(fill(0, 40, 0), sealAll, endAll(1, 2, 3, 4, 20, 21), sealAll, fill(40, 60, 0)), work: fill(60, 120, 0)},
	{name: "TwoDrives", options: withDrives(2), before: all(fill(0, 60, 0), sealAll), work: all(endAll(1, 2, 3), fill(0, 4, 1), fill(60, 80, 0), sealAll)},
	{name: "Restarting", options: withDrives(2), before: fill(0, 30, 0), work: all(reopen, endAll(5, 6), fill(5, 8, 1), reopen, fill(30, 40, 0))},
	{name: "Shrinking", before: all(fill(0, 60, 0), endAll(5, 6, 7)), work: all(resize(3), fill(5, 7, 1), resize(6), fill(60, 70, 0))},
	{name: "OpeningSmaller", before: all(fill(0, 8, 0), endAll(1, 2, 3), fill(10, 34, 0)), work: func(c *caller) error {
		clear(c.sure)
		c.options = func(o *Options) { o.Bytes = 5 * smallSegment }
		return all(reopen, fill(5, 7, 1), endAll(50))(c)
	}},
	{name: "Encrypted", options: nil, before: all(fill(0, 70, 0), sealAll), work: all(endAll(66), fill(66, 90, 1))},
}

func scenesOf(t *testing.T) []scene {
	list := append([]scene(nil), scenes...)
	for i := range list {
		if list[i].name == "Encrypted" {
			list[i].options = withAEAD(testAEAD(t))
		}
	}
	return list
}

// start plays a scene up to the crash at change n of its work; finished says that
// the work ended before.
func (sc *scene) start(n int, tear bool) (c *caller, finished bool, err error) {
	c = newCaller(sc.options)
	if sc.before != nil {
		if err := c.open(); err != nil {
			return nil, false, err
		}
		if err := errors.Join(sc.before(c), c.close()); err != nil {
			return nil, false, err
		}
		for k := range c.index {
			c.sure[k] = true // the log was closed
		}
	}
	c.fs.CrashAt(c.fs.Changes()+n, tear)
	if err := c.open(); err != nil {
		return c, false, crashOnly(err)
	}
	err = sc.work(c)
	return c, err == nil, crashOnly(err)
}

// crashOnly passes on what did not come of the crash.
func crashOnly(err error) error {
	if errors.Is(err, durabletest.ErrCrashed) {
		return nil
	}
	return err
}

// recover opens the log after a crash and holds it to what may be there, and then
// goes on with it.
func (c *caller) recover() error {
	if err := c.open(); err != nil {
		return fmt.Errorf("open after the crash: %w", err)
	}
	c.damagedReads = 0
	if err := c.check(); err != nil {
		return errors.Join(err, c.close())
	}
	if c.damagedReads > 0 && !c.failed {
		return fmt.Errorf("%d blocks are told of that cannot be read", c.damagedReads)
	}
	n := len(c.index)
	if err := c.restart(); err != nil {
		return fmt.Errorf("open again: %w", err)
	}
	if err := c.check(); err != nil {
		return err
	}
	// A read that failed is no longer in the index of the first.
	if len(c.index) < n {
		return fmt.Errorf("%d blocks were found, and %d at the next start", n, len(c.index))
	}
	if err := all(fill(0, 8, 7), endAll(0, 1), sealAll)(c); err != nil {
		return fmt.Errorf("go on: %w", err)
	}
	if hit, err := c.get(keyOf(5)); err != nil || !hit {
		return fmt.Errorf("a block written after the crash: %v, %w", hit, err)
	}
	return errors.Join(c.restart(), c.check(), c.close())
}

// stride is how many changes lie between two that are tried, and how many of
// their fates are.
func stride() (changes, most int) {
	switch {
	case everyCrash:
		return 1, 1 << 30
	case testing.Short():
		return 67, 1
	}
	return 19, 2
}

// eachChange plays every scene to a crash at each change in turn.
func eachChange(t *testing.T, try func(t *testing.T, c *caller, n int, random *rand.Rand)) {
	t.Helper()
	for i, sc := range scenesOf(t) {
		t.Run(sc.name, func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(uint64(i), 11))
			step, _ := stride()
			for n := 1 + random.IntN(step); ; n += step {
				c, finished, err := sc.start(n, n%2 == 0)
				if err != nil {
					t.Fatalf("crash at change %d: %v", n, err)
				}
				try(t, c, n, random)
				if finished || t.Failed() {
					return
				}
			}
		})
	}
}

func TestCrashAtAnyChangeGivesNoOldValueAndKeepsWhatWasSealed(t *testing.T) {
	t.Parallel()
	_, most := stride()
	var tried atomic.Int64
	t.Cleanup(func() { t.Logf("%d crashes were recovered from", tried.Load()) })
	eachChange(t, func(t *testing.T, c *caller, n int, random *rand.Rand) {
		t.Helper()
		left := most
		for fate, crash := range c.fs.Fates(random, uint64(n), everyCrash) {
			if left--; left < 0 {
				return
			}
			tried.Add(1)
			if err := c.on(crash()).recover(); err != nil {
				t.Errorf("crash at change %d, %s survived: %v", n, fate, err)
				return
			}
		}
	})
}

func TestCrashWhileRecoveringFromACrashGivesNoOldValue(t *testing.T) {
	t.Parallel()
	eachChange(t, func(t *testing.T, c *caller, n int, random *rand.Rand) {
		t.Helper()
		for k := 1; ; k++ {
			second := c.on(c.fs.Crash(rand.New(rand.NewPCG(random.Uint64(), 1))))
			second.fs.CrashAt(second.fs.Changes()+k, k%2 == 0)
			err := second.open()
			if crashOnly(err) != nil {
				t.Errorf("crash at change %d, open: %v", n, err)
				return
			}
			third := second.on(second.fs.Crash(rand.New(rand.NewPCG(random.Uint64(), 2))))
			if recoverErr := third.recover(); recoverErr != nil {
				t.Errorf("crash at change %d, then at change %d of the open: %v", n, k, recoverErr)
				return
			}
			if err == nil || !everyCrash && k >= 2 {
				return
			}
		}
	})
}

func TestPowerCutAfterAKilledProcessWasSucceededGivesNoOldValue(t *testing.T) {
	t.Parallel()
	eachChange(t, func(t *testing.T, c *caller, n int, _ *rand.Rand) {
		t.Helper()
		// The process is killed and the kernel goes on: what the successor sees it
		// is to have made durable before it builds on it.
		c.fs.Revive()
		next := c.on(c.fs)
		if err := next.open(); err != nil {
			t.Errorf("killed at change %d: %v", n, err)
			return
		}
		if err := errors.Join(next.check(), endAll(2, 3, 21)(next), fill(0, 4, 5)(next)); err != nil {
			t.Errorf("killed at change %d: %v", n, err)
			return
		}
		if err := next.on(next.fs.CrashWith(durabletest.PageSector, durabletest.Nothing)).recover(); err != nil {
			t.Errorf("killed at change %d, then the power failed: %v", n, err)
		}
	})
}

func TestIOErrorAtAnyWriteSyncOrNameGivesNoOldValue(t *testing.T) {
	t.Parallel()
	for _, cause := range []error{syscall.EIO, syscall.ENOSPC} {
		eachFailure(t, cause.Error(), func(c *caller, n int) func() bool {
			at := c.fs.Changes() + n
			c.fs.FailAt(at, cause)
			return func() bool { return c.fs.Changes() >= at }
		})
	}
}

func TestIOErrorAtAnyReadGivesNoOldValue(t *testing.T) {
	t.Parallel()
	eachFailure(t, "read", func(c *caller, n int) func() bool {
		at := c.fs.Reads() + n
		c.fs.FailReadAt(at, syscall.EIO)
		// A read is tried twice where a segment is understood.
		c.fs.FailReadAt(at+1, syscall.EIO)
		return func() bool { return c.fs.Reads() >= at }
	})
}

// eachFailure disturbs every scene at each operation in turn, and holds what comes
// after to the model: in the same process, and after a power cut.
func eachFailure(t *testing.T, what string, arm func(c *caller, n int) (reached func() bool)) {
	t.Helper()
	for i, sc := range scenesOf(t) {
		t.Run(what+"/"+sc.name, func(t *testing.T) {
			t.Parallel()
			step, _ := stride()
			for n := 1 + i%step; ; n += step {
				c, _, err := sc.start(1<<30, false)
				if err != nil {
					t.Fatal(err)
				}
				// Once more with the failure, on what the scene left.
				reached := arm(c, n)
				workErr := errors.Join(sc.work(c), c.close())
				finished := !reached()
				if finished && workErr != nil {
					t.Fatalf("undisturbed work: %v", workErr)
				}
				c.fs.Heal()
				c.fs.DropCaches()
				clear(c.sure) // a drive that fails may lose blocks, and tells no lies
				c.failed = true
				for _, fs := range []*durabletest.FS{c.fs, c.fs.Crash(nil)} {
					fs.Revive()
					if err := c.on(fs).recover(); err != nil {
						t.Fatalf("operation %d failed, %v: %v", n, workErr, err)
					}
				}
				if finished {
					return
				}
			}
		})
	}
}
