package bpf

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
)

// Options configure a Probe.
type Options struct {
	// Cgroups is the directory of the cgroup2 hierarchy, whose processes tell
	// whether all of the node are seen; empty where there is none.
	Cgroups string
	// Scope is the id of the cgroup below which this node is; 0 is the whole
	// machine. Sockets of other cgroups are not seen.
	Scope uint64
	// MarkBase makes SO_MARK of MarkBase+class set a socket's class; 0 is off.
	MarkBase uint32
	// Pins is a folder on a BPF file system, made where it is missing, in which
	// maps and programs outlive the process. Empty keeps nothing.
	Pins string
	// Datagrams is the directory of the cgroup below which UDP and all else that
	// is not TCP is counted, packet by packet. Empty counts none of it.
	Datagrams string
	// Layout tells layouts of maps apart: those of another are left alone. Empty
	// is that of this version. For tests.
	Layout string
	Log    *slog.Logger
}

// Sensors of a Probe, in the order of their worth.
const (
	SensorSockets   = "sockets"   // connections that begin and end
	SensorWalk      = "walk"      // what passes on them meanwhile
	SensorSeed      = "seed"      // connections that were there before
	SensorPins      = "pins"      // counts while no agent runs
	SensorDatagrams = "datagrams" // what is not TCP
)

// Sensor is one thing that a Probe does, and whether it can.
type Sensor struct {
	Name string
	// On: it works. Off, Wanted tells whether it should be on.
	On, Wanted bool
	// Reason says why it is off, and what to do; empty where it is on.
	Reason string
	// VerifierLog is what the kernel said of a program that it refused.
	VerifierLog string
}

// Probe is the programs in the kernel. It is safe for concurrent use.
type Probe struct {
	opts    Options
	log     *slog.Logger
	btf     *btf.Cache
	maps    netattrMaps
	decided *ebpf.Map // classes that readers decided, by cgroup
	pins    string    // folder of this layout and scope; empty: nothing is pinned
	kept    bool      // the maps were there before
	owned   *os.File  // lock of pins; nil while another process may have it
	sensors []Sensor

	progs []*ebpf.Program
	// instances are those of progs that see connections begin and end.
	instances []*ebpf.Program
	links     []link.Link
	walker    *link.Iter
	seeder    *link.Iter

	walking sync.Mutex   // one walk at a time: rows of two would share what passed
	life    sync.RWMutex // held to read by whoever uses what Close takes away
}

// Open loads what this kernel and these rights allow. It fails only where not
// even the maps can be made or no connection can be seen at all; the error says
// why, and what to do. Sensors tells of the rest.
func Open(opts Options) (*Probe, error) {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	p := &Probe{opts: opts, log: opts.Log, btf: btf.NewCache()}
	if err := p.open(); err != nil {
		return nil, fmt.Errorf("load network programs: %w", errors.Join(err, p.release()))
	}
	return p, nil
}

func (p *Probe) open() error {
	spec, err := loadNetattr()
	if err != nil {
		return err
	}
	for name, value := range map[string]any{netattrVarScope: p.opts.Scope, netattrVarMarkBase: p.opts.MarkBase, netattrVarRows: uint32(1)} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	if err := p.openMaps(spec); err != nil {
		return explain(err)
	}
	if err := p.overflowSlots(); err != nil {
		return explain(err)
	}
	sockets := p.attach(SensorSockets, true, func() error { return p.attachSockets(spec) })
	walk := p.attach(SensorWalk, true, func() (err error) { p.walker, err = p.iterator(spec, netattrProgWalk, p.maps.Socks); return err })
	p.attach(SensorSeed, true, func() (err error) {
		if p.seeder, err = p.iterator(spec, netattrProgSeed, nil); err != nil {
			return err
		}
		return p.seed()
	})
	p.attach(SensorDatagrams, p.opts.Datagrams != "", func() error { return p.attachDatagrams(spec) })
	slices.SortFunc(p.sensors, func(a, b Sensor) int { return cmp.Compare(rank(a.Name), rank(b.Name)) })
	if !sockets && !walk {
		return errors.New(p.Sensors()[0].Reason)
	}
	return nil
}

func rank(sensor string) int {
	return slices.Index([]string{SensorSockets, SensorWalk, SensorSeed, SensorPins, SensorDatagrams}, sensor)
}

// attach runs one sensor and notes how it went.
func (p *Probe) attach(name string, wanted bool, do func() error) bool {
	sensor := Sensor{Name: name, Wanted: wanted}
	if wanted {
		err := do()
		sensor.On = err == nil
		if err != nil {
			needs := loading
			if name == SensorDatagrams {
				needs = attaching
			}
			sensor.Reason = explainOf(err, needs).Error()
			if v, refused := errors.AsType[*ebpf.VerifierError](err); refused {
				sensor.VerifierLog = fmt.Sprintf("%+v", v)
			}
		}
	} else {
		sensor.Reason = "not asked for"
	}
	p.sensors = append(p.sensors, sensor)
	return sensor.On
}

// program loads one program over the maps of the Probe.
func (p *Probe) program(spec *ebpf.CollectionSpec, name string) (*ebpf.Program, error) {
	one := spec.Copy()
	for other := range one.Programs {
		if other != name {
			delete(one.Programs, other)
		}
	}
	for _, m := range one.Maps {
		m.Pinning = ebpf.PinNone
	}
	collection, err := ebpf.NewCollectionWithOptions(one, ebpf.CollectionOptions{
		MapReplacements: map[string]*ebpf.Map{
			netattrMapSocks: p.maps.Socks, netattrMapAcct: p.maps.Acct, netattrMapPorts: p.maps.Ports, netattrMapRanges: p.maps.Ranges,
			netattrMapHere: p.maps.Here, netattrMapAccepted: p.maps.Accepted, netattrMapStatus: p.maps.Status,
		},
		Programs: ebpf.ProgramOptions{},
	})
	if err != nil {
		return nil, err
	}
	defer collection.Close()
	program := collection.DetachProgram(name)
	p.progs = append(p.progs, program)
	return program, nil
}

// attachSockets attaches the program twice. The kernel leaves out a run of a
// program that would interrupt another run of it on the same processor: a packet
// that ends one connection, say, while the program looks at another. Then the
// other instance runs, and as takes are exact whoever takes, two harm nothing.
func (p *Probe) attachSockets(spec *ebpf.CollectionSpec) error {
	for _, instance := range []string{netattrProgSockSetState, netattrProgSockSetState + "_2"} {
		if err := p.attachInstance(spec, instance); err != nil {
			return err
		}
	}
	return nil
}

func (p *Probe) attachInstance(spec *ebpf.CollectionSpec, instance string) error {
	program, err := p.program(spec, netattrProgSockSetState)
	if err != nil {
		return err
	}
	l, err := link.AttachTracing(link.TracingOptions{Program: program, AttachType: ebpf.AttachTraceRawTp})
	if err != nil {
		return err
	}
	p.links, p.instances = append(p.links, l), append(p.instances, program)
	if err := p.keep(instance, l); err != nil {
		// It counts while this process is there.
		at := slices.IndexFunc(p.sensors, func(sensor Sensor) bool { return sensor.Name == SensorPins })
		p.sensors[at].On, p.sensors[at].Reason = false, explain(err).Error()
	}
	return nil
}

func (p *Probe) iterator(spec *ebpf.CollectionSpec, name string, over *ebpf.Map) (*link.Iter, error) {
	program, err := p.program(spec, name)
	if err != nil {
		return nil, err
	}
	return link.AttachIter(link.IterOptions{Program: program, Map: over})
}

func (p *Probe) attachDatagrams(spec *ebpf.CollectionSpec) error {
	for name, at := range map[string]ebpf.AttachType{
		netattrProgDatagramOut: ebpf.AttachCGroupInetEgress, netattrProgDatagramIn: ebpf.AttachCGroupInetIngress,
	} {
		program, err := p.program(spec, name)
		if err != nil {
			return err
		}
		l, err := link.AttachCgroup(link.CgroupOptions{Path: p.opts.Datagrams, Attach: at, Program: program})
		if err != nil {
			return err
		}
		// Not pinned: attached twice these would count twice.
		p.links = append(p.links, l)
	}
	return nil
}

// overflowSlots makes the slots that counts go to where there is no room for
// another key, and those that keys of gone cgroups are folded into, which is what
// makes room again: one each for each class, locality and transport.
func (p *Probe) overflowSlots() error {
	for _, class := range append(traffic.Classes(), traffic.ByCgroup) {
		for _, locality := range append(traffic.Localities(), traffic.Unsettled) {
			for _, transport := range []traffic.Transport{traffic.TCP, traffic.NonTCP} {
				for _, cgroup := range []uint64{0, Folded} {
					key := netattrKey{Cgroup: cgroup, Class: uint8(class), Locality: uint8(locality), Transport: uint8(transport)}
					err := p.maps.Acct.Update(key, netattrCounts{}, ebpf.UpdateNoExist)
					// Pinned maps may be full, and have had the others from their begin.
					full := cgroup == Folded && errors.Is(err, unix.E2BIG)
					if err != nil && !errors.Is(err, ebpf.ErrKeyExist) && !full {
						return fmt.Errorf("make overflow slots: %w", err)
					}
				}
			}
		}
	}
	return nil
}

// Sensors tells what works now, the most important first.
func (p *Probe) Sensors() []Sensor {
	sensors := slices.Clone(p.sensors)
	for i := range sensors {
		if s := &sensors[i]; s.Name == SensorPins && s.On && !p.pinned() {
			s.On, s.Reason = false, p.pins+" was removed or unmounted while the agent ran: counts end with it; start it again to pin them anew"
		}
	}
	return sensors
}

// Kept reports whether the counts are those of pins that were there before.
func (p *Probe) Kept() bool { return p.kept && p.pins != "" }

// On reports whether a sensor works.
func (p *Probe) On(name string) bool {
	return slices.ContainsFunc(p.sensors, func(sensor Sensor) bool { return sensor.Name == name && sensor.On })
}

// Close detaches what is not pinned. Pinned counts go on. All other methods then
// fail with os.ErrClosed.
func (p *Probe) Close() error {
	p.life.Lock()
	defer p.life.Unlock()
	return p.release()
}

func (p *Probe) closed() bool { return p.maps.Acct == nil }

func (p *Probe) release() error {
	var errs []error
	for _, it := range []*link.Iter{p.walker, p.seeder} {
		if it != nil {
			errs = append(errs, it.Close())
		}
	}
	for _, l := range p.links {
		errs = append(errs, l.Close())
	}
	for _, program := range p.progs {
		errs = append(errs, program.Close())
	}
	if p.owned != nil {
		errs = append(errs, p.owned.Close())
	}
	p.walker, p.seeder, p.links, p.progs, p.instances, p.owned = nil, nil, nil, nil, nil, nil
	if p.maps.Acct != nil {
		errs = append(errs, p.maps.Close())
		p.maps = netattrMaps{}
	}
	if p.decided != nil {
		errs = append(errs, p.decided.Close())
		p.decided = nil
	}
	return errors.Join(errs...)
}

// seed takes the sockets in that were there before. Who opens one between the
// two rounds is in the second, or was seen when it connected.
func (p *Probe) seed() error {
	for range 2 {
		if err := drain(p.seeder); err != nil {
			return err
		}
	}
	// It is for the start alone.
	err := p.seeder.Close()
	p.seeder = nil
	if err == nil && !seesAllTasks(p.opts.Cgroups) {
		return errNotAllTasks
	}
	return err
}
