// Package segment owns one tenant's records on the node's drives: files that are
// written front to back, reused as a whole, and believed only as far as their
// checksums go. The core of the KV tier calls it, one Log for each tenant; it
// writes what it is told to, says where that lies, and reads it back.
//
// It never keeps an index: who calls remembers the Loc of a block, and learns by
// callbacks what was found at the start, what moved and what went. It never gives
// bytes that are not those of the key asked for, never waits for room, and never
// has more bytes in its files than its budget.
//
// Of two blocks with other bytes under one key only the later may ever be found
// again, whatever was lost on the way. The log keeps that promise together with
// its caller: before other bytes are stored under a key of which a record may lie
// on a drive, the caller ends the key with Delete. Records may lie there of every
// key that was told by Append, Recovered or Moved and not yet by Dropped; a key
// whose read failed is one of them. See FORMAT.md of kvtier.
package segment

import "errors"

// What callers branch on.
var (
	// ErrGone says that nothing is at a Loc any more: its segment was reused.
	ErrGone = errors.New("the record is gone")
	// ErrDamaged says that what is at a Loc is not what was written there, or
	// cannot be read.
	ErrDamaged = errors.New("the record is damaged")
	// ErrNewer says that a file is of a version that this code does not know.
	ErrNewer = errors.New("segment is of a newer version")
	// ErrWear says that Options.Spend refused the bytes.
	ErrWear = errors.New("the drives may not be written that much")
	// ErrFull says that there is no room: no budget, or every segment is pinned.
	ErrFull = errors.New("no segment is free")
	// ErrTooLarge says that a block does not fit a segment of this tenant.
	ErrTooLarge = errors.New("the block is larger than a segment takes")
	// ErrClosed says that the log was closed.
	ErrClosed = errors.New("the log is closed")
	// ErrNoDrive says that no drive can be written.
	ErrNoDrive = errors.New("no drive takes writes")
)
