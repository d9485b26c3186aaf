package lab

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"github.com/hearth-dev/hearth/test/kubelab/machine"
)

// Node is a node of a lab: a machine with a file system of its own, containerd,
// a kubelet and kube-proxy.
type Node struct {
	lab   *Lab
	index int
}

// Nodes gives the lab's nodes by index.
func (l *Lab) Nodes() []*Node {
	var nodes []*Node
	for i := range l.state.Nodes {
		nodes = append(nodes, &Node{l, i})
	}
	return nodes
}

// Node gives a node by index, from 0. It must be there.
func (l *Lab) Node(index int) *Node { return l.Nodes()[index] }

// AddNode adds a node and returns when it is Ready.
func (l *Lab) AddNode(ctx context.Context) (*Node, error) {
	if err := l.addNodes(ctx, 1); err != nil {
		return nil, err
	}
	return l.Node(len(l.state.Nodes) - 1), l.save()
}

// addNodes adds nodes, all at a time.
func (l *Lab) addNodes(ctx context.Context, count int) error {
	first := len(l.state.Nodes)
	if first+count > MaxNodes {
		return fmt.Errorf("add node: a lab has at most %d", MaxNodes)
	}
	for i := first; i < first+count; i++ {
		l.state.Nodes = append(l.state.Nodes, &nodeState{Name: fmt.Sprintf("node-%d", i)})
	}
	errs := make([]error, count)
	var all sync.WaitGroup
	for i := range count {
		all.Go(func() {
			n := &Node{l, first + i}
			if errs[i] = n.writeFiles(ctx); errs[i] == nil {
				errs[i] = n.boot(ctx)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

func (n *Node) state() *nodeState { return n.lab.state.Nodes[n.index] }

// Name is the node's name in the cluster: node-0, node-1.
func (n *Node) Name() string { return n.state().Name }

// Address is the node's address in the lab's network.
func (n *Node) Address() string { return nodeAddress(n.index) }

// BootID is what the node's pods and kubelet read as the boot id.
func (n *Node) BootID() string { return n.state().BootID }

// Root is the node's file system as it is mounted there, to be read and written
// from here: Root()+"/var/lib/hearth". It changes with each PowerOn.
func (n *Node) Root() string { return n.state().Machine.Root() }

// PodCgroup is the path, in each hierarchy, of the group that holds the node's pods.
func (n *Node) PodCgroup() string { return n.lab.groups.Path(pods(n.Name())) }

// PID is the node's init process; its namespaces are the node's. 0 while it is off.
func (n *Node) PID() int {
	if m := n.state().Machine; m != nil {
		return m.PID
	}
	return 0
}

func (n *Node) dir() string { return n.lab.path("nodes", n.Name()) }

// machine is the node's machine, or an error while the node is off.
func (n *Node) machine() (*machine.Machine, error) {
	m := n.state().Machine
	if m == nil || !m.Alive() {
		return nil, fmt.Errorf("reach %s: it is off", n.Name())
	}
	return m, nil
}

// PowerOn boots a node that is new or off, with a new boot id, and returns when
// it is Ready. What it had in /run and /dev and every process is gone; its drive
// is as it was left.
func (n *Node) PowerOn(ctx context.Context) error {
	if err := n.boot(ctx); err != nil {
		return err
	}
	return n.lab.save()
}

func (n *Node) boot(ctx context.Context) error {
	s := n.state()
	if s.Machine != nil && s.Machine.Alive() {
		return fmt.Errorf("power %s on: it is on", n.Name())
	}
	s.BootID = newBootID()
	if err := n.lab.groups.Make(pods(n.Name())); err != nil {
		return err
	}
	m, err := n.lab.createMachine(ctx, machine.Spec{
		Name: n.Name(), Dir: n.dir(), Path: hostPath, PrivateRoot: true, BootID: s.BootID,
		Cgroup: n.lab.groups.Unified(n.Name()),
		Binds: []machine.Bind{
			{From: n.lab.programs.Dir, To: "/opt/kubelab/bin"},
			{From: n.lab.path("kubelab"), To: "/opt/kubelab/kubelab"},
			{From: filepath.Join(n.dir(), "logs"), To: "/var/log/kubelab"},
		},
	}, nil)
	if err != nil {
		return err
	}
	s.Machine = m
	if err := plug(ctx, n.lab.Control, m, n.index); err != nil {
		return err
	}
	if err := n.Start(ctx, "containerd"); err != nil {
		return err
	}
	if err := n.waitContainerd(ctx); err != nil {
		return err
	}
	for _, image := range append([]string{n.lab.path("pause.tar")}, n.lab.Images...) {
		if err := n.LoadImage(ctx, image); err != nil {
			return err
		}
	}
	for _, process := range []string{"kubelet", "kube-proxy"} {
		if err := n.Start(ctx, process); err != nil {
			return err
		}
	}
	return n.WaitReady(ctx)
}

// PowerOff ends everything on the node at once, as a cut of its power would.
func (n *Node) PowerOff(ctx context.Context) error {
	if err := n.lab.groups.Kill(ctx, n.Name()); err != nil {
		return fmt.Errorf("power %s off: %w", n.Name(), err)
	}
	if err := n.lab.groups.Remove(ctx, n.Name()); err != nil {
		return fmt.Errorf("power %s off: %w", n.Name(), err)
	}
	n.state().Machine = nil
	return n.lab.save()
}

// Reboot is PowerOff and PowerOn.
func (n *Node) Reboot(ctx context.Context) error {
	if err := n.PowerOff(ctx); err != nil {
		return err
	}
	return n.PowerOn(ctx)
}

// WaitReady returns when the API server calls the node Ready in its present boot
// and its kubelet answers.
func (n *Node) WaitReady(ctx context.Context) error {
	err := wait(ctx, n.Name(), func(ctx context.Context) (string, error) {
		m, err := n.machine()
		if err != nil {
			return "", err
		}
		if err := n.lab.anyEnded(ctx, m, n.Name(), "containerd", "kubelet", "kube-proxy"); err != nil {
			return "", err
		}
		return n.lab.api.whyNotReady(ctx, n.Name(), n.BootID()), nil
	})
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("%w; %s", err, Tail(n.lab.Log(n.Name(), "kubelet"), 15))
	}
	return err
}

func (n *Node) waitContainerd(ctx context.Context) error {
	return wait(ctx, "containerd on "+n.Name(), func(ctx context.Context) (string, error) {
		m, err := n.machine()
		if err != nil {
			return "", err
		}
		if err := n.lab.anyEnded(ctx, m, n.Name(), "containerd"); err != nil {
			return "", err
		}
		_, err = m.Run(ctx, "/opt/kubelab/bin/ctr", "version")
		return reason(err), nil
	})
}

// Start starts containerd, kubelet or kube-proxy where it does not run. args
// follow its own, for this start only.
func (n *Node) Start(ctx context.Context, process string, args ...string) error {
	m, err := n.machine()
	if err != nil {
		return err
	}
	p := machine.Process{Name: process}
	const bin = "/opt/kubelab/bin/"
	switch process {
	case "containerd":
		p.Argv = []string{bin + "containerd", "--config=/etc/containerd/config.toml"}
	case "kubelet":
		p.Argv = []string{
			bin + "kubernetes", "kubelet", "--config=/etc/kubernetes/kubelet.json", "--kubeconfig=/etc/kubernetes/kubelet.kubeconfig",
			"--hostname-override=" + n.Name(), "--node-ip=" + n.Address(),
		}
	case "kube-proxy":
		p.Argv = []string{bin + "kubernetes", "kube-proxy", "--config=/etc/kubernetes/kube-proxy.json"}
	default:
		return fmt.Errorf("start process: a node has no %q", process)
	}
	p.Argv = slices.Concat(p.Argv, n.lab.Args[process], args)
	if err := m.Start(ctx, p); err != nil && !errors.Is(err, machine.ErrRunning) {
		return fmt.Errorf("start %s on %s: %w", process, n.Name(), err)
	}
	return nil
}

// Stop ends a process of the node with SIGTERM and returns when it is gone. The
// pods run on.
func (n *Node) Stop(ctx context.Context, process string) error {
	return n.end(ctx, process, syscall.SIGTERM)
}

// Kill is Stop with SIGKILL.
func (n *Node) Kill(ctx context.Context, process string) error {
	return n.end(ctx, process, syscall.SIGKILL)
}

func (n *Node) end(ctx context.Context, process string, signal syscall.Signal) error {
	m, err := n.machine()
	if err != nil {
		return err
	}
	return m.Stop(ctx, process, signal, stopWithin)
}

// Restart is Stop and Start.
func (n *Node) Restart(ctx context.Context, process string, args ...string) error {
	if err := n.Stop(ctx, process); err != nil {
		return err
	}
	return n.Start(ctx, process, args...)
}

// Run runs a command on the node, outside of pods, to its end. A status other
// than 0 is an error with the output in it.
func (n *Node) Run(ctx context.Context, argv ...string) (string, error) {
	m, err := n.machine()
	if err != nil {
		return "", err
	}
	return m.Run(ctx, argv...)
}

// LoadImage gives a node the images of an archive.
func (n *Node) LoadImage(ctx context.Context, archive string) error {
	m, err := n.machine()
	if err != nil {
		return err
	}
	file, err := os.Open(archive)
	if err != nil {
		return fmt.Errorf("load image: %w", err)
	}
	defer file.Close()
	cmd := m.Enter(ctx, "/opt/kubelab/bin/ctr", "--namespace=k8s.io", "images", "import", "-")
	cmd.Stdin = file
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("load image %s on %s: %w: %s", filepath.Base(archive), n.Name(), err, output)
	}
	return nil
}

// LoadImage gives every node that is on the images of an archive.
func (l *Lab) LoadImage(ctx context.Context, archive string) error {
	for _, n := range l.Nodes() {
		if n.PID() == 0 {
			continue
		}
		if err := n.LoadImage(ctx, archive); err != nil {
			return err
		}
	}
	return nil
}

func newBootID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // it never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// writeFiles writes what a node has in /etc.
func (n *Node) writeFiles(ctx context.Context) error {
	ca, err := readAuthority(n.lab.path("control", "pki"))
	if err != nil {
		return err
	}
	files, err := n.configuration(ctx)
	if err != nil {
		return err
	}
	for name, who := range map[string]struct {
		user   string
		groups []string
	}{
		"kubelet":    {"system:node:" + n.Name(), []string{"system:nodes"}},
		"kube-proxy": {"system:kube-proxy", nil},
	} {
		id, err := ca.sign(who.user, who.groups, []string{n.Name()}, []net.IP{net.ParseIP(n.Address())})
		if err != nil {
			return err
		}
		if files["kubernetes/"+name+".kubeconfig"], err = ca.kubeconfig("kubelab", apiURL(), who.user, id); err != nil {
			return err
		}
	}
	files["kubernetes/ca.crt"] = ca.pem
	return writeFiles(filepath.Join(n.dir(), "root", "etc"), files)
}
