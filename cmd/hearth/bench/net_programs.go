package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
)

// Programs that the bench looks at, by name.
const (
	programSockets = "sock_set_state"
	programWalk    = "walk"
	programOut     = "datagram_out"
	programIn      = "datagram_in"
)

// openProbe loads the programs without pins. The sensors named must work.
func openProbe(opts bpf.Options, sensors ...string) (*bpf.Probe, error) {
	probe, err := bpf.Open(opts)
	if err != nil {
		return nil, cannot{err}
	}
	for _, sensor := range probe.Sensors() {
		if slices.Contains(sensors, sensor.Name) && !sensor.On {
			_ = probe.Close()
			return nil, cannot{fmt.Errorf("sensor %s: %s", sensor.Name, sensor.Reason)}
		}
	}
	return probe, nil
}

// usage is what some programs took between two looks.
func usage(before, after bpf.Usage, programs ...string) (u bpf.ProgramUsage) {
	for _, name := range programs {
		was, is := before.Programs[name], after.Programs[name]
		u.Runs += is.Runs - was.Runs
		u.Time += is.Time - was.Time
	}
	return u
}

// perRun is in ns; 0 where nothing ran.
func perRun(u bpf.ProgramUsage) float64 { return float64(u.Time) / max(1, float64(u.Runs)) }

// empty is a program that does nothing, where one of the Probe's does something:
// what is measured of it is what the kernel's statistics and calls cost.
type empty struct {
	program *ebpf.Program
	link    link.Link
}

func attachEmpty(spec ebpf.ProgramSpec, attach func(*ebpf.Program) (link.Link, error)) (*empty, error) {
	spec.License, spec.Instructions = "GPL", asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}
	if spec.Type == ebpf.Tracing {
		spec.Instructions[0] = asm.Mov.Imm(asm.R0, 0)
	}
	program, err := ebpf.NewProgram(&spec)
	if err != nil {
		return nil, cannot{fmt.Errorf("load an empty program: %w", err)}
	}
	l, err := attach(program)
	if err != nil {
		_ = program.Close()
		return nil, cannot{fmt.Errorf("attach an empty program: %w", err)}
	}
	return &empty{program, l}, nil
}

func emptyOnState() (*empty, error) {
	return attachEmpty(ebpf.ProgramSpec{Name: "empty", Type: ebpf.Tracing, AttachType: ebpf.AttachTraceRawTp, AttachTo: "inet_sock_set_state"},
		func(p *ebpf.Program) (link.Link, error) {
			return link.AttachTracing(link.TracingOptions{Program: p, AttachType: ebpf.AttachTraceRawTp})
		})
}

func emptyOnPackets(cgroup string) (*empty, error) {
	return attachEmpty(ebpf.ProgramSpec{Name: "empty", Type: ebpf.CGroupSKB, AttachType: ebpf.AttachCGroupInetEgress},
		func(p *ebpf.Program) (link.Link, error) {
			return link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: ebpf.AttachCGroupInetEgress, Program: p})
		})
}

func (e *empty) usage() (bpf.ProgramUsage, error) {
	stats, err := e.program.Stats()
	if err != nil {
		return bpf.ProgramUsage{}, fmt.Errorf("read statistics of an empty program: %w", err)
	}
	return bpf.ProgramUsage{Runs: stats.RunCount, Time: stats.Runtime}, nil
}

func (e *empty) end() error { return errors.Join(e.link.Close(), e.program.Close()) }

// withStatistics has the kernel keep statistics of programs meanwhile.
func withStatistics(do func() error) (err error) {
	statistics, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return cannot{fmt.Errorf("turn on the statistics of programs: %w", err)}
	}
	defer func() { err = errors.Join(err, statistics.Close()) }()
	return do()
}

// eventCost is what the program at a connection's begin and end takes.
type eventCost struct {
	own, empty    []float64 // ns per run, of rounds
	perConnection float64   // runs, of both ends together
	connection    time.Duration
}

// share of a core that connections cost at a rate per second, in percent.
func (e *eventCost) percent(rate float64) float64 {
	return median(e.own) * e.perConnection * rate / 1e9 * 100
}

// measureEvent counts over connections that are made and ended, once.
func (b *netBench) measureEvent(ctx context.Context, probe *bpf.Probe, s *server) (err error) {
	if b.event != nil {
		return nil
	}
	nothing, err := emptyOnState()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, nothing.end()) }()
	cost := &eventCost{}
	var runs uint64
	var times []float64
	for range b.pairs {
		before, err := probe.Usage()
		if err != nil {
			return err
		}
		emptyBefore, err := nothing.usage()
		if err != nil {
			return err
		}
		each, err := s.churn(ctx, &roomClient, upTo(b.sizes.connections))
		if err != nil {
			return err
		}
		after, err := probe.Usage()
		if err != nil {
			return err
		}
		emptyAfter, err := nothing.usage()
		if err != nil {
			return err
		}
		u := usage(before, after, programSockets)
		runs += u.Runs
		cost.own = append(cost.own, perRun(u))
		cost.empty = append(cost.empty, perRun(bpf.ProgramUsage{Runs: emptyAfter.Runs - emptyBefore.Runs, Time: emptyAfter.Time - emptyBefore.Time}))
		times = append(times, float64(each))
	}
	cost.perConnection = float64(runs) / float64(b.pairs*b.sizes.connections)
	cost.connection = time.Duration(median(times))
	b.event = cost
	return nil
}

// programRows are what the programs take by the kernel's own statistics, which are
// on here alone.
func (b *netBench) programRows(ctx context.Context) (rows []Row, err error) {
	r, err := newRoom()
	if err != nil {
		return nil, err
	}
	defer r.end()
	s, err := r.listen()
	if err != nil {
		return nil, err
	}
	defer s.end()
	probe, err := openProbe(bpf.Options{}, bpf.SensorSockets, bpf.SensorWalk)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, probe.Close()) }()
	err = withStatistics(func() error {
		if err := b.measureEvent(ctx, probe, s); err != nil {
			return err
		}
		event, err := rounds(netRow("set_state_ns"), b.pairs, replay(b.event.own), contender{"an empty program in the same events", replay(b.event.empty)})
		if err != nil {
			return err
		}
		e := b.event
		event.Note = fmt.Sprintf("each change of state of a TCP socket, by the kernel's statistics, which cost what the empty program has; what is freed with a socket is not in them; %.1f runs a connection, both its ends here: "+
			"%.1f %% of the %.1f us that connect, accept and close take", e.perConnection, 100*median(e.own)*e.perConnection/float64(e.connection), float64(e.connection)/1e3)
		walk, err := b.walkProgram(ctx, probe, s)
		rows = append(rows, event, walk)
		return err
	})
	if err != nil {
		return nil, err
	}
	took, err := probe.Usage()
	if err != nil {
		return nil, err
	}
	return append(rows, mapsRow(took)), nil
}

// walkProgram is the program of the walk alone, without what finds the sockets.
func (b *netBench) walkProgram(ctx context.Context, probe *bpf.Probe, s *server) (Row, error) {
	if err := s.hold(b.sizes.few / 2); err != nil {
		return Row{}, err
	}
	var busy []float64
	walk := func(touch bool) (float64, error) {
		if touch {
			if err := s.touch(1); err != nil {
				return 0, err
			}
		}
		before, err := probe.Usage()
		if err != nil {
			return 0, err
		}
		if err := probe.Walk(nil); err != nil {
			return 0, err
		}
		after, err := probe.Usage()
		return perRun(usage(before, after, programWalk)), errors.Join(err, ctx.Err())
	}
	row, err := alone(netRow("walk_program_ns"), b.pairs, func() (float64, error) {
		all, err := walk(true)
		busy = append(busy, all)
		if err != nil {
			return 0, err
		}
		return walk(false)
	})
	row.Note = fmt.Sprintf("the walk's program on a socket where nothing passed, by the same statistics; %.0f where something did; %d sockets and those of the machine", median(busy), b.sizes.few)
	return row, err
}

func mapsRow(u bpf.Usage) Row {
	row := netRow("maps_bytes")
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(u.Maps)) {
		row.Value += float64(u.Maps[name])
		parts = append(parts, fmt.Sprintf("%s %s", name, kib(u.Maps[name])))
	}
	row.Pairs, row.Spread, row.Met = 1, [2]float64{row.Value, row.Value}, true
	row.Note = "what the maps take whatever passes, as the kernel tells: " + strings.Join(parts, ", ")
	return row
}

func kib(bytes uint64) string { return fmt.Sprintf("%d KiB", (bytes+1023)>>10) }
