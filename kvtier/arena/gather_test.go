package arena

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/durable"
)

// gathering makes an arena whose pages are gathered as gather says.
func gathering(t testing.TB, capacity int64, gather func(p []byte) error) *Arena {
	t.Helper()
	a := openWith(t, capacity, 4096, false)
	a.gatherWith(gather)
	return a
}

// gathered waits until no span waits any more, and tells how many are huge pages.
func gathered(a *Arena) (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for a.gathering {
		a.waiting++
		a.changed.Wait()
		a.waiting--
	}
	for _, c := range a.classes {
		for _, s := range stepsOf(c) {
			for _, p := range s.spans {
				if p.gathered {
					n++
				}
			}
		}
	}
	return n
}

func stepsOf(c *class) []*step {
	if steps := c.steps.Load(); steps != nil {
		return *steps
	}
	return nil
}

// spansAgree holds every span to the sum of what its slots hold.
func spansAgree(t testing.TB, a *Arena) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.classes {
		for _, s := range stepsOf(c) {
			if (s.spans != nil) != c.gathers() {
				t.Fatalf("class %d has spans: %v", c.number, s.spans != nil)
			}
			sums := make([]int64, len(s.spans))
			for at := range s.state {
				if units, _ := s.holds(uint32(at)); units > 0 && s.spans != nil {
					sums[at>>c.spanShift()] += units
				}
			}
			for i, want := range sums {
				if p := s.spans[i]; int64(p.units) != want || p.gathered && want*c.unit != hugePage {
					t.Fatalf("span %d of class %d: %d units, its slots hold %d, gathered: %v", i, c.number, p.units, want, p.gathered)
				}
			}
		}
	}
}

// wholeUse is random use with sizes that fill spans.
func wholeUse(t *testing.T, a *Arena, random *rand.Rand, steps int) (most int) {
	t.Helper()
	var blocks []block
	var used int64
	capacity := a.Capacity()
	for id := range uint64(steps) {
		size := 64 << 10 << random.IntN(5)
		switch what := random.IntN(100); {
		case what < 70 && used+int64(size) <= capacity:
			slot := alloc(t, a, size)
			fill(a.Bytes(slot, size), id)
			blocks, used = append(blocks, block{slot, size, id}), used+int64(size)
		case what < 98:
			for range min(len(blocks), 1+random.IntN(8)) {
				i := random.IntN(len(blocks))
				b := blocks[i]
				if !isFilled(a.Bytes(b.slot, b.size), b.id) {
					t.Fatalf("block %d was changed by another", b.id)
				}
				a.Free(b.slot)
				blocks[i], used = blocks[len(blocks)-1], used-int64(b.size)
				blocks = blocks[:len(blocks)-1]
			}
		default:
			capacity = 8*mib + random.Int64N(24*mib)
			a.SetCapacity(capacity)
		}
		if random.IntN(8) == 0 {
			most = max(most, gathered(a))
		}
		if id%16 == 0 {
			spansAgree(t, a)
		}
		resident(t, a)
	}
	for _, b := range blocks {
		if !isFilled(a.Bytes(b.slot, b.size), b.id) {
			t.Errorf("block %d was changed by another", b.id)
		}
		a.Free(b.slot)
	}
	a.SetCapacity(0)
	gathered(a)
	spansAgree(t, a)
	if resident(t, a) != 0 || a.Resident() != 0 {
		t.Errorf("%d bytes stay resident, told %d", resident(t, a), a.Resident())
	}
	return most
}

// TestSpansAreGatheredWhereAllOfThemIsResident holds the counts of spans to a plain
// recount, whatever is taken, freed and given back, and what is gathered to them.
func TestSpansAreGatheredWhereAllOfThemIsResident(t *testing.T) {
	t.Parallel()
	a := gathering(t, 32*mib, nil)
	a.gather = func(p []byte) error {
		if before(p) != 0 || len(p) != hugePage {
			t.Errorf("%d bytes are gathered, %d before a huge page", len(p), before(p))
		}
		// Nobody gives back a part of it meanwhile.
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.inHand == nil || a.inHand.gathered {
			t.Error("a span is gathered that should not be")
		}
		return nil
	}
	if most := wholeUse(t, a, rand.New(rand.NewPCG(4, 1)), 3000); most == 0 {
		t.Error("no span was ever full")
	}
	// Of sizes that fill no span none is asked for.
	a = openWith(t, 48*mib, 4096, true)
	a.gatherWith(func([]byte) error { return nil })
	randomUse(t, a, rand.New(rand.NewPCG(4, 2)), 800)
	spansAgree(t, a)
}

func TestGatheredMemoryAgreesWithAModel(t *testing.T) {
	t.Parallel()
	a := gathering(t, 32*mib, gather)
	if most := wholeUse(t, a, rand.New(rand.NewPCG(4, 3)), 1500); enlarges() && most == 0 {
		t.Error("the kernel makes huge pages on request, and none was made")
	}
}

// full takes a span's worth of slots of n bytes.
func full(t testing.TB, a *Arena, n int) (slots []Slot) {
	t.Helper()
	for id := range hugePage / n {
		slots = append(slots, alloc(t, a, n))
		fill(a.Bytes(slots[id], n), uint64(id))
	}
	return slots
}

func TestGatheringChangesNeitherBytesNorWhatIsResident(t *testing.T) {
	t.Parallel()
	a, err := New(Options{Capacity: 4 * mib, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	if can := enlarges(); can != (a.gather != nil) {
		t.Fatalf("the kernel makes huge pages on request: %v, and is asked: %v", can, a.gather != nil)
	}
	const n = 64 << 10
	slots := full(t, a, n)
	// The last was filled while it was asked for, perhaps: a use later it is again.
	for range askAgainAfter {
		a.Free(slots[0])
		slots[0] = alloc(t, a, n)
	}
	if made := gathered(a); a.gather != nil && (made != 1 || ofHugePages(t, a.Bytes(slots[0], n)) != hugePage) {
		t.Errorf("%d spans were gathered, %d bytes have huge pages", made, ofHugePages(t, a.Bytes(slots[0], n)))
	}
	if flags := smapsOf(t, a.Bytes(slots[0], n), "VmFlags:"); len(flags) != 1 || !strings.Contains(flags[0], " nh ") {
		t.Errorf("memory of normal pages has the advice of huge ones: %q", flags)
	}
	if got := resident(t, a); got != hugePage {
		t.Errorf("%d bytes are resident, want those of the slots", got)
	}
	for id, slot := range slots {
		if !isFilled(a.Bytes(slot, n), uint64(id)) {
			t.Errorf("block %d was changed", id)
		}
	}
	// What is free of it goes where it is needed, and nothing else.
	a.Free(slots[5])
	a.SetCapacity(2*mib - n)
	if got := resident(t, a); got != 2*mib-n || gathered(a) != 0 {
		t.Errorf("%d bytes are resident, want a slot less; %d spans gathered", got, gathered(a))
	}
	for id, slot := range slots {
		if id != 5 && !isFilled(a.Bytes(slot, n), uint64(id)) {
			t.Errorf("block %d was changed", id)
		}
		if id != 5 {
			a.Free(slot)
		}
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}

// hold has the kernel hold a page as a drive does that writes it, until done.
func hold(t *testing.T, p []byte) (done func()) {
	t.Helper()
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	iov := []unix.Iovec{{Base: &p[0]}}
	iov[0].SetLen(4096)
	if _, err := unix.Vmsplice(pipe[1], iov, 0); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := errors.Join(unix.Close(pipe[0]), unix.Close(pipe[1])); err != nil {
			t.Error(err)
		}
	}
}

// TestMemoryThatADriveHoldsStaysCounted holds what is told to what is resident while
// the kernel does not give back a part of a huge page: it says nothing of that.
func TestMemoryThatADriveHoldsStaysCounted(t *testing.T) {
	t.Parallel()
	const n = 64 << 10
	a := gathering(t, 4*mib, gather)
	one, two := full(t, a, n), full(t, a, n)
	for range askAgainAfter { // perhaps it was in use when it was asked for
		a.Free(one[0])
		one[0] = alloc(t, a, n)
	}
	huge := gathered(a) > 0 && a.spanGathered(one[0])
	if can := enlarges(); can != huge {
		t.Fatalf("the kernel makes huge pages on request: %v, and made one: %v", can, huge)
	}
	done := hold(t, a.Bytes(one[1], n))
	a.Free(one[0])
	slot, err := a.Alloc(n / 2)
	if errors.Is(err, errHeld) != huge || errors.Is(err, ErrFull) {
		t.Errorf("half a slot of what is held: %v, want errHeld: %v", err, huge)
	}
	if real := resident(t, a); huge && (real != 4*mib || a.Used() != 4*mib-n || a.reserved != 0 || a.returning != 0) {
		t.Errorf("%d bytes are resident, used %d, reserved %d, returning %d", real, a.Used(), a.reserved, a.returning)
	}
	a.Free(slot)
	// Beside what is held, and would go first, there is some that is not.
	a.Free(two[0])
	second, first := alloc(t, a, n), alloc(t, a, n)
	a.Free(second)
	a.Free(first)
	if first != one[0] {
		t.Errorf("slot %#x goes first, want %#x", first, one[0])
	}
	a.SetCapacity(4*mib - n)
	if real := resident(t, a); real != 4*mib-n {
		t.Errorf("%d bytes are resident, want %d", real, 4*mib-n)
	}
	done()
	a.SetCapacity(4*mib - 2*n)
	if real := resident(t, a); real != 4*mib-2*n {
		t.Errorf("%d bytes are resident once nothing is held, want %d", real, 4*mib-2*n)
	}
	spansAgree(t, a)
}

func TestMemoryIsGatheredWhileOthersUseItAndDrivesToo(t *testing.T) {
	t.Parallel()
	const owners, share = 4, 4 * mib
	a := gathering(t, owners*share, gather)
	path := filepath.Join(t.TempDir(), "a")
	f, err := durable.OS.OpenFile(path, os.O_CREATE|os.O_RDWR|syscall.O_DIRECT, 0o600)
	if errors.Is(err, syscall.EINVAL) {
		f, err = durable.OS.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	rounds := 400
	if testing.Short() {
		rounds = 150
	}
	var left atomic.Int32
	var all sync.WaitGroup
	for owner := range owners {
		left.Add(1)
		all.Go(func() {
			defer left.Add(-1)
			random := rand.New(rand.NewPCG(uint64(owner), 5))
			var blocks []block
			var used int64
			drop := func() {
				b := blocks[0]
				p := a.Bytes(b.slot, b.size)
				if !isFilled(p, b.id) {
					t.Errorf("block %d was changed by another", b.id)
				}
				// To the drive and back, into the same place.
				at := int64(owner) * mib
				if _, err := f.WriteAt(p, at); err != nil {
					t.Error(err)
				}
				clear(p[:4096])
				if _, err := f.ReadAt(p, at); err != nil || !isFilled(p, b.id) {
					t.Errorf("block %d came back changed, %v", b.id, err)
				}
				a.Free(b.slot)
				blocks, used = blocks[1:], used-int64(b.size)
			}
			for id := range uint64(rounds) {
				size := 64 << 10 << random.IntN(4)
				if id%100 < 80 {
					size = 64 << 10 // long enough alone to fill spans
				}
				for used+int64(size) > share {
					drop()
				}
				slot, err := a.Alloc(size)
				for errors.Is(err, errHeld) {
					slot, err = a.Alloc(size)
				}
				if err != nil {
					t.Error(err)
					return
				}
				id |= random.Uint64() << 20
				fill(a.Bytes(slot, size), id)
				blocks, used = append(blocks, block{slot, size, id}), used+int64(size)
			}
			for len(blocks) > 0 {
				drop()
			}
		})
	}
	for left.Load() > 0 {
		if got, err := a.memory.resident(); err != nil || got > owners*share {
			t.Errorf("%d bytes are resident, %d are allowed: %v", got, owners*share, err)
			break
		}
	}
	all.Wait()
	gathered(a)
	spansAgree(t, a)
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

func TestNothingIsGivenBackOrClosedWhileItIsGathered(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const n = 512 << 10
		goOn, calls := make(chan struct{}), 0
		a := gathering(t, 10*mib, func([]byte) error {
			calls++
			<-goOn
			return nil
		})
		var slots []Slot
		for range 5 {
			slots = append(slots, full(t, a, n)...)
		}
		synctest.Wait()
		if calls != 1 || len(a.asked) != 4 {
			t.Fatalf("%d spans are gathered at once, %d wait", calls, len(a.asked))
		}
		// The third waits: what it holds goes back at once, and it is not gathered.
		a.Free(slots[8])
		a.SetCapacity(10*mib - n)
		if got := resident(t, a); got != 10*mib-n {
			t.Errorf("%d bytes are resident", got)
		}
		// The first is in hand: what it holds goes back after that.
		a.Free(slots[0])
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			a.SetCapacity(10*mib - 2*n)
		}()
		synctest.Wait()
		if c := a.classes[slots[0].class()]; c.span(c.step(slots[0].place())).units != (hugePage-n)/4096 {
			t.Error("what is on its way back is counted as resident of a span")
		}
		select {
		case <-ended:
			t.Error("a part of a span goes back while it is gathered")
		default:
		}
		goOn <- struct{}{}
		<-ended
		synctest.Wait()
		if a.spanGathered(slots[0]) || calls != 2 || resident(t, a) != 10*mib-2*n {
			t.Errorf("%d calls, %d bytes resident, the first is a huge page: %v", calls, resident(t, a), a.spanGathered(slots[0]))
		}
		goOn <- struct{}{}
		synctest.Wait()
		if calls != 3 || len(a.asked) != 1 || a.spanGathered(slots[8]) {
			t.Errorf("%d calls, %d spans wait, one that is not full was gathered: %v", calls, len(a.asked), a.spanGathered(slots[8]))
		}
		for i, slot := range slots {
			if i != 0 && i != 8 {
				a.Free(slot)
			}
		}
		closed := make(chan error, 1)
		go func() { closed <- a.Close() }()
		synctest.Wait()
		if len(closed) > 0 {
			t.Fatalf("closed while memory is gathered: %v", <-closed)
		}
		close(goOn)
		if err := <-closed; err != nil || calls != 3 {
			t.Errorf("close: %v; %d spans were gathered, want no more", err, calls)
		}
	})
}

// spanGathered tells whether a slot is in a span that is gathered.
func (a *Arena) spanGathered(slot Slot) bool {
	c := a.classes[slot.class()]
	return c.span(c.step(slot.place())).gathered
}

func TestSpansAreAskedForAgainAfterSomeUse(t *testing.T) {
	t.Parallel()
	calls, fails := 0, error(unix.EAGAIN)
	a := gathering(t, 4*mib, func([]byte) error {
		calls++
		return fails
	})
	const n = 256 << 10
	slots := full(t, a, n)
	gathered(a)
	use := func() { // two: what is freed, and what it becomes
		a.Free(slots[0])
		slots[0] = alloc(t, a, n)
		gathered(a)
	}
	useUntil := func(what string, done func() bool) {
		t.Helper()
		for range 4 * askAgainAfter {
			if done() {
				return
			}
			use()
		}
		t.Fatalf("%s: not in %d uses", what, 4*askAgainAfter)
	}
	useUntil("asked again", func() bool { return calls == 2 })
	before := calls
	for range 4 {
		use()
	}
	if calls != before {
		t.Errorf("asked %d times more in a few uses", calls-before)
	}
	// Where there are no huge pages no span is asked for, for a while.
	fails = unix.ENOMEM
	useUntil("asked where there are none", func() bool { return calls > before })
	before = calls
	more := full(t, a, n)
	if gathered(a); calls != before {
		t.Errorf("asked %d times though there are none", calls-before)
	}
	fails = nil
	for range 2 * pauseAfter {
		use()
	}
	if calls == before || !a.spanGathered(slots[0]) {
		t.Errorf("asked %d times when there are some again", calls-before)
	}
	// Where the advice stays, it is the last time.
	a.Free(more[0])
	more[0] = alloc(t, a, n)
	a.Free(more[0])
	a.SetCapacity(4*mib - n)
	a.SetCapacity(4 * mib)
	fails = errAdvice
	use = func() {
		a.Free(alloc(t, a, n))
		gathered(a)
	}
	useUntil("the last time", func() bool { return a.gather == nil })
	before = calls
	for range 4 * askAgainAfter {
		a.Free(alloc(t, a, n))
	}
	if gathered(a); calls != before {
		t.Error("asked though the advice stays")
	}
}
