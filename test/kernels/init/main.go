// Command init is process 1 of the machines of test/kernels. It mounts what a
// node has, loads modules, runs the suites of the plan one after the other and
// tells on the second serial port how they end; then it switches the machine
// off. It never runs anywhere else.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/test/kernels"
)

// maxFile bounds what is sent of one file in bytes: the port is slow. The end
// of a log says more than its start.
const maxFile = 1 << 20

// mounts are made in this order. The last two are not built into every kernel.
var mounts = []struct {
	kind, path string
	optional   bool
}{
	{"proc", "/proc", false},
	{"sysfs", "/sys", false},
	{"devtmpfs", "/dev", false},
	{"tmpfs", "/tmp", false},
	{"tmpfs", "/run", false},
	{"cgroup2", "/sys/fs/cgroup", false},
	{"bpf", "/sys/fs/bpf", false},
	{"debugfs", "/sys/kernel/debug", true},
	{"tracefs", "/sys/kernel/tracing", true},
}

func main() {
	// The kernel panics when process 1 ends, and QEMU ends then.
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "init: runs as process 1 of a machine of its own")
		os.Exit(2)
	}
	port, err := prepare()
	if err == nil {
		err = run(context.Background(), port)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "init:", err)
		port.send(kernels.Record{Kind: kernels.KindBroken, Text: err.Error()})
	}
	port.file.Close()
	unix.Sync()
	fmt.Fprintln(os.Stderr, "init: off:", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
	os.Exit(1)
}

// port is the second serial port: records, one a line.
type port struct {
	mu   sync.Mutex
	file *os.File
}

func (p *port) send(record kernels.Record) {
	p.mu.Lock()
	defer p.mu.Unlock()
	line, err := json.Marshal(record)
	if err == nil {
		_, err = p.file.Write(append(line, '\n'))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "init: send record:", err)
	}
}

// prepare makes the machine a node as far as tests need one.
func prepare() (*port, error) {
	serial := &port{}
	for _, m := range mounts {
		err := os.MkdirAll(m.path, 0o755)
		if err == nil {
			err = unix.Mount(m.kind, m.path, m.kind, 0, "")
		}
		if errors.Is(err, unix.EBUSY) { // the kernel mounts /dev itself where it is built to
			err = nil
		}
		if err != nil && !m.optional {
			return serial, fmt.Errorf("mount %s: %w", m.path, err)
		}
	}
	file, err := os.OpenFile("/dev/ttyS1", os.O_WRONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return serial, fmt.Errorf("open serial port: %w", err)
	}
	serial.file = file
	for _, name := range []string{"/tmp", "/run"} {
		if err := os.Chmod(name, 0o1777); err != nil {
			return serial, fmt.Errorf("open folder to all: %w", err)
		}
	}
	unlimited := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unlimited); err != nil {
		return serial, fmt.Errorf("lift limit of locked memory: %w", err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}); err != nil {
		return serial, fmt.Errorf("lift limit of open files: %w", err)
	}
	if err := up("lo"); err != nil {
		return serial, fmt.Errorf("bring up lo: %w", err)
	}
	return serial, nil
}

func up(name string) error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	request, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, request)
}

func run(ctx context.Context, serial *port) error {
	text, err := os.ReadFile(kernels.PlanPath)
	if err != nil {
		return fmt.Errorf("read plan: %w", err)
	}
	var plan kernels.Plan
	if err := json.Unmarshal(text, &plan); err != nil {
		return fmt.Errorf("read plan: %w", err)
	}
	for _, name := range plan.Modules {
		if err := load(name); err != nil {
			return fmt.Errorf("load module %s: %w", filepath.Base(name), err)
		}
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return fmt.Errorf("read kernel's release: %w", err)
	}
	var since unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &since); err != nil {
		return fmt.Errorf("read time since boot: %w", err)
	}
	_, missing := os.Stat("/sys/kernel/btf/vmlinux")
	serial.send(kernels.Record{
		Kind: kernels.KindBooted, Release: unix.ByteSliceToString(name.Release[:]),
		BTF: missing == nil, Seconds: time.Duration(since.Nano()).Seconds(),
	})
	for _, suite := range plan.Suites {
		if err := runSuite(ctx, serial, suite); err != nil {
			return fmt.Errorf("run suite %s: %w", suite.Name, err)
		}
	}
	serial.send(kernels.Record{Kind: kernels.KindDone})
	return nil
}

func load(name string) error {
	file, err := os.Open(name)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := unix.FinitModule(int(file.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}

// runSuite runs a program to its end and sends every line as it comes, then the
// files that it left, then its status.
func runSuite(ctx context.Context, serial *port, suite kernels.Program) error {
	if err := os.MkdirAll(suite.Out, 0o755); err != nil {
		return err
	}
	began := time.Now()
	reader, writer, err := os.Pipe()
	if err != nil {
		return err
	}
	defer reader.Close()
	command := exec.CommandContext(ctx, suite.Path, suite.Args...)
	command.Dir = filepath.Dir(suite.Path)
	command.Env = append([]string{"HOME=/tmp", "TMPDIR=/tmp", "PATH=/bin", "GOTRACEBACK=all"}, suite.Env...)
	command.Stdout, command.Stderr = writer, writer
	err = command.Start()
	writer.Close()
	if err != nil {
		return err
	}
	// What the suite started may outlive it and hold the pipe, so its end is not
	// waited for with the output's.
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		lines := bufio.NewReader(reader)
		for {
			line, err := lines.ReadString('\n')
			if line != "" {
				serial.send(kernels.Record{Kind: kernels.KindLine, Suite: suite.Name, Text: strings.TrimSuffix(line, "\n")})
			}
			if err != nil {
				return
			}
		}
	}()
	status := 0
	err = command.Wait()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		status = exit.ExitCode() & 255
	case err != nil:
		return err
	}
	limit := time.NewTimer(10 * time.Second)
	defer limit.Stop()
	select {
	case <-copied:
	case <-limit.C:
		serial.send(kernels.Record{Kind: kernels.KindLine, Suite: suite.Name, Text: "(a process of the suite outlived it and holds its output)"})
	}
	if err := sendFiles(serial, suite); err != nil {
		return err
	}
	serial.send(kernels.Record{Kind: kernels.KindEnded, Suite: suite.Name, Status: status, Seconds: time.Since(began).Seconds()})
	return nil
}

func sendFiles(serial *port, suite kernels.Program) error {
	return filepath.WalkDir(suite.Out, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		file, err := os.Open(name)
		if err != nil {
			return err
		}
		defer file.Close()
		info, err := file.Stat()
		if err != nil {
			return err
		}
		data, err := io.ReadAll(io.NewSectionReader(file, max(0, info.Size()-maxFile), maxFile))
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(suite.Out, name)
		if err != nil {
			return err
		}
		serial.send(kernels.Record{Kind: kernels.KindFile, Suite: suite.Name, Path: relative, Data: data})
		return nil
	})
}
