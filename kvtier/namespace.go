package kvtier

import (
	"context"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/kvtier/arena"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/index"
)

// Namespace is the blocks of one identity of a tenant. It is safe for concurrent
// use.
type Namespace struct {
	tenant *Tenant
	id     block.Namespace
	place  uint16
	tokens int // in a block; 0 where it is not known
}

// ID is the namespace's identifier, Tenant whose it is.
func (n *Namespace) ID() block.Namespace { return n.id }

// Tenant is whose blocks these are.
func (n *Namespace) Tenant() *Tenant { return n.tenant }

func (n *Namespace) print(key block.Key) index.Print {
	return index.PrintOf(n.tenant.seed, n.place, key)
}

// Lookup tells whether a Get would find the block, and its length in bytes,
// without I/O. A block on a drive whose load would take longer than to compute it
// anew is told to be absent. It counts as a use of the block.
func (n *Namespace) Lookup(key block.Key) (size int, ok bool) {
	t := n.tenant
	t.mu.Lock()
	defer t.mu.Unlock()
	id := t.index.Find(n.print(key))
	if !t.presentLocked(id) || !n.worthLocked(id) {
		t.stats.lookupMisses.Add(1)
		return 0, false
	}
	t.touchLocked(id)
	t.stats.lookupHits.Add(1)
	return t.index.Size(id), true
}

// LookupPrefix is Lookup for blocks that follow each other: it gives how many of
// the first keys are there, up to the first that is not, and asks no further.
func (n *Namespace) LookupPrefix(keys []block.Key) (found int) {
	t := n.tenant
	prints := make([]index.Print, len(keys))
	ids := make([]index.ID, len(keys))
	for i, key := range keys {
		prints[i] = n.print(key)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.index.FindAll(prints, ids)
	for _, id := range ids {
		if !t.presentLocked(id) || !n.worthLocked(id) {
			t.stats.lookupMisses.Add(1)
			break
		}
		t.touchLocked(id)
		found++
	}
	t.stats.lookupHits.Add(int64(found))
	return found
}

// presentLocked says whether an entry's block is on a tier.
func (t *Tenant) presentLocked(id index.ID) bool {
	if id == 0 {
		return false
	}
	_, here := t.index.Resident(id)
	return here || t.index.Loc(id) != 0
}

// touchLocked counts a use, and has the block written where that makes it worth
// it.
func (t *Tenant) touchLocked(id index.ID) {
	t.index.Touch(id)
	t.considerLocked(id)
}

// Pin is a hold on a block that a Get is to find.
type Pin struct {
	tenant *Tenant
	hold   index.Hold // of a block in RAM
	drop   func()     // of a block on a drive
	size   int
	ended  bool // guarded by the tenant
}

// Pin is Lookup that holds: until the Pin's Release a Get of the key finds the
// block, unless somebody deletes it or the drive that has it is damaged.
func (n *Namespace) Pin(key block.Key) (*Pin, bool) {
	t := n.tenant
	t.mu.Lock()
	defer t.mu.Unlock()
	id := t.index.Find(n.print(key))
	if !t.presentLocked(id) || !n.worthLocked(id) {
		t.stats.lookupMisses.Add(1)
		return nil, false
	}
	p := &Pin{tenant: t, size: t.index.Size(id)}
	if _, here := t.index.Resident(id); here {
		if !t.holdsMoreLocked(t.index.IsHeld(id), p.size) {
			t.stats.lookupMisses.Add(1)
			return nil, false
		}
		p.hold, _ = t.index.Hold(id)
		t.settleLentLocked()
	} else if drop, ok := t.drive.Pin(t.locLocked(id)); ok {
		p.drop = drop
	} else {
		t.stats.lookupMisses.Add(1)
		return nil, false
	}
	t.touchLocked(id)
	t.stats.lookupHits.Add(1)
	t.stats.pins.Add(1)
	return p, true
}

// Size is the block's length in bytes.
func (p *Pin) Size() int { return p.size }

// Release ends the pin; again it does nothing.
func (p *Pin) Release() {
	t := p.tenant
	t.mu.Lock()
	if p.ended {
		t.mu.Unlock()
		return
	}
	p.ended = true
	t.stats.pins.Add(-1)
	if p.hold != 0 {
		t.releaseLocked(p.hold)
	}
	t.mu.Unlock()
	if p.drop != nil {
		p.drop()
	}
}

// Block is a block's bytes in the RAM of the tier.
type Block struct {
	tenant *Tenant
	hold   index.Hold // 0: the slot is the Block's own
	slot   arena.Slot
	size   int
	sum    [16]byte
	tier   Tier
	tokens int
}

// Tier is where a block was found.
type Tier uint8

// Tiers.
const (
	TierRAM Tier = iota
	TierNVMe

	Tiers = 2 // how many there are
)

// String is "ram" or "nvme".
func (t Tier) String() string {
	if t == TierRAM {
		return "ram"
	}
	return "nvme"
}

// Bytes are the block's bytes, verified. They are the tier's memory: nobody may
// write there, and they are valid until Release.
func (b *Block) Bytes() []byte { return b.tenant.cache.arena.Bytes(b.slot, b.size) }

// Tier is where the block was.
func (b *Block) Tier() Tier { return b.tier }

// Tokens is how many an engine need not compute for the block, 0 where that is not
// known.
func (b *Block) Tokens() int { return b.tokens }

// Release gives the memory back. It is called exactly once.
func (b *Block) Release() {
	t := b.tenant
	t.mu.Lock()
	defer t.mu.Unlock()
	if b.hold != 0 {
		t.releaseLocked(b.hold)
		return
	}
	t.dropLooseLocked(b.slot, b.size)
}

// Get gives a block from RAM or from a drive. Errors wrap ErrMiss where it is not
// there or its bytes are not what was stored, or ctx's cause.
func (n *Namespace) Get(ctx context.Context, key block.Key) (*Block, error) {
	b, err := n.get(ctx, key, false)
	if errors.Is(err, ErrMiss) {
		n.tenant.stats.misses.Add(1)
	}
	return b, err
}

// get is Get that counts no miss, and no hit and no use either where the block is
// lent to another node.
func (n *Namespace) get(ctx context.Context, key block.Key, lent bool) (*Block, error) {
	t := n.tenant
	for range maxTries {
		t.mu.Lock()
		id := t.index.Find(n.print(key))
		if r, here := t.residentLocked(id); here {
			b, err := n.fromRAM(ctx, id, r, key, lent) // unlocks
			if b != nil || err != nil {
				return b, err
			}
			continue // it was damaged; perhaps a drive has it
		}
		if id == 0 || t.index.Loc(id) == 0 {
			t.mu.Unlock()
			return nil, ErrMiss
		}
		b, again, err := n.fromDrive(ctx, id, key, lent) // unlocks
		if !again {
			return b, err
		}
	}
	return nil, fmt.Errorf("%w: it moved %d times while it was read", ErrMiss, maxTries)
}

// maxTries bounds the tries of a Get whose block moves.
const maxTries = 8

func (t *Tenant) residentLocked(id index.ID) (index.Resident, bool) {
	if id == 0 {
		return index.Resident{}, false
	}
	return t.index.Resident(id)
}

// fromRAM gives a block in RAM; neither block nor error where its bytes are not
// what was stored. It is called locked and returns unlocked.
func (n *Namespace) fromRAM(ctx context.Context, id index.ID, r index.Resident, key block.Key, lent bool) (*Block, error) {
	t := n.tenant
	if r.Key != key {
		t.mu.Unlock()
		return nil, ErrMiss // another key of the same fingerprint
	}
	if !t.holdsMoreLocked(t.index.IsHeld(id), t.index.Size(id)) {
		t.mu.Unlock()
		t.stats.noRoom.Add(1)
		return nil, fmt.Errorf("%w: %w", ErrMiss, errLent)
	}
	hold, _ := t.index.Hold(id)
	t.settleLentLocked()
	if !lent {
		t.touchLocked(id)
	}
	b := &Block{tenant: t, hold: hold, slot: arena.Slot(r.Slot), size: t.index.Size(id), sum: r.Sum, tier: TierRAM}
	t.reads++
	b.tokens = n.tokensLocked(b.size)
	verify := int(t.reads)%t.cache.opts.VerifyEvery == 0
	t.mu.Unlock()
	if verify && sumOf(b.Bytes()) != r.Sum {
		t.noteDamage(n.id, key, TierRAM, "its bytes in RAM have another checksum than when they were stored")
		err := t.giveUpDamaged(ctx, id, hold)
		return nil, err
	}
	if !lent {
		t.stats.hit(b)
	}
	return b, nil
}

// hit counts a block that was read.
func (c *counters) hit(b *Block) {
	c.hits[b.tier].Add(1)
	c.hitBytes[b.tier].Add(int64(b.size))
	c.hitTokens[b.tier].Add(int64(b.tokens))
}

// giveUpDamaged takes a block out of RAM whose bytes are not what was stored, once
// the writer is done with it: else nobody would know of its copy on the drive.
func (t *Tenant) giveUpDamaged(ctx context.Context, id index.ID, hold index.Hold) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	defer t.releaseLocked(hold)
	for t.index.Current(hold) == id && t.writing[id] != nil {
		written := t.writing[id]
		t.mu.Unlock()
		select {
		case <-written:
		case <-ctx.Done():
		}
		t.mu.Lock()
		if ctx.Err() != nil {
			return fmt.Errorf("read block: %w", context.Cause(ctx))
		}
	}
	if t.index.Current(hold) == id {
		t.leaveLocked(id)
		t.index.Drop(id)
	}
	return nil
}

// minBlock is the least that holds any tokens, in bytes. What is smaller is what a
// client keeps beside a block, such as its shape.
const minBlock = 1 << 10

// tokensLocked is the number of tokens in a block of so many bytes, 0 where it is
// not known.
func (n *Namespace) tokensLocked(size int) int {
	switch {
	case size < minBlock:
		return 0
	case n.tokens > 0:
		return n.tokens
	}
	return n.tenant.spec.BlockTokens
}

// sumOf is the XXH3-128 of a block, high half first.
func sumOf(data []byte) [16]byte { return xxh3.Hash128(data).Bytes() }
