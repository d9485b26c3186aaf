// Package machine makes machines out of namespaces: a machine is one init
// process with a network, a process table, mounts and a host name of its own,
// and on request a root directory of its own, in which every absolute path is
// the machine's.
//
// It owns the init process (Init, which a program calls as its whole work), the
// socket that starts, stops and runs processes in the machine, and the machine's
// root. The lab calls it. It knows nothing of Kubernetes, lays no cable between
// machines, and leaves nothing behind once the init process is dead: network,
// mounts and processes live in namespaces that nothing else holds.
package machine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Spec says what a machine is. It is kept as spec.json in Dir, where Init reads it.
type Spec struct {
	// Name is the machine's host name.
	Name string `json:"name"`
	// Dir holds spec.json, init.sock, init.log, logs/ and, with PrivateRoot, root/.
	Dir string `json:"dir"`
	// PrivateRoot gives the machine Dir/root as its root directory, with the
	// system's programs read-only in it, and /dev, /proc, /run and /sys of its own.
	PrivateRoot bool `json:"privateRoot"`
	// Binds appear in a private root, read-only.
	Binds []Bind `json:"binds"`
	// Cgroup is a directory of cgroup version 2 that a private root shows as a
	// hierarchy of its own at CgroupAt; empty is none.
	Cgroup string `json:"cgroup"`
	// BootID is what /proc/sys/kernel/random/boot_id holds in a private root.
	BootID string `json:"bootID"`
	// Path is the PATH of the machine's processes.
	Path string `json:"path"`
	// Inherit names the listeners that Create was given, in order.
	Inherit []string `json:"inherit"`
}

// CgroupAt is where a machine with a private root sees its own part of the
// cgroups: what it would be on a computer of its own, while /sys/fs/cgroup is that
// of this system.
const CgroupAt = "/run/kubelab/cgroup2"

// Bind is a file or directory of this system that a machine sees at another path.
type Bind struct {
	From string `json:"from"`
	To   string `json:"to"`
}

// Listener is an open socket of this network that processes of the machine serve.
type Listener struct {
	Name string
	File *os.File
}

// Machine is a running machine, as seen from outside.
type Machine struct {
	// Dir is the Dir of its Spec.
	Dir string `json:"dir"`
	// PID is the init process, in this process table.
	PID int `json:"pid"`
	// Started tells PID from a later process of the same number: clock ticks
	// from the boot of this system to the start of the process.
	Started uint64 `json:"started"`
}

// firstInherited is the descriptor of the first listener in an init process;
// descriptor 3 is its own socket.
const firstInherited = 4

// Create starts a machine: program is run as `program machine-init Dir` and has
// to call Init. The init process is born in the cgroup v2 directory cgroup and
// outlives the caller. Create returns when the machine answers.
func Create(ctx context.Context, program string, spec Spec, cgroup *os.File, listeners []Listener) (*Machine, error) {
	if err := os.MkdirAll(filepath.Join(spec.Dir, "logs"), 0o755); err != nil {
		return nil, fmt.Errorf("make machine: %w", err)
	}
	extra := []*os.File{nil}
	spec.Inherit = nil
	for _, l := range listeners {
		spec.Inherit = append(spec.Inherit, l.Name)
		extra = append(extra, l.File)
	}
	text, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("write spec of machine: %w", err)
	}
	if err := os.WriteFile(filepath.Join(spec.Dir, "spec.json"), text, 0o644); err != nil {
		return nil, fmt.Errorf("write spec of machine: %w", err)
	}
	socket, err := listen(spec.Dir)
	if err != nil {
		return nil, err
	}
	defer socket.Close()
	extra[0] = socket
	log, err := os.OpenFile(filepath.Join(spec.Dir, "init.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("make machine: %w", err)
	}
	defer log.Close()

	cmd := exec.Command(program, "machine-init", spec.Dir) //nolint:noctx // a machine outlives the call that makes it
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = extra
	cmd.Env = []string{"PATH=" + spec.Path, "LANG=C"}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:      true,
		Cloneflags:  syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
		UseCgroupFD: true,
		CgroupFD:    int(cgroup.Fd()),
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start machine %s: %w", spec.Name, err)
	}
	died := make(chan error, 1)
	go func() { died <- cmd.Wait() }()
	m := &Machine{Dir: spec.Dir, PID: cmd.Process.Pid}
	if m.Started, err = startTime(m.PID); err != nil {
		return nil, fmt.Errorf("start machine %s: %w%s", spec.Name, err, tailOf(log.Name()))
	}
	answered := make(chan error, 1)
	asking, stop := context.WithCancel(ctx)
	defer stop()
	go func() { answered <- m.Ping(asking) }()
	select {
	case err := <-answered:
		if err != nil {
			return nil, fmt.Errorf("start machine %s: %w%s", spec.Name, err, tailOf(log.Name()))
		}
		return m, nil
	case err := <-died:
		return nil, fmt.Errorf("start machine %s: its init ended: %w%s", spec.Name, errors.Join(err), tailOf(log.Name()))
	}
}

// listen opens the machine's socket in dir. A path to a directory may be longer
// than a socket's address allows, so the address goes by a descriptor.
func listen(dir string) (*os.File, error) {
	if err := os.Remove(filepath.Join(dir, socketName)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("open socket of machine: %w", err)
	}
	var l *net.UnixListener
	err := shortly(dir, func(short string) (err error) {
		l, err = net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(short, socketName), Net: "unix"})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open socket of machine: %w", err)
	}
	l.SetUnlinkOnClose(false)
	defer l.Close()
	file, err := l.File()
	if err != nil {
		return nil, fmt.Errorf("open socket of machine: %w", err)
	}
	return file, nil
}

// shortly calls do with a short path to dir.
func shortly(dir string, do func(short string) error) error {
	const openPath = 0x200000 // O_PATH
	fd, err := syscall.Open(dir, openPath|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer syscall.Close(fd)
	return do("/proc/self/fd/" + strconv.Itoa(fd))
}

// Alive reports whether the init process is the one that was started and runs.
func (m *Machine) Alive() bool {
	started, err := startTime(m.PID)
	return err == nil && started == m.Started
}

// Root is the machine's file system as it is mounted there, valid while it lives.
func (m *Machine) Root() string { return filepath.Join("/proc", strconv.Itoa(m.PID), "root") }

// startTime gives when a process started, in clock ticks since this system's
// boot; a zombie counts as gone.
func startTime(pid int) (uint64, error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, err
	}
	// The name in parentheses may hold anything; field 3 follows the last one.
	rest := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	const state, start = 0, 19
	if len(rest) <= start || rest[state] == "Z" || rest[state] == "X" {
		return 0, fmt.Errorf("process %d has ended", pid)
	}
	return strconv.ParseUint(rest[start], 10, 64)
}

// tailOf gives the last lines of a log to go with an error.
func tailOf(file string) string {
	text, err := os.ReadFile(file)
	if err != nil || len(text) == 0 {
		return ""
	}
	lines := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return "\n  " + strings.Join(lines[max(0, len(lines)-10):], "\n  ")
}

// Enter gives a command that runs argv inside the machine, on the caller's
// terminal: in all its namespaces and its root.
func (m *Machine) Enter(ctx context.Context, argv ...string) *exec.Cmd {
	args := append([]string{"--target", strconv.Itoa(m.PID), "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd=/", "--"}, argv...)
	return exec.CommandContext(ctx, "nsenter", args...)
}

// InNetwork gives a command that runs argv in the machine's network, and else here.
func (m *Machine) InNetwork(ctx context.Context, argv ...string) *exec.Cmd {
	args := append([]string{"--target", strconv.Itoa(m.PID), "--net", "--"}, argv...)
	cmd := exec.CommandContext(ctx, "nsenter", args...)
	cmd.WaitDelay = 5 * time.Second
	return cmd
}
