package kvtier

import (
	"context"
	"fmt"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/kvtier/arena"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/index"
	"github.com/hearth-dev/hearth/kvtier/segment"
)

// PutOptions say more of a block that is stored.
type PutOptions struct {
	// Parent is the block before it in its prefix, where HasParent says so. A
	// wrong one costs nothing but the order in which blocks leave.
	Parent    block.Key
	HasParent bool
}

// Put is a block being stored: nobody finds it before Commit.
type Put struct {
	space  *Namespace
	key    block.Key
	opts   PutOptions
	slot   arena.Slot
	data   []byte
	filled int
	hash   *xxh3.Hasher
	ended  bool
}

// Put begins to store a block of size bytes. It never waits: errors wrap
// ErrDropped where there is no room for it now, ErrRemoved, or block.ErrInvalid.
func (n *Namespace) Put(key block.Key, size int, opts PutOptions) (*Put, error) {
	if size < block.MinSize || size > block.MaxSize {
		return nil, fmt.Errorf("store block: %w: a block has %d to %d bytes, not %d", block.ErrInvalid, block.MinSize, block.MaxSize, size)
	}
	slot, err := n.tenant.room(size)
	if err != nil {
		return nil, fmt.Errorf("store block: %w", err)
	}
	return &Put{
		space: n, key: key, opts: opts, slot: slot, data: n.tenant.cache.arena.Bytes(slot, size), hash: xxh3.New(),
	}, nil
}

// room gives a slot for size bytes that the tenant may take.
func (t *Tenant) room(size int) (arena.Slot, error) {
	cost := t.cache.arena.Cost(size)
	for range maxEvictions {
		t.mu.Lock()
		if t.gone {
			t.mu.Unlock()
			return 0, ErrRemoved
		}
		if limit := t.limitLocked(); cost > limit {
			t.mu.Unlock()
			t.stats.droppedLarge.Add(1)
			return 0, fmt.Errorf("%w: %d bytes are more than the tenant may have in RAM, %d", ErrDropped, cost, limit)
		}
		for t.used+cost > t.limitLocked() {
			if !t.evictLocked() {
				t.mu.Unlock()
				t.stats.droppedFull.Add(1)
				return 0, fmt.Errorf("%w: all that the tenant has in RAM is in use", ErrDropped)
			}
		}
		t.used += cost
		t.mu.Unlock()
		slot, err := t.cache.arena.Alloc(size)
		if err == nil {
			return slot, nil
		}
		t.mu.Lock()
		t.used -= cost
		t.mu.Unlock()
		if !t.cache.reclaim(t, cost) {
			break
		}
	}
	t.stats.droppedFull.Add(1)
	return 0, fmt.Errorf("%w: RAM is full of blocks in use", ErrDropped)
}

// Bytes is the memory that the caller fills, front to back. It begins at a page.
func (p *Put) Bytes() []byte { return p.data }

// Fill says that the next n bytes are in place. It makes their checksum, which
// costs least while they are in the processor's cache: every 64 to 256 KiB.
func (p *Put) Fill(n int) {
	_, _ = p.hash.Write(p.data[p.filled : p.filled+n])
	p.filled += n
}

// Abort gives the room back. After Commit it does nothing.
func (p *Put) Abort() {
	if p.ended {
		return
	}
	p.ended = true
	t := p.space.tenant
	t.mu.Lock()
	defer t.mu.Unlock()
	t.freeLocked(p.slot, len(p.data))
}

// Commit makes the block visible. It waits only where other bytes of the key are
// on a drive, until those are durably void; where that fails, or ctx ends, the key
// has no block. A Put that is not filled, or has ended, is an error; it ends in
// any case.
func (p *Put) Commit(ctx context.Context) error {
	defer p.Abort()
	if p.ended || p.filled != len(p.data) {
		return fmt.Errorf("store block: %w: %d of %d bytes are filled", block.ErrInvalid, p.filled, len(p.data))
	}
	n, t := p.space, p.space.tenant
	sum := p.hash.Sum128().Bytes()
	print := n.print(p.key)
	for {
		t.mu.Lock()
		if t.gone {
			t.mu.Unlock()
			return fmt.Errorf("store block: %w", ErrRemoved)
		}
		id := t.index.Find(print)
		if !t.presentLocked(id) {
			p.enterLocked(id, print, sum, false)
			t.mu.Unlock()
			return nil
		}
		if r, here := t.index.Resident(id); here && r.Key == p.key && r.Sum == sum && t.index.Size(id) == len(p.data) {
			t.touchLocked(id)
			t.mu.Unlock()
			t.stats.putsSame.Add(1)
			return nil
		}
		if written := t.writing[id]; written != nil {
			t.mu.Unlock()
			select {
			case <-written:
				continue
			case <-ctx.Done():
				return fmt.Errorf("store block: %w", context.Cause(ctx))
			}
		}
		loc := t.index.Loc(id)
		if _, here := t.index.Resident(id); !here {
			// The drive has it, perhaps with these very bytes.
			drive := t.drive
			t.mu.Unlock()
			if r, err := drive.Stat(ctx, segment.Loc(loc), n.id, p.key); err == nil && r.Sum == sum && int(r.Size) == len(p.data) {
				t.mu.Lock()
				if t.index.Find(print) == id && t.index.Loc(id) == loc && !t.gone {
					if _, here := t.index.Resident(id); !here {
						p.enterLocked(id, print, sum, true)
						t.mu.Unlock()
						return nil
					}
				}
				t.mu.Unlock()
				continue
			}
			t.mu.Lock()
			if t.gone || t.index.Find(print) != id || t.index.Loc(id) != loc || t.writing[id] != nil {
				t.mu.Unlock()
				continue
			}
		}
		return p.replaceLocked(ctx, id, print, sum)
	}
}

// replaceLocked puts the block in place of other bytes of its key. It is called
// locked and returns unlocked.
func (p *Put) replaceLocked(ctx context.Context, id index.ID, print index.Print, sum [16]byte) error {
	n, t := p.space, p.space.tenant
	loc, drive := t.index.Loc(id), t.drive
	var upto uint64
	if loc != 0 {
		upto = drive.LastSeq()
	}
	if _, here := t.index.Resident(id); here {
		t.leaveLocked(id)
	}
	t.index.SetLoc(id, 0)
	t.stats.putsOther.Add(1)
	if loc == 0 {
		p.enterLocked(id, print, sum, false)
		t.mu.Unlock()
		return nil
	}
	t.index.Drop(id)
	t.mu.Unlock()
	// Until the old bytes are void on the drive a crash brings them back: only then
	// is the new block shown, whose holder may never see the old one again.
	if err := drive.Delete(ctx, []segment.Tombstone{{Namespace: n.id, Key: p.key, Upto: upto}}); err != nil {
		return fmt.Errorf("store block in place of another: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.gone {
		return fmt.Errorf("store block: %w", ErrRemoved)
	}
	if id = t.index.Find(print); t.presentLocked(id) {
		return nil // somebody stored it meanwhile: that one is as new
	}
	p.enterLocked(id, print, sum, false)
	return nil
}

// enterLocked makes the block one that is found. id is its entry, 0 where it has
// none.
func (p *Put) enterLocked(id index.ID, print index.Print, sum [16]byte, again bool) {
	n, t := p.space, p.space.tenant
	var parent index.ID
	if p.opts.HasParent {
		parent = t.index.Find(n.print(p.opts.Parent))
	}
	seen := t.index.Seen(print)
	switch {
	case id == 0:
		id = t.index.Add(print, n.place, len(p.data), parent)
	case !again:
		t.index.SetSize(id, len(p.data))
		t.index.SetTouches(id, 0)
	}
	if id != 0 && parent != 0 && t.index.Parent(id) == 0 {
		t.index.SetParent(id, parent)
	}
	hold := t.index.Enter(id, index.Resident{Key: p.key, Sum: sum, Slot: uint32(p.slot)}, again)
	p.ended = true // the slot is the index's now
	t.stats.puts.Add(1)
	t.stats.putBytes.Add(int64(len(p.data)))
	if seen {
		t.index.Touch(id) // it was here lately
	}
	t.touchLocked(id)
	t.releaseLocked(hold)
	t.cache.events.add(t, n.id, p.key, EventStored, TierRAM)
}

// Delete ends blocks: nobody finds them any more, durably where they are on a
// drive. removed is how many were there.
func (n *Namespace) Delete(ctx context.Context, keys ...block.Key) (removed int, err error) {
	t := n.tenant
	var voids []segment.Tombstone
	t.mu.Lock()
	for _, key := range keys {
		for {
			id := t.index.Find(n.print(key))
			if written := t.writing[id]; id != 0 && written != nil {
				t.mu.Unlock()
				select {
				case <-written:
				case <-ctx.Done():
					return removed, fmt.Errorf("delete blocks: %w", context.Cause(ctx))
				}
				t.mu.Lock()
				continue
			}
			if t.gone || !t.presentLocked(id) {
				break
			}
			removed++
			if _, here := t.index.Resident(id); here {
				t.leaveLocked(id)
			}
			if t.index.Loc(id) != 0 {
				voids = append(voids, segment.Tombstone{Namespace: n.id, Key: key, Upto: t.drive.LastSeq()})
				t.index.SetLoc(id, 0)
			}
			t.index.Drop(id)
			t.cache.events.add(t, n.id, key, EventRemoved, TierRAM)
			break
		}
	}
	drive := t.drive
	t.mu.Unlock()
	t.stats.deletes.Add(int64(removed))
	if len(voids) == 0 {
		return removed, nil
	}
	if err := drive.Delete(ctx, voids); err != nil {
		return removed, fmt.Errorf("delete blocks: %w", err)
	}
	return removed, nil
}
