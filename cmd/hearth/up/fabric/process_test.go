package fabric

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func shell(t *testing.T, script string) *Process {
	t.Helper()
	p := newProcess(t.TempDir(), "child", []string{"WORD=heard"}, "/bin/sh", "-c", script)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	return p
}

// eventually waits for a condition that another process brings about.
func eventually(t *testing.T, what string, ready func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ready() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s did not happen", what)
		}
	}
}

func TestAChildThatEndsByItselfIsReportedWithItsLastLines(t *testing.T) {
	t.Parallel()
	p := shell(t, "for i in 1 2 3; do echo line $i $WORD; done; exit 3")
	<-p.Exited()
	failure, ok := errors.AsType[*ProcessError](p.failure())
	if !ok {
		t.Fatalf("failure: %v", p.failure())
	}
	if !strings.Contains(failure.Error(), "line 3 heard") || !strings.Contains(failure.Error(), "exit status 3") {
		t.Errorf("failure: %v", failure)
	}
	if p.PID() != 0 {
		t.Error("it still has a process id")
	}
	if got := p.Tail(1); len(got) != 1 || got[0] != "line 3 heard" {
		t.Errorf("last line: %q", got)
	}
}

func TestStopEndsWhatTheChildStartedAndIsNoFailure(t *testing.T) {
	t.Parallel()
	p := shell(t, "sleep 600 & echo $!; wait")
	eventually(t, "the grandchild's start", func() bool { return len(p.Tail(1)) == 1 })
	grandchild, err := strconv.Atoi(p.Tail(1)[0])
	if err != nil {
		t.Fatal(err)
	}
	p.Stop()
	if err := p.failure(); err != nil {
		t.Errorf("failure after stop: %v", err)
	}
	eventually(t, "the grandchild's end", func() bool { return gone(grandchild) })
	if err := p.Start(); err != nil {
		t.Errorf("start again: %v", err)
	}
	if err := p.Start(); err == nil {
		t.Error("it was started twice")
	}
}

// gone reports whether a process has ended, reaped or not.
func gone(pid int) bool {
	if err := syscall.Kill(pid, 0); errors.Is(err, syscall.ESRCH) {
		return true
	}
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func TestAwaitTellsWhyAChildIsNotReady(t *testing.T) {
	t.Parallel()
	never := func(context.Context) error { return errors.New("nobody home") }
	ended := shell(t, "echo broken; exit 1")
	if err := ended.await(t.Context(), time.Minute, never); err == nil || !strings.Contains(err.Error(), "broken") {
		t.Errorf("of an ended child: %v", err)
	}
	slow := shell(t, "sleep 600")
	if err := slow.await(t.Context(), 60*time.Millisecond, never); err == nil || !strings.Contains(err.Error(), "nobody home") {
		t.Errorf("of a slow child: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := slow.await(ctx, time.Minute, never); !errors.Is(err, context.Canceled) {
		t.Errorf("of a cancelled wait: %v", err)
	}
	if err := slow.await(t.Context(), time.Minute, func(context.Context) error { return nil }); err != nil {
		t.Errorf("of a ready child: %v", err)
	}
}

func TestAUsersEngineCommandGetsItsDirectoryAndPort(t *testing.T) {
	t.Parallel()
	f := &Fabric{opts: Options{Engine: "serve {model_dir} --port {port}"}}
	got := f.engineCommand(&Engine{port: 81}, View{Dir: "/models/it's here"})
	want := `exec serve '/models/it'\''s here' --port 81`
	if len(got) != 3 || got[2] != want {
		t.Errorf("command: got %q, want %q", got, want)
	}
}

func TestOptionsThatMakeNoFabricAreNamed(t *testing.T) {
	t.Parallel()
	good := Options{Nodes: 1, Engines: 1, Served: "m"}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*Options){
		"0 nodes":    func(o *Options) { o.Nodes = 0 },
		"65 engines": func(o *Options) { o.Engines = 65 },
		"{port}":     func(o *Options) { o.Engine = "vllm serve" },
		"no name":    func(o *Options) { o.Served = "" },
	} {
		o := good
		change(&o)
		if err := o.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error: got %v, want one with %q", err, want)
		}
	}
}
