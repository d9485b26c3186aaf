package peer

import "time"

// memory is what is known of where blocks are: which peer has one, or that none
// has. It is bounded, and forgets with time and when a peer fails. The caller
// guards it.
type memory struct {
	limit int
	of    map[name]place
	ring  []marked // in the order of being learned; [oldest] is the first
	first int
	marks uint64
}

// place is where a block is. Without a remote it is nowhere.
type place struct {
	remote *remote
	size   int
	round  uint64 // of the remote, when it was learned
	until  time.Duration
	mark   uint64
}

type marked struct {
	name name
	mark uint64
}

func newMemory(limit int) memory { return memory{limit: limit, of: map[name]place{}} }

// learn notes where a block is, until a time.
func (m *memory) learn(id name, at place) {
	m.marks++
	at.mark = m.marks
	if at.remote != nil {
		at.round = at.remote.round.Load()
	}
	m.of[id] = at
	entry := marked{id, at.mark}
	if len(m.ring) < m.limit {
		m.ring = append(m.ring, entry)
		return
	}
	oldest := m.ring[m.first]
	if m.of[oldest.name].mark == oldest.mark {
		delete(m.of, oldest.name)
	}
	m.ring[m.first] = entry
	m.first = (m.first + 1) % m.limit
}

// find gives what is known at a time.
func (m *memory) find(id name, now time.Duration) (place, bool) {
	at, ok := m.of[id]
	if !ok {
		return at, false
	}
	if now >= at.until || at.remote != nil && at.round != at.remote.round.Load() {
		delete(m.of, id)
		return place{}, false
	}
	return at, true
}
