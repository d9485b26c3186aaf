package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
)

// Aims of network accounting, and the rate of connections that its cost is of.
const (
	netCostAim   = 1.5  // percent of a core, at most
	netCostGoal  = 1    // the same
	netABAim     = 0.99 // of what passes without it
	netABPairs   = 30   // at least
	netEventRate = 1000 // connections a second, both of whose ends are on the node
)

// netSizes is how much is measured.
type netSizes struct {
	few, many   int           // sockets, two of each connection
	connections int           // of one measurement of programs
	datagrams   int           // the same
	stream      int           // bytes of TCP of the same
	walks       int           // of one measurement of walks
	span        time.Duration // of one measurement of the agent's CPU time
	spans       int
	window      time.Duration // of one throughput or rate of connections
	pairs       int           // of those
}

func netSizesOf(o options) netSizes {
	s := netSizes{
		few: 1000, many: 8000, connections: 4000, datagrams: 50_000, stream: 1 << 30, walks: 9,
		span: 10 * time.Second, spans: 2, window: 700 * time.Millisecond, pairs: max(o.pairs, netABPairs),
	}
	if o.full {
		s.spans, s.pairs = 6, max(o.pairs, 4*netABPairs)
	}
	return s
}

// netParts measure network accounting, in this order.
var netParts = []struct {
	name string
	run  func(*netBench, context.Context) ([]Row, error)
}{
	{"programs", (*netBench).programRows},
	{"datagrams", (*netBench).datagramRows},
	{"walks", (*netBench).walkRows},
	{"agent", (*netBench).agentRows},
	{"traffic", (*netBench).trafficRows},
}

// netTable has the rows of each part before they are measured: where a part
// cannot run, they say so.
var netTable = map[string][]Row{
	"programs": {
		{Name: "set_state_ns", Unit: "ns/run", Better: lower},
		{Name: "walk_program_ns", Unit: "ns/socket", Better: lower},
		{Name: "maps_bytes", Unit: "B", Better: lower},
	},
	"datagrams": {
		{Name: "datagram_udp_ns", Unit: "ns/packet", Better: lower},
		{Name: "datagram_tcp_ns", Unit: "ns/packet", Better: lower},
	},
	"walks": {
		{Name: "walk_1k_idle", Unit: "ms", Better: lower},
		{Name: "walk_1k_busy", Unit: "ms", Better: lower},
		{Name: "walk_8k_idle", Unit: "ms", Better: lower},
		{Name: "walk_8k_busy", Unit: "ms", Better: lower},
	},
	"agent": {
		{Name: "agent_cpu_1hz_8k", Unit: "% of a core", Better: lower},
		{Name: "agent_cpu_4hz_8k", Unit: "% of a core", Better: lower},
		{Name: "cost_8k_1hz", Unit: "% of a core", Better: lower, Aim: netCostAim},
		{Name: "socket_bytes", Unit: "B/socket", Better: lower},
		{Name: "collector_rss", Unit: "MiB", Better: lower},
	},
	"traffic": {
		{Name: "throughput_with", Unit: "with/without", Better: higher, Aim: netABAim},
		{Name: "connections_with", Unit: "with/without", Better: higher, Aim: netABAim},
		{Name: "requests_with", Unit: "with/without", Better: higher},
	},
}

// netBench is what the parts share.
type netBench struct {
	sizes netSizes
	pairs int
	dir   string
	event *eventCost // nil until it is measured
	note  func(string)
}

// cannot is the reason why something is not measured here.
type cannot struct{ error }

func runNet(cmd *cobra.Command, dir string, o options) ([]Row, error) {
	for _, name := range o.only {
		if !slices.Contains(netPartNames(), name) {
			return nil, terminal.Usagef("--only is %q, want some of %s", name, strings.Join(netPartNames(), ", "))
		}
	}
	b := &netBench{sizes: netSizesOf(o), pairs: o.pairs, dir: dir, note: o.progress}
	return b.measure(cmd.Context(), o.only)
}

func (b *netBench) measure(ctx context.Context, only []string) ([]Row, error) {
	var rows []Row
	for _, part := range netParts {
		if len(only) > 0 && !slices.Contains(only, part.name) {
			continue
		}
		more, err := part.run(b, ctx)
		if reason, ok := errors.AsType[cannot](err); ok {
			b.note(fmt.Sprintf("%s: not measured: %v", part.name, reason))
			more, err = unmeasured(netTable[part.name], reason), nil
		}
		if err != nil {
			return nil, fmt.Errorf("measure network accounting: %w", err)
		}
		for _, row := range more {
			b.note(describe(row))
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

func unmeasured(rows []Row, reason error) []Row {
	rows = slices.Clone(rows)
	for i := range rows {
		rows[i].Note = "not measured: " + strings.ReplaceAll(reason.Error(), "\n", " ")
	}
	return rows
}

// netRow gives a row before it is measured.
func netRow(name string) Row {
	for _, rows := range netTable {
		for _, row := range rows {
			if row.Name == name {
				return row
			}
		}
	}
	return Row{Name: name}
}

func netPartNames() (names []string) {
	for _, part := range netParts {
		names = append(names, part.name)
	}
	return names
}
