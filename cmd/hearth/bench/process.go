package bench

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process is a child whose CPU time and memory are measured. It ends with the
// bench.
type process struct {
	cmd  *exec.Cmd
	addr string // where it listens
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
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", strings.Join(args, " "), err)
	}
	p := &process{cmd: cmd, addr: addr}
	if core >= 0 {
		p.pin(core)
	}
	deadline, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	retry := time.NewTicker(20 * time.Millisecond)
	defer retry.Stop()
	var dialer net.Dialer
	for {
		if conn, err := dialer.DialContext(deadline, "tcp", addr); err == nil {
			_ = conn.Close()
			if core >= 0 {
				p.pin(core) // threads that came since
			}
			return p, nil
		}
		select {
		case <-retry.C:
		case <-deadline.Done():
			p.stop()
			return nil, fmt.Errorf("start %s: nothing listens at %s after %s", strings.Join(args, " "), addr, startTimeout)
		}
	}
}

// freeAddr returns a loopback address nothing listens on just now.
func freeAddr(ctx context.Context) (string, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
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
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", p.cmd.Process.Pid))
	if err != nil {
		return
	}
	for _, task := range tasks {
		if tid, err := strconv.Atoi(task.Name()); err == nil {
			_ = unix.SchedSetaffinity(tid, &set)
		}
	}
}

func (p *process) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	done := make(chan struct{})
	go func() { _ = p.cmd.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(15 * time.Second):
		_ = p.cmd.Process.Kill()
		<-done
	}
}

// cpu is the CPU time of all the child's threads so far, user and system. The
// clock id of another process is (^pid << 3) | CPUCLOCK_SCHED (clock_getcpuclockid(3)).
func (p *process) cpu() (time.Duration, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^p.cmd.Process.Pid<<3|2), &ts); err != nil {
		return 0, fmt.Errorf("read CPU clock of child: %w", err)
	}
	return time.Duration(ts.Nano()), nil
}

// rss is the child's resident memory in bytes: field VmRSS (now) or VmHWM (peak)
// of /proc/PID/status.
func (p *process) rss(field string) (int64, error) {
	text := strings.TrimSuffix(fieldOf(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid), field), " kB")
	kib, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read %s of child: %w", field, err)
	}
	return kib << 10, nil
}
