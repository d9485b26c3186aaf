package index

import "github.com/hearth-dev/hearth/kvtier/block"

// Resident is what is known of a block in RAM beyond its entry.
type Resident struct {
	Key  block.Key
	Sum  [16]byte // XXH3-128 of its bytes, high half first
	Slot uint32   // of the arena
}

// resident is an element of the queues. It has no pointer either.
type resident struct {
	Resident
	id         ID // of its entry; 0 once it has left RAM, while someone still reads it
	prev, next uint32
	holds      uint32 // readers and writers; not evicted while above 0
	size       uint32 // of the block, also after it left
	queue      uint8
	queued     bool  // waits to be written to a drive
	used       uint8 // uses since it came or was last spared, at most 3
}

// residentBytes is the size of a resident.
const residentBytes = 84

// Queues of S3-FIFO. Only leaves are in one.
const (
	nowhere = iota
	small   // came once
	main    // was used while in small, or came again soon after it left
)

// queue is a list through residents; the head leaves first.
type queue struct {
	head, tail uint32
	bytes      int64
}

type residents struct {
	steps  [][]resident
	free   uint32 // chained by next
	next   uint32
	count  int
	bytes  int64 // of blocks in RAM
	queues [3]queue
	ghosts []uint32 // fingerprints of what left lately, by their own bits; 0 is none
}

func (r *residents) init() { r.next = 1 }

func (r *residents) at(n uint32) *resident { return &r.steps[n>>stepBits][n&stepMask] }

// InRAM is the number of blocks in RAM and the sum of their lengths.
func (x *Index) InRAM() (blocks int, bytes int64) { return x.ram.count, x.ram.bytes }

// Resident tells of a block in RAM; ok is false where it is not there.
func (x *Index) Resident(id ID) (r Resident, ok bool) {
	n := x.at(id).ram
	if n == 0 {
		return Resident{}, false
	}
	return x.ram.at(n).Resident, true
}

// Hold names the hold on a block in RAM.
type Hold uint32

// Enter says that a block is in RAM now. again tells that it came from a drive,
// where it had been put because it is worth it. It is held once.
func (x *Index) Enter(id ID, r Resident, again bool) Hold {
	e := x.at(id)
	n := x.ram.free
	if n != 0 {
		x.ram.free = x.ram.at(n).next
	} else {
		n = x.ram.next
		x.ram.next++
		if int(n>>stepBits) == len(x.ram.steps) {
			x.ram.steps = append(x.ram.steps, make([]resident, 1<<stepBits))
		}
	}
	m := x.ram.at(n)
	*m = resident{Resident: r, id: id, holds: 1, size: e.size & sizeMask}
	x.hold(m, 1)
	e.ram = n
	x.ram.count++
	if e.locLow|e.locHigh != 0 {
		x.both++
	}
	size := int64(e.size & sizeMask)
	x.ram.bytes += size
	if e.hot == 0 {
		to := uint8(small)
		if again || x.ghost(e.print) {
			to = main
		}
		x.push(n, to, false)
	}
	if e.parent != 0 {
		x.adopt(e.parent)
	}
	return Hold(n)
}

// adopt says that a child of an entry came into RAM.
func (x *Index) adopt(parent ID) {
	e := x.at(parent)
	more(&e.hot)
	if e.ram != 0 && x.ram.at(e.ram).queue != nowhere {
		x.unlink(e.ram)
	}
}

// orphan says that a child left RAM; a parent without one is a leaf again, and
// leaves next where nobody used it.
func (x *Index) orphan(parent ID) {
	e := x.at(parent)
	fewer(&e.hot)
	if e.hot > 0 || e.ram == 0 || x.ram.at(e.ram).queue != nowhere {
		return
	}
	if x.ram.at(e.ram).used > 0 {
		x.push(e.ram, main, false)
	} else {
		x.push(e.ram, small, true)
	}
}

// Hold keeps a block in RAM; ok is false where it is not there.
func (x *Index) Hold(id ID) (h Hold, ok bool) {
	n := x.at(id).ram
	if n == 0 {
		return 0, false
	}
	m := x.ram.at(n)
	if m.holds++; m.holds == 1 {
		x.hold(m, 1)
	}
	return Hold(n), true
}

// hold counts a block that is held now, or no more.
func (x *Index) hold(m *resident, sign int64) {
	if x.cost == nil {
		x.held += sign * int64(m.size)
		return
	}
	x.held += sign * x.cost(int(m.size))
}

// SetCost says what a block of some bytes takes in RAM; else it is these. It is
// called before the first Enter.
func (x *Index) SetCost(cost func(size int) int64) { x.cost = cost }

// Held is what the blocks take in RAM that are held, those too that left.
func (x *Index) Held() int64 { return x.held }

// IsHeld says whether an entry's block in RAM is held.
func (x *Index) IsHeld(id ID) bool {
	n := x.at(id).ram
	return n != 0 && x.ram.at(n).holds > 0
}

// Release ends a hold. gone is true where the block had left meanwhile and this
// was its last hold: its slot is the caller's to free.
func (x *Index) Release(h Hold) (slot uint32, gone bool) {
	m := x.ram.at(uint32(h))
	m.holds--
	if m.holds > 0 {
		return 0, false
	}
	x.hold(m, -1)
	if m.id != 0 {
		if m.queue == nowhere && x.at(m.id).hot == 0 {
			x.push(uint32(h), main, false) // Victim took it out, since it was held
		}
		return 0, false
	}
	slot = m.Slot
	x.recycle(uint32(h))
	return slot, true
}

func (x *Index) recycle(n uint32) {
	*x.ram.at(n) = resident{next: x.ram.free}
	x.ram.free = n
}

// Leave says that a block is not in RAM any more. free tells that its slot is
// the caller's to free; else the last Release gives it. An entry that is then on
// no tier is to be dropped.
func (x *Index) Leave(id ID) (slot uint32, free bool) {
	e := x.at(id)
	n := e.ram
	m := x.ram.at(n)
	if m.queue != nowhere {
		x.unlink(n)
	}
	e.ram = 0
	x.ram.count--
	if e.locLow|e.locHigh != 0 {
		x.both--
	}
	x.ram.bytes -= int64(e.size & sizeMask)
	x.haunt(e.print)
	slot = m.Slot
	if m.holds == 0 {
		x.recycle(n)
		free = true
	} else {
		m.id = 0
	}
	if e.parent != 0 {
		x.orphan(e.parent)
	}
	return slot, free
}

func (x *Index) touchRAM(id ID) {
	if n := x.at(id).ram; n != 0 {
		if m := x.ram.at(n); m.used < 3 {
			m.used++
		}
	}
}

// maxSpared is how many blocks one Victim spares because they were used.
const maxSpared = 32

// Victim gives the block that leaves RAM next; it is not taken out. ok is false
// where every block is held or has children. skip spares what it says true of,
// until the next call. What it costs does not grow with the number of blocks: one
// that is held is in no queue until its release, and not many are spared for their
// uses, but then one that was used leaves.
func (x *Index) Victim(skip func(ID) bool) (id ID, ok bool) {
	var first [3]uint32 // of each queue, that was skipped
	var done [3]bool    // nothing in it leaves
	spared := 0
	for {
		from := x.leaving(done)
		if from == nowhere {
			return 0, false
		}
		n := x.ram.queues[from].head
		m := x.ram.at(n)
		switch {
		case m.holds > 0:
			x.unlink(n)
		case n == first[from]:
			done[from] = true
		case from == small && m.used > 1 && spared < maxSpared:
			spared++
			x.unlink(n)
			m.used = 0
			x.push(n, main, false)
			first[main], done[main] = 0, false
		case from == main && m.used > 0 && spared < maxSpared:
			spared++
			x.unlink(n)
			m.used--
			x.push(n, main, false)
			first[main] = 0 // it is looked at again
		case skip == nil || !skip(m.id):
			return m.id, true
		case m.holds == 0:
			x.unlink(n)
			x.push(n, from, false)
			if first[from] == 0 {
				first[from] = n
			}
		}
	}
}

// leaving is the queue whose head leaves next, where it is not done with.
func (x *Index) leaving(done [3]bool) uint8 {
	s, m := &x.ram.queues[small], &x.ram.queues[main]
	inSmall, inMain := s.head != 0 && !done[small], m.head != 0 && !done[main]
	switch {
	case inSmall && (!inMain || s.bytes*10 >= s.bytes+m.bytes):
		return small
	case inMain:
		return main
	}
	return nowhere
}

// Next puts a block that is a leaf at the head of those that leave.
func (x *Index) Next(id ID) {
	if n := x.at(id).ram; n != 0 && x.ram.at(n).queue != nowhere {
		x.unlink(n)
		x.ram.at(n).used = 0
		x.push(n, small, true)
	}
}

func (x *Index) push(n uint32, to uint8, front bool) {
	m := x.ram.at(n)
	q := &x.ram.queues[to]
	m.queue = to
	q.bytes += int64(x.at(m.id).size & sizeMask)
	switch {
	case q.head == 0:
		q.head, q.tail = n, n
	case front:
		m.next = q.head
		x.ram.at(q.head).prev = n
		q.head = n
	default:
		m.prev = q.tail
		x.ram.at(q.tail).next = n
		q.tail = n
	}
}

func (x *Index) unlink(n uint32) {
	m := x.ram.at(n)
	q := &x.ram.queues[m.queue]
	q.bytes -= int64(x.at(m.id).size & sizeMask)
	if m.prev != 0 {
		x.ram.at(m.prev).next = m.next
	} else {
		q.head = m.next
	}
	if m.next != 0 {
		x.ram.at(m.next).prev = m.prev
	} else {
		q.tail = m.prev
	}
	m.prev, m.next, m.queue = 0, 0, nowhere
}

// ghost reports whether a block left RAM lately.
func (x *Index) ghost(p Print) bool {
	g := x.ram.ghosts
	return len(g) > 0 && g[int(p[2])&(len(g)-1)] == p[3]|1
}

// haunt remembers a block that leaves. There is room for about as many as are in
// RAM.
func (x *Index) haunt(p Print) {
	if want := x.ram.count + 1; len(x.ram.ghosts) < want {
		size := max(64, len(x.ram.ghosts))
		for size < want {
			size *= 2
		}
		x.ram.ghosts = make([]uint32, size) // those of before are few, and forgotten
	}
	g := x.ram.ghosts
	g[int(p[2])&(len(g)-1)] = p[3] | 1
}

// Seen reports whether a block that is not known left RAM lately: it is worth
// more than one that comes for the first time.
func (x *Index) Seen(p Print) bool { return x.ghost(p) }

// ResidentBytes is the memory that the index takes for what is in RAM.
func (x *Index) ResidentBytes() int64 {
	return int64(len(x.ram.steps))<<stepBits*residentBytes + int64(cap(x.ram.ghosts))*4
}

// Current is the entry whose block a hold is on, 0 once that has left RAM.
func (x *Index) Current(h Hold) ID { return x.ram.at(uint32(h)).id }

// HeldSize is the length of the block that a hold is on, in bytes.
func (x *Index) HeldSize(h Hold) int { return int(x.ram.at(uint32(h)).size) }

// Queued says whether a block in RAM waits to be written to a drive.
func (x *Index) Queued(id ID) bool {
	n := x.at(id).ram
	return n != 0 && x.ram.at(n).queued
}

// SetQueued notes that a block in RAM waits to be written, or no more.
func (x *Index) SetQueued(id ID, queued bool) {
	if n := x.at(id).ram; n != 0 {
		x.ram.at(n).queued = queued
	}
}
