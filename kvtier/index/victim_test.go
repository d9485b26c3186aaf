package index

import (
	"math/rand/v2"
	"testing"
)

func TestALeafLeavesHoweverManyOthersAreHeldOrSpared(t *testing.T) {
	t.Parallel()
	x := New()
	var last ID
	for n := range 30 { // what is not a leaf is most of RAM
		last = enter(x, n, 100, last)
	}
	x.Touch(last)
	x.Touch(last)
	hold, _ := x.Hold(last)
	for n := 30; n < 33; n++ {
		enter(x, n, 100, 0)
	}
	if _, ok := x.Victim(func(id ID) bool { return id == last }); !ok {
		t.Fatal("no leaf leaves, beside one that is held")
	}
	for want := 30; want < 33; want++ {
		if got := leave(t, x); got != want {
			t.Errorf("%d leaves, want %d", got, want)
		}
	}
	if _, ok := x.Victim(nil); ok {
		t.Error("a block leaves that is held or has children")
	}
	x.Release(hold)
	if got := leave(t, x); got != 29 {
		t.Errorf("%d leaves, want the last of the chain", got)
	}
}

func TestWhatIsUsedAllTheTimeLeavesWhereThereIsNothingElse(t *testing.T) {
	t.Parallel()
	x := New()
	for n := range 10_000 {
		id := enter(x, n, 100, 0)
		for range 3 {
			x.Touch(id)
		}
	}
	looked := 0
	if _, ok := x.Victim(func(ID) bool { looked++; return looked < 5 }); !ok || looked != 5 {
		t.Errorf("%d blocks were asked for, found %t", looked, ok)
	}
	if used := x.ram.queues[main].head; x.ram.at(used).used == 0 && x.ram.at(x.ram.queues[main].tail).used == 3 {
		t.Error("more were spared than one eviction may look at")
	}
}

// TestAVictimIsFoundExactlyWhereALeafIsFree plays by chance and compares with what a
// look at every entry says.
func TestAVictimIsFoundExactlyWhereALeafIsFree(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 4))
		x := New()
		holds := map[Hold]bool{}
		someHold := func() (h Hold, ok bool) {
			for h := range holds {
				return h, true
			}
			return 0, false
		}
		free := func(skip func(ID) bool) bool {
			for id := range x.All {
				n := x.at(id).ram
				if n != 0 && x.at(id).hot == 0 && x.ram.at(n).holds == 0 && (skip == nil || !skip(id)) {
					return true
				}
			}
			return false
		}
		for range 3000 {
			n := random.IntN(40)
			id := x.Find(printOf(n))
			here := false
			if id != 0 {
				_, here = x.Resident(id)
			}
			switch op := random.IntN(10); {
			case op < 3 && !here:
				enter(x, n, 50+random.IntN(100), x.Find(printOf(n-1-random.IntN(3))))
			case op < 5 && here:
				if h, ok := x.Hold(id); ok && !holds[h] {
					holds[h] = true
				} else if ok {
					x.Release(h)
				}
			case op < 6:
				if h, ok := someHold(); ok {
					delete(holds, h)
					x.Release(h)
				}
			case op < 7 && here:
				x.Touch(id)
			case op < 8 && here:
				x.Next(id)
			default:
				var skip func(ID) bool
				if spare := random.IntN(3); spare > 0 {
					skip = func(id ID) bool { return int(id)%3 < spare }
				}
				want := free(skip)
				victim, ok := x.Victim(skip)
				if ok != want {
					t.Fatalf("seed %d: a victim is found: %t, want %t", seed, ok, want)
				}
				if !ok {
					continue
				}
				m := x.ram.at(x.at(victim).ram)
				if m.holds > 0 || x.at(victim).hot > 0 || skip != nil && skip(victim) {
					t.Fatalf("seed %d: the victim is held, has children or is spared", seed)
				}
				x.Leave(victim)
				x.Drop(victim)
			}
		}
	}
}
