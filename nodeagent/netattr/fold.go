package netattr

import (
	"slices"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// keeper is the kernel's counts, which outlive the books.
type keeper interface {
	// Fold takes a key out of them.
	Fold(key, into bpf.Key) error
	// Decide keeps the class of a cgroup with them.
	Decide(cgroup uint64, class traffic.Class) error
}

// fold moves the counts of what is over to keys that stay.
func (b *books) fold(r reading, source keeper) {
	folded := 0
	for key, a := range b.accounts {
		if folded >= foldsAtOnce {
			return
		}
		if a.changed.IsZero() || r.at.Sub(a.changed) < idleFor || !named(key.Cgroup) {
			continue
		}
		into := key
		switch g := b.group(key.Cgroup, r.at); {
		case b.gone(key.Cgroup, g, r.at):
			into = b.foldedOf(key, g, r)
		case key.Flight != 0 && b.flightOver(key.Flight, r.at.Sub(a.changed)):
			into.Flight = 0
		default:
			continue
		}
		folded++
		if source.Fold(key, into) != nil {
			continue // full, or another agent's to do: it is tried again
		}
		// What came after the reading is in the other key's next growth.
		b.move(key, into, r.at)
	}
}

// foldedElsewhere follows another agent, which folds in place of this one while
// both have the same pins: what it took out of one key is in another, and there
// is no growth of that.
func (b *books) foldedElsewhere(r reading) {
	if r.counts == nil {
		return
	}
	for key, a := range b.accounts {
		if _, there := r.counts[key]; there || a.changed.IsZero() || !named(key.Cgroup) {
			continue
		}
		into, g := key, b.group(key.Cgroup, r.at)
		into.Flight = 0
		if key.Flight == 0 || !g.found || b.tree != nil && b.tree.Gone(key.Cgroup) {
			into = b.foldedOf(key, g, r)
		}
		b.move(key, into, r.at)
	}
}

// foldedOf is where the counts of a gone cgroup go.
func (b *books) foldedOf(key bpf.Key, g *group, r reading) bpf.Key {
	return bpf.Key{Cgroup: bpf.Folded, Class: b.class(key, g, r.pods), Locality: key.Locality, Transport: key.Transport}
}

// flightOver reports whether a flight's counts may be folded: it ended here, or is
// of an agent before or beside this one and long idle.
func (b *books) flightOver(flight uint32, idle time.Duration) bool {
	_, ours := b.over[flight]
	return !b.active[flight] && (ours || idle >= flightKept)
}

// move puts what is known of a key to another's, as it is in the kernel.
func (b *books) move(key, into bpf.Key, now time.Time) {
	a, to := b.accounts[key], b.accounts[into]
	if to == nil {
		to = &account{seen: now, changed: now}
		b.accounts[into] = to
	}
	to.counts.Add(a.counts)
	to.onWire.Add(a.onWire)
	delete(b.accounts, key)
}

// gone reports whether a cgroup's directory is there no more, looked at every
// idleFor at most.
func (b *books) gone(id uint64, g *group, now time.Time) bool {
	if b.tree == nil || now.Sub(g.looked) < idleFor {
		return false
	}
	g.looked = now
	return !g.found || b.tree.Gone(id)
}

// trim drops what nobody asks for any more.
func (b *books) trim(now time.Time) {
	for id, at := range b.over {
		if at.IsZero() {
			b.over[id] = now
		} else if now.Sub(at) > flightKept {
			delete(b.over, id)
			delete(b.flights, id)
		}
	}
	for id, at := range b.foreign {
		if now.Sub(at) > flightKept {
			delete(b.foreign, id)
			delete(b.flights, id)
		}
	}
	live := make(map[uint64]bool, len(b.accounts))
	for key := range b.accounts {
		live[key.Cgroup] = true
	}
	for key, s := range b.shares {
		if !live[s.cgroup] && now.Sub(s.changed) > goneKept {
			delete(b.shares, key)
		}
	}
	for len(b.shares) > maxShares {
		b.mergeOldest()
	}
	for id, g := range b.groups {
		if !live[id] && now.Sub(g.looked) > goneKept {
			delete(b.groups, id)
			if b.tree != nil {
				b.tree.Forget(id)
			}
		}
	}
}

// mergeOldest counts the half of all shares that changed longest ago as nobody's.
func (b *books) mergeOldest() {
	cut := medianChange(b.shares)
	for key, s := range b.shares {
		if s.changed.After(cut) || key.owner == (Owner{}) {
			continue
		}
		nobody := shareKey{kind: key.kind}
		to := b.shares[nobody]
		if to == nil {
			to = &share{}
			b.shares[nobody] = to
		}
		to.counts.Add(s.counts)
		to.changed = s.changed
		delete(b.shares, key)
	}
}

// medianChange is a time before which about half of the shares changed last.
func medianChange(shares map[shareKey]*share) time.Time {
	times := make([]time.Time, 0, len(shares))
	for _, s := range shares {
		times = append(times, s.changed)
	}
	slices.SortFunc(times, time.Time.Compare)
	return times[len(times)/2]
}
