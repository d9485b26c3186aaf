package rig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// Command describes a child process.
type Command struct {
	Name string   // names the log file; unique in the Rig
	Path string   // program
	Args []string // without the program's name
	// Env is added to a small clean environment: the child sees neither
	// proxies nor the caller's hub settings.
	Env   []string
	Dir   string    // working directory; empty means the Rig's
	Stdin io.Reader // nothing where nil
}

// Process is a running child in a process group of its own.
type Process struct {
	Name string
	Log  string // path of its stdout and stderr
	cmd  *exec.Cmd
	done chan struct{} // closed after Wait
	err  error         // of Wait, valid after done
}

// Start starts c. The child ends with Close at the latest.
func (r *Rig) Start(c Command) (*Process, error) {
	logPath := filepath.Join(r.Dir, c.Name+".log")
	out, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Name, err)
	}
	defer func() { _ = out.Close() }()
	cmd := r.command(c)
	cmd.Stdout, cmd.Stderr = out, out
	p := &Process{Name: c.Name, Log: logPath, cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	go p.live(started)
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Name, err)
	}
	r.OnClose(func() { p.End(10 * time.Second) })
	return p, nil
}

// live is the life of a child. It keeps its thread, because the kernel sends
// Pdeathsig when the thread that started the child ends.
func (p *Process) live(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := p.cmd.Start()
	started <- err
	if err != nil {
		return
	}
	p.err = p.cmd.Wait()
	close(p.done)
}

// Run runs c to its end and returns what it printed on stdout. On failure the
// error holds the end of its stderr.
func (r *Rig) Run(ctx context.Context, c Command) ([]byte, error) {
	cmd := r.command(c)
	var stdout, stderr tail
	stdout.keep, stderr.keep = 8<<20, 4<<10
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	p := &Process{Name: c.Name, cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	go p.live(started)
	if err := <-started; err != nil {
		return nil, fmt.Errorf("run %s: %w", c.Name, err)
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		p.Kill()
	}
	if err := errors.Join(ctx.Err(), p.err); err != nil {
		return stdout.bytes, fmt.Errorf("run %s: %w: %s", c.Name, err, strings.TrimSpace(string(stderr.bytes)))
	}
	return stdout.bytes, nil
}

func (r *Rig) command(c Command) *exec.Cmd {
	cmd := exec.Command(c.Path, c.Args...) //nolint:noctx // ended by process group, which a context cannot do
	cmd.Dir, cmd.Stdin = c.Dir, c.Stdin
	if cmd.Dir == "" {
		cmd.Dir = r.Dir
	}
	cmd.Env = append([]string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + r.Dir, "LANG=C.UTF-8", "TMPDIR=" + os.TempDir(), "no_proxy=*",
	}, c.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return cmd
}

// Kill sends SIGKILL to the whole group and waits.
func (p *Process) Kill() {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.done
}

// End asks the group to end, waits for at most grace and then kills it. A
// group that has ended already is left alone.
func (p *Process) End(grace time.Duration) {
	select {
	case <-p.done:
		return
	default:
	}
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGTERM)
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case <-p.done:
	case <-t.C:
		p.Kill()
	}
}

// Signal sends a signal to the group of a process that has not ended.
func (p *Process) Signal(signal syscall.Signal) {
	select {
	case <-p.done:
	default:
		_ = syscall.Kill(-p.cmd.Process.Pid, signal) // gone just now: Done tells
	}
}

// PID is the child's process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Err is how the process ended, nil for status 0. It is valid once Done is
// closed.
func (p *Process) Err() error { return p.err }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// LogTail is the last few lines of the process's output.
func (p *Process) LogTail() string {
	f, err := os.Open(p.Log)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = f.Close() }()
	if st, err := f.Stat(); err == nil && st.Size() > 3000 {
		_, _ = f.Seek(-3000, io.SeekEnd)
	}
	text, _ := io.ReadAll(f)
	return strings.TrimSpace(string(text))
}

// lastWords says how an ended process ended and what it printed last.
func (p *Process) lastWords() error {
	err := p.err
	if err == nil {
		err = errors.New("exit status 0")
	}
	return fmt.Errorf("%w: %s", err, p.LogTail())
}

// Until calls ready, at once and then every 50 ms, until it says true, the
// context ends, or one of the processes on which that depends has ended.
func Until(ctx context.Context, what string, ready func(context.Context) (bool, error), on ...*Process) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		ok, err := ready(ctx)
		if ok {
			return nil
		}
		if err != nil {
			last = err
		}
		for _, p := range on {
			select {
			case <-p.done:
				return fmt.Errorf("wait for %s: %s ended: %w", what, p.Name, p.lastWords())
			default:
			}
		}
		select {
		case <-ctx.Done():
			causes := []error{ctx.Err(), last}
			for _, p := range on {
				causes = append(causes, fmt.Errorf("%s said: %s", p.Name, p.LogTail()))
			}
			return fmt.Errorf("wait for %s: %w", what, errors.Join(causes...))
		case <-tick.C:
		}
	}
}

// tail keeps the last keep bytes written to it.
type tail struct {
	keep  int
	bytes []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.bytes = append(t.bytes, p...)
	if over := len(t.bytes) - t.keep; over > 0 {
		t.bytes = append(t.bytes[:0], t.bytes[over:]...)
	}
	return len(p), nil
}
