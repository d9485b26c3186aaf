package hubmirror

import (
	"maps"
	"strings"
	"sync"
	"sync/atomic"
)

// Stats is a snapshot of what a Mirror did since it was made. The maps have
// bounded keys, fit for metric labels.
type Stats struct {
	Requests map[string]int64 // by route
	Clients  map[string]int64 // requests by client family
	Refused  map[string]int64 // by error code
	Bytes    int64            // of file bodies written
	Streams  int64            // bodies being written now
	Waiting  int64            // bodies waiting for a place now
	Broken   int64            // bodies broken off, for any reason but the client's
	Trickled int64            // single bytes sent to keep bodies alive
}

type counters struct {
	routes                                    [routeKinds]atomic.Int64
	bytes, streams, waiting, broken, trickled atomic.Int64

	mu       sync.Mutex
	families map[string]int64
	codes    map[string]int64
}

// Stats returns the counters.
func (m *Mirror) Stats() Stats {
	c := &m.stats
	s := Stats{
		Requests: map[string]int64{}, Bytes: c.bytes.Load(), Streams: c.streams.Load(),
		Waiting: c.waiting.Load(), Broken: c.broken.Load(), Trickled: c.trickled.Load(),
	}
	for k := range c.routes {
		s.Requests[routeKind(k).String()] = c.routes[k].Load()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Clients, s.Refused = maps.Clone(c.families), maps.Clone(c.codes)
	return s
}

func (c *counters) request(kind routeKind, family string) {
	c.routes[kind].Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.families == nil {
		c.families = map[string]int64{}
	}
	if _, known := c.families[family]; !known && len(c.families) >= maxFamilies {
		family = "other"
	}
	c.families[family]++
}

func (c *counters) refused(code string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.codes == nil {
		c.codes = map[string]int64{}
	}
	c.codes[code]++
}

// family is the first product of a User-Agent, without its version; hub
// clients that do not know theirs say "unknown", then the second counts.
func family(agent string) string {
	name := ""
	for product := range strings.SplitSeq(agent, " ") {
		name, _, _ = strings.Cut(strings.Trim(product, ";"), "/")
		if name != "" && name != "unknown" {
			break
		}
	}
	name = strings.ToLower(name)
	if name == "" || len(name) > 32 || strings.ContainsFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' && r != '_' && r != '.'
	}) {
		return "other"
	}
	return name
}
