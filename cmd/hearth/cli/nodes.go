package cli

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/units"
)

// nodeState is everything an agent says at once.
type nodeState struct {
	Node      admin.Node       `json:"node"`
	Models    []admin.Model    `json:"models"`
	Endpoints []admin.Endpoint `json:"endpoints"`
	Devices   []admin.Device   `json:"devices"`
}

func readNode(ctx context.Context, c *admin.Client) (nodeState, error) {
	node, err := c.Node(ctx)
	if err != nil {
		return nodeState{}, err
	}
	models, err := c.Models(ctx)
	if err != nil {
		return nodeState{}, err
	}
	endpoints, err := c.Endpoints(ctx)
	if err != nil {
		return nodeState{}, err
	}
	devices, err := c.Devices(ctx)
	if err != nil {
		return nodeState{}, err
	}
	return nodeState{Node: node, Models: models, Endpoints: endpoints, Devices: devices}, nil
}

// readNodes asks every agent; failure is the first agent's that said nothing.
func (a *app) readNodes(ctx context.Context) (nodes []nodeState, failure, err error) {
	places, err := a.agents(false)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answers, failure := onAgents(ctx, places, readNode)
	nodes = []nodeState{}
	for _, said := range answers {
		if said.err == nil {
			nodes = append(nodes, said.value)
		}
	}
	return nodes, failure, nil
}

func (a *app) nodes() *cobra.Command {
	command := &cobra.Command{
		Use:   "nodes",
		Short: "List nodes with their devices and space",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			nodes, failure, err := a.readNodes(command.Context())
			if err != nil {
				return err
			}
			if len(nodes) == 0 {
				return failure
			}
			if a.json {
				return errors.Join(terminal.JSON(a.Out, map[string]any{"nodes": nodes}), failure)
			}
			return errors.Join(terminal.Table(a.Out, []string{"NODE", "DEVICE", "PRODUCT", "HEALTH", "CONDITIONS"}, deviceRows(nodes)), failure)
		},
	}
	return a.jsonFlag(a.nodeFlag(a.addrFlags(command, "agent", envAgent)))
}

func deviceRows(nodes []nodeState) [][]string {
	var rows [][]string
	for _, n := range nodes {
		if len(n.Devices) == 0 {
			rows = append(rows, []string{n.Node.Name, "", "", "", ""})
		}
		for _, d := range n.Devices {
			rows = append(rows, []string{n.Node.Name, d.ID, d.Product, d.Health, conditions(d)})
		}
	}
	return rows
}

func conditions(d admin.Device) string {
	var found []string
	for _, c := range d.Conditions {
		found = append(found, c.Key+"="+c.Value)
	}
	return strings.Join(found, " ")
}

func (a *app) status() *cobra.Command {
	command := &cobra.Command{
		Use:   "status",
		Short: "Show nodes, endpoints and what is warm",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			nodes, failure, err := a.readNodes(command.Context())
			if err != nil {
				return err
			}
			if len(nodes) == 0 {
				return failure
			}
			if a.json {
				return errors.Join(terminal.JSON(a.Out, map[string]any{"nodes": nodes}), failure)
			}
			return errors.Join(a.showStatus(nodes), failure)
		},
	}
	return a.jsonFlag(a.nodeFlag(a.addrFlags(command, "agent", envAgent)))
}

func (a *app) showStatus(nodes []nodeState) error {
	var machines, endpoints [][]string
	var models []nodeModel
	var problems []string
	for _, n := range nodes {
		machines = append(machines, []string{
			n.Node.Name, n.Node.Version, strings.Join(n.Node.Roles, "+"), healthOf(n.Devices), space(n.Node.Space),
		})
		for _, m := range n.Models {
			models = append(models, nodeModel{Node: n.Node.Name, Model: m})
		}
		for _, e := range n.Endpoints {
			endpoints = append(endpoints, []string{
				n.Node.Name, e.Name, e.Pool, e.Engine, endpointState(e), strconv.FormatUint(uint64(e.Load.Running), 10),
				strconv.FormatUint(uint64(e.Load.Waiting), 10), fmt.Sprintf("%.0f%%", e.Load.KVUsage*100), e.URL,
			})
		}
		for _, problem := range n.Node.Problems {
			problems = append(problems, n.Node.Name+": "+problem)
		}
	}
	if err := terminal.Table(a.Out, []string{"NODE", "VERSION", "ROLES", "DEVICES", "WEIGHTS"}, machines); err != nil {
		return err
	}
	if len(endpoints) > 0 {
		fmt.Fprintln(a.Out)
		if err := terminal.Table(a.Out, []string{"NODE", "ENDPOINT", "POOL", "ENGINE", "STATE", "RUNNING", "WAITING", "KV", "URL"}, endpoints); err != nil {
			return err
		}
	}
	if len(models) > 0 {
		fmt.Fprintln(a.Out)
		if err := terminal.Table(a.Out, []string{"NODE", "REF", "STATE", "SIZE", "PRESENT", "LEASES", "DIGEST"}, modelRows(models)); err != nil {
			return err
		}
	}
	for i, problem := range problems {
		if i == 0 {
			fmt.Fprintln(a.Out, "\nPROBLEMS")
		}
		fmt.Fprintln(a.Out, terminal.Plain(problem))
	}
	return nil
}

func endpointState(e admin.Endpoint) string {
	switch {
	case !e.Reachable:
		return "unreachable"
	case e.Draining:
		return "draining"
	}
	return "serving"
}

// healthOf counts devices by health: "3 healthy, 1 unhealthy".
func healthOf(devices []admin.Device) string {
	count := map[string]int{}
	for _, d := range devices {
		count[d.Health]++
	}
	var found []string
	for _, health := range []string{"healthy", "degraded", "unhealthy"} {
		if count[health] > 0 {
			found = append(found, fmt.Sprintf("%d %s", count[health], health))
		}
	}
	return strings.Join(found, ", ")
}

func space(s admin.Space) string {
	if s.Capacity == 0 {
		return ""
	}
	return units.Bytes(s.Used).Human() + " of " + units.Bytes(s.Capacity).Human()
}
