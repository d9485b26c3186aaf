package weightcache

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

const (
	bitsMagic = "HRTHBIT1"
	// bitsHeader is magic, digest, size and segment size as little-endian
	// uint64, the boot's id, and the CRC-32C of all that.
	bitsHeader = len(bitsMagic) + 32 + 8 + 8 + bootBytes + 4
	bootBytes  = 16
)

var crcTable = crc32.MakeTable(crc32.Castagnoli)

// encodeBits is the whole bitmap file; segments count as written only in the
// boot that wrote them.
func (l *landing) encodeBits() []byte {
	data := append(l.header(), l.bitmap...)
	for i := range l.written {
		whole := byte(0)
		if l.written[i] == l.length(i) {
			whole = 1
		}
		data = append(data, whole)
	}
	return data
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
	bitmap  []byte // bit i: segment i is on the drive
	written []byte // 1: segment i was written by a process of this boot
}

// decodeBits reads a bitmap file. Errors wrap artifact.ErrInvalid.
func decodeBits(data []byte, sha artifact.Digest, size int64) (b bitsFile, err error) {
	if len(data) < bitsHeader || string(data[:len(bitsMagic)]) != bitsMagic {
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
	n := (size + b.segment - 1) / b.segment
	rest := data[bitsHeader:]
	if int64(len(rest)) != (n+7)/8+n {
		return b, fmt.Errorf("decode bitmap: %w: %d bytes for %d segments", artifact.ErrInvalid, len(rest), n)
	}
	b.bitmap, b.written = rest[:(n+7)/8], rest[(n+7)/8:]
	return b, nil
}
