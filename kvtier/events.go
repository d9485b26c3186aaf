package kvtier

import (
	"sync"

	"github.com/hearth-dev/hearth/kvtier/block"
)

// EventKind is what happened to a block.
type EventKind uint8

// Kinds of events.
const (
	EventStored  EventKind = iota // it is on Tier now
	EventDemoted                  // it left RAM and is on Tier
	EventRemoved                  // it is on no tier any more
	EventDamaged                  // its bytes on Tier were not what was stored
	// EventLost names no block: many of the tenant's left Tier at once. Who follows
	// its blocks asks for the state.
	EventLost
)

// String names the kind.
func (k EventKind) String() string {
	return [...]string{"stored", "demoted", "removed", "damaged", "lost"}[k]
}

// Event is a change of a block, in a log: Seq rises by one from event to event of
// the Cache's life.
type Event struct {
	Seq       uint64
	Tenant    string // kind and name
	Namespace block.Namespace
	Key       block.Key
	Kind      EventKind
	Tier      Tier
}

// maxEvents bounds the events that are kept for readers.
const maxEvents = 8192

// events is the log of a Cache. Nobody waits for its readers: who is too slow
// finds a gap in Seq and asks for the state.
type events struct {
	mu   sync.Mutex
	ring []Event
	next uint64 // Seq of the next event, from 1
	news chan struct{}
}

func (e *events) add(t *Tenant, space block.Namespace, key block.Key, kind EventKind, tier Tier) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.next == 0 {
		e.next = 1
	}
	event := Event{Seq: e.next, Tenant: t.label, Namespace: space, Key: key, Kind: kind, Tier: tier}
	if len(e.ring) < maxEvents {
		e.ring = append(e.ring, event)
	} else {
		e.ring[(e.next-1)%maxEvents] = event
	}
	e.next++
	if e.news != nil {
		close(e.news)
		e.news = nil
	}
}

// Events gives the events from Seq from on that are still kept, at most limit,
// and a channel that is closed when there is another one. Where the first is
// later than from, what was between is lost.
func (c *Cache) Events(from uint64, limit int) (list []Event, more <-chan struct{}) {
	e := &c.events
	e.mu.Lock()
	defer e.mu.Unlock()
	next := max(e.next, 1)
	from = max(from, 1)
	if next > maxEvents {
		from = max(from, next-maxEvents)
	}
	for seq := from; seq < next && len(list) < limit; seq++ {
		list = append(list, e.ring[(seq-1)%maxEvents])
	}
	if e.news == nil {
		e.news = make(chan struct{})
	}
	return list, e.news
}
