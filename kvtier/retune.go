package kvtier

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/hearth-dev/hearth/kvtier/wear"
	"github.com/hearth-dev/hearth/units"
)

// SetBudget changes what claims may take, from the next reservation on. One that
// is below what claims have reserved is refused with ErrNoSpace. The bounds of
// namespaces concern further claims only.
func (s *Space) SetBudget(ctx context.Context, b Budget) error {
	if b.Memory < 0 || b.NVMe < 0 || b.NamespaceMemory < 0 || b.NamespaceNVMe < 0 {
		return fmt.Errorf("change KV budget: %w: it is negative", ErrInvalid)
	}
	if err := s.enter(ctx); err != nil {
		return fmt.Errorf("change KV budget: %w", err)
	}
	defer s.leave()
	s.mu.Lock()
	defer s.mu.Unlock()
	var memory, nvme units.Bytes
	for _, r := range s.held {
		memory, nvme = memory+r.Memory, nvme+r.NVMe
	}
	if memory > b.Memory && b.Memory < s.budget.Memory {
		return fmt.Errorf("change KV budget: %w: claims have reserved %s of memory and would be left %s", ErrNoSpace, memory.Human(), b.Memory.Human())
	}
	if nvme > b.NVMe && b.NVMe < s.budget.NVMe {
		return fmt.Errorf("change KV budget: %w: claims have reserved %s of NVMe and would be left %s", ErrNoSpace, nvme.Human(), b.NVMe.Human())
	}
	s.budget = b
	return nil
}

// Reserved is what claims have together.
func (s *Space) Reserved() (memory, nvme units.Bytes) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.held {
		memory, nvme = memory+r.Memory, nvme+r.NVMe
	}
	return memory, nvme
}

// SetWritesPerDay changes how often the drives may be written over in a day. With
// a bound or without one is said at the start: errors wrap ErrInvalid.
func (c *Cache) SetWritesPerDay(writes float64) error {
	w := c.wear
	if (w.ledger == nil) != (writes == 0) || writes < 0 || math.IsNaN(writes) {
		return fmt.Errorf("change drive writes to %g a day: %w: a bound is given or taken away at a start only", writes, ErrInvalid)
	}
	if w.ledger == nil {
		return nil
	}
	rate := wear.Rate(writes, w.capacity)
	w.rate.Store(rate)
	w.ledger.SetRate(rates(rate))
	return nil
}

// rates are the steady rate and the burst of a bucket that gives rate bytes a
// second over a day.
func rates(rate int64) (steady, burst int64) {
	day := float64(rate) * (24 * time.Hour).Seconds()
	return int64(float64(rate) * rateOfDay), int64(min(math.Ceil(day*burstOfDay), 1<<60)) // beyond it nothing is bounded
}
