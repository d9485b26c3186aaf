package proxy

import (
	"strconv"
	"testing"
	"time"
)

func TestTheRetryBudgetIsATenthOfTheLastMinutePlusThree(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	b := newRetryBudget(func() time.Time { return now })
	spend := func() (n int) {
		for b.retry() {
			n++
		}
		return n
	}
	if n := spend(); n != budgetFloor {
		t.Fatalf("%d retries in quiet, want %d", n, budgetFloor)
	}
	for range 100 {
		b.request()
		now = now.Add(100 * time.Millisecond)
	}
	if n := spend(); n != 10 {
		t.Fatalf("%d more retries after 100 requests, want 10", n)
	}
	now = now.Add(-time.Hour) // a clock that steps back changes nothing
	if n := spend(); n != 0 {
		t.Fatalf("%d retries after the clock stepped back", n)
	}
	now = now.Add(time.Hour + 51*time.Second)
	if n := spend(); n < 1 || n > 5 {
		t.Fatalf("%d retries as the window moves on", n)
	}
	now = now.Add(time.Hour)
	if n := spend(); n != budgetFloor {
		t.Fatalf("%d retries after an hour, want %d", n, budgetFloor)
	}
}

func TestWhatWaitsAtAnEndpointWhenItIsLostIsOutsideTheBudget(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	b := newRetryBudget(func() time.Time { return now })
	before := now
	now = now.Add(time.Minute)
	for range 100 {
		if !b.heldAtLoss("a", before) {
			t.Fatal("a request that waited at the loss counts against the budget")
		}
		now = now.Add(10 * time.Millisecond)
	}
	if b.heldAtLoss("a", now) {
		t.Error("a request sent after the loss does not count against the budget")
	}
	if !b.heldAtLoss("b", now) {
		t.Error("the loss of one endpoint is taken for that of another")
	}
	now = now.Add(lossPause + time.Second)
	if !b.heldAtLoss("a", now.Add(-time.Millisecond)) {
		t.Error("a later loss of the same endpoint is not seen")
	}
	for i := range 3 * maxLosses {
		b.heldAtLoss(strconv.Itoa(i), now)
	}
	if len(b.losses) > maxLosses {
		t.Errorf("%d losses are remembered", len(b.losses))
	}
}
