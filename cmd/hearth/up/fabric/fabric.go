// Package fabric runs a whole Hearth fabric on one machine: a hub origin, the
// agents of several nodes, engines and the router. Agents, engines and router
// are processes of their own, made by running this program again; the origin
// lives in this process, so that its counters are at hand. `hearth up` and its
// check call it. It decides nothing that an agent or the router decides; what
// it knows of them it reads from their admin interfaces and the engines' own
// counters.
package fabric

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/cmd/hearth/upstate"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
)

// Limits of Options.
const (
	MaxNodes   = 16
	MaxEngines = 64
)

// Options describes a fabric.
type Options struct {
	// Program is this program, to be run again. Required.
	Program string
	// Dir is the work directory; it must exist. Required.
	Dir string
	// Nodes is the number of nodes, Engines the number of engines, dealt out to
	// the nodes in turn, one simulated GPU for each.
	Nodes, Engines int
	// Repos maps "org/name" to a directory that the origin serves as that
	// repository.
	Repos map[string]string
	// Origin, when set, is another hub that the agents pull from; Repos is then
	// not served.
	Origin string
	// Ref is the artifact that the engines serve: hub://org/name or dir:///path.
	Ref string
	// Served is the name that clients ask for.
	Served string
	// Engine is the command of an engine, with {model_dir} and {port} in it;
	// empty runs the simulated one with EngineArgs added.
	Engine     string
	EngineKind string // kind the agents are told: sim, vllm, sglang, llama-server
	EngineArgs []string
	// EngineLimit bounds the time an engine may take to get ready. Default 60s
	// for the simulated one, 10m for others.
	EngineLimit time.Duration
	// GPUs are the simulated GPUs of each node: a product and a count such as
	// "h100x8", or the path of a file of kind SimInventory. Empty gives each
	// engine one without properties.
	GPUs string
	// SegmentSize and Streams configure the agents' pulls; 0 is the agent's default.
	SegmentSize units.Bytes
	Streams     int
}

// Validate names the first option that makes no sense.
func (o Options) Validate() error {
	switch {
	case o.Nodes < 1 || o.Nodes > MaxNodes:
		return fmt.Errorf("check fabric: %d nodes: want 1 to %d", o.Nodes, MaxNodes)
	case o.Engines < 1 || o.Engines > MaxEngines:
		return fmt.Errorf("check fabric: %d engines: want 1 to %d", o.Engines, MaxEngines)
	case o.Engine != "" && !strings.Contains(o.Engine, "{port}"):
		return errors.New("check fabric: the engine command has no {port}: want one such as 'vllm serve {model_dir} --port {port}'")
	case o.Served == "":
		return errors.New("check fabric: the served model has no name")
	}
	return nil
}

// Fabric is a set of processes. Its methods are called by one goroutine.
type Fabric struct {
	opts    Options
	Origin  *hub.Origin // nil where Options.Origin names another
	Nodes   []*Node
	Engines []*Engine
	Router  *Router
	// OtherRouters are further routers over the same nodes.
	OtherRouters []*Router
	server       *http.Server
	certs        *certificates
}

// New lays the work directory out, starts the origin and writes certificates
// and configurations. Nothing else runs yet. Close ends what it started.
func New(ctx context.Context, opts Options) (*Fabric, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	f := &Fabric{opts: opts}
	origin := opts.Origin
	if origin == "" {
		var err error
		if origin, err = f.serveOrigin(ctx); err != nil {
			return nil, err
		}
	}
	if err := f.layOut(ctx, origin); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// serveOrigin puts the repositories below one root and serves them.
func (f *Fabric) serveOrigin(ctx context.Context) (string, error) {
	root := filepath.Join(f.opts.Dir, "origin")
	for repo, dir := range f.opts.Repos {
		if err := placeRepo(dir, filepath.Join(root, filepath.FromSlash(repo))); err != nil {
			return "", fmt.Errorf("lay out origin: %w", err)
		}
	}
	f.Origin = hub.New(hub.Options{Dir: root})
	listener, err := identity.ListenTCP(ctx, "127.0.0.1:0", 0)
	if err != nil {
		return "", fmt.Errorf("listen for origin: %w", err)
	}
	f.server = &http.Server{Handler: f.Origin, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = f.server.Serve(listener) }() // ends with Close
	return "http://" + listener.Addr().String(), nil
}

// layOut makes nodes, engines and the router with their files.
func (f *Fabric) layOut(ctx context.Context, origin string) error {
	ports, err := freePorts(ctx, portsPerNode*f.opts.Nodes+f.opts.Engines+portsPerRouter)
	if err != nil {
		return err
	}
	take := func(n int) []int { p := ports[:n]; ports = ports[n:]; return p }
	if f.certs, err = newCertificates(filepath.Join(f.opts.Dir, "certs")); err != nil {
		return err
	}
	for i := range f.opts.Nodes {
		node, err := f.newNode(i, take(portsPerNode))
		if err != nil {
			return err
		}
		f.Nodes = append(f.Nodes, node)
	}
	for _, node := range f.Nodes {
		if err := f.equip(node); err != nil {
			return err
		}
	}
	for i := range f.opts.Engines {
		node := f.Nodes[i%f.opts.Nodes]
		e := &Engine{Node: node.Name, Device: node.device(len(node.engines)), port: take(1)[0]}
		e.URL = "http://127.0.0.1:" + strconv.Itoa(e.port)
		e.Process = newProcess(f.opts.Dir, "engine-"+strconv.Itoa(i), nil)
		node.engines = append(node.engines, e)
		f.Engines = append(f.Engines, e)
	}
	for _, node := range f.Nodes {
		if err := f.configureNode(node, origin); err != nil {
			return err
		}
	}
	f.Router, err = f.newRouter("router", "", take(portsPerRouter))
	return err
}

// all lists every process, in the order in which they are stopped.
func (f *Fabric) all() []*Process {
	var list []*Process
	for _, r := range slices.Concat(f.OtherRouters, []*Router{f.Router}) {
		if r != nil {
			list = append(list, r.Process)
		}
	}
	for _, e := range f.Engines {
		list = append(list, e.Process)
	}
	for _, n := range f.Nodes {
		list = append(list, n.Process)
	}
	return list
}

// Close stops everything, routers first, and waits until it is gone.
func (f *Fabric) Close() error {
	for _, p := range f.all() {
		if p.current() != nil {
			p.Stop()
		}
	}
	if f.server == nil {
		return nil
	}
	if err := f.server.Close(); err != nil {
		return fmt.Errorf("stop origin: %w", err)
	}
	return nil
}

// Watch returns once a process ends that nobody told to, with its last words,
// or when ctx ends.
func (f *Fabric) Watch(ctx context.Context) error {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		for _, p := range f.all() {
			if err := p.failure(); err != nil {
				return err
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// WriteTails writes the last n lines of every log.
func (f *Fabric) WriteTails(w io.Writer, n int) {
	for _, p := range f.all() {
		for _, line := range p.Tail(n) {
			fmt.Fprintf(w, "%s: %s\n", p.Name, line)
		}
	}
}

// State is what other commands need to find the fabric.
func (f *Fabric) State() upstate.State {
	s := upstate.State{PID: os.Getpid(), StartedAt: time.Now(), Router: f.Router.URL, RouterAdmin: f.Router.Admin}
	for _, n := range f.Nodes {
		s.Agents = append(s.Agents, upstate.Agent{Node: n.Name, Socket: n.Socket, Admin: n.Admin})
	}
	return s
}

// StartEngine starts an engine on the files that its node's agent publishes,
// and waits until it answers.
func (f *Fabric) StartEngine(ctx context.Context, e *Engine) error {
	node := f.node(e.Node)
	view, err := node.View(ctx, f.opts.Ref)
	if err != nil {
		return err
	}
	e.argv = f.engineCommand(e, view)
	limit := f.opts.EngineLimit
	if limit == 0 {
		limit = 10 * time.Minute
		if f.opts.Engine == "" {
			limit = time.Minute
		}
	}
	if err := e.Start(); err != nil {
		return err
	}
	return e.await(ctx, limit, e.answers)
}

// engineCommand is the command line of an engine. A user's command is run by a
// shell that it replaces, so that it is the process that is stopped.
func (f *Fabric) engineCommand(e *Engine, v View) []string {
	port := strconv.Itoa(e.port)
	if f.opts.Engine != "" {
		line := strings.NewReplacer("{model_dir}", quoteShell(v.Dir), "{port}", port).Replace(f.opts.Engine)
		return []string{"/bin/sh", "-c", "exec " + line}
	}
	argv := []string{
		f.opts.Program, "engine-sim", "--model", v.Dir, "--expect-digest", v.Digest, "--port", port,
		"--served-model", f.opts.Served,
	}
	return append(argv, f.opts.EngineArgs...)
}

func quoteShell(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

func (f *Fabric) node(name string) *Node {
	for _, n := range f.Nodes {
		if n.Name == name {
			return n
		}
	}
	return f.Nodes[0]
}
