package ledger

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"
)

// Errors that callers branch on.
var (
	// ErrNewer says that the ledger was written by a newer version.
	ErrNewer = errors.New("ledger of a newer version")
	// ErrUnprepared says that the claim was unprepared after the call arrived.
	ErrUnprepared = errors.New("claim was unprepared meanwhile")
	// ErrPrepared says that the claim is prepared already.
	ErrPrepared = errors.New("claim is prepared already")
	// ErrNotBegun says that the claim was not begun, or is gone.
	ErrNotBegun = errors.New("claim is not begun")
	// ErrFull says that the ledger has as many claims as it may have.
	ErrFull = errors.New("ledger has no room for another claim")
)

// Ticket is the moment at which a call arrived, in the order of this process.
type Ticket uint64

// Arrive gives the ticket of a call that begins now. A Prepare that waited
// while its claim was unprepared is known by its ticket, whatever the clock
// does.
func (l *Ledger) Arrive() Ticket {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ticket++
	return l.ticket
}

// Begin keeps the plans of claims, before any of their steps is taken, and with
// them the devices: no other claim gets one of them from now on, unless both may
// share it. There is one error for each entry, in their order, nil where the plan
// is durable: *Conflict, ErrUnprepared (by the ticket), ErrPrepared, ErrFull, what
// is wrong with the entry, or what the drive said. The same plan again costs
// nothing; another plan replaces the one that was begun. All entries of a call
// are synced side by side and share one sync of the directory.
func (l *Ledger) Begin(ctx context.Context, ticket Ticket, entries ...Entry) []error {
	errs := make([]error, len(entries))
	next := make([]Entry, len(entries))
	for i := range entries {
		next[i] = entries[i].clone()
		next[i].State, next[i].Boot, next[i].Begun = Begun, l.boot, plainTime(l.now())
		next[i].Prepared, next[i].Gone, next[i].Seen = time.Time{}, time.Time{}, time.Time{}
		next[i].Sharers, next[i].Owed, next[i].Lines = nil, nil, Lines{}
	}
	return l.change(ctx, "begin claim", next, errs, func(e *Entry, s *slot) (write bool, err error) {
		return l.beginLocked(ticket, e, s)
	})
}

// beginLocked says whether an entry may begin, and whether it is to be written.
func (l *Ledger) beginLocked(ticket Ticket, e *Entry, s *slot) (write bool, err error) {
	switch {
	case l.ended[e.UID] > ticket:
		return false, ErrUnprepared
	case s != nil && s.entry.State == Prepared:
		return false, ErrPrepared
	case (s == nil || s.entry.State == Gone) && l.live+l.comingLocked() >= maxClaims:
		return false, fmt.Errorf("%w: it has %d", ErrFull, maxClaims)
	}
	if c := conflict(e, l.ownersLocked); c != nil {
		return false, c
	}
	if s != nil && s.entry.State == Begun {
		e.Begun = s.entry.Begun
		return s.dirty || !equal(e, &s.entry), nil
	}
	return true, nil
}

// comingLocked counts the claims that are on their way to the drive and not
// among the live ones yet.
func (l *Ledger) comingLocked() int {
	coming := 0
	for uid := range l.pending {
		if s := l.claims[uid]; s == nil || !s.entry.live() {
			coming++
		}
	}
	return coming
}

// Commit marks claims as prepared, with their devices as the plan has them and
// all that the steps added to it: CDI names, edits, digests, directories. One
// error for each entry: ErrNotBegun, or what the drive said. What is committed
// already costs nothing, what differs is written again. The journal gets a line
// for each claim that becomes prepared, and for each whose pods are others.
func (l *Ledger) Commit(ctx context.Context, entries ...Entry) []error {
	errs := make([]error, len(entries))
	next := make([]Entry, len(entries))
	for i := range entries {
		next[i] = entries[i].clone()
	}
	return l.change(ctx, "commit claim", next, errs, func(e *Entry, s *slot) (write bool, err error) {
		if s == nil || s.entry.State == Gone {
			return false, ErrNotBegun
		}
		if !slices.EqualFunc(e.Results, s.entry.Results, sameDevice) {
			return false, errors.New("its devices are not those of the plan that was begun")
		}
		e.State, e.Boot, e.Gone, e.Owed = Prepared, l.boot, time.Time{}, nil
		e.Begun, e.Prepared, e.Sharers, e.Lines = s.entry.Begun, s.entry.Prepared, s.entry.Sharers, s.entry.Lines
		e.Seen = s.entry.Seen
		if s.entry.State == Prepared {
			if !slices.EqualFunc(e.Pods, s.entry.Pods, Pod.same) {
				e.Seen, e.Lines.Pods = plainTime(l.now()), l.journal.number()
			}
			return s.dirty || !equal(e, &s.entry), nil
		}
		e.Prepared, e.Sharers = plainTime(l.now()), l.sharersLocked(e)
		e.Lines.Prepared = l.journal.number()
		return true, nil
	})
}

func sameDevice(a, b Result) bool {
	return a.Request == b.Request && a.device() == b.device() && a.ShareID == b.ShareID &&
		a.AdminAccess == b.AdminAccess && a.Shared == b.Shared && a.AcrossNamespaces == b.AcrossNamespaces
}

// change takes claims to their next entries: decide says under the lock what
// is to happen to each, which then happens without it.
func (l *Ledger) change(ctx context.Context, what string, next []Entry, errs []error, decide func(e *Entry, s *slot) (write bool, err error)) []error {
	var uids []string
	for i := range next {
		check := next[i]
		if check.State == "" {
			check.State = Begun
		}
		if errs[i] = check.check(); errs[i] == nil && slices.Contains(uids, next[i].UID) {
			errs[i] = errors.New("twice in one call")
		}
		if errs[i] == nil {
			uids = append(uids, next[i].UID)
		}
	}
	err := l.acquire(ctx, uids)
	if err == nil {
		defer l.release(uids)
		err = l.storeNext(ctx, next, errs, decide)
	}
	for i := range errs {
		if errs[i] == nil && err != nil {
			errs[i] = err
		}
		if errs[i] != nil {
			errs[i] = fmt.Errorf("%s %s/%s: %w", what, next[i].Namespace, next[i].Name, errs[i])
		}
	}
	return errs
}

// storeNext decides, stores and installs; the claims are acquired.
func (l *Ledger) storeNext(ctx context.Context, next []Entry, errs []error, decide func(e *Entry, s *slot) (bool, error)) error {
	changes := make([]*change, len(next))
	var doing []*change
	resting := false // a tombstone is overwritten whose journal lines are not synced
	l.mu.Lock()
	for i := range next {
		if errs[i] != nil {
			continue
		}
		e, s := &next[i], l.claims[next[i].UID]
		write, err := decide(e, s)
		if errs[i] = err; err != nil || !write {
			continue
		}
		c := &change{entry: *e, at: s.end()}
		if c.record, errs[i] = encode(e); errs[i] != nil {
			l.forgetLocked(s, e)
			continue
		}
		if s != nil && s.entry.State == Gone && e.State == Begun {
			resting, c.at = resting || !l.journal.syncedAll(s.entry.Lines), -1
		}
		if c.at >= 0 && c.at+int64(len(c.record)) > maxAppend {
			c.at = -1
		}
		changes[i] = c
		doing = append(doing, c)
		if e.live() {
			// Others see the devices as taken before the plan is on the drive.
			l.pending[e.UID] = e
			l.owners.add(e)
		}
	}
	l.mu.Unlock()
	if resting {
		if err := l.journal.sync(ctx); err != nil {
			l.log.Warn("the journal does not reach its drive", slog.Any("error", err))
		}
	}
	l.store(doing)
	var lines []line
	var settled []string
	l.mu.Lock()
	for i, c := range changes {
		if c == nil {
			continue
		}
		if c.err == nil && l.unsettled[c.entry.UID] {
			settled = append(settled, c.entry.UID)
		}
		delete(l.pending, c.entry.UID)
		lines = append(lines, l.installLocked(c)...)
		errs[i] = l.told("write the ledger", c.err)
	}
	l.mu.Unlock()
	l.note(ctx, lines)
	l.settle(settled)
	return nil
}

// installLocked makes a change what the ledger says, or takes its reservation
// back, and gives the lines that the journal is to have.
func (l *Ledger) installLocked(c *change) []line {
	s := l.claims[c.entry.UID]
	was := State("")
	if s != nil {
		was = s.entry.State
		l.owners.remove(&s.entry)
	}
	l.owners.remove(&c.entry)
	switch {
	case c.err == nil:
		l.putLocked(&slot{entry: c.entry, size: c.size()})
	case c.maybe && was != Begun && was != Prepared:
		// The name may survive: the claim keeps its devices until it is unprepared.
		l.putLocked(&slot{entry: c.entry, dirty: true})
	case s != nil:
		l.putLocked(&slot{entry: s.entry, size: s.size, dirty: s.dirty || c.maybe})
	}
	switch {
	case c.err != nil:
		l.forgetLocked(s, &c.entry)
	case was == Begun && c.entry.State == Prepared:
		return []line{preparedLine(&c.entry)}
	case was == Prepared && c.entry.Lines.Pods != s.entry.Lines.Pods:
		return []line{podsLine(&c.entry)}
	}
	return nil
}

// forgetLocked takes the numbers of lines back that an entry would have had.
func (l *Ledger) forgetLocked(s *slot, e *Entry) {
	had := Lines{}
	if s != nil {
		had = s.entry.Lines
	}
	for _, n := range []struct{ had, next uint64 }{{had.Prepared, e.Lines.Prepared}, {had.Pods, e.Lines.Pods}} {
		if n.next > n.had {
			l.journal.forget(n.next)
		}
	}
}
