package segment

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"syscall"
)

// TakeBack tries the drives that were given up, each with one small file. One that
// takes it again lacks tombstones: it is emptied, which Options.Emptied is told, and
// then takes part in a new generation. So is one whose path leads elsewhere by now,
// which is given up for it. An error says what is still wrong with one;
// where none is given up it does nothing. Who calls it again and again waits longer
// each time. Errors wrap ErrClosed or ctx's cause where they are one of these.
func (l *Log) TakeBack(ctx context.Context) error {
	if err := l.enter(ctx); err != nil {
		return fmt.Errorf("take drives back: %w", err)
	}
	defer give(l.appends)
	if err := l.leaveAstray(); err != nil {
		return fmt.Errorf("take drives back: %w", err)
	}
	if l.Stats().Out == 0 {
		return nil
	}
	before := l.members()
	for _, d := range l.drives {
		if !d.isOut() {
			continue
		}
		if err := l.empty(ctx, d); err != nil && ctx.Err() == nil {
			l.mu.Lock()
			d.why = err
			l.mu.Unlock()
		}
		if ctx.Err() != nil {
			break
		}
	}
	var errs []error
	if members := l.members(); len(members) > len(before) {
		// Only with the generation noted on all of them is anything written to it.
		errs = append(errs, l.recommit(before))
		l.shareAnew()
		for _, d := range members {
			if !d.isOut() && !slices.Contains(before, d) {
				l.log.Info("a drive that was given up is taken back, empty", slog.String("dir", d.dir))
			}
		}
	}
	if err := errors.Join(append(errs, l.Out()...)...); err != nil {
		return fmt.Errorf("take drives back: %w", cmp.Or(context.Cause(ctx), err))
	}
	return nil
}

// leaveAstray gives up the drives whose paths lead elsewhere, and has the others
// note that. With appends.
func (l *Log) leaveAstray() error {
	before := l.members()
	for _, d := range before {
		if err := d.there(); errors.Is(err, errElsewhere) {
			l.giveUp(d, err)
		}
	}
	if left := l.members(); len(left) == len(before) || len(left) == 0 {
		return nil // of none at all nothing is ended until one is back
	}
	err := l.recommit(before)
	l.shareAnew()
	return err
}

// Out says of each drive that is given up why it is, or what the last TakeBack met.
func (l *Log) Out() (why []error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range l.drives {
		if d.out {
			why = append(why, fmt.Errorf("drive %s: %w", d.dir, d.why))
		}
	}
	return why
}

func (d *drive) isOut() bool {
	d.log.mu.Lock()
	defer d.log.mu.Unlock()
	return d.out
}

// empty removes all that a drive that was given up has, where it can be written,
// and makes it one that takes part. With appends.
func (l *Log) empty(ctx context.Context, d *drive) error {
	if err := take(ctx, d.turn); err != nil {
		return err
	}
	defer give(d.turn)
	if l.opts.Usable != nil {
		if err := l.opts.Usable(d.number); err != nil {
			return err
		}
	}
	window, done, err := newPages(windowBytes)
	if err != nil {
		return err
	}
	defer done()
	v, err := d.look(window)
	if err != nil {
		return err
	}
	m := v.member
	if !v.known {
		m = membership{joining: v.incarnation >> 32}
	}
	// What it says already is written again, to see whether it can be. Where only the
	// room for that lacks, what goes makes some.
	if err := writeMembership(l.fs, d.dir, m); err != nil && !outOfRoom(err) {
		return err
	}
	list := d.list()
	l.mu.Lock()
	for _, s := range list {
		s.state = free // nobody begins to read it any more
	}
	l.generation = max(l.generation, m.joining, v.incarnation>>32)
	l.mu.Unlock()
	for _, s := range list {
		if err := s.quiet(ctx); err != nil {
			return err
		}
	}
	for _, s := range list {
		_ = s.file.Close() // nothing is promised of it
	}
	l.mu.Lock()
	clear(d.segments)
	d.open, d.owed = nil, nil
	l.mu.Unlock()
	if l.opts.Emptied != nil {
		l.opts.Emptied(d.number)
	}
	if err := d.settle(false, v, window); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	d.out, d.why, d.ready, d.unsynced = false, nil, m.ready, nil
	d.failures, d.passed, d.full = 0, 0, false
	return nil
}

// outOfRoom says whether a file system is full, or a quota.
func outOfRoom(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// shareAnew gives each drive its part of the budget as it is.
func (l *Log) shareAnew() {
	l.mu.Lock()
	bytes := l.bytes
	l.mu.Unlock()
	l.shareOut(bytes)
}
