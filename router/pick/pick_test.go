package pick

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

func candidates(n int, change func(i int, c *Candidate)) []Candidate {
	cs := make([]Candidate, n)
	for i := range cs {
		cs[i] = Candidate{ID: fmt.Sprintf("node-%d/engine", i), PrefillRate: 8000}
		if change != nil {
			change(i, &cs[i])
		}
	}
	return cs
}

func prompt(blocks int, seed uint64) *Request {
	rng := rand.New(rand.NewPCG(seed, 0))
	r := &Request{PromptBytes: blocks * BlockBytes, PromptTokens: blocks * BlockBytes / 4, Tie: rng.Uint64()}
	for range blocks {
		r.Keys = append(r.Keys, rng.Uint64())
	}
	return r
}

func TestPickChoosesForTheReasonItGives(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		req    *Request
		n      int
		change func(i int, c *Candidate)
		cfg    Config
		want   int // -2: any
		reason Reason
		alarm  bool
	}{
		{"nobody is there", prompt(4, 1), 0, nil, Config{}, -1, ReasonNone, false},
		{"everybody drains", prompt(4, 1), 3, func(_ int, c *Candidate) { c.Draining = true }, Config{}, -1, ReasonNone, false},
		{"one is there", prompt(4, 1), 1, nil, Config{}, 0, ReasonOnlyOne, false},
		{"one does not drain", prompt(4, 1), 3, func(i int, c *Candidate) { c.Draining = i != 2 }, Config{}, 2, ReasonOnlyOne, false},
		{"the longest prefix wins", prompt(20, 1), 3, func(i int, c *Candidate) { c.MatchedBlocks = i * 8 }, Config{}, 2, ReasonPrefix, false},
		{"a prefix wins over a little load", prompt(20, 1), 3, func(i int, c *Candidate) {
			if i == 1 {
				c.MatchedBlocks, c.InFlight = 18, 5
			}
		}, Config{}, 1, ReasonPrefix, false},
		{"a saturated holder is left", prompt(20, 1), 2, func(i int, c *Candidate) {
			if i == 1 {
				c.MatchedBlocks, c.InFlight, c.InFlightPromptTokens = 18, 40, 100_000
			}
		}, Config{}, 0, ReasonSaturated, false},
		{"a full engine is left", prompt(20, 1), 2, func(i int, c *Candidate) {
			c.MaxRunning = 4
			if i == 1 {
				c.MatchedBlocks, c.InFlight = 18, 8
			}
		}, Config{}, 0, ReasonSaturated, false},
		{"the least loaded wins without keys", &Request{PromptTokens: 10}, 3, func(i int, c *Candidate) { c.InFlight = 3 - i }, Config{}, 2, ReasonLeastLoaded, false},
		{"equals are tied", &Request{PromptTokens: 10, Tie: 7}, 3, nil, Config{}, -2, ReasonTie, false},
		{"a cold prompt has a home", prompt(4, 1), 3, nil, Config{}, -2, ReasonCold, false},
		{"a fresh report counts", &Request{}, 2, func(i int, c *Candidate) { c.Running = 9 * (1 - i) }, Config{}, 1, ReasonLeastLoaded, false},
		{"a report of what is ours and over does not", &Request{}, 2, func(i int, c *Candidate) {
			c.Running, c.InFlightAtReport, c.InFlight = 9*(1-i), 9*(1-i), i
		}, Config{}, 0, ReasonLeastLoaded, false},
		{"an old report yields to what is in flight", &Request{}, 2, func(i int, c *Candidate) {
			c.Running, c.InFlight, c.LoadAge = 9*(1-i), 2*i, time.Hour
		}, Config{}, 0, ReasonLeastLoaded, false},
		{"degraded waits for real load", &Request{}, 2, func(i int, c *Candidate) {
			if i == 0 {
				c.Health = Degraded
			} else {
				c.InFlight = 20
			}
		}, Config{}, 1, ReasonLeastLoaded, false},
		{"unhealthy gets nothing while another serves", prompt(9, 1), 2, func(i int, c *Candidate) {
			if i == 0 {
				c.Health, c.MatchedBlocks = Unhealthy, 9
			} else {
				c.InFlight, c.InFlightPromptTokens = 500, 1e6
			}
		}, Config{}, 1, ReasonOnlyOne, false},
		{"unhealthy serves when nothing else does", prompt(9, 1), 2, func(i int, c *Candidate) { c.Health, c.InFlight = Unhealthy, i }, Config{}, -2, ReasonLeastBad, true},
		{"unhealthy goes before suspended", &Request{}, 2, func(i int, c *Candidate) {
			c.Suspended = i == 0
			if i == 1 {
				c.Health = Unhealthy
			}
		}, Config{}, 1, ReasonLeastBad, true},
		{"suspended serves when nothing else is left", &Request{}, 3, func(_ int, c *Candidate) { c.Suspended = true }, Config{}, -2, ReasonLastResort, true},
		{"a pin is obeyed", &Request{Pin: "node-1/engine"}, 3, func(i int, c *Candidate) { c.InFlight = 100 * i }, Config{}, 1, ReasonPinned, false},
		{"a pin to a drained endpoint is refused", &Request{Pin: "node-1/engine"}, 3, func(i int, c *Candidate) { c.Draining = i == 1 }, Config{}, -1, ReasonNone, false},
		{"a pin to nobody is refused", &Request{Pin: "x"}, 3, nil, Config{}, -1, ReasonNone, false},
		{"turns are by count", &Request{Tie: 5}, 3, func(i int, c *Candidate) { c.InFlight = 50 * i }, Config{RoundRobin: true}, 2, ReasonTurn, false},
		{"turns pass the unhealthy by", &Request{Tie: 3}, 3, func(i int, c *Candidate) { c.Health = Health(i) }, Config{RoundRobin: true}, 1, ReasonTurn, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d, terms := Explain(c.req, candidates(c.n, c.change), c.cfg)
			if (c.want != -2 && d.Index != c.want) || d.Reason != c.reason || d.Alarm != c.alarm {
				t.Errorf("got %+v\n%+v", d, terms)
			}
		})
	}
}

func TestTiesSpreadEvenly(t *testing.T) {
	t.Parallel()
	cs := candidates(8, nil)
	got := make([]int, len(cs))
	for i := range 8000 {
		got[Pick(&Request{Tie: uint64(i)}, cs, Config{}).Index]++
	}
	for i, n := range got {
		if n < 850 || n > 1150 {
			t.Errorf("candidate %d got %d of 8000", i, n)
		}
	}
}

func TestRoutersWithSlightlyOtherViewsAgreeOnColdHomes(t *testing.T) {
	t.Parallel()
	agreed := 0
	for seed := range uint64(500) {
		one := candidates(10, func(i int, c *Candidate) { c.HeldBlocks = 1000 + i*3 })
		two := candidates(10, func(i int, c *Candidate) { c.InFlight, c.HeldBlocks = int(seed+uint64(i))%2, 1000-i*3 })
		req := prompt(12, seed)
		if one[Pick(req, one, Config{}).Index].ID == two[Pick(req, two, Config{}).Index].ID {
			agreed++
		}
	}
	if agreed != 500 {
		t.Errorf("%d of 500 cold prompts have one home", agreed)
	}
}

func TestAHomeThatHoldsMoreThanItsShareIsPassedBy(t *testing.T) {
	t.Parallel()
	for seed := range uint64(200) {
		cs := candidates(4, func(i int, c *Candidate) {
			c.HeldBlocks = 100
			if i == 2 {
				c.HeldBlocks = 1000
			}
		})
		if d := Pick(prompt(8, seed), cs, Config{}); d.Index == 2 || d.Reason != ReasonCold {
			t.Fatalf("went to %d by %s", d.Index, d.Reason)
		}
	}
}

func TestAFullSmallMemoryIsNoReasonToPassByALargeOne(t *testing.T) {
	t.Parallel()
	got := map[int]int{}
	for seed := range uint64(400) {
		cs := candidates(2, func(i int, c *Candidate) {
			c.CapacityBlocks = 1000 + 9000*i
			c.HeldBlocks = 1000 + 3000*i // the small one is full
		})
		got[Pick(prompt(8, seed), cs, Config{}).Index]++
	}
	if got[1] != 400 {
		t.Errorf("cold prompts went to %v", got)
	}
}

// random draws a candidate of any kind.
func random(rng *rand.Rand, i, blocks int) Candidate {
	return Candidate{
		ID: fmt.Sprint("e", i), Health: Health(rng.IntN(3)), Draining: rng.IntN(5) == 0, Suspended: rng.IntN(5) == 0,
		MatchedBlocks: rng.IntN(blocks + 1), HeldBlocks: rng.IntN(1000), Running: rng.IntN(50), Waiting: rng.IntN(20),
		InFlightAtReport: rng.IntN(20), MaxRunning: rng.IntN(3) * 16, KVUsage: rng.Float64(),
		LoadAge: time.Duration(rng.IntN(60)) * time.Second, InFlight: rng.IntN(40),
		InFlightPromptTokens: rng.IntN(50_000), InFlightDecodeTokens: rng.IntN(100_000), PrefillRate: float64(rng.IntN(3)) * 5000,
	}
}

func TestPickNeverEmptiesAPoolAndNeverTakesADrainingEndpoint(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(1, 1))
	for range 20_000 {
		blocks := rng.IntN(30)
		req := prompt(blocks, rng.Uint64())
		cs := make([]Candidate, rng.IntN(8))
		usable, healthy := 0, 0
		for i := range cs {
			cs[i] = random(rng, i, blocks)
			if !cs[i].Draining {
				usable++
				if cs[i].Health != Unhealthy && !cs[i].Suspended {
					healthy++
				}
			}
		}
		d := Pick(req, cs, Config{RoundRobin: rng.IntN(4) == 0})
		if (d.Index >= 0) != (usable > 0) {
			t.Fatalf("%d usable, picked %+v", usable, d)
		}
		if d.Index < 0 {
			continue
		}
		c := cs[d.Index]
		bad := c.Health == Unhealthy || c.Suspended
		if c.Draining || bad && healthy > 0 || d.Alarm != bad {
			t.Fatalf("%d healthy, picked %+v: %+v", healthy, c, d)
		}
		if d.CreditTokens < 0 || d.UncachedTokens < 0 || d.CreditTokens+d.UncachedTokens != req.PromptTokens {
			t.Fatalf("credit %d and rest %d of %d", d.CreditTokens, d.UncachedTokens, req.PromptTokens)
		}
	}
}

func TestCostRisesWithWhatItMeasuresAndFallsWithThePrefix(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(2, 2))
	cfg := Default()
	for range 5000 {
		req := prompt(20, rng.Uint64())
		c := random(rng, 0, 19)
		c.Health = Health(rng.IntN(2))
		base := costOf(req, &c, &cfg)
		for name, change := range map[string]func(*Candidate){
			"running": func(c *Candidate) { c.Running += 5 }, "waiting": func(c *Candidate) { c.Waiting += 5 },
			"in flight": func(c *Candidate) { c.InFlight++ }, "prompt tokens": func(c *Candidate) { c.InFlightPromptTokens += 100 },
			"decode tokens": func(c *Candidate) { c.InFlightDecodeTokens += 100 }, "kv": func(c *Candidate) { c.KVUsage = min(c.KVUsage+0.1, 1) },
			"fewer blocks": func(c *Candidate) { c.MatchedBlocks = max(c.MatchedBlocks-3, 0) }, "degraded": func(c *Candidate) { c.Health = Degraded },
		} {
			worse := c
			change(&worse)
			if got := costOf(req, &worse, &cfg); got < base || math.IsNaN(got) || math.IsInf(got, 0) {
				t.Fatalf("%s: cost %v fell to %v: %+v", name, base, got, c)
			}
		}
	}
}

func TestARaiseOfLoadElsewhereNeverDrivesARequestAway(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(3, 3))
	for range 5000 {
		req := prompt(20, rng.Uint64())
		cs := make([]Candidate, 2+rng.IntN(5))
		for i := range cs {
			cs[i] = random(rng, i, 20)
		}
		before := Pick(req, cs, Config{})
		if before.Index < 0 || before.Reason == ReasonCold {
			continue
		}
		for i := range cs {
			if i != before.Index {
				cs[i].InFlight += 3
				cs[i].InFlightPromptTokens += 500
			}
		}
		if after := Pick(req, cs, Config{}); after.Index != before.Index {
			t.Fatalf("moved from %d to %d though only others got more to do", before.Index, after.Index)
		}
	}
}

func TestPickAllocatesNothing(t *testing.T) {
	req := prompt(40, 1)
	cs := candidates(100, func(i int, c *Candidate) { c.MatchedBlocks, c.InFlight = i%7, i%5 })
	if n := testing.AllocsPerRun(100, func() { Pick(req, cs, Config{}) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzPickHoldsItsPromises(f *testing.F) {
	f.Add(uint64(1), 10, 3, 0.5, 1000.0, int64(time.Second), false)
	f.Add(uint64(2), 0, 2, math.Inf(1), math.NaN(), int64(-1), true)
	f.Fuzz(func(t *testing.T, seed uint64, number, n int, usage, rate float64, age int64, turns bool) {
		if n < 0 || n > 12 {
			return
		}
		rng := rand.New(rand.NewPCG(seed, 9))
		req := prompt(rng.IntN(20), seed)
		req.PromptTokens, req.PromptBytes = number, number
		cs := make([]Candidate, n)
		usable := false
		for i := range cs {
			cs[i] = random(rng, i, 20)
			switch rng.IntN(6) {
			case 0:
				cs[i].InFlight, cs[i].Running = number, -number
			case 1:
				cs[i].KVUsage, cs[i].PrefillRate, cs[i].LoadAge = usage, rate, time.Duration(age)
			case 2:
				cs[i].MatchedBlocks, cs[i].InFlightPromptTokens, cs[i].MaxRunning = number, number, number
			}
			usable = usable || !cs[i].Draining
		}
		d := Pick(req, cs, Config{RoundRobin: turns, PrefillRate: rate, StickySeconds: usage})
		if (d.Index >= 0) != usable || d.Index >= n || d.Index >= 0 && cs[d.Index].Draining {
			t.Fatalf("picked %+v of %+v", d, cs)
		}
		if d.CreditTokens < 0 || d.UncachedTokens < 0 {
			t.Fatalf("negative tokens: %+v", d)
		}
	})
}

func BenchmarkPick100(b *testing.B) {
	for name, change := range map[string]func(i int, c *Candidate){
		"cold":   func(i int, c *Candidate) { c.HeldBlocks, c.Running, c.LoadAge = 100+i, i%3, time.Second },
		"prefix": func(i int, c *Candidate) { c.MatchedBlocks, c.InFlight = i%40, i%5 },
		"equal":  nil,
	} {
		b.Run(name, func(b *testing.B) {
			cs, req := candidates(100, change), prompt(40, 1)
			if name == "equal" {
				req.Keys = nil
			}
			b.ReportAllocs()
			for b.Loop() {
				Pick(req, cs, Config{})
			}
		})
	}
}
