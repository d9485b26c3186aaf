package segment

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
)

// shareOut says how many segments each drive may have. Few drives get many rather
// than many drives few, and tenants begin with different ones.
func (l *Log) shareOut(bytes int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bytes = bytes
	var usable []*drive
	start := int(l.opts.Tenant[0])<<8 | int(l.opts.Tenant[1])
	for i := range l.drives {
		d := l.drives[(start+i)%len(l.drives)]
		if d.share = 0; !d.out {
			usable = append(usable, d)
		}
	}
	n := int(min(bytes/l.size, maxNumber*MaxDrives))
	if n == 0 || len(usable) == 0 {
		return
	}
	used := min(max(1, n/wanted), len(usable))
	for i, d := range usable[:used] {
		d.share = n / used
		if i < n%used {
			d.share++
		}
	}
}

// SetBytes changes the budget. What is too much goes at once, oldest first, but
// for what is pinned: that goes with an Append after its release. Errors wrap
// ErrClosed or ctx's cause.
func (l *Log) SetBytes(ctx context.Context, bytes int64) error {
	if err := l.enter(ctx); err != nil {
		return fmt.Errorf("change budget: %w", err)
	}
	defer give(l.appends)
	l.shareOut(max(0, bytes))
	for _, d := range l.members() {
		l.shrink(ctx, d)
		if ctx.Err() != nil {
			return fmt.Errorf("change budget: %w", context.Cause(ctx))
		}
	}
	return nil
}

// shrink removes segments that a drive has beyond its share. With appends.
func (l *Log) shrink(ctx context.Context, d *drive) {
	for ctx.Err() == nil && d.over() {
		if err := l.shrinkOne(ctx, d); err != nil {
			if !errors.Is(err, ErrFull) {
				l.log.Warn("a drive keeps more than its share", slog.String("dir", d.dir), slog.Any("error", err))
			}
			return
		}
	}
}

func (d *drive) over() bool {
	d.log.mu.Lock()
	defer d.log.mu.Unlock()
	return len(d.segments) > d.share
}

// shrinkOne removes a free segment, or has one become free.
func (l *Log) shrinkOne(ctx context.Context, d *drive) error {
	if err := take(ctx, d.turn); err != nil {
		return err
	}
	var found *segment
	sealable := true
	for _, s := range d.list() {
		switch {
		case s.lost:
		case s.state == free:
			found = s
		case s.state != filling:
			sealable = false
		}
	}
	var err error
	switch {
	case found != nil:
		err = d.remove(ctx, found)
	case sealable && d.open != nil:
		if err = d.seal(); err != nil {
			d.failed(err)
			err = nil // it can go all the same
		}
	default:
		give(d.turn)
		return l.reclaim(ctx, d, true, 0)
	}
	give(d.turn)
	return err
}

// remove removes the file of a segment that nothing can be found in. With the
// turn, or before anybody has the log.
func (d *drive) remove(ctx context.Context, s *segment) error {
	l := d.log
	if err := s.quiet(ctx); err != nil {
		return err
	}
	if err := d.unlink(s); err != nil {
		l.mu.Lock()
		s.lost = true
		l.mu.Unlock()
		return fmt.Errorf("remove segment: %w", err)
	}
	l.mu.Lock()
	delete(d.segments, s.number)
	l.mu.Unlock()
	_ = s.file.Close() // the file is gone
	return nil
}
