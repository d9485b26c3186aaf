package resp

import (
	"container/list"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/kvtier/block"
)

// pinFor is how long an EXISTS may hold a block for a GET that does not come.
const pinFor = 60 * time.Second

// pins are the blocks that native connections of a tenant were told to be there
// and have not fetched. They are bounded in bytes, and end by themselves.
type pins struct {
	limit func() int64 // bytes

	mu    sync.Mutex
	held  map[block.Key]*held
	old   list.List // of *held, the one that ends first in front
	bytes int64
	timer *time.Timer

	expired uint64 // pins whose time ran out
	full    uint64 // pins that were refused for the bound
}

// held is one pinned block.
type held struct {
	key   block.Key
	pin   Pin
	until time.Time
	place *list.Element
	// waiting counts the GETs that each connection may still send.
	waiting map[uint64]int
}

// add takes over a pin, in place of one of the same key: that may be of a block which
// was ended meanwhile. It gives it back at once, and says so, where the bound is
// reached.
func (p *pins) add(key block.Key, pin Pin, connection uint64) bool {
	limit := p.limit()
	p.mu.Lock()
	h := p.held[key]
	more := int64(pin.Size())
	if h != nil {
		more -= int64(h.pin.Size())
	}
	if h != nil && (more <= 0 || p.bytes+more <= limit) {
		old := h.pin
		h.pin = pin
		p.bytes += more
		p.renewLocked(h, connection)
		p.mu.Unlock()
		old.Release()
		return true
	}
	if h != nil { // what is pinned is there no more
		p.full++
		p.removeLocked(h)
		p.mu.Unlock()
		h.pin.Release()
		pin.Release()
		return false
	}
	if p.bytes+more > limit {
		p.full++
		p.mu.Unlock()
		pin.Release()
		return false
	}
	if p.held == nil {
		p.held = make(map[block.Key]*held)
	}
	h = &held{key: key, pin: pin, waiting: make(map[uint64]int, 1)}
	h.place = p.old.PushBack(h)
	p.held[key] = h
	p.bytes += int64(pin.Size())
	p.renewLocked(h, connection)
	p.mu.Unlock()
	return true
}

func (p *pins) renewLocked(h *held, connection uint64) {
	h.waiting[connection]++
	h.until = time.Now().Add(pinFor)
	p.old.MoveToBack(h.place)
	if p.timer == nil {
		p.timer = time.AfterFunc(pinFor, p.expire)
	} else if len(p.held) == 1 {
		p.timer.Reset(pinFor)
	}
}

// holds says whether a key is pinned.
func (p *pins) holds(key block.Key) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.held[key] != nil
}

// replace has a pinned key hold the block that was stored over it. One that is
// larger and beyond the bound is not held: nobody who asked awaits its size.
func (p *pins) replace(key block.Key, pin Pin) {
	limit := p.limit()
	p.mu.Lock()
	h := p.held[key]
	if h == nil {
		p.mu.Unlock()
		pin.Release()
		return
	}
	old := h.pin
	if more := int64(pin.Size() - old.Size()); more <= 0 || p.bytes+more <= limit {
		h.pin = pin
		p.bytes += more
		p.mu.Unlock()
		old.Release()
		return
	}
	p.full++
	p.removeLocked(h)
	p.mu.Unlock()
	old.Release()
	pin.Release()
}

// got ends what one EXISTS asked for: the GET came.
func (p *pins) got(key block.Key, connection uint64) {
	p.mu.Lock()
	h := p.held[key]
	if h == nil {
		p.mu.Unlock()
		return
	}
	if h.waiting[connection] == 0 { // asked on another connection
		for other := range h.waiting {
			connection = other
			break
		}
	}
	ended := p.lessLocked(h, connection, 1)
	p.mu.Unlock()
	release(ended)
}

// drop ends the pin of a deleted block.
func (p *pins) drop(key block.Key) {
	p.mu.Lock()
	h := p.held[key]
	if h != nil {
		p.removeLocked(h)
	}
	p.mu.Unlock()
	if h != nil {
		h.pin.Release()
	}
}

// leave ends all that a connection asked for, since it closed.
func (p *pins) leave(connection uint64) {
	var ended []*held
	p.mu.Lock()
	for _, h := range p.held {
		if count := h.waiting[connection]; count > 0 {
			ended = append(ended, p.lessLocked(h, connection, count)...)
		}
	}
	p.mu.Unlock()
	release(ended)
}

func (p *pins) lessLocked(h *held, connection uint64, count int) []*held {
	if h.waiting[connection] -= count; h.waiting[connection] <= 0 {
		delete(h.waiting, connection)
	}
	if len(h.waiting) > 0 {
		return nil
	}
	p.removeLocked(h)
	return []*held{h}
}

func (p *pins) removeLocked(h *held) {
	delete(p.held, h.key)
	p.old.Remove(h.place)
	p.bytes -= int64(h.pin.Size())
	if len(p.held) == 0 && p.timer != nil {
		p.timer.Stop()
	}
}

// expire ends the pins whose time ran out.
func (p *pins) expire() {
	var ended []*held
	p.mu.Lock()
	now := time.Now()
	for front := p.old.Front(); front != nil; front = p.old.Front() {
		h := front.Value.(*held)
		if left := h.until.Sub(now); left > 0 {
			p.timer.Reset(left)
			break
		}
		p.removeLocked(h)
		p.expired++
		ended = append(ended, h)
	}
	p.mu.Unlock()
	release(ended)
}

func release(ended []*held) {
	for _, h := range ended {
		h.pin.Release()
	}
}

// count tells what is pinned now, and what was.
func (p *pins) count() (blocks int, bytes int64, expired, full uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.held), p.bytes, p.expired, p.full
}
