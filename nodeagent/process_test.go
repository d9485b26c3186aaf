package nodeagent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/nodeagent/local"
)

// The test binary stands in for an agent where these are set: a configuration
// file and the role to run.
const (
	envConfig = "HEARTH_TEST_AGENT_CONFIG"
	envRole   = "HEARTH_TEST_AGENT_ROLE"
)

func TestMain(m *testing.M) {
	if file := os.Getenv(envConfig); file != "" {
		if err := serveRole(file, os.Getenv(envRole)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// serveRole runs an agent until it is told to stop.
func serveRole(file, role string) error {
	config := nodeagent.Default()
	if err := configfile.Load(file, nodeagent.Kind, &config); err != nil {
		return err
	}
	config.Roles = []string{role}
	config.Network.Enabled = false
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	agent, err := nodeagent.New(config, nodeagent.Options{Version: "test", BootID: "boot", Log: log})
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return agent.Run(ctx)
}

// process is one role in a process of its own.
type process struct {
	t    *testing.T
	cmd  *exec.Cmd
	done chan error

	mu  sync.Mutex
	log bytes.Buffer
}

// Write keeps what the process says.
func (p *process) Write(data []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.Write(data)
}

// fabric is one node whose roles run apart.
type fabric struct {
	t       *testing.T
	config  nodeagent.Config
	control *admin.Client
	data    *admin.Client
	remote  *local.Remote // as the control role has it
}

// newFabric gives a configuration with free ports and short paths to change.
func newFabric(t *testing.T, c nodeagent.Config) *fabric {
	t.Helper()
	dir := filepath.Dir(c.Listen.Socket)
	c.Listen.DataSocket, c.Listen.DataAdmin = filepath.Join(dir, "d.sock"), "127.0.0.1:0"
	c.KV.Dir = filepath.Join(dir, "kv")
	f := &fabric{t: t, config: c, remote: local.NewRemote(local.DialOptions{Socket: c.Listen.DataSocket})}
	var err error
	if f.control, err = admin.NewClient(c.Listen.Socket); err != nil {
		t.Fatal(err)
	}
	if f.data, err = admin.NewClient(c.Listen.DataSocket); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- f.remote.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		f.control.Close()
		f.data.Close()
	})
	return f
}

// start runs a role and waits until it answers.
func (f *fabric) start(role string) *process {
	f.t.Helper()
	text, err := configfile.Marshal(f.config)
	if err != nil {
		f.t.Fatal(err)
	}
	file := filepath.Join(f.t.TempDir(), "agent.yaml")
	head := "apiVersion: " + configfile.APIVersion + "\nkind: " + nodeagent.Kind + "\n"
	if err := os.WriteFile(file, append([]byte(head), text...), 0o600); err != nil {
		f.t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		f.t.Fatal(err)
	}
	// The test's context ends before its cleanups, which tell the process to stop.
	p := &process{t: f.t, cmd: exec.CommandContext(context.WithoutCancel(f.t.Context()), self), done: make(chan error, 1)}
	p.cmd.Env = append(os.Environ(), envConfig+"="+file, envRole+"="+role)
	p.cmd.Stdout, p.cmd.Stderr = p, p
	if err := p.cmd.Start(); err != nil {
		f.t.Fatal(err)
	}
	cmd := p.cmd
	go func() { p.done <- cmd.Wait() }()
	f.t.Cleanup(func() { p.end(syscall.SIGTERM) })
	client := f.control
	if role == nodeagent.RoleData {
		client = f.data
	}
	f.until(role+" to answer", func() bool {
		node, err := client.Node(f.t.Context())
		return err == nil && len(node.Roles) == 1 && node.Roles[0] == role
	})
	return p
}

// end sends a signal and waits for the process to be gone.
func (p *process) end(signal os.Signal) {
	p.t.Helper()
	if p.cmd == nil {
		return
	}
	cmd := p.cmd
	p.cmd = nil
	_ = cmd.Process.Signal(signal)
	limit := time.NewTimer(waitLimit)
	defer limit.Stop()
	select {
	case err := <-p.done:
		if signal == syscall.SIGTERM && err != nil {
			p.t.Errorf("a role told to stop ended with %v", err)
		}
	case <-limit.C:
		_ = cmd.Process.Kill()
		p.t.Error("a role told to stop did not")
	}
	if p.t.Failed() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.t.Log(p.log.String())
	}
}

// kill is kill -9.
func (p *process) kill() {
	p.t.Helper()
	p.end(syscall.SIGKILL)
}

// until waits for what comes by itself.
func (f *fabric) until(what string, holds func() bool) {
	f.t.Helper()
	deadline := time.NewTimer(waitLimit)
	defer deadline.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline.C:
			f.t.Fatalf("waited in vain for %s", what)
		}
	}
}

// problems are those that the control role tells.
func (f *fabric) problems() string {
	f.t.Helper()
	node, err := f.control.Node(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	return strings.Join(node.Problems, "\n")
}

// codeOf is the code of an error of the local API.
func codeOf(err error) string {
	if refusal, ok := errors.AsType[*admin.Error](err); ok {
		return refusal.Code
	}
	return ""
}
