package arena

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
)

const mib = 1 << 20

var quiet = slog.New(slog.DiscardHandler)

// open makes an arena of plain pages that ends with the test.
func open(t testing.TB, capacity int64) *Arena {
	t.Helper()
	return openWith(t, capacity, 4096, false)
}

func openWith(t testing.TB, capacity, page int64, huge bool) *Arena {
	t.Helper()
	a, err := newArena(capacity, quiet, page, huge)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil && !errors.Is(err, ErrInUse) {
			t.Error(err)
		}
	})
	return a
}

// resident is what the kernel holds for the arena, and that the arena owns up to
// it.
func resident(t testing.TB, a *Arena) int64 {
	t.Helper()
	real, err := a.memory.resident()
	if err != nil {
		t.Fatal(err)
	}
	if told := a.Resident(); real > told {
		t.Fatalf("%d bytes are resident, the arena tells of %d", real, told)
	}
	return real
}

func alloc(t testing.TB, a *Arena, n int) Slot {
	t.Helper()
	slot, err := a.Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	return slot
}

// fill writes a block that says whose it is in every 8 bytes.
func fill(p []byte, id uint64) {
	copy(p, fmt.Sprintf("%08x", uint32(id)))
	for n := 8; n < len(p); n *= 2 {
		copy(p[n:], p[:n])
	}
}

func isFilled(p []byte, id uint64) bool {
	head := fmt.Appendf(nil, "%08x", uint32(id))
	return bytes.Equal(p[:min(8, len(p))], head[:min(8, len(p))]) && (len(p) <= 8 || bytes.Equal(p[8:], p[:len(p)-8]))
}

func isZero(p []byte) bool { return len(bytes.Trim(p, "\x00")) == 0 }

func TestABlockCostsItsLengthInWholePages(t *testing.T) {
	t.Parallel()
	a := open(t, 256*mib)
	for n, want := range map[int]int64{1: 4096, 4096: 4096, 4097: 8192, 9 * mib / 4: 9 * mib / 4, 9*mib/4 + 1: 9*mib/4 + 4096, MaxSize: MaxSize} {
		if got := a.Cost(n); got != want {
			t.Errorf("%d bytes cost %d, want %d", n, got, want)
		}
		before := resident(t, a)
		slot := alloc(t, a, n)
		fill(a.Bytes(slot, n), 1)
		if grown := resident(t, a) - before; grown != want || a.Used() != want {
			t.Errorf("%d bytes made %d resident and %d used, want %d", n, grown, a.Used(), want)
		}
		a.Free(slot)
		a.SetCapacity(0)
		if resident(t, a) != 0 || a.Resident() != 0 {
			t.Errorf("%d bytes are left, told %d", resident(t, a), a.Resident())
		}
		a.SetCapacity(256 * mib)
	}
}

func TestHugePagesAreForBlocksThatFillThem(t *testing.T) {
	t.Parallel()
	a := openWith(t, 256*mib, 4096, true)
	for n, want := range map[int]int64{
		4096: 4096, mib: mib, 2*mib - 4096: 2 * mib, 2 * mib: 2 * mib, 2*mib + 1: 2*mib + 4096, 9 * mib / 4: 9 * mib / 4,
		4 * mib: 4 * mib, 5 * mib: 5 * mib, 36 * mib: 36 * mib, 35 * mib: 36 * mib, MaxSize: MaxSize,
	} {
		c, _ := a.class(n)
		if got := a.Cost(n); got != want || want%hugePage != 0 && c.unit != 4096 || n%hugePage == 0 && c.unit != hugePage {
			t.Errorf("%d bytes cost %d in units of %d, want %d", n, got, c.unit, want)
		}
		slot := alloc(t, a, n)
		fill(a.Bytes(slot, n), 1)
		resident(t, a)
		a.Free(slot)
	}
}

// TestRandomUseAgreesWithAModel holds after every step: no byte of a block
// changes but by its owner, nothing of a former block shows behind a new one,
// what is resident is within the capacity, and full is full by the sums alone.
func TestRandomUseAgreesWithAModel(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		page int64
		huge bool
	}{{"plain", 4096, false}, {"huge", 4096, true}, {"pages of 64 KiB", 64 << 10, false}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			steps := 2500
			if testing.Short() {
				steps = 1500
			}
			randomUse(t, openWith(t, 48*mib, c.page, c.huge), rand.New(rand.NewPCG(1, uint64(c.page))), steps)
		})
	}
}

type block struct {
	slot Slot
	size int
	id   uint64
}

func randomUse(t *testing.T, a *Arena, random *rand.Rand, steps int) {
	t.Helper()
	var blocks []block
	var used int64
	capacity := a.Capacity()
	full, shrunk := 0, false
	drop := func(i int) {
		b := blocks[i]
		if !isFilled(a.Bytes(b.slot, b.size), b.id) {
			t.Fatalf("block %d was changed by another", b.id)
		}
		a.Free(b.slot)
		used -= a.Cost(b.size)
		blocks = slices.Delete(blocks, i, i+1)
	}
	for id := range uint64(steps) {
		switch what := random.IntN(100); {
		case what < 55:
			// Sizes of all magnitudes, and one that comes often.
			size := 1 + random.IntN(1<<(4+random.IntN(20)))
			if random.IntN(3) == 0 {
				size = 288 << 10
			}
			slot, err := a.Alloc(size)
			if fits := used+a.Cost(size) <= capacity; fits != (err == nil) || err != nil && !errors.Is(err, ErrFull) {
				t.Fatalf("%d of %d bytes are used, %d more: %v", used, capacity, size, err)
			}
			if err != nil {
				full++
				break
			}
			whole := a.Padded(slot, size)
			if !isZero(whole[size:]) {
				t.Fatalf("behind a block of %d bytes: %q", size, whole[size:])
			}
			fill(whole[:size], id)
			used += a.Cost(size)
			blocks = append(blocks, block{slot, size, id})
		case what < 96 && len(blocks) > 0:
			drop(random.IntN(len(blocks)))
		case what < 99:
			capacity = random.Int64N(64 * mib)
			shrunk = shrunk || capacity < used
			a.SetCapacity(capacity)
		default:
			for len(blocks) > 0 {
				drop(len(blocks) - 1)
			}
		}
		if a.Used() != used {
			t.Fatalf("%d bytes are used, the arena tells of %d", used, a.Used())
		}
		resident(t, a)
		if got := a.Resident(); got > max(capacity, used) {
			t.Fatalf("%d bytes are resident, %d are allowed and %d used", got, capacity, used)
		}
	}
	if full == 0 || !shrunk {
		t.Errorf("the arena was full %d times, made smaller than what was used: %v", full, shrunk)
	}
	for len(blocks) > 0 {
		drop(0)
	}
	a.SetCapacity(0)
	if resident(t, a) != 0 || a.Resident() != 0 {
		t.Errorf("%d bytes stay resident, told %d", resident(t, a), a.Resident())
	}
}

func TestFullIsAnErrorAndRoomIsFoundAfterIt(t *testing.T) {
	t.Parallel()
	a := open(t, 10*mib)
	var slots []Slot
	for range 10 {
		slots = append(slots, alloc(t, a, mib))
	}
	for _, n := range []int{1, 4096, mib, MaxSize} {
		if _, err := a.Alloc(n); !errors.Is(err, ErrFull) {
			t.Errorf("%d bytes into a full arena: %v, want ErrFull", n, err)
		}
	}
	a.Free(slots[3])
	if _, err := a.Alloc(mib + 1); !errors.Is(err, ErrFull) {
		t.Errorf("a byte more than is free: %v, want ErrFull", err)
	}
	alloc(t, a, mib-4096)
	alloc(t, a, 1)
	if a.Used() != 10*mib || a.Used() != a.Capacity() {
		t.Errorf("%d bytes are used", a.Used())
	}
	for _, n := range []int{0, -1, MaxSize + 1} {
		if _, err := a.Alloc(n); err == nil || errors.Is(err, ErrFull) {
			t.Errorf("a block of %d bytes gives %v", n, err)
		}
	}
}

func TestNoClassKeepsMemoryThatAnotherNeeds(t *testing.T) {
	t.Parallel()
	a := open(t, 64*mib)
	for _, n := range []int{4096, MaxSize, 12 << 10, mib + 1, 64 << 10, 4096, 33 * mib} {
		var slots []Slot
		for a.Used()+a.Cost(n) <= 64*mib {
			slot := alloc(t, a, n)
			fill(a.Bytes(slot, n), uint64(n))
			slots = append(slots, slot)
		}
		if want := 64 * mib / a.Cost(n); int64(len(slots)) != want {
			t.Errorf("%d blocks of %d bytes fit, want %d", len(slots), n, want)
		}
		resident(t, a)
		for _, slot := range slots {
			a.Free(slot)
		}
	}
}

func TestAReusedSlotHoldsNoMoreThanItsBlockCosts(t *testing.T) {
	t.Parallel()
	a := open(t, 64*mib)
	slot := alloc(t, a, 4*mib)
	fill(a.Bytes(slot, 4*mib), 1)
	a.Free(slot)
	if got := resident(t, a); got != 4*mib {
		t.Errorf("a freed slot holds %d bytes", got)
	}
	again := alloc(t, a, 9*mib/4)
	if again != slot {
		t.Errorf("slot %#x was free and %#x is used", slot, again)
	}
	if got := resident(t, a); got != 9*mib/4 || a.Resident() != got {
		t.Errorf("%d bytes are resident, told %d, want what the block costs", got, a.Resident())
	}
	// What it gave back is zero when it comes again.
	a.Free(again)
	if whole := a.Padded(alloc(t, a, 3*mib), 3*mib); !isZero(whole[9*mib/4:]) {
		t.Error("memory that was given back has a former block in it")
	}
}

func TestASmallerCapacityTakesFreeMemoryNowAndTheRestAsItIsFreed(t *testing.T) {
	t.Parallel()
	a := open(t, 8*mib)
	var slots []Slot
	for range 8 {
		slot := alloc(t, a, mib)
		fill(a.Bytes(slot, mib), 1)
		slots = append(slots, slot)
	}
	for _, slot := range slots[5:] {
		a.Free(slot)
	}
	a.SetCapacity(3 * mib)
	if got := resident(t, a); got != 5*mib {
		t.Errorf("%d bytes are resident, want the 5 MiB in use", got)
	}
	for i, slot := range slots[:5] {
		if _, err := a.Alloc(1); !errors.Is(err, ErrFull) {
			t.Errorf("%d MiB of 3 are used: %v, want ErrFull", 5-i, err)
		}
		a.Free(slot)
		if got, want := resident(t, a), max(3*mib, int64(4-i)*mib); got > want {
			t.Errorf("%d bytes are resident, want at most %d", got, want)
		}
		if a.Used() < 3*mib {
			break
		}
	}
	alloc(t, a, mib)
	if a.SetCapacity(-1); a.Capacity() != 0 {
		t.Errorf("a negative capacity becomes %d", a.Capacity())
	}
}

func TestTheCollectorNeverSeesBlocks(t *testing.T) {
	t.Parallel()
	a := open(t, 256*mib)
	heap := func() int64 {
		runtime.GC()
		var stats runtime.MemStats
		runtime.ReadMemStats(&stats)
		return int64(stats.HeapAlloc)
	}
	before := heap()
	for range 96 {
		fill(a.Bytes(alloc(t, a, 2*mib), 2*mib), 1)
	}
	if got := resident(t, a); got != 192*mib {
		t.Errorf("%d bytes are resident", got)
	}
	// Other tests have a heap too.
	if grown := heap() - before; grown > 64*mib {
		t.Errorf("192 MiB of blocks let the heap grow by %d bytes", grown)
	}
}

func mustPanic(t *testing.T, what, want string, do func()) {
	t.Helper()
	defer func() {
		if got := fmt.Sprint(recover()); !strings.Contains(got, want) {
			t.Errorf("%s: %s, want %q", what, got, want)
		}
	}()
	do()
}

func TestWrongUseOfASlotIsLoudAndBreaksNothing(t *testing.T) {
	t.Parallel()
	a := open(t, 8*mib)
	slot := alloc(t, a, 5000)
	mustPanic(t, "more bytes than were asked for", "8193 bytes", func() { a.Bytes(slot, 8193) })
	mustPanic(t, "none", "index out of range", func() { a.Bytes(0, 1) })
	if p := a.Bytes(slot, 5000); len(p) != 5000 || cap(p) != 5000 {
		t.Errorf("%d bytes, room for %d", len(p), cap(p))
	}
	if p := a.Padded(slot, 5000); len(p) != 8192 || cap(p) != 8192 {
		t.Errorf("%d bytes, room for %d", len(p), cap(p))
	}
	a.Free(0)
	a.Free(slot)
	mustPanic(t, "a second free", "not in use", func() { a.Free(slot) })
	mustPanic(t, "bytes of a free slot", "in use: false", func() { a.Bytes(slot, 1) })
	if one, two := alloc(t, a, 5000), alloc(t, a, 5000); one == two {
		t.Error("two blocks have one slot")
	}
}

func TestCloseTakesNothingFromUnderAnybody(t *testing.T) {
	t.Parallel()
	a, err := New(Options{Capacity: mib, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	slot := alloc(t, a, 100)
	fill(a.Bytes(slot, 100), 7)
	if err := a.Close(); !errors.Is(err, ErrInUse) || !isFilled(a.Bytes(slot, 100), 7) {
		t.Errorf("close: %v, want ErrInUse", err)
	}
	a.Free(slot)
	for range 2 {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := a.Alloc(1); !errors.Is(err, ErrClosed) {
		t.Errorf("allocate: %v, want ErrClosed", err)
	}
	if _, err := New(Options{Capacity: -1, Log: quiet}); err == nil {
		t.Error("a negative capacity is taken")
	}
}
