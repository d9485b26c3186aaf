package netattr

import (
	"maps"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
	"github.com/hearth-dev/hearth/nodeagent/netattr/cgroups"
	"github.com/hearth-dev/hearth/nodeagent/netattr/nic"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

const (
	// unknownFor is how long bytes of a cgroup that is not found wait for it.
	unknownFor = 2 * time.Second
	// idleFor is how long counts stand still before they may be folded.
	idleFor = 10 * time.Second
	// flightKept is how long a flight's counts outlive it, goneKept an owner's.
	flightKept = 10 * time.Minute
	goneKept   = 10 * time.Minute
	// foldsAtOnce bounds the folds of one sample.
	foldsAtOnce = 512
	// maxShares bounds the shares of owners: past it those who moved something
	// longest ago are counted as nobody's.
	maxShares = 8192
)

// reading is what one sample read.
type reading struct {
	at      time.Time
	counts  map[bpf.Key]traffic.Counts // nil where they could not be read
	status  bpf.Status
	sensors []bpf.Sensor
	rows    []bpf.Row // connections that may be of class serving
	walked  time.Duration
	devices nic.Devices
	pods    map[string]Pod
	// thorough: what grew is to be counted in this sample, even if a cgroup is to
	// be looked for first.
	thorough bool
}

// row takes a connection of a walk.
func (r *reading) row(row bpf.Row) {
	if (row.Class == traffic.Serving || row.Class == traffic.ByCgroup) && row.RTT > 0 {
		r.rows = append(r.rows, row)
	}
}

// tree is what books ask of the cgroups.
type tree interface {
	Lookup(id uint64) (path string, ok bool)
	Gone(id uint64) bool
	Forget(id uint64)
	Walk() error
}

// account is what is known of one key.
type account struct {
	counts  traffic.Counts // taken into the totals
	onWire  traffic.Counts // held against the devices, or of before them
	seen    time.Time      // first
	changed time.Time      // last
}

// group is what is known of a cgroup.
type group struct {
	path   string
	owner  cgroups.Owner
	found  bool
	looked time.Time // last time it was asked whether it is gone
}

type shareKey struct {
	owner Owner
	kind  Kind
}

type share struct {
	counts  traffic.Counts
	changed time.Time
	cgroup  uint64
}

// books fold readings into totals. Not safe for concurrent use.
type books struct {
	rules []Rule
	tree  tree   // nil where there is no cgroup2
	blind string // why

	started  time.Time
	counted  bool // counts were read
	accounts map[bpf.Key]*account
	groups   map[uint64]*group
	decided  map[uint64]traffic.Class // by cgroup, as the kernel keeps them
	totals   map[Kind]traffic.Counts
	shares   map[shareKey]*share
	flights  map[uint32]traffic.Counts
	active   map[uint32]bool
	over     map[uint32]time.Time // flights that ended
	foreign  map[uint32]time.Time // those of another agent, when they last moved something
	meter    nic.Meter
	wire     [2]uint64
	residual [2]residual
}

func newBooks(rules []Rule) *books {
	return &books{
		rules: rules, accounts: map[bpf.Key]*account{}, decided: map[uint64]traffic.Class{}, groups: map[uint64]*group{}, totals: map[Kind]traffic.Counts{},
		shares: map[shareKey]*share{}, flights: map[uint32]traffic.Counts{}, active: map[uint32]bool{}, over: map[uint32]time.Time{}, foreign: map[uint32]time.Time{},
	}
}

func (b *books) began(flight uint32) { b.active[flight] = true }

func (b *books) ended(flight uint32) {
	delete(b.active, flight)
	b.over[flight] = time.Time{} // from the next sample on
}

// restart says that the kernel's counts begin at 0 again.
func (b *books) restart() { clear(b.accounts) }

// close takes a reading in and gives what is known after it. source folds what
// is done with; nil folds nothing.
func (b *books) close(r reading, source keeper) *Snapshot {
	if b.started.IsZero() {
		b.started = r.at
	}
	if r.thorough {
		b.findAll(r)
	}
	b.foldedElsewhere(r)
	for key, now := range r.counts {
		b.take(key, now, r)
	}
	if r.counts != nil && source != nil {
		b.decide(r, source)
	}
	b.counted = b.counted || r.counts != nil
	snapshot := &Snapshot{At: r.at, Status: r.status, Sensors: b.sensors(r), Started: b.started, Walked: r.walked, Pods: r.pods}
	snapshot.Sight, snapshot.Reason = sight(snapshot.Sensors, len(r.devices.Net) > 0)
	snapshot.Devices, snapshot.Counted = r.devices, b.meter.Update(r.devices)
	snapshot.Live = b.live(r)
	seen := [2]uint64{
		traffic.Receive:  snapshot.Counted.Net[nic.ReceivedBytes],
		traffic.Transmit: snapshot.Counted.Net[nic.TransmittedBytes],
	}
	snapshot.OnWire, snapshot.Attributed = seen, b.wire
	for d := range seen {
		difference := int64(seen[d]) - int64(b.wire[d])
		b.residual[d].add(difference)
		snapshot.Unattributed[d], snapshot.Residual[d] = b.residual[d].total, difference
	}
	if r.counts != nil && source != nil {
		b.fold(r, source)
	}
	b.trim(r.at)
	snapshot.Totals = make(map[Kind]traffic.Counts, len(b.totals))
	maps.Copy(snapshot.Totals, b.totals)
	snapshot.Flights = make(map[uint32]traffic.Counts, len(b.flights))
	maps.Copy(snapshot.Flights, b.flights)
	snapshot.Shares = make([]Share, 0, len(b.shares))
	for key, s := range b.shares {
		snapshot.Shares = append(snapshot.Shares, Share{Owner: key.owner, Kind: key.kind, Counts: s.counts})
	}
	return snapshot
}

// findAll looks for all cgroups that are not found yet, at once.
func (b *books) findAll(r reading) {
	if b.tree == nil {
		return
	}
	for key := range r.counts {
		if named(key.Cgroup) && !b.group(key.Cgroup, r.at).found {
			// What it cannot read it does not find, and that is nobody's.
			_ = b.tree.Walk()
			return
		}
	}
}

// take adds what grew of one key. What the first counts have is of before the
// devices were watched, and is taken at once: whoever it is whose cgroup is not
// found then, it is gone.
func (b *books) take(key bpf.Key, now traffic.Counts, r reading) {
	a := b.accounts[key]
	if a == nil {
		if now == (traffic.Counts{}) {
			return
		}
		a = &account{seen: r.at}
		if !b.counted {
			a.onWire = now
		}
		b.accounts[key] = a
	}
	if key.Locality == traffic.OffNode || key.Locality == traffic.Unsettled {
		more := now.Minus(a.onWire)
		a.onWire.Add(more)
		b.wire[traffic.Receive] += more.Wire(traffic.Receive)
		b.wire[traffic.Transmit] += more.Wire(traffic.Transmit)
	}
	grown := now.Minus(a.counts)
	if grown == (traffic.Counts{}) {
		return
	}
	g := b.group(key.Cgroup, r.at)
	if !g.found && b.counted && b.tree != nil && named(key.Cgroup) && !r.thorough && r.at.Sub(a.seen) < unknownFor {
		return // it may be found yet
	}
	a.counts.Add(grown)
	a.changed = r.at
	kind := Kind{Class: b.class(key, g, r.pods), Locality: key.Locality, Transport: key.Transport}
	if kind.Locality == traffic.Unsettled {
		kind.Locality = traffic.OffNode // headers alone: a connection on which nothing passed
	}
	sum := b.totals[kind]
	sum.Add(grown)
	b.totals[kind] = sum
	if key.Cgroup == bpf.Folded {
		return // whose it was is past
	}
	sk := shareKey{owner: ownerOf(g), kind: kind}
	s := b.shares[sk]
	if s == nil {
		s = &share{cgroup: key.Cgroup}
		b.shares[sk] = s
	}
	s.counts.Add(grown)
	s.changed = r.at
	if key.Flight != 0 {
		f := b.flights[key.Flight]
		f.Add(grown)
		b.flights[key.Flight] = f
		if _, ended := b.over[key.Flight]; !ended && !b.active[key.Flight] {
			b.foreign[key.Flight] = r.at
		}
	}
}

// named reports whether an id is that of a cgroup.
func named(cgroup uint64) bool { return cgroup != 0 && cgroup != bpf.Folded }

// group finds a cgroup.
func (b *books) group(id uint64, now time.Time) *group {
	g := b.groups[id]
	if g == nil {
		g = &group{looked: now}
		b.groups[id] = g
	}
	if !g.found && b.tree != nil && named(id) {
		if path, ok := b.tree.Lookup(id); ok {
			g.path, g.owner, g.found = path, cgroups.Parse(path), true
			if g.owner == (cgroups.Owner{}) {
				g.owner.Unit = path // the root, or what says nothing
			}
		}
	}
	return g
}

func ownerOf(g *group) Owner {
	return Owner{PodUID: g.owner.PodUID, Container: g.owner.Container, Unit: g.owner.Unit}
}

// live is how the connections of class serving fared. Those within the node are
// told where no other carried anything.
func (b *books) live(r reading) Live {
	var away, near Live
	for _, row := range r.rows {
		class := row.Class
		if class == traffic.ByCgroup {
			class = b.class(bpf.Key{Cgroup: row.Cgroup}, b.group(row.Cgroup, r.at), r.pods)
		}
		if class != traffic.Serving {
			continue
		}
		l := &near
		if row.Locality == traffic.OffNode {
			l = &away
		}
		l.Connections++
		l.Retransmitted += uint64(row.Retransmitted)
		l.RTT.Add(row.RTT)
	}
	if away.Connections > 0 {
		return away
	}
	return near
}

// sensors adds to those of the source the way from cgroups to pods, and what all
// is held against.
func (b *books) sensors(r reading) []bpf.Sensor {
	sensor := bpf.Sensor{Name: "cgroups", On: b.tree != nil, Wanted: len(r.sensors) > 0 && r.sensors[0].Wanted, Reason: b.blind}
	if sensor.On && b.noPodsFound(r.pods) {
		sensor.On, sensor.Reason = false, "no cgroup of a pod has moved a byte though there are pods: the kubelet may keep them in cgroup v1, whose sockets cannot be told apart"
	}
	devices := bpf.Sensor{Name: "devices", On: len(r.devices.Net) > 0, Wanted: true}
	if !devices.On {
		devices.Reason = "no network device is found, so nothing tells what has no owner: see network.sys and network.devices"
	}
	return append(r.sensors, sensor, devices)
}

// noPodsFound reports whether everything that moved is in the root: what is then
// seen of a kubelet that uses cgroup v1.
func (b *books) noPodsFound(pods map[string]Pod) bool {
	if len(pods) == 0 {
		return false
	}
	for key, a := range b.accounts {
		if key.Cgroup > 1 && key.Cgroup != bpf.Folded && a.counts != (traffic.Counts{}) {
			return false
		}
	}
	return len(b.accounts) > 0
}
