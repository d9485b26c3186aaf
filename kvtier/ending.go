package kvtier

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/index"
	"github.com/hearth-dev/hearth/kvtier/segment"
)

// ending is a key that nobody finds any more and whose records on the drives are
// not void yet. Until they are, durably, a crash might bring them back: over other
// bytes that were stored under the key meanwhile, or after somebody was told that
// it is deleted. So nothing is shown under it, and nobody is told.
type ending struct {
	space block.Namespace
	key   block.Key
	// trying is closed when the try under way is over. It is nil where that failed:
	// then the next who wants the key tries again, and so does the writer.
	trying chan struct{}
}

// maxEnded bounds the keys that the writer ends in one go.
const maxEnded = 512

// endLocked begins to end a key that has left the index, or to try it again. The
// caller calls void with it.
func (t *Tenant) endLocked(print index.Print, space block.Namespace, key block.Key) {
	t.ending[print] = &ending{space: space, key: key, trying: make(chan struct{})}
}

// oweLocked notes that a key is to be ended, and leaves that to others.
func (t *Tenant) oweLocked(print index.Print, space block.Namespace, key block.Key) {
	if t.ending[print] == nil {
		t.ending[print] = &ending{space: space, key: key}
		t.signal()
	}
}

// void makes the records of keys void that endLocked was called for, durably.
// Where that fails they are owed.
func (t *Tenant) void(ctx context.Context, prints []index.Print) error {
	if len(prints) == 0 {
		return nil
	}
	t.mu.Lock()
	drive := t.drive
	var stones []segment.Tombstone
	for _, print := range prints {
		if e := t.ending[print]; e != nil {
			stones = append(stones, segment.Tombstone{Namespace: e.space, Key: e.key})
		}
	}
	stones = append(stones, t.twice...) // to make room for the others may cost one of the two
	t.mu.Unlock()
	err := error(ErrRemoved)
	if drive != nil {
		// Nothing was written of these keys since they left the index, so that all of
		// their records are void.
		err = drive.Delete(ctx, stones)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, print := range prints {
		e := t.ending[print]
		if e == nil {
			continue // its tenant was cleared, or removed
		}
		close(e.trying)
		if e.trying = nil; err == nil || t.drive != drive {
			delete(t.ending, print)
		}
	}
	switch {
	case err == nil:
		t.endedTwiceLocked(drive)
		return nil
	case t.gone:
		return ErrRemoved
	case t.drive != drive:
		return errClearing
	}
	t.signal()
	return err
}

// errClearing says that the tenant's blocks are being cleared, or could not be:
// until they are, what is on the drives might come back over what is stored.
var errClearing = fmt.Errorf("%w: the tenant is being cleared", ErrDropped)

// clearingLocked says whether the tenant's drives are away.
func (t *Tenant) clearingLocked() bool { return t.drive == nil && t.spec.NVMe > 0 && !t.bare }

// settle tries again to end what is owed.
func (t *Tenant) settle(ctx context.Context) error {
	for {
		var prints []index.Print
		t.mu.Lock()
		if t.drive != nil {
			for print, e := range t.ending {
				if e.trying == nil && len(prints) < maxEnded {
					e.trying = make(chan struct{})
					prints = append(prints, print)
				}
			}
		}
		t.mu.Unlock()
		if len(prints) == 0 {
			return nil
		}
		if err := t.void(ctx, prints); err != nil {
			return err
		}
		t.log.Info("blocks are ended on the drives now that could not be before", slog.Int("blocks", len(prints)))
	}
}

// settleTwice ends the older record of keys that a start found at two places with
// the same bytes: else it might outlive the other, unknown to the index, and come
// back over other bytes. It is called before anything is written or given up, and
// not at the start: a process that only reads, or is killed on its way up, then
// takes no segment for it.
func (t *Tenant) settleTwice(ctx context.Context) error {
	t.mu.Lock()
	list, drive := t.twice, t.drive
	t.mu.Unlock()
	if len(list) == 0 || drive == nil {
		return nil
	}
	if err := drive.Delete(ctx, list); err != nil {
		return fmt.Errorf("end blocks that are on the drives twice: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.endedTwiceLocked(drive)
	return nil
}

func (t *Tenant) endedTwiceLocked(drive *segment.Log) {
	if t.drive == drive {
		t.twice = nil
	}
}
