package cli

import (
	"context"
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/nodeagent/admin"
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
	places, err := a.agents(ctx, false)
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
		Short: "List nodes with their devices and what is wrong with them",
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
