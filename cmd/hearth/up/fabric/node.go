package fabric

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/admin"
)

// portsPerNode are the admin listener, the mirror and the report.
const portsPerNode = 3

// startLimit bounds the time an agent or router may take to get ready.
const startLimit = time.Minute

// Ready is the admin.Model.State of an artifact that engines may read.
const Ready = "Ready"

// Node is one agent process and where it answers.
type Node struct {
	*Process
	Name   string
	Socket string // path of the local socket
	Admin  string // http://127.0.0.1:port
	Mirror string // http://127.0.0.1:port
	Report string // 127.0.0.1:port
	// client speaks to the socket, which alone takes changing calls.
	client  *admin.Client
	dir     string
	engines []*Engine
	// inventory is the file that the agent reads its GPUs from, and gpus are
	// their ids; empty without Options.GPUs.
	inventory string
	gpus      []string
}

func (f *Fabric) newNode(i int, ports []int) (*Node, error) {
	local := func(n int) string { return "127.0.0.1:" + strconv.Itoa(ports[n]) }
	name := "node-" + strconv.Itoa(i+1)
	n := &Node{
		Name: name, dir: filepath.Join(f.opts.Dir, name),
		Admin: "http://" + local(0), Mirror: "http://" + local(1), Report: local(2),
	}
	if err := os.MkdirAll(n.dir, 0o700); err != nil {
		return nil, fmt.Errorf("lay out %s: %w", name, err)
	}
	// A socket's path is limited to 107 bytes.
	n.Socket = filepath.Join(n.dir, "a.sock")
	if len(n.Socket) > 107 {
		return nil, fmt.Errorf("lay out %s: the socket path %s is longer than the 107 bytes the kernel takes: want a shorter --dir", name, n.Socket)
	}
	var err error
	if n.client, err = admin.NewClient(n.Socket); err != nil {
		return nil, fmt.Errorf("lay out %s: %w", name, err)
	}
	config := filepath.Join(f.opts.Dir, name+".yaml")
	n.Process = newProcess(f.opts.Dir, name, nil, f.opts.Program, "agent", "--config", config, "--node", name)
	return n, nil
}

// StartNode starts an agent and waits until it is ready.
func (f *Fabric) StartNode(ctx context.Context, n *Node) error {
	if err := n.Start(); err != nil {
		return err
	}
	return n.await(ctx, startLimit, func(ctx context.Context) error {
		return call(ctx, http.MethodGet, n.Admin+"/readyz")
	})
}

// NodeOf is the node on which an engine runs.
func (f *Fabric) NodeOf(e *Engine) *Node { return f.node(e.Node) }

// Pull makes an artifact ready on the node. progress, if not nil, is called
// with each state on the way.
func (n *Node) Pull(ctx context.Context, ref string, progress func(admin.Model)) error {
	model, err := n.client.Pull(ctx, admin.PullRequest{Ref: ref}, func(p admin.Progress) {
		if p.Model != nil && progress != nil {
			progress(*p.Model)
		}
	})
	if err != nil {
		return fmt.Errorf("pull %s on %s: %w", ref, n.Name, err)
	}
	if model.State != Ready {
		return fmt.Errorf("pull %s on %s: it ended in state %s: %s", ref, n.Name, model.State, model.Detail)
	}
	return nil
}

// Artifact tells the state of an artifact on the node.
func (n *Node) Artifact(ctx context.Context, ref string) (admin.Model, error) {
	m, err := n.client.Model(ctx, ref)
	if err != nil {
		return m, fmt.Errorf("read state of %s on %s: %w", ref, n.Name, err)
	}
	return m, nil
}

// View is a directory in which an engine finds a model.
type View struct {
	Dir    string
	Digest string // of the artifact, as 64 hex digits
}

// View finds the flat view of an artifact on the node.
func (n *Node) View(ctx context.Context, ref string) (View, error) {
	m, err := n.Artifact(ctx, ref)
	if err != nil {
		return View{}, err
	}
	if m.State != Ready {
		return View{}, fmt.Errorf("find files of %s on %s: it is %s: %s", ref, n.Name, m.State, m.Detail)
	}
	for _, dir := range m.Views {
		if flat(dir, m.FileList) {
			return View{Dir: dir, Digest: m.Digest}, nil
		}
	}
	return View{}, fmt.Errorf("find files of %s on %s: none of %q holds them", ref, n.Name, m.Views)
}

// flat reports whether every file stands in dir under its path.
func flat(dir string, files []admin.File) bool {
	for _, file := range files {
		if _, err := os.Stat(filepath.Join(dir, filepath.FromSlash(file.Path))); err != nil {
			return false
		}
	}
	return len(files) > 0
}

// Verify reads every byte of an artifact again and gives the damaged files.
func (n *Node) Verify(ctx context.Context, ref string) ([]string, error) {
	result, err := n.client.Verify(ctx, ref)
	if err != nil {
		return nil, fmt.Errorf("verify %s on %s: %w", ref, n.Name, err)
	}
	return result.Bad, nil
}

// InjectXID makes a device of the node report an XID.
func (n *Node) InjectXID(ctx context.Context, device string, xid int) error {
	if _, err := n.client.Inject(ctx, admin.InjectRequest{Device: device, XID: xid}); err != nil {
		return fmt.Errorf("inject xid %d on %s of %s: %w", xid, device, n.Name, err)
	}
	return nil
}

// ClearDevice clears the conditions of a device of the node.
func (n *Node) ClearDevice(ctx context.Context, device string) error {
	if _, err := n.client.Inject(ctx, admin.InjectRequest{Device: device, Clear: true}); err != nil {
		return fmt.Errorf("clear %s of %s: %w", device, n.Name, err)
	}
	return nil
}

// unreachable lists the node's engines that its agent cannot reach.
func (n *Node) unreachable(ctx context.Context) error {
	list, err := n.client.Endpoints(ctx)
	if err != nil {
		return fmt.Errorf("list endpoints of %s: %w", n.Name, err)
	}
	var bad []error
	for _, e := range list {
		if !e.Reachable {
			bad = append(bad, fmt.Errorf("%s of %s does not answer: %s", e.Name, n.Name, e.Detail))
		}
	}
	return errors.Join(bad...)
}
