package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/units"
)

// nodeKV is the KV store of a node.
type nodeKV struct {
	Node string `json:"node"`
	admin.KV
}

func (a *app) kv() *cobra.Command {
	command := &cobra.Command{
		Use:   "kv",
		Short: "Show, check, pin and drop the KV blocks of a node",
	}
	for _, child := range []*cobra.Command{a.kvStat(), a.kvPin(true), a.kvPin(false), a.kvDrop()} {
		command.AddCommand(a.jsonFlag(a.nodeFlag(a.addrFlags(child, "agent", envAgent))))
	}
	command.AddCommand(a.kvCheck())
	return command
}

func (a *app) kvStat() *cobra.Command {
	return &cobra.Command{
		Use:   "stat",
		Short: "Show budgets, drives, wear and tenants of each node's KV store",
		Long: `Stat shows the KV store of each node. Of its space, OFFERED is what the node has of
the configured sizes, TENANTS what the tenants of the configuration own, CLAIMS what
is left for claims and RESERVED what claims have. USED is room taken: on NVMe whole
segments, each of up to 256 MiB. WRITTEN is all that the drives ever took, MAY WRITE
the rate that their wear allows on average, DAYS LEFT wants kv.driveEndurance.

HITS and MISSES count blocks that were read since the agent's start, SAVED TOKENS
those of hits where blockTokens is known. DROPPED counts blocks that a tier did not
take; the metric hearth_kv_dropped_total says why.`,
		Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			nodes, failure, err := a.readKV(command.Context())
			if err != nil {
				return err
			}
			if len(nodes) == 0 && failure != nil {
				return failure
			}
			if a.json {
				return errors.Join(terminal.JSON(a.Out, map[string]any{"nodes": nodes}), failure)
			}
			return errors.Join(a.showKV(nodes), failure)
		},
	}
}

// readKV asks every agent for its KV store; failure is the first agent's that said
// nothing.
func (a *app) readKV(ctx context.Context) (nodes []nodeKV, failure, err error) {
	places, err := a.agents(ctx, false)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answers, failure := onAgents(ctx, places, func(ctx context.Context, c *admin.Client) (nodeKV, error) {
		node, err := c.Node(ctx)
		if err != nil {
			return nodeKV{}, err
		}
		kv, err := c.KV(ctx)
		return nodeKV{Node: node.Name, KV: kv}, err
	})
	nodes = []nodeKV{}
	for _, said := range answers {
		if said.err == nil {
			nodes = append(nodes, said.value)
		}
	}
	return nodes, failure, nil
}

func (a *app) showKV(nodes []nodeKV) error {
	spaces := section{header: []string{"NODE", "TIER", "OFFERED", "TENANTS", "CLAIMS", "RESERVED", "USED", "BLOCKS"}}
	drives := section{header: []string{"NODE", "DRIVE", "FREE", "WRITTEN", "MAY WRITE", "DAYS LEFT"}}
	tenants := section{header: []string{
		"NODE", "KIND", "TENANT", "RAM", "NVME", "BLOCKS", "HITS", "MISSES", "SAVED TOKENS", "DROPPED", "DAMAGED", "PINNED", "CLIENTS",
	}}
	left := section{header: []string{"NODE", "KIND", "NOT SERVED", "NVME"}}
	var problems []string
	for _, n := range nodes {
		spaces.rows = append(spaces.rows, spaceRows(n)...)
		drives.rows = append(drives.rows, driveRows(n)...)
		for _, t := range n.Tenants {
			tenants.rows = append(tenants.rows, tenantRow(n.Node, t))
		}
		for _, l := range n.Left {
			left.rows = append(left.rows, []string{n.Node, tenantKind(l.Kind), l.Name, units.Bytes(l.Bytes).Human()})
		}
		for _, problem := range n.Problems {
			problems = append(problems, n.Node+": "+problem)
		}
	}
	shown := 0
	for _, s := range []section{spaces, drives, tenants, left} {
		if len(s.rows) == 0 {
			continue
		}
		if shown > 0 {
			fmt.Fprintln(a.Out)
		}
		shown++
		if err := terminal.Table(a.Out, s.header, s.rows); err != nil {
			return err
		}
	}
	a.showProblems(problems)
	return nil
}

// spaceRows are the tiers of a node: one row without sizes where it has no space.
func spaceRows(n nodeKV) [][]string {
	var ram, nvme, ramBlocks, nvmeBlocks int64
	for _, t := range n.Tenants {
		ram, nvme, ramBlocks, nvmeBlocks = ram+t.RAM.Used, nvme+t.NVMe.Used, ramBlocks+t.RAM.Blocks, nvmeBlocks+t.NVMe.Blocks
	}
	var rows [][]string
	for _, tier := range []struct {
		name         string
		of           admin.KVBudget
		used, blocks int64
	}{{"ram", n.Memory, ram, ramBlocks}, {"nvme", n.NVMe, nvme, nvmeBlocks}} {
		if tier.of.Configured == 0 {
			continue
		}
		offered := units.Bytes(tier.of.Offered).Human()
		if tier.of.Offered < tier.of.Configured {
			offered += " of " + units.Bytes(tier.of.Configured).Human()
		}
		rows = append(rows, []string{
			n.Node, tier.name, offered, units.Bytes(tier.of.Tenants).Human(), units.Bytes(tier.of.Claims).Human(),
			units.Bytes(tier.of.Reserved).Human(), units.Bytes(tier.used).Human(), strconv.FormatInt(tier.blocks, 10),
		})
	}
	if rows == nil {
		rows = append(rows, []string{n.Node, "none", "", "", "", "", "", ""})
	}
	return rows
}

// driveRows are a node's drives, the first with the wear of all.
func driveRows(n nodeKV) [][]string {
	var rows [][]string
	for i, d := range n.Drives {
		free := units.Bytes(d.Free).Human() + " of " + units.Bytes(d.Size).Human()
		if d.Error != "" {
			free = d.Error
		}
		row := []string{n.Node, d.Dir, free, "", "", ""}
		if i == 0 && n.Wear.Bounded {
			row[3] = units.Bytes(n.Wear.Written).Human()
			row[4] = units.Bytes(n.Wear.Rate).Human() + "/s"
			if n.Wear.DaysLeft != nil {
				row[5] = fmt.Sprintf("%.0f", *n.Wear.DaysLeft)
			}
		}
		rows = append(rows, row)
	}
	return rows
}

// tenantKind is the kind of a tenant for people: that of kv.tenants is "tenant", whatever
// its clients come with.
func tenantKind(kind string) string {
	if kind == kvtier.TenantCredential {
		return admin.KindTenant
	}
	return kind
}

func tenantRow(node string, t admin.KVTenant) []string {
	fill := func(tier admin.KVTier) string {
		if tier.Budget == 0 && tier.Used == 0 {
			return ""
		}
		return units.Bytes(tier.Used).Human() + " of " + units.Bytes(tier.Budget).Human()
	}
	var dropped int64
	for _, n := range t.Dropped {
		dropped += n
	}
	name := t.Name
	if t.Namespace != "" {
		name = t.Namespace + ":" + name
	}
	return []string{
		node, tenantKind(t.Kind), name, fill(t.RAM), fill(t.NVMe), strconv.FormatInt(t.Blocks, 10), strconv.FormatInt(t.RAM.Hits+t.NVMe.Hits, 10),
		strconv.FormatInt(t.Misses, 10), strconv.FormatInt(t.RAM.SavedTokens+t.NVMe.SavedTokens, 10), strconv.FormatInt(dropped, 10),
		strconv.FormatInt(t.RAM.Damaged+t.NVMe.Damaged, 10), blank(t.Pinned), strconv.FormatInt(t.Connections, 10),
	}
}

func (a *app) kvPin(pin bool) *cobra.Command {
	use, short := "unpin", "Let pinned blocks of a tenant go"
	if pin {
		use, short = "pin", "Keep blocks of a tenant whatever else is stored"
	}
	return &cobra.Command{
		Use:   use + " TENANT KEY...",
		Short: short,
		Long: short + `.

TENANT is a name as 'hearth kv stat' shows it (of a claim its UID), or KIND/NAME where
two have the name. KEY is the key as the client sends it, or the 64 hexadecimal
digits of a block's hash. A pinned block stays until it is unpinned or dropped, also
over restarts where the tenant has NVMe; only a block that is there can be pinned.
Pins of a tenant take at most 4,096 keys, half of its RAM and half of its NVMe.
Only the agent's local socket takes this call (--socket), no address does.`,
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: a.completeTenant,
		RunE: func(command *cobra.Command, args []string) error {
			p, err := a.agent(command.Context(), true)
			if err != nil {
				return err
			}
			var sum admin.KVPinned
			for keys := range slices.Chunk(args[1:], admin.MaxKVKeys) {
				said, err := onAgent(command.Context(), p, func(ctx context.Context, c *admin.Client) (admin.KVPinned, error) {
					return c.KVPin(ctx, admin.KVPinRequest{Tenant: args[0], Keys: keys, Pin: pin})
				})
				if err != nil {
					return err
				}
				said.Changed += sum.Changed
				sum = said
			}
			if a.json {
				return terminal.JSON(a.Out, sum)
			}
			fmt.Fprintf(a.Out, "%s: %d blocks %sned, %d are pinned now, %s\n", terminal.Plain(args[0]), sum.Changed, use, sum.Pinned, units.Bytes(sum.Bytes).Human())
			return nil
		},
	}
}

func (a *app) kvDrop() *cobra.Command {
	var all bool
	command := &cobra.Command{
		Use:   "drop TENANT [KEY... | --all]",
		Short: "End blocks of a tenant, also on the drives",
		Long: `Drop ends the blocks of KEYs, or with --all every block of the tenant, and their
pins. --all also takes a tenant that is not served: one that the configuration names
no more, whose blocks are still on the drives, or one whose files there cannot be
read, which begins anew then. Engines compute anew what they miss. Other nodes (kv.peers)
keep their blocks, and give them back after a minute: until then drop them there,
too. Only the agent's local socket takes this call (--socket), no address does.`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeTenant,
		RunE: func(command *cobra.Command, args []string) error {
			if keys := len(args) - 1; all == (keys > 0) {
				return terminal.Usagef("want either keys or --all")
			}
			p, err := a.agent(command.Context(), true)
			if err != nil {
				return err
			}
			requests := []admin.KVDropRequest{{Tenant: args[0], All: true}}
			if !all {
				requests = nil
				for keys := range slices.Chunk(args[1:], admin.MaxKVKeys) {
					requests = append(requests, admin.KVDropRequest{Tenant: args[0], Keys: keys})
				}
			}
			var sum admin.KVDropped
			for _, request := range requests {
				said, err := onAgent(command.Context(), p, func(ctx context.Context, c *admin.Client) (admin.KVDropped, error) { return c.KVDrop(ctx, request) })
				if err != nil {
					return err
				}
				sum.Dropped += said.Dropped
			}
			if a.json {
				return terminal.JSON(a.Out, sum)
			}
			if sum.Dropped < 0 {
				fmt.Fprintf(a.Out, "%s: all blocks dropped\n", terminal.Plain(args[0]))
				return nil
			}
			fmt.Fprintf(a.Out, "%s: %d blocks dropped\n", terminal.Plain(args[0]), sum.Dropped)
			return nil
		},
	}
	command.Flags().BoolVar(&all, "all", false, "every block of the tenant")
	return command
}

// completeWithin bounds what a shell waits for names of tenants.
const completeWithin = 2 * time.Second

// completeTenant gives the names of tenants for the first argument.
func (a *app) completeTenant(command *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx := command.Context()
	if ctx == nil {
		ctx = context.Background() // while a shell completes nothing runs
	}
	ctx, cancel := context.WithTimeout(ctx, completeWithin)
	defer cancel()
	nodes, _, err := a.readKV(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	for _, n := range nodes {
		for _, t := range n.Tenants {
			names = append(names, t.Name)
		}
		for _, l := range n.Left {
			if l.Name != "" {
				names = append(names, l.Name)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), cobra.ShellCompDirectiveNoFileComp
}
