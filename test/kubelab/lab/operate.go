package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"time"

	"github.com/hearth-dev/hearth/test/kubelab/machine"
)

// Status is what a lab consists of, for a person or a program to read.
type Status struct {
	Name       string            `json:"name"`
	Created    time.Time         `json:"created"`
	Dir        string            `json:"dir"`
	Kubeconfig string            `json:"kubeconfig"`
	APIServer  string            `json:"apiServer"`
	Forwards   map[string]string `json:"forwards,omitempty"` // name to address
	Machines   []MachineStatus   `json:"machines"`           // the control plane, then the nodes
}

// MachineStatus is one machine of a lab.
type MachineStatus struct {
	Name      string           `json:"name"`
	On        bool             `json:"on"`
	Address   string           `json:"address"`
	PID       int              `json:"pid,omitempty"`
	BootID    string           `json:"bootID,omitempty"`
	Processes []machine.Status `json:"processes,omitempty"`
}

// Status asks every machine for its processes.
func (l *Lab) Status(ctx context.Context) (*Status, error) {
	s := &Status{Name: l.Name, Created: l.Created, Dir: l.dir, Kubeconfig: l.Kubeconfig(), APIServer: l.APIServer(), Forwards: map[string]string{}}
	for _, f := range l.Forwards {
		s.Forwards[f.Name] = l.Address(f.Name)
	}
	add := func(m MachineStatus, on *machine.Machine) error {
		if on != nil && on.Alive() {
			m.On, m.PID = true, on.PID
			var err error
			if m.Processes, err = on.Statuses(ctx); err != nil {
				return err
			}
		}
		s.Machines = append(s.Machines, m)
		return nil
	}
	if err := add(MachineStatus{Name: "control", Address: controlAddress}, l.Control); err != nil {
		return nil, err
	}
	for _, n := range l.Nodes() {
		if err := add(MachineStatus{Name: n.Name(), Address: n.Address(), BootID: n.BootID()}, n.state().Machine); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Enter gives a command that runs argv on "control" or a node by name.
func (l *Lab) Enter(ctx context.Context, machineName string, argv ...string) (*exec.Cmd, error) {
	if machineName == "control" {
		return l.Control.Enter(ctx, argv...), nil
	}
	n, err := l.NodeNamed(machineName)
	if err != nil {
		return nil, err
	}
	m, err := n.machine()
	if err != nil {
		return nil, err
	}
	return m.Enter(ctx, argv...), nil
}

// NodeNamed finds a node by its name in the cluster.
func (l *Lab) NodeNamed(name string) (*Node, error) {
	for _, n := range l.Nodes() {
		if n.Name() == name {
			return n, nil
		}
	}
	return nil, fmt.Errorf("find machine: the lab has no %q; there are control and node-0 and up", name)
}

// Forward lets a service answer on this system's loopback until ctx ends. ready
// is told the address.
func (l *Lab) Forward(ctx context.Context, f Forward, ready func(address string)) error {
	// The socket is of this system's network, the process that serves it in the
	// control plane's.
	file, port, err := openListener(ctx, f.Local)
	if err != nil {
		return err
	}
	defer file.Close()
	text, err := json.Marshal(f)
	if err != nil {
		return fmt.Errorf("forward service: %w", err)
	}
	cmd := l.Control.InNetwork(ctx, l.path("kubelab"), "forward-one", l.path("control"), string(text))
	cmd.ExtraFiles = []*os.File{file}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("forward service: %w", err)
	}
	ready(net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err := cmd.Wait(); err != nil && ctx.Err() == nil {
		return errors.Join(errors.New("forward service: the process ended"), err)
	}
	return nil
}
