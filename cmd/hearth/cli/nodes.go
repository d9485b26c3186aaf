package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

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
	// Network is how much of its network it sees; nil where it does not say.
}

// partTimeout bounds one of the questions to an agent that says who it is, so
// that one which nothing answers leaves time for the others.
const partTimeout = askTimeout / 2

// readNode asks an agent all of it. What it does not answer, as of a data role
// that hangs, is a problem of the node and takes away nothing else.
func readNode(ctx context.Context, c *admin.Client) (nodeState, error) {
	node, err := c.Node(ctx)
	if err != nil {
		return nodeState{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, partTimeout)
	defer cancel()
	s := nodeState{Node: node}
	var reading sync.WaitGroup
	var models, endpoints, devices error
	reading.Go(func() { s.Models, models = c.Models(ctx) })
	reading.Go(func() { s.Endpoints, endpoints = c.Endpoints(ctx) })
	reading.Go(func() { s.Devices, devices = c.Devices(ctx) })
	reading.Wait()
	for _, part := range []struct {
		what string
		err  error
	}{{"models", models}, {"endpoints", endpoints}, {"devices", devices}} {
		if part.err != nil {
			s.Node.Problems = append(s.Node.Problems, fmt.Sprintf("its %s are not known: %v", part.what, part.err))
		}
	}
	// In JSON a list that is not known is empty, not null.
	s.Models, s.Endpoints, s.Devices = orEmpty(s.Models), orEmpty(s.Endpoints), orEmpty(s.Devices)
	return s, nil
}

func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
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
