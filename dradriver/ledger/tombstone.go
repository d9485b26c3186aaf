package ledger

import (
	"context"
	"fmt"
	"maps"
	"slices"
)

// maxEnded bounds the claims of which the order of Unprepare is remembered.
const maxEnded = 8192

// Tombstone ends claims: their devices are free when it returns, what they hold
// besides is Owed until Released. One error for each UID, in their order. A
// claim that is unknown or gone is fine. Where the drive is full the claim's
// file goes instead of getting its tombstone; a drive that takes neither is an
// error, and the claim stays what it was.
func (l *Ledger) Tombstone(ctx context.Context, uids ...string) []error {
	errs := make([]error, len(uids))
	unique := slices.Compact(slices.Sorted(slices.Values(uids)))
	l.endLocking(unique)
	if err := l.acquire(ctx, unique); err != nil {
		for i := range errs {
			errs[i] = fmt.Errorf("unprepare claim %s: %w", uids[i], err)
		}
		return errs
	}
	defer l.release(unique)
	outcome := l.bury(ctx, unique)
	for i, uid := range uids {
		errs[i] = outcome[uid]
	}
	return errs
}

// endLocking notes that a Prepare which arrived before now comes too late.
func (l *Ledger) endLocking(uids []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ticket++
	for _, uid := range uids {
		l.ended[uid] = l.ticket
	}
	if len(l.ended) <= maxEnded {
		return
	}
	// The older half is of calls that ended long ago.
	order := slices.Sorted(maps.Values(l.ended))
	middle := order[len(order)/2]
	maps.DeleteFunc(l.ended, func(_ string, t Ticket) bool { return t < middle })
}

// bury writes the tombstones of acquired claims.
func (l *Ledger) bury(ctx context.Context, uids []string) map[string]error {
	outcome := map[string]error{}
	var doing []*change
	var settled []string
	l.mu.Lock()
	for _, uid := range uids {
		s := l.claims[uid]
		if l.unsettled[uid] {
			settled = append(settled, uid)
		}
		if s == nil || !s.entry.live() {
			continue
		}
		c := &change{entry: s.entry.tombstone(l.now()), at: s.end()}
		c.entry.Sharers = l.allSharersLocked(&s.entry)
		if s.entry.State == Prepared {
			c.entry.Lines.Gone = l.journal.number()
		}
		var err error
		if c.record, err = encode(&c.entry); err != nil {
			outcome[uid] = fmt.Errorf("unprepare claim %s/%s: %w", c.entry.Namespace, c.entry.Name, err)
			continue
		}
		doing = append(doing, c)
	}
	l.mu.Unlock()

	l.store(doing)
	l.rewrite(doing)
	var lines []line
	l.mu.Lock()
	for _, c := range doing {
		uid, s := c.entry.UID, l.claims[c.entry.UID]
		if c.err != nil {
			l.putLocked(&slot{entry: s.entry, size: s.size, dirty: true})
			l.journal.forget(c.entry.Lines.Gone)
			outcome[uid] = fmt.Errorf("unprepare claim %s/%s: %w", c.entry.Namespace, c.entry.Name, l.told("write the ledger", c.err))
			continue
		}
		l.owners.remove(&s.entry)
		l.putLocked(&slot{entry: c.entry, size: c.size()})
		if c.entry.Lines.Gone != 0 {
			lines = append(lines, lineOf(&c.entry))
		}
	}
	l.mu.Unlock()
	l.note(ctx, lines)
	l.settle(settled)
	return outcome
}

// rewrite tries what remains for tombstones that could not be appended: a new
// file, and where there is no room for one, no file.
func (l *Ledger) rewrite(changes []*change) {
	var again []*change
	for _, c := range changes {
		if c.err != nil && !full(c.err) && c.at >= 0 {
			again = append(again, c)
			c.at, c.err, c.maybe = -1, nil, false
		}
	}
	l.store(again)
	for _, c := range changes {
		if c.err == nil {
			continue
		}
		err := l.removeFile(c.entry.UID)
		if err == nil {
			err = l.syncDir(l.dir)
		}
		if err == nil {
			c.record, c.at, c.err = nil, -1, nil
		}
	}
}

// Released says that a claim's release was done; a tombstone that owes nothing
// is removed when its time has come. It is written and not synced: after a crash
// some of it may be owed again, which costs a release of what is not held.
func (l *Ledger) Released(ctx context.Context, uid string, what ...Held) {
	err := l.acquire(ctx, []string{uid})
	if err == nil {
		defer l.release([]string{uid})
	}
	l.mu.Lock()
	s := l.claims[uid]
	if s == nil || s.entry.State != Gone {
		l.mu.Unlock()
		return
	}
	c := &change{entry: s.entry.clone(), at: s.end()}
	c.entry.Owed = slices.DeleteFunc(c.entry.Owed, func(h Held) bool { return slices.Contains(what, h) })
	same := len(c.entry.Owed) == len(s.entry.Owed)
	s.entry.Owed = c.entry.Owed
	l.mu.Unlock()
	if same || err != nil || c.at < 0 {
		return
	}
	if c.record, err = encode(&c.entry); err != nil || c.at+int64(len(c.record)) > maxAppend {
		return
	}
	if err = l.write(c); err == nil {
		err = c.file.Close()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.size = c.size(); err != nil {
		s.dirty = true
	}
}
