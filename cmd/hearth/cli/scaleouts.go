package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/plot"
	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
	routeradmin "github.com/hearth-dev/hearth/router/admin"
)

// scaleOutFlags say which scale-outs to show, and how.
type scaleOutFlags struct {
	last, router bool
	svg          string
}

func (a *app) scaleOuts() *cobra.Command {
	var flags scaleOutFlags
	command := &cobra.Command{
		Use:   "scaleouts [ID]",
		Short: "Show what each pull of a model moved over the network, and whose bytes they were",
		Long: `Scaleouts lists the pulls of each node, those that run first: how much came from
where, how fast, and how the requests that were served meanwhile fared. LIVE P90 is
the round trip of connections that serve, in the 30 s before the pull and during it.
A pull with an OVERLAP ran while others did: what others than the pulls moved is then
in each of them. UNATTRIBUTED is the share of what the network devices counted
that nobody owns.

With an ID, or with --last, it shows the whole record: who moved what, and its
course: bytes received and transmitted each second by class, and the live p90.
Shares there are of payload of all localities and what nobody owns. --svg writes the
same course to a file.

--router asks the router, which knows the summaries of all nodes; so it is where no
agent is found and a router is. --addr and --socket are then the router's.`,
		Example: `  hearth scaleouts
  hearth scaleouts --last --svg scaleout.svg
  hearth scaleouts --router`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(command *cobra.Command, args []string) error {
			switch {
			case len(args) == 1 && flags.last:
				return terminal.Usagef("want an ID or --last, one of the two")
			case flags.svg != "" && len(args) == 0 && !flags.last:
				return terminal.Usagef("--svg wants an ID or --last")
			}
			if !flags.router && a.addr == "" && a.socket == "" && a.node == "" {
				flags.router = a.onlyRouter(command.Context())
			}
			if flags.router {
				return a.fleetScaleOuts(command.Context(), args, flags)
			}
			if len(args) == 0 && !flags.last {
				return a.listScaleOuts(command.Context())
			}
			return a.oneScaleOut(command.Context(), strings.Join(args, ""), flags.svg)
		},
	}
	command.Flags().BoolVar(&flags.last, "last", false, "show the one that started last")
	command.Flags().BoolVar(&flags.router, "router", false, "ask the router for those of all nodes")
	command.Flags().StringVar(&flags.svg, "svg", "", "write the course of it to this file, as an SVG")
	_ = command.MarkFlagFilename("svg", "svg") // the flag exists
	command.MarkFlagsMutuallyExclusive("router", "svg")
	return a.jsonFlag(a.nodeFlag(a.addrFlags(command, "agent", envAgent)))
}

// onlyRouter reports whether no agent is named or found, and a router is.
func (a *app) onlyRouter(ctx context.Context) bool {
	if _, err := a.agents(ctx, false); terminal.CodeOf(err) != terminal.ExitUnreachable {
		return false
	}
	_, err := a.target.router(ctx)
	return err == nil
}

func (a *app) listScaleOuts(ctx context.Context) error {
	answers, failure, err := a.askScaleOuts(ctx)
	if err != nil {
		return err
	}
	records := []scaleout.Record{}
	answered := false
	for _, said := range answers {
		if said.err == nil {
			records, answered = append(records, said.value...), true
		}
	}
	if !answered {
		return failure
	}
	sortScaleOuts(records)
	if a.json {
		return errors.Join(terminal.JSON(a.Out, map[string]any{"scaleouts": records}), failure)
	}
	return errors.Join(a.showScaleOuts(records, time.Now()), failure)
}

// askScaleOuts asks every agent for its records without their course; failure is
// the first agent's that said nothing.
func (a *app) askScaleOuts(ctx context.Context) (answers []answer[[]scaleout.Record], failure, err error) {
	places, err := a.agents(ctx, false)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answers, failure = onAgents(ctx, places, func(ctx context.Context, c *admin.Client) ([]scaleout.Record, error) { return c.ScaleOuts(ctx) })
	return answers, failure, nil
}

// sortScaleOuts puts those first that run, then the latest.
func sortScaleOuts(records []scaleout.Record) {
	slices.SortStableFunc(records, func(x, y scaleout.Record) int {
		if xRuns, yRuns := x.End.IsZero(), y.End.IsZero(); xRuns != yRuns {
			if xRuns {
				return -1
			}
			return 1
		}
		return cmp.Or(y.Start.Compare(x.Start), strings.Compare(x.Node, y.Node))
	})
}

// oneScaleOut shows the record of an id, or the one that started last where that
// is empty.
func (a *app) oneScaleOut(ctx context.Context, id, svg string) error {
	record, failure, err := a.findScaleOut(ctx, id)
	if err != nil {
		return err
	}
	if svg != "" {
		drawn, err := plot.SVG(&record)
		if err != nil {
			return terminal.Fail(terminal.ExitFailure, err, "a pull has a course once a sample was taken while it ran")
		}
		if err := os.WriteFile(svg, drawn, 0o644); err != nil { //nolint:gosec // a picture for others to read
			return fmt.Errorf("write plot: %w", err)
		}
	}
	if a.json {
		return errors.Join(terminal.JSON(a.Out, map[string]any{"scaleouts": []scaleout.Record{record}}), failure)
	}
	if err := a.showScaleOut(&record, time.Now()); err != nil {
		return err
	}
	if !ownersSeen(&record) {
		return failure
	}
	drawn := plot.Text(&record, plot.TextOptions{Width: terminal.Width(a.Out), ASCII: !terminal.UTF8(a.Out), Colour: terminal.Colour(a.Out)})
	if drawn != "" {
		fmt.Fprintf(a.Out, "\n%s", drawn)
	}
	return failure
}

// findScaleOut gives the record with its course of the one agent that has it;
// failure is of agents that said nothing.
func (a *app) findScaleOut(ctx context.Context, id string) (record scaleout.Record, failure, err error) {
	lists, failure, err := a.askScaleOuts(ctx)
	if err != nil {
		return record, nil, err
	}
	type found struct {
		place  place
		record scaleout.Record
	}
	var all []found
	for _, said := range lists {
		for _, r := range said.value {
			if id == "" || r.ID == id {
				all = append(all, found{said.place, r})
			}
		}
	}
	if len(all) == 0 {
		if failure != nil {
			return record, nil, failure
		}
		return record, nil, noScaleOut(id)
	}
	slices.SortStableFunc(all, func(x, y found) int { return y.record.Start.Compare(x.record.Start) })
	if id != "" && len(all) > 1 {
		var names []string
		for _, f := range all {
			names = append(names, f.record.Node)
		}
		err := fmt.Errorf("several nodes have a scale-out %s: %s", id, strings.Join(names, ", "))
		return record, nil, terminal.Fail(terminal.ExitUsage, err, "say which with --node")
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	record, err = onAgent(ctx, all[0].place, func(ctx context.Context, c *admin.Client) (scaleout.Record, error) {
		return c.ScaleOut(ctx, all[0].record.ID)
	})
	if err == nil && record.ID == "" {
		err = noScaleOut(all[0].record.ID) // it went between the two answers
	}
	return record, failure, err
}

func noScaleOut(id string) error {
	if id == "" {
		return terminal.Fail(terminal.ExitNotFound, errors.New("no scale-out yet"), "a pull of a model is one; the last 64 of a node are kept until its agent ends")
	}
	return terminal.Fail(terminal.ExitNotFound, fmt.Errorf("no scale-out %s", id), "hearth scaleouts lists them: the last 64 of a node are kept until its agent ends")
}

// fleetScaleOuts shows what a router knows: summaries of all nodes.
func (a *app) fleetScaleOuts(ctx context.Context, args []string, flags scaleOutFlags) error {
	if flags.svg != "" {
		return terminal.Usagef("--svg wants an agent: a router knows no course")
	}
	p, err := a.target.router(ctx)
	if err != nil {
		return err
	}
	said, err := onRouter(ctx, p, func(ctx context.Context, c *routeradmin.Client) (routeradmin.ScaleOuts, error) {
		return c.ScaleOuts(ctx)
	})
	if err != nil {
		return err
	}
	list := slices.DeleteFunc(slices.Clone(said.ScaleOuts), func(s routeradmin.ScaleOut) bool {
		return a.node != "" && s.Node != a.node || len(args) == 1 && s.ID != args[0]
	})
	one := len(args) == 1 || flags.last
	if flags.last {
		slices.SortStableFunc(list, func(x, y routeradmin.ScaleOut) int { return y.Start.Compare(x.Start) })
		list = list[:min(len(list), 1)]
	}
	if one && len(list) == 0 {
		return noScaleOut(strings.Join(args, ""))
	}
	if a.json {
		return terminal.JSON(a.Out, routeradmin.ScaleOuts{ScaleOuts: orEmpty(list), More: said.More})
	}
	records := make([]scaleout.Record, 0, len(list))
	for _, s := range list {
		records = append(records, recordOf(s))
	}
	if !one {
		err := a.showScaleOuts(records, time.Now())
		if said.More > 0 {
			fmt.Fprintf(a.Err, "%d older ones are not shown\n", said.More)
		}
		return err
	}
	for i := range records {
		if i > 0 {
			fmt.Fprintln(a.Out)
		}
		if err := a.showScaleOut(&records[i], time.Now()); err != nil {
			return err
		}
	}
	fmt.Fprintln(a.Err, "the pods and the course of it are known to the agent of its node")
	return nil
}

// recordOf is a router's summary as an agent's record, without owners and course.
func recordOf(s routeradmin.ScaleOut) scaleout.Record {
	r := scaleout.Record{
		ID: s.ID, Node: s.Node, State: s.State, Error: s.Error, Ref: s.Ref, Digest: s.Digest, Reason: s.Reason, Start: s.Start, End: s.End,
		SizeBytes: s.SizeBytes, MissingBytes: s.MissingBytes, Connections: scaleout.Bytes(s.Connections), Devices: scaleout.Bytes(s.Devices),
		Unattributed: scaleout.Bytes(s.Unattributed), Visible: s.Visible, Before: scaleout.Latency(s.Before), During: scaleout.Latency(s.During),
		Overlap: s.Overlap,
	}
	for _, source := range s.Sources {
		r.Sources = append(r.Sources, scaleout.Source(source))
	}
	for _, c := range s.Classes {
		r.Shares = append(r.Shares, scaleout.Share{Class: c.Class, Locality: c.Locality, Bytes: scaleout.Bytes(c.Moved)})
	}
	if s.PacedSeconds > 0 {
		r.PacedSeconds = map[string]float64{"": s.PacedSeconds}
	}
	return r
}
