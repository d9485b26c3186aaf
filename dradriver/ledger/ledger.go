// Package ledger owns what a node's driver has done for each claim: one file
// per claim, written before the steps are taken and after, so that a crash
// between any two of them leaves what is needed to go on or to undo. It also
// decides which claim has a device, and keeps the journal of allocations. The
// driver calls it; `hearth claims` shows it. It takes no step itself, asks
// nobody, and knows no Kubernetes. CLAIMS.md, beside the driver, is its format.
//
// A damaged file is moved aside and reported, and costs that claim alone.
package ledger

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/durable"
)

// Limits of a ledger.
const (
	maxClaims     = 4096 // begun and prepared; one more is ErrFull
	maxTombstones = 256  // the oldest go first
	maxProblems   = 100
	// keepTombstone is how long a tombstone stays that owes nothing.
	keepTombstone = 24 * time.Hour
)

// Options of a ledger. Dir is required.
type Options struct {
	Dir    string     // absolute; made if it is absent
	FS     durable.FS // nil: durable.OS
	BootID string     // of the running kernel
	Now    func() time.Time
	Log    *slog.Logger
}

// Ledger is an open ledger; it has its directory to itself. It is safe for
// concurrent use. No method keeps the lock while the drive works.
type Ledger struct {
	dir     string
	fs      durable.FS
	boot    string
	now     func() time.Time
	log     *slog.Logger
	lock    io.Closer
	journal *journal

	syncs    atomic.Int64
	syncTime atomic.Int64 // nanoseconds

	mu        sync.Mutex
	ticket    Ticket
	ended     map[string]Ticket // when a claim was last unprepared
	claims    map[string]*slot
	pending   map[string]*Entry // on their way to the drive
	owners    index             // of live claims and pending ones
	live      int               // claims that are begun or prepared
	busy      map[string]chan struct{}
	unsettled map[string]bool
	problems  []Problem
}

// slot is one claim as the drive has it. Its entry is never changed in place
// but for Owed; its size and dirty only by who has acquired the claim.
type slot struct {
	entry Entry
	size  int64 // bytes of whole records; 0: there is no file
	// dirty says that the end of the file is not known: a crash or a failing
	// drive may have left more there. The next change writes the file anew.
	dirty bool
}

// end is where the next record is appended, negative where the file is to be
// written anew.
func (s *slot) end() int64 {
	if s == nil || s.dirty || s.size == 0 {
		return -1
	}
	return s.size
}

// Problem is a file that could not be used.
type Problem struct {
	File   string    `json:"file"` // where it is now
	UID    string    `json:"uid"`  // of the claim, by the file's name
	Reason string    `json:"reason"`
	At     time.Time `json:"at"`
}

// Stats are figures of a ledger.
type Stats struct {
	Entries    int           // begun and prepared
	Tombstones int           //
	Bad        int           // claims whose file was bad and that nobody unprepared since
	Syncs      int64         // syncs of files and directories so far
	SyncTime   time.Duration // that callers waited for them
}

// putLocked makes a slot the claim's.
func (l *Ledger) putLocked(s *slot) {
	uid := s.entry.UID
	if old := l.claims[uid]; old != nil && old.entry.live() {
		l.live--
	}
	l.claims[uid] = s
	if s.entry.live() {
		l.live++
		l.owners.add(&s.entry)
	}
}

// ownersLocked gives the entries that have a device or are about to.
func (l *Ledger) ownersLocked(d device) []*Entry {
	var found []*Entry
	for _, uid := range l.owners[d] {
		if s := l.claims[uid]; s != nil && s.entry.live() {
			found = append(found, &s.entry)
		}
		if e := l.pending[uid]; e != nil {
			found = append(found, e)
		}
	}
	return found
}

// sharersLocked gives the UIDs of other claims that have a device of e.
func (l *Ledger) sharersLocked(e *Entry) []string {
	sharers := map[string]bool{}
	for i := range e.Results {
		for _, uid := range l.owners[e.Results[i].device()] {
			if uid != e.UID {
				sharers[uid] = true
			}
		}
	}
	sorted := slices.Sorted(maps.Keys(sharers))
	return sorted[:min(len(sorted), maxNamed)]
}

// allSharersLocked gives those and the ones that an entry knows from Commit.
func (l *Ledger) allSharersLocked(e *Entry) []string {
	sharers := append(slices.Clone(e.Sharers), l.sharersLocked(e)...)
	slices.Sort(sharers)
	sharers = slices.Compact(sharers)
	return sharers[:min(len(sharers), maxNamed)]
}

// acquire waits until nobody changes any of the claims, and keeps others out.
func (l *Ledger) acquire(ctx context.Context, uids []string) error {
	for {
		wait := l.tryAcquire(uids)
		if wait == nil {
			return ctxErr(ctx, func() { l.release(uids) })
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return fmt.Errorf("wait for another call: %w", ctx.Err())
		}
	}
}

// ctxErr undoes where ctx has ended.
func ctxErr(ctx context.Context, undo func()) error {
	if err := ctx.Err(); err != nil {
		undo()
		return err
	}
	return nil
}

// tryAcquire takes all claims, or gives what to wait for.
func (l *Ledger) tryAcquire(uids []string) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, uid := range uids {
		if wait := l.busy[uid]; wait != nil {
			return wait
		}
	}
	for _, uid := range uids {
		l.busy[uid] = make(chan struct{})
	}
	return nil
}

func (l *Ledger) release(uids []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, uid := range uids {
		close(l.busy[uid])
		delete(l.busy, uid)
	}
}

// note hands lines to the journal. What it cannot take now it takes later.
func (l *Ledger) note(ctx context.Context, lines []line) {
	if len(lines) == 0 {
		return
	}
	if err := l.journal.append(ctx, lines); err != nil {
		l.log.Warn("the journal takes no lines now", slog.Any("error", err))
	}
}

// BootID is that of Options.
func (l *Ledger) BootID() string { return l.boot }

// Get gives a claim that is begun or prepared.
func (l *Ledger) Get(uid string) (Entry, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.claims[uid]
	if s == nil || !s.entry.live() {
		return Entry{}, false
	}
	return s.entry.clone(), true
}

// Entries gives the claims that are begun or prepared, by UID.
func (l *Ledger) Entries() []Entry {
	entries := l.entries(func(e *Entry) bool { return e.live() })
	slices.SortFunc(entries, byUID)
	return entries
}

// Gone gives the tombstones, oldest first.
func (l *Ledger) Gone() []Entry {
	entries := l.entries(func(e *Entry) bool { return e.State == Gone })
	slices.SortFunc(entries, byAge)
	return entries
}

// Owners gives the begun and prepared claims that have a device, by UID.
func (l *Ledger) Owners(pool, name string) []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	var owners []Entry
	for _, uid := range l.owners[device{pool, name}] {
		if s := l.claims[uid]; s != nil && s.entry.live() {
			owners = append(owners, s.entry.clone())
		}
	}
	return owners
}

func (l *Ledger) entries(want func(e *Entry) bool) []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	var entries []Entry
	for _, s := range l.claims {
		if want(&s.entry) {
			entries = append(entries, s.entry.clone())
		}
	}
	return entries
}

// Unsettled gives the UIDs of claims whose file was bad and that were neither
// begun nor unprepared since: what they hold, and their CDI file, are to stay.
func (l *Ledger) Unsettled() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Sorted(maps.Keys(l.unsettled))
}

// Problems gives the files that could not be used, oldest first, at most 100.
func (l *Ledger) Problems() []Problem {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.problems)
}

// Stats gives the ledger's figures.
func (l *Ledger) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Stats{
		Entries: l.live, Tombstones: len(l.claims) - l.live, Bad: len(l.unsettled),
		Syncs: l.syncs.Load(), SyncTime: time.Duration(l.syncTime.Load()),
	}
}

// Close makes the journal durable and gives the directory back. No other call
// may be under way.
func (l *Ledger) Close() error {
	err := l.journal.sync(context.Background())
	if closeErr := l.lock.Close(); err == nil && closeErr != nil {
		err = fmt.Errorf("close ledger: %w", closeErr)
	}
	return err
}

func (l *Ledger) badDir() string { return filepath.Join(l.dir, "bad") }
func (l *Ledger) oldDir() string { return filepath.Join(l.dir, "bad", "settled") }
