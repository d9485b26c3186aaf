package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/units"
)

// maxOwnerRows is how many owners of a node the table has; JSON has all.
const maxOwnerRows = 40

// nodeNetwork is who moved bytes over the network of a node.
type nodeNetwork struct {
	Node string `json:"node"`
	admin.Network
}

// sightText is how much of its network a node sees, as people read it.
func sightText(s admin.NetSight) string {
	text := "network: " + s.Sight
	if s.Sight == "devices" {
		text += " only"
	}
	if s.Reason != "" {
		text += ": " + s.Reason
	}
	return text
}

func (a *app) network() *cobra.Command {
	command := &cobra.Command{
		Use:   "network",
		Short: "Show who moved bytes over each node's network",
		Long: `Network shows what the network devices of each node counted since the agent began,
how much of it has an owner (with repeats and headers) and how much has none; then
the payload by class and by owner, since the counts began, which may be before the
agent did. Only what is off_node passes the devices. A sensor that is off is told
with its reason: what it would see has no owner, or is not seen at all.`,
		Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			places, err := a.agents(command.Context(), false)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(command.Context(), askTimeout)
			defer cancel()
			answers, failure := onAgents(ctx, places, func(ctx context.Context, c *admin.Client) (nodeNetwork, error) {
				node, err := c.Node(ctx)
				if err != nil {
					return nodeNetwork{}, err
				}
				n, err := c.Network(ctx)
				return nodeNetwork{Node: node.Name, Network: n}, err
			})
			nodes := []nodeNetwork{}
			for _, said := range answers {
				if said.err == nil {
					nodes = append(nodes, said.value)
				}
			}
			if len(nodes) == 0 && failure != nil {
				return failure
			}
			if a.json {
				return errors.Join(terminal.JSON(a.Out, map[string]any{"nodes": nodes}), failure)
			}
			return errors.Join(a.showNetwork(nodes, time.Now()), failure)
		},
	}
	return a.jsonFlag(a.nodeFlag(a.addrFlags(command, "agent", envAgent)))
}

func (a *app) showNetwork(nodes []nodeNetwork, now time.Time) error {
	devices := section{header: []string{"NODE", "DIRECTION", "DEVICES", "OWNED", "SHARE", "UNATTRIBUTED", "SHARE", "SINCE"}}
	live := section{header: []string{"NODE", "SERVING CONNECTIONS", "P50", "P90"}}
	totals := section{header: []string{"NODE", "CLASS", "LOCALITY", "TRANSPORT", "RECEIVED", "TRANSMITTED", "REPEATS"}}
	owners := section{header: []string{"NODE", "WHO", "CLASS", "LOCALITY", "TRANSPORT", "RECEIVED", "TRANSMITTED", "REPEATS"}}
	off := section{header: []string{"NODE", "SENSOR THAT IS OFF", "WANTED", "REASON"}}
	for _, n := range nodes {
		fmt.Fprintln(a.Out, terminal.Plain(n.Node+": "+sightText(admin.NetSight{Sight: n.Sight, Reason: n.Reason})))
		devices.rows = append(devices.rows, deviceBytes(n, now)...)
		if n.Live.Connections > 0 {
			live.rows = append(live.rows, []string{n.Node, blank(n.Live.Connections), milliseconds(n.Live.P50), milliseconds(n.Live.P90)})
		}
		for _, t := range n.Totals {
			totals.rows = append(totals.rows, append([]string{n.Node, t.Class, t.Locality, t.Transport}, moved(t.NetBytes)...))
		}
		more := n.MoreOwners
		for i, o := range n.Owners {
			if i == maxOwnerRows {
				more += len(n.Owners) - i
				break
			}
			who := owner(cmp.Or(o.Pod, o.PodUID), o.Container, o.Unit)
			owners.rows = append(owners.rows, append([]string{n.Node, who, o.Class, o.Locality, o.Transport}, moved(o.NetBytes)...))
		}
		if more > 0 {
			owners.rows = append(owners.rows, []string{n.Node, fmt.Sprintf("%d more", more), "", "", "", "", "", ""})
		}
		for _, s := range n.Sensors {
			if !s.On {
				off.rows = append(off.rows, []string{n.Node, s.Name, yesNo(s.Wanted), s.Reason})
			}
		}
	}
	for _, s := range []section{devices, live, totals, owners, off} {
		if len(s.rows) == 0 {
			continue
		}
		fmt.Fprintln(a.Out)
		if err := terminal.Table(a.Out, s.header, s.rows); err != nil {
			return err
		}
	}
	return nil
}

// deviceBytes are what the devices of a node counted, by direction.
func deviceBytes(n nodeNetwork, now time.Time) [][]string {
	row := func(direction string, devices, owned, none uint64) []string {
		return []string{
			n.Node, direction, units.Bytes(devices).Human(), units.Bytes(owned).Human(), percent(owned, devices),
			units.Bytes(none).Human(), percent(none, devices), age(n.Since, now),
		}
	}
	return [][]string{
		row("receive", n.Devices.Received, n.Owned.Received, n.Unattributed.Received),
		row("transmit", n.Devices.Transmitted, n.Owned.Transmitted, n.Unattributed.Transmitted),
	}
}

func moved(b admin.NetBytes) []string {
	return []string{units.Bytes(b.Received).Human(), units.Bytes(b.Transmitted).Human(), units.Bytes(b.Retransmitted).Human()}
}
