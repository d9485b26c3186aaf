// Package wear owns how much may be written to the drives of the KV tier, so
// that a rated life lasts. Bucket is the decision, pure; Ledger keeps what was
// written and what may still be in a file (wear.json, see ../FORMAT.md) and asks
// it. The KV tier asks the ledger before each write to a drive. It knows no
// block and no drive, and writes nothing but its file.
package wear

import (
	"math"
	"math/bits"
	"sync"
	"time"
)

// Tenant names whose bytes are written.
type Tenant = [16]byte

// Rate is how many bytes per second may be written on average to drives of
// capacity bytes that last for that many writes of all of them per day.
func Rate(writesPerDay float64, capacity int64) int64 {
	perSecond := writesPerDay * float64(capacity) / (24 * 60 * 60)
	if math.IsNaN(perSecond) || perSecond <= 0 {
		return 0
	}
	return int64(min(perSecond, maxBytes))
}

// maxBytes bounds every number of bytes here, so that sums do not overflow.
const maxBytes = 1 << 60

// Bucket holds tokens, one for each byte that may be written. They come at a
// rate, and what is not spent is kept up to a burst; so in any time t no more
// than burst + rate*t is written.
//
// Half of the burst belongs to the tenants by their shares: what a tenant has
// saved of its share, it may always spend. What is there beyond that half is lent
// to who comes first and touches nobody's savings, so idle shares are of use and
// yet wait for their owners.
//
// Times are monotonic, since any beginning; one that runs backwards gives no
// tokens. It is safe for concurrent use.
type Bucket struct {
	mu      sync.Mutex
	rate    int64         // bytes per second
	burst   int64         // bytes
	level   int64         // bytes, at most burst; below zero what was charged beyond
	rest    uint64        // of the last refill: billionths of a byte
	at      time.Duration // of the last refill
	tenants map[Tenant]*share
	weights float64 // of all tenants
}

// share is what belongs to one tenant.
type share struct {
	weight float64
	saved  float64 // bytes, below zero after a write larger than all that it may save
	at     time.Duration
}

// NewBucket makes a bucket that has level tokens at a time: rate in bytes per
// second, burst and level in bytes. A rate or burst below zero is 0, and the level
// at most the burst.
func NewBucket(now time.Duration, rate, burst, level int64) *Bucket {
	b := &Bucket{at: now, tenants: map[Tenant]*share{}}
	b.rate, b.burst = bounded(rate), bounded(burst)
	b.level = min(max(level, -maxBytes), b.burst)
	return b
}

func bounded(n int64) int64 { return min(max(n, 0), maxBytes) }

// SetRate changes rate (bytes per second) and burst (bytes) from now on.
func (b *Bucket) SetRate(now time.Duration, rate, burst int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refillAllLocked(now)
	b.rate, b.burst = bounded(rate), bounded(burst)
	b.level = min(b.level, b.burst)
	b.clampLocked()
}

// SetShare says what part of the whole a tenant has: its weight among the
// weights of all. One that is not above zero takes the tenant out. A new tenant
// has saved nothing.
func (b *Bucket) SetShare(now time.Duration, tenant Tenant, weight float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refillAllLocked(now)
	s := b.tenants[tenant]
	switch {
	case !(weight > 0) || math.IsInf(weight, 0):
		delete(b.tenants, tenant)
	case s == nil:
		b.tenants[tenant] = &share{weight: weight, at: b.at}
	default:
		s.weight = weight
	}
	b.weights = 0
	for _, s := range b.tenants {
		b.weights += s.weight
	}
	b.clampLocked()
}

// Spend takes n tokens for a write of a tenant, or none and is false. A tenant
// without a share has only what is lent, and a write larger than the burst is
// never made.
func (b *Bucket) Spend(now time.Duration, tenant Tenant, n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refillLocked(now)
	if n < 0 || n > b.level {
		return false
	}
	if b.level-n < b.burst/2 {
		// Not lent: it has to be its own.
		s := b.tenants[tenant]
		if s == nil || !b.ownLocked(s, float64(n)) {
			return false
		}
		s.saved -= float64(n)
	}
	b.level -= n
	return true
}

// Charge takes n tokens for a write that may not be refused, whether they are there
// or not: nothing else is written before they have come.
func (b *Bucket) Charge(now time.Duration, tenant Tenant, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refillLocked(now)
	n = bounded(n)
	if s := b.tenants[tenant]; s != nil && b.level-n < b.burst/2 {
		b.refillShareLocked(s)
		s.saved -= float64(n)
	}
	b.level = max(b.level-n, -maxBytes)
}

// ownLocked reports whether a tenant may spend n of its share. What is larger
// than all it may save, it may spend once that is full and the others' savings
// stay covered; it pays the rest back before its next write.
func (b *Bucket) ownLocked(s *share, n float64) bool {
	b.refillShareLocked(s)
	most := b.mostLocked(s)
	if n <= most || s.saved < most {
		return n <= s.saved
	}
	others := 0.0
	for _, o := range b.tenants {
		if o != s {
			b.refillShareLocked(o)
			others += max(0, o.saved)
		}
	}
	return float64(b.level)-n >= others
}

// Refund gives back tokens that were taken for a write that did not happen.
func (b *Bucket) Refund(now time.Duration, tenant Tenant, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refillLocked(now)
	b.level = min(b.level+bounded(n), b.burst)
	if s := b.tenants[tenant]; s != nil {
		b.refillShareLocked(s)
		s.saved = min(s.saved+float64(bounded(n)), b.mostLocked(s))
	}
}

// Fill is how full the bucket is, from 0 to 1.
func (b *Bucket) Fill(now time.Duration) float64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refillLocked(now)
	if b.burst == 0 {
		return 0
	}
	return max(0, float64(b.level)/float64(b.burst))
}

// Level is how many tokens there are, below zero how many are to come first.
func (b *Bucket) Level(now time.Duration) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refillLocked(now)
	return b.level
}

// FillFor is how full the bucket is for one tenant, from 0 to 1: its own share or
// what is lent, whichever is fuller.
func (b *Bucket) FillFor(now time.Duration, tenant Tenant) float64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refillLocked(now)
	if b.burst == 0 {
		return 0
	}
	fill := float64(b.level-b.burst/2) / float64(b.burst-b.burst/2)
	if s := b.tenants[tenant]; s != nil {
		b.refillShareLocked(s)
		if most := b.mostLocked(s); most > 0 {
			fill = max(fill, s.saved/most)
		}
	}
	return min(max(fill, 0), 1)
}

// mostLocked is what a tenant may save. Together the tenants may save half of the
// burst, so that what they saved is always there: loans end at that half.
func (b *Bucket) mostLocked(s *share) float64 {
	return float64(b.burst/2) * s.weight / b.weights
}

// refillLocked adds what came since the last time, to a billionth of a byte.
func (b *Bucket) refillLocked(now time.Duration) {
	if now <= b.at {
		return
	}
	high, low := bits.Mul64(uint64(now-b.at), uint64(b.rate))
	low, carry := bits.Add64(low, b.rest, 0)
	high += carry
	b.at = now
	if high >= uint64(time.Second) {
		b.level, b.rest = b.burst, 0 // more than 2^64 bytes
		return
	}
	came, rest := bits.Div64(high, low, uint64(time.Second))
	if came >= uint64(b.burst-b.level) {
		b.level, b.rest = b.burst, 0
		return
	}
	b.level, b.rest = b.level+int64(came), rest
}

// refillShareLocked adds a tenant's part of what came since its last time.
func (b *Bucket) refillShareLocked(s *share) {
	came := (b.at - s.at).Seconds() * float64(b.rate) * s.weight / b.weights
	s.saved, s.at = min(s.saved+came, b.mostLocked(s)), b.at
}

func (b *Bucket) refillAllLocked(now time.Duration) {
	b.refillLocked(now)
	for _, s := range b.tenants {
		b.refillShareLocked(s)
	}
}

// clampLocked takes from the tenants what they may save no longer.
func (b *Bucket) clampLocked() {
	for _, s := range b.tenants {
		s.saved = min(s.saved, b.mostLocked(s))
	}
}

// DaysLeft is for how many days drives that endure so many bytes last, of which
// some are written, at a rate in bytes per second. known is false where no
// endurance is given or nothing is written. It is at most a hundred years.
func DaysLeft(endurance, written, rate int64) (days float64, known bool) {
	if endurance <= 0 || rate <= 0 {
		return 0, false
	}
	left := float64(max(0, endurance-max(0, written)))
	return min(left/float64(rate)/(24*60*60), maxDays), true
}

const maxDays = 36525
