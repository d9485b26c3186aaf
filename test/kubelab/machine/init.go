package machine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

// Init is the whole work of a machine's first process: it makes the machine as
// Dir's spec.json says and serves its socket until it is killed. Every process
// of the machine dies with it.
func Init(ctx context.Context, dir string) error {
	if os.Getpid() != 1 {
		return errors.New("be the init of a machine: this is not the first process of a namespace")
	}
	// What a pod sends to process 1 must not end the machine. A handler and not
	// an ignored signal, which every child would inherit.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer signal.Stop(signals)

	text, err := os.ReadFile(filepath.Join(dir, "spec.json"))
	if err != nil {
		return fmt.Errorf("read spec of machine: %w", err)
	}
	var spec Spec
	if err := json.Unmarshal(text, &spec); err != nil {
		return fmt.Errorf("read spec of machine: %w", err)
	}
	socket := os.NewFile(3, "socket")
	l, err := net.FileListener(socket)
	if err != nil {
		return fmt.Errorf("open socket of machine: %w", err)
	}
	defer l.Close()
	if err := socket.Close(); err != nil {
		return fmt.Errorf("open socket of machine: %w", err)
	}
	t := newTable(spec.Path)
	for i, name := range spec.Inherit {
		syscall.CloseOnExec(firstInherited + i)
		t.inherited[name] = uintptr(firstInherited + i)
	}
	if t.logs, err = os.OpenRoot(filepath.Join(dir, "logs")); err != nil {
		return fmt.Errorf("open logs of machine: %w", err)
	}
	defer t.logs.Close()
	if err := syscall.Sethostname([]byte(spec.Name)); err != nil {
		return fmt.Errorf("name machine: %w", err)
	}
	if err := mountAll(spec); err != nil {
		return err
	}
	go t.reap(ctx)
	if err := t.network(ctx); err != nil {
		return err
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			return fmt.Errorf("serve socket of machine: %w", err)
		}
		go t.serve(ctx, conn)
	}
}

// network brings the machine's own network up: loopback, and forwarding, since
// a machine is a router for its pods or for the other machines.
func (t *table) network(ctx context.Context) error {
	result, err := t.run(ctx, Process{Argv: []string{"ip", "link", "set", "lo", "up"}}, "")
	if err == nil && result.Code != 0 {
		err = errors.New(result.Output)
	}
	if err != nil {
		return fmt.Errorf("bring loopback up: %w", err)
	}
	for file, value := range map[string]string{
		"/proc/sys/net/ipv4/ip_forward":            "1",
		"/proc/sys/net/ipv4/conf/all/rp_filter":    "0",
		"/proc/sys/net/ipv6/conf/all/disable_ipv6": "1",
	} {
		if err := os.WriteFile(file, []byte(value), 0o644); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("set network of machine: %w", err)
		}
	}
	return nil
}

// serve answers one request.
func (t *table) serve(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	var r request
	if err := json.NewDecoder(conn).Decode(&r); err != nil {
		return
	}
	// Who hangs up has no more use for the answer; a command that runs for them ends.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		defer cancel()
		_, _ = conn.Read(make([]byte, 1))
	}()
	a := t.answer(ctx, r)
	_ = json.NewEncoder(conn).Encode(a) // whoever asked has gone
}

func (t *table) answer(ctx context.Context, r request) answer {
	var a answer
	var err error
	switch {
	case r.Op == "ping":
	case r.Op == "start" && r.Process != nil:
		err = t.start(*r.Process)
	case r.Op == "stop":
		err = t.stop(ctx, r.Name, r.Signal, r.Within)
	case r.Op == "status":
		a.Statuses = t.statuses()
	case r.Op == "run" && r.Process != nil:
		a.Result, err = t.run(ctx, *r.Process, r.Input)
	default:
		err = fmt.Errorf("answer request: unknown operation %q", r.Op)
	}
	if err != nil {
		a.Error = err.Error()
		a.Running = errors.Is(err, ErrRunning)
	}
	return a
}

// stop ends a process and waits until it is gone.
func (t *table) stop(ctx context.Context, name string, sig syscall.Signal, within time.Duration) error {
	p := t.named(name)
	if p == nil {
		return fmt.Errorf("stop process: none is called %q", name)
	}
	timer := time.NewTimer(within)
	defer timer.Stop()
	t.signal(p, sig)
	for {
		select {
		case <-p.ended:
			return nil
		case <-timer.C:
			t.signal(p, syscall.SIGKILL)
		case <-ctx.Done():
			return fmt.Errorf("stop %s: %w", name, context.Cause(ctx))
		}
	}
}
