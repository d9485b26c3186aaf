package segment

import (
	"strconv"
	"strings"

	"github.com/hearth-dev/hearth/kvtier/block"
)

// Loc says where a record is: drive, segment, page, and a mark of the segment's
// incarnation, so that the Loc of a segment that was reused is known to be old.
// The zero Loc is nowhere. A Loc outlives the process where the segment's
// incarnation is the same; see NewLoc.
type Loc uint64

// Bits of a Loc. They bound what a log can have.
const (
	pageBits   = 16
	numberBits = 20
	driveBits  = 6
	markBits   = 64 - pageBits - numberBits - driveBits

	// MaxDrives is how many directories a log can have.
	MaxDrives = 1 << driveBits
	maxNumber = 1<<numberBits - 1
)

// NewLoc is the Loc of a page of a segment in an incarnation.
func NewLoc(drive, segment, page uint32, incarnation uint64) Loc {
	return Loc(uint64(drive)<<(64-driveBits) | uint64(segment)<<(pageBits+markBits) | uint64(page)<<markBits | mark(incarnation))
}

// mark is a digest of an incarnation: two of one segment are seldom alike.
func mark(incarnation uint64) uint64 { return incarnation * 0x9E3779B97F4A7C15 >> (64 - markBits) }

// Drive is the place of its directory in Options.Dirs.
func (l Loc) Drive() uint32 { return uint32(l >> (64 - driveBits)) }

// Segment is the number of the segment on its drive.
func (l Loc) Segment() uint32 { return uint32(l>>(pageBits+markBits)) & maxNumber }

// Page is the page of the record's header in the segment.
func (l Loc) Page() uint32 { return uint32(l>>markBits) & (1<<pageBits - 1) }

func (l Loc) mark() uint64 { return uint64(l) & (1<<markBits - 1) }

// Record is a block on a drive.
type Record struct {
	Namespace block.Namespace
	Key       block.Key
	Size      uint32   // of the block, in bytes
	Sum       [16]byte // XXH3-128 of its bytes, high half first
	Seq       uint64
	Loc       Loc
}

// Tombstone says that a key's records up to a sequence number are void.
type Tombstone struct {
	Namespace block.Namespace
	Key       block.Key
	Upto      uint64
}

// name is what a key is called across namespaces.
type name struct {
	namespace block.Namespace
	key       block.Key
}

const suffix = ".seg"

func fileName(number uint32) string { return strconv.FormatUint(uint64(number), 10) + suffix }

// parseName reads the name of a segment's file; others are none of ours.
func parseName(base string) (number uint32, ok bool) {
	digits, ok := strings.CutSuffix(base, suffix)
	n, err := strconv.ParseUint(digits, 10, 32)
	if !ok || err != nil || n > maxNumber || fileName(uint32(n)) != base {
		return 0, false
	}
	return uint32(n), true
}
