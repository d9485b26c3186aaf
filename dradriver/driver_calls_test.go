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
		leave, err := c.enter(t.Context(), []string{"a", "b"})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.enter(ctx, []string{"x", "b"}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a second turn: %v", err)
		}
		other, err := c.enter(t.Context(), []string{"x"})
		if err != nil {
			t.Fatal(err)
		}
		other()
		leave()
		again, err := c.enter(t.Context(), []string{"b", "a", "b"})
		if err != nil {
			t.Fatal(err)
		}
		again()
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
				leave, err := c.enter(t.Context(), names)
				if err != nil {
					t.Error(err)
					return
				}
				for _, name := range names {
					inside[name]++ // the turns guard it
				}
				leave()
			}
		})
	}
	wg.Wait()
	if inside["a"] != 800 || len(c.turns) > 0 {
		t.Errorf("counted %v, turns left %v", inside, c.turns)
	}
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
