package segment

import (
	"context"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/kvtier/block"
)

// Read reads a block into buf, which has as many whole pages as the block needs,
// or just its length. Memory that begins on a page is read into; other memory is
// copied to. What of buf is behind the block is zero or as it was. The bytes are
// those that were written under the name, whatever loc says: errors wrap ErrGone
// where the segment was reused, ErrDamaged, or ctx's cause. The record says how
// long the block is, which the caller compares with what it expects.
func (l *Log) Read(ctx context.Context, loc Loc, namespace block.Namespace, key block.Key, buf []byte) (Record, error) {
	s, incarnation, err := l.ref(ctx, loc)
	if err != nil {
		return Record{}, fmt.Errorf("read block: %w", err)
	}
	r, err := l.readInto(s, incarnation, loc, buf)
	l.unref(s)
	if err != nil {
		err = l.unlessGone(ctx, loc, err)
	}
	if err == nil && (r.Namespace != namespace || r.Key != key) {
		err = fmt.Errorf("%w: it is of another name", ErrDamaged)
	}
	if err != nil {
		if errors.Is(err, ErrDamaged) {
			l.count(func(s *Stats) { s.Damaged++ })
		}
		return Record{}, fmt.Errorf("read block: %w", err)
	}
	return r, nil
}

// Stat reads what a record says of itself, and not its block. Errors are those of
// Read.
func (l *Log) Stat(ctx context.Context, loc Loc, namespace block.Namespace, key block.Key) (Record, error) {
	s, incarnation, err := l.ref(ctx, loc)
	if err != nil {
		return Record{}, fmt.Errorf("read block's header: %w", err)
	}
	r, err := l.stat(s, incarnation, loc)
	l.unref(s)
	if err != nil {
		err = l.unlessGone(ctx, loc, err)
	}
	if err == nil && (r.namespace != namespace || r.key != key) {
		err = fmt.Errorf("%w: it is of another name", ErrDamaged)
	}
	if err != nil {
		if errors.Is(err, ErrDamaged) {
			l.count(func(s *Stats) { s.Damaged++ })
		}
		return Record{}, fmt.Errorf("read block's header: %w", err)
	}
	return entryOf(r, loc.Page()).record(loc), nil
}

// unlessGone gives the error of a read, ErrGone where the segment was about to end
// meanwhile, once it has. Before that is durable nobody is told that it is gone.
func (l *Log) unlessGone(ctx context.Context, loc Loc, err error) error {
	d := l.drives[loc.Drive()]
	l.mu.Lock()
	s := l.atLocked(loc)
	ending := s != nil && s.ending
	l.mu.Unlock()
	if ending {
		if err := take(ctx, d.turn); err != nil {
			return err
		}
		l.mu.Lock()
		s = l.atLocked(loc)
		l.mu.Unlock()
		give(d.turn)
	}
	if s == nil {
		l.count(func(s *Stats) { s.Gone++ })
		return ErrGone
	}
	return err
}

func (l *Log) stat(s *segment, incarnation uint64, loc Loc) (recordHeader, error) {
	page, err := l.pages.take()
	if err != nil {
		return recordHeader{}, err
	}
	defer l.pages.give(page)
	if _, err := durable.ReadVAt(s.file, [][]byte{page}, int64(loc.Page())*PageSize); err != nil {
		return recordHeader{}, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return l.understand(page, incarnation)
}

// Pin keeps a record where it is, as far as the log goes, until release, which
// may be called more than once. Not ok where it is gone or about to go.
func (l *Log) Pin(loc Loc) (release func(), ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.atLocked(loc)
	if s == nil || s.ending {
		return nil, false
	}
	s.pins++
	held := true
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if held {
			held = false
			s.pins--
		}
	}, true
}

// atLocked is the segment that a Loc is in, nil where that was reused.
func (l *Log) atLocked(loc Loc) *segment {
	if l.closed || int(loc.Drive()) >= len(l.drives) {
		return nil
	}
	s := l.drives[loc.Drive()].segments[loc.Segment()]
	if s == nil || s.state == free || mark(s.incarnation) != loc.mark() || loc.Page() == 0 {
		return nil
	}
	return s
}

// ref takes a place among the reads of a drive and keeps a segment from being
// reused.
func (l *Log) ref(ctx context.Context, loc Loc) (*segment, uint64, error) {
	if int(loc.Drive()) >= len(l.drives) {
		l.count(func(s *Stats) { s.Gone++ })
		return nil, 0, ErrGone
	}
	d := l.drives[loc.Drive()]
	if err := take(ctx, d.depth); err != nil {
		return nil, 0, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.atLocked(loc)
	if s == nil {
		l.stats.Gone++
		give(d.depth)
		return nil, 0, ErrGone
	}
	s.refs++
	return s, s.incarnation, nil
}

func (l *Log) unref(s *segment) {
	give(s.drive.depth)
	l.mu.Lock()
	defer l.mu.Unlock()
	s.unrefLocked()
}

// readInto reads and verifies the record at a Loc, in one call of the system.
func (l *Log) readInto(s *segment, incarnation uint64, loc Loc, buf []byte) (Record, error) {
	page, err := l.pages.take()
	if err != nil {
		return Record{}, err
	}
	defer l.pages.give(page)
	at := int64(loc.Page()) * PageSize
	room := roundUp(int64(len(buf)))
	to := buf
	if l.opts.AEAD != nil || int64(len(buf)) < room || !aligned(buf) {
		if to, err = l.payload.take(); err != nil {
			return Record{}, err
		}
		defer l.payload.give(to)
		room = roundUp(int64(len(buf)) + tagBytes)
	}
	if room = min(room, l.size-at-PageSize); room <= 0 || room > int64(cap(to)) {
		return Record{}, fmt.Errorf("%w: a block of %d bytes cannot be at page %d", ErrDamaged, len(buf), loc.Page())
	}
	to = to[:room]
	if _, err := durable.ReadVAt(s.file, [][]byte{page, to}, at); err != nil {
		return Record{}, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	h, err := l.understand(page, incarnation)
	if err != nil {
		return Record{}, err
	}
	if roundUp(int64(h.length)) != roundUp(int64(len(buf))) || int(h.length) > len(buf) {
		return Record{}, fmt.Errorf("%w: its block has %d bytes, not about %d", ErrDamaged, h.length, len(buf))
	}
	data, err := l.verify(h, page, to)
	if err != nil {
		return Record{}, err
	}
	if &data[0] != &buf[0] {
		copy(buf, data)
		clear(buf[len(data):])
	}
	return entryOf(h, loc.Page()).record(loc), nil
}

// understand decodes a record's header and says whether it is of an incarnation.
func (l *Log) understand(page []byte, incarnation uint64) (recordHeader, error) {
	h, err := decodeRecord(page)
	switch {
	case err != nil:
		return h, fmt.Errorf("%w: %w", ErrDamaged, err)
	case h.incarnation != incarnation:
		return h, fmt.Errorf("%w: it is of another incarnation", ErrDamaged)
	case h.kind != kindBlock:
		return h, fmt.Errorf("%w: it is no block", ErrDamaged)
	}
	return h, nil
}

// verify gives the bytes of a block, in its header's page or behind it, if they
// are those that were written.
func (l *Log) verify(h recordHeader, page, behind []byte) ([]byte, error) {
	data, err := l.open(h, page, behind)
	if err == nil && xxh3.Hash128(data).Bytes() != h.sum {
		err = fmt.Errorf("%w: checksum of its block", ErrDamaged)
	}
	return data, err
}

// open gives the bytes of a block as they were before encryption.
func (l *Log) open(h recordHeader, page, behind []byte) ([]byte, error) {
	n := stored(h.length, h.flags)
	data := behind
	if h.flags&flagInline != 0 {
		data = page[recordBytes:]
	}
	if n > int64(len(data)) {
		return nil, fmt.Errorf("%w: it ends early", ErrDamaged)
	}
	data = data[:n]
	encrypted := h.flags&flagEncrypted != 0
	if encrypted != (l.opts.AEAD != nil) {
		return nil, fmt.Errorf("%w: %w", ErrDamaged, errKey)
	}
	if !encrypted {
		return data, nil
	}
	data, err := l.opts.AEAD.Open(data[:0], h.nonce[:], data, page[:authenticated])
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return data, nil
}

var errKey = errors.New("it is encrypted where it must not be, or is not where it must")
