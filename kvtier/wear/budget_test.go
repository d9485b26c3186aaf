package wear

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/durable/durabletest"
)

// TestWhereverItCrashesNoMoreIsWrittenThanAllowed runs some processes one after
// the other, of which the first crashes at each change of the file system in
// turn, and every kind of loss.
func TestWhereverItCrashesNoMoreIsWrittenThanAllowed(t *testing.T) {
	t.Parallel()
	for n := 1; ; n++ {
		crashed := false
		for seed := range uint64(4) {
			crashed = crashAt(t, n, seed) || crashed
		}
		if !crashed {
			if n < 30 {
				t.Errorf("there were %d changes", n)
			}
			return
		}
	}
}

func crashAt(t *testing.T, n int, seed uint64) (crashed bool) {
	t.Helper()
	const first, rate = 200 * mib, mib
	fsys, c := durabletest.New(), &clock{}
	random := rand.New(rand.NewPCG(seed, uint64(n)))
	spent, allowed := int64(0), int64(first)
	fsys.CrashAt(n, seed%2 == 0)
	for process := range 3 {
		l := open(t, fsys, c, rate, first, first)
		if l.Written() < spent {
			t.Fatalf("change %d, seed %d, process %d: %d are spent, %d known", n, seed, process, spent, l.Written())
		}
		if left := l.bucket.Level(c.now()); left > allowed-spent {
			t.Fatalf("change %d, seed %d, process %d: %d may be spent, %d are allowed", n, seed, process, left, allowed-spent)
		}
		l.SetShare(tenant(1), 1)
		failed := false
		for range 60 {
			c.move(100 * time.Millisecond)
			allowed += rate / 10
			size := random.Int64N(8 * mib)
			ok, err := l.Spend(tenant(random.IntN(2)), size)
			if ok {
				spent += size
			}
			if failed = failed || err != nil; failed {
				break
			}
			if random.IntN(20) == 0 {
				failed = l.Save() != nil
			}
		}
		if !failed && random.IntN(2) == 0 {
			failed = l.Close() != nil
		}
		if spent > allowed {
			t.Fatalf("change %d, seed %d, process %d: %d are spent, %d allowed", n, seed, process, spent, allowed)
		}
		if failed {
			crashed = true
			var how *rand.Rand
			if seed > 1 {
				how = random
			}
			fsys = fsys.Crash(how)
		}
		c.move(time.Hour) // nobody runs
	}
	return crashed
}

// TestADayOfWriteHeavyLoadStaysWithinTheBudget is 24 hours of tenants that write
// all they may, with ends and kills in between: the drives get what they are
// rated for and little less, and every tenant its share.
func TestADayOfWriteHeavyLoadStaysWithinTheBudget(t *testing.T) {
	t.Parallel()
	const capacity = 3_840_000_000_000
	rate := Rate(1, capacity)
	burst := rate * 3600
	fsys, c := durabletest.New(), &clock{}
	random := rand.New(rand.NewPCG(1, 24))
	weights := []float64{4, 2, 1, 1}
	var l *Ledger
	start := func(first int64) {
		l = open(t, fsys, c, rate, burst, first)
		for who, weight := range weights {
			l.SetShare(tenant(who), weight)
		}
	}
	start(0)
	spent := make([]int64, len(weights)+1)
	kills := 0
	day := 24 * 60 * 60
	if testing.Short() {
		day = 4 * 60 * 60
	}
	for second := range day {
		c.move(time.Second)
		for range 8 {
			// In the first hour tenant 0 sleeps; one has no share at all.
			who := random.IntN(len(spent))
			if who == 0 && second < 3600 {
				continue
			}
			for n := int64(1 + random.IntN(5*mib)); spend(t, l, tenant(who), n); {
				spent[who] += n
			}
		}
		switch random.IntN(2000) {
		case 0:
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			c.move(time.Duration(random.IntN(7200)) * time.Second)
			start(burst)
		case 1:
			kills++
			c.move(time.Duration(random.IntN(7200)) * time.Second)
			start(burst)
		case 2:
			if err := l.Save(); err != nil {
				t.Fatal(err)
			}
		}
	}
	var sum int64
	for _, n := range spent {
		sum += n
	}
	allowed := rate * int64(day)
	// Half of the burst may stay behind, and a kill loses a grant.
	if sum > allowed || kills == 0 || sum < allowed-burst/2-allowed/50-int64(kills)*gib {
		t.Errorf("%d bytes of %d were written, with %d kills", sum, allowed, kills)
	}
	if written := l.Written(); written < sum || written > sum+int64(kills)*2*gib {
		t.Errorf("%d bytes are known, %d were written", written, sum)
	}
	for who, weight := range weights {
		part := float64(spent[who]) / (float64(allowed) * weight / 8)
		if who == 0 {
			part /= 1 - 3600/float64(day)
		}
		if part < 0.9 {
			t.Errorf("tenant %d got %.2f of its share: %v", who, part, fmt.Sprint(spent))
		}
	}
}
