package arena

import (
	"errors"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"
)

// span is the slots of a class that lie in one huge page's worth of addresses. Where
// all that it can hold is resident, its plain pages are gathered into a huge one: so
// nothing more is resident than before, and drives are read and written faster.
// Arena.mu guards it.
type span struct {
	units    uint32 // resident, of all its slots
	passes   uint16 // how many asks are to be passed over
	asked    bool   // waits to be gathered
	gathered bool   // is a huge page
	// large says that pages of several slots may be one for the kernel: it gives
	// back a part of such a one only while no drive reads or writes the others.
	large bool
}

const (
	// askAgainAfter is how many uses of slots a span waits for after it could not be
	// gathered, and after a part of it was given back.
	askAgainAfter = 64
	// maxAsked bounds the spans that wait.
	maxAsked = 1024
	// heldTries is how often memory is given back that a drive's reads and writes
	// beside it hold; the waits between, which double, are 3 ms together.
	heldTries = 6
	heldWait  = 100 * time.Microsecond
	// heldSlots is how many slots are tried for memory before it is an error.
	heldSlots = 4
)

// errHeld says that memory did not go back.
var errHeld = errors.New("a drive reads or writes beside it")

// asked is a span that waits to be gathered.
type asked struct {
	step *step
	at   uint32
}

// span gives the span of a slot, nil where the class has none.
func (c *class) span(s *step, at uint32) *span {
	if s.spans == nil {
		return nil
	}
	return &s.spans[at>>c.spanShift()]
}

// spanShift is how many slots a span has, as a power of two.
func (c *class) spanShift() uint { return hugeShift - c.shift }

// gathers says whether slots of the class share huge pages.
func (c *class) gathers() bool { return c.ask != nil && c.shift < hugeShift && c.unit < hugePage }

// gatherWith has pages of slots gathered. The arena has no slot so far.
func (a *Arena) gatherWith(gather func(p []byte) error) {
	a.gather = gather
	for _, c := range a.classes {
		c.ask = a.askLocked
	}
}

// askLocked has a span gathered that is all resident. It waits for nothing.
func (a *Arena) askLocked(s *step, at uint32) {
	p := &s.spans[at]
	switch {
	case p.gathered || p.asked || p == a.inHand || a.gather == nil || a.closed || len(a.asked) == maxAsked:
	case p.passes > 0:
		p.passes--
	case a.passes > 0:
		a.passes--
	default:
		p.asked = true
		a.asked = append(a.asked, asked{s, at})
		if !a.gathering {
			a.gathering = true
			go a.gatherAll()
		}
	}
}

// gatherAll gathers the spans that wait, and ends with the last.
func (a *Arena) gatherAll() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(a.asked) > 0 && !a.closed {
		next := a.asked[0]
		a.asked = a.asked[1:]
		a.gatherLocked(next.step, next.at)
	}
	a.asked, a.gathering = nil, false
	a.wakeLocked()
}

// gatherLocked makes a huge page of a span, if all of it is resident still. It lets
// go of the lock meanwhile; who would give back a part of the span waits.
func (a *Arena) gatherLocked(s *step, at uint32) {
	p := &s.spans[at]
	p.asked = false
	if p.units != s.full || a.gather == nil {
		return
	}
	p.large = true
	a.inHand = p
	a.mu.Unlock()
	err := a.gather(s.bytes[int64(at)<<hugeShift:][:hugePage:hugePage])
	a.mu.Lock()
	a.inHand = nil
	switch {
	case err == nil:
		p.gathered = true
	case errors.Is(err, errAdvice):
		a.log.Error("memory for blocks gets no more huge pages", slog.Any("error", err))
		a.gather = nil
	case errors.Is(err, unix.ENOMEM):
		a.passes = pauseAfter
	}
	p.passes = askAgainAfter
	a.wakeLocked()
}

// partLocked waits until nobody gathers the span of a slot, which gives back some
// of its memory, and says whether the kernel may keep it.
func (a *Arena) partLocked(c *class, place uint32) (large bool) {
	s, at := c.step(place)
	p := c.span(s, at)
	if p == nil {
		return false
	}
	for a.inHand == p {
		a.waiting++
		a.changed.Wait()
		a.waiting--
	}
	if p.gathered {
		p.gathered, p.passes = false, askAgainAfter
	}
	return p.large
}

// punchLarge is punch where the kernel may have one page for what goes and for what
// stays. It then does nothing, and says nothing, while a drive reads or writes what
// stays.
func (m *memory) punchLarge(off, size int64) error {
	wait := heldWait
	for try := 1; ; try++ {
		if err := m.punch(off, size); err != nil {
			return err
		}
		gone, err := m.absent(off, size)
		switch {
		case err != nil || gone:
			return err
		case try == heldTries:
			return errHeld
		}
		<-time.After(wait)
		wait *= 2
	}
}
