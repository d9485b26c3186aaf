package scaleout

import (
	"cmp"
	"slices"

	"github.com/hearth-dev/hearth/nodeagent/netattr"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// take counts the round trips of a sample once.
func (e *entry) take(s *netattr.Snapshot) {
	if !s.At.After(e.last) {
		return
	}
	e.last = s.At
	e.during.Merge(&s.Live.RTT)
}

// update makes the record what it is at a sample.
func (e *entry) update(s *netattr.Snapshot, fetched int64) {
	r := &e.record
	r.Sources[0].Bytes = max(r.Sources[0].Bytes, fetched)
	r.Connections = bytesOf(s.Flights[e.flight.ID].Minus(e.base.Flights[e.flight.ID]))
	r.Shares = sharesBetween(e.base, s)
	r.Devices = Bytes{Received: since(s.OnWire, e.base.OnWire, traffic.Receive), Transmitted: since(s.OnWire, e.base.OnWire, traffic.Transmit)}
	r.Unattributed = Bytes{
		Received:    since(s.Unattributed, e.base.Unattributed, traffic.Receive),
		Transmitted: since(s.Unattributed, e.base.Unattributed, traffic.Transmit),
	}
	r.During = latencyOf(&e.during)
	r.Visible, r.Unseen = s.Sight.String(), s.Reason
}

func since(now, base [2]uint64, d traffic.Direction) uint64 {
	return now[d] - min(now[d], base[d])
}

// point adds a moment to the series. Past the limit every second point goes, and
// later ones come half as often.
func (e *entry) point(s *netattr.Snapshot) {
	p := Point{
		Seconds: s.At.Sub(e.base.At).Seconds(), Received: map[string]uint64{}, Transmitted: map[string]uint64{},
		UnattributedReceived: since(s.Unattributed, e.base.Unattributed, traffic.Receive), P90: s.Live.RTT.Quantile(0.9).Seconds(),
	}
	for kind, now := range s.Totals {
		grown := now.Minus(e.base.Totals[kind])
		if grown.Received > 0 {
			p.Received[kind.Class.String()] += grown.Received
		}
		if grown.Transmitted > 0 {
			p.Transmitted[kind.Class.String()] += grown.Transmitted
		}
	}
	series := e.record.Series
	if last := len(series) - 1; last >= 0 && p.Seconds <= series[last].Seconds {
		series = series[:last] // of the same sample
	}
	series = append(series, p)
	if len(series) > maxPoints {
		half := make([]Point, 0, maxPoints)
		for i := 1; i < len(series); i += 2 {
			half = append(half, series[i])
		}
		series, e.every = half, 2*e.every
	}
	e.record.Series = series
}

func bytesOf(c traffic.Counts) Bytes {
	return Bytes{Received: c.Received, Transmitted: c.Transmitted, Retransmitted: c.Retransmitted}
}

func latencyOf(h *netattr.Histogram) Latency {
	return Latency{Samples: h.Count(), P50: h.Quantile(0.5).Seconds(), P90: h.Quantile(0.9).Seconds(), P99: h.Quantile(0.99).Seconds()}
}

// sharesBetween gives what everybody moved from one sample to another. What is in
// the totals and in no owner's share, such as of pods that went meanwhile, is
// nobody's: the share of nobody has in it what others had moved long ago.
func sharesBetween(base, now *netattr.Snapshot) []Share {
	type key struct {
		netattr.Owner
		netattr.Kind
	}
	old := make(map[key]traffic.Counts, len(base.Shares))
	for _, s := range base.Shares {
		old[key{s.Owner, s.Kind}] = s.Counts
	}
	type place struct {
		class    traffic.Class
		locality traffic.Locality
	}
	nobodys := map[place]traffic.Counts{}
	for kind, c := range now.Totals {
		at := place{kind.Class, kind.Locality}
		sum := nobodys[at]
		sum.Add(c.Minus(base.Totals[kind]))
		nobodys[at] = sum
	}
	list := []Share{}
	for _, s := range now.Shares {
		grown := s.Counts.Minus(old[key{s.Owner, s.Kind}])
		if s.Owner == (netattr.Owner{}) {
			continue
		}
		at := place{s.Class, s.Locality}
		nobodys[at] = nobodys[at].Minus(grown)
		if grown.Received == 0 && grown.Transmitted == 0 && grown.Retransmitted == 0 {
			continue
		}
		list = append(list, Share{
			Pod: podName(now, s.PodUID), Container: s.Container, Unit: s.Unit, Class: s.Class.String(), Locality: s.Locality.String(), Bytes: bytesOf(grown),
		})
	}
	for at, rest := range nobodys {
		if rest.Received > 0 || rest.Transmitted > 0 || rest.Retransmitted > 0 {
			list = append(list, Share{Unit: goneUnit, Class: at.class.String(), Locality: at.locality.String(), Bytes: bytesOf(rest)})
		}
	}
	slices.SortFunc(list, func(a, b Share) int {
		return cmp.Or(
			cmp.Compare(b.Received+b.Transmitted, a.Received+a.Transmitted),
			cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Unit, b.Unit), cmp.Compare(a.Class, b.Class), cmp.Compare(a.Locality, b.Locality),
		)
	})
	return shorten(list)
}

// shorten keeps the first rows, and of the rest one for each class and locality.
func shorten(list []Share) []Share {
	if len(list) <= maxShares {
		return list
	}
	short := slices.Clone(list[:maxShares])
	for _, s := range list[maxShares:] {
		i := slices.IndexFunc(short, func(r Share) bool { return r.Unit == moreUnit && r.Class == s.Class && r.Locality == s.Locality })
		if i < 0 {
			i, short = len(short), append(short, Share{Unit: moreUnit, Class: s.Class, Locality: s.Locality})
		}
		short[i].Received += s.Received
		short[i].Transmitted += s.Transmitted
		short[i].Retransmitted += s.Retransmitted
	}
	return short
}

// goneUnit names the rows of those who are not known, as their cgroup is gone.
const goneUnit = "(gone)"

// moreUnit names the rows of those who have none of their own.
const moreUnit = "(more)"

// podName is what people call a pod.
func podName(s *netattr.Snapshot, uid string) string {
	if p, known := s.Pods[uid]; known && uid != "" {
		return p.Namespace + "/" + p.Name
	}
	return uid
}
