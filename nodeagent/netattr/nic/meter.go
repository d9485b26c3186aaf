package nic

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"strconv"
)

// maxGone is how many devices that are not there any more keep a total of their
// own. Those that went first lose it; it stays in the sum.
const maxGone = 64

// Totals are what was counted since a Meter's first reading. None ever goes
// backwards while its device is told of.
type Totals struct {
	Devices map[string]Counters // by name of the network device, such as eth0
	Ports   map[string]Counters // by name of the RDMA port, such as mlx5_0/1
	Net     Counters            // over all network devices that were ever there
	RDMA    Counters            // over all ports that were ever there
}

// Meter makes totals of successive readings. A device counts from its first
// reading on: what it counted before, in another's time or another network
// namespace, is not known to be this node's. So it is after the device was
// replaced or was away. The zero value is ready; it does no I/O.
type Meter struct {
	net, rdma meter
}

// Update takes the next reading. The answer is the caller's own.
func (m *Meter) Update(d Devices) Totals {
	net := make([]sample, 0, len(d.Net))
	for i := range d.Net {
		net = append(net, sample{d.Net[i].Name, strconv.Itoa(d.Net[i].Index) + " " + d.Net[i].Address, d.Net[i].Counters})
	}
	rdma := make([]sample, 0, len(d.Ports))
	for i := range d.Ports {
		rdma = append(rdma, sample{d.Ports[i].Name(), d.Ports[i].GUID, d.Ports[i].Counters})
	}
	m.net.wraps = true // a port's narrow counters stop at their end and do not wrap
	m.net.update(net)
	m.rdma.update(rdma)
	return Totals{Devices: m.net.totals(), Ports: m.rdma.totals(), Net: maps.Clone(m.net.sum), RDMA: maps.Clone(m.rdma.sum)}
}

// sample is one reading of one thing that counts; which one of a name it is,
// its identity tells.
type sample struct {
	name, identity string
	counters       Counters
}

// meter is the Meter of one kind of things.
type meter struct {
	wraps  bool // counters may have 32 bits
	things map[string]*thing
	sum    Counters
	went   uint64 // how many have gone so far
}

// thing is what is known of one name.
type thing struct {
	identity string
	last     map[Counter]reading // of this identity; empty while it is away
	total    Counters
	gone     uint64 // 0 while it is there; else its place among those that went
}

// reading is the last value of a counter.
type reading struct {
	value uint64
	wide  bool // it was beyond 32 bits once
}

func (m *meter) update(samples []sample) {
	if m.things == nil {
		m.things, m.sum = map[string]*thing{}, Counters{}
	}
	there := map[string]bool{}
	for _, s := range samples {
		there[s.name] = true
		t := m.things[s.name]
		if t == nil {
			t = &thing{total: Counters{}}
			m.things[s.name] = t
		}
		if t.last == nil || t.identity != s.identity {
			t.identity, t.last = s.identity, map[Counter]reading{}
		}
		t.gone = 0
		for name, value := range s.counters {
			last, known := t.last[name]
			if !known {
				last.value = value
			}
			more, stepped := growth(last.value, value, m.wraps && !last.wide)
			if stepped {
				continue
			}
			t.last[name] = reading{value: value, wide: last.wide || value > math.MaxUint32}
			t.total[name] += more
			m.sum[name] += more
		}
	}
	var gone []string
	for name, t := range m.things {
		if !there[name] {
			if t.gone == 0 {
				m.went++
				t.gone, t.last = m.went, nil
			}
			gone = append(gone, name)
		}
	}
	if len(gone) > maxGone {
		slices.SortFunc(gone, func(a, b string) int { return cmp.Compare(m.things[a].gone, m.things[b].gone) })
		for _, name := range gone[:len(gone)-maxGone] {
			delete(m.things, name)
		}
	}
}

func (m *meter) totals() map[string]Counters {
	all := make(map[string]Counters, len(m.things))
	for name, t := range m.things {
		all[name] = maps.Clone(t.total)
	}
	return all
}

// growth is how much a counter grew from one reading to the next. One that went
// backwards began anew at 0, or, where it may have 32 bits and went from their
// last quarter into their first, has wrapped. A driver that adds its queues up
// without a lock may step back a little: stepped is then set, and what is above
// the old value counts later.
func growth(from, to uint64, narrow bool) (more uint64, stepped bool) {
	const quarter = 1 << 30
	switch {
	case to >= from:
		return to - from, false
	case from-to < from/16:
		return 0, true
	case narrow && from >= 3*quarter && from <= math.MaxUint32 && to < quarter:
		return 1<<32 - from + to, false
	}
	return to, false
}
