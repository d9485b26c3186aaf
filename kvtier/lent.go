package kvtier

import (
	"fmt"
	"sync/atomic"

	"github.com/hearth-dev/hearth/kvtier/arena"
)

// RAM that cannot be given back at once is stuck: blocks being filled, read from a
// drive, held by readers and pins, or waiting to be written. What of it is within a
// tenant's own takes nothing from anybody. What is beyond is lent, of all tenants
// together at most Transit, which is nobody's: so whoever asks for its own gets it,
// since the rest of what others have beyond theirs leaves when it is asked for.
//
// Of Transit a half is for whoever comes. The other half is for tenants that have
// little: each has its part of it, and who has nothing may begin one block that is
// larger, while there is room.

// lending is what all tenants of a Cache have lent.
type lending struct {
	bytes     atomic.Int64
	borrowers atomic.Int64 // tenants that may have more than their own
}

// stuckLocked is the RAM of the tenant that cannot be given back at once, in bytes.
func (t *Tenant) stuckLocked() int64 { return t.loose + t.index.Held() }

// lendLocked says whether cost bytes more of the tenant may be stuck, and counts
// them as lent as far as they are not its own. The caller makes them stuck, and calls
// settleLentLocked then.
func (t *Tenant) lendLocked(cost int64) bool {
	over := t.stuckLocked() + cost - int64(t.spec.Memory)
	more := over - t.lent
	if over <= 0 || more <= 0 {
		return true
	}
	l, transit := &t.cache.lending, int64(*t.cache.opts.Transit)
	most := transit / 2
	if t.lent == 0 || over <= most/max(1, l.borrowers.Load()) {
		most = transit
	}
	if l.bytes.Add(more) > most {
		l.bytes.Add(-more)
		return false
	}
	t.lent += more
	return true
}

// settleLentLocked counts what is lent anew, after what is stuck became another.
func (t *Tenant) settleLentLocked() {
	over := max(0, t.stuckLocked()-int64(t.spec.Memory))
	if over != t.lent {
		t.cache.lending.bytes.Add(over - t.lent)
		t.lent = over
	}
}

// loosenLocked counts bytes of slots that the index does not have.
func (t *Tenant) loosenLocked(cost int64) {
	t.loose += cost
	t.settleLentLocked()
}

// borrowsLocked counts the tenant among those that may have more than their own, or
// no more.
func (t *Tenant) borrowsLocked(yes bool) {
	if yes == t.borrows {
		return
	}
	t.borrows = yes
	if yes {
		t.cache.lending.borrowers.Add(1)
	} else {
		t.cache.lending.borrowers.Add(-1)
	}
}

// errLent says that too much of what others own would be stuck.
var errLent = fmt.Errorf("%w: what tenants hold beyond their own in RAM is all lent", ErrDropped)

// looseRoom is room for a block that the index does not have yet. Errors wrap
// ErrDropped or ErrRemoved.
func (t *Tenant) looseRoom(size int) (slot arena.Slot, err error) {
	cost := t.cache.arena.Cost(size)
	t.mu.Lock()
	if !t.lendLocked(cost) {
		t.mu.Unlock()
		t.stats.droppedFull.Add(1)
		return 0, errLent
	}
	t.loosenLocked(cost)
	t.mu.Unlock()
	if slot, err = t.room(size); err != nil {
		t.mu.Lock()
		t.loosenLocked(-cost)
		t.mu.Unlock()
	}
	return slot, err
}

// holdsMoreLocked says whether a block in RAM may be held, as far as it is not yet.
func (t *Tenant) holdsMoreLocked(held bool, size int) bool {
	return held || t.lendLocked(t.cache.arena.Cost(size))
}
