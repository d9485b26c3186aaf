package kvtier

import (
	"github.com/hearth-dev/hearth/kvtier/arena"
	"github.com/hearth-dev/hearth/kvtier/index"
)

// maxEvictions bounds the blocks that one Put moves out of its way, and what it
// asks of other tenants. A Put that needs more is dropped.
const maxEvictions = 64

// freeLocked gives a slot back.
func (t *Tenant) freeLocked(slot arena.Slot, size int) {
	t.used -= t.cache.arena.Cost(size)
	t.cache.arena.Free(slot)
}

// releaseLocked ends a hold, and frees the slot where the block left meanwhile.
func (t *Tenant) releaseLocked(hold index.Hold) {
	size := t.index.HeldSize(hold)
	if slot, gone := t.index.Release(hold); gone {
		t.freeLocked(arena.Slot(slot), size)
	}
	t.settleLentLocked()
}

// dropLooseLocked gives back a slot that the index does not have.
func (t *Tenant) dropLooseLocked(slot arena.Slot, size int) {
	t.freeLocked(slot, size)
	t.loosenLocked(-t.cache.arena.Cost(size))
}

// leaveLocked takes a block out of RAM. Its entry stays.
func (t *Tenant) leaveLocked(id index.ID) {
	size := t.index.Size(id)
	if slot, free := t.index.Leave(id); free {
		t.freeLocked(arena.Slot(slot), size)
	}
}

// evictLocked gives up the block that is worth least in RAM. One that is worth
// its write to a drive is written first, where there is room to wait for that,
// and another leaves.
func (t *Tenant) evictLocked() bool { return t.leastLocked(false) }

// leastLocked is evictLocked; pinned says that what people pinned, and is nowhere
// else, goes as well where there is nothing besides.
func (t *Tenant) leastLocked(pinned bool) bool {
	var demoted int
	id, ok := t.index.Victim(func(id index.ID) bool {
		if t.sparedLocked(id) {
			return true
		}
		if demoted >= maxDemotions || t.index.Loc(id) != 0 || !t.admitLocked(id) || !t.enqueueLocked(id, true) {
			return false
		}
		demoted++
		return true
	})
	if !ok && len(t.pins) > 0 && (pinned || t.pinnedRAMLocked() > t.limitLocked()/2) {
		// The budget became smaller than it was when they were pinned.
		id, ok = t.index.Victim(nil)
	}
	if !ok {
		return false
	}
	r, _ := t.index.Resident(id)
	space := t.record.namespaceAt(t.index.Space(id))
	kind, tier := EventRemoved, TierRAM
	if t.index.Loc(id) != 0 {
		kind, tier = EventDemoted, TierNVMe
		t.stats.demoted.Add(1)
	} else {
		t.stats.evicted.Add(1)
		if t.index.Touches(id) <= 1 {
			t.stats.unread.Add(1)
		}
	}
	t.leaveLocked(id)
	t.index.Drop(id)
	t.cache.events.add(t, space, r.Key, kind, tier)
	return true
}

// maxDemotions bounds the blocks that one eviction has written.
const maxDemotions = 4

// overageLocked is what the tenant has in RAM beyond its own, in bytes.
func (t *Tenant) overageLocked() int64 { return t.used - int64(t.spec.Memory) }

// reclaim takes at least bytes of RAM from the tenant that has most beyond its
// own, were want bytes added to asking's. It says whether anything was freed: a
// tenant within its own is never asked.
func (c *Cache) reclaim(asking *Tenant, bytes int64) bool {
	for _, t := range c.byOverage(asking, bytes) {
		var freed int64
		t.mu.Lock()
		for freed < bytes && (t == asking || t.overageLocked() > 0) {
			before := t.used
			if !t.leastLocked(t != asking) { // pins hold what is its own, not what it borrows
				break
			}
			freed += before - t.used
		}
		t.mu.Unlock()
		if freed > 0 {
			return true
		}
	}
	return false
}

// byOverage lists the tenants that have more than their own, most first, as it
// were with bytes more for asking.
func (c *Cache) byOverage(asking *Tenant, bytes int64) []*Tenant {
	type over struct {
		t *Tenant
		n int64
	}
	var list []over
	for _, t := range c.Tenants() {
		t.mu.Lock()
		n := t.overageLocked()
		t.mu.Unlock()
		if t == asking {
			n += bytes
		}
		if n > 0 {
			list = append(list, over{t, n})
		}
	}
	sortBy(list, func(o over) int64 { return -o.n })
	tenants := make([]*Tenant, len(list))
	for i, o := range list {
		tenants[i] = o.t
	}
	return tenants
}
