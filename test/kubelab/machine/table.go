package machine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// maxOutput is how many bytes of a command's output are kept.
const maxOutput = 1 << 20

// table holds the processes that this init started, and reaps every process
// that ends as its child. os/exec waits for its own children, which an init
// that has to wait for all cannot allow, so processes are forked directly.
type table struct {
	path      string
	logs      *os.Root
	inherited map[string]uintptr

	mu     sync.Mutex
	byPID  map[int]*process
	byName map[string]*process
}

type process struct {
	Status
	ended chan struct{} // closed once Running is false
	wait  syscall.WaitStatus
}

func newTable(path string) *table {
	return &table{path: path, inherited: map[string]uintptr{}, byPID: map[int]*process{}, byName: map[string]*process{}}
}

// reap collects what ends, until ctx does.
func (t *table) reap(ctx context.Context) {
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	defer signal.Stop(children)
	for {
		for t.reapOne() {
		}
		select {
		case <-children:
		case <-ctx.Done():
			return
		}
	}
}

func (t *table) reapOne() bool {
	// The lock keeps a process that ends at once from being reaped before fork
	// has entered it.
	t.mu.Lock()
	defer t.mu.Unlock()
	var wait syscall.WaitStatus
	pid, err := syscall.Wait4(-1, &wait, syscall.WNOHANG, nil)
	if errors.Is(err, syscall.EINTR) {
		return true
	}
	if err != nil || pid <= 0 {
		return false
	}
	if p := t.byPID[pid]; p != nil {
		delete(t.byPID, pid)
		p.wait = wait
		p.Running = false
		p.Ended = fmt.Sprintf("exit status %d", wait.ExitStatus())
		if wait.Signaled() {
			p.Ended = "signal: " + wait.Signal().String()
		}
		close(p.ended)
	}
	return true
}

// fork starts a process on the given descriptors; a name enters it by that.
func (t *table) fork(p Process, files []uintptr) (*process, error) {
	if len(p.Argv) == 0 {
		return nil, errors.New("start process: no program is named")
	}
	for _, name := range p.Inherit {
		fd, ok := t.inherited[name]
		if !ok {
			return nil, fmt.Errorf("start process: no listener is called %q", name)
		}
		files = append(files, fd)
	}
	program := p.Argv[0]
	if !filepath.IsAbs(program) {
		found, err := exec.LookPath(program)
		if err != nil {
			return nil, fmt.Errorf("start process: %w", err)
		}
		program = found
	}
	env := append([]string{"PATH=" + t.path, "LANG=C"}, p.Env...)

	t.mu.Lock()
	defer t.mu.Unlock()
	if old := t.byName[p.Name]; p.Name != "" && old != nil && old.Running {
		return nil, ErrRunning
	}
	pid, err := syscall.ForkExec(program, p.Argv, &syscall.ProcAttr{
		Dir: "/", Env: env, Files: files, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	started := &process{
		Status: Status{Name: p.Name, Argv: p.Argv, PID: pid, Running: true, Started: time.Now()},
		ended:  make(chan struct{}),
	}
	t.byPID[pid] = started
	if p.Name != "" {
		t.byName[p.Name] = started
	}
	return started, nil
}

// start starts a process that stays, with its output in its log.
func (t *table) start(p Process) error {
	if p.Name == "" {
		return errors.New("start process: it has no name")
	}
	log, err := t.logs.OpenFile(p.Name+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("open log of %s: %w", p.Name, err)
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	defer null.Close()
	_, err = t.fork(p, []uintptr{null.Fd(), log.Fd(), log.Fd()})
	return err
}

// run runs a command until it has ended and closed its output, or ctx ends,
// which kills it.
func (t *table) run(ctx context.Context, p Process, input string) (*Result, error) {
	in, feed, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("run command: %w", err)
	}
	defer in.Close()
	defer feed.Close()
	read, out, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("run command: %w", err)
	}
	defer read.Close()
	defer out.Close()
	p.Name = ""
	started, err := t.fork(p, []uintptr{in.Fd(), out.Fd(), out.Fd()})
	if err != nil {
		return nil, err
	}
	in.Close()
	out.Close()
	go func() {
		defer feed.Close()
		_, _ = io.WriteString(feed, input) // a command need not read it all
	}()
	output := make(chan string, 1)
	go func() {
		var kept strings.Builder
		_, _ = io.CopyN(&kept, read, maxOutput)
		_, _ = io.Copy(io.Discard, read)
		output <- kept.String()
	}()
	select {
	case <-started.ended:
	case <-ctx.Done():
		t.signal(started, syscall.SIGKILL)
		return nil, fmt.Errorf("run %s: %w", p.Argv[0], context.Cause(ctx))
	}
	result := &Result{Code: started.wait.ExitStatus()}
	if started.wait.Signaled() {
		result.Code = 128 + int(started.wait.Signal())
	}
	select {
	case result.Output = <-output:
	case <-ctx.Done():
		return nil, fmt.Errorf("run %s: %w", p.Argv[0], context.Cause(ctx))
	}
	return result, nil
}

// signal signals a process unless it has ended, so that no other is hit.
func (t *table) signal(p *process, sig syscall.Signal) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p.Running {
		_ = syscall.Kill(p.PID, sig) // it exists until it is reaped, under this lock
	}
}

func (t *table) named(name string) *process {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.byName[name]
}

func (t *table) statuses() []Status {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []Status
	for _, name := range slices.Sorted(maps.Keys(t.byName)) {
		all = append(all, t.byName[name].Status)
	}
	return all
}
