// Package victim starts the real agent as a process on a real directory, stops
// it in every way an operating system can, and looks at it from outside: its
// socket, its memory, its files. The torture driver and the tests on real file
// systems call it. It judges nothing, and ends only what it started.
package victim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/units"
)

// Options describe an agent.
type Options struct {
	// Dir holds configuration, socket and log.
	Dir string
	// Weights and Views are the store's directories.
	Weights, Views string
	// Origin is the base URL of the hub it pulls from.
	Origin string
	// Program and Args are the agent's command line before --config; Env is
	// added to its small clean environment.
	Program string
	Args    []string
	Env     []string
	// Set changes the configuration, nil for nothing.
	Set func(*nodeagent.Config)
}

// Agent is one agent, running or not.
type Agent struct {
	*rig.Process
	Client *admin.Client
	Mirror string // http://127.0.0.1:port
	// Socket is the path of the local socket.
	Socket string
	rig    *rig.Rig
	ready  string
	start  rig.Command
}

// New writes an agent's configuration. It starts nothing.
func New(ctx context.Context, r *rig.Rig, o Options) (*Agent, error) {
	var addrs [3]string
	for i := range addrs {
		var err error
		if addrs[i], err = rig.FreeAddr(ctx); err != nil {
			return nil, err
		}
	}
	c := nodeagent.Default()
	c.Node = "victim"
	c.Listen = nodeagent.Listen{Mirror: addrs[0], Report: addrs[1], Admin: addrs[2], Socket: filepath.Join(o.Dir, "agent.sock")}
	c.Weights.Dir, c.Weights.ViewsDir = o.Weights, o.Views
	c.Weights.KeepFree = 0
	c.Weights.SegmentSize, c.Weights.Streams = SegmentSize, Streams
	c.Weights.StallTimeout = units.Duration(time.Second)
	c.Health.StateDir = filepath.Join(o.Dir, "health")
	c.Sources = []nodeagent.Source{{Name: "origin", Type: nodeagent.SourceHub, URL: o.Origin, Refs: []string{"*/*"}}}
	if o.Set != nil {
		o.Set(&c)
	}
	text, err := configfile.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("write configuration: %w", err)
	}
	path := filepath.Join(o.Dir, "agent.yaml")
	text = append(fmt.Appendf(nil, "apiVersion: %s\nkind: %s\n", configfile.APIVersion, nodeagent.Kind), text...)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		return nil, fmt.Errorf("write configuration: %w", err)
	}
	client, err := admin.NewClient(c.Listen.Socket)
	if err != nil {
		return nil, err
	}
	r.OnClose(client.Close)
	return &Agent{
		Client: client, Mirror: "http://" + addrs[0], Socket: c.Listen.Socket, rig: r, ready: "http://" + addrs[2] + "/readyz",
		start: rig.Command{Name: "agent", Path: o.Program, Args: append(o.Args, "--config", path), Env: o.Env},
	}, nil
}

const (
	// stopLimit is what an agent may take to end after SIGTERM: the 10 s of its
	// own promise, past which it leaves whatever does not end and says so in its
	// status, and as much again for a machine that is busy with other things.
	stopLimit = 20 * time.Second
	dumpLimit = 30 * time.Second
)

// How a victim pulls: in small pieces, so that pulls are met in the middle.
const (
	SegmentSize = 256 * units.KiB
	Streams     = 4
)

// Launch starts the process and does not wait for it.
func (a *Agent) Launch() error {
	a.Client.Close() // connections to the process before
	p, err := a.rig.Start(a.start)
	if err != nil {
		return err
	}
	a.Process = p
	return nil
}

// Ready waits until a launched agent answers and tells how long that took.
func (a *Agent) Ready(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	err := rig.Until(ctx, "the agent to answer", func(ctx context.Context) (bool, error) {
		return rig.Answers(ctx, a.ready)
	}, a.Process)
	return time.Since(began), err
}

// ErrSlowStop says that an agent did not end in time after SIGTERM.
var ErrSlowStop = errors.New("the agent did not end in time after SIGTERM")

// Terminate sends SIGTERM and waits for the end. Errors wrap ErrSlowStop, or
// tell a status other than 0; what a slow one still does is in its log.
func (a *Agent) Terminate() error {
	a.Signal(syscall.SIGTERM)
	timer := time.NewTimer(stopLimit)
	defer timer.Stop()
	select {
	case <-a.Done():
	case <-timer.C:
		a.Dump()
		return fmt.Errorf("stop agent: %w: %v", ErrSlowStop, stopLimit)
	}
	if err := a.Err(); err != nil {
		return fmt.Errorf("stop agent: %w", err)
	}
	return nil
}

// Dump ends an agent that runs and has it write what each of its goroutines
// does to its log.
func (a *Agent) Dump() {
	if a.Process == nil {
		return
	}
	a.Signal(syscall.SIGCONT) // it may be stopped
	a.Signal(syscall.SIGQUIT)
	timer := time.NewTimer(dumpLimit)
	defer timer.Stop()
	select {
	case <-a.Done():
	case <-timer.C:
		a.Kill()
	}
}

// PeakMemory is the most resident memory so far, in bytes.
func (a *Agent) PeakMemory() (int64, error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(a.PID()), "status"))
	if err != nil {
		return 0, fmt.Errorf("read memory of agent: %w", err)
	}
	for line := range bytes.Lines(text) {
		if rest, found := bytes.CutPrefix(line, []byte("VmHWM:")); found {
			kib, err := strconv.ParseInt(string(bytes.TrimSpace(bytes.TrimSuffix(bytes.TrimSpace(rest), []byte("kB")))), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("read memory of agent: %w", err)
			}
			return kib << 10, nil
		}
	}
	return 0, errors.New("read memory of agent: no VmHWM line")
}

// OpenFiles is the number of its open file descriptors.
func (a *Agent) OpenFiles() (int, error) {
	list, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(a.PID()), "fd"))
	if err != nil {
		return 0, fmt.Errorf("count open files of agent: %w", err)
	}
	return len(list), nil
}
