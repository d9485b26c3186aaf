package segment

import (
	"context"
	"crypto/cipher"
	"fmt"
	"log/slog"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/kvtier/block"
)

// DefaultDepth is how many reads one drive gets at once where Options do not say.
const DefaultDepth = 16

// Options are a log's parameters. No callback is called with a lock of the log
// held. Those of reclaim may call Read, Stat and Pin; none may call what writes.
type Options struct {
	FS durable.FS
	// Dirs are one directory per drive, made where it lacks. Its place here is
	// the drive's number.
	Dirs   []string
	Tenant [16]byte
	// Bytes bounds the sum of all segments, in bytes.
	Bytes int64
	// SegmentSize is the size of a segment, 0 for the one that Bytes and
	// LargestBlock give. Where there are segments, theirs counts.
	SegmentSize int64
	// LargestBlock is the size of the largest block, 0 for block.MaxSize.
	LargestBlock int
	// Direct goes around the page cache where the file system can.
	Direct bool
	// Depth is how many reads a drive gets at once; others wait.
	Depth int
	// After is a sequence number that was given before, whether or not its record is
	// on a drive: later ones are greater. It is what LastSeq said to who remembers it.
	After uint64
	// AEAD encrypts payloads, nil for none. Blocks that were written the other way
	// are dropped at the start.
	AEAD cipher.AEAD

	// Namespaces says whose blocks are kept at the start; nil keeps all.
	Namespaces func(block.Namespace) bool
	// Covered says that the caller knows all blocks of an incarnation of a segment
	// and need not be told of them.
	Covered func(segment, drive uint32, incarnation uint64) bool
	// Ended is told of the tombstones that were found in segments that are not
	// covered, before any Recovered, in any order: each voids those blocks that the
	// caller knows of whose sequence number is not above Upto, and no other.
	Ended func(Tombstone)
	// Recovered is told of the blocks that were found in segments that are not
	// covered and no tombstone voids, in the order of their sequence numbers. A key
	// may come more than once, always with the same bytes: all of these lie there.
	Recovered func(Record)

	// Reclaim says which blocks of a segment are worth being kept; at most half a
	// segment's are, in their order. nil keeps none.
	Reclaim func(ctx context.Context, blocks []Record) (keep []bool)
	// Moved tells that a block lies elsewhere now. Whether it is still the block
	// of its key the caller knows.
	Moved func(from, to Record)
	// Dropped tells that a block is gone from the drive for good.
	Dropped func(Record)
	// Usable says what keeps a drive that was given up from being tried: it may be that
	// another is mounted there now, or none. nil tries it.
	Usable func(drive uint32) error
	// Emptied tells that a drive that was given up, and is taken back, has none of
	// its blocks any more.
	Emptied func(drive uint32)
	// Spend is asked before n bytes are written and says no where the drives have
	// worn enough. Charge is told of tombstones and of what ends or begins a segment,
	// which are written in any case. They are called while a drive is written and may
	// call nothing of the log.
	Spend  func(n int64) bool
	Charge func(n int64)

	Log *slog.Logger

	cached int // cachedEntries, where a test does not say otherwise
}

func (o *Options) fill() error {
	switch {
	case o.FS == nil || len(o.Dirs) == 0 || len(o.Dirs) > MaxDrives:
		return fmt.Errorf("open segments: a file system and 1 to %d directories are needed, not %d", MaxDrives, len(o.Dirs))
	case o.SegmentSize != 0 && !validSize(o.SegmentSize):
		return fmt.Errorf("open segments: %d bytes are no size of a segment", o.SegmentSize)
	case o.Bytes < 0 || o.LargestBlock < 0 || o.LargestBlock > block.MaxSize || o.Depth < 0:
		return fmt.Errorf("open segments: a number is out of its range: %d bytes, blocks of %d, depth %d", o.Bytes, o.LargestBlock, o.Depth)
	}
	if o.LargestBlock == 0 {
		o.LargestBlock = block.MaxSize
	}
	if o.Depth == 0 {
		o.Depth = DefaultDepth
	}
	if o.cached == 0 {
		o.cached = cachedEntries
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// SizeFor is the size of the segments of a tenant that begins with so many bytes
// and blocks of at most largest.
func SizeFor(bytes int64, largest int) int64 { return chooseSize(bytes, largest) }

// chooseSize is the size of a tenant's segments: the largest of which eight fit
// the budget, and which takes the largest block.
func chooseSize(bytes int64, largest int) int64 {
	needs := PageSize * (1 + pagesOf(kindBlock, flagEncrypted, uint32(largest)) + footerPages(1))
	size := int64(MinSize)
	for size < MaxSize && (size < needs || size*2*wanted <= bytes) {
		size *= 2
	}
	return size
}

// wanted is how many segments a drive should have: with fewer, reclaim has little
// to choose from.
const wanted = 8

// Info is what a log says of a segment.
type Info struct {
	Number, Drive uint32
	Incarnation   uint64
	Sealed        bool
	// Records are its blocks. They are not known, and -1, of a segment that was
	// covered at the start.
	Records int
	// Used are the bytes that records take in it.
	Used int64
}

// Stats count since the log was opened.
type Stats struct {
	Records int64 // blocks written, without those that moved
	Moved   int64
	Dropped int64
	Bytes   int64 // written, with padding, headers and footers
	// Damaged counts reads that gave other bytes than were written, or none; Gone
	// those of a segment that was reused.
	Damaged, Gone int64
	// Failures counts writes, syncs and names that failed.
	Failures  int64
	Reclaimed int64 // segments
	// Aside are the drives that are not written now, Out those of them that were
	// given up: see TakeBack.
	Aside, Out int
	// Missing are files that were gone at the start and not removed by this program.
	Missing int
	// Opened is how long the start took.
	Opened time.Duration
}
