package segment

import (
	"fmt"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/kvtier/block"
)

// entry is a line of a footer: a block, or one tombstone.
type entry struct {
	page        uint32 // of the record
	kind, flags byte
	seq         uint64 // of the record; of a tombstone up to which it voids
	namespace   block.Namespace
	key         block.Key
	length      uint32 // of the block; of the record's tombstones their number
	sum         [16]byte
}

func entryOf(r recordHeader, page uint32) entry {
	return entry{page: page, kind: r.kind, flags: r.flags, seq: r.seq, namespace: r.namespace, key: r.key, length: r.length, sum: r.sum}
}

// tombstoneEntry is the entry of one tombstone of a record of n.
func tombstoneEntry(t Tombstone, page uint32, n int) entry {
	return entry{page: page, kind: kindTombstones, flags: flagInline, seq: t.Upto, namespace: t.Namespace, key: t.Key, length: uint32(n)}
}

func (e entry) tombstone() Tombstone {
	return Tombstone{Namespace: e.namespace, Key: e.key, Upto: e.seq}
}

// record is a block's entry as callers see it.
func (e entry) record(loc Loc) Record {
	return Record{Namespace: e.namespace, Key: e.key, Size: e.length, Sum: e.sum, Seq: e.seq, Loc: loc}
}

// appendEntry appends an entry of a footer.
func appendEntry(to []byte, e entry) []byte {
	var p [entryBytes]byte
	le.PutUint32(p[0:], e.page)
	p[4], p[5] = e.kind, e.flags
	le.PutUint64(p[8:], e.seq)
	copy(p[16:], e.namespace[:])
	copy(p[32:], e.key.Hash[:])
	le.PutUint32(p[64:], e.key.Group)
	le.PutUint32(p[68:], e.length)
	copy(p[72:], e.sum[:])
	return append(to, p[:]...)
}

// decodeEntry reads an entry. Errors wrap errFormat.
func decodeEntry(p []byte) (e entry, err error) {
	if len(p) < entryBytes {
		return e, fmt.Errorf("%w: no entry", errFormat)
	}
	e = entry{page: le.Uint32(p), kind: p[4], flags: p[5], seq: le.Uint64(p[8:]), length: le.Uint32(p[68:])}
	copy(e.namespace[:], p[16:])
	copy(e.key.Hash[:], p[32:])
	e.key.Group = le.Uint32(p[64:])
	copy(e.sum[:], p[72:])
	if le.Uint16(p[6:]) != 0 || le.Uint64(p[88:]) != 0 || !validRecord(e.kind, e.flags, e.length) {
		return e, fmt.Errorf("%w: an entry of kind %d with flags %d and length %d", errFormat, e.kind, e.flags, e.length)
	}
	return e, nil
}

// entriesOf reads the entries of a footer, each on a later page than the one
// before, or on its page where both are tombstones, and all within pages 1 to
// end. Errors wrap errFormat.
func entriesOf(p []byte, end int64) ([]entry, error) {
	if len(p)%entryBytes != 0 {
		return nil, fmt.Errorf("%w: %d bytes are no entries", errFormat, len(p))
	}
	list := make([]entry, 0, len(p)/entryBytes)
	next, last := int64(1), uint32(0)
	for ; len(p) > 0; p = p[entryBytes:] {
		e, err := decodeEntry(p)
		if err != nil {
			return nil, err
		}
		same := e.page == last && e.kind == kindTombstones && len(list) > 0 && list[len(list)-1].kind == kindTombstones
		if int64(e.page) < next && !same {
			return nil, fmt.Errorf("%w: entries of pages %d and %d", errFormat, last, e.page)
		}
		if next, last = int64(e.page)+pagesOf(e.kind, e.flags, e.length), e.page; next > end {
			return nil, fmt.Errorf("%w: an entry of page %d", errFormat, e.page)
		}
		list = append(list, e)
	}
	return list, nil
}

// trailer is the end of a footer, and of its file.
type trailer struct {
	entries     int
	incarnation uint64
	offset      int64 // of the first entry in the file
	sum         [16]byte
	seq         uint64 // of the last record, and no smaller than any other's
}

// footerPages is how many pages a footer of n entries has.
func footerPages(n int) int64 {
	return roundUp(int64(n)*entryBytes+trailerBytes) / PageSize
}

// encodeFooter fills whole pages at the end of a segment of size bytes.
func encodeFooter(p []byte, entries []byte, size int64, incarnation, seq uint64) {
	clear(p)
	copy(p, entries)
	t := p[len(p)-trailerBytes:]
	copy(t, trailerMagic)
	le.PutUint32(t[4:], uint32(len(entries)/entryBytes))
	le.PutUint64(t[8:], incarnation)
	le.PutUint64(t[16:], uint64(size-int64(len(p))))
	sum := xxh3.Hash128(entries).Bytes()
	copy(t[24:], sum[:])
	le.PutUint64(t[40:], seq)
	le.PutUint64(t[56:], xxh3.Hash(t[:56]))
}

// decodeTrailer reads the last bytes of a segment of size bytes. Errors wrap
// errFormat.
func decodeTrailer(p []byte, size int64) (t trailer, err error) {
	if len(p) < trailerBytes {
		return t, fmt.Errorf("%w: no trailer", errFormat)
	}
	p = p[len(p)-trailerBytes:]
	if string(p[:4]) != trailerMagic || le.Uint64(p[56:]) != xxh3.Hash(p[:56]) || le.Uint64(p[48:]) != 0 {
		return t, fmt.Errorf("%w: no trailer", errFormat)
	}
	n := le.Uint32(p[4:])
	t = trailer{entries: int(n), incarnation: le.Uint64(p[8:]), offset: int64(le.Uint64(p[16:])), seq: le.Uint64(p[40:])}
	copy(t.sum[:], p[24:])
	if int64(n) > size/PageSize*maxTombstones || t.incarnation == 0 || t.offset != size-footerPages(t.entries)*PageSize || t.offset < PageSize {
		return t, fmt.Errorf("%w: a trailer of %d entries from %d on", errFormat, n, t.offset)
	}
	return t, nil
}
