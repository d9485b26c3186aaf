package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/kubelab/cgroup"
	"github.com/hearth-dev/hearth/test/kubelab/lab"
)

// trace is what a lab could leave on this system.
type trace map[string]bool

// traces lists this system's links, named network namespaces, mounts below the
// cache, cgroups of labs, and processes in them.
func traces(t *testing.T) trace {
	t.Helper()
	found := trace{}
	links, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		found["link "+link.Name] = true
	}
	namespaces, err := os.ReadDir("/run/netns")
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for _, n := range namespaces {
		found["network namespace "+n.Name()] = true
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(mounts) {
		fields := bytes.Fields(line)
		found["mount "+string(fields[4])] = true
		if !bytes.Contains(line, []byte("cgroup")) {
			continue
		}
		groups, err := filepath.Glob(string(fields[4]) + "/kubelab-*")
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range groups {
			found["cgroup "+g] = true
		}
	}
	processes, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range processes {
		text, err := os.ReadFile(p)
		if err == nil && bytes.Contains(text, []byte("/kubelab-")) {
			command, _ := os.ReadFile(filepath.Join(filepath.Dir(p), "comm"))
			found[fmt.Sprintf("process %s (%s)", filepath.Dir(p), bytes.TrimSpace(command))] = true
		}
	}
	return found
}

// compare fails for what is there now and was not before.
func (before trace) compare(t *testing.T) {
	t.Helper()
	for _, what := range slices.Sorted(maps.Keys(traces(t))) {
		// Labs of other names come and go meanwhile.
		if !before[what] && !strings.Contains(what, "process ") && !strings.Contains(what, "cgroup ") {
			t.Errorf("left behind: %s", what)
		}
		for _, name := range []string{"check", "killed"} {
			if strings.HasSuffix(what, "/kubelab-"+name) {
				t.Errorf("left behind: %s", what)
			}
		}
	}
}

// killAt runs a program until it tells of a step, and kills it there.
func killAt(t *testing.T, step, program string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	progress, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	reached := false
	for scanner := bufio.NewScanner(progress); !reached && scanner.Scan(); {
		t.Log(scanner.Text())
		reached = strings.HasPrefix(scanner.Text(), step)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || !reached {
		t.Fatalf("it was not killed at %q: %v", step, err)
	}
}

func TestAKilledUpIsTakenDownAndBroughtUpAnew(t *testing.T) {
	before := traces(t)
	program, _ := buildProbe(t)
	const name = "killed"
	if err := lab.Down(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lab.Down(context.WithoutCancel(t.Context()), name); err != nil {
			t.Error(err)
		}
		before.compare(t)
	})
	// Each run takes down what the one before it left.
	for _, step := range []string{"starting the control plane", "starting 1 nodes"} {
		killAt(t, step, program, "up", "--name="+name, "--nodes=1")
		if _, err := lab.Open(name); err == nil {
			t.Error("what the killed run left passes for a lab")
		}
	}
	groups, err := cgroup.Open("/kubelab-" + name)
	if err != nil {
		t.Fatal(err)
	}
	if left, err := groups.Processes(""); err != nil || left < 3 {
		t.Fatalf("the killed run left %d processes, %v: there is nothing to clean up", left, err)
	}

	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if output, err := exec.CommandContext(ctx, program, "up", "--name="+name, "--nodes=1").CombinedOutput(); err != nil {
		t.Fatalf("up again: %v: %s", err, output)
	}
	output, err := exec.CommandContext(ctx, program, "status", "--name="+name).Output()
	if err != nil {
		t.Fatal(err)
	}
	var status lab.Status
	if err := json.Unmarshal(output, &status); err != nil {
		t.Fatal(err)
	}
	for _, m := range status.Machines {
		for _, p := range m.Processes {
			if !p.Running {
				t.Errorf("%s on %s has ended: %s", p.Name, m.Name, p.Ended)
			}
		}
	}
	if len(status.Machines) != 2 {
		t.Errorf("the lab has %d machines", len(status.Machines))
	}
	if output, err := exec.CommandContext(ctx, program, "up", "--name="+name).CombinedOutput(); err != nil || !strings.Contains(string(output), status.Kubeconfig) {
		t.Errorf("up of a lab that is up: %v: %s", err, output)
	}
	if output, err := exec.CommandContext(ctx, program, "down", "--name="+name).CombinedOutput(); err != nil {
		t.Fatalf("down: %v: %s", err, output)
	}
}
