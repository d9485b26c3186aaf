package segment

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/hearth-dev/hearth/durable"
)

// errNoFree says that a drive has no free segment and may not have another.
var errNoFree = fmt.Errorf("%w", ErrFull)

// scratchBytes is what a drive has to write tombstones, headers and most footers
// from.
const scratchBytes = 64 * PageSize

// openFlags are how segments are opened.
func (d *drive) openFlags() int {
	if d.direct {
		return os.O_RDWR | syscall.O_DIRECT
	}
	return os.O_RDWR
}

// fits says whether a segment that is filled has room for a record, the footer's
// entries included. With the drive's turn.
func (s *segment) fits(pages int64, entries int) bool {
	return s.next+pages+footerPages(len(s.entries)/entryBytes+entries) <= s.drive.log.pagesOfSegment()
}

// rotate seals the segment that is filled and begins another. errNoFree where
// there is none. With the turn.
func (d *drive) rotate(ctx context.Context) error {
	if d.open != nil {
		if err := d.seal(); err != nil {
			d.failed(err)
		}
	}
	var first error
	for range failuresBefore {
		s, err := d.takeFree()
		if err == nil {
			err = d.begin(ctx, s)
		}
		switch {
		case err == nil:
			return nil
		case errors.Is(err, errNoFree) && first != nil:
			return first
		case errors.Is(err, errNoFree), ctx.Err() != nil:
			return err
		}
		first = err
		d.failed(err)
	}
	return first
}

// clearLost removes the files that could not be made, nor removed before, so that
// they take no room any longer. With the turn.
func (d *drive) clearLost() {
	l := d.log
	for _, s := range d.list() {
		if !s.lost {
			continue
		}
		if err := d.unlink(s); err != nil {
			return // the others are tried with it, the next time
		}
		l.mu.Lock()
		delete(d.segments, s.number)
		l.mu.Unlock()
		_ = s.file.Close() // the file is gone
	}
}

// takeFree finds a free segment or makes one.
func (d *drive) takeFree() (*segment, error) {
	l := d.log
	d.clearLost()
	l.mu.Lock()
	var found *segment
	number, taken := uint32(0), len(d.segments)
	for _, s := range d.segments {
		if s.state == free && !s.lost && (found == nil || found.broken || !s.broken && s.number < found.number) {
			found = s
		}
	}
	for d.segments[number] != nil {
		number++
	}
	may := taken < d.share && number <= maxNumber
	full := d.full
	l.mu.Unlock()
	if may && full {
		room, _, err := l.fs.Free(d.dir)
		may = err == nil && room >= 2*l.size
	}
	// A drive that was full is tried before its last free segment is taken: then
	// there may be another.
	if found != nil && (!may || !full && !found.broken) {
		return found, nil
	}
	if !may {
		return nil, errNoFree
	}
	s, err := d.create(number)
	noRoom := errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
	l.mu.Lock()
	d.full = noRoom
	l.mu.Unlock()
	switch {
	case noRoom && found != nil:
		return found, nil
	case noRoom:
		return nil, errNoFree
	}
	return s, err
}

// create makes a segment's file, durably and with all its room.
func (d *drive) create(number uint32) (s *segment, err error) {
	l := d.log
	path := filepath.Join(d.dir, fileName(number))
	if err := d.there(); err != nil {
		return nil, fmt.Errorf("make segment: %w", err)
	}
	f, err := l.fs.OpenFile(path, d.openFlags()|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make segment: %w", err)
	}
	s = &segment{drive: d, number: number, path: path, file: f}
	if err = f.Allocate(l.size); err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = l.fs.SyncDir(d.dir)
	}
	if err == nil {
		err = d.enlist(s)
	}
	if err != nil {
		err = fmt.Errorf("make segment: %w", err)
		if d.unlink(s) == nil {
			return nil, errors.Join(err, f.Close())
		}
		// The file stays, open, and counts; it is not used again.
		s.lost = true
	}
	l.mu.Lock()
	d.segments[number] = s
	l.mu.Unlock()
	return s, err
}

// begin makes a free segment the one that is filled. With the turn.
func (d *drive) begin(ctx context.Context, s *segment) error {
	l := d.log
	if err := s.quiet(ctx); err != nil {
		return err
	}
	if !d.newest(s) {
		incarnation, err := d.head(s)
		if err != nil {
			l.mu.Lock()
			s.broken = true
			l.mu.Unlock()
			return fmt.Errorf("begin segment: %w", err)
		}
		l.mu.Lock()
		s.incarnation = incarnation
		l.mu.Unlock()
	}
	l.mu.Lock()
	s.state, s.fresh, s.broken, s.records, s.next, s.last = filling, false, false, 0, 1, l.seq
	s.entries = nil
	d.open = s
	l.mu.Unlock()
	for len(d.owed) > 0 {
		n := min(len(d.owed), maxBuried)
		if !s.fits(buriedPages(n), n) {
			return nil // the rest comes with the next
		}
		if err := d.bury(s, d.owed[:n]); err != nil {
			return fmt.Errorf("begin segment: %w", err)
		}
		l.mu.Lock()
		d.owed = d.owed[n:]
		l.mu.Unlock()
	}
	return nil
}

// newest says whether a free segment has its header and was given the newest
// incarnation of its drive: they rise in the order in which segments are filled.
func (d *drive) newest(s *segment) bool {
	d.log.mu.Lock()
	defer d.log.mu.Unlock()
	for _, other := range d.segments {
		if other.incarnation > s.incarnation {
			return false
		}
	}
	return s.fresh
}

// head writes the header of a new incarnation, durably, and takes away what could
// be taken for a footer or a first record: even where one of the three pages is
// damaged later, nothing of the old incarnation is believed. With the turn.
func (d *drive) head(s *segment) (incarnation uint64, err error) {
	l := d.log
	l.mu.Lock()
	incarnation = l.incarnationLocked()
	h := header{number: s.number, tenant: l.opts.Tenant, size: l.size, incarnation: incarnation, seq: l.seq + 1}
	l.mu.Unlock()
	l.charge(3 * PageSize)
	p := d.scratch[:3*PageSize]
	clear(p)
	if _, err := s.file.WriteAt(p[:PageSize], l.size-PageSize); err != nil {
		return 0, err
	}
	h.encode(p)
	if _, err := s.file.WriteAt(p[:2*PageSize], 0); err != nil {
		return 0, err
	}
	return incarnation, s.file.Datasync()
}

// seal writes the footer of the segment that is filled, which is then no more.
// Without records it is free again. With the turn.
func (d *drive) seal() error {
	l := d.log
	s := d.open
	l.mu.Lock()
	d.open = nil
	if len(s.entries) == 0 {
		s.state = free
		l.mu.Unlock()
		return nil
	}
	s.state = unsealed
	l.mu.Unlock()
	entries := s.entries
	s.entries = nil
	if err := d.foot(s, entries, s.incarnation, s.last); err != nil {
		return fmt.Errorf("seal segment: %w", err)
	}
	l.mu.Lock()
	s.state = sealed
	l.mu.Unlock()
	return nil
}

// foot makes a segment durable, and then its footer. With the turn, or before
// anybody has the log.
func (d *drive) foot(s *segment, entries []byte, incarnation, seq uint64) error {
	l := d.log
	need := footerPages(len(entries)/entryBytes) * PageSize
	p := d.scratch
	if need > int64(len(p)) {
		more, free, err := newPages(need)
		if err != nil {
			return err
		}
		defer free()
		p = more
	}
	p = p[:need]
	encodeFooter(p, entries, l.size, incarnation, seq)
	l.charge(need)
	if err := d.sync(s); err != nil {
		return err
	}
	if _, err := s.file.WriteAt(p, l.size-need); err != nil {
		return err
	}
	return d.sync(s)
}

// sync makes a segment durable. Where that fails a later one says nothing about
// what was written before, so the next Seal tells. With the turn.
func (d *drive) sync(s *segment) error {
	err := s.file.Datasync()
	if err != nil {
		d.unsynced = err
	}
	return err
}

// abandon ends the segment that is filled after a write to it failed. What was to
// be written may be there: keys that must not be found are named, and are owed
// tombstones where no footer says what counts. With the turn.
func (d *drive) abandon(cause error, unwritten []Tombstone) {
	d.failed(cause)
	s := d.open
	if s == nil {
		return
	}
	var err error
	if len(s.entries) == 0 {
		// No footer would tell of it, so it begins anew at once.
		var incarnation uint64
		l := d.log
		if incarnation, err = d.head(s); err == nil {
			l.mu.Lock()
			s.incarnation, s.fresh = incarnation, true
			l.mu.Unlock()
		}
		l.mu.Lock()
		d.open, s.state, s.broken = nil, free, err != nil
		l.mu.Unlock()
	} else {
		err = d.seal()
	}
	if err != nil {
		d.failed(err)
		d.log.mu.Lock()
		d.owed = append(d.owed, unwritten...)
		d.log.mu.Unlock()
	}
}

// probeDirect says whether a drive's file system writes and reads around the page
// cache: it is tried, since some only say so.
func probeDirect(fsys durable.FS, dir string, p []byte) (err error) {
	path := durable.TempName(filepath.Join(dir, "direct"))
	f, err := fsys.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL|syscall.O_DIRECT, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close(), fsys.Remove(path)) }()
	p = p[:2*PageSize]
	for i := range p[:PageSize] {
		p[i], p[PageSize+i] = byte(i), 0
	}
	if _, err := f.WriteAt(p[:PageSize], 0); err != nil {
		return err
	}
	if _, err := f.ReadAt(p[PageSize:], 0); err != nil {
		return err
	}
	if string(p[:PageSize]) != string(p[PageSize:]) {
		return fmt.Errorf("%w: a page reads back otherwise", ErrDamaged)
	}
	return nil
}
