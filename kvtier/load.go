package kvtier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/index"
	"github.com/hearth-dev/hearth/kvtier/segment"
)

// load is a read from a drive that others who want the block wait for.
type load struct{ done chan struct{} }

func (t *Tenant) locLocked(id index.ID) segment.Loc { return segment.Loc(t.index.Loc(id)) }

// fromDrive reads a block from a drive into RAM, where it stays unless it is lent.
// again says to look anew. It is called locked and returns unlocked.
func (n *Namespace) fromDrive(ctx context.Context, id index.ID, key block.Key, lent bool) (b *Block, again bool, err error) {
	t := n.tenant
	print := t.index.Print(id)
	if other := t.loads[print]; other != nil {
		t.mu.Unlock()
		select {
		case <-other.done:
			return nil, true, nil
		case <-ctx.Done():
			return nil, false, fmt.Errorf("read block: %w", context.Cause(ctx))
		}
	}
	loc, size, drive := t.locLocked(id), t.index.Size(id), t.drive
	if !lent { // nobody here waits for what is lent, and would have to read it again
		mine := &load{done: make(chan struct{})}
		t.loads[print] = mine
		t.index.Touch(id)
		defer func() {
			t.mu.Lock()
			delete(t.loads, print)
			t.mu.Unlock()
			close(mine.done)
		}()
	}
	t.mu.Unlock()
	slot, err := t.looseRoom(size)
	if err != nil {
		t.stats.noRoom.Add(1)
		return nil, false, fmt.Errorf("%w: no RAM to read it into: %w", ErrMiss, err)
	}
	reading := t.cache.speed(loc).Begin(int64(size))
	r, err := drive.Read(ctx, loc, n.id, key, t.cache.arena.Padded(slot, size))
	if err == nil && int(r.Size) != size {
		err = fmt.Errorf("%w: it has %d bytes, not %d", segment.ErrDamaged, r.Size, size)
	}
	if err != nil {
		reading.Failed()
		again, err = n.failed(ctx, drive, id, loc, key, err)
		t.mu.Lock()
		t.dropLooseLocked(slot, size)
		t.mu.Unlock()
		return nil, again, err
	}
	reading.Done()
	t.mu.Lock()
	defer t.mu.Unlock()
	// Where the tenant was cleared meanwhile its drives count from the beginning, and
	// another block may lie at that very place.
	same := t.drive == drive && t.index.Find(print) == id && t.locLocked(id) == loc
	b = &Block{tenant: t, slot: slot, size: size, sum: r.Sum, tier: TierNVMe, tokens: n.tokensLocked(size)}
	if lent {
		return b, false, nil
	}
	t.stats.hit(b)
	if _, here := t.residentLocked(id); same && !here {
		b.hold = t.index.Enter(id, index.Resident{Key: key, Sum: r.Sum, Slot: uint32(slot)}, true)
		t.loosenLocked(-t.cache.arena.Cost(size)) // the index has it
		t.cache.events.add(t, n.id, key, EventStored, TierRAM)
	}
	return b, false, nil
}

// failed says what a read that failed means: again where the block moved
// meanwhile, else an error. What is damaged is ended durably before anything else
// is shown under its key, since a drive that gives it well at another time would
// bring it back over that; nobody waits for it here.
func (n *Namespace) failed(ctx context.Context, drive *segment.Log, id index.ID, loc segment.Loc, key block.Key, err error) (again bool, _ error) {
	t := n.tenant
	if ctx.Err() != nil {
		return false, fmt.Errorf("read block: %w", context.Cause(ctx))
	}
	gone, damaged := errors.Is(err, segment.ErrGone), errors.Is(err, segment.ErrDamaged)
	print := n.print(key)
	t.mu.Lock()
	same := t.drive == drive && t.index.Find(print) == id && t.locLocked(id) == loc
	if same && (gone || damaged) {
		t.index.SetLoc(id, 0)
		t.index.Drop(id)
	}
	if same && damaged {
		t.oweLocked(print, n.id, key)
	}
	t.mu.Unlock()
	if !same {
		return true, nil
	}
	switch {
	case gone:
		t.stats.goneReads.Add(1)
	case damaged:
		t.noteDamage(n.id, key, TierNVMe, err.Error())
	default: // there was no memory to read it, or the like
		t.log.Warn("a block on a drive was not read", slog.String("key", key.String()), slog.Any("error", err))
	}
	return false, fmt.Errorf("%w: %w", ErrMiss, err)
}

// noteDamage notes that a block's bytes are not what was stored.
func (t *Tenant) noteDamage(space block.Namespace, key block.Key, tier Tier, why string) {
	t.stats.damaged[tier].Add(1)
	t.log.Error("a block is damaged, it is a miss", slog.String("namespace", space.String()), slog.String("key", key.String()),
		slog.String("tier", tier.String()), slog.String("reason", why))
	t.cache.events.add(t, space, key, EventDamaged, tier)
}
