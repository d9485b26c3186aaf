package arena

import (
	"fmt"
	"math/bits"
	"slices"
	"sync/atomic"
)

// Classes are powers of two of address space, in plain pages and in huge ones.
const (
	minShift       = 12
	maxShift       = 26
	classesOfAKind = maxShift - minShift + 1
	hugeShift      = 21
	hugePage       = 1 << hugeShift
)

// Bounds of a step, in bytes: how much address space a class gets at a time.
const (
	minStep = 64 << 20
	maxStep = 1 << 30
)

// class is the slots of one size. Arena.mu guards all but what it says.
type class struct {
	number int
	shift  uint  // a slot has 1<<shift bytes of addresses
	unit   int64 // bytes: what memory comes and goes in
	// perStep is a power of two.
	stepShift uint
	// ask is told, with the lock, of a span of which all is resident, nil: of none.
	ask func(s *step, at uint32)

	// steps are the slots that have addresses; read without the lock, replaced
	// by a longer list with it.
	steps atomic.Pointer[[]*step]
	made  uint32 // slots that were ever handed out
	ready uint32 // slots that have addresses

	// Free slots are in lists, by the units of memory that they hold: heads has
	// the first of each, plus one, and a bit of lists is set where one is not
	// empty. They come with the first slot.
	heads []uint32
	lists []uint64
	free  int64 // units, of all free slots
}

// step is a run of slots whose addresses came at once.
type step struct {
	bytes []byte
	whole []byte // the mapping that they are in
	// state is what each slot holds: inUse and units.
	state []atomic.Uint32
	next  []uint32 // the next in the list of free slots, plus one
	// spans are none where slots share no huge page.
	spans []span
	full  uint32 // units of a span of which all is resident
}

const inUse = 1 << 31

// holds is how many units a slot holds, and whether it is in use. It needs no lock.
func (s *step) holds(at uint32) (units int64, used bool) {
	state := s.state[at].Load()
	return int64(state &^ inUse), state&inUse != 0
}

func newClass(number int, shift uint, unit int64) *class {
	size := min(maxStep, max(minStep, 1024<<shift))
	return &class{number: number, shift: shift, unit: unit, stepShift: uint(bits.Len(uint(size))-1) - shift}
}

// step gives where a slot is. It needs no lock, and panics where there is none.
func (c *class) step(place uint32) (s *step, at uint32) {
	steps := *c.steps.Load()
	return steps[place>>c.stepShift], place & (1<<c.stepShift - 1)
}

// offset is where the slot begins in the memfd.
func (c *class) offset(place uint32) int64 {
	return regionOf(c.number) + int64(place)<<c.shift
}

// hasRoom reports whether take would find a slot.
func (c *class) hasRoom() bool {
	if c.made < c.ready {
		return true
	}
	for _, word := range c.lists {
		if word != 0 {
			return true
		}
	}
	return false
}

// take takes the free slot that suits a block of that many units best: the one
// that holds least above them, else most below. It makes a slot where none is
// free, and gives none where that needs addresses.
func (c *class) take(units int64) (place uint32, has int64, ok bool) {
	if list, found := c.above(units); found {
		return c.pop(list), list, true
	}
	if list, found := c.below(units); found {
		return c.pop(list), list, true
	}
	if c.made < c.ready {
		c.made++
		return c.made - 1, 0, true
	}
	return 0, 0, false
}

// takeRichest takes the free slot that holds most, if any holds something.
func (c *class) takeRichest() (place uint32, has int64, ok bool) {
	list, found := c.below(int64(len(c.heads)))
	if !found || list == 0 {
		return 0, 0, false
	}
	return c.pop(list), list, true
}

// put makes a slot that nobody has free.
func (c *class) put(place uint32, has int64) {
	c.hold(place, uint32(has))
	s, at := c.step(place)
	s.next[at] = c.heads[has]
	c.heads[has] = place + 1
	c.lists[has/64] |= 1 << (has % 64)
	c.free += has
}

// pop takes the first slot of a list that has one.
func (c *class) pop(list int64) uint32 {
	place := c.heads[list] - 1
	s, at := c.step(place)
	c.heads[list] = s.next[at]
	if c.heads[list] == 0 {
		c.lists[list/64] &^= 1 << (list % 64)
	}
	c.free -= list
	return place
}

// use says that a slot is in use.
func (c *class) use(place uint32, units int64) {
	c.hold(place, inUse|uint32(units))
}

// release says that a slot is used no longer, and what it holds.
func (c *class) release(place uint32) int64 {
	s, at := c.step(place)
	units, used := s.holds(at)
	if !used {
		panic(fmt.Errorf("slot %d of class %d is freed and was not in use", place, c.number))
	}
	c.hold(place, uint32(units))
	return units
}

// hold says what a slot holds from now on, and counts that of its span.
func (c *class) hold(place, state uint32) {
	s, at := c.step(place)
	had := s.state[at].Swap(state) &^ inUse
	p := c.span(s, at)
	if p == nil {
		return
	}
	if p.units += state&^inUse - had; p.units == s.full {
		c.ask(s, at>>c.spanShift())
	}
}

// above finds the first list from units on that is not empty.
func (c *class) above(units int64) (int64, bool) {
	for w := units / 64; w < int64(len(c.lists)); w++ {
		word := c.lists[w]
		if w == units/64 {
			word &= ^uint64(0) << (units % 64)
		}
		if word != 0 {
			return w*64 + int64(bits.TrailingZeros64(word)), true
		}
	}
	return 0, false
}

// below finds the last list before units that is not empty.
func (c *class) below(units int64) (int64, bool) {
	for w := min(units/64, int64(len(c.lists))-1); w >= 0; w-- {
		word := c.lists[w]
		if w == units/64 {
			word &= 1<<(units%64) - 1
		}
		if word != 0 {
			return w*64 + 63 - int64(bits.LeadingZeros64(word)), true
		}
	}
	return 0, false
}

// nextStep makes addresses for more slots. Only one caller at a time; it needs
// no lock else. It is ErrFull where the class can have no more.
func (c *class) nextStep(m *memory) (*step, error) {
	count := int64(1) << c.stepShift
	first := int64(0)
	if steps := c.steps.Load(); steps != nil {
		first = int64(len(*steps)) * count
	}
	if first+count > min(int64(maxSlots), regionSize>>c.shift) {
		return nil, fmt.Errorf("%w: there are %d slots of %d bytes and there can be no more", ErrFull, first, int64(1)<<c.shift)
	}
	data, whole, err := m.mapped(c.offset(uint32(first)), count<<c.shift, c.number >= classesOfAKind)
	if err != nil {
		return nil, err
	}
	s := &step{bytes: data, whole: whole, state: make([]atomic.Uint32, count), next: make([]uint32, count)}
	if c.gathers() && before(data) == 0 {
		s.spans, s.full = make([]span, count>>c.spanShift()), uint32(hugePage/c.unit)
	}
	return s, nil
}

// add makes the slots of a step usable.
func (c *class) add(s *step) {
	var steps []*step
	if old := c.steps.Load(); old != nil {
		steps = *old
	}
	steps = append(slices.Clip(steps), s)
	c.steps.Store(&steps)
	c.ready += uint32(len(s.state))
	if c.heads == nil {
		lists := int64(1)<<c.shift/c.unit + 1
		c.heads, c.lists = make([]uint32, lists), make([]uint64, (lists+63)/64)
	}
}

// unmap takes all addresses back.
func (c *class) unmap() error {
	steps := c.steps.Swap(new([]*step))
	if steps == nil {
		return nil
	}
	for _, s := range *steps {
		if err := unmap(s.whole); err != nil {
			return err
		}
	}
	c.made, c.ready, c.free, c.heads, c.lists = 0, 0, 0, nil, nil
	return nil
}
