package segment

import (
	"context"
	"errors"
	"fmt"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/kvtier/block"
)

// Write is a block to be written.
type Write struct {
	Namespace block.Namespace
	Key       block.Key
	// Data begins with the block. It is written from where it lies if it begins on
	// a page of memory, and is copied else. What is behind the block is not
	// written.
	Data []byte
	Size uint32 // of the block, in bytes
	Sum  [16]byte
}

// Bounds of what one system call writes.
const (
	groupScratch = 1 << 20
	groupBytes   = 8 << 20
	groupBuffers = 256
	// copied is the largest payload that is copied to lie with its neighbours. Slots
	// of more have huge pages mostly, and are written faster from where they lie.
	copied = 32 << 10
)

// Append writes blocks and says where each lies, 0 where it was not written; then
// the error says why, and wraps ErrWear, ErrFull, ErrTooLarge, ErrNoDrive,
// ErrClosed or ctx's cause where it is one of these. What is written is read back
// at once, and survives the end of the process; a power cut may cost it until its
// segment is sealed. A second caller waits for the first.
func (l *Log) Append(ctx context.Context, writes []Write) ([]Loc, error) {
	locs := make([]Loc, len(writes))
	if len(writes) == 0 {
		return locs, nil
	}
	if err := l.enter(ctx); err != nil {
		return locs, fmt.Errorf("append blocks: %w", err)
	}
	defer give(l.appends)
	var errs []error
	left := false
	failures := map[*drive]int{}
	var d *drive
	for i := 0; i < len(writes); {
		if l.refuses(&writes[i]) {
			errs, left = append(errs, ErrTooLarge), true
			i++
			continue
		}
		if d == nil || failures[d] > 1 {
			if d = l.pick(failures); d == nil {
				errs, left = append(errs, ErrNoDrive), true
				break
			}
		}
		n, err := l.appendSome(ctx, d, writes[i:], locs[i:])
		i += n
		if err == nil {
			continue
		}
		errs = append(errs, err)
		if ctx.Err() != nil || errors.Is(err, ErrWear) {
			left = true
			break
		}
		failures[d]++
		if errors.Is(err, ErrFull) {
			failures[d]++
		}
	}
	if l.reused(locs) {
		errs, left = append(errs, fmt.Errorf("%w: more was written than the segments take", ErrFull)), true
	}
	if !left {
		return locs, nil // it was written in the end
	}
	return locs, fmt.Errorf("append blocks: %w", errors.Join(errs...))
}

// reused takes back where blocks lie whose segments were reused for what followed
// them, and says whether there are any.
func (l *Log) reused(locs []Loc) (found bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, loc := range locs {
		if loc != 0 && l.atLocked(loc) == nil {
			locs[i], found = 0, true
		}
	}
	return found
}

// refuses says whether a block cannot be written.
func (l *Log) refuses(w *Write) bool {
	return int(w.Size) > len(w.Data) || l.tooLarge(w.Size)
}

// Takes says whether a block of that many bytes can be written.
func (l *Log) Takes(size int) bool { return size <= block.MaxSize && !l.tooLarge(uint32(size)) }

// tooLarge says whether a block does not fit a segment.
func (l *Log) tooLarge(size uint32) bool {
	flags := blockFlags(size, l.opts.AEAD != nil)
	return size < block.MinSize || int(size) > l.opts.LargestBlock || 1+pagesOf(kindBlock, flags, size)+footerPages(1) > l.pagesOfSegment()
}

// pick gives the drive to be written next, nil where none will do: each in turn,
// and now and then one that is set aside.
func (l *Log) pick(failures map[*drive]int) *drive {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.drives {
		at := (l.next + i) % len(l.drives)
		d := l.drives[at]
		switch {
		case d.out || d.share == 0 || failures[d] > 1:
		case d.failures >= failuresBefore:
			if d.passed++; d.passed%passes == 0 {
				return d
			}
		default:
			l.next = at + 1
			return d
		}
	}
	return nil
}

// appendSome writes the first of the blocks, as many as one write takes, to a
// drive. It gives how many.
func (l *Log) appendSome(ctx context.Context, d *drive, writes []Write, locs []Loc) (int, error) {
	flags := blockFlags(writes[0].Size, l.opts.AEAD != nil)
	if err := l.makeRoom(ctx, d, pagesOf(kindBlock, flags, writes[0].Size)); err != nil {
		return 0, err
	}
	defer give(d.turn)
	out := make([]Record, len(writes))
	n, err := d.put(writes, out, false, 0)
	if err != nil {
		return 0, err
	}
	for i, r := range out[:n] {
		locs[i] = r.Loc
	}
	l.count(func(s *Stats) { s.Records += int64(n) })
	return n, nil
}

// makeRoom has a drive fill a segment that has room for a record, and takes its
// turn. While it can it keeps one segment free beside that, so that there is
// where to move what a reclaim keeps.
func (l *Log) makeRoom(ctx context.Context, d *drive, pages int64) error {
	l.shrink(ctx, d)
	keep := true
	for {
		if l.wantsSpare(d) {
			if err := l.reclaim(ctx, d, keep, pages); err != nil && ctx.Err() != nil {
				return err
			}
			keep = false // or what is kept might leave no room, again and again
		}
		if err := take(ctx, d.turn); err != nil {
			return err
		}
		if d.open != nil && d.open.fits(pages, 1) {
			return nil
		}
		err := d.rotate(ctx)
		give(d.turn)
		switch {
		case err == nil:
		case errors.Is(err, errNoFree):
			if err := l.reclaim(ctx, d, false, 0); err != nil {
				return err
			}
		default:
			return err
		}
	}
}

// wantsSpare says whether a drive fills a segment and has neither a free one nor
// may have another.
func (l *Log) wantsSpare(d *drive) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if d.open == nil || len(d.segments) < d.share && !d.full {
		return false
	}
	for _, s := range d.segments {
		if s.state == free && !s.broken {
			return false
		}
	}
	return true
}

// group is what one call writes.
type group struct {
	iov     [][]byte
	used    int64 // bytes of the scratch
	pages   int64
	entries []byte
	records []Record
	from    []int // which of the blocks each record is
}

// put writes the first of the blocks, as many as one call takes, and gives how
// many it dealt with: of a reclaim's those are left out that ended meanwhile, and
// reserve pages are left free. The
// drive fills a segment with room for the first; out has what was written. With
// appends and the turn.
func (d *drive) put(writes []Write, out []Record, moving bool, reserve int64) (int, error) {
	l := d.log
	s := d.open
	g, n := d.gather(s, writes, moving, reserve)
	if len(g.records) == 0 {
		return n, nil
	}
	if !l.spend(g.pages * PageSize) {
		return 0, ErrWear
	}
	if _, err := durable.WriteVAt(s.file, g.iov, s.next*PageSize); err != nil {
		unwritten := make([]Tombstone, len(g.records))
		for i, r := range g.records {
			unwritten[i] = Tombstone{Namespace: r.Namespace, Key: r.Key, Upto: r.Seq}
		}
		d.abandon(err, unwritten)
		return 0, err
	}
	d.worked()
	s.entries = append(s.entries, g.entries...)
	s.last = g.records[len(g.records)-1].Seq
	l.mu.Lock()
	s.next += g.pages
	s.records += len(g.records)
	l.mu.Unlock()
	for i, at := range g.from {
		out[at] = g.records[i]
	}
	return n, nil
}

// gather lays out what one call writes. n is how many of the blocks are dealt
// with.
func (d *drive) gather(s *segment, writes []Write, moving bool, reserve int64) (g group, n int) {
	l := d.log
	l.mu.Lock()
	first := l.seq + 1
	for ; n < len(writes) && n < groupBuffers/2; n++ {
		w := &writes[n]
		flags := blockFlags(w.Size, l.opts.AEAD != nil)
		pages := pagesOf(kindBlock, flags, w.Size)
		if _, ended := l.ended[name{w.Namespace, w.Key}]; moving && ended {
			continue
		}
		if l.refuses(w) {
			break
		}
		scratch := l.scratchFor(w, flags)
		if !s.fits(g.pages+pages+reserve, len(g.records)+1) ||
			g.pages > 0 && ((g.pages+pages)*PageSize > groupBytes || g.used+scratch > groupScratch) {
			break
		}
		g.used += scratch
		g.from = append(g.from, n)
		l.seq++
		g.records = append(g.records, Record{
			Namespace: w.Namespace, Key: w.Key, Size: w.Size, Sum: w.Sum, Seq: l.seq,
			Loc: NewLoc(d.number, s.number, uint32(s.next+g.pages), s.incarnation),
		})
		g.pages += pages
	}
	if moving && l.seq >= first {
		l.moved = l.seq
	}
	l.mu.Unlock()
	g.used = 0
	for i, at := range g.from {
		l.layOut(&g, &writes[at], g.records[i], s.incarnation)
	}
	return g, n
}

// scratchFor is what a block takes of the scratch, in bytes.
func (l *Log) scratchFor(w *Write, flags byte) int64 {
	pages := pagesOf(kindBlock, flags, w.Size) * PageSize
	if !l.inPlace(w, flags) {
		return pages
	}
	return min(pages, 2*PageSize) // header, and the payload's last page
}

// inPlace says whether a block is written from where it lies.
func (l *Log) inPlace(w *Write, flags byte) bool {
	return flags&(flagInline|flagEncrypted) == 0 && w.Size > copied && aligned(w.Data)
}

// layOut adds a block to a group.
func (l *Log) layOut(g *group, w *Write, r Record, incarnation uint64) {
	flags := blockFlags(w.Size, l.opts.AEAD != nil)
	page := r.Loc.Page()
	h := recordHeader{
		kind: kindBlock, flags: flags, incarnation: incarnation, seq: r.Seq,
		namespace: w.Namespace, key: w.Key, length: w.Size, sum: w.Sum,
	}
	if l.opts.AEAD != nil {
		h.nonce = nonceOf(incarnation, page)
	}
	data := w.Data[:w.Size]
	if l.inPlace(w, flags) {
		p := g.take(l.scratch, PageSize)
		h.encode(p)
		whole := len(data) &^ (PageSize - 1)
		g.iov = append(g.iov, data[:whole])
		if whole < len(data) {
			p := g.take(l.scratch, PageSize)
			copy(p, data[whole:])
		}
	} else {
		p := g.take(l.scratch, pagesOf(kindBlock, flags, w.Size)*PageSize)
		h.encode(p)
		at := p[PageSize:]
		if flags&flagInline != 0 {
			at = p[recordBytes:]
		}
		if l.opts.AEAD != nil {
			l.opts.AEAD.Seal(at[:0], h.nonce[:], data, p[:authenticated])
		} else {
			copy(at, data)
		}
	}
	g.entries = appendEntry(g.entries, entryOf(h, page))
}

// take adds zeroed bytes of the scratch to a group, to what it took last where
// nothing lies between.
func (g *group) take(scratch []byte, bytes int64) []byte {
	p := scratch[g.used : g.used+bytes]
	clear(p)
	var before []byte
	if len(g.iov) > 0 {
		before = g.iov[len(g.iov)-1]
	}
	if n := int64(len(before)); n > 0 && n <= g.used && &before[0] == &scratch[g.used-n] {
		g.iov[len(g.iov)-1] = scratch[g.used-n : g.used+bytes]
	} else {
		g.iov = append(g.iov, p)
	}
	g.used += bytes
	return p
}
