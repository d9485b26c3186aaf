// Package arena owns the memory of the RAM tier: slots for blocks in one memfd,
// outside of Go's heap, so that the collector neither scans nor moves it and its
// bytes can be read from and written to drives directly. The KV tier calls it.
// It knows no block, no key and no order of eviction, and it never waits for
// memory: what does not fit is ErrFull.
//
// A slot has the address range of a power of two and touches only the pages
// that its length needs, so memory has no fragmentation: a block costs its
// length rounded up to whole pages whatever the others are. The capacity is a
// hard bound on the resident bytes of all slots, those in use and those that
// were freed and still hold memory; a freed slot gives its memory up where
// another needs it. On top come the kernel's own records of these pages, about
// half a percent.
//
// Blocks of 2 MiB and more that fill them have huge pages. Slots of less share one
// where all of it is resident, which a goroutine sees to that is there while there
// is something to do; meanwhile the process has 2 MiB more.
//
// A memfd has no name and ends with its process: nothing of it is found again
// after a restart, and nothing is left behind.
package arena

import (
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"os"
	"sync"
	"sync/atomic"
)

// MaxSize bounds a block, in bytes.
const MaxSize = 1 << maxShift

var (
	// ErrFull says that the block does not fit into the capacity now.
	ErrFull = errors.New("memory is full")
	// ErrClosed says that the arena has ended.
	ErrClosed = errors.New("memory is closed")
	// ErrInUse says that slots are in use that should not be.
	ErrInUse = errors.New("memory is in use")
)

// Slot names the memory of one block; 0 is none. The upper 5 bits are the class
// plus one, the lower 27 its place in the class.
type Slot uint32

const (
	placeBits = 27
	maxSlots  = 1 << placeBits // of a class
)

func (s Slot) class() int    { return int(s>>placeBits) - 1 }
func (s Slot) place() uint32 { return uint32(s) & (maxSlots - 1) }

// Options say how much memory there is.
type Options struct {
	// Capacity bounds the resident bytes of all slots. It should leave room for
	// the process's other memory within its cgroup.
	Capacity int64
	// Log gets what people should know, nil: slog's default.
	Log *slog.Logger
}

// Arena is memory for blocks. It is safe for concurrent use.
type Arena struct {
	log    *slog.Logger
	memory *memory
	page   int64 // bytes
	huge   bool  // whether there are classes of huge pages
	// enlarge makes huge pages of a new slot's memory, nil where the kernel does
	// without being asked. After it failed, pause counts the slots that go without.
	enlarge func(p []byte) bool
	pause   atomic.Int64
	// gather makes a huge page of plain ones that are all resident, nil where the
	// kernel does not.
	gather func(p []byte) error
	// classes are first those of plain pages, then those of huge ones.
	classes []*class

	// growing is held while a class gets more address space.
	growing sync.Mutex

	mu sync.Mutex
	// changed tells Allocs that wait for a system call of others.
	changed sync.Cond
	waiting int
	closed  bool

	// Spans that wait to be gathered; inHand is the one that is just now.
	asked     []asked
	gathering bool // whether gatherAll runs
	inHand    *span
	passes    int // how many asks are to be passed over

	// Bytes. used + freed + returning are resident at most, and are within the
	// capacity unless that was made smaller; used + reserved are promised.
	capacity  int64
	used      int64 // of slots in use
	reserved  int64 // of Allocs under way, not resident yet
	freed     int64 // of free slots
	returning int64 // on their way back to the kernel
}

// New makes an arena without any slot; all memory it takes, it takes in Alloc.
func New(opts Options) (*Arena, error) {
	log := opts.Log
	if log == nil {
		log = slog.Default()
	}
	huge := grantsHugePages(hugePageSettings)
	request := enlarges()
	onRequest := !huge && request
	if !huge && !onRequest {
		log.Info("memory for blocks has normal pages: huge ones would make it faster",
			slog.String("set", hugePageSettings+"/shmem_enabled"), slog.String("to", "advise"))
	}
	a, err := newArena(opts.Capacity, log, int64(os.Getpagesize()), huge || onRequest)
	if err != nil {
		return nil, err
	}
	if onRequest {
		a.enlarge = enlarge
	}
	if request {
		a.gatherWith(gather)
	}
	return a, nil
}

func newArena(capacity int64, log *slog.Logger, page int64, huge bool) (*Arena, error) {
	if capacity < 0 {
		return nil, fmt.Errorf("make memory for blocks: a capacity of %d bytes", capacity)
	}
	memory, err := newMemory(2 * classesOfAKind)
	if err != nil {
		return nil, fmt.Errorf("make memory for blocks: %w", err)
	}
	a := &Arena{log: log, memory: memory, page: page, huge: huge, capacity: capacity}
	a.changed.L = &a.mu
	for i := range 2 * classesOfAKind {
		shift, unit := uint(minShift+i), page
		if i >= classesOfAKind {
			shift, unit = uint(minShift+i-classesOfAKind), hugePage
		}
		a.classes = append(a.classes, newClass(i, shift, max(unit, page)))
	}
	return a, nil
}

// class gives the class for blocks of n bytes and how many of its units one has.
// Huge pages are for blocks that fill them: where they would cost more than a
// sixteenth above the length, the block gets plain ones.
func (a *Arena) class(n int) (*class, int64) {
	plain := roundUp(int64(n), a.page)
	shift := max(minShift, bits.Len64(uint64(plain)-1))
	if huge := roundUp(int64(n), hugePage); a.huge && hugePage >= a.page && (huge-plain)*16 <= plain {
		shift = max(shift, bits.Len64(uint64(hugePage)-1))
		return a.classes[classesOfAKind+shift-minShift], huge / hugePage
	}
	return a.classes[shift-minShift], plain / a.page
}

// Cost is how many bytes of the capacity a block of n bytes takes: n rounded up
// to whole pages, or to huge ones where it has those.
func (a *Arena) Cost(n int) int64 {
	c, units := a.class(n)
	return units * c.unit
}

// Used is the cost of all slots in use.
func (a *Arena) Used() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.used
}

// Resident bounds the bytes that the slots hold, in use or free.
func (a *Arena) Resident() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.used + a.freed + a.returning
}

// Capacity is the bound of Resident, in bytes.
func (a *Arena) Capacity() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.capacity
}

// Alloc gives a slot for a block of n bytes, 1 to MaxSize. It is ErrFull exactly
// where the costs of the slots in use and this one exceed the capacity (or where
// the addresses of a class are used up: 128 Mi slots, 16 TiB). It waits for
// nothing but system calls that give memory back and, for some 10 ms at most, drives
// that read or write beside what is to go back; it is another error where they take
// longer.
//
// What Bytes holds is undefined and may be of a former block: the caller
// overwrites all n bytes before anybody reads them. Those behind, up to the
// page's end, are zero.
func (a *Arena) Alloc(n int) (Slot, error) {
	if n < 1 || n > MaxSize {
		return 0, fmt.Errorf("allocate memory: a block of %d bytes, 1 to %d are allowed", n, MaxSize)
	}
	c, units := a.class(n)
	slot, has, err := a.alloc(c, units)
	if err != nil {
		return 0, fmt.Errorf("allocate memory for a block: %w", err)
	}
	if has < units && c.unit == hugePage && a.enlarge != nil {
		a.enlargeNew(a.bytes(slot, n, int(units*c.unit))[has*c.unit:])
	}
	clear(a.Padded(slot, n)[n:])
	return slot, nil
}

// pauseAfter is how many slots go without huge pages after the kernel had none: to
// look for some takes it long where memory is in pieces.
const pauseAfter = 256

// enlargeNew makes huge pages of memory that a slot has not touched so far. Where
// there are none it has plain ones.
func (a *Arena) enlargeNew(p []byte) {
	if a.pause.Add(-1) >= 0 {
		return
	}
	a.pause.Store(0)
	if !a.enlarge(p) {
		a.pause.Store(pauseAfter)
	}
}

// alloc gives a slot and says how many of its units were resident before.
func (a *Arena) alloc(c *class, units int64) (_ Slot, had int64, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	cost := units * c.unit
	switch {
	case a.closed:
		return 0, 0, ErrClosed
	case a.used+a.reserved+cost > a.capacity:
		return 0, 0, ErrFull
	}
	a.reserved += cost
	place, has, err := a.takeLocked(c, units)
	if err != nil {
		a.reserved -= cost
		return 0, 0, err
	}
	// What the slot already holds of the block's memory counts as used.
	kept := min(has, units) * c.unit
	a.freed -= has * c.unit
	a.reserved -= kept
	a.used += kept
	if has > units {
		// A slot in use holds what its block costs and no more.
		a.returning += (has - units) * c.unit
		err = a.punchLocked(c, place, units, has)
		a.returning -= (has - units) * c.unit
	} else {
		err = a.roomLocked(cost - kept)
		a.reserved -= cost - kept
	}
	if err != nil {
		a.used -= kept
		a.freed += has * c.unit
		c.put(place, has)
		return 0, 0, err
	}
	a.used += cost - kept
	c.use(place, units)
	return Slot(uint32(c.number+1)<<placeBits | place), has, nil
}

// takeLocked takes a free slot of the class, a new one where none is free, and
// says how many units it holds. It lets go of the lock to make address space.
func (a *Arena) takeLocked(c *class, units int64) (place uint32, has int64, err error) {
	for {
		if place, has, ok := c.take(units); ok {
			return place, has, nil
		}
		a.mu.Unlock()
		err := a.grow(c)
		a.mu.Lock()
		if err != nil {
			return 0, 0, err
		}
		if a.closed {
			return 0, 0, ErrClosed
		}
	}
}

// grow gives a class address space for more slots, unless it has some by now.
func (a *Arena) grow(c *class) error {
	a.growing.Lock()
	defer a.growing.Unlock()
	a.mu.Lock()
	enough := c.hasRoom() || a.closed
	a.mu.Unlock()
	if enough {
		return nil
	}
	step, err := c.nextStep(a.memory)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	c.add(step)
	return nil
}

// roomLocked sees to it that size more bytes may be resident. It is ErrFull
// where the capacity became too small meanwhile.
func (a *Arena) roomLocked(size int64) error {
	for {
		over := a.used + a.freed + a.returning + size - a.capacity
		switch {
		case over <= 0:
			return nil
		case a.freed > 0 && over > a.returning:
			if err := a.reclaimLocked(over - a.returning); err != nil {
				return err
			}
		case a.returning > 0:
			a.waiting++
			a.changed.Wait()
			a.waiting--
		default:
			return ErrFull
		}
	}
}

// minReclaim is the least to take back from a free slot that has more, in bytes:
// small blocks should not cost a system call each.
const minReclaim = 1 << 20

// reclaimLocked gives memory of one free slot back to the kernel: size bytes
// where it has as many, and some more. The slot is of the class that holds most,
// so that what is used no longer makes room for what is.
func (a *Arena) reclaimLocked(size int64) error {
	richest := a.classes[0]
	for _, c := range a.classes {
		if c.free*c.unit > richest.free*richest.unit {
			richest = c
		}
	}
	var held []freeSlot
	defer func() {
		for _, h := range held {
			a.returning -= h.has * richest.unit
			a.freed += h.has * richest.unit
			richest.put(h.place, h.has)
		}
	}()
	for {
		place, has, ok := richest.takeRichest()
		if !ok && len(held) > 0 {
			return fmt.Errorf("take memory back: %w", errHeld)
		}
		if !ok {
			return fmt.Errorf("take memory back: %d bytes are free and no slot has them", a.freed)
		}
		some := min(has, roundUp(max(size, minReclaim), richest.unit)/richest.unit)
		a.freed -= has * richest.unit
		a.returning += has * richest.unit
		err := a.punchLocked(richest, place, has-some, has)
		if errors.Is(err, errHeld) {
			// It is free again after others were tried.
			held = append(held, freeSlot{place, has})
			if len(held) < heldSlots {
				continue
			}
			return err
		}
		a.returning -= has * richest.unit
		if err == nil {
			has -= some
		}
		a.freed += has * richest.unit
		richest.put(place, has)
		return err
	}
}

// freeSlot is a slot and the units that it holds.
type freeSlot struct {
	place uint32
	has   int64
}

// punchLocked gives the units from up to to of a slot that nobody else has back
// to the kernel, which the slot holds no longer then. It lets go of the lock
// meanwhile.
func (a *Arena) punchLocked(c *class, place uint32, from, to int64) error {
	c.hold(place, uint32(from))
	punch := a.memory.punch
	if a.partLocked(c, place) {
		punch = a.memory.punchLarge
	}
	a.mu.Unlock()
	err := punch(c.offset(place)+from*c.unit, (to-from)*c.unit)
	a.mu.Lock()
	a.wakeLocked()
	if err != nil {
		return fmt.Errorf("take memory back: %w", err)
	}
	return nil
}

func (a *Arena) wakeLocked() {
	if a.waiting > 0 {
		a.changed.Broadcast()
	}
}

// Free gives a slot back; its memory may be another block's at once. 0 is no
// error; a slot that is not in use is a fault of the program, and panics.
func (a *Arena) Free(slot Slot) {
	if slot == 0 {
		return
	}
	c := a.classes[slot.class()]
	place := slot.place()
	a.mu.Lock()
	defer a.mu.Unlock()
	has := c.release(place)
	size := has * c.unit
	a.used -= size
	if a.used+a.freed+a.returning+size > a.capacity {
		// The capacity has become smaller than what was in use.
		a.returning += size
		err := a.punchLocked(c, place, 0, has)
		a.returning -= size
		if err != nil {
			a.log.Error("freed memory stays resident", slog.Int64("bytes", size), slog.Any("error", err))
		} else {
			has = 0
		}
	}
	a.freed += has * c.unit
	c.put(place, has)
	a.wakeLocked()
}

// SetCapacity changes the bound. Where less is allowed than is resident, it gives
// back what free slots hold before it returns, but for what drives read or write
// beside, and the rest goes as slots are freed; until then every Alloc is ErrFull.
// A negative capacity is 0.
func (a *Arena) SetCapacity(capacity int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.capacity = max(0, capacity)
	a.wakeLocked()
	if err := a.roomLocked(0); err != nil && !errors.Is(err, ErrFull) {
		a.log.Error("free memory stays resident", slog.Int64("bytes", a.freed), slog.Any("error", err))
	}
}

// Bytes is the memory of a slot for a block of n bytes, as many as Alloc was
// asked for; more is a fault of the program, and panics. It begins on a page.
func (a *Arena) Bytes(slot Slot, n int) []byte { return a.bytes(slot, n, n) }

// Padded is Bytes up to the end of its last page, for drives that read and write
// whole pages; what lies behind n is zero until somebody writes there.
func (a *Arena) Padded(slot Slot, n int) []byte {
	return a.bytes(slot, n, int(roundUp(int64(n), a.page)))
}

func (a *Arena) bytes(slot Slot, n, size int) []byte {
	c := a.classes[slot.class()]
	step, at := c.step(slot.place())
	if units, used := step.holds(at); !used || int64(n) > units*c.unit {
		panic(fmt.Errorf("%d bytes of a slot that has %d, in use: %v", n, units*c.unit, used))
	}
	off := int64(at) << c.shift
	return step.bytes[off : off+int64(size) : off+int64(size)]
}

// Close gives all memory back. It is ErrInUse, and changes nothing, while slots
// are in use: nobody's bytes go away under them.
func (a *Arena) Close() error {
	a.growing.Lock()
	defer a.growing.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil
	}
	if a.used+a.reserved+a.returning > 0 {
		return fmt.Errorf("close memory for blocks: %w: %d bytes", ErrInUse, a.used+a.reserved+a.returning)
	}
	a.closed = true
	for a.gathering {
		a.waiting++
		a.changed.Wait()
		a.waiting--
	}
	a.freed = 0
	var errs []error
	for _, c := range a.classes {
		errs = append(errs, c.unmap())
	}
	return errors.Join(append(errs, a.memory.close())...)
}

// roundUp rounds n up to a multiple of unit, a power of two.
func roundUp(n, unit int64) int64 { return (n + unit - 1) &^ (unit - 1) }
