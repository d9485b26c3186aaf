package fabric

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// stopGrace is how long a process may take to end after SIGTERM.
const stopGrace = 10 * time.Second

// tailBytes is how much of a log is read to show its last lines.
const tailBytes = 8 << 10

// Process is a child that may be started, stopped and started again. It runs
// in its own process group and is killed when this process dies. Its output
// goes to one log file.
type Process struct {
	Name string
	Log  string // path
	argv []string
	env  []string // added to this process's

	mu  sync.Mutex
	run *run
}

// run is one life of a Process.
type run struct {
	pid     int
	exited  chan struct{}
	err     error // of Wait, once exited is closed
	wanted  bool  // whether someone asked it to end
	started time.Time
}

func newProcess(dir, name string, env []string, argv ...string) *Process {
	return &Process{Name: name, Log: filepath.Join(dir, name+".log"), argv: argv, env: env}
}

// Start starts the process; it must not be running.
func (p *Process) Start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.run != nil && !p.run.gone() {
		return fmt.Errorf("start %s: it is running", p.Name)
	}
	log, err := os.OpenFile(p.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	defer func() { _ = log.Close() }()
	r := &run{exited: make(chan struct{}), started: time.Now()}
	started := make(chan error, 1)
	go p.live(r, log, started)
	if err := <-started; err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	p.run = r
	return nil
}

// live is the goroutine of one run. It keeps its thread, since the kernel
// sends Pdeathsig when the thread that started the child ends.
func (p *Process) live(r *run, log *os.File, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// The life of the child is ended by stop and kill, not by a context.
	cmd := exec.Command(p.argv[0], p.argv[1:]...) //nolint:noctx // see above
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), p.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		started <- err
		return
	}
	r.pid = cmd.Process.Pid
	started <- nil
	r.err = cmd.Wait()
	close(r.exited)
}

func (r *run) gone() bool {
	select {
	case <-r.exited:
		return true
	default:
		return false
	}
}

// current returns the present run, nil before the first.
func (p *Process) current() *run {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.run
}

// PID is the process id of the present run, 0 where it is not running.
func (p *Process) PID() int {
	if r := p.current(); r != nil && !r.gone() {
		return r.pid
	}
	return 0
}

// Exited is closed when the present run has ended. It is nil before the first.
func (p *Process) Exited() <-chan struct{} {
	if r := p.current(); r != nil {
		return r.exited
	}
	return nil
}

// Stop ends the process with SIGTERM, and its group with SIGKILL after a
// grace. It returns once the process is gone.
func (p *Process) Stop() {
	r := p.ask(syscall.SIGTERM)
	if r == nil {
		return
	}
	timer := time.NewTimer(stopGrace)
	defer timer.Stop()
	select {
	case <-r.exited:
	case <-timer.C:
	}
	_ = syscall.Kill(-r.pid, syscall.SIGKILL) // what the process left behind; most often nothing
	<-r.exited
}

// Kill ends the process and its group at once, as a crash does.
func (p *Process) Kill() {
	if r := p.ask(syscall.SIGKILL); r != nil {
		<-r.exited
	}
}

// ask sends a signal to the group of the present run.
func (p *Process) ask(signal syscall.Signal) *run {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.run == nil || p.run.gone() {
		return nil
	}
	p.run.wanted = true
	_ = syscall.Kill(-p.run.pid, signal) // gone already: exited tells
	return p.run
}

// failure describes an end that nobody asked for; nil while there is none.
func (p *Process) failure() error {
	p.mu.Lock()
	r := p.run
	p.mu.Unlock()
	if r == nil || !r.gone() {
		return nil
	}
	p.mu.Lock()
	wanted := r.wanted
	p.mu.Unlock()
	if wanted {
		return nil
	}
	err := r.err
	if err == nil {
		err = errors.New("it ended by itself")
	}
	return &ProcessError{Name: p.Name, Log: p.Log, Tail: p.Tail(12), Err: err}
}

// ProcessError is a child that ended or did not get ready, with the last lines
// of its log.
type ProcessError struct {
	Name, Log string
	Tail      []string
	Err       error
}

// Error names the process, the cause and the last lines of its log.
func (e *ProcessError) Error() string {
	text := fmt.Sprintf("run %s: %v", e.Name, e.Err)
	if len(e.Tail) > 0 {
		text += "; the end of its log:\n    " + strings.Join(e.Tail, "\n    ")
	}
	return text
}

// Unwrap returns the cause.
func (e *ProcessError) Unwrap() error { return e.Err }

// Tail gives the last n lines of the log, none where it cannot be read.
func (p *Process) Tail(n int) []string {
	f, err := os.Open(p.Log)
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }()
	if info, err := f.Stat(); err == nil && info.Size() > tailBytes {
		if _, err := f.Seek(-tailBytes, io.SeekEnd); err != nil {
			return nil
		}
	}
	text, err := io.ReadAll(io.LimitReader(f, tailBytes))
	if err != nil {
		return nil
	}
	text = bytes.TrimSpace(text)
	if len(text) == 0 {
		return nil
	}
	lines := strings.Split(string(text), "\n")
	return lines[max(0, len(lines)-n):]
}

// await polls ready until it returns nil, the process ends or ctx does. limit
// bounds the wait.
func (p *Process) await(ctx context.Context, limit time.Duration, ready func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-p.Exited():
			if failed := p.failure(); failed != nil {
				return failed
			}
			return fmt.Errorf("run %s: it was stopped while starting", p.Name)
		case <-ctx.Done():
			if errors.Is(context.Cause(ctx), context.Canceled) {
				return ctx.Err()
			}
			return &ProcessError{Name: p.Name, Log: p.Log, Tail: p.Tail(12), Err: fmt.Errorf("not ready after %v: %w", limit, err)}
		}
	}
}
