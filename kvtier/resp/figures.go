package resp

import (
	"sync"
	"sync/atomic"

	"github.com/hearth-dev/hearth/kvtier"
)

// figures are counted since the start.
type figures struct {
	hits, misses      atomic.Uint64
	found, absent     atomic.Uint64
	stored, dropped   atomic.Uint64
	refused           atomic.Uint64
	padded, unpadded  atomic.Uint64
	mismatched        atomic.Uint64
	deleted           atomic.Uint64
	bytesOut, bytesIn atomic.Uint64
	stalled, unpinned atomic.Uint64
	connections       atomic.Int64
}

// TenantStats are a tenant's figures since its start, but for those of now.
type TenantStats struct {
	Connections int64 // now

	Hits, Misses   uint64 // of GET and MGET
	Found, Absent  uint64 // of EXISTS
	Stored         uint64 // SETs that took effect
	Dropped        uint64 // SETs answered +OK that found no room
	Refused        uint64 // SETs answered with an error or nil
	Deleted        uint64
	PaddedNils     uint64 // misses of native connections that they can understand
	UnpaddedNils   uint64 // and those of which no size was known
	SizeMismatches uint64 // values that were there in another size than their family's
	StalledSets    uint64 // SETs given up because their bytes did not come
	ValueBytesOut  uint64
	ValueBytesIn   uint64
	Pins           int   // now
	PinnedBytes    int64 // now
	PinsExpired    uint64
	PinsRefused    uint64 // EXISTS beyond the bound
	Unpinned       uint64 // of these, answered :1 all the same
	HeldBytes      int64  // now, of values that wait for clients which do not read
	Models         map[string]ModelStats
}

// ModelStats are the figures of one model of a tenant.
type ModelStats struct {
	RAM, NVMe               ModelHits // of GET and MGET, by where the value was
	Misses, Stored, Dropped uint64
	BytesIn                 uint64 // of values stored
}

// ModelHits are values of a model that were read on one tier, their bytes, and
// their tokens, where the number of these is known.
type ModelHits struct{ Hits, Bytes, Tokens uint64 }

// Stats is a snapshot of the tenant's figures.
func (t *Tenant) Stats() TenantStats {
	f := &t.figures
	s := TenantStats{
		Connections: f.connections.Load(),
		Hits:        f.hits.Load(), Misses: f.misses.Load(), Found: f.found.Load(), Absent: f.absent.Load(),
		Stored: f.stored.Load(), Dropped: f.dropped.Load(), Refused: f.refused.Load(), Deleted: f.deleted.Load(),
		PaddedNils: f.padded.Load(), UnpaddedNils: f.unpadded.Load(), SizeMismatches: f.mismatched.Load(),
		StalledSets: f.stalled.Load(), ValueBytesOut: f.bytesOut.Load(), ValueBytesIn: f.bytesIn.Load(),
		Unpinned: f.unpinned.Load(), HeldBytes: t.held.Load(), Models: t.models.stats(),
	}
	s.Pins, s.PinnedBytes, s.PinsExpired, s.PinsRefused = t.pins.count()
	return s
}

// maxModels bounds the models of a tenant that are counted by name, maxModelName
// the bytes of a name.
const (
	maxModels    = 64
	maxModelName = 256
	otherModels  = "other"
)

type model struct {
	hits                    [kvtier.Tiers]struct{ values, bytes, tokens atomic.Uint64 }
	misses, stored, dropped atomic.Uint64
	bytesIn                 atomic.Uint64
}

// hit counts a value that was read.
func (m *model) hit(b Block) {
	of := &m.hits[b.Tier()]
	of.values.Add(1)
	of.bytes.Add(uint64(len(b.Bytes())))
	of.tokens.Add(uint64(b.Tokens()))
}

// models are the figures of a tenant by model.
type models struct {
	mu    sync.RWMutex
	named map[string]*model
	other model
}

func (m *models) of(name []byte) *model {
	if len(name) == 0 || len(name) > maxModelName {
		return &m.other
	}
	m.mu.RLock()
	found, full := m.named[string(name)], len(m.named) >= maxModels
	m.mu.RUnlock()
	if found != nil {
		return found
	}
	if full || string(name) == otherModels {
		return &m.other
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if found = m.named[string(name)]; found != nil {
		return found
	}
	if len(m.named) >= maxModels {
		return &m.other
	}
	if m.named == nil {
		m.named = make(map[string]*model)
	}
	found = &model{}
	m.named[string(name)] = found
	return found
}

func (m *models) stats() map[string]ModelStats {
	m.mu.RLock()
	defer m.mu.RUnlock()
	all := make(map[string]ModelStats, len(m.named)+1)
	for name, of := range m.named {
		all[name] = of.stats()
	}
	if other := m.other.stats(); other != (ModelStats{}) {
		all[otherModels] = other
	}
	return all
}

func (m *model) stats() ModelStats {
	on := func(tier kvtier.Tier) ModelHits {
		of := &m.hits[tier]
		return ModelHits{of.values.Load(), of.bytes.Load(), of.tokens.Load()}
	}
	return ModelStats{
		RAM: on(kvtier.TierRAM), NVMe: on(kvtier.TierNVMe),
		Misses: m.misses.Load(), Stored: m.stored.Load(), Dropped: m.dropped.Load(), BytesIn: m.bytesIn.Load(),
	}
}
