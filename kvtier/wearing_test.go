package kvtier

import (
	"testing"
	"time"

	"github.com/hearth-dev/hearth/units"
)

func TestOverwritingSmallBlocksStaysWithinTheWearBudget(t *testing.T) {
	t.Parallel()
	var now time.Duration
	const hours, capacity = 4, 4 * units.MiB
	c := onDrive(t, t.TempDir(), func(o *CacheOptions) {
		o.Wear = WearOptions{WritesPerDay: 24, Capacity: capacity, Now: func() time.Duration { return now }} // 4 MiB an hour
	})
	n := addTenant(t, c, TenantSpec{Name: "a", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
	for i := range hours * 1500 { // each costs a page, and two for the end of the one before
		mustPut(t, n, i%64, content(i%64, i, 3000))
		now += hours * time.Hour / (hours * 1500)
		drain(t, n.tenant)
	}
	written, known := n.tenant.drive.Stats().Bytes, c.Wear().Written
	// With the burst; and the last to be charged is paid for later.
	if budget := int64(capacity)*(hours+1) + 64<<10; written > budget || known != written {
		t.Errorf("%d bytes were written and %d counted, %d are allowed", written, known, budget)
	}
	closeCache(t, c)
}

func TestSelfTestsOfManyStartsStayWithinTheWearBudget(t *testing.T) {
	t.Parallel()
	var now time.Duration
	const perStart, capacity = 2*units.MiB + 4*units.KiB, 64 * units.MiB
	dir := t.TempDir()
	for start := range int64(24) {
		c := onDrive(t, dir, func(o *CacheOptions) {
			o.Wear = WearOptions{WritesPerDay: 1, Capacity: capacity, Now: func() time.Duration { return now }}
		})
		c.measure(t.Context())
		if s := c.Wear(); s.Written != (start+1)*int64(perStart) || s.Refused != 0 || c.speeds[0].Speed().Bandwidth <= 0 {
			t.Errorf("start %d: %+v, want %d bytes written and no write refused", start, s, (start+1)*int64(perStart))
		}
		closeCache(t, c)
		now += time.Hour
	}
	if 24*perStart > capacity {
		t.Error("a start an hour is more than the budget of a day")
	}
}
