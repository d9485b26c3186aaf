package segment

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
)

// Delete ends keys: their records up to Upto, or all where that is 0, are never
// found again, whatever happens once it has returned. It waits for every drive
// that may have one; a drive that cannot say so is given up. Where none can, or
// ctx ends before, the error says that the records may still be found after a
// restart.
func (l *Log) Delete(ctx context.Context, list []Tombstone) error {
	if len(list) == 0 {
		return nil
	}
	if err := l.makeSure(ctx); err != nil {
		return fmt.Errorf("end blocks: %w", err)
	}
	stones := slices.Clone(list)
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return fmt.Errorf("end blocks: %w", ErrClosed)
	}
	for i := range stones {
		t := &stones[i]
		// What a reclaim moves has a greater number than its caller knows.
		t.Upto = min(max(t.Upto, l.moved), l.seq)
		if list[i].Upto == 0 {
			t.Upto = l.seq
		}
		if l.ended != nil {
			l.ended[name{t.Namespace, t.Key}] = struct{}{}
		}
	}
	var drives []*drive
	takePart := false
	for _, d := range l.drives {
		if d.out {
			continue
		}
		takePart = true
		if d.holdsLocked() {
			drives = append(drives, d)
		}
	}
	l.mu.Unlock()
	if !takePart {
		return fmt.Errorf("end blocks: %w", l.noDrive())
	}
	errs := make([]error, len(drives))
	var all sync.WaitGroup
	for i, d := range drives {
		all.Go(func() { errs[i] = d.end(ctx, stones) })
	}
	all.Wait()
	if err := errors.Join(errs...); err == nil {
		return nil
	} else if ctx.Err() != nil || errors.Is(err, ErrClosed) || errors.Is(err, ErrFull) || len(l.members()) < 2 {
		return fmt.Errorf("end blocks: %w", err)
	}
	// Some drives could not note it. What these have must not be believed again.
	if err := l.enter(ctx); err != nil {
		return fmt.Errorf("end blocks: %w", err)
	}
	defer give(l.appends)
	members := l.members()
	for i, d := range drives {
		if errs[i] != nil {
			l.giveUp(d, errs[i])
		}
	}
	err := l.recommit(members)
	l.shareAnew() // the others take what it had
	if err != nil {
		return fmt.Errorf("end blocks: %w", errors.Join(err, errors.Join(errs...)))
	}
	return nil
}

// recommit begins a generation without the drives that were given up. Where no
// drive can note it, nothing says that they are: then those that took part before
// do so still, and the next who ends a key tries to note which they are. With
// appends.
func (l *Log) recommit(members []*drive) error {
	err := l.commit()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.unsure = err != nil; l.unsure {
		for _, d := range members {
			d.out = false
		}
	}
	return err
}

// makeSure notes which drives take part, where that failed before.
func (l *Log) makeSure(ctx context.Context) error {
	l.mu.Lock()
	unsure := l.unsure
	l.mu.Unlock()
	if !unsure {
		return nil
	}
	if err := l.enter(ctx); err != nil {
		return err
	}
	defer give(l.appends)
	return l.recommit(l.members())
}

// holdsLocked says whether a drive may have records.
func (d *drive) holdsLocked() bool {
	if len(d.owed) > 0 {
		return true
	}
	for _, s := range d.segments {
		if s.state != free {
			return true
		}
	}
	return false
}

// end writes tombstones to one drive, durably.
func (d *drive) end(ctx context.Context, stones []Tombstone) (err error) {
	l := d.log
	for tries := 0; tries < 2; {
		if err := take(ctx, d.turn); err != nil {
			return err
		}
		if d.closed() {
			give(d.turn)
			return ErrClosed
		}
		n := min(len(stones), maxBuried)
		pages := buriedPages(n)
		if d.open == nil || !d.open.fits(pages, n) {
			if err = d.rotate(ctx); err != nil {
				give(d.turn)
				if !errors.Is(err, errNoFree) {
					return err
				}
				if err := l.enter(ctx); err != nil {
					return err
				}
				err := l.reclaim(ctx, d, false, 0)
				give(l.appends)
				if err != nil {
					return err
				}
				continue
			}
		}
		if err = d.bury(d.open, stones[:n]); err != nil {
			tries++
		} else if stones = stones[n:]; len(stones) == 0 {
			give(d.turn)
			return nil
		}
		give(d.turn)
	}
	return err
}

func (d *drive) closed() bool {
	d.log.mu.Lock()
	defer d.log.mu.Unlock()
	return d.log.closed
}

// maxBuried is how many tombstones are written and synced at once. A segment of
// any size has room for them.
const maxBuried = 2 * maxTombstones

// buriedPages is how many pages tombstones take.
func buriedPages(n int) int64 { return 2 * int64((n+maxTombstones-1)/maxTombstones) }

// bury writes at most maxBuried tombstones into the segment that is filled, each
// record of them twice, so that no one damaged page brings a block back, and syncs
// it. Where that fails the segment is filled no more. With the turn.
func (d *drive) bury(s *segment, stones []Tombstone) error {
	err := d.buryPages(s, stones)
	if err == nil {
		err = d.sync(s)
	}
	if err != nil {
		d.abandon(err, nil)
		return err
	}
	d.worked()
	return nil
}

func (d *drive) buryPages(s *segment, stones []Tombstone) error {
	l := d.log
	var entries []byte
	bytes := int64(0)
	page := s.next
	for chunk := range slices.Chunk(stones, maxTombstones) {
		l.mu.Lock()
		l.seq += 2
		seq := l.seq
		l.mu.Unlock()
		encodeTombstones(d.scratch[bytes:], s.incarnation, seq-1, chunk)
		encodeTombstones(d.scratch[bytes+PageSize:], s.incarnation, seq, chunk)
		for _, t := range chunk {
			entries = appendEntry(entries, tombstoneEntry(t, uint32(page), len(chunk)))
		}
		bytes += 2 * PageSize
		page += 2
		s.last = seq
	}
	l.charge(bytes)
	if _, err := s.file.WriteAt(d.scratch[:bytes], s.next*PageSize); err != nil {
		return err
	}
	s.entries = append(s.entries, entries...)
	l.mu.Lock()
	s.next = page
	l.mu.Unlock()
	return nil
}
