package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/netattr/bpf"
)

// busyOneIn is how many connections there are to one that is busy.
const busyOneIn = 10

// walkRows time the walk over sockets beside a dump of the same by sock_diag, which
// is how `ss -ti` reads them.
func (b *netBench) walkRows(ctx context.Context) (rows []Row, err error) {
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
	d, err := r.diag()
	if err != nil {
		return nil, err
	}
	defer d.end()
	probe, err := openProbe(bpf.Options{}, bpf.SensorSockets, bpf.SensorWalk)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, probe.Close()) }()
	for _, of := range []struct {
		sockets    int
		idle, busy string
	}{{b.sizes.few, "walk_1k_idle", "walk_1k_busy"}, {b.sizes.many, "walk_8k_idle", "walk_8k_busy"}} {
		if err := s.hold(of.sockets / 2); err != nil {
			return nil, err
		}
		for _, name := range []string{of.idle, of.busy} {
			row, err := b.walkRow(ctx, netRow(name), probe, s, d, name == of.busy)
			if err != nil {
				return nil, err
			}
			rows = append(rows, row)
		}
	}
	return rows, nil
}

func (b *netBench) walkRow(ctx context.Context, row Row, probe *bpf.Probe, s *server, d *diag, busy bool) (Row, error) {
	told, dumped := 0, 0
	timed := func(what func() error) func() (float64, error) {
		return func() (float64, error) {
			var times []float64
			for range b.sizes.walks {
				if busy {
					if err := s.touch(busyOneIn); err != nil {
						return 0, err
					}
				}
				begin := time.Now()
				if err := errors.Join(what(), ctx.Err()); err != nil {
					return 0, err
				}
				times = append(times, ms(time.Since(begin)))
			}
			return median(times), nil
		}
	}
	if err := probe.Walk(nil); err != nil { // of what passed before
		return row, err
	}
	row, err := rounds(row, b.pairs,
		timed(func() error { told = 0; return probe.Walk(func(bpf.Row) { told++ }) }),
		contender{"a dump by sock_diag", timed(func() error {
			dumped = 0
			var passed uint64
			return d.dump(inetDiagInfo, func(one diagnosed) { dumped++; passed += one.sent + one.received })
		})})
	if err != nil {
		return row, err
	}
	if dumped != 2*len(s.pairs) {
		return row, fmt.Errorf("dump sockets: sock_diag tells of %d, want %d", dumped, 2*len(s.pairs))
	}
	row.Note = fmt.Sprintf("one walk over %d sockets and those of the machine, %d of them told as busy; the dump is of this network namespace and IPv4 alone, and knows no cgroup",
		2*len(s.pairs), told)
	return row, nil
}
