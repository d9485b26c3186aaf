package weightcache

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

const (
	bitsMagic = "HRTHBIT2"
	// bitsMagicV1 is of stores before: one byte for each segment, 1 where the
	// boot wrote it whole.
	bitsMagicV1 = "HRTHBIT1"
	// bitsHeader is magic, digest, size and segment size as little-endian
	// uint64, the boot's id, and the CRC-32C of all that.
	bitsHeader = len(bitsMagic) + 32 + 8 + 8 + bootBytes + 4
	bootBytes  = 16
	// countBytes is what the count of a segment takes. Counts are aligned, so
	// that none lies on two pages.
	countBytes = 4
	// maxBitsBytes bounds a bitmap file.
	maxBitsBytes = int64(bitsHeader) + artifact.MaxFileSize/minSegment*(countBytes+1)
)

var crcTable = crc32.MakeTable(crc32.Castagnoli)

// encodeBits is the whole bitmap file; counts of what was written are believed
// only in the boot that wrote them.
func (l *landing) encodeBits() []byte {
	data := append(l.header(), l.bitmap...)
	data = append(data, make([]byte, countsAt(len(l.written))-int64(len(data)))...)
	for _, n := range l.written {
		data = binary.LittleEndian.AppendUint32(data, uint32(n))
	}
	return data
}

// countsAt is the offset of the counts of a file of n segments.
func countsAt(n int) int64 { return int64(bitsHeader + (n+31)/32*4) }

// writeCount notes how much of a segment is written, where a successor of a
// killed process finds it. No reader gets bytes that are not counted.
func (l *landing) writeCount(i int, n int64) error {
	if l.bits == nil {
		return nil
	}
	_, err := l.bits.WriteAt(binary.LittleEndian.AppendUint32(nil, uint32(n)), countsAt(len(l.written))+int64(i)*countBytes)
	if err != nil {
		return fmt.Errorf("write bitmap of file %s: %w", l.sha.Short(), classified(err))
	}
	return nil
}

func (l *landing) header() []byte {
	data := append([]byte(bitsMagic), l.sha[:]...)
	data = binary.LittleEndian.AppendUint64(data, uint64(l.size))
	data = binary.LittleEndian.AppendUint64(data, uint64(l.segment))
	data = append(data, l.s.boot[:]...)
	return binary.LittleEndian.AppendUint32(data, crc32.Checksum(data, crcTable))
}

// bitsFile is a decoded bitmap file.
type bitsFile struct {
	segment int64
	boot    [bootBytes]byte
	bitmap  []byte  // bit i: segment i is on the drive
	written []int64 // bytes of segment i, from its start, that processes of this boot wrote
	old     bool    // of an earlier version: to be written anew
}

// sameBoot reports whether the counts of a bitmap file are of the running kernel.
func (s *Store) sameBoot(b bitsFile) bool { return b.boot == s.boot && s.boot != [bootBytes]byte{} }

// decodeBits reads a bitmap file. Errors wrap artifact.ErrInvalid.
func decodeBits(data []byte, sha artifact.Digest, size int64) (b bitsFile, err error) {
	if len(data) < bitsHeader {
		return b, fmt.Errorf("decode bitmap: %w: no header", artifact.ErrInvalid)
	}
	switch string(data[:len(bitsMagic)]) {
	case bitsMagic:
	case bitsMagicV1:
		b.old = true
	default:
		return b, fmt.Errorf("decode bitmap: %w: no header", artifact.ErrInvalid)
	}
	body := data[:bitsHeader-4]
	if binary.LittleEndian.Uint32(data[bitsHeader-4:]) != crc32.Checksum(body, crcTable) {
		return b, fmt.Errorf("decode bitmap: %w: checksum", artifact.ErrInvalid)
	}
	if artifact.Digest(data[8:40]) != sha || binary.LittleEndian.Uint64(data[40:]) != uint64(size) {
		return b, fmt.Errorf("decode bitmap: %w: of another file", artifact.ErrInvalid)
	}
	b.segment = int64(binary.LittleEndian.Uint64(data[48:]))
	if b.segment < minSegment || b.segment > maxSegment {
		return b, fmt.Errorf("decode bitmap: %w: segment of %d bytes", artifact.ErrInvalid, b.segment)
	}
	copy(b.boot[:], data[56:])
	n := int((size + b.segment - 1) / b.segment)
	bits := (n + 7) / 8
	counts, want := countsAt(n), countsAt(n)+int64(n)*countBytes
	if b.old {
		counts, want = int64(bitsHeader+bits), int64(bitsHeader+bits+n)
	}
	if int64(len(data)) != want {
		return b, fmt.Errorf("decode bitmap: %w: %d bytes for %d segments", artifact.ErrInvalid, len(data), n)
	}
	b.bitmap, b.written = data[bitsHeader:bitsHeader+bits], make([]int64, n)
	for i, rest := 0, data[counts:]; i < n; i++ {
		length := min(b.segment, size-int64(i)*b.segment)
		switch {
		case !b.old:
			b.written[i] = min(int64(binary.LittleEndian.Uint32(rest[i*countBytes:])), length)
		case rest[i] == 1:
			b.written[i] = length
		}
	}
	return b, nil
}
