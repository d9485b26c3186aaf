package segment

import (
	"errors"
	"fmt"
	"io"

	"github.com/zeebo/xxh3"
)

// reader understands one segment's file. It changes nothing; the memory it reads
// into begins on a page.
type reader struct {
	file    io.ReaderAt
	tenant  [16]byte
	number  uint32
	size    int64
	largest int64 // pages that a record can have
	window  []byte

	at, have int64 // what the window holds, in pages
}

// windowBytes is what a scan reads at once.
const windowBytes = 1 << 20

// probe is what a segment says of itself.
type probe struct {
	incarnation uint64 // 0: it holds nothing
	seq         uint64 // what its header or trailer says
	trailer     trailer
	footer      bool // there is a trailer of the incarnation
	// unreadable says why a segment that may hold something does not say what.
	unreadable error
}

// read fills p, twice where that fails at first.
func (r *reader) read(p []byte, off int64) error {
	var err error
	for range 2 {
		var n int
		if n, err = r.file.ReadAt(p, off); n == len(p) {
			return nil
		}
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
	}
	return err
}

// page gives a page, and reads more pages than that where they follow.
func (r *reader) page(n, most int64) ([]byte, error) {
	if n < r.at || n >= r.at+r.have {
		r.have = 0
		pages := max(1, min(most, int64(len(r.window))/PageSize, r.size/PageSize-n))
		if err := r.read(r.window[:pages*PageSize], n*PageSize); err != nil {
			if pages == 1 {
				return nil, err
			}
			return r.page(n, 1)
		}
		r.at, r.have = n, pages
	}
	return r.window[(n-r.at)*PageSize:][:PageSize], nil
}

// probe reads header and trailer. Of the two and the first record any one may be
// damaged. The error wraps ErrNewer, and is nil else.
func (r *reader) probe() (p probe, err error) {
	r.have = 0
	head, headErr := r.page(0, 1)
	headed := false
	if headErr == nil {
		h, err := decodeHeader(head)
		switch {
		case errors.Is(err, ErrNewer):
			return p, err
		case err == nil && (h.tenant != r.tenant || h.number != r.number || h.size != r.size):
			// Nothing of it is ours, and what was here is gone: perhaps tombstones.
			p.unreadable = fmt.Errorf("%w: the segment is another's", errFormat)
			return p, nil
		case err == nil:
			headed, p.incarnation, p.seq = true, h.incarnation, h.seq
		}
	}
	last, lastErr := r.page(r.size/PageSize-1, 1)
	if lastErr == nil {
		if t, err := decodeTrailer(last, r.size); err == nil && (!headed || t.incarnation == p.incarnation) {
			p.incarnation, p.seq, p.trailer, p.footer = t.incarnation, t.seq, t, true
		}
	}
	if headed || p.footer {
		return p, nil
	}
	first, firstErr := r.page(1, 1)
	if firstErr == nil {
		if rec, err := decodeRecord(first); err == nil {
			p.incarnation, p.seq = rec.incarnation, rec.seq
			return p, nil
		}
	}
	p.unreadable = errors.Join(headErr, lastErr, firstErr)
	return p, nil
}

// contents is what a segment holds.
type contents struct {
	entries []entry
	seq     uint64 // no record has a greater one
	scanned bool   // there is no footer that says so
	// doubt says why there may be more than was found.
	doubt error
}

// load reads what a segment holds, from its footer or, without a right one, from
// its records.
func (r *reader) load(p probe) contents {
	if p.incarnation == 0 {
		return contents{}
	}
	if p.footer {
		if list, err := r.footer(p.trailer); err == nil {
			return contents{entries: list, seq: p.seq}
		}
	}
	return r.scan(p)
}

// footer reads the entries of a footer.
func (r *reader) footer(t trailer) ([]entry, error) {
	p := r.window
	if need := r.size - t.offset; need > int64(len(p)) {
		more, free, err := newPages(need)
		if err != nil {
			return nil, err
		}
		defer free()
		p = more
	} else {
		r.have = 0
		p = p[:need]
	}
	if err := r.read(p, t.offset); err != nil {
		return nil, err
	}
	p = p[:t.entries*entryBytes]
	if xxh3.Hash128(p).Bytes() != t.sum {
		return nil, fmt.Errorf("%w: checksum of a footer", errFormat)
	}
	return entriesOf(p, t.offset/PageSize)
}

// scan finds records from page 1 on. Behind one that is not right the next may
// lie, so it looks as far ahead as the largest record reaches.
func (r *reader) scan(p probe) contents {
	c := contents{seq: p.seq, scanned: true}
	pages := r.size / PageSize
	for page, gap, most := int64(1), int64(0), int64(1); page < pages && gap <= r.largest; {
		n := int64(0)
		data, err := r.page(page, most)
		if err != nil {
			c.doubt = err
		} else {
			n = c.take(data, page, pages, p.incarnation)
		}
		switch {
		case n == 0:
			gap, most, n = gap+1, windowBytes/PageSize, 1
		case n > 1:
			gap, most = 0, 1 // the next header lies elsewhere
		default:
			gap, most = 0, min(2*most, windowBytes/PageSize)
		}
		page += n
	}
	return c
}

// take adds the record that begins on a page and gives its pages, 0 for none.
func (c *contents) take(data []byte, page, pages int64, incarnation uint64) int64 {
	rec, err := decodeRecord(data)
	if err != nil || rec.incarnation != incarnation {
		return 0
	}
	n := pagesOf(rec.kind, rec.flags, rec.length)
	if page+n > pages {
		return 0
	}
	if rec.kind == kindBlock {
		c.entries = append(c.entries, entryOf(rec, uint32(page)))
	} else {
		list, err := decodeTombstones(data, rec)
		if err != nil {
			return 0
		}
		for _, t := range list {
			c.entries = append(c.entries, tombstoneEntry(t, uint32(page), len(list)))
		}
	}
	c.seq = max(c.seq, rec.seq)
	return n
}

// encoded is entries as a footer has them.
func encoded(list []entry) []byte {
	p := make([]byte, 0, len(list)*entryBytes)
	for _, e := range list {
		p = appendEntry(p, e)
	}
	return p
}
