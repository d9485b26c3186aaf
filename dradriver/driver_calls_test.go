package dradriver

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/hearth-dev/hearth/dradriver/device"
)

func TestATurnIsHadByOneAndWaitedForWithAContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCalls()
		leave, err := c.enter(t.Context(), []string{"a", "b"}, rankPrepare)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.enter(ctx, []string{"x", "b"}, rankPrepare); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a second turn: %v", err)
		}
		other, err := c.enter(t.Context(), []string{"x"}, rankPrepare)
		if err != nil {
			t.Fatal(err)
		}
		other.leave()
		leave.leave()
		again, err := c.enter(t.Context(), []string{"b", "a", "b"}, rankPrepare)
		if err != nil {
			t.Fatal(err)
		}
		again.leave()
		if len(c.turns) > 0 {
			t.Errorf("turns are left: %v", c.turns)
		}
	})
}

func TestTurnsOfManyNeverDeadlock(t *testing.T) {
	t.Parallel()
	c := newCalls()
	var wg sync.WaitGroup
	inside := map[string]int{}
	for i := range 16 {
		names := []string{"a", "b", "c"}
		names[0], names[i%3] = names[i%3], names[0]
		wg.Go(func() {
			for range 50 {
				leave, err := c.enter(t.Context(), names, callRank(i%3))
				if err != nil {
					t.Error(err)
					return
				}
				for _, name := range names {
					inside[name]++ // the turns guard it
				}
				leave.leave()
			}
		})
	}
	wg.Wait()
	if inside["a"] != 800 || len(c.turns) > 0 {
		t.Errorf("counted %v, turns left %v", inside, c.turns)
	}
}

// ended reports whether a visitor was hurried.
func (v *visit) ended() bool { return v.patience.Err() != nil }

func TestWhoWaitsHurriesThoseOfLowerRankThatItWaitsBehind(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCalls()
		enter := func(own callRank, names ...string) <-chan *visit {
			got := make(chan *visit, 1)
			go func() {
				v, err := c.enter(t.Context(), names, own)
				if err != nil {
					t.Error(err)
				}
				got <- v
			}()
			synctest.Wait()
			return got
		}
		looking := <-enter(rankBackground, "a")
		first := enter(rankPrepare, "a", "b")
		if !looking.ended() {
			t.Error("what looks at pulls does not make way for a Prepare")
		}
		looking.leave()
		waits := <-first
		again := enter(rankPrepare, "b", "c")
		recovery := enter(rankBackground, "a")
		if waits.ended() {
			t.Error("a Prepare is hurried by another, or by a recovery")
		}
		last := enter(rankUnprepare, "c")
		if waits.ended() {
			t.Error("a Prepare is hurried by an Unprepare of a claim that is not its own")
		}
		// The second Prepare is ahead of this one, and behind the first.
		other := enter(rankUnprepare, "b")
		if !waits.ended() {
			t.Error("a Prepare goes on though an Unprepare waits for its claim")
		}
		(<-last).leave()
		waits.leave()
		hurried := <-again
		if !hurried.ended() {
			t.Error("a Prepare that had its turn before the Unprepare does not hear of it")
		}
		hurried.leave()
		(<-other).leave()
		(<-recovery).leave()
		if len(c.turns) > 0 {
			t.Errorf("turns are left: %v", c.turns)
		}
	})
}

func TestAVisitorThatWaitsIsHurriedForAnotherAndPassesItOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCalls()
		ahead, err := c.enter(t.Context(), []string{"b"}, rankPrepare)
		if err != nil {
			t.Fatal(err)
		}
		between := make(chan *visit, 1)
		go func() { // has a, and waits for b
			v, err := c.enter(t.Context(), []string{"a", "b"}, rankPrepare)
			if err != nil {
				t.Error(err)
			}
			between <- v
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.enter(ctx, []string{"a"}, rankUnprepare); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a turn that another has: %v", err)
		}
		if !ahead.ended() {
			t.Error("who keeps the one between waiting is not hurried")
		}
		ahead.leave()
		(<-between).leave()
		if len(c.turns) > 0 {
			t.Errorf("turns are left: %v", c.turns)
		}
	})
}

func TestHealthIsToldAtOnceAfterEachChangeAndEveryTenSeconds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.devices.changed = make(chan struct{}, 1)
		ctx, cancel := context.WithCancel(t.Context())
		reports := make(chan kubeletplugin.DeviceHealthReport)
		ended := make(chan error, 1)
		go func() { ended <- r.WatchHealthStatus(ctx, reports) }()
		first := <-reports
		if len(first.Devices) != 2 || first.Devices[0].Health != kubeletplugin.HealthStatusHealthy || first.Devices[0].PoolName != testNode {
			t.Errorf("first report %+v", first)
		}
		state := twoGPUs()
		state[1].Health = device.Unhealthy
		state[1].Conditions = []device.Condition{{Key: device.ResetRequired, Value: "xid-79", Severity: device.NoNew, Detail: "fell off the bus"}}
		start := time.Now()
		r.devices.set(state)
		second := <-reports
		if got := second.Devices[1]; got.Health != kubeletplugin.HealthStatusUnhealthy || got.Message != "xid-79: fell off the bus" || time.Since(start) != 0 {
			t.Errorf("after a change %+v, %s later", got, time.Since(start))
		}
		<-reports
		if took := time.Since(start); took > healthEvery {
			t.Errorf("the next report came after %s", took)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestANodeWithoutGPUsHasNoHealthToTell(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.o.Pools.GPUs = false
	if err := r.WatchHealthStatus(t.Context(), nil); !errors.Is(err, kubeletplugin.ErrHealthNotSupported) {
		t.Errorf("watch: %v", err)
	}
}
