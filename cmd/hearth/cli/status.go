package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/cmd/hearth/upstate"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	routeradmin "github.com/hearth-dev/hearth/router/admin"
	"github.com/hearth-dev/hearth/units"
)

// statusAnswer is the JSON of `hearth status`; what could not be asked is absent.
type statusAnswer struct {
	Nodes  []nodeState  `json:"nodes"`
	Router *routerState `json:"router,omitempty"`
}

// routerState is everything a router says at once.
type routerState struct {
	routeradmin.Status
	Endpoints []routeradmin.Endpoint `json:"endpointList"`
	Models    []routeradmin.Model    `json:"modelList"`
}

func readRouter(ctx context.Context, c *routeradmin.Client) (routerState, error) {
	status, err := c.Status(ctx)
	if err != nil {
		return routerState{}, err
	}
	endpoints, err := c.Endpoints(ctx)
	if err != nil {
		return routerState{}, err
	}
	models, err := c.Models(ctx)
	if err != nil {
		return routerState{}, err
	}
	return routerState{Status: status, Endpoints: endpoints, Models: models}, nil
}

// onRouter makes calls to a router and explains their errors.
func onRouter[T any](ctx context.Context, p place, call func(context.Context, *routeradmin.Client) (T, error)) (T, error) {
	var none T
	config, err := p.client(identity.RoleRouter)
	if err != nil {
		return none, err
	}
	client, err := routeradmin.NewTLSClient(p.String(), config)
	if err != nil {
		return none, terminal.Fail(terminal.ExitUsage, err, "want http://host:port or the path of a socket")
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answer, err := call(ctx, client)
	if err != nil {
		return none, unreachable("router", err)
	}
	return answer, nil
}

func (a *app) status() *cobra.Command {
	command := &cobra.Command{
		Use:   "status",
		Short: "Show nodes, endpoints and what is warm",
		Long: `Status asks the agents and the router that can be found: this machine's, or those
of a running 'hearth up'. --addr, --socket and $HEARTH_AGENT name an agent,
$HEARTH_ROUTER names a router. Where only one of the two is named or runs here, it
is shown alone, and not beside what a 'hearth up' runs.`,
		Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			var said statusAnswer
			var failure, none error
			router := &target{notes: a.Err, tls: a.tls}
			a.oneWorld(command.Context(), router)
			said.Nodes, failure, none = a.readNodes(command.Context())
			router.up = a.up
			if place, err := router.router(command.Context()); err == nil {
				state, err := onRouter(command.Context(), place, readRouter)
				if err == nil {
					said.Router = &state
				}
				failure = errors.Join(failure, err)
			}
			if len(said.Nodes) == 0 && said.Router == nil {
				return errors.Join(none, failure)
			}
			if said.Nodes == nil {
				said.Nodes = []nodeState{}
			}
			if a.json {
				return errors.Join(terminal.JSON(a.Out, said), failure)
			}
			return errors.Join(a.showStatus(said), failure)
		},
	}
	return a.jsonFlag(a.nodeFlag(a.addrFlags(command, "agent", envAgent)))
}

// oneWorld keeps a running 'hearth up' out of the status where either side is
// named or runs here: agents of one fabric beside the router of another mislead.
func (a *app) oneWorld(ctx context.Context, router *target) {
	why, named := a.here("agent", envAgent)
	if !named {
		why, named = router.here("router", envRouter)
	}
	if !named {
		return
	}
	if states, err := upstate.Read(); err == nil && slices.ContainsFunc(states, func(s upstate.State) bool { return answersAnywhere(ctx, s) }) {
		fmt.Fprintf(a.Err, "%s, so the running 'hearth up' is not shown\n", why)
	}
	a.noUp, router.noUp = true, true
}

// section is one table of the status.
type section struct {
	header []string
	rows   [][]string
}

func (a *app) showStatus(said statusAnswer) error {
	var problems, networks []string
	machines := section{header: []string{"NODE", "VERSION", "ROLES", "DEVICES", "WEIGHTS", "KV"}}
	pools := section{header: []string{"NODE", "SLICE POOL", "STATE", "DEVICES", "CLAIMS", "DETAIL"}}
	endpoints := section{header: []string{"NODE", "ENDPOINT", "POOL", "ENGINE", "STATE", "RUNNING", "WAITING", "KV", "URL"}}
	models := section{header: []string{"NODE", "REF", "STATE", "SIZE", "PRESENT", "ACCESS", "LEASES", "DIGEST"}}
	for _, n := range said.Nodes {
		machines.rows = append(machines.rows, []string{
			n.Node.Name, n.Node.Version, strings.Join(n.Node.Roles, "+"), healthOf(n.Devices), space(n.Node.Space), kvFill(n.Node.KV),
		})
		if n.Node.Network != nil {
			networks = append(networks, n.Node.Name+": "+sightText(*n.Node.Network))
		}
		for _, e := range n.Endpoints {
			endpoints.rows = append(endpoints.rows, []string{
				n.Node.Name, e.Name, e.Pool, e.Engine, endpointState(e, n.Devices), strconv.FormatUint(uint64(e.Load.Running), 10),
				strconv.FormatUint(uint64(e.Load.Waiting), 10), fmt.Sprintf("%.0f%%", e.Load.KVUsage*100), e.URL,
			})
		}
		for _, m := range n.Models {
			models.rows = append(models.rows, modelRows([]nodeModel{{Node: n.Node.Name, Model: m}})...)
		}
		problems = append(problems, whyNot(n)...)
		pools.rows = append(pools.rows, poolRows(n.Node)...)
		for _, problem := range n.Node.Problems {
			problems = append(problems, n.Node.Name+": "+problem)
		}
	}
	sections := []section{machines, endpoints, models, pools}
	if r := said.Router; r != nil {
		sections = append(sections, routerSections(r)...)
		for _, problem := range r.Problems {
			problems = append(problems, r.Name+": "+problem)
		}
		if told := func(problem string) bool { return strings.Contains(problem, r.Config.Error) }; r.Config.Error != "" && !slices.ContainsFunc(r.Problems, told) {
			problems = append(problems, r.Name+": "+r.Config.Error)
		}
	}
	shown := 0
	for i, s := range sections {
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
		if i > 0 {
			continue
		}
		for _, line := range networks { // below the nodes
			fmt.Fprintln(a.Out, terminal.Plain(line))
		}
	}
	a.showProblems(problems)
	return nil
}

// maxProblemLines bounds what is shown of one problem.
const maxProblemLines = 20

// showProblems ends a status. A problem of several lines, as of a file with several
// faults, has the others below its first.
func (a *app) showProblems(problems []string) {
	for i, problem := range problems {
		if i == 0 {
			fmt.Fprintln(a.Out, "\nPROBLEMS")
		}
		indent, shown := "", 0
		for line := range strings.Lines(problem) {
			line = strings.TrimRight(strings.ReplaceAll(line, "\t", "    "), " \r\n")
			if line == "" {
				continue
			}
			if shown++; shown > maxProblemLines {
				fmt.Fprintln(a.Out, "    ...")
				break
			}
			fmt.Fprintln(a.Out, indent+terminal.Plain(line))
			indent = "    "
		}
	}
}

// poolRows are the slice pools that a node is to publish, the first with the
// claims that the node has; none where it is not on Kubernetes.
func poolRows(n admin.Node) [][]string {
	if n.Kubernetes == nil {
		return nil
	}
	var claims []string
	for _, state := range slices.Sorted(maps.Keys(n.Kubernetes.Claims)) {
		claims = append(claims, fmt.Sprintf("%d %s", n.Kubernetes.Claims[state], state))
	}
	var rows [][]string
	for _, p := range n.Kubernetes.Pools {
		held := ""
		if len(rows) == 0 {
			held = strings.Join(claims, ", ")
		}
		rows = append(rows, []string{n.Name, p.Name, p.State, strconv.Itoa(p.Devices), held, p.Detail})
	}
	return rows
}

// whyNot tells of the models and endpoints that a table shows without a reason,
// but of none that the node's own problems name.
func whyNot(n nodeState) []string {
	var why []string
	for _, e := range n.Endpoints {
		if !e.Reachable && e.Detail != "" {
			why = append(why, fmt.Sprintf("%s: endpoint %s: %s", n.Node.Name, e.Name, e.Detail))
		}
	}
	for _, m := range n.Models {
		told := slices.ContainsFunc(n.Node.Problems, func(problem string) bool { return strings.Contains(problem, m.Ref) })
		if m.State == "Failed" && m.Detail != "" && !told {
			why = append(why, fmt.Sprintf("%s: model %s: %s", n.Node.Name, m.Ref, m.Detail))
		}
	}
	return why
}

func routerSections(r *routerState) []section {
	router := section{header: []string{"ROUTER", "INGRESS", "IN FLIGHT", "NODES", "ENDPOINTS", "MODELS"}}
	connected := 0
	for _, n := range r.Nodes {
		if n.Connected {
			connected++
		}
	}
	router.rows = append(router.rows, []string{
		r.Name, r.Listeners["ingress"], strconv.FormatInt(r.InFlight, 10), fmt.Sprintf("%d of %d", connected, len(r.Nodes)),
		ofTotal(r.Endpoints, r.Status.Endpoints), strconv.Itoa(r.Status.Models),
	})
	served := section{header: []string{"MODEL", "POOL", "SERVED AS", "WEIGHT", "READY", "ENDPOINTS"}}
	for _, m := range r.Models {
		for _, t := range m.Targets {
			serving := slices.DeleteFunc(slices.Clone(r.Endpoints), func(e routeradmin.Endpoint) bool {
				return e.Pool != t.Pool || len(e.Served) > 0 && !slices.Contains(e.Served, t.ServedModel)
			})
			served.rows = append(served.rows, []string{
				m.Name, t.Pool, t.ServedModel, strconv.Itoa(t.Weight), yesNo(t.Ready && slices.ContainsFunc(serving, usable)), ofTotal(serving, t.Endpoints),
			})
		}
	}
	stores := section{header: []string{"REPORTED BY", "KV", "BLOCKS", "HITS", "SAVED TOKENS", "MISSES", "DROPPED", "DAMAGED"}}
	for _, n := range r.Nodes {
		if kv := n.KV; kv != nil {
			number := func(n int64) string { return strconv.FormatInt(n, 10) }
			stores.rows = append(stores.rows, []string{
				n.Node, kvUsed(kv.RAM.Used, kv.RAM.Budget, kv.NVMe.Used, kv.NVMe.Budget), number(kv.Blocks), number(kv.RAM.Hits + kv.NVMe.Hits),
				number(kv.RAM.SavedTokens + kv.NVMe.SavedTokens), number(kv.Misses), number(kv.Dropped), number(kv.RAM.Damaged + kv.NVMe.Damaged),
			})
		}
	}
	lost := section{header: []string{"LOST NODE", "ADDRESS", "LAST REPORT", "CAUSE"}}
	for _, n := range r.Nodes {
		if n.Connected {
			continue
		}
		age := "never"
		if n.AgeSeconds >= 0 {
			age = time.Duration(n.AgeSeconds*float64(time.Second)).Round(time.Second).String() + " ago"
		}
		lost.rows = append(lost.rows, []string{n.Node, n.Address, age, n.LastError})
	}
	return []section{router, served, stores, lost}
}

// usable reports whether a router gives an endpoint requests while it can.
func usable(e routeradmin.Endpoint) bool {
	return e.Reachable && !e.Suspended && !e.Draining && e.Health != device.Unhealthy.String()
}

// ofTotal counts the usable endpoints of a list: "1 of 2".
func ofTotal(list []routeradmin.Endpoint, total int) string {
	count := 0
	for _, e := range list {
		if usable(e) {
			count++
		}
	}
	return fmt.Sprintf("%d of %d", count, max(total, len(list)))
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// endpointState is one word: an endpoint on an unhealthy device answers, and
// routers give it nothing while another can take it.
func endpointState(e admin.Endpoint, devices []admin.Device) string {
	sick := func(d admin.Device) bool {
		return d.Health == device.Unhealthy.String() && slices.Contains(e.Devices, d.ID)
	}
	switch {
	case !e.Reachable:
		return "unreachable"
	case e.Draining:
		return "draining"
	case slices.ContainsFunc(devices, sick):
		return "unhealthy"
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

// kvFill is what the KV store has: "1.0 GiB of 4.0 GiB + 10 GiB of 40 GiB nvme".
func kvFill(f *admin.KVFill) string {
	if f == nil {
		return ""
	}
	return kvUsed(f.MemoryUsed, f.MemoryBudget, f.NVMeUsed, f.NVMeBudget)
}

func kvUsed(memory, memoryBudget, nvme, nvmeBudget int64) string {
	var parts []string
	if memoryBudget > 0 {
		parts = append(parts, units.Bytes(memory).Human()+" of "+units.Bytes(memoryBudget).Human())
	}
	if nvmeBudget > 0 {
		parts = append(parts, units.Bytes(nvme).Human()+" of "+units.Bytes(nvmeBudget).Human()+" nvme")
	}
	return strings.Join(parts, " + ")
}

func space(s admin.Space) string {
	if s.Capacity == 0 {
		return ""
	}
	return units.Bytes(s.Used).Human() + " of " + units.Bytes(s.Capacity).Human()
}
