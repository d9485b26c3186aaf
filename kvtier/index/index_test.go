package index

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/hearth-dev/hearth/kvtier/block"
)

func key(n int) block.Key {
	var k block.Key
	binary.BigEndian.PutUint64(k.Hash[:], uint64(n))
	return k
}

func printOf(n int) Print { return PrintOf(7, 0, key(n)) }

// enter puts a block into RAM that nobody holds.
func enter(x *Index, n, size int, parent ID) ID {
	id := x.Find(printOf(n))
	if id == 0 {
		id = x.Add(printOf(n), 0, size, parent)
	}
	x.Release(x.Enter(id, Resident{Key: key(n), Slot: uint32(n + 1)}, false))
	return id
}

// leave takes the next victim out and gives the number of its key.
func leave(t *testing.T, x *Index) int {
	t.Helper()
	id, ok := x.Victim(nil)
	if !ok {
		t.Fatal("no victim")
	}
	slot, free := x.Leave(id)
	if !free {
		t.Fatal("the victim is held")
	}
	x.Drop(id)
	return int(slot) - 1
}

func TestAPrintDiffersByNamespaceGroupHashAndSeed(t *testing.T) {
	t.Parallel()
	k := key(1)
	group := block.Key{Hash: k.Hash, Group: 1}
	seen := map[Print]bool{}
	for _, p := range []Print{PrintOf(1, 0, k), PrintOf(2, 0, k), PrintOf(1, 1, k), PrintOf(1, 0, group), PrintOf(1, 0, key(2))} {
		if seen[p] {
			t.Fatalf("print %v came twice", p)
		}
		seen[p] = true
	}
}

func TestEntriesAgainstAMap(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 1))
		x, model := New(), map[int]ID{}
		for range 20_000 {
			n := random.IntN(3000)
			id, known := model[n]
			if got := x.Find(printOf(n)); got != id {
				t.Fatalf("seed %d: found %d, want %d", seed, got, id)
			}
			switch {
			case !known:
				id = x.Add(printOf(n), uint16(n%5), n+1, 0)
				x.SetLoc(id, uint64(n)<<20+1)
				model[n] = id
			case random.IntN(2) == 0:
				x.SetLoc(id, 0)
				x.Drop(id)
				delete(model, n)
			}
			if known && (int(x.Space(id)) != n%5 || x.Size(id) != n+1) && model[n] != 0 {
				t.Fatalf("seed %d: entry of %d has space %d and size %d", seed, n, x.Space(id), x.Size(id))
			}
		}
		var sum int64
		for n := range model {
			sum += int64(n + 1)
		}
		if blocks, bytes := x.OnDrive(); blocks != len(model) || bytes != sum || x.Len() != len(model) {
			t.Fatalf("seed %d: %d blocks of %d bytes, want %d of %d", seed, blocks, bytes, len(model), sum)
		}
		var all []ID
		for id := range x.All {
			all = append(all, id)
		}
		want := make([]ID, 0, len(model))
		for _, id := range model {
			want = append(want, id)
		}
		slices.Sort(want)
		if !slices.Equal(all, want) {
			t.Fatalf("seed %d: All gives %d entries, want %d", seed, len(all), len(want))
		}
	}
}

func TestABlockLeavesAfterThoseComputedFromIt(t *testing.T) {
	t.Parallel()
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 2))
		x := New()
		parents := map[int]int{}
		ids := map[int]ID{}
		for n := range 200 {
			parent := ID(0)
			if n > 0 && random.IntN(5) > 0 {
				p := random.IntN(n)
				parents[n], parent = p, ids[p]
			}
			ids[n] = enter(x, n, 1+random.IntN(100), parent)
			x.Touch(ids[random.IntN(n+1)])
		}
		gone := map[int]bool{}
		for range 200 {
			n := leave(t, x)
			for child, parent := range parents {
				if parent == n && !gone[child] {
					t.Fatalf("seed %d: %d left before its child %d", seed, n, child)
				}
			}
			gone[n] = true
		}
		if blocks, bytes := x.InRAM(); blocks != 0 || bytes != 0 || x.Len() != 0 {
			t.Fatalf("seed %d: %d blocks of %d bytes in RAM, %d entries are left", seed, blocks, bytes, x.Len())
		}
	}
}

func TestAChainIsGivenUpFromItsEnd(t *testing.T) {
	t.Parallel()
	x := New()
	var parent ID
	for n := range 100 {
		parent = enter(x, n, 10, parent)
	}
	for n := 99; n >= 0; n-- {
		if got := leave(t, x); got != n {
			t.Fatalf("%d left, want %d", got, n)
		}
	}
}

func TestAParentThatComesAfterItsChildrenStaysForThem(t *testing.T) {
	t.Parallel()
	x := New()
	parent := x.Add(printOf(0), 0, 10, 0)
	x.SetLoc(parent, 1)
	enter(x, 1, 10, parent)
	x.Release(x.Enter(parent, Resident{Key: key(0), Slot: 1}, true))
	if got := leave(t, x); got != 1 {
		t.Fatalf("%d left first, want the child", got)
	}
	if got := leave(t, x); got != 0 {
		t.Fatalf("%d left, want the parent", got)
	}
}

func TestAHeldBlockIsNoVictimAndItsSlotComesWithTheLastRelease(t *testing.T) {
	t.Parallel()
	x := New()
	id := enter(x, 1, 10, 0)
	first, _ := x.Hold(id)
	second, _ := x.Hold(id)
	if _, ok := x.Victim(nil); ok {
		t.Fatal("a held block is a victim")
	}
	if _, free := x.Leave(id); free {
		t.Fatal("the slot of a held block is free")
	}
	x.Drop(id)
	if x.Find(printOf(1)) != 0 {
		t.Fatal("the block is found after it left")
	}
	if _, gone := x.Release(first); gone {
		t.Fatal("the slot is free while somebody reads")
	}
	if slot, gone := x.Release(second); !gone || slot != 2 {
		t.Fatalf("the last release gives slot %d, %t", slot, gone)
	}
}

func TestWhatIsUsedAgainOutlivesWhatCameOnce(t *testing.T) {
	t.Parallel()
	x := New()
	for n := range 50 {
		id := enter(x, n, 10, 0)
		x.Touch(id)
		x.Touch(id)
	}
	lost := 0
	for n := 1000; n < 3000; n++ { // a scan
		enter(x, n, 10, 0)
		if leave(t, x) < 50 {
			lost++
		}
	}
	// A tenth of the room belongs to what is new.
	if lost > 7 {
		t.Fatalf("%d of 50 blocks in use left for a scan", lost)
	}
}

func TestABlockThatComesBackSoonIsTakenForOneInUse(t *testing.T) {
	t.Parallel()
	x := New()
	for n := range 20 {
		enter(x, n, 10, 0)
	}
	back := leave(t, x)
	if !x.Seen(printOf(back)) {
		t.Fatal("what left is forgotten at once")
	}
	enter(x, back, 10, 0)
	for range 19 {
		if leave(t, x) == back {
			t.Fatal("what came back left before what came once")
		}
	}
}

func TestAnEntryStandsForItsChildrenAfterItLeft(t *testing.T) {
	t.Parallel()
	x := New()
	parent := enter(x, 1, 10, 0)
	child := x.Add(printOf(2), 0, 10, parent)
	x.SetLoc(child, 5)
	x.Leave(parent)
	x.Drop(parent)
	if x.Find(printOf(1)) != parent || x.Parent(child) != parent {
		t.Fatal("the parent's entry ended before its child's")
	}
	x.SetLoc(child, 0)
	x.Drop(child)
	if x.Len() != 0 {
		t.Fatalf("%d entries are left", x.Len())
	}
}

func TestAPlaceInAChainIsTakenOnceAndNeverInACircle(t *testing.T) {
	t.Parallel()
	x := New()
	a, b := enter(x, 1, 10, 0), enter(x, 2, 10, 0)
	x.SetParent(b, a)
	x.SetParent(a, b)
	x.SetParent(a, a)
	if x.Parent(b) != a || x.Parent(a) != 0 {
		t.Fatalf("parents are %d and %d", x.Parent(a), x.Parent(b))
	}
	if got := leave(t, x); got != 2 {
		t.Fatalf("%d left first, want the child", got)
	}
}

func TestABlockWithChildrenTakesAPlaceThatIsNotAmongThem(t *testing.T) {
	t.Parallel()
	x := New()
	top := enter(x, 1, 10, 0)
	middle := enter(x, 2, 10, 0)
	low := enter(x, 3, 10, middle)
	x.SetParent(middle, low)
	if x.Parent(middle) != 0 {
		t.Fatal("a block follows its own child")
	}
	x.SetParent(middle, top)
	if x.Parent(middle) != top || x.Depth(low, 10) != 2 {
		t.Fatalf("the middle of a chain follows %d, its end has depth %d", x.Parent(middle), x.Depth(low, 10))
	}
	for _, want := range []int{3, 2, 1} {
		if got := leave(t, x); got != want {
			t.Fatalf("%d left, want %d", got, want)
		}
	}
}

func TestABlockCostsAtMostSixtyFourBytesOfIndex(t *testing.T) {
	t.Parallel()
	x := New()
	for n := range 1_000_000 {
		x.SetLoc(x.Add(printOf(n), 0, 2<<20, 0), uint64(n)+1)
		if n > 100_000 && n%50_000 == 0 && x.Bytes() > 64*int64(n) {
			t.Fatalf("%d blocks take %d bytes, %.1f each", n, x.Bytes(), float64(x.Bytes())/float64(n))
		}
	}
}

func BenchmarkFind(b *testing.B) {
	x := New()
	const n = 1 << 20
	prints := make([]Print, n)
	for i := range n {
		prints[i] = printOf(i)
		x.SetLoc(x.Add(prints[i], 0, 2<<20, 0), uint64(i)+1)
	}
	random := rand.New(rand.NewPCG(1, 1))
	keys := make([]block.Key, 1<<16)
	for i := range keys {
		keys[i] = key(random.IntN(n))
	}
	b.ReportMetric(float64(x.Bytes())/n, "B/block")
	for i := 0; b.Loop(); i++ {
		if x.Find(PrintOf(7, 0, keys[i&(1<<16-1)])) == 0 {
			b.Fatal("not found")
		}
	}
}

func TestFindAllFindsWhatFindFinds(t *testing.T) {
	t.Parallel()
	x := New()
	for n := range 10_000 {
		x.SetLoc(x.Add(printOf(n), 0, 1, 0), 1)
	}
	random := rand.New(rand.NewPCG(3, 3))
	prints := make([]Print, 1000)
	for i := range prints {
		prints[i] = printOf(random.IntN(20_000))
	}
	ids := make([]ID, len(prints))
	x.FindAll(prints, ids)
	for i, p := range prints {
		if want := x.Find(p); ids[i] != want {
			t.Fatalf("found %d for print %d, want %d", ids[i], i, want)
		}
	}
}

func BenchmarkFindAll(b *testing.B) {
	x := New()
	const n = 1 << 20
	for i := range n {
		x.SetLoc(x.Add(printOf(i), 0, 2<<20, 0), uint64(i)+1)
	}
	random := rand.New(rand.NewPCG(1, 1))
	keys := make([]block.Key, 1<<16)
	for i := range keys {
		keys[i] = key(random.IntN(n))
	}
	prints, ids := make([]Print, 64), make([]ID, 64)
	for i := 0; b.Loop(); i++ {
		for j := range prints {
			prints[j] = PrintOf(7, 0, keys[(i*64+j)&(1<<16-1)])
		}
		x.FindAll(prints, ids)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/64, "ns/lookup")
}
