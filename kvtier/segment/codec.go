package segment

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/kvtier/block"
)

// Version is the version of the format that is written.
const Version = 1

// Sizes of the format, in bytes.
const (
	PageSize = 4096
	// MinSize and MaxSize bound a segment that the log chooses the size of.
	MinSize = 4 << 20
	MaxSize = 256 << 20
	// leastSize bounds what is read at all.
	leastSize = 16 * PageSize

	headerBytes    = 64
	recordBytes    = 128 // of a record's header
	inlineBytes    = PageSize - recordBytes
	entryBytes     = 96
	trailerBytes   = 64
	tombstoneBytes = 60
	// maxTombstones is how many fit a record.
	maxTombstones = inlineBytes / tombstoneBytes
	tagBytes      = 16 // of an encrypted payload
	nonceBytes    = 12
	authenticated = 96 // bytes of a record's header that its encryption covers
)

const (
	segmentMagic = "HRTHKVS1"
	recordMagic  = "KVR1"
	trailerMagic = "KVF1"
)

// Kinds of records.
const (
	kindBlock      = 1
	kindTombstones = 2
)

// Flags of records.
const (
	flagInline    = 1 // the payload is in the header's page
	flagEncrypted = 2
)

var (
	le = binary.LittleEndian
	// errFormat is wrapped by what the decoders refuse.
	errFormat = errors.New("not as the format says")
)

// header is a segment's first page.
type header struct {
	number      uint32
	tenant      [16]byte
	size        int64
	incarnation uint64
	seq         uint64 // of the first record that can be in it
}

// encode fills a page.
func (h header) encode(p []byte) {
	clear(p[:PageSize])
	copy(p, segmentMagic)
	le.PutUint32(p[8:], Version)
	le.PutUint32(p[12:], h.number)
	copy(p[16:], h.tenant[:])
	le.PutUint64(p[32:], uint64(h.size))
	le.PutUint64(p[40:], h.incarnation)
	le.PutUint64(p[48:], h.seq)
	le.PutUint64(p[56:], xxh3.Hash(p[:56]))
}

// decodeHeader reads a segment's header. Errors wrap ErrNewer or errFormat. Every
// version keeps magic, version and checksum where they are.
func decodeHeader(p []byte) (h header, err error) {
	const family = len(segmentMagic) - 1
	if len(p) < headerBytes || string(p[:family]) != segmentMagic[:family] || le.Uint64(p[56:]) != xxh3.Hash(p[:56]) {
		return h, fmt.Errorf("%w: no segment's header", errFormat)
	}
	version := le.Uint32(p[8:])
	if version > Version || p[family] > segmentMagic[family] {
		return h, fmt.Errorf("%w: %q version %d, this code knows %d", ErrNewer, p[:family+1], version, Version)
	}
	h = header{number: le.Uint32(p[12:]), size: int64(le.Uint64(p[32:])), incarnation: le.Uint64(p[40:]), seq: le.Uint64(p[48:])}
	copy(h.tenant[:], p[16:])
	if version < 1 || p[family] < segmentMagic[family] || !validSize(h.size) || h.incarnation == 0 {
		return h, fmt.Errorf("%w: a segment's header of version %d for %d bytes", errFormat, version, h.size)
	}
	return h, nil
}

// validSize says whether a segment may have that size.
func validSize(size int64) bool {
	return size >= leastSize && size <= MaxSize && size&(size-1) == 0
}

// recordHeader is what is before a record's payload.
type recordHeader struct {
	kind, flags byte
	incarnation uint64
	seq         uint64
	namespace   block.Namespace
	key         block.Key
	length      uint32 // of the block, in bytes; the number of tombstones
	sum         [16]byte
	nonce       [nonceBytes]byte
}

// encode fills the first 128 bytes of a record's first page.
func (r recordHeader) encode(p []byte) {
	clear(p[:recordBytes])
	copy(p, recordMagic)
	p[4], p[5] = r.kind, r.flags
	le.PutUint64(p[8:], r.incarnation)
	le.PutUint64(p[16:], r.seq)
	copy(p[24:], r.namespace[:])
	copy(p[40:], r.key.Hash[:])
	le.PutUint32(p[72:], r.key.Group)
	le.PutUint32(p[76:], r.length)
	copy(p[80:], r.sum[:])
	copy(p[96:], r.nonce[:])
	le.PutUint64(p[120:], xxh3.Hash(p[:120]))
}

// decodeRecord reads a record's header. Errors wrap errFormat.
func decodeRecord(p []byte) (r recordHeader, err error) {
	if len(p) < recordBytes || string(p[:4]) != recordMagic || le.Uint64(p[120:]) != xxh3.Hash(p[:120]) {
		return r, fmt.Errorf("%w: no record's header", errFormat)
	}
	r = recordHeader{kind: p[4], flags: p[5], incarnation: le.Uint64(p[8:]), seq: le.Uint64(p[16:]), length: le.Uint32(p[76:])}
	copy(r.namespace[:], p[24:])
	copy(r.key.Hash[:], p[40:])
	r.key.Group = le.Uint32(p[72:])
	copy(r.sum[:], p[80:])
	copy(r.nonce[:], p[96:])
	if le.Uint16(p[6:]) != 0 || le.Uint32(p[108:]) != 0 || le.Uint64(p[112:]) != 0 || !validRecord(r.kind, r.flags, r.length) {
		return r, fmt.Errorf("%w: a record of kind %d with flags %d and length %d", errFormat, r.kind, r.flags, r.length)
	}
	return r, nil
}

// validRecord says whether a record may be so.
func validRecord(kind, flags byte, length uint32) bool {
	switch kind {
	case kindBlock:
		if flags&^(flagInline|flagEncrypted) != 0 || length < block.MinSize || length > block.MaxSize {
			return false
		}
		return flags&flagInline != 0 == (stored(length, flags) <= inlineBytes)
	case kindTombstones:
		return flags == flagInline && length >= 1 && length <= maxTombstones
	}
	return false
}

// stored is the length of a block's payload on the drive, in bytes.
func stored(length uint32, flags byte) int64 {
	if flags&flagEncrypted != 0 {
		return int64(length) + tagBytes
	}
	return int64(length)
}

// blockFlags are the flags of a block.
func blockFlags(length uint32, encrypted bool) (flags byte) {
	if encrypted {
		flags = flagEncrypted
	}
	if stored(length, flags) <= inlineBytes {
		flags |= flagInline
	}
	return flags
}

// pagesOf is how many pages a record has.
func pagesOf(kind, flags byte, length uint32) int64 {
	if kind == kindTombstones || flags&flagInline != 0 {
		return 1
	}
	return 1 + roundUp(stored(length, flags))/PageSize
}

// roundUp is n as whole pages, in bytes.
func roundUp(n int64) int64 { return (n + PageSize - 1) &^ (PageSize - 1) }

// nonceOf is the nonce of a record: no page of an incarnation is written twice.
func nonceOf(incarnation uint64, page uint32) (n [nonceBytes]byte) {
	le.PutUint64(n[:], incarnation)
	le.PutUint32(n[8:], page)
	return n
}

// encodeTombstones fills a page with a record of tombstones.
func encodeTombstones(p []byte, incarnation, seq uint64, list []Tombstone) {
	clear(p[:PageSize])
	for i, t := range list {
		e := p[recordBytes+i*tombstoneBytes:]
		copy(e, t.Namespace[:])
		copy(e[16:], t.Key.Hash[:])
		le.PutUint32(e[48:], t.Key.Group)
		le.PutUint64(e[52:], t.Upto)
	}
	recordHeader{
		kind: kindTombstones, flags: flagInline, incarnation: incarnation, seq: seq, length: uint32(len(list)),
		sum: xxh3.Hash128(p[recordBytes : recordBytes+len(list)*tombstoneBytes]).Bytes(),
	}.encode(p)
}

// decodeTombstones reads the tombstones of a record's page. Errors wrap errFormat.
func decodeTombstones(p []byte, r recordHeader) ([]Tombstone, error) {
	end := recordBytes + int(r.length)*tombstoneBytes
	if r.kind != kindTombstones || len(p) < end {
		return nil, fmt.Errorf("%w: no tombstones", errFormat)
	}
	if xxh3.Hash128(p[recordBytes:end]).Bytes() != r.sum {
		return nil, fmt.Errorf("%w: checksum of tombstones", errFormat)
	}
	list := make([]Tombstone, r.length)
	for i := range list {
		e := p[recordBytes+i*tombstoneBytes:]
		copy(list[i].Namespace[:], e)
		copy(list[i].Key.Hash[:], e[16:])
		list[i].Key.Group = le.Uint32(e[48:])
		list[i].Upto = le.Uint64(e[52:])
	}
	return list, nil
}
