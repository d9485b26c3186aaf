package proxy

import (
	"sync"
	"time"
)

// Retry budget: this part of the last window's requests, plus a few for quiet
// times. Spent retries count for as long as the requests do.
const (
	budgetWindow  = 60 // seconds, one slot each
	budgetPercent = 10
	budgetFloor   = 3
)

// The requests that wait at an endpoint when it is lost are outside the budget:
// they are as many as it held, and each goes elsewhere once. The next loss of the
// same endpoint counts as one of its own after lossPause.
const (
	lossPause = 10 * time.Second
	maxLosses = 1024 // endpoints remembered; past it all are forgotten
)

// retryBudget keeps a failing pool from doubling its own load.
type retryBudget struct {
	now func() time.Time

	mu       sync.Mutex
	second   int64 // the slot being written
	requests [budgetWindow]int64
	retries  [budgetWindow]int64
	sumReq   int64
	sumRetry int64
	losses   map[string]time.Time // by endpoint id: when it was lost last
}

func newRetryBudget(now func() time.Time) *retryBudget {
	return &retryBudget{now: now, losses: map[string]time.Time{}}
}

// request counts one request towards the budget.
func (b *retryBudget) request() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.advanceLocked()
	b.requests[b.second%budgetWindow]++
	b.sumReq++
}

// heldAtLoss says that a request, sent to an endpoint that was lost before it
// answered, waited there when the loss was first seen.
func (b *retryBudget) heldAtLoss(endpoint string, sent time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	lost, known := b.losses[endpoint]
	if since := now.Sub(lost); !known || since > lossPause || since < 0 {
		if !known && len(b.losses) >= maxLosses {
			clear(b.losses)
		}
		b.losses[endpoint], lost = now, now
	}
	return !sent.After(lost)
}

// retry spends one retry; false if the budget is gone.
func (b *retryBudget) retry() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.advanceLocked()
	if b.sumRetry >= b.sumReq*budgetPercent/100+budgetFloor {
		return false
	}
	b.retries[b.second%budgetWindow]++
	b.sumRetry++
	return true
}

func (b *retryBudget) advanceLocked() {
	now := b.now().Unix()
	if now <= b.second { // also when the clock stepped back
		return
	}
	for s := max(b.second+1, now-budgetWindow+1); s <= now; s++ {
		slot := s % budgetWindow
		b.sumReq -= b.requests[slot]
		b.sumRetry -= b.retries[slot]
		b.requests[slot], b.retries[slot] = 0, 0
	}
	b.second = now
}
