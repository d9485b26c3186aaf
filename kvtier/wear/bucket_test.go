package wear

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

func tenant(n int) Tenant { return Tenant{byte(n)} }

func TestRateSpreadsTheWritesOfADayEvenly(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		perDay   float64
		capacity int64
		want     int64
	}{
		{1, 3_840_000_000_000, 44_444_444},
		{0.3, 8 * 3_840_000_000_000, 106_666_666},
		{3, 86_400, 3},
		{0, 1, 0},
		{-1, 1e12, 0},
		{math.NaN(), 1, 0},
		{math.Inf(1), 1, maxBytes},
		{1, 0, 0},
	} {
		if got := Rate(c.perDay, c.capacity); got != c.want {
			t.Errorf("%v writes a day of %d bytes: %d B/s, want %d", c.perDay, c.capacity, got, c.want)
		}
	}
}

func TestTokensComeAtTheRateUpToTheBurst(t *testing.T) {
	t.Parallel()
	b := NewBucket(time.Hour, 100, 1000, 500)
	for _, c := range []struct {
		now  time.Duration
		want int64
	}{
		{time.Hour, 500},
		{time.Hour + time.Second, 600},
		{time.Hour, 600},
		{time.Hour + 1500*time.Millisecond, 650},
		{time.Hour + 5*time.Second, 1000},
		{math.MaxInt64, 1000},
	} {
		if got := b.Level(c.now); got != c.want {
			t.Errorf("after %v there are %d, want %d", c.now-time.Hour, got, c.want)
		}
	}
	if got := b.Fill(math.MaxInt64); got != 1 {
		t.Errorf("full is %v", got)
	}
}

func TestNoPartOfATokenIsLostHoweverOftenTheBucketIsAsked(t *testing.T) {
	t.Parallel()
	b := NewBucket(0, 333_333_333, maxBytes, 0)
	for now := range time.Duration(1_000_000) {
		b.Level(now * 7)
	}
	if got := b.Level(7 * time.Second); got != 7*333_333_333 {
		t.Errorf("%d came in 7 s", got)
	}
}

func TestALevelBeyondAllBoundsIsCut(t *testing.T) {
	t.Parallel()
	for _, b := range []*Bucket{NewBucket(0, -1, -1, 5), NewBucket(0, math.MaxInt64, 0, math.MaxInt64)} {
		b.SetShare(0, tenant(1), 1)
		if b.Level(math.MaxInt64) != 0 || b.Fill(time.Hour) != 0 || b.FillFor(time.Hour, tenant(1)) != 0 || b.Spend(time.Hour, tenant(1), 1) {
			t.Error("a bucket without a burst gives tokens")
		}
	}
	b := NewBucket(0, math.MaxInt64, math.MaxInt64, 0)
	if got := b.Level(math.MaxInt64); got != maxBytes {
		t.Errorf("%d tokens", got)
	}
	tiny := NewBucket(0, 1, 1, 1)
	tiny.SetShare(0, tenant(1), 1)
	if got := tiny.FillFor(0, tenant(1)); got != 1 {
		t.Errorf("a burst of one byte is full: %v", got)
	}
	if b.Spend(0, tenant(1), -1) {
		t.Error("less than nothing is spent")
	}
}

func TestTheLoanEndsAtHalfTheBurst(t *testing.T) {
	t.Parallel()
	b := NewBucket(0, 0, 1000, 1000)
	for _, n := range []int64{300, 200} {
		if !b.Spend(0, tenant(9), n) {
			t.Errorf("%d are not lent to one without a share", n)
		}
	}
	if b.Spend(0, tenant(9), 1) || b.Level(0) != 500 {
		t.Errorf("more than half is lent: %d are left", b.Level(0))
	}
	if !b.Spend(0, tenant(9), 0) {
		t.Error("nothing is too much")
	}
}

func TestASavedShareWaitsForItsOwner(t *testing.T) {
	t.Parallel()
	b := NewBucket(0, 100, 1000, 1000)
	b.SetShare(0, tenant(1), 3)
	b.SetShare(0, tenant(2), 1)
	// Both save while a third, without a share, takes all that is lent.
	now := 20 * time.Second
	for b.Spend(now, tenant(3), 1) {
	}
	if got := b.Level(now); got != 500 {
		t.Errorf("%d are left", got)
	}
	if b.Spend(now, tenant(1), 376) || !b.Spend(now, tenant(1), 375) || b.Spend(now, tenant(1), 1) {
		t.Error("three quarters of the saved half are not 375")
	}
	if got := b.FillFor(now, tenant(2)); got != 1 {
		t.Errorf("the other is at %v", got)
	}
	if !b.Spend(now, tenant(2), 125) || b.Level(now) != 0 {
		t.Errorf("the other's quarter is gone, %d are left", b.Level(now))
	}
	// What comes is shared by weight.
	now += 2 * time.Second
	if b.Spend(now, tenant(3), 1) || !b.Spend(now, tenant(1), 149) || !b.Spend(now, tenant(2), 49) || b.Spend(now, tenant(1), 2) {
		t.Error("200 are not 150 and 50")
	}
}

func TestSharesFollowTheirWeights(t *testing.T) {
	t.Parallel()
	b := NewBucket(0, 100, 1000, 500)
	b.SetShare(0, tenant(1), 1)
	now := 10 * time.Second // full: tenant 1 has saved 500
	b.SetShare(now, tenant(2), 4)
	for b.Spend(now, tenant(9), 1) {
	}
	if b.Spend(now, tenant(2), 1) || !b.Spend(now, tenant(1), 60) || b.Spend(now, tenant(1), 41) || !b.Spend(now, tenant(1), 40) {
		t.Error("a fifth of the half is not 100, or a new tenant has savings")
	}
	b.SetShare(now, tenant(1), 0)
	if b.Spend(now, tenant(1), 1) || !b.Spend(now+time.Second, tenant(2), 100) {
		t.Error("a tenant without weight spends, or the other has not all")
	}
	for _, weight := range []float64{-1, math.NaN(), math.Inf(1)} {
		b.SetShare(now, tenant(2), weight)
		if len(b.tenants) != 0 || b.weights != 0 {
			t.Errorf("a weight of %v is one", weight)
		}
	}
}

func TestAWriteLargerThanAShareIsPaidBackBeforeTheNext(t *testing.T) {
	t.Parallel()
	b := NewBucket(0, 100, 1000, 1000)
	b.SetShare(0, tenant(1), 1)
	b.SetShare(0, tenant(2), 9)
	b.Spend(0, tenant(9), 500)
	if b.Spend(0, tenant(1), 200) {
		t.Error("a large write before anything is saved")
	}
	// Tenant 1 saves 50 and tenant 2 450 in 5 s, so that others' savings take all
	// but its own; what comes then is nobody's.
	now := 5 * time.Second
	b.Spend(now, tenant(9), 500)
	if b.Level(now) != 500 || b.Spend(now, tenant(1), 200) {
		t.Error("a large write takes what others saved")
	}
	now += 2 * time.Second // 200 more: 250 are not tenant 2's
	b.SetShare(now, tenant(9), 0)
	if b.Level(now) != 700 || !b.Spend(now, tenant(1), 250) {
		t.Error("a large write does not get what is nobody's")
	}
	if !b.Spend(now, tenant(2), 450) || b.Level(now) != 0 {
		t.Error("it took what the other saved")
	}
	for ; !b.Spend(now, tenant(1), 1); now += time.Second {
		// Another takes what is lent.
		for b.Spend(now+time.Second, tenant(9), 1) {
		}
	}
	// It owes 200 and gets 10 each second.
	if at := 7*time.Second + 21*time.Second; now != at {
		t.Errorf("the next write is after %v, want %v", now, at)
	}
}

func TestABurstIsSpentToItsEnd(t *testing.T) {
	t.Parallel()
	b := NewBucket(0, 100, 1000, 0)
	b.SetShare(0, tenant(1), 1)
	now := 10 * time.Second
	for range 10 {
		if !b.Spend(now, tenant(1), 100) {
			t.Errorf("%d stay in the bucket of a tenant that is alone", b.Level(now))
		}
	}
}

func TestALoanForgivesNoDebt(t *testing.T) {
	t.Parallel()
	b := NewBucket(0, 100, 1000, 1000)
	b.SetShare(0, tenant(1), 1)
	b.SetShare(0, tenant(2), 9)
	b.Spend(0, tenant(9), 300) // 700 are left
	now := 10 * time.Second
	b.SetRate(now, 0, 1000)
	b.Spend(now, tenant(9), 300)
	b.SetRate(now, 100, 1000)
	if !b.Spend(now, tenant(1), 250) || b.Level(now) != 450 { // owes 200
		t.Fatal("no large write")
	}
	now += time.Second
	if !b.Spend(now, tenant(1), 10) {
		t.Fatal("no loan")
	}
	began := now
	for b.Spend(now, tenant(9), 1) {
	}
	for ; !b.Spend(now, tenant(1), 1); now += time.Second {
		for b.Spend(now+time.Second, tenant(9), 1) {
		}
	}
	// It owes 190 then and gets 10 each second.
	if now != began+20*time.Second {
		t.Errorf("it writes on %v after the loan", now-began)
	}
}

func TestARefundIsNoMoreThanTheBurst(t *testing.T) {
	t.Parallel()
	b := NewBucket(0, 0, 1000, 1000)
	b.SetShare(0, tenant(1), 1)
	b.Spend(0, tenant(1), 400)
	b.Refund(0, tenant(1), 400)
	b.Refund(0, tenant(2), 400)
	b.Refund(0, tenant(1), -7)
	if got := b.Level(0); got != 1000 {
		t.Errorf("%d after refunds", got)
	}
}

func TestARateCountsFromWhenItIsSet(t *testing.T) {
	t.Parallel()
	b := NewBucket(0, 100, 10_000, 0)
	b.SetShare(0, tenant(1), 1)
	b.SetRate(10*time.Second, 10, 500)
	if got := b.Level(10 * time.Second); got != 500 {
		t.Errorf("%d fit the smaller burst", got)
	}
	if b.Spend(10*time.Second, tenant(1), 251) && b.Spend(10*time.Second, tenant(1), 250) {
		t.Error("more than the smaller burst is spent")
	}
	b.SetRate(10*time.Second, 10, 10_000)
	before := b.Level(10 * time.Second)
	if got := b.Level(20 * time.Second); got != before+100 {
		t.Errorf("%d came in 10 s", got-before)
	}
}

// TestSavingsAreAlwaysThere holds, whatever tenants do: what they saved together
// is there, nobody gets more than was given, and the level is within bounds.
func TestSavingsAreAlwaysThere(t *testing.T) {
	t.Parallel()
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 5))
		rate, burst := random.Int64N(10_000), random.Int64N(100_000)
		b := NewBucket(0, rate, burst, burst)
		var now time.Duration
		given, spent := float64(burst), int64(0)
		for range 3000 {
			step := time.Duration(random.Int64N(int64(time.Second)))
			now += step
			given += step.Seconds() * float64(rate)
			who := tenant(random.IntN(6))
			switch random.IntN(40) {
			case 0:
				b.SetShare(now, who, float64(random.IntN(4)))
			case 1:
				rate, burst = random.Int64N(10_000), random.Int64N(100_000)
				b.SetRate(now, rate, burst)
			default:
				n := random.Int64N(1 << random.IntN(17))
				saved := 0.0
				if s := b.tenants[who]; s != nil {
					b.Level(now)
					b.refillShareLocked(s)
					saved = s.saved
				}
				if b.Spend(now, who, n) {
					spent += n
				} else if float64(n) <= saved-1 {
					t.Fatalf("seed %d: %v of its own are not enough for %d, %d are there", seed, saved, n, b.level)
				}
			}
			sum := 0.0
			b.refillAllLocked(now)
			for _, s := range b.tenants {
				sum += max(0, s.saved)
			}
			if sum > float64(b.level)+1 || b.level < 0 || b.level > burst || float64(spent) > given+1 {
				t.Fatalf("seed %d: level %d of %d, saved %v, spent %d of %v", seed, b.level, burst, sum, spent, given)
			}
		}
	}
}

func TestDaysLeftComeFromEnduranceAndRate(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		endurance, written, rate int64
		days                     float64
		known                    bool
	}{
		{7_008_000_000_000_000, 0, 44_444_444, 1825.0000182500002, true},
		{86_400_000, 43_200_000, 1000, 0.5, true},
		{100, 200, 1, 0, true},
		{0, 5, 1, 0, false},
		{100, 0, 0, 0, false},
		{math.MaxInt64, 0, 1, maxDays, true},
		{86_400, -5, 1, 1, true},
	} {
		if days, known := DaysLeft(c.endurance, c.written, c.rate); math.Abs(days-c.days) > 1e-6 || known != c.known {
			t.Errorf("%+v: %v days, %v", c, days, known)
		}
	}
}
