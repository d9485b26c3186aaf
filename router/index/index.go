// Package index owns the router's prefix memory: for each endpoint the blocks
// of prompt that its engine is believed to hold. The pool package matches a
// request's keys against it and inserts the keys of what it sends. It learns
// nothing from engines, and a wrong entry costs a worse choice, never a wrong
// answer.
//
// Each endpoint has a slot: a flat open-addressing table over an array of
// entries in the order of their last use, so that a slot forgets what the
// engine's own LRU forgets. A block takes 26 to 36 bytes in each slot that
// holds it, all of it allocated without pointers at the slot's first insert;
// clearing a slot drops two slices.
package index

import (
	"sync"
)

// Options bounds an Index.
type Options struct {
	// MaxBlocks is the most blocks that all slots hold together. Where the
	// capacities asked for exceed it each slot gets its share in proportion.
	MaxBlocks int
}

// Index is a set of slots under one bound. It is safe for concurrent use.
type Index struct {
	maxBlocks int

	mu    sync.Mutex
	slots map[*Slot]int // asked capacity in blocks; guarded by mu
	asked int           // their sum; guarded by mu
}

// New returns an empty index.
func New(opts Options) *Index {
	return &Index{maxBlocks: max(opts.MaxBlocks, 0), slots: make(map[*Slot]int)}
}

// Add returns a new slot that holds up to capacity blocks.
func (x *Index) Add(capacity int) *Slot {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := &Slot{}
	x.setLocked(s, capacity)
	return s
}

// SetCapacity changes what a slot may hold; the least recently used blocks
// past it are forgotten. On a slot that was removed it does nothing.
func (x *Index) SetCapacity(s *Slot, capacity int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if _, found := x.slots[s]; found {
		x.setLocked(s, capacity)
	}
}

// Remove forgets a slot and what it holds. Later inserts into it do nothing.
func (x *Index) Remove(s *Slot) {
	x.mu.Lock()
	defer x.mu.Unlock()
	capacity, found := x.slots[s]
	if !found {
		return
	}
	over := x.asked > x.maxBlocks
	delete(x.slots, s)
	x.asked -= capacity
	s.resize(0)
	if over {
		x.shareLocked()
	}
}

// Match writes the number of leading keys that each slot holds into counts,
// which must be as long as slots.
func (x *Index) Match(keys []uint64, salt uint64, slots []*Slot, counts []int) {
	for i, s := range slots {
		counts[i] = s.Match(keys, salt)
	}
}

// Insert makes the keys the most recently used of the slot, the first key the
// most recent.
func (x *Index) Insert(s *Slot, keys []uint64, salt uint64) { s.insert(keys, salt) }

// Clear forgets what a slot holds, in constant time.
func (x *Index) Clear(s *Slot) { s.clear() }

// Len is the number of blocks that all slots hold together.
func (x *Index) Len() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	n := 0
	for s := range x.slots {
		n += s.Len()
	}
	return n
}

func (x *Index) setLocked(s *Slot, capacity int) {
	capacity = min(max(capacity, 0), maxSlotBlocks)
	over := x.asked > x.maxBlocks
	x.asked += capacity - x.slots[s]
	x.slots[s] = capacity
	if over || x.asked > x.maxBlocks {
		x.shareLocked()
		return
	}
	s.resize(capacity)
}

// shareLocked gives every slot its share. All are shrunk before any grows, so
// that the bound holds at every moment.
func (x *Index) shareLocked() {
	share := func(capacity int) int {
		if x.asked <= x.maxBlocks {
			return capacity
		}
		return int(float64(capacity) * float64(x.maxBlocks) / float64(x.asked))
	}
	for s, capacity := range x.slots {
		if want := share(capacity); want < s.Cap() {
			s.resize(want)
		}
	}
	for s, capacity := range x.slots {
		if want := share(capacity); want > s.Cap() {
			s.resize(want)
		}
	}
}
