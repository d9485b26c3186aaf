//go:build kernels

package kernels

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// limit of one kernel, from start to end: a stuck one is ended then. A boot
// takes seconds on a free machine, and minutes beside much other work.
const limit = 10 * time.Minute

// modules of the kernels' packages that suites may use, where they are not built
// in.
var modules = []string{"veth", "dummy", "sch_netem", "sch_tbf", "tls"}

// top is the tree's own folder, from this package.
const top = "../.."

// outRoot gets a folder for each kernel, and kernels.json.
const outRoot = top + "/bin/kernels"

// program is a compiled suite with what it reads.
type program struct {
	suite  Suite
	binary []byte
	data   map[string][]byte // by path below the package's folder
}

func TestSuitesHoldInAllKernels(t *testing.T) {
	init := build(t, "build", "-o", "", "./test/kernels/init")
	var programs []program
	for _, suite := range Suites {
		programs = append(programs, program{
			suite: suite, data: testdata(t, suite),
			binary: build(t, "test", "-c", "-tags", "root,kernels", "-o", "", "./"+suite.Package),
		})
	}
	qemu, err := deps(t.Context(), "qemu")
	if err != nil {
		t.Fatal(err)
	}
	out, err := filepath.Abs(outRoot)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	var rows []Row
	for _, kernel := range chosen(t) {
		// A kernel that cannot be had has no test that could pass.
		row := Row{Name: kernel.Name, Support: kernel.Support}
		dir, err := deps(t.Context(), "kernel", kernel.Name, kernel.From, kernel.Package)
		switch {
		case err == nil:
			// One after the other: each has as many processors as this machine may have.
			t.Run(kernel.Name, func(t *testing.T) {
				row = run(t, kernel, dir, filepath.Join(qemu, "qemu-system-x86_64"), filepath.Join(out, kernel.Name), init, programs)
				judge(t, row, filepath.Join(out, kernel.Name))
			})
		case kernel.MayLack != "":
			row.NotRun, row.Allowed = err.Error(), kernel.MayLack
			t.Logf("kernel %s is not run, which is allowed as %s: %v", kernel.Name, kernel.MayLack, err)
		default:
			row.NotRun = err.Error()
			t.Errorf("kernel %s is not run: %v", kernel.Name, err)
		}
		rows = append(rows, row)
	}
	var table bytes.Buffer
	if err := WriteTable(&table, rows); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s, in %.0f s\n%s", Summary(rows), time.Since(began).Seconds(), table.String())
	text, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(out, "kernels.json"), append(text, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

// chosen gives the rows of the table that the variable KERNELS names, with
// commas; all without it.
func chosen(t *testing.T) []Kernel {
	t.Helper()
	names := os.Getenv("KERNELS")
	if names == "" {
		return Table
	}
	var kernels []Kernel
	for name := range strings.SplitSeq(names, ",") {
		at := slices.IndexFunc(Table, func(k Kernel) bool { return k.Name == name })
		if at < 0 {
			t.Fatalf("KERNELS: no kernel %q in the table", name)
		}
		kernels = append(kernels, Table[at])
	}
	return kernels
}

// judge fails the test for what is not as expected and says where to look.
func judge(t *testing.T, row Row, out string) {
	t.Helper()
	if row.Verdict() == Pass {
		return
	}
	if row.NotRun != "" {
		t.Errorf("%s\n%s", row.NotRun, tail(t, filepath.Join(out, ConsoleName)))
	}
	for _, fault := range row.Faults {
		t.Error(fault)
	}
	for name, outcome := range row.Suites {
		if len(outcome.Failed) > 0 || outcome.Status != 0 {
			t.Log(tail(t, filepath.Join(out, name+".log")))
		}
	}
	var kept []string
	err := filepath.WalkDir(out, func(name string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type().IsRegular() {
			kept = append(kept, name)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	t.Logf("kept:\n%s", strings.Join(kept, "\n"))
}

// tail gives the end of a file.
func tail(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Error(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return "the end of " + name + ":\n" + strings.Join(lines[max(0, len(lines)-60):], "\n")
}

// run boots the kernel that lies in dir with all suites for its support.
func run(t *testing.T, kernel Kernel, dir, qemu, out string, init []byte, programs []program) Row {
	t.Helper()
	row := Row{Name: kernel.Name, Support: kernel.Support}
	version, err := os.ReadFile(filepath.Join(dir, "version"))
	if err != nil {
		t.Fatal(err)
	}
	config, err := os.ReadFile(filepath.Join(dir, "config"))
	if err != nil {
		t.Fatal(err)
	}
	row.Package, row.ConfigBTF = strings.TrimSpace(string(version)), HasBTF(string(config))
	if err := errors.Join(os.RemoveAll(out), os.MkdirAll(out, 0o755)); err != nil {
		t.Fatal(err)
	}
	machine := Machine{QEMU: qemu, Kernel: filepath.Join(dir, "vmlinuz"), Initramfs: filepath.Join(t.TempDir(), "initramfs"), Out: out, Parameters: kernel.Boot}
	if err := pack(machine.Initramfs, kernel, filepath.Join(dir, "modules"), init, programs); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeoutCause(t.Context(), limit, fmt.Errorf("not off after %v", limit))
	defer cancel()
	row.Result, err = machine.Boot(ctx)
	if err != nil {
		row.NotRun = err.Error()
	}
	if row.Release == "" {
		return row
	}
	row.Faults = row.Judge(Suites, kernel.Support)
	if row.BTF != row.ConfigBTF {
		row.Faults = append(row.Faults, fmt.Sprintf("CONFIG_DEBUG_INFO_BTF is %v, /sys/kernel/btf/vmlinux there is %v", row.ConfigBTF, row.BTF))
	}
	return row
}

// pack writes the initramfs of one kernel.
func pack(name string, kernel Kernel, moduleDir string, init []byte, programs []program) error {
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	defer file.Close()
	archive := NewArchive(file)
	errs := []error{archive.File("/init", 0o755, init)}
	var plan Plan
	found, err := Modules(moduleDir, modules...)
	errs = append(errs, err)
	for _, module := range found {
		data, err := os.ReadFile(module)
		inside := "/modules/" + filepath.Base(module)
		errs = append(errs, err, archive.File(inside, 0o644, data))
		plan.Modules = append(plan.Modules, inside)
	}
	for _, p := range programs {
		pattern := p.suite.Run[kernel.Support]
		if pattern == "" {
			continue
		}
		dir := "/suites/" + p.suite.Name
		errs = append(errs, archive.File(dir+"/suite.test", 0o755, p.binary))
		for name, data := range p.data {
			errs = append(errs, archive.File(path.Join(dir, name), 0o644, data))
		}
		plan.Suites = append(plan.Suites, Program{
			Name: p.suite.Name, Path: dir + "/suite.test", Out: "/out/" + p.suite.Name,
			Env: []string{"HEARTH_EXPECT=" + string(kernel.Support)},
			// The limit leaves the program the time to print where it is stuck.
			Args: []string{
				// Emulated, a machine is some thirty times slower: sizes are the small ones.
				"-test.v", "-test.short", "-test.run=" + pattern, "-test.timeout=" + (limit * 8 / 10).String(),
				"-test.artifacts", "-test.outputdir=/out/" + p.suite.Name,
			},
		})
	}
	text, err := json.Marshal(plan)
	errs = append(errs, err, archive.File(PlanPath, 0o644, text), archive.Close())
	return errors.Join(errs...)
}

// build runs the go command from the tree's top, with a file for its empty
// argument, and gives what it wrote there.
func build(t *testing.T, args ...string) []byte {
	t.Helper()
	name := filepath.Join(t.TempDir(), "program")
	for i, arg := range args {
		if arg == "" {
			args[i] = name
		}
	}
	command := exec.CommandContext(t.Context(), "go", append([]string{args[0], "-ldflags=-s -w"}, args[1:]...)...)
	command.Dir = top
	command.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	if text, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", command, err, text)
	}
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// testdata reads what a suite's tests may read beside them.
func testdata(t *testing.T, suite Suite) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	folder := os.DirFS(filepath.Join(top, suite.Package))
	err := fs.WalkDir(folder, "testdata", func(name string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		files[name], err = fs.ReadFile(folder, name)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// deps runs scripts/kernels-deps and gives the folder that it prints. Its error
// is the script's last word.
func deps(ctx context.Context, args ...string) (string, error) {
	var said bytes.Buffer
	command := exec.CommandContext(ctx, filepath.Join(top, "scripts/kernels-deps"), args...)
	command.Stderr = &said
	dir, err := command.Output()
	if err != nil {
		lines := strings.Split(strings.TrimSpace(said.String()), "\n")
		return "", fmt.Errorf("%s (%w)", lines[len(lines)-1], err)
	}
	return strings.TrimSpace(string(dir)), nil
}
