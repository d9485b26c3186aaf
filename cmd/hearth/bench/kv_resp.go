package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/hearth-dev/hearth/units"
)

// What the rows of the RESP server move.
const (
	kvWorkingSet = 640 * units.MiB // values of one size, more than a processor's caches hold
	kvMoved      = 768 * units.MiB // in one measurement
	kvMovedFull  = 2 * units.GiB
)

// kvCell is one way of loading a server.
type kvCell struct {
	op    kvOp
	way   string // unix or tcp
	size  units.Bytes
	conns int
}

func (c kvCell) name() string {
	return fmt.Sprintf("resp_%s_%s_%s_%dc", c.op, c.way, c.size, c.conns)
}

// kvCells are those of one size. Unless all are asked for, one and sixteen
// connections are measured at 2 MiB alone.
func kvCells(size units.Bytes, full bool) []kvCell {
	var cells []kvCell
	for _, op := range []kvOp{kvGet, kvSet} {
		for _, way := range []string{"unix", "tcp"} {
			for _, conns := range []int{1, 4, 16} {
				if conns == 4 || full || size == 2*units.MiB {
					cells = append(cells, kvCell{op, way, size, conns})
				}
			}
		}
	}
	return cells
}

var kvSizes = []units.Bytes{64 * units.KiB, 512 * units.KiB, 2 * units.MiB, 8 * units.MiB, 32 * units.MiB}

// cpuAim is the must of a cell's CPU time per byte as a ratio to the better peer's,
// which is more where ours is less; and the goal in words.
func (c kvCell) cpuAim() (must float64, goal string) {
	switch {
	case c.op == kvSet:
		return 1, "must: at most theirs, with a checksum"
	case c.way == "unix" && c.size >= 512*units.KiB:
		return 1 / 0.75, "must: at most 0.75 x theirs, goal 0.5"
	default:
		return 1, "must: at most theirs, goal 0.75"
	}
}

// rateAim is the same of its throughput; 0 where there is none.
func (c kvCell) rateAim() (must float64, goal string) {
	if c.size >= 2*units.MiB && c.conns == 4 {
		return 1.5, "must: 1.5 x theirs, goal 2"
	}
	return 0, ""
}

// respBench measures the agent's RESP server beside its peers.
type respBench struct {
	client  *kvClient
	own     *kvServer
	peers   []*kvServer
	lacking []error
}

func startRESP(ctx context.Context, dir string) (b *respBench, err error) {
	b = &respBench{}
	defer func() {
		if err != nil {
			b.stop()
		}
	}()
	if b.own, err = startKVAgent(ctx, filepath.Join(dir, "agent")); err != nil {
		return b, err
	}
	if b.peers, b.lacking, err = startKVPeers(ctx, dir); err != nil {
		return b, err
	}
	b.client, err = startKVClient(ctx)
	return b, err
}

func (b *respBench) stop() {
	if b.client != nil {
		b.client.stop()
	}
	for _, s := range append(b.peers, b.own) {
		if s != nil {
			s.stop()
		}
	}
}

// servers are all, own first.
func (b *respBench) servers() []*kvServer { return append([]*kvServer{b.own}, b.peers...) }

// respRows are the rows of the RESP server: its CPU time per byte and its
// throughput, by size, socket and connections.
func respRows(ctx context.Context, dir string, o options) ([]Row, error) {
	b, err := startRESP(ctx, dir)
	if err != nil {
		return nil, err
	}
	defer b.stop()
	var rows []Row
	for _, reason := range b.lacking {
		rows = append(rows, Row{Name: "resp_peer_" + strings.SplitN(reason.Error(), ":", 2)[0], Note: "not measured: " + reason.Error()})
	}
	var sets []float64
	for _, size := range kvSizes {
		if err := b.fill(size); err != nil {
			return nil, err
		}
		for _, cell := range kvCells(size, o.full) {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			more, err := b.rows(cell, o)
			if err != nil {
				return nil, err
			}
			for _, row := range more {
				o.progress(describe(row))
			}
			rows = append(rows, more...)
			if cell.op == kvSet && cell.way == "unix" && cell.conns == 4 {
				sets = append(sets, more[0].Value)
			}
		}
		if err := b.drop(size); err != nil {
			return nil, err
		}
	}
	share := checksumRow(o.pairs, sets)
	o.progress(describe(share))
	return append(rows, share), nil
}

// order is what a cell asks of a server.
func (c kvCell) order(s *kvServer, moved units.Bytes) kvOrder {
	return kvOrder{
		Addr: s.at(c.way), Data: s.name, Op: c.op, Size: int(c.size), Keys: int(kvWorkingSet / c.size), Conns: c.conns,
		Ops: max(int(moved/c.size), 4*c.conns),
	}
}

// fill gives every server a working set of values of a size.
func (b *respBench) fill(size units.Bytes) error {
	return b.all(kvCell{kvSet, "unix", size, 4})
}

// drop takes them away again.
func (b *respBench) drop(size units.Bytes) error {
	return b.all(kvCell{kvDrop, "unix", size, 4})
}

func (b *respBench) all(c kvCell) error {
	for _, s := range b.servers() {
		order := c.order(s, 0)
		order.Ops = 0
		if f, err := b.client.measure(s, order); err != nil {
			return err
		} else if f.Missed > 0 {
			return fmt.Errorf("%s lost %d of the values it was just given", s.name, f.Missed)
		}
	}
	return nil
}

// rows measures a cell: the row of the server's CPU time, and that of the rate.
func (b *respBench) rows(c kvCell, o options) ([]Row, error) {
	moved := kvMoved
	if o.full {
		moved = kvMovedFull
	}
	rates, clients := map[*kvServer][]float64{}, map[*kvServer][]float64{}
	missed, checked := 0, 0
	measure := func(s *kvServer) func() (float64, error) {
		return func() (float64, error) {
			f, err := b.client.measure(s, c.order(s, moved))
			if err != nil {
				return 0, err
			}
			if f.Checked == 0 {
				return 0, errors.New("no value was compared")
			}
			rates[s], clients[s] = append(rates[s], f.rate), append(clients[s], f.client)
			missed, checked = missed+f.Missed, checked+f.Checked
			return f.server, nil
		}
	}
	replayed := func(s *kvServer) func() (float64, error) { return replay(rates[s]) }

	must, goal := c.cpuAim()
	cpu, err := b.beside(Row{Name: c.name() + "_cpu", Unit: "s/GB", Better: lower, Aim: must}, o.pairs, measure)
	if err != nil {
		return nil, err
	}
	cpu.Note = fmt.Sprintf("CPU of the server; %s; client %.3f s/GB; %d values compared", goal, median(clients[b.own]), checked)
	if missed > 0 {
		cpu.Note += fmt.Sprintf(", %d were not there", missed)
	}
	must, goal = c.rateAim()
	rate, err := b.beside(Row{Name: c.name() + "_rate", Unit: "B/s", Better: higher, Aim: must, Note: goal}, o.pairs, replayed)
	return []Row{cpu, rate}, err
}

// beside measures own and peers in turn. The first reference, with which the aim
// is compared, is the better of the peers.
func (b *respBench) beside(row Row, n int, measure func(*kvServer) func() (float64, error)) (Row, error) {
	if len(b.peers) == 0 {
		row.Note = "no peer runs here"
		met, err := alone(row, n, measure(b.own))
		met.Aim, met.Met = 0, true
		return met, err
	}
	refs := make([]contender, len(b.peers))
	for i, p := range b.peers {
		refs[i] = contender{p.name, measure(p)}
	}
	row, err := rounds(row, n, measure(b.own), refs...)
	if err != nil {
		return row, err
	}
	return againstBest(row), nil
}

// againstBest puts the reference first beside which the row looks worst.
func againstBest(row Row) Row {
	slices.SortStableFunc(row.References, func(a, b Reference) int {
		switch {
		case a.Ratio < b.Ratio:
			return -1
		case a.Ratio > b.Ratio:
			return 1
		}
		return 0
	})
	row.Ratio = row.References[0].Ratio
	row.Met = row.Aim == 0 || row.Ratio >= row.Aim
	return row
}

// checksumRow is what a SET's checksum costs, beside the cheapest whole SET.
func checksumRow(n int, sets []float64) Row {
	data := kvBase()
	const piece = 128 << 10 // as it comes from a socket
	var costs []float64
	var sum xxh3.Uint128
	for range n {
		before := ownCPU()
		for at := 0; at < len(data); at += piece {
			sum = xxh3.Hash128(data[at : at+piece])
		}
		costs = append(costs, (ownCPU()-before).Seconds()/float64(len(data))*1e9)
	}
	runtime.KeepAlive(sum)
	row := Row{
		Name: "resp_set_checksum_cpu", Value: median(costs), Unit: "s/GB", Better: lower, Pairs: n, Met: true,
		Spread: [2]float64{slices.Min(costs), slices.Max(costs)}, Note: "xxh3-128 in pieces of 128 KiB from memory: a part of every SET's CPU",
	}
	if len(sets) > 0 {
		whole := slices.Min(sets)
		row.References = []Reference{{Name: "the cheapest SET on a unix socket", Value: whole, Ratio: oriented(lower, row.Value, whole)}}
	}
	return row
}
