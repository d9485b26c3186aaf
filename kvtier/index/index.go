package index

import "slices"

// entry is what is known of a block. It has no pointer, so that the garbage
// collector never looks at it, and only words of four bytes, so that nothing is
// lost to alignment.
type entry struct {
	print Print
	// size is the block's length in bytes, below the touches, which saturate.
	size     uint32
	locLow   uint32 // where on a drive; 0 and 0 is nowhere
	locHigh  uint32
	ram      uint32 // its resident, 0 is none
	parent   ID
	space    uint16 // the tenant's number of its namespace
	children uint16 // entries with this parent; saturates, and then stays
	hot      uint16 // of them in RAM; saturates, and then stays
	_        uint16
}

const (
	sizeBits   = 27 // up to block.MaxSize, inclusive
	sizeMask   = 1<<sizeBits - 1
	maxTouches = 1<<(32-sizeBits) - 1
	many       = 1<<16 - 1
	entryBytes = 44
)

// entries come in steps, so that growing copies nothing.
const (
	stepBits = 12
	stepMask = 1<<stepBits - 1
)

// more and fewer count up and down; a count that once was too large to be told
// stays.
func more(n *uint16) {
	if *n < many {
		*n++
	}
}

func fewer(n *uint16) {
	if *n > 0 && *n < many {
		*n--
	}
}

// Index is a tenant's index. Its zero value is not ready; see New.
type Index struct {
	cost  func(size int) int64 // see SetCost
	held  int64                // see Held
	table table
	steps [][]entry
	free  ID // first of the entries that are free, chained by parent
	count int
	next  ID // never used so far

	ram  residents
	sum  int64 // bytes of blocks that are on a drive
	here int   // blocks that are on a drive
	both int   // of them in RAM, too
}

// New makes an empty index.
func New() *Index {
	x := &Index{next: 1}
	x.ram.init()
	return x
}

func (x *Index) at(id ID) *entry { return &x.steps[id>>stepBits][id&stepMask] }

// Find gives the entry of a fingerprint, 0 where there is none. An entry may
// stand for a block that is on no tier: as the parent of others.
func (x *Index) Find(p Print) ID {
	s := x.table.part(p)
	mask := len(s.slots) - 1
	if mask < 0 {
		return 0
	}
	for i := int(p[1]) & mask; ; i = (i + 1) & mask {
		slot := s.slots[i]
		if slot == 0 {
			return 0
		}
		if id := ID(uint32(slot)); uint32(slot>>32) == p[1] && x.at(id).print == p {
			return id
		}
	}
}

// FindAll is Find for many: ids[i] is for prints[i]. It asks the memory for all
// of them before it needs the first, and is several times faster than as many
// calls of Find where the index is larger than the processor's caches.
func (x *Index) FindAll(prints []Print, ids []ID) {
	const batch = 32
	var slots [batch]uint64
	for len(prints) > 0 {
		n := min(batch, len(prints))
		for i, p := range prints[:n] {
			slots[i] = x.table.first(p)
		}
		for i, p := range prints[:n] {
			ids[i] = 0
			if slot := slots[i]; slot != 0 {
				// Nearly always the first slot is the right one, and else the way is
				// walked again.
				if id := ID(uint32(slot)); uint32(slot>>32) == p[1] && x.at(id).print == p {
					ids[i] = id
				} else {
					ids[i] = x.Find(p)
				}
			}
		}
		prints, ids = prints[n:], ids[n:]
	}
}

// Add makes the entry of a block that has none yet. parent is the block that
// comes before it in its prefix, 0 where that is not known.
func (x *Index) Add(p Print, space uint16, size int, parent ID) ID {
	id := x.free
	if id != 0 {
		x.free = x.at(id).parent
	} else {
		id = x.next
		x.next++
		if int(id>>stepBits) == len(x.steps) {
			x.steps = append(x.steps, make([]entry, 1<<stepBits))
		}
	}
	*x.at(id) = entry{print: p, size: uint32(size), parent: parent, space: space}
	if parent != 0 {
		more(&x.at(parent).children)
	}
	x.table.add(p, id)
	x.count++
	return id
}

// Drop ends an entry that is on no tier and is nobody's parent, and then its
// parent, where only that held it.
func (x *Index) Drop(id ID) {
	for id != 0 {
		e := x.at(id)
		if e.ram != 0 || e.locLow|e.locHigh != 0 || e.children != 0 {
			return
		}
		parent := e.parent
		x.table.remove(e.print, id)
		*e = entry{parent: x.free}
		x.free = id
		x.count--
		if parent == 0 {
			return
		}
		fewer(&x.at(parent).children)
		id = parent
	}
}

// Len is the number of entries.
func (x *Index) Len() int { return x.count }

// Print is the fingerprint of an entry.
func (x *Index) Print(id ID) Print { return x.at(id).print }

// Space is the tenant's number of the entry's namespace.
func (x *Index) Space(id ID) uint16 { return x.at(id).space }

// Size is the length of the block in bytes.
func (x *Index) Size(id ID) int { return int(x.at(id).size & sizeMask) }

// Parent is the entry of the block before it in its prefix, 0 where none is
// known.
func (x *Index) Parent(id ID) ID { return x.at(id).parent }

// HasChildren says whether blocks that were computed from this one are known.
func (x *Index) HasChildren(id ID) bool { return x.at(id).children > 0 }

// SetSize changes the length of a block that is on no tier.
func (x *Index) SetSize(id ID, size int) {
	e := x.at(id)
	e.size = e.size&^sizeMask | uint32(size)
}

// SetParent says where a block belongs that had no parent so far. It is ignored
// where that would close a circle, or where it is not soon found that it would not.
func (x *Index) SetParent(id, parent ID) {
	e := x.at(id)
	if e.parent != 0 || parent == 0 || parent == id || e.children > 0 && x.comesBefore(id, parent) {
		return
	}
	e.parent = parent
	more(&x.at(parent).children)
	if e.ram != 0 {
		x.adopt(parent)
	}
}

// longestWalk bounds the blocks of a chain that are looked at for a circle.
const longestWalk = 1024

// comesBefore says whether a block is in the prefix of another, or may be.
func (x *Index) comesBefore(id, other ID) bool {
	for range longestWalk {
		if other == 0 || other == id {
			return other == id
		}
		other = x.at(other).parent
	}
	return true
}

// Depth is the number of known blocks before this one in its prefix, at most
// limit.
func (x *Index) Depth(id ID, limit int) int {
	n := 0
	for id = x.at(id).parent; id != 0 && n < limit; id = x.at(id).parent {
		n++
	}
	return n
}

// Touches is how often the block was used, from 0 to 31. Touch counts one more.
func (x *Index) Touches(id ID) int { return int(x.at(id).size >> sizeBits) }

// SetTouches sets the count.
func (x *Index) SetTouches(id ID, n int) {
	e := x.at(id)
	e.size = e.size&sizeMask | uint32(min(max(n, 0), maxTouches))<<sizeBits
}

// Touch says that the block was used.
func (x *Index) Touch(id ID) {
	x.SetTouches(id, x.Touches(id)+1)
	x.touchRAM(id)
}

// Loc is where the block is on a drive, 0 where it is on none.
func (x *Index) Loc(id ID) uint64 {
	e := x.at(id)
	return uint64(e.locHigh)<<32 | uint64(e.locLow)
}

// SetLoc says where on a drive the block is, 0 for nowhere. An entry that is then
// on no tier is to be dropped.
func (x *Index) SetLoc(id ID, loc uint64) {
	e := x.at(id)
	had, has := e.locLow|e.locHigh != 0, loc != 0
	size := int64(e.size & sizeMask)
	if had != has && e.ram != 0 {
		if has {
			x.both++
		} else {
			x.both--
		}
	}
	if had {
		x.here--
		x.sum -= size
	}
	if has {
		x.here++
		x.sum += size
	}
	e.locLow, e.locHigh = uint32(loc), uint32(loc>>32)
}

// OnDrive is the number of blocks on a drive and the sum of their lengths.
func (x *Index) OnDrive() (blocks int, bytes int64) { return x.here, x.sum }

// Present is how many blocks are on a tier.
func (x *Index) Present() int { return x.ram.count + x.here - x.both }

// Limit is above every ID that stands.
func (x *Index) Limit() ID { return x.next }

// Stands says whether an ID below Limit names an entry. A free entry has no
// fingerprint: a real one is all zeros by a chance of one in 2^128, and then it is
// left out.
func (x *Index) Stands(id ID) bool { return id != 0 && x.at(id).print != Print{} }

// All gives every entry's ID, in no order that means anything, until yield says
// stop. The index must not change meanwhile.
func (x *Index) All(yield func(ID) bool) {
	for id := ID(1); id < x.next; id++ {
		if x.Stands(id) && !yield(id) {
			return
		}
	}
}

// Bytes is the memory that the index takes, without that of the residents.
func (x *Index) Bytes() int64 {
	return x.table.bytes() + int64(len(x.steps))<<stepBits*entryBytes + int64(cap(x.steps))*24
}

// Grow makes room for n entries at once, as a start does that knows their number.
func (x *Index) Grow(n int) {
	x.steps = slices.Grow(x.steps, n>>stepBits+1)
}
