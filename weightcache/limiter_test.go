package weightcache

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestLimiterHoldsTheRateAndAChangeReachesWhoWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(1000)
		began := time.Now()
		for range 10 {
			if err := l.WaitN(t.Context(), 500); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(began); took < 4900*time.Millisecond || took > 5100*time.Millisecond {
			t.Errorf("5000 bytes at 1000/s took %s", took)
		}
		began = time.Now()
		done := make(chan error)
		go func() { done <- l.WaitN(t.Context(), 100_000) }()
		synctest.Wait()
		l.SetRate(0)
		if err := <-done; err != nil || time.Since(began) > time.Second {
			t.Errorf("a waiter did not see the new rate: %v after %s", err, time.Since(began))
		}
		if l.Rate() != 0 {
			t.Errorf("rate %s", l.Rate())
		}
		l.SetRate(1)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := l.WaitN(ctx, 1000); !errors.Is(err, context.Canceled) {
			t.Errorf("WaitN of a cancelled caller: %v", err)
		}
	})
}
