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

// retryBudget keeps a failing pool from doubling its own load.
type retryBudget struct {
	now func() time.Time

	mu       sync.Mutex
	second   int64 // the slot being written
	requests [budgetWindow]int64
	retries  [budgetWindow]int64
	sumReq   int64
	sumRetry int64
}

func newRetryBudget(now func() time.Time) *retryBudget { return &retryBudget{now: now} }

// request counts one request towards the budget.
func (b *retryBudget) request() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.advanceLocked()
	b.requests[b.second%budgetWindow]++
	b.sumReq++
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
