package ledger

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
)

func byUID(a, b Entry) int { return strings.Compare(a.UID, b.UID) }

func byAge(a, b Entry) int { return cmp.Or(a.Gone.Compare(b.Gone), byUID(a, b)) }

// Sweep syncs the journal, removes its oldest files past its limits, and the
// tombstones that have had their day and owe nothing; past 256 tombstones the
// oldest go, whatever they owe.
func (l *Ledger) Sweep(ctx context.Context) error {
	if err := l.journal.sync(ctx); err != nil {
		return fmt.Errorf("sweep ledger: %w", err)
	}
	gone := l.Gone()
	over := len(gone) - maxTombstones
	var uids []string
	for i := range gone {
		if old := l.now().Sub(gone[i].Gone) >= keepTombstone && len(gone[i].Owed) == 0; old || i < over {
			uids = append(uids, gone[i].UID)
		}
	}
	if err := l.drop(ctx, uids); err != nil {
		return fmt.Errorf("sweep ledger: %w", err)
	}
	if err := l.journal.take(ctx); err != nil {
		return fmt.Errorf("sweep ledger: %w", err)
	}
	defer l.journal.give()
	if err := l.journal.prune(); err != nil {
		return fmt.Errorf("sweep ledger: %w", err)
	}
	return nil
}

// drop removes tombstones whose journal lines are on the drive.
func (l *Ledger) drop(ctx context.Context, uids []string) error {
	if len(uids) == 0 {
		return nil
	}
	if err := l.acquire(ctx, uids); err != nil {
		return err
	}
	defer l.release(uids)
	var removed []string
	for _, uid := range l.droppable(uids) {
		if err := l.removeFile(uid); err != nil {
			return err
		}
		removed = append(removed, uid)
	}
	if err := l.syncDir(l.dir); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, uid := range removed {
		delete(l.claims, uid)
	}
	return nil
}

// droppable are the claims that are still tombstones.
func (l *Ledger) droppable(uids []string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(uids), func(uid string) bool {
		s := l.claims[uid]
		return s == nil || s.entry.State != Gone || !l.journal.syncedAll(s.entry.Lines)
	})
}
