package machine_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/kubelab/cgroup"
	"github.com/hearth-dev/hearth/test/kubelab/machine"
)

// TestMain is also the init of the machines under test.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "machine-init" {
		fmt.Fprintln(os.Stderr, machine.Init(context.Background(), os.Args[2]))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

const path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// start makes a machine that ends with the test.
func start(t *testing.T, name string, private bool) *machine.Machine {
	t.Helper()
	groups, err := cgroup.Open("/kubelab-test-" + name)
	if err != nil {
		t.Fatal(err)
	}
	if err := groups.Make("init"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		if err := errors.Join(groups.Kill(ctx, ""), groups.Remove(ctx, "")); err != nil || groups.Exists() {
			t.Errorf("the cgroup is left: %v", err)
		}
	})
	dir, err := groups.Directory("init")
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	m, err := machine.Create(t.Context(), os.Args[0], machine.Spec{
		Name: name, Dir: t.TempDir(), PrivateRoot: private, Path: path, BootID: "11111111-2222-4333-8444-555555555555",
	}, dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func run(t *testing.T, m *machine.Machine, argv ...string) string {
	t.Helper()
	output, err := m.Run(t.Context(), argv...)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(output)
}

func TestAMachineHasItsOwnRootNameProcessesAndNetwork(t *testing.T) {
	t.Parallel()
	m := start(t, "private", true)
	for _, c := range []struct{ argv, want string }{
		{"hostname", "private"},
		{"cat /proc/sys/kernel/random/boot_id", "11111111-2222-4333-8444-555555555555"},
		{"cat /proc/1/comm", filepath.Base(os.Args[0])[:min(15, len(filepath.Base(os.Args[0])))]},
		{"ls /sys/class/net", "lo"},
		{"readlink /var/run", "../run"},
		{"stat --format=%A /tmp", "drwxrwxrwt"},
		{"cat /proc/sys/net/ipv4/ip_forward", "1"},
	} {
		if got := run(t, m, strings.Fields(c.argv)...); got != c.want {
			t.Errorf("%s: %q, not %q", c.argv, got, c.want)
		}
	}
	if _, err := m.Run(t.Context(), "touch", "/usr/written"); err == nil {
		t.Error("the system's programs can be written to")
	}
	run(t, m, "sh", "-c", "echo here >/run/there; mkdir /var/lib/kept")
	if text, err := os.ReadFile(m.Root() + "/run/there"); err != nil || string(text) != "here\n" {
		t.Errorf("from outside the file holds %q, %v", text, err)
	}
	if _, err := os.Stat(filepath.Join(m.Dir, "root/var/lib/kept")); err != nil {
		t.Error(err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), m.Dir) {
		t.Errorf("its mounts are seen here, %v", err)
	}
	if got := run(t, m, "findmnt", "--noheadings", "--output=PROPAGATION", "/"); got != "shared" {
		t.Errorf("mounts of pods do not reach the node: %s", got)
	}
}

func TestAProcessIsStartedStoppedAndStartedAgain(t *testing.T) {
	t.Parallel()
	m := start(t, "processes", false)
	p := machine.Process{Name: "sleeper", Argv: []string{"sh", "-c", "echo begun; exec sleep 1000"}}
	if err := m.Start(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if err := m.Start(t.Context(), p); !errors.Is(err, machine.ErrRunning) {
		t.Errorf("a second start: %v", err)
	}
	if err := m.Stop(t.Context(), "sleeper", syscall.SIGTERM, time.Minute); err != nil {
		t.Fatal(err)
	}
	statuses, err := m.Statuses(t.Context())
	if err != nil || len(statuses) != 1 || statuses[0].Running || !strings.Contains(statuses[0].Ended, "terminated") {
		t.Errorf("%+v, %v", statuses, err)
	}
	if err := m.Stop(t.Context(), "sleeper", syscall.SIGTERM, time.Minute); err != nil {
		t.Errorf("stop of what has ended: %v", err)
	}
	if err := m.Start(t.Context(), p); err != nil {
		t.Errorf("start again: %v", err)
	}
}

func TestAProcessThatDoesNotHeedIsKilled(t *testing.T) {
	t.Parallel()
	m := start(t, "deaf", false)
	deaf := machine.Process{Name: "deaf", Argv: []string{"sh", "-c", "while :; do sleep 1000; done"}}
	if err := m.Start(t.Context(), deaf); err != nil {
		t.Fatal(err)
	}
	if err := m.Stop(t.Context(), "deaf", syscall.SIGCONT, 10*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if statuses, err := m.Statuses(t.Context()); err != nil || statuses[0].Ended != "signal: killed" {
		t.Errorf("%+v, %v", statuses, err)
	}
}

func TestACommandGivesItsOutputAndItsStatus(t *testing.T) {
	t.Parallel()
	m := start(t, "commands", false)
	if got, err := m.RunInput(t.Context(), "to read", "cat"); got != "to read" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := m.Run(t.Context(), "sh", "-c", "echo told >&2; exit 3"); got != "told\n" || err == nil || !strings.Contains(err.Error(), "status 3: told") {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := m.Run(t.Context(), "no-such-program"); err == nil {
		t.Error("a program that is not there runs")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := m.Run(ctx, "sleep", "1000"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a command past its time: %v", err)
	}
}

func TestOrphansAreReaped(t *testing.T) {
	t.Parallel()
	m := start(t, "orphans", false)
	run(t, m, "sh", "-c", "for i in 1 2 3 4 5 6 7 8; do (true &) ; done")
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if zombies := run(t, m, "sh", "-c", "grep -l '^State:.Z' /proc/[0-9]*/status || true"); zombies == "" {
			return
		}
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal("zombies stay")
		}
	}
}

func TestAMachineThatCannotBeMadeSaysWhy(t *testing.T) {
	t.Parallel()
	groups, err := cgroup.Open("/kubelab-test-broken")
	if err != nil {
		t.Fatal(err)
	}
	if err := groups.Make(""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := groups.Remove(context.WithoutCancel(t.Context()), ""); err != nil {
			t.Error(err)
		}
	})
	dir, err := groups.Directory("")
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	_, err = machine.Create(t.Context(), os.Args[0], machine.Spec{
		Name: "broken", Dir: t.TempDir(), PrivateRoot: true, Path: path, Binds: []machine.Bind{{From: "/no/such", To: "/x"}},
	}, dir, nil)
	if err == nil || !strings.Contains(err.Error(), "/no/such") {
		t.Errorf("the error is %v", err)
	}
}
