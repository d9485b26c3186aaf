package resp

import (
	"context"
	"errors"
	"sync"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
)

var errMemory = errors.New("not in memory")

// memory is a small tier in RAM: a bound in bytes, blocks that leave as they
// came, slots that are overwritten as soon as nobody holds them.
type memory struct {
	limit int

	mu     sync.Mutex
	used   int
	blocks map[block.Key]*slot
	order  []block.Key
	// parents are what Put was told.
	parents map[block.Key]block.Key
	puts    int // that are neither committed nor aborted
	// tier and tokens are what every block says of itself.
	tier   kvtier.Tier
	tokens int
}

type slot struct {
	memory *memory
	data   []byte
	holds  int // one of them is the tier's own
	pins   int
}

func newMemory(limit int) *memory {
	return &memory{limit: limit, blocks: make(map[block.Key]*slot), parents: make(map[block.Key]block.Key)}
}

func (m *memory) Lookup(key block.Key) (int, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.blocks[key]
	if s == nil {
		return 0, false
	}
	return len(s.data), true
}

func (m *memory) Pin(key block.Key) (Pin, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.blocks[key]
	if s == nil {
		return nil, false
	}
	s.pins++
	s.holds++
	return &memoryPin{slot: s}, true
}

func (m *memory) Get(ctx context.Context, key block.Key) (Block, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.blocks[key]
	if s == nil || ctx.Err() != nil {
		return nil, errMemory
	}
	s.holds++
	return &memoryBlock{slot: s}, nil
}

func (m *memory) Put(key block.Key, size int, parent block.Key, hasParent bool) (Put, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if hasParent {
		m.parents[key] = parent
	}
	for m.used+size > m.limit {
		if !m.evictLocked() {
			return nil, errMemory
		}
	}
	m.used += size
	m.puts++
	return &memoryPut{memory: m, key: key, slot: &slot{memory: m, data: make([]byte, size), holds: 1}}, nil
}

func (m *memory) evictLocked() bool {
	for i, key := range m.order {
		if s := m.blocks[key]; s.pins == 0 {
			m.order = append(m.order[:i:i], m.order[i+1:]...)
			delete(m.blocks, key)
			s.releaseLocked()
			return true
		}
	}
	return false
}

func (m *memory) Delete(_ context.Context, keys ...block.Key) (int, error) {
	removed := 0
	for _, key := range keys {
		if m.drop(key) {
			removed++
		}
	}
	return removed, nil
}

// drop ends a block as eviction does.
func (m *memory) drop(key block.Key) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.blocks[key]
	if s == nil {
		return false
	}
	m.forgetLocked(key)
	s.releaseLocked()
	return true
}

func (m *memory) forgetLocked(key block.Key) {
	delete(m.blocks, key)
	for i, other := range m.order {
		if other == key {
			m.order = append(m.order[:i:i], m.order[i+1:]...)
			return
		}
	}
}

// pressure evicts all that may be evicted.
func (m *memory) pressure() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for m.evictLocked() {
	}
}

func (m *memory) count() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return int64(len(m.blocks))
}

func (m *memory) openPuts() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.puts
}

// releaseLocked overwrites the slot when nobody holds it any more.
func (s *slot) releaseLocked() {
	if s.holds--; s.holds > 0 {
		return
	}
	s.memory.used -= len(s.data)
	for i := range s.data {
		s.data[i] = 0xee
	}
}

type memoryPin struct {
	slot *slot
	once sync.Once
}

func (p *memoryPin) Size() int { return len(p.slot.data) }

func (p *memoryPin) Release() {
	p.once.Do(func() {
		p.slot.memory.mu.Lock()
		defer p.slot.memory.mu.Unlock()
		p.slot.pins--
		p.slot.releaseLocked()
	})
}

type memoryBlock struct{ slot *slot }

func (b *memoryBlock) Bytes() []byte     { return b.slot.data }
func (b *memoryBlock) Tier() kvtier.Tier { return b.slot.memory.tier }
func (b *memoryBlock) Tokens() int       { return b.slot.memory.tokens }

func (b *memoryBlock) Release() {
	b.slot.memory.mu.Lock()
	defer b.slot.memory.mu.Unlock()
	b.slot.releaseLocked()
}

type memoryPut struct {
	memory *memory
	key    block.Key
	slot   *slot
	filled int
	ended  bool
}

func (p *memoryPut) Bytes() []byte { return p.slot.data }
func (p *memoryPut) Fill(n int)    { p.filled += n }

func (p *memoryPut) Commit(context.Context) error {
	p.memory.mu.Lock()
	defer p.memory.mu.Unlock()
	if p.filled != len(p.slot.data) || p.ended {
		panic(errors.New("commit of a block that is not whole"))
	}
	p.ended = true
	p.memory.puts--
	if old := p.memory.blocks[p.key]; old != nil {
		p.memory.forgetLocked(p.key)
		old.releaseLocked()
	}
	p.memory.blocks[p.key] = p.slot
	p.memory.order = append(p.memory.order, p.key)
	return nil
}

func (p *memoryPut) Abort() {
	p.memory.mu.Lock()
	defer p.memory.mu.Unlock()
	if p.ended {
		return
	}
	p.ended = true
	p.memory.puts--
	p.slot.releaseLocked()
}
