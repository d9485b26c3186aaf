package machine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// socketName is the machine's socket in its Dir. One connection carries one
// request and one answer, each a JSON object.
const socketName = "init.sock"

// Process is what a machine is asked to start.
type Process struct {
	// Name is the process's in the machine; its output is appended to logs/Name.log.
	Name string `json:"name"`
	// Argv holds the program, by absolute path or by the machine's PATH, and its arguments.
	Argv []string `json:"argv"`
	// Env is added to PATH and LANG.
	Env []string `json:"env,omitempty"`
	// Inherit names the listeners that the process has as descriptors 3 and up.
	Inherit []string `json:"inherit,omitempty"`
}

// Status is what became of a process that was started by name.
type Status struct {
	Name    string    `json:"name"`
	Argv    []string  `json:"argv"`
	PID     int       `json:"pid"` // in the machine's process table
	Running bool      `json:"running"`
	Ended   string    `json:"ended,omitempty"` // "exit status 1", "signal: killed"
	Started time.Time `json:"started"`
}

// Result is what a command left that ran to its end.
type Result struct {
	Output string `json:"output"` // both streams, at most 1 MiB
	Code   int    `json:"code"`   // 128 plus the number for a signal
}

// ErrRunning is answered to the start of a process that runs already.
var ErrRunning = errors.New("process runs already")

type request struct {
	Op      string         `json:"op"` // ping, start, stop, status, run
	Process *Process       `json:"process,omitempty"`
	Name    string         `json:"name,omitempty"`
	Signal  syscall.Signal `json:"signal,omitempty"`
	Within  time.Duration  `json:"within,omitempty"`
	Input   string         `json:"input,omitempty"`
}

type answer struct {
	Error    string   `json:"error,omitempty"`
	Running  bool     `json:"running,omitempty"` // the error is ErrRunning
	Statuses []Status `json:"statuses,omitempty"`
	Result   *Result  `json:"result,omitempty"`
}

// Ping returns when the machine answers.
func (m *Machine) Ping(ctx context.Context) error {
	_, err := m.call(ctx, request{Op: "ping"})
	return err
}

// Start starts a process that was never started or has ended. The error is
// ErrRunning if it runs.
func (m *Machine) Start(ctx context.Context, p Process) error {
	_, err := m.call(ctx, request{Op: "start", Process: &p})
	return err
}

// Stop sends a process signal, and SIGKILL if it has not ended within the time
// given; it returns when the process is gone. A process that does not run is
// stopped already.
func (m *Machine) Stop(ctx context.Context, name string, signal syscall.Signal, within time.Duration) error {
	_, err := m.call(ctx, request{Op: "stop", Name: name, Signal: signal, Within: within})
	return err
}

// Statuses tells of every process that was started by name, sorted by it.
func (m *Machine) Statuses(ctx context.Context) ([]Status, error) {
	a, err := m.call(ctx, request{Op: "status"})
	return a.Statuses, err
}

// Run runs a command in the machine to its end. A status other than 0 is an
// error that carries the output.
func (m *Machine) Run(ctx context.Context, argv ...string) (string, error) {
	return m.RunInput(ctx, "", argv...)
}

// RunInput is Run with something to read on standard input.
func (m *Machine) RunInput(ctx context.Context, input string, argv ...string) (string, error) {
	a, err := m.call(ctx, request{Op: "run", Process: &Process{Argv: argv}, Input: input})
	if err != nil {
		return "", err
	}
	if a.Result.Code != 0 {
		return a.Result.Output, fmt.Errorf("run %s on %s: status %d: %s", argv[0], filepath.Base(m.Dir), a.Result.Code, strings.TrimSpace(a.Result.Output))
	}
	return a.Result.Output, nil
}

// call asks the machine and waits for its answer, until ctx ends.
func (m *Machine) call(ctx context.Context, r request) (answer, error) {
	var conn net.Conn
	err := shortly(m.Dir, func(short string) (err error) {
		var dialer net.Dialer
		conn, err = dialer.DialContext(ctx, "unix", filepath.Join(short, socketName))
		return err
	})
	if err != nil {
		return answer{}, fmt.Errorf("reach machine %s: %w", filepath.Base(m.Dir), err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	var a answer
	err = json.NewEncoder(conn).Encode(r)
	if err == nil {
		err = json.NewDecoder(conn).Decode(&a)
	}
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return answer{}, fmt.Errorf("ask machine %s to %s: %w", filepath.Base(m.Dir), r.Op, err)
	}
	if a.Running {
		return a, ErrRunning
	}
	if a.Error != "" {
		return a, errors.New(a.Error)
	}
	return a, nil
}
