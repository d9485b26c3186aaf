package index

import "math/bits"

// table finds entries by fingerprint. It is many small open-addressed tables, so
// that growing stalls for one of them only. A slot holds the third word of the
// fingerprint above the entry's ID; 0 is empty.
type table struct {
	parts [parts]part
}

type part struct {
	slots []uint64 // a power of two of them, or none
	used  int
}

const (
	parts     = 256
	firstSize = 8 // slots
)

// full says whether a part with room for n slots takes no more than used: nine
// tenths.
func full(used, n int) bool { return used >= n-n/10-1 }

func (t *table) part(p Print) *part { return &t.parts[p[0]%parts] }

// first is what stands at a fingerprint's own place, or at the next one that
// agrees with it within the same line of the cache; 0 where it is not there.
func (t *table) first(p Print) uint64 {
	s := t.part(p)
	mask := len(s.slots) - 1
	if mask < 0 {
		return 0
	}
	i := int(p[1]) & mask
	slot := s.slots[i]
	for range 4 {
		if slot == 0 || uint32(slot>>32) == p[1] {
			return slot
		}
		i = (i + 1) & mask
		slot = s.slots[i]
	}
	return slot
}

// add puts in an entry that is not there.
func (t *table) add(p Print, id ID) {
	s := t.part(p)
	if len(s.slots) == 0 || full(s.used, len(s.slots)) {
		s.grow()
	}
	s.put(uint64(p[1])<<32 | uint64(id))
	s.used++
}

func (s *part) put(slot uint64) {
	mask := len(s.slots) - 1
	i := int(slot>>32) & mask
	for s.slots[i] != 0 {
		i = (i + 1) & mask
	}
	s.slots[i] = slot
}

func (s *part) grow() {
	old := s.slots
	s.slots = make([]uint64, max(firstSize, 2*len(old)))
	for _, slot := range old {
		if slot != 0 {
			s.put(slot)
		}
	}
}

// remove takes an entry out, if it is there, and closes the gap.
func (t *table) remove(p Print, id ID) {
	s := t.part(p)
	mask := len(s.slots) - 1
	if mask < 0 {
		return
	}
	want := uint64(p[1])<<32 | uint64(id)
	i := int(p[1]) & mask
	for s.slots[i] != want {
		if s.slots[i] == 0 {
			return
		}
		i = (i + 1) & mask
	}
	s.used--
	for j := (i + 1) & mask; s.slots[j] != 0; j = (j + 1) & mask {
		// A slot moves into the gap unless its own place lies behind the gap.
		if home := int(s.slots[j]>>32) & mask; (j-home)&mask >= (j-i)&mask {
			s.slots[i] = s.slots[j]
			i = j
		}
	}
	s.slots[i] = 0
	s.shrink()
}

// shrink halves a part that is mostly empty.
func (s *part) shrink() {
	if len(s.slots) <= firstSize || s.used > len(s.slots)/8 {
		return
	}
	old := s.slots
	s.slots = make([]uint64, max(firstSize, 1<<bits.Len(uint(2*s.used))))
	for _, slot := range old {
		if slot != 0 {
			s.put(slot)
		}
	}
}

// bytes is the memory of the slots.
func (t *table) bytes() int64 {
	var n int64
	for i := range t.parts {
		n += int64(cap(t.parts[i].slots)) * 8
	}
	return n
}
