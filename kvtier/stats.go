package kvtier

import (
	"cmp"
	"slices"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/units"
)

// counters of a tenant, since the process began.
type counters struct {
	lookupHits, lookupMisses, gated                      atomic.Int64
	hits, hitBytes, hitTokens                            [2]atomic.Int64 // by Tier
	misses, goneReads, noRoom                            atomic.Int64
	puts, putBytes, putsSame, putsOther                  atomic.Int64
	droppedFull, droppedLarge, droppedWear, droppedDrive atomic.Int64
	queueFull, evicted, unread, demoted, deletes         atomic.Int64
	written, writtenBytes, rewritten, unwanted           atomic.Int64
	damaged                                              [2]atomic.Int64
	pins                                                 atomic.Int64
}

// TierStats is what a tenant has on a tier.
type TierStats struct {
	Blocks int64
	Bytes  units.Bytes // of blocks
	// Used is the room taken: whole pages in RAM, whole segments on drives.
	Used, Budget units.Bytes
	// Hits, HitBytes and HitTokens count Gets that found a block here: tokens that
	// an engine need not compute, where their number is known.
	Hits, HitBytes, HitTokens int64
	Damaged                   int64
}

// TenantStats is what a tenant has and what happened to it since the process
// began.
type TenantStats struct {
	Kind, Name string
	Own        units.Bytes // RAM that nobody takes from it
	RAM, NVMe  TierStats
	Total      int64 // blocks; one that is on both tiers counts once
	Namespaces int
	// IndexBytes is the memory of the index.
	IndexBytes units.Bytes
	// Lookups that found a block and that did not; Gated are those of the latter
	// that found one which is not worth its load.
	LookupHits, LookupMisses, Gated int64
	Misses                          int64
	// Puts that were stored; Same had the bytes that were there, Other replaced
	// others.
	Puts, PutBytes, PutsSame, PutsOther int64
	// Blocks that were not stored: no room, more than all its RAM or (then RAM alone
	// has it) than its drives take, no wear left, the drives failed.
	DroppedFull, DroppedLarge, DroppedWear, DroppedDrive int64
	QueueFull                                            int64
	// Evicted left RAM and are nowhere, Unread of them were never used; Demoted
	// are on a drive.
	Evicted, Unread, Demoted, Deletes int64
	// Written are blocks and bytes put on drives, Rewritten of those that were
	// there before and moved, Unwanted those that left drives and were never read
	// there.
	Written, WrittenBytes, Rewritten, Unwanted int64
	Pins                                       int64
	Waiting                                    units.Bytes // to be written
	// Recovery is how long it took to take in what was on the drives, Recovered
	// the blocks found.
	Recovery  time.Duration
	Recovered int64
	// DrivesOut are drives that were given up: they are tried again. All count where
	// the tenant has NVMe and none of them is open.
	DrivesOut int64
}

// Stats tells of a tenant.
func (t *Tenant) Stats() TenantStats {
	c := &t.stats
	t.mu.Lock()
	s := TenantStats{
		Kind: t.kind, Name: t.name, Own: t.spec.Memory, Namespaces: len(t.record.Namespaces),
		IndexBytes: units.Bytes(t.index.Bytes() + t.index.ResidentBytes()), Waiting: units.Bytes(t.waiting),
		Recovery: t.recovery, Recovered: t.recovered,
	}
	blocks, bytes := t.index.InRAM()
	s.RAM = TierStats{Blocks: int64(blocks), Bytes: units.Bytes(bytes), Used: units.Bytes(t.used), Budget: units.Bytes(t.limitLocked())}
	blocks, bytes = t.index.OnDrive()
	s.NVMe = TierStats{Blocks: int64(blocks), Bytes: units.Bytes(bytes), Budget: t.spec.NVMe}
	s.Total = int64(t.index.Present())
	drive := t.drive
	if drive == nil && t.opened && t.spec.NVMe > 0 {
		s.DrivesOut = int64(len(t.cache.drives()))
	}
	t.mu.Unlock()
	if drive != nil {
		s.NVMe.Used, s.DrivesOut = units.Bytes(drive.Bytes()), int64(drive.Stats().Out)
	}
	for tier, of := range map[Tier]*TierStats{TierRAM: &s.RAM, TierNVMe: &s.NVMe} {
		of.Hits, of.HitBytes, of.HitTokens = c.hits[tier].Load(), c.hitBytes[tier].Load(), c.hitTokens[tier].Load()
		of.Damaged = c.damaged[tier].Load()
	}
	s.LookupHits, s.LookupMisses, s.Gated, s.Misses = c.lookupHits.Load(), c.lookupMisses.Load(), c.gated.Load(), c.misses.Load()
	s.Puts, s.PutBytes, s.PutsSame, s.PutsOther = c.puts.Load(), c.putBytes.Load(), c.putsSame.Load(), c.putsOther.Load()
	s.DroppedFull, s.DroppedLarge = c.droppedFull.Load()+c.noRoom.Load(), c.droppedLarge.Load()
	s.DroppedWear, s.DroppedDrive, s.QueueFull = c.droppedWear.Load(), c.droppedDrive.Load(), c.queueFull.Load()
	s.Evicted, s.Unread, s.Demoted, s.Deletes = c.evicted.Load(), c.unread.Load(), c.demoted.Load(), c.deletes.Load()
	s.Written, s.WrittenBytes, s.Rewritten, s.Unwanted = c.written.Load(), c.writtenBytes.Load(), c.rewritten.Load(), c.unwanted.Load()
	s.Pins = c.pins.Load()
	return s
}

func sortBy[T any](list []T, by func(T) int64) {
	slices.SortStableFunc(list, func(a, b T) int { return cmp.Compare(by(a), by(b)) })
}
