package nodeagent

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/netattr"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

const (
	// maxPodSeries is how many pods have series of their own.
	maxPodSeries = 64
	// podSeriesFrom is how many bytes a pod moves before it may have them, so
	// that pods that come and go by the thousand make none.
	podSeriesFrom = 16 << 20
	// podOther is the pod_uid of all others together.
	podOther = "other"
)

// podKind is what the bytes of a pod are told by.
type podKind struct {
	class     traffic.Class
	direction traffic.Direction
}

// podSeries divides what pods moved into series: at most maxPodSeries pods have
// their own, the others share one, and all together are what pods moved since
// the first look. The zero value is ready.
type podSeries struct {
	mu    sync.Mutex
	at    time.Time                     // of the sample at the last look
	last  map[string]map[podKind]uint64 // what each pod had moved at the last look
	own   map[string]map[podKind]uint64 // since it has series of its own
	other map[podKind]uint64
}

// look takes in a sample and gives the series, by pod_uid. A sample from before
// that of the last look, as two looks at a time may have it, changes nothing.
func (p *podSeries) look(s *netattr.Snapshot) map[string]map[podKind]uint64 {
	now := map[string]map[podKind]uint64{}
	for _, share := range s.Shares {
		if share.PodUID == "" {
			continue
		}
		of := now[share.PodUID]
		if of == nil {
			of = map[podKind]uint64{}
			now[share.PodUID] = of
		}
		of[podKind{share.Class, traffic.Receive}] += share.Received
		of[podKind{share.Class, traffic.Transmit}] += share.Transmitted
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.own == nil {
		p.own, p.other = map[string]map[podKind]uint64{}, map[podKind]uint64{}
	}
	if !s.At.Before(p.at) {
		p.take(now)
		p.at, p.last = s.At, now
	}
	series := make(map[string]map[podKind]uint64, len(p.own)+1)
	for uid, of := range p.own {
		series[uid] = copied(of)
	}
	if len(p.other) > 0 {
		series[podOther] = copied(p.other)
	}
	return series
}

// take adds what pods have moved since the last look.
func (p *podSeries) take(now map[string]map[podKind]uint64) {
	for uid := range p.own {
		if now[uid] == nil {
			delete(p.own, uid)
		}
	}
	p.admit(now)
	for uid, of := range now {
		to := p.own[uid]
		if to == nil {
			to = p.other
		}
		for kind, bytes := range of {
			if before := p.last[uid][kind]; bytes > before {
				to[kind] += bytes - before
			}
		}
	}
}

func copied(of map[podKind]uint64) map[podKind]uint64 {
	to := make(map[podKind]uint64, len(of))
	maps.Copy(to, of)
	return to
}

// admit gives pods series of their own while there is room: those first that
// moved the most.
func (p *podSeries) admit(now map[string]map[podKind]uint64) {
	type candidate struct {
		uid   string
		moved uint64
	}
	var list []candidate
	for uid, of := range now {
		var moved uint64
		for _, bytes := range of {
			moved += bytes
		}
		if p.own[uid] == nil && moved >= podSeriesFrom {
			list = append(list, candidate{uid, moved})
		}
	}
	slices.SortFunc(list, func(a, b candidate) int { return cmp.Or(cmp.Compare(b.moved, a.moved), cmp.Compare(a.uid, b.uid)) })
	for _, c := range list {
		if len(p.own) >= maxPodSeries {
			return
		}
		p.own[c.uid] = map[podKind]uint64{}
	}
}
