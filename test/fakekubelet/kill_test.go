package fakekubelet_test

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/test/fakekubelet"
)

// lifeVariable holds, for a process that is to be a driver, what it needs.
const lifeVariable = "FAKEKUBELET_LIFE"

// life is what a driver's process is told.
type life struct {
	Dir, URL string
	KillAt   int64 // the change of the drive before which it kills itself; 0: none
}

func TestMain(m *testing.M) {
	text := os.Getenv(lifeVariable)
	if text == "" {
		os.Exit(m.Run())
	}
	var l life
	err := json.Unmarshal([]byte(text), &l)
	if err == nil {
		err = l.run()
	}
	if err != nil {
		slog.Error("the driver's process failed", slog.Any("error", err))
		os.Exit(1)
	}
	os.Exit(0)
}

// run is a driver in a process of its own, with the stock of its folder.
func (l life) run() error {
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	cache, kv, err := openStock(l.Dir)
	if err != nil {
		return err
	}
	drive := &killing{FS: durable.OS, at: l.KillAt, count: filepath.Join(l.Dir, "changes")}
	b, err := buildDriver(l.Dir, l.URL, "boot-1", drive, cache, kv, nil)
	if err != nil {
		return err
	}
	return errors.Join(b.Run(ctx), b.ledger.Close())
}

// killing is a drive before one of whose changes the process is killed.
type killing struct {
	durable.FS
	at    int64
	done  atomic.Int64
	count string // file that tells how many changes there were
}

func (k *killing) change() {
	n := k.done.Add(1)
	if n == k.at {
		// A signal that cannot be caught; nothing after this line runs.
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	_ = os.WriteFile(k.count, []byte(strconv.FormatInt(n, 10)), 0o600)
}

func (k *killing) OpenFile(path string, flag int, perm fs.FileMode) (durable.File, error) {
	if flag&os.O_CREATE != 0 {
		k.change()
	}
	f, err := k.FS.OpenFile(path, flag, perm)
	if err != nil {
		return nil, err
	}
	return &killingFile{File: f, k: k}, nil
}

func (k *killing) Rename(from, to string) error { k.change(); return k.FS.Rename(from, to) }
func (k *killing) Remove(path string) error     { k.change(); return k.FS.Remove(path) }
func (k *killing) SyncDir(path string) error    { k.change(); return k.FS.SyncDir(path) }

type killingFile struct {
	durable.File
	k *killing
}

func (f *killingFile) Write(p []byte) (int, error) { f.k.change(); return f.File.Write(p) }
func (f *killingFile) WriteAt(p []byte, off int64) (int, error) {
	f.k.change()
	return f.File.WriteAt(p, off)
}
func (f *killingFile) Sync() error     { f.k.change(); return f.File.Sync() }
func (f *killingFile) Datasync() error { f.k.change(); return f.File.Datasync() }

// process is a driver in a process of its own.
type process struct {
	cmd    *exec.Cmd
	killAt int64
	ended  chan error
}

func (m *machine) spawn(t *testing.T, killAt int64) *process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(life{Dir: m.dir, URL: m.api.URL(), KillAt: killAt})
	if err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: exec.Command(self), killAt: killAt, ended: make(chan error, 1)}
	p.cmd.Env = append(os.Environ(), lifeVariable+"="+string(text))
	p.cmd.Stderr = os.Stderr
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.ended <- p.cmd.Wait() }()
	t.Cleanup(func() { _ = p.cmd.Process.Kill() })
	return p
}

// serve registers the process's driver and does with it what a kubelet does;
// it ends when the process does.
func (m *machine) serve(t *testing.T, p *process, do func(ctx context.Context, kubelet *fakekubelet.Plugin) error) (ended bool, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	worked := make(chan error, 1)
	go func() {
		kubelet, err := fakekubelet.Register(ctx, filepath.Join(m.dir, "reg"), dradriver.Name)
		if err == nil {
			err = errors.Join(do(ctx, kubelet), kubelet.Close())
		}
		worked <- err
	}()
	select {
	case err := <-worked:
		if err != nil && p.killAt > 0 {
			// A connection breaks before the process is seen to be gone.
			p.ended <- within(t, "the killed process to be gone", p.ended)
			return true, nil
		}
		return false, err
	case err := <-p.ended:
		p.ended <- err
		cancel()
		_ = drain(worked) // what the kubelet of a dead driver saw
		return true, nil
	}
}

// drain waits for a channel's one value.
func drain(c <-chan error) error { return <-c }

func TestAKilledProcessLeavesWhatTheNextOneFinishes(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	c := full("a")
	m.api.Put(c)
	var want map[string]fakekubelet.Answer
	cycle := func(ctx context.Context, kubelet *fakekubelet.Plugin) error {
		got, err := kubelet.Prepare(ctx, named(c))
		if err != nil {
			return err
		}
		if want == nil {
			want = got
		}
		if diff := cmp.Diff(want, got); diff != "" {
			return errors.New(diff)
		}
		if got["uid-a"].Err != "" {
			return errors.New(got["uid-a"].Err)
		}
		gone, err := kubelet.Unprepare(ctx, named(c))
		if err == nil && gone["uid-a"] != "" {
			err = errors.New(gone["uid-a"])
		}
		return err
	}
	p := m.spawn(t, 0)
	if ended, err := m.serve(t, p, cycle); ended || err != nil {
		t.Fatalf("a life without a kill: ended %t, %v", ended, err)
	}
	p.end(t)
	text, err := os.ReadFile(filepath.Join(m.dir, "changes"))
	if err != nil {
		t.Fatal(err)
	}
	changes, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	killed := 0
	const points = 8
	for i := range int64(points) {
		at := 1 + i*(changes-1)/(points-1)
		p := m.spawn(t, at)
		ended, err := m.serve(t, p, cycle)
		if err != nil {
			t.Errorf("killed at change %d: %v", at, err)
		}
		if ended {
			killed++
			_ = drain(p.ended) // it was killed
		} else {
			p.end(t)
		}
		p = m.spawn(t, 0)
		if ended, err := m.serve(t, p, cycle); ended || err != nil {
			t.Errorf("after the kill at change %d: ended %t, %v", at, ended, err)
		}
		p.end(t)
		m.wantNothingHeld(t, at)
	}
	if killed < points/2 {
		t.Errorf("%d of %d processes were killed", killed, points)
	}
}

// end stops a process as a signal does.
func (p *process) end(t *testing.T) {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Error(err)
	}
	_ = within(t, "the driver's process to end", p.ended)
}

// wantNothingHeld checks what the folders of a machine hold while no driver
// runs.
func (m *machine) wantNothingHeld(t *testing.T, at int64) {
	t.Helper()
	cache, kv, err := openStock(m.dir)
	if err != nil {
		t.Fatal(err)
	}
	m.cache, m.kv = cache, kv
	b, err := m.build()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.ledger.Close() }()
	if found := m.left(t, b.ledger); len(found) > 0 {
		t.Errorf("left after the kill at change %d: %v", at, found)
	}
}
