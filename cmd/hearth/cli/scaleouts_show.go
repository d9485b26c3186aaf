package cli

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
	"github.com/hearth-dev/hearth/units"
)

// unowned is the row of what devices counted and nobody owns.
const unowned = "unattributed"

func (a *app) showScaleOuts(records []scaleout.Record, now time.Time) error {
	header := []string{"ID", "NODE", "MODEL", "REASON", "STATE", "STARTED", "TOOK", "BYTES", "RATE", "FROM", "LIVE P90", "OVERLAP", "UNATTRIBUTED"}
	var rows [][]string
	var problems []string
	for i := range records {
		r := &records[i]
		rows = append(rows, []string{
			r.ID, r.Node, cmp.Or(r.Ref, short(r.Digest)), r.Reason, r.State, age(r.Start, now), took(r, now), units.Bytes(r.Fetched()).Human(), rate(r, now),
			from(r), liveP90(r), overlap(r), unattributedShare(r),
		})
		if r.Error != "" {
			problems = append(problems, fmt.Sprintf("%s: scale-out %s: %s", r.Node, r.ID, r.Error))
		}
	}
	if err := terminal.Table(a.Out, header, rows); err != nil {
		return err
	}
	a.showProblems(problems)
	return nil
}

// showScaleOut shows a record without its course.
func (a *app) showScaleOut(r *scaleout.Record, now time.Time) error {
	for _, line := range [][2]string{
		{"id", r.ID},
		{"node", r.Node},
		{"ref", r.Ref},
		{"digest", r.Digest},
		{"reason", r.Reason},
		{"state", r.State},
		{"error", r.Error},
		{"started", r.Start.UTC().Format(time.RFC3339)},
		{"took", took(r, now)},
		{"size", fmt.Sprintf("%s, of which %s were missing", units.Bytes(r.SizeBytes).Human(), units.Bytes(r.MissingBytes).Human())},
		{"fetched", strings.TrimSuffix(units.Bytes(r.Fetched()).Human()+", "+rate(r, now), ", ")},
		{"connections", orUnseen(ownersSeen(r), bothWays(r.Connections)+", repeated "+units.Bytes(r.Connections.Retransmitted).Human())},
		{"live p90", orUnseen(ownersSeen(r), liveDetail(r))},
		{"paced", paced(r)},
		{"overlap", cmp.Or(strings.Join(r.Overlap, " "), "none")},
		{"devices", orUnseen(r.Visible != "none", bothWays(r.Devices))},
		{unowned, orUnseen(r.Visible != "none", bothWays(r.Unattributed)+" ("+cmp.Or(unattributedShare(r), "-")+" of devices)")},
		{"seen", cmp.Or(r.Visible, "unknown")},
		{"not seen", r.Unseen},
	} {
		if line[1] != "" {
			fmt.Fprintf(a.Out, "%-12s %s\n", line[0], terminal.Plain(line[1]))
		}
	}
	var sources [][]string
	for _, s := range r.Sources {
		sources = append(sources, []string{s.Name, s.Kind, units.Bytes(s.Bytes).Human(), percent(uint64(max(s.Bytes, 0)), uint64(max(r.Fetched(), 0)))})
	}
	if len(sources) > 0 {
		fmt.Fprintln(a.Out)
		if err := terminal.Table(a.Out, []string{"SOURCE", "KIND", "BYTES", "SHARE"}, sources); err != nil {
			return err
		}
	}
	if !ownersSeen(r) {
		return nil
	}
	fmt.Fprintln(a.Out)
	return terminal.Table(a.Out, []string{"WHO", "CLASS", "LOCALITY", "RECEIVED", "SHARE", "TRANSMITTED", "SHARE", "REPEATS"}, shareRows(r))
}

// ownersSeen reports whether the node saw whose bytes passed; else what a record
// has of owners is not known, and not 0.
func ownersSeen(r *scaleout.Record) bool { return r.Visible != "none" && r.Visible != "devices" }

func orUnseen(seen bool, text string) string {
	if !seen {
		return "not seen"
	}
	return text
}

// shareRows are what everybody moved, then what nobody owns, then the sum, of
// which the shares are.
func shareRows(r *scaleout.Record) [][]string {
	all := scaleout.Share{Bytes: r.Unattributed}
	for _, s := range r.Shares {
		all.Received, all.Transmitted, all.Retransmitted = all.Received+s.Received, all.Transmitted+s.Transmitted, all.Retransmitted+s.Retransmitted
	}
	row := func(name string, s scaleout.Share) []string {
		return []string{
			name, s.Class, s.Locality, units.Bytes(s.Received).Human(), percent(s.Received, all.Received),
			units.Bytes(s.Transmitted).Human(), percent(s.Transmitted, all.Transmitted), units.Bytes(s.Retransmitted).Human(),
		}
	}
	var rows [][]string
	for _, s := range r.Shares {
		rows = append(rows, row(owner(s.Pod, s.Container, s.Unit), s))
	}
	return append(rows, row(unowned, scaleout.Share{Locality: traffic.OffNode.String(), Bytes: r.Unattributed}), row("all", all))
}

// owner is who moved bytes: "namespace/name container", or a unit. A container is
// known by the first digits of its id.
func owner(pod, container, unit string) string {
	if pod == "" {
		return unit
	}
	return strings.TrimSuffix(pod+" "+short(container), " ")
}

// percent is a share for people, empty of nothing.
func percent(part, whole uint64) string {
	switch share := 100 * float64(part) / float64(whole); {
	case whole == 0:
		return ""
	case part > 0 && share < 0.1:
		return "<0.1%"
	default:
		return strconv.FormatFloat(share, 'f', 1, 64) + "%"
	}
}

// unattributedShare is how much of what devices counted nobody owns, both ways
// together.
func unattributedShare(r *scaleout.Record) string {
	return percent(r.Unattributed.Received+r.Unattributed.Transmitted, r.Devices.Received+r.Devices.Transmitted)
}

func bothWays(b scaleout.Bytes) string {
	return "received " + units.Bytes(b.Received).Human() + ", transmitted " + units.Bytes(b.Transmitted).Human()
}

func age(at, now time.Time) string { return max(now.Sub(at), 0).Round(time.Second).String() + " ago" }

func took(r *scaleout.Record, now time.Time) string {
	d := max(r.Duration(now), 0)
	if d < 10*time.Second {
		return d.Round(10 * time.Millisecond).String()
	}
	return d.Round(100 * time.Millisecond).String()
}

// rate is how fast the payload of a pull came, on average.
func rate(r *scaleout.Record, now time.Time) string {
	d := r.Duration(now)
	if d <= 0 {
		return ""
	}
	return units.Bytes(float64(r.Fetched())/d.Seconds()).Human() + "/s"
}

// from names the sources: "origin hub", "peer node-2".
func from(r *scaleout.Record) string {
	var names []string
	for _, s := range r.Sources {
		names = append(names, strings.TrimSpace(s.Kind+" "+s.Name))
	}
	return strings.Join(names, ", ")
}

func milliseconds(seconds float64) string {
	return strconv.FormatFloat(seconds*1000, 'f', 2, 64) + " ms"
}

// liveP90 is the round trip before and during: "0.40 ms -> 1.20 ms"; empty where
// nothing was served.
func liveP90(r *scaleout.Record) string {
	if r.Before.Samples+r.During.Samples == 0 {
		return ""
	}
	side := func(l scaleout.Latency) string {
		if l.Samples == 0 {
			return "?"
		}
		return milliseconds(l.P90)
	}
	return side(r.Before) + " -> " + side(r.During)
}

func liveDetail(r *scaleout.Record) string {
	side := func(when string, l scaleout.Latency) string {
		if l.Samples == 0 {
			return when + " nothing was served"
		}
		return fmt.Sprintf("%s %s (p50 %s, p99 %s, %d samples)", when, milliseconds(l.P90), milliseconds(l.P50), milliseconds(l.P99), l.Samples)
	}
	return side("before", r.Before) + "; " + side("during", r.During)
}

// overlap says that others ran at the same time.
func overlap(r *scaleout.Record) string {
	if len(r.Overlap) == 0 {
		return ""
	}
	return fmt.Sprintf("with %d", len(r.Overlap))
}

func paced(r *scaleout.Record) string {
	var held []string
	for _, why := range slices.Sorted(maps.Keys(r.PacedSeconds)) {
		held = append(held, strings.TrimSuffix(strconv.FormatFloat(r.PacedSeconds[why], 'f', 1, 64)+" s for "+why, " for "))
	}
	return cmp.Or(strings.Join(held, ", "), "none")
}
