package segment

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
)

// reclaim makes the oldest segment of a drive free that nobody pins. What it keeps
// is written anew first, up to half a segment, and leaves some pages of the one
// that is filled. Only when nothing of it can come back any more is the caller
// told what went. With appends.
func (l *Log) reclaim(ctx context.Context, d *drive, keep bool, reserve int64) error {
	s, older := d.victim()
	if s == nil {
		return ErrFull
	}
	err := l.reclaimOne(ctx, d, s, older, keep, reserve)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended, s.ending = nil, false
	return err
}

func (l *Log) reclaimOne(ctx context.Context, d *drive, s *segment, older, keep bool, reserve int64) error {
	entries, err := d.entries(s)
	if err != nil {
		if older {
			// It may have tombstones that others need.
			l.mu.Lock()
			s.broken = true
			l.mu.Unlock()
			return fmt.Errorf("reclaim segment: %w", err)
		}
		l.log.Warn("a segment is reused without knowing what it has", slog.String("path", s.path), slog.Any("error", err))
	}
	var blocks []Record
	var stones []Tombstone
	for _, e := range entries {
		if e.kind == kindBlock {
			blocks = append(blocks, e.record(NewLoc(d.number, s.number, e.page, s.incarnation)))
		} else if older {
			stones = append(stones, e.tombstone())
		}
	}
	moved, err := l.moveAll(ctx, d, s, blocks, stones, keep, reserve)
	if err != nil {
		return fmt.Errorf("reclaim segment: %w", err)
	}
	stayed := map[Loc]bool{}
	for _, m := range moved {
		stayed[m.from.Loc] = true
		if l.opts.Moved != nil {
			l.opts.Moved(m.from, m.to)
		}
	}
	// Copies that nobody was told of are ended before those that are known, or right
	// after where that takes the room of these.
	if err = d.pay(ctx); err == nil || errors.Is(err, errNoFree) {
		err = l.endSegment(ctx, d, s)
	}
	if err != nil {
		// The old ones stay, and are not to outlive those that the caller knows.
		d.owe(moved, func(m move) Record { return m.from })
		return fmt.Errorf("reclaim segment: %w", err)
	}
	if err := d.pay(ctx); err != nil {
		l.log.Warn("tombstones are still to be written", slog.String("dir", d.dir), slog.Any("error", err))
	}
	l.count(func(s *Stats) {
		s.Reclaimed++
		s.Moved += int64(len(moved))
		s.Dropped += int64(len(blocks) - len(moved))
	})
	if l.opts.Dropped != nil {
		for _, b := range blocks {
			if !stayed[b.Loc] {
				l.opts.Dropped(b)
			}
		}
	}
	return nil
}

// victim chooses the segment to be reclaimed, and says whether an older one is
// left that its tombstones may be about. From now on keys that end are noted, and
// nobody pins it any more.
func (d *drive) victim() (found *segment, older bool) {
	l := d.log
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range d.segments {
		if s.state == free || s.state == filling || s.pins > 0 || s.lost {
			continue
		}
		// One that could not be ended is tried again where there is no other.
		if found == nil || s.broken != found.broken && found.broken || s.broken == found.broken && s.incarnation < found.incarnation {
			found = s
		}
	}
	if found == nil {
		return nil, false
	}
	for _, s := range d.segments {
		older = older || s.state != free && s.incarnation < found.incarnation
	}
	l.ended, found.ending = map[name]struct{}{}, true
	return found, older
}

// entries reads what a segment has.
func (d *drive) entries(s *segment) ([]entry, error) {
	r, done, err := d.reader(s)
	if err != nil {
		return nil, err
	}
	defer done()
	p, err := r.probe()
	switch {
	case err != nil:
		return nil, err
	case p.unreadable != nil:
		return nil, p.unreadable
	case p.incarnation != s.incarnation:
		return nil, fmt.Errorf("%w: it says that it is of another incarnation", ErrDamaged)
	}
	c := r.load(p)
	return c.entries, c.doubt
}

// move is a block that lies elsewhere now.
type move struct{ from, to Record }

// moveAll writes anew what is kept of a segment, tombstones first, and makes it
// durable.
func (l *Log) moveAll(ctx context.Context, d *drive, s *segment, blocks []Record, stones []Tombstone, keep bool, reserve int64) (moved []move, err error) {
	var kept []Record
	if keep && l.opts.Reclaim != nil && len(blocks) > 0 {
		for i, k := range l.opts.Reclaim(ctx, blocks) {
			if k && i < len(blocks) {
				kept = append(kept, blocks[i])
			}
		}
	}
	if len(stones) > 0 {
		if err := d.endAgain(ctx, stones); err != nil {
			return nil, err
		}
	}
	if len(kept) == 0 {
		return nil, nil
	}
	into := map[*segment]bool{}
	if moved, err = l.moveBlocks(ctx, d, s, kept, into, reserve); err == nil {
		err = d.secure(ctx, into)
	}
	if err != nil {
		d.owe(moved, func(m move) Record { return m.to })
		return nil, err
	}
	return moved, nil
}

// secure makes durable what was moved into segments.
func (d *drive) secure(ctx context.Context, into map[*segment]bool) error {
	l := d.log
	if err := take(ctx, d.turn); err != nil {
		return err
	}
	defer give(d.turn)
	for t := range into {
		if d.open != t {
			continue // it was sealed meanwhile, or is abandoned: then see below
		}
		if err := d.sync(t); err != nil {
			d.abandon(err, nil)
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for t := range into {
		if t.state == unsealed {
			return fmt.Errorf("%w: what was kept is in a segment that could not be sealed", ErrDamaged)
		}
	}
	return nil
}

// owe notes tombstones for records that are not to be found again.
func (d *drive) owe(moved []move, which func(move) Record) {
	if len(moved) == 0 {
		return
	}
	d.turn <- struct{}{}
	defer give(d.turn)
	d.log.mu.Lock()
	defer d.log.mu.Unlock()
	for _, m := range moved {
		r := which(m)
		d.owed = append(d.owed, Tombstone{Namespace: r.Namespace, Key: r.Key, Upto: r.Seq})
	}
}

// pay writes the tombstones that are owed.
func (d *drive) pay(ctx context.Context) error {
	if err := take(ctx, d.turn); err != nil {
		return err
	}
	owed := d.owed
	give(d.turn)
	if len(owed) == 0 {
		return nil
	}
	if err := d.endAgain(ctx, owed); err != nil {
		return err
	}
	if err := take(ctx, d.turn); err != nil {
		return err
	}
	defer give(d.turn)
	d.log.mu.Lock()
	defer d.log.mu.Unlock()
	d.owed = d.owed[min(len(owed), len(d.owed)):]
	return nil
}

// endAgain writes tombstones of a segment that goes, for the older ones that
// stay.
func (d *drive) endAgain(ctx context.Context, stones []Tombstone) error {
	for len(stones) > 0 {
		if err := take(ctx, d.turn); err != nil {
			return err
		}
		n := min(len(stones), maxBuried)
		pages := buriedPages(n)
		if d.open == nil || !d.open.fits(pages, n) {
			if err := d.rotate(ctx); err != nil {
				give(d.turn)
				return err
			}
		}
		err := d.bury(d.open, stones[:n])
		give(d.turn)
		if err != nil {
			return err
		}
		stones = stones[n:]
	}
	return nil
}

// moveBlocks reads blocks and writes them to the segment that is filled, while it
// has room and Spend lets it. Those that are damaged, and keys that ended
// meanwhile, stay behind.
func (l *Log) moveBlocks(ctx context.Context, d *drive, s *segment, kept []Record, into map[*segment]bool, reserve int64) (moved []move, err error) {
	budget := l.pagesOfSegment() / 2
	bytes := max(groupBytes, roundUp(int64(l.opts.LargestBlock)))
	memory, free, err := newPages(bytes)
	if err != nil {
		return nil, err
	}
	defer free()
	for len(kept) > 0 && budget > 0 {
		var writes []Write
		var from []Record
		at := int64(0)
		for len(kept) > 0 && len(writes) < groupBuffers/2 {
			r := kept[0]
			pages := pagesOf(kindBlock, blockFlags(r.Size, l.opts.AEAD != nil), r.Size)
			room := roundUp(int64(r.Size))
			if l.tooLarge(r.Size) {
				kept = kept[1:]
				continue
			}
			if pages > budget || at+room > int64(len(memory)) {
				break
			}
			kept = kept[1:]
			if err := ctx.Err(); err != nil {
				return moved, context.Cause(ctx)
			}
			buf := memory[at : at+room]
			got, err := l.readInto(s, s.incarnation, r.Loc, buf)
			if err != nil || got.Namespace != r.Namespace || got.Key != r.Key || got.Seq != r.Seq || got.Size != r.Size {
				l.count(func(s *Stats) { s.Damaged++ })
				continue
			}
			at += room
			budget -= pages
			writes = append(writes, Write{Namespace: r.Namespace, Key: r.Key, Data: buf, Size: r.Size, Sum: r.Sum})
			from = append(from, r)
		}
		if len(writes) == 0 {
			break
		}
		written, more, err := l.moveGroup(ctx, d, writes, into, reserve)
		for i, to := range written {
			if to.Loc != 0 {
				moved = append(moved, move{from[i], to})
			}
		}
		if err != nil || !more {
			return moved, err
		}
	}
	return moved, nil
}

// moveGroup writes blocks anew; not more where there is no room for them all or
// Spend says no.
func (l *Log) moveGroup(ctx context.Context, d *drive, writes []Write, into map[*segment]bool, reserve int64) (out []Record, more bool, err error) {
	out = make([]Record, len(writes))
	for i := 0; i < len(writes); {
		if err := take(ctx, d.turn); err != nil {
			return out, false, err
		}
		pages := pagesOf(kindBlock, blockFlags(writes[i].Size, l.opts.AEAD != nil), writes[i].Size)
		if d.open == nil || !d.open.fits(pages+reserve, 1) {
			give(d.turn)
			return out, false, nil
		}
		into[d.open] = true
		n, err := d.put(writes[i:], out[i:], true, reserve)
		give(d.turn)
		if errors.Is(err, ErrWear) {
			return out, false, nil
		}
		if err != nil {
			return out, false, err
		}
		i += n
	}
	return out, true, nil
}

// endSegment ends all records of a segment for good and makes it free. Until that
// is durable they can be read; from then on nothing of them comes back.
func (l *Log) endSegment(ctx context.Context, d *drive, s *segment) error {
	if err := take(ctx, d.turn); err != nil {
		return err
	}
	defer give(d.turn)
	incarnation, err := d.head(s)
	l.mu.Lock()
	if err != nil {
		s.broken = true
		l.mu.Unlock()
		d.failed(err)
		return err
	}
	s.state, s.fresh, s.incarnation, s.records = free, true, incarnation, 0
	l.mu.Unlock()
	return nil
}
