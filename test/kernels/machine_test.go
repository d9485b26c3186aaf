package kernels

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// machineThatTells gives a machine whose process 1 sends these records.
func machineThatTells(t *testing.T, initramfs string, records ...Record) Machine {
	t.Helper()
	port := "SeaBIOS is no record\n"
	for _, record := range records {
		line, err := json.Marshal(record)
		if err != nil {
			t.Fatal(err)
		}
		port += string(line) + "\r\n"
	}
	kernel := filepath.Join(t.TempDir(), "kernel")
	if err := os.WriteFile(kernel, []byte(port), 0o644); err != nil {
		t.Fatal(err)
	}
	return Machine{QEMU: "testdata/qemu", Kernel: kernel, Initramfs: initramfs, Out: t.TempDir()}
}

func contents(t *testing.T, path ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestBootKeepsAllThatTheMachineTells(t *testing.T) {
	t.Parallel()
	machine := machineThatTells(
		t, "",
		Record{Kind: KindBooted, Release: "6.1.0", BTF: true, Seconds: 2},
		Record{Kind: KindLine, Suite: "bpf", Text: "--- PASS: TestA (0.00s)"},
		Record{Kind: KindLine, Suite: "bpf", Text: "--- FAIL: TestB (0.00s)"},
		Record{Kind: KindFile, Suite: "bpf", Path: "_artifacts/1/verifier.log", Data: []byte("R1 invalid mem access")},
		Record{Kind: KindEnded, Suite: "bpf", Status: 1, Seconds: 3},
		Record{Kind: KindDone},
	)
	result, err := machine.Boot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if result.Release != "6.1.0" || !result.BTF || result.Kernel != 2 || result.BootedIn <= 0 || result.Total < result.BootedIn {
		t.Errorf("result %+v", result)
	}
	if bpf := result.Suites["bpf"]; bpf.Passed != 1 || len(bpf.Failed) != 1 || bpf.Status != 1 {
		t.Errorf("outcome %+v", bpf)
	}
	if log := contents(t, machine.Out, "bpf.log"); log != "--- PASS: TestA (0.00s)\n--- FAIL: TestB (0.00s)\n" {
		t.Errorf("log %q", log)
	}
	if log := contents(t, machine.Out, "bpf", "_artifacts/1/verifier.log"); log != "R1 invalid mem access" {
		t.Errorf("artifact %q", log)
	}
	if console := contents(t, machine.Out, ConsoleName); console != "SeaBIOS is no record\n" {
		t.Errorf("console %q", console)
	}
}

func TestBootSaysWhereAMachineThatEndsEarlyWas(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		initramfs string
		records   []Record
		want      string
	}{
		{"", nil, "before process 1 could tell"},
		{"broken", nil, "exit status 1"},
		{"", []Record{{Kind: KindBooted, Release: "6.1.0"}}, "it ended early"},
		{"", []Record{{Kind: KindBroken, Text: "mount /sys/fs/bpf: no such device"}}, "mount /sys/fs/bpf"},
		{"stuck", []Record{{Kind: KindFile, Suite: "bpf", Path: "../../escape"}}, "leads out of its folder"},
	} {
		machine := machineThatTells(t, c.initramfs, c.records...)
		if _, err := machine.Boot(t.Context()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: error %v, want one that says %q", c.records, err, c.want)
		}
		if c.initramfs == "broken" && !strings.Contains(contents(t, machine.Out, ConsoleName), "no such machine") {
			t.Error("what QEMU complained of is not in the console's file")
		}
	}
}

func TestBootEndsAStuckMachineWithItsContext(t *testing.T) {
	t.Parallel()
	machine := machineThatTells(t, "stuck", Record{Kind: KindBooted, Release: "6.1.0"})
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if result, err := machine.Boot(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a stuck machine gives %+v, %v", result, err)
	}
}
