package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/units"
)

// nodeClaim is a claim on a node.
type nodeClaim struct {
	Node string `json:"node,omitempty"`
	admin.Claim
}

func (a *app) claims() *cobra.Command {
	command := &cobra.Command{
		Use:   "claims",
		Short: "List the ResourceClaims that have something on a node",
		Long: `Claims lists what each node's driver has prepared, or is about to: GPUs, weights
and KV space, the pods that use them, how far a pull is that a pod waits for, and
why a claim was refused.`,
		Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			answers, failure, err := a.fromAgents(command.Context())
			if err != nil {
				return err
			}
			claims := []nodeClaim{}
			for _, said := range answers {
				claims = append(claims, said.Claims...)
			}
			if failure != nil && len(answers) == 0 {
				return failure
			}
			if a.json {
				return errors.Join(terminal.JSON(a.Out, map[string]any{"claims": claims}), failure)
			}
			header := []string{"NODE", "NAMESPACE", "CLAIM", "STATE", "GPUS", "WEIGHTS", "KV", "PODS", "SINCE"}
			return errors.Join(terminal.Table(a.Out, header, claimRows(claims, time.Now())), a.showWaiting(claims), failure)
		},
	}
	return a.jsonFlag(a.nodeFlag(a.addrFlags(command, "agent", envAgent)))
}

// holding is what a node has and who has it.
type holding struct {
	Node    string
	Claims  []nodeClaim
	Devices []nodeDevice
}

// nodeDevice is a device of a node.
type nodeDevice struct {
	Node string `json:"node,omitempty"`
	admin.Device
}

// fromAgents asks every agent for its claims and devices; failure is the first
// agent's that said nothing.
func (a *app) fromAgents(ctx context.Context) (held []holding, failure, err error) {
	places, err := a.agents(ctx, false)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answers, failure := onAgents(ctx, places, func(ctx context.Context, c *admin.Client) (holding, error) {
		node, err := c.Node(ctx)
		if err != nil {
			return holding{}, err
		}
		claims, err := c.Claims(ctx)
		if err != nil {
			return holding{}, err
		}
		devices, err := c.Devices(ctx)
		h := holding{Node: node.Name}
		for _, claim := range claims {
			h.Claims = append(h.Claims, nodeClaim{Node: node.Name, Claim: claim})
		}
		for _, d := range devices {
			h.Devices = append(h.Devices, nodeDevice{Node: node.Name, Device: d})
		}
		return h, err
	})
	for _, said := range answers {
		if said.err == nil {
			held = append(held, said.value)
		}
	}
	return held, failure, nil
}

func claimRows(claims []nodeClaim, now time.Time) [][]string {
	var rows [][]string
	for _, c := range claims {
		gpus, kv := 0, ""
		for _, d := range c.Devices {
			if d.Kind == dradriver.KindGPU {
				gpus++
			}
		}
		if c.KV != nil {
			kv = sizes(c.KV.Memory, c.KV.NVMe)
		}
		since := ""
		if !c.Since.IsZero() {
			since = now.Sub(c.Since).Round(time.Second).String()
		}
		rows = append(rows, []string{
			c.Node, c.Namespace, c.Name, c.State, blank(gpus), strings.Join(weightsOf(c.Artifacts), " "), kv, strings.Join(c.Pods, " "), since,
		})
	}
	return rows
}

// blank gives a count, or nothing for none.
func blank(n int) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(n)
}

// sizes gives KV space: "40 GiB", or with both tiers "40 GiB + 100 GiB nvme".
func sizes(memory, nvme int64) string {
	var parts []string
	if memory > 0 {
		parts = append(parts, units.Bytes(memory).Human())
	}
	if nvme > 0 {
		parts = append(parts, units.Bytes(nvme).Human()+" nvme")
	}
	return strings.Join(parts, " + ")
}

// weightsOf names artifacts, and how far those are that are not here.
func weightsOf(artifacts []admin.ClaimArtifact) []string {
	var names []string
	for _, w := range artifacts {
		name := cmp.Or(w.Ref, short(w.Digest))
		if w.Size > 0 && w.Present < w.Size {
			name += fmt.Sprintf("(%d%%)", w.Present*100/w.Size)
		}
		names = append(names, name)
	}
	return names
}

// showWaiting says of each claim that is not prepared what it waits for.
func (a *app) showWaiting(claims []nodeClaim) error {
	first := true
	for _, c := range claims {
		why := cmp.Or(c.Error, c.Progress)
		if why == "" {
			continue
		}
		if first {
			fmt.Fprintln(a.Out)
			first = false
		}
		if _, err := fmt.Fprintf(a.Out, "%s: %s/%s: %s\n", terminal.Plain(c.Node), terminal.Plain(c.Namespace), terminal.Plain(c.Name), terminal.Plain(why)); err != nil {
			return fmt.Errorf("write answer: %w", err)
		}
	}
	return nil
}

func (a *app) devices() *cobra.Command {
	command := &cobra.Command{
		Use:   "devices",
		Short: "List the GPUs of each node, what is known of them and which claims have them",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			answers, failure, err := a.fromAgents(command.Context())
			if err != nil {
				return err
			}
			devices := []nodeDevice{}
			for _, said := range answers {
				devices = append(devices, said.Devices...)
			}
			if failure != nil && len(answers) == 0 {
				return failure
			}
			if a.json {
				return errors.Join(terminal.JSON(a.Out, map[string]any{"devices": devices}), failure)
			}
			header := []string{"NODE", "DEVICE", "PRODUCT", "MEMORY", "PCIE ROOT", "NUMA", "NVLINK", "HEALTH", "CONDITIONS", "CLAIMS"}
			return errors.Join(terminal.Table(a.Out, header, deviceFactRows(devices)), failure)
		},
	}
	return a.jsonFlag(a.nodeFlag(a.addrFlags(command, "agent", envAgent)))
}

func deviceFactRows(devices []nodeDevice) [][]string {
	var rows [][]string
	for _, d := range devices {
		memory, numa := "", ""
		if d.Memory > 0 {
			memory = units.Bytes(d.Memory).Human()
		}
		if d.NUMA != nil {
			numa = strconv.Itoa(*d.NUMA)
		}
		rows = append(rows, []string{
			d.Node, d.ID, d.Product, memory, d.PCIRoot, numa, d.NVLinkGroup, d.Health, conditions(d.Device), strings.Join(d.Device.Claims, " "),
		})
	}
	return rows
}
