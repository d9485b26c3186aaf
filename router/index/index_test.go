package index

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
)

// chain makes the keys of a prompt: the first shared ones from the family, the
// rest its own.
func chain(rng *rand.Rand, prefix []uint64, length int) []uint64 {
	keys := slices.Clone(prefix[:min(len(prefix), length)])
	for len(keys) < length {
		keys = append(keys, rng.Uint64())
	}
	return keys
}

// model is the naive slot: keys from the newest to the oldest.
type model struct {
	capacity int
	keys     []uint64
}

func (m *model) insert(keys []uint64) {
	for i, k := range keys {
		if at := slices.Index(m.keys, k); at >= 0 {
			m.keys = slices.Delete(m.keys, at, at+1)
		} else if len(m.keys) == m.capacity {
			if m.capacity == i {
				return
			}
			m.keys = m.keys[:len(m.keys)-1]
		}
		// Key i stands right behind key i-1, which stands at i-1.
		m.keys = slices.Insert(m.keys, i, k)
	}
}

func (m *model) match(keys []uint64) int {
	for i, k := range keys {
		if !slices.Contains(m.keys, k) {
			return i
		}
	}
	return len(keys)
}

func TestSlotsAgreeWithANaiveListOverRandomConversations(t *testing.T) {
	t.Parallel()
	for seed := range uint64(12) {
		rng := rand.New(rand.NewPCG(seed, 1))
		x := New(Options{MaxBlocks: 1 << 20})
		capacity := 1 + rng.IntN(300)
		slots := []*Slot{x.Add(capacity), x.Add(capacity)}
		models := []*model{{capacity: capacity}, {capacity: capacity}}
		var prompts [][]uint64
		counts := make([]int, 2)
		for step := range 400 {
			var keys []uint64
			if len(prompts) > 0 && rng.IntN(4) > 0 {
				base := prompts[rng.IntN(len(prompts))]
				keys = chain(rng, base[:1+rng.IntN(len(base))], 1+rng.IntN(200))
			} else {
				keys = chain(rng, nil, 1+rng.IntN(200))
			}
			prompts = append(prompts, keys)
			x.Match(keys, 7, slots, counts)
			for i := range slots {
				if want := models[i].match(keys); counts[i] != want {
					t.Fatalf("seed %d step %d slot %d: matched %d, the model %d", seed, step, i, counts[i], want)
				}
			}
			i := rng.IntN(2)
			switch rng.IntN(40) {
			case 0:
				x.Clear(slots[i])
				models[i].keys = nil
			case 1:
				models[i].capacity = 1 + rng.IntN(300)
				x.SetCapacity(slots[i], models[i].capacity)
				models[i].keys = models[i].keys[:min(len(models[i].keys), models[i].capacity)]
			default:
				x.Insert(slots[i], keys, 7)
				models[i].insert(keys)
			}
			if slots[i].Len() != len(models[i].keys) {
				t.Fatalf("seed %d step %d: holds %d, the model %d", seed, step, slots[i].Len(), len(models[i].keys))
			}
		}
	}
}

func TestMatchStopsAtTheFirstMissingBlock(t *testing.T) {
	t.Parallel()
	x := New(Options{MaxBlocks: 1000})
	s := x.Add(1000)
	rng := rand.New(rand.NewPCG(1, 1))
	keys := chain(rng, nil, 100)
	for _, n := range []int{1, 2, 63, 64, 65, 99, 100} {
		x.Clear(s)
		x.Insert(s, keys[:n], 1)
		if got := s.Match(keys, 1); got != n {
			t.Errorf("matched %d of %d inserted", got, n)
		}
	}
}

func TestOnePromptUnderTwoSaltsIsTwoPrefixes(t *testing.T) {
	t.Parallel()
	x := New(Options{MaxBlocks: 1000})
	s := x.Add(1000)
	keys := chain(rand.New(rand.NewPCG(2, 2)), nil, 50)
	x.Insert(s, keys, 1)
	if got := s.Match(keys, 2); got != 0 {
		t.Errorf("matched %d blocks of another model", got)
	}
	if got := s.Match(keys, 1); got != 50 {
		t.Errorf("matched %d blocks, want 50", got)
	}
}

func TestSlotsShareTheBoundInProportion(t *testing.T) {
	t.Parallel()
	x := New(Options{MaxBlocks: 1000})
	a, b := x.Add(1000), x.Add(3000)
	if a.Cap() != 250 || b.Cap() != 750 {
		t.Fatalf("capacities %d and %d, want 250 and 750", a.Cap(), b.Cap())
	}
	rng := rand.New(rand.NewPCG(3, 3))
	for range 50 {
		x.Insert(a, chain(rng, nil, 90), 0)
		x.Insert(b, chain(rng, nil, 90), 0)
		if x.Len() > 1000 {
			t.Fatalf("holds %d blocks, the bound is 1000", x.Len())
		}
	}
	x.Remove(b)
	if a.Cap() != 1000 || b.Len() != 0 {
		t.Fatalf("after a removal: capacity %d, removed slot holds %d", a.Cap(), b.Len())
	}
	x.Insert(b, chain(rng, nil, 10), 0)
	if b.Len() != 0 {
		t.Error("a removed slot took blocks")
	}
}

func TestConcurrentUseKeepsTheBound(t *testing.T) {
	t.Parallel()
	x := New(Options{MaxBlocks: 2000})
	slots := []*Slot{x.Add(700), x.Add(700), x.Add(700)}
	shared := chain(rand.New(rand.NewPCG(9, 9)), nil, 300)
	var wg sync.WaitGroup
	for g := range uint64(4) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(g, 4))
			counts := make([]int, len(slots))
			for range 300 {
				keys := chain(rng, shared[:rng.IntN(300)], 1+rng.IntN(400))
				x.Match(keys, 0, slots, counts)
				x.Insert(slots[rng.IntN(3)], keys, 0)
				if rng.IntN(50) == 0 {
					x.Clear(slots[rng.IntN(3)])
				}
				if rng.IntN(50) == 0 {
					x.SetCapacity(slots[rng.IntN(3)], 1+rng.IntN(1500))
				}
			}
		})
	}
	wg.Wait()
	if n := x.Len(); n > 2000 {
		t.Errorf("holds %d blocks, the bound is 2000", n)
	}
}

func TestABlockTakesAtMost64Bytes(t *testing.T) {
	// Not parallel: it measures the heap.
	for _, capacity := range []int{100_000, 131_072, 209_716} {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		x := New(Options{MaxBlocks: 4 * capacity})
		slots := []*Slot{x.Add(capacity), x.Add(capacity), x.Add(capacity), x.Add(capacity)}
		rng := rand.New(rand.NewPCG(5, 5))
		for _, s := range slots {
			for s.Len() < capacity {
				x.Insert(s, chain(rng, nil, 1000), 0)
			}
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		perBlock := float64(after.HeapAlloc-before.HeapAlloc) / float64(x.Len())
		t.Logf("%d blocks: %.1f B per block", x.Len(), perBlock)
		if perBlock > 64 {
			t.Errorf("%.1f B per block, want at most 64", perBlock)
		}
		runtime.KeepAlive(x)
	}
}

func FuzzSlotMatchesTheNaiveList(f *testing.F) {
	f.Add([]byte{1, 2, 3, 250, 9, 9, 4}, uint8(5))
	f.Fuzz(func(t *testing.T, data []byte, size uint8) {
		if len(data) > 512 {
			return
		}
		capacity := int(size)%40 + 1
		x := New(Options{MaxBlocks: 1 << 10})
		s, m := x.Add(capacity), &model{capacity: capacity}
		// Each byte is a prompt: a path in a tree in which a node's key follows
		// from its parent's.
		for _, b := range data {
			var keys []uint64
			parent := uint64(1)
			for depth := range int(b>>5) + 1 {
				parent = parent*1_000_003 + uint64(b>>(depth%5)&1) + 1
				keys = append(keys, parent)
			}
			if got, want := s.Match(keys, 0), m.match(keys); got != want {
				t.Fatalf("matched %d, the model %d", got, want)
			}
			x.Insert(s, keys, 0)
			m.insert(keys)
			if s.Len() != len(m.keys) {
				t.Fatalf("holds %d, the model %d", s.Len(), len(m.keys))
			}
		}
	})
}

// BenchmarkRequest1600Keys is a 100k-token prompt over a memory of a million blocks.
func BenchmarkRequest1600Keys(b *testing.B) {
	const blocks = 1 << 20
	rng := rand.New(rand.NewPCG(6, 6))
	x := New(Options{MaxBlocks: blocks})
	slots := make([]*Slot, 4)
	prompts := make([][]uint64, 0, blocks/1600)
	for i := range slots {
		slots[i] = x.Add(blocks / len(slots))
	}
	for i := range blocks / 1600 {
		keys := chain(rng, nil, 1600)
		prompts = append(prompts, keys)
		x.Insert(slots[i%len(slots)], keys, 0)
	}
	counts := make([]int, len(slots))
	b.Run("match", func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			x.Match(prompts[i*7919%len(prompts)], 0, slots, counts)
		}
	})
	b.Run("insert-held", func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			n := i * 7919 % len(prompts)
			x.Insert(slots[n%len(slots)], prompts[n], 0)
		}
	})
	b.Run("insert-new", func(b *testing.B) {
		b.ReportAllocs()
		keys := chain(rng, nil, 1600)
		for i := 0; b.Loop(); i++ {
			x.Insert(slots[i%len(slots)], keys, uint64(i))
		}
	})
}
