// Package index is one tenant's memory of its blocks: which there are, on which
// tier, in what order they leave RAM. The KV tier's core asks and tells it under
// its own lock. It is pure: it reads no clock, does no I/O, takes no lock and
// holds no block's bytes. It is made for many blocks: a block costs it an entry
// of 44 bytes without a pointer and its share of a hash table.
//
// Blocks are found by a fingerprint of 128 bits, keyed by a seed that no client
// knows. Two keys with one fingerprint are no danger, only a loss: whoever reads
// a block compares its whole key.
//
// Eviction from RAM is S3-FIFO over leaves: a block leaves only when none that
// was computed from it is in RAM any more, since without its prefix a block is of
// no use. A chain of blocks is thus given up from its end, and a prefix that many
// share stays longest.
package index

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/kvtier/block"
)

// Print is the fingerprint of a namespace and a key.
type Print [4]uint32

// ID names an entry while it stands; 0 is none. It is used again for another
// block after the entry ended.
type ID uint32

// PrintOf gives the fingerprint of a key in a tenant's namespace, keyed by seed.
func PrintOf(seed uint64, namespace uint16, key block.Key) Print {
	var in [len(block.Hash{}) + 6]byte
	n := copy(in[:], key.Hash[:])
	binary.LittleEndian.PutUint32(in[n:], key.Group)
	binary.LittleEndian.PutUint16(in[n+4:], namespace)
	sum := xxh3.Hash128Seed(in[:], seed)
	return Print{uint32(sum.Lo), uint32(sum.Lo >> 32), uint32(sum.Hi), uint32(sum.Hi >> 32)}
}
