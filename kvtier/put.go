package kvtier

import (
	"context"
	"errors"
	"fmt"
	"sync"

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
	// ParentComes says that the parent may be stored after this block.
	ParentComes bool
	// IfAbsent stores nothing where the key has a block when this one is committed:
	// what comes from elsewhere never takes the place of what was stored here.
	IfAbsent bool
}

// Put is a block being stored: nobody finds it before Commit.
type Put struct {
	space  *Namespace
	key    block.Key
	opts   PutOptions
	slot   arena.Slot
	data   []byte
	filled int
	hash   *xxh3.Hasher // between the first Fill and the last
	sum    [16]byte     // once all is filled
	ended  bool
}

// hashers are those of Puts that have ended: of a kilobyte each, they would keep
// the collector busy.
var hashers = sync.Pool{New: func() any { return xxh3.New() }}

// Put begins to store a block of size bytes. It never waits: errors wrap
// ErrDropped where there is no room for it now, ErrRemoved, or block.ErrInvalid.
func (n *Namespace) Put(key block.Key, size int, opts PutOptions) (*Put, error) {
	if size > block.MaxSize {
		n.tenant.stats.droppedLarge.Add(1)
	}
	if size < block.MinSize || size > block.MaxSize {
		return nil, fmt.Errorf("store block: %w: a block has %d to %d bytes, not %d", block.ErrInvalid, block.MinSize, block.MaxSize, size)
	}
	slot, err := n.tenant.looseRoom(size)
	if err != nil {
		return nil, fmt.Errorf("store block: %w", err)
	}
	return &Put{
		space: n, key: key, opts: opts, slot: slot, data: n.tenant.cache.arena.Bytes(slot, size),
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
		if !errors.Is(err, arena.ErrFull) { // what is evicted would not help
			t.stats.droppedFull.Add(1)
			return 0, fmt.Errorf("%w: %w", ErrDropped, err)
		}
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
// costs least at once, and while they are in the processor's cache: every 256 KiB to 1 MiB.
func (p *Put) Fill(n int) {
	switch {
	case n == 0:
		return
	case p.filled == 0 && n == len(p.data):
		p.sum = xxh3.Hash128(p.data).Bytes()
		p.filled = n
		return
	case p.hash == nil:
		p.hash = hashers.Get().(*xxh3.Hasher) //nolint:forcetypeassert // the pool has no others
		p.hash.Reset()
	}
	if _, _ = p.hash.Write(p.data[p.filled : p.filled+n]); p.filled+n == len(p.data) {
		p.sum = p.hash.Sum128().Bytes()
		hashers.Put(p.hash)
		p.hash = nil
	}
	p.filled += n
}

// Abort gives the room back. After Commit it does nothing.
func (p *Put) Abort() {
	if p.ended {
		return
	}
	p.ended = true
	if p.hash != nil {
		hashers.Put(p.hash)
		p.hash = nil
	}
	t := p.space.tenant
	t.mu.Lock()
	defer t.mu.Unlock()
	t.dropLooseLocked(p.slot, len(p.data))
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
	print := n.print(p.key)
	for {
		wait, end, done, err := p.tryCommit(ctx, print, p.sum)
		switch {
		case err != nil:
			return fmt.Errorf("store block: %w", err)
		case done:
			return nil
		case end:
			// Until the old bytes are void on the drive a crash brings them back: only
			// then is the new block shown, whose holder may never see the old one again.
			if err := t.void(ctx, []index.Print{print}); err != nil {
				return fmt.Errorf("store block in place of another: %w", err)
			}
		case wait != nil:
			select {
			case <-wait:
			case <-ctx.Done():
				return fmt.Errorf("store block: %w", context.Cause(ctx))
			}
		}
	}
}

// tryCommit makes the block visible where nothing is in its way, else it says what
// to wait for, or that endLocked was called for the key, or nothing, and then it
// is to be called again.
func (p *Put) tryCommit(ctx context.Context, print index.Print, sum [16]byte) (wait <-chan struct{}, end, done bool, err error) {
	t := p.space.tenant
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.gone {
		return nil, false, false, ErrRemoved
	}
	if t.clearingLocked() {
		t.stats.droppedDrive.Add(1)
		return nil, false, false, errClearing
	}
	if e := t.ending[print]; e != nil {
		if p.opts.IfAbsent {
			return nil, false, true, nil // it was ended here
		}
		if e.trying == nil {
			t.endLocked(print, e.space, e.key)
			return nil, true, false, nil
		}
		return e.trying, false, false, nil
	}
	id := t.index.Find(print)
	if !t.presentLocked(id) {
		p.enterLocked(id, print, sum, false)
		return nil, false, true, nil
	}
	if p.opts.IfAbsent {
		return nil, false, true, nil
	}
	r, here := t.index.Resident(id)
	if here && r.Key == p.key && r.Sum == sum && t.index.Size(id) == len(p.data) {
		t.touchLocked(id)
		t.stats.putsSame.Add(1)
		return nil, false, true, nil
	}
	if written := t.writing[id]; written != nil {
		return written, false, false, nil
	}
	if !here {
		// The drive has it, perhaps with these very bytes.
		same := p.sameOnDriveLocked(ctx, segment.Loc(t.index.Loc(id)), sum)
		switch again := t.drive != same.drive || t.index.Find(print) != id || t.writing[id] != nil || t.ending[print] != nil; {
		case again || same.loc != t.locLocked(id):
			return nil, false, false, nil
		case same.yes:
			if _, here := t.index.Resident(id); !here {
				p.enterLocked(id, print, sum, true)
				return nil, false, true, nil
			}
			return nil, false, false, nil
		}
	}
	return nil, p.replaceLocked(id, print, sum), p.ended, nil
}

// stated is what was found of a block on a drive.
type stated struct {
	drive *segment.Log
	loc   segment.Loc
	yes   bool
}

// sameOnDriveLocked says whether what lies at loc are these very bytes. It lets go
// of the tenant meanwhile.
func (p *Put) sameOnDriveLocked(ctx context.Context, loc segment.Loc, sum [16]byte) stated {
	t := p.space.tenant
	drive := t.drive
	t.mu.Unlock()
	defer t.mu.Lock()
	r, err := drive.Stat(ctx, loc, p.space.id, p.key)
	return stated{drive, loc, err == nil && r.Sum == sum && int(r.Size) == len(p.data)}
}

// replaceLocked takes other bytes of the key away, and puts the block in their
// place where they are in RAM alone. Else their end on the drive has begun.
func (p *Put) replaceLocked(id index.ID, print index.Print, sum [16]byte) (end bool) {
	n, t := p.space, p.space.tenant
	if _, here := t.index.Resident(id); here {
		t.leaveLocked(id)
	}
	t.stats.putsOther.Add(1)
	if t.index.Loc(id) == 0 {
		p.enterLocked(id, print, sum, false)
		return false
	}
	t.index.SetLoc(id, 0)
	t.index.Drop(id)
	t.endLocked(print, n.id, p.key)
	return true
}

// enterLocked makes the block one that is found. id is its entry, 0 where it has
// none.
func (p *Put) enterLocked(id index.ID, print index.Print, sum [16]byte, again bool) {
	n, t := p.space, p.space.tenant
	var parent index.ID
	if p.opts.HasParent {
		before := n.print(p.opts.Parent)
		if parent = t.index.Find(before); parent == 0 && id == 0 && p.opts.ParentComes {
			parent = t.index.Add(before, n.place, 0, 0) // which ends with its last child
		}
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
	t.loosenLocked(-t.cache.arena.Cost(len(p.data)))
	t.stats.puts.Add(1)
	t.stats.putBytes.Add(int64(len(p.data)))
	if t.drive != nil && !t.drive.Takes(len(p.data)) {
		t.stats.droppedLarge.Add(1) // RAM alone has it
	}
	if seen {
		t.index.Touch(id) // it was here lately
	}
	t.touchLocked(id)
	t.releaseLocked(hold)
	t.cache.events.add(t, n.id, p.key, EventStored, TierRAM)
}

// Delete ends blocks: nobody finds them any more, durably where they are on a
// drive. removed is how many were there. Where that fails, or ctx ends, they are
// not found, but might be after a crash.
func (n *Namespace) Delete(ctx context.Context, keys ...block.Key) (removed int, err error) {
	t := n.tenant
	if err := n.settleWritten(ctx, keys); err != nil {
		return 0, fmt.Errorf("delete blocks: %w", err)
	}
	if t.clearingLocked() {
		t.mu.Unlock()
		return 0, fmt.Errorf("delete blocks: %w", errClearing)
	}
	var mine []index.Print
	var others []<-chan struct{}
	for _, key := range keys {
		print := n.print(key)
		if e := t.ending[print]; e != nil {
			// Somebody ends it, or could not: it is not there, and not gone yet.
			if e.trying != nil {
				others = append(others, e.trying)
				continue
			}
			t.endLocked(print, e.space, e.key)
			mine = append(mine, print)
			continue
		}
		id := t.index.Find(print)
		if !t.presentLocked(id) {
			continue
		}
		removed++
		if _, here := t.index.Resident(id); here {
			t.leaveLocked(id)
		}
		if t.index.Loc(id) != 0 {
			t.index.SetLoc(id, 0)
			t.endLocked(print, n.id, key)
			mine = append(mine, print)
		}
		t.index.Drop(id)
		t.cache.events.add(t, n.id, key, EventRemoved, TierRAM)
	}
	t.mu.Unlock()
	t.stats.deletes.Add(int64(removed))
	if err := t.void(ctx, mine); err != nil {
		return removed, fmt.Errorf("delete blocks: %w", err)
	}
	for _, done := range others {
		select {
		case <-done:
		case <-ctx.Done():
			return removed, fmt.Errorf("delete blocks: %w", context.Cause(ctx))
		}
	}
	if len(others) > 0 {
		// What others could not end is tried again.
		more, err := n.Delete(ctx, keys...)
		return removed + more, err
	}
	return removed, nil
}

// settleWritten waits until none of the keys is in the writer's hands, and returns
// with the tenant locked, but for an error.
func (n *Namespace) settleWritten(ctx context.Context, keys []block.Key) error {
	t := n.tenant
	t.mu.Lock()
	for i := 0; i < len(keys); {
		id := t.index.Find(n.print(keys[i]))
		written := t.writing[id]
		if id == 0 || written == nil {
			i++
			continue
		}
		t.mu.Unlock()
		select {
		case <-written:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		t.mu.Lock()
		i = 0 // what was looked at may be written now
	}
	return nil
}
