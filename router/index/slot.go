package index

import (
	"math/bits"
	"sync"
)

const (
	maxSlotBlocks = 1 << 28
	// insertRun is how many keys one hold of a slot's lock inserts, so that a
	// long prompt does not delay those who match.
	insertRun = 64
	none      = ^uint32(0)
)

// Slot is one endpoint's prefix memory. A key is held only together with all
// keys before it, since a key is never more recent than the one before it and
// the least recent goes first; Match relies on that.
type Slot struct {
	mu       sync.Mutex
	capacity int      // blocks; guarded by mu
	entries  []entry  // nil until the first insert; guarded by mu
	table    []uint64 // hash<<32 | entry number + 1, 0 = empty; guarded by mu
	shift    uint8    // 32 - log2(len(table)); guarded by mu
	newest   uint32   // guarded by mu
	oldest   uint32   // guarded by mu
}

// entry is a held block in the list from the newest to the oldest.
type entry struct {
	key          uint64
	newer, older uint32
}

// Len is the number of blocks held.
func (s *Slot) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.entries)
}

// Cap is the number of blocks that the slot may hold now.
func (s *Slot) Cap() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.capacity
}

// Usage is Len and Cap of one moment.
func (s *Slot) Usage() (held, capacity int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.entries), s.capacity
}

// Match counts the leading keys held, in O(log n) look-ups. It does not count
// as a use.
func (s *Slot) Match(keys []uint64, salt uint64) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(keys) == 0 || len(s.entries) == 0 || s.findLocked(salted(keys[0], salt)) == none {
		return 0
	}
	// keys[held-1] is held and keys[missing], if there is one, is not.
	held, missing := 1, len(keys)
	for step := 1; held < missing; step *= 2 {
		probe := min(held+step, missing) - 1
		if s.findLocked(salted(keys[probe], salt)) == none {
			missing = probe
			break
		}
		held = probe + 1
	}
	for held < missing {
		probe := held + (missing-held)/2
		if s.findLocked(salted(keys[probe], salt)) == none {
			missing = probe
		} else {
			held = probe + 1
		}
	}
	return held
}

// salted makes a target's own key of a request's key, so that one prompt for
// two models is two prefixes.
func salted(key, salt uint64) uint64 {
	x := (key ^ salt) * 0x9e3779b97f4a7c15
	return x ^ x>>32
}

// insert holds the lock for insertRun keys at a time. Where another insert
// drove the last key out in between it stops.
func (s *Slot) insert(keys []uint64, salt uint64) {
	for start := 0; start < len(keys); start += insertRun {
		if !s.insertSome(keys, salt, start, min(start+insertRun, len(keys))) {
			return
		}
	}
}

func (s *Slot) insertSome(keys []uint64, salt uint64, start, end int) (more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.capacity == 0 {
		return false
	}
	if s.table == nil {
		s.allocateLocked()
	}
	at := none // the entry of the key before, none = the list's head
	if start > 0 {
		if at = s.findLocked(salted(keys[start-1], salt)); at == none {
			return false
		}
	}
	// What was inserted together lies together: the next key is most often the
	// one that stood behind this one, and no table is needed to find it.
	behind := none
	var heads [insertRun]uint64
	warm := false
	for i, k := range keys[start:end] {
		key := salted(k, salt)
		var found uint32
		switch {
		case behind != none && s.entries[behind].key == key:
			found = behind
		case !warm:
			// From the first key that is elsewhere on the first look-ups are made
			// all at once: the loads do not depend on each other, so that the
			// processor waits for memory once.
			warm = true
			for j := i + 1; j < end-start; j++ {
				heads[j] = s.table[s.homeLocked(hash(salted(keys[start+j], salt)))]
			}
			found = s.findLocked(key)
		default:
			if found = uint32(heads[i]) - 1; heads[i] == 0 || uint32(heads[i]>>32) != hash(key) || s.entries[found].key != key {
				found = s.findLocked(key)
			}
		}
		behind = none
		if found != none {
			behind = s.entries[found].older
		}
		switch {
		case found == none && len(s.entries) < s.capacity:
			found = uint32(len(s.entries))
			s.entries = append(s.entries, entry{key: key, newer: none, older: none})
			s.placeLocked(key, found)
		case found == none:
			if s.oldest == at {
				return false // the rest of the prompt does not fit
			}
			found = s.oldest
			s.unlinkLocked(found)
			s.eraseLocked(s.entries[found].key, found)
			s.entries[found].key = key
			s.placeLocked(key, found)
		case found == at:
			continue // the same key twice in a row
		default:
			s.unlinkLocked(found)
		}
		s.linkLocked(found, at)
		at = found
	}
	return true
}

func (s *Slot) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.entries, s.table = nil, nil
}

// resize changes the capacity and keeps the most recent blocks that fit.
func (s *Slot) resize(capacity int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if capacity == s.capacity {
		return
	}
	s.capacity = capacity
	old, at := s.entries, s.newest
	s.entries, s.table = nil, nil
	if len(old) == 0 || capacity == 0 {
		return
	}
	s.allocateLocked()
	for last := none; at != none && len(s.entries) < capacity; at = old[at].older {
		i := uint32(len(s.entries))
		s.entries = append(s.entries, entry{key: old[at].key, newer: none, older: none})
		s.placeLocked(old[at].key, i)
		s.linkLocked(i, last)
		last = i
	}
}

// allocateLocked takes all the memory of the slot's capacity at once: no
// insert pays for growth, and pages not yet used cost nothing.
func (s *Slot) allocateLocked() {
	size := max(bits.Len(uint(s.capacity+s.capacity/4)), 3) // load between 0.4 and 0.8
	s.entries = make([]entry, 0, s.capacity)
	s.table = make([]uint64, 1<<size)
	s.shift = uint8(32 - size)
	s.newest, s.oldest = none, none
}

// hash is what the table keeps of a key beside its entry, so that a search
// touches no entry but the right one. Its upper bits are the key's home.
func hash(key uint64) uint32 { return uint32(key * 0xd6e8feb86659fd93 >> 32) }

func (s *Slot) homeLocked(h uint32) uint32 { return h >> s.shift }

func (s *Slot) findLocked(key uint64) uint32 {
	if len(s.table) == 0 {
		return none
	}
	h, mask := hash(key), uint32(len(s.table)-1)
	for at := s.homeLocked(h); s.table[at] != 0; at = (at + 1) & mask {
		if i := uint32(s.table[at]) - 1; uint32(s.table[at]>>32) == h && s.entries[i].key == key {
			return i
		}
	}
	return none
}

// placeLocked enters a key that the table lacks. The table has room, since it
// is larger than the capacity.
func (s *Slot) placeLocked(key uint64, i uint32) {
	h, mask := hash(key), uint32(len(s.table)-1)
	at := s.homeLocked(h)
	for s.table[at] != 0 {
		at = (at + 1) & mask
	}
	s.table[at] = uint64(h)<<32 | uint64(i+1)
}

// eraseLocked takes the key of an entry out of the table and moves back what
// it had pushed on, so that no search meets a hole.
func (s *Slot) eraseLocked(key uint64, i uint32) {
	h, mask := hash(key), uint32(len(s.table)-1)
	at := s.homeLocked(h)
	for s.table[at] != 0 && uint32(s.table[at]) != i+1 {
		at = (at + 1) & mask
	}
	for next := (at + 1) & mask; s.table[next] != 0; next = (next + 1) & mask {
		home := s.homeLocked(uint32(s.table[next] >> 32))
		if (next-home)&mask >= (next-at)&mask {
			s.table[at] = s.table[next]
			at = next
		}
	}
	s.table[at] = 0
}

// linkLocked puts an unlinked entry right after the entry at, or first.
func (s *Slot) linkLocked(i, at uint32) {
	e := &s.entries[i]
	if e.newer = at; at == none {
		e.older = s.newest
		s.newest = i
	} else {
		e.older = s.entries[at].older
		s.entries[at].older = i
	}
	if e.older == none {
		s.oldest = i
	} else {
		s.entries[e.older].newer = i
	}
}

func (s *Slot) unlinkLocked(i uint32) {
	e := s.entries[i]
	if e.newer == none {
		s.newest = e.older
	} else {
		s.entries[e.newer].older = e.older
	}
	if e.older == none {
		s.oldest = e.newer
	} else {
		s.entries[e.older].newer = e.newer
	}
}
