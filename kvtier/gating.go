package kvtier

import (
	"context"
	"log/slog"

	"github.com/hearth-dev/hearth/kvtier/gate"
	"github.com/hearth-dev/hearth/kvtier/index"
	"github.com/hearth-dev/hearth/kvtier/segment"
)

// worthLocked is the load gate: whether a block comes sooner from its tier than
// from the engine. What is in RAM does.
func (n *Namespace) worthLocked(id index.ID) bool {
	t := n.tenant
	if _, here := t.index.Resident(id); here {
		return true
	}
	load := t.cache.speed(t.locLocked(id)).Load(int64(t.index.Size(id)))
	if gate.Decide(load, gate.Recompute{Tokens: n.tokensLocked(t.index.Size(id)), Rate: t.spec.PrefillRate}) {
		return true
	}
	t.stats.gated.Add(1)
	return false
}

// speed is what is known of the drive that a block is on.
func (c *Cache) speed(loc segment.Loc) *gate.Estimator {
	return c.speeds[int(loc.Drive())%len(c.speeds)]
}

// measure finds how fast the drives are, once, when the first tenant writes to
// them. Until then they count as slow ones. What it writes is of no tenant's share
// of the wear.
func (c *Cache) measure(ctx context.Context) {
	budget := segment.Wear{
		Spend:  func(n int64) bool { return c.wear.spend(nobody, n) },
		Charge: func(n int64) { c.wear.charge(nobody, n) },
	}
	for i, dir := range c.drives() {
		speed, err := segment.SelfTest(ctx, c.fs, dir, budget)
		if err != nil {
			if ctx.Err() == nil {
				c.log.Warn("a drive cannot be measured, it counts as a slow one", slog.String("dir", dir), slog.Any("error", err))
			}
			continue
		}
		c.speeds[i].Seed(gate.Speed{Bandwidth: speed.Read, Latency: speed.Latency})
		c.log.Info("drive measured", slog.String("dir", dir), slog.Int64("bytesPerSecond", int64(speed.Read)), slog.Duration("latency", speed.Latency))
	}
}
