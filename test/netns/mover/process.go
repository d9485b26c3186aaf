package mover

import (
	"errors"
	"io"
	"net/rpc"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/test/netns"
)

// variable tells the test's own program that it is a mover.
const variable = "HEARTH_TEST_MOVER"

// Serve does, in a process that Start made, what it is asked until it is to end,
// and then reports true: TestMain ends. In any other it reports false at once.
// The test's own services are asked by their types' names.
func Serve(services ...any) bool {
	if os.Getenv(variable) == "" {
		return false
	}
	server := rpc.NewServer()
	for _, service := range append([]any{NewEnd()}, services...) {
		if err := server.Register(service); err != nil {
			panic(err)
		}
	}
	server.ServeConn(struct {
		io.Reader
		io.WriteCloser
	}{os.Stdin, os.Stdout})
	return true
}

// Process is an End in a process of its own.
type Process struct {
	t      testing.TB
	cmd    *exec.Cmd
	client *rpc.Client
}

// Start runs the test's program, whose TestMain calls Serve, in a network
// namespace and a cgroup. It ends with the test.
func Start(t testing.TB, n *netns.Namespace, in netns.Cgroup) *Process {
	t.Helper()
	return StartIn(t, n, in, 0)
}

// StartIn does so with further namespaces of its own, as CLONE_NEWPID.
func StartIn(t testing.TB, n *netns.Namespace, in netns.Cgroup, namespaces uintptr) *Process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	group, err := os.Open(in.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = group.Close() }()
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), variable+"=1", "GOMAXPROCS=2")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd()), Cloneflags: namespaces}
	to, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	from, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Do(cmd.Start); err != nil {
		t.Fatalf("start process: %v", err)
	}
	p := &Process{t: t, cmd: cmd, client: rpc.NewClient(struct {
		io.Reader
		io.WriteCloser
	}{from, to})}
	t.Cleanup(p.Kill)
	return p
}

// ID is its process id.
func (p *Process) ID() int { return p.cmd.Process.Pid }

// Kill ends it by SIGKILL and waits for that. Again does nothing.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	_ = p.client.Close()
}

// Try calls a service of the process by TYPE.METHOD.
func (p *Process) Try(method string, args, reply any) error {
	if err := p.client.Call(method, args, reply); err != nil {
		return errors.New(method + ": " + err.Error())
	}
	return nil
}

// Do does so, and ends the test where it fails.
func (p *Process) Do(method string, args, reply any) {
	p.t.Helper()
	if err := p.Try(method, args, reply); err != nil {
		p.t.Fatal(err)
	}
}

// Listen is End.Listen.
func (p *Process) Listen(of Socket) string {
	p.t.Helper()
	var address string
	p.Do("End.Listen", of, &address)
	return address
}

// Dial is End.Dial.
func (p *Process) Dial(of Socket) {
	p.t.Helper()
	p.Do("End.Dial", of, new(Nothing))
}

// Exchange is End.Exchange.
func (p *Process) Exchange(r Request) {
	p.t.Helper()
	p.Do("End.Exchange", r, new(Nothing))
}

// Stream is End.Stream.
func (p *Process) Stream(r Request) {
	p.t.Helper()
	p.Do("End.Stream", r, new(Nothing))
}

// Quiet is End.Quiet.
func (p *Process) Quiet() {
	p.t.Helper()
	p.Do("End.Quiet", Nothing(0), new(Nothing))
}

// Churn is End.Churn.
func (p *Process) Churn(c Churn) {
	p.t.Helper()
	p.Do("End.Churn", c, new(Nothing))
}

// Hangup is End.Hangup.
func (p *Process) Hangup(reset bool) {
	p.t.Helper()
	p.Do("End.Hangup", reset, new(Nothing))
}

// Ended is End.Ended.
func (p *Process) Ended(want int) {
	p.t.Helper()
	p.Do("End.Ended", want, new(Nothing))
}

// Totals is End.Totals.
func (p *Process) Totals() Counts {
	p.t.Helper()
	var totals Counts
	p.Do("End.Totals", Nothing(0), &totals)
	return totals
}
