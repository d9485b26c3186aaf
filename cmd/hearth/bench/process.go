package bench

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/identity"
)

// process is a child whose CPU time and memory are measured, with the children
// it has. It ends with the bench.
type process struct {
	cmd   *exec.Cmd
	addr  string        // where it listens: host:port, or the path of a socket
	ended chan struct{} // closed once it has ended
}

// startTimeout bounds how long a child may take to print its address.
const startTimeout = 60 * time.Second

// start runs this program again as a child on the given core (-1: any) and waits
// until it accepts connections at addr.
func start(ctx context.Context, core int, addr string, args ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own program: %w", err)
	}
	return startProgram(ctx, core, addr, os.Stderr, self, args...)
}

// startProgram does the same with any program; log takes what it prints.
func startProgram(ctx context.Context, core int, addr string, log io.Writer, program string, args ...string) (*process, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", strings.Join(args, " "), err)
	}
	p := &process{cmd: cmd, addr: addr, ended: make(chan struct{})}
	go func() {
		_ = cmd.Wait()
		close(p.ended)
	}()
	if core >= 0 {
		p.pin(core)
	}
	deadline, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	retry := time.NewTicker(20 * time.Millisecond)
	defer retry.Stop()
	for {
		if conn, err := dialAt(deadline, addr); err == nil {
			_ = conn.Close()
			if core >= 0 {
				p.pin(core) // threads that came since
			}
			return p, nil
		}
		select {
		case <-retry.C:
		case <-p.ended:
			return nil, fmt.Errorf("start %s: it ended before it listened at %s: %s", strings.Join(args, " "), addr, cmd.ProcessState)
		case <-deadline.Done():
			p.stop()
			return nil, fmt.Errorf("start %s: nothing listens at %s after %s", strings.Join(args, " "), addr, startTimeout)
		}
	}
}

// dialAt connects to host:port, or to the socket of a path.
func dialAt(ctx context.Context, addr string) (net.Conn, error) {
	network := "tcp"
	if filepath.IsAbs(addr) {
		network = "unix"
	}
	var dialer net.Dialer
	return dialer.DialContext(ctx, network, addr)
}

// freeAddr returns a loopback address nothing listens on just now.
func freeAddr(ctx context.Context) (string, error) {
	l, err := identity.ListenTCP(ctx, "127.0.0.1:0", 0)
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	addr := l.Addr().String()
	return addr, l.Close()
}

// pin keeps every thread of the child on one core, best effort: on a machine with
// fewer cores the figures only get noisier.
func (p *process) pin(core int) {
	var set unix.CPUSet
	set.Set(core)
	for _, pid := range p.pids() {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		if err != nil {
			continue
		}
		for _, task := range tasks {
			if tid, err := strconv.Atoi(task.Name()); err == nil {
				_ = unix.SchedSetaffinity(tid, &set)
			}
		}
	}
}

// pids are the child and those below it.
func (p *process) pids() []int {
	all := []int{p.cmd.Process.Pid}
	for i := 0; i < len(all); i++ {
		lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", all[i]))
		for _, list := range lists {
			text, _ := os.ReadFile(list)
			for word := range strings.FieldsSeq(string(text)) {
				if pid, err := strconv.Atoi(word); err == nil {
					all = append(all, pid)
				}
			}
		}
	}
	return all
}

func (p *process) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.ended:
	case <-time.After(15 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
}

// cpu is the CPU time of all threads of the child and of those below it so far,
// user and system. The clock id of another process is (^pid << 3) | CPUCLOCK_SCHED
// (clock_getcpuclockid(3)).
func (p *process) cpu() (time.Duration, error) {
	var sum time.Duration
	for _, pid := range p.pids() {
		var ts unix.Timespec
		if err := unix.ClockGettime(int32(^pid<<3|2), &ts); err != nil {
			return 0, fmt.Errorf("read CPU clock of child: %w", err)
		}
		sum += time.Duration(ts.Nano())
	}
	return sum, nil
}

// rss is the resident memory of the child and of those below it in bytes: field
// VmRSS (now) or VmHWM (peak) of /proc/PID/status.
func (p *process) rss(field string) (int64, error) {
	var sum int64
	for _, pid := range p.pids() {
		text := strings.TrimSuffix(fieldOf(fmt.Sprintf("/proc/%d/status", pid), field), " kB")
		kib, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read %s of child: %w", field, err)
		}
		sum += kib << 10
	}
	return sum, nil
}
