package cdi

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"

	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
)

const uid = "3e6a9cfa-6a0b-4c58-9f3e-0d9d1c1c7c11"

func claim() ledger.Entry {
	name := func(request, device, share string) string { return DeviceName(uid, request, device, share) }
	return ledger.Entry{
		UID: uid, Namespace: "team", Name: "llama", Results: []ledger.Result{
			{Request: "gpu", Device: "gpu-0000-1b-00-0", CDI: name("gpu", "gpu-0000-1b-00-0", ""), Edits: ledger.Edits{
				DeviceNodes: []ledger.DeviceNode{{Path: "/dev/null"}, {Path: "/dev/nvidiactl", HostPath: "/dev/zero"}},
			}},
			{Request: "model/warm", Device: "w-0123456789abcdef", CDI: name("model/warm", "w-0123456789abcdef", "9b2f"), Edits: ledger.Edits{
				Env:    []string{"HEARTH_MODEL_DIR=/models/main"},
				Mounts: []ledger.Mount{{Host: "/views/flat/x", Container: "/models/main", Options: []string{"ro", "nosuid", "nodev", "rbind"}}},
			}},
			{Request: "watch", Device: "gpu-0000-1b-00-0", AdminAccess: true},
		},
	}
}

// load reads the directory as a runtime does.
func load(t *testing.T, dir string) *cdilib.Cache {
	t.Helper()
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(dir), cdilib.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	for path, errs := range cache.GetErrors() {
		t.Errorf("%s: %v", path, errors.Join(errs...))
	}
	return cache
}

func TestARuntimeGivesAContainerWhatTheClaimsSpecSays(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "cdi")
	s := New(Options{Dir: dir})
	e := claim()
	if written, err := s.Write(uid, DevicesOf(e)); err != nil || !written {
		t.Fatalf("write: %v, %v", written, err)
	}
	cache := load(t, dir)
	var names []string
	for _, d := range DevicesOf(e) {
		names = append(names, Qualified(d.Name))
	}
	if got := cache.ListDevices(); !slices.Equal(got, names) {
		t.Errorf("the runtime sees %v, want %v", got, names)
	}
	container := &oci.Spec{Process: &oci.Process{}, Linux: &oci.Linux{}}
	if unresolved, err := cache.InjectDevices(container, names...); err != nil {
		t.Fatalf("inject: %v, unresolved %v", err, unresolved)
	}
	if !slices.Contains(container.Process.Env, "HEARTH_MODEL_DIR=/models/main") {
		t.Errorf("environment %v", container.Process.Env)
	}
	mount := oci.Mount{Destination: "/models/main", Source: "/views/flat/x", Options: []string{"ro", "nosuid", "nodev", "rbind"}}
	if diff := cmp.Diff([]oci.Mount{mount}, container.Mounts); diff != "" {
		t.Error(diff)
	}
	if got := container.Linux.Devices; len(got) != 2 || got[0].Path != "/dev/null" || got[1].Path != "/dev/nvidiactl" || got[1].Minor != 5 {
		t.Errorf("devices %+v", got)
	}
	info, err := os.Stat(filepath.Join(dir, "hearth.dev-claim_"+uid+".json"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the spec's file: %v, %v", info, err)
	}
}

func TestASpecIsTheBytesItWasGolden(t *testing.T) {
	t.Parallel()
	data, err := render(uid, DevicesOf(claim()))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", "spec.json")
	if os.Getenv("GOLDEN") == "write" {
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil || string(want) != string(data) {
		t.Errorf("%s, %v", cmp.Diff(string(want), string(data)), err)
	}
}

func TestTheSameSpecIsWrittenOnceAndAChangedOneAgain(t *testing.T) {
	t.Parallel()
	fsys := durabletest.New()
	s := New(Options{FS: fsys})
	e := claim()
	for i, want := range []bool{true, false, true} {
		if i == 2 {
			e.Results[1].Edits.Env[0] += "2"
		}
		if matches, err := s.Matches(uid, DevicesOf(e)); err != nil || matches == want {
			t.Errorf("write %d: matches before: %v, %v", i, matches, err)
		}
		if written, err := s.Write(uid, DevicesOf(e)); err != nil || written != want {
			t.Errorf("write %d: %v, %v", i, written, err)
		}
		if matches, err := s.Matches(uid, DevicesOf(e)); err != nil || !matches {
			t.Errorf("write %d: matches after: %v, %v", i, matches, err)
		}
	}
	if _, err := fsys.Stat(filepath.Join(DefaultDir, prefix+uid+suffix)); err != nil {
		t.Error(err)
	}
}

func TestAClaimWithoutDevicesHasNoSpec(t *testing.T) {
	t.Parallel()
	fsys := durabletest.New()
	s := New(Options{FS: fsys})
	if _, err := s.Write(uid, DevicesOf(claim())); err != nil {
		t.Fatal(err)
	}
	if matches, err := s.Matches(uid, nil); err != nil || matches {
		t.Errorf("a spec that should not be: %v, %v", matches, err)
	}
	if _, err := s.Write(uid, nil); err != nil {
		t.Fatal(err)
	}
	if matches, err := s.Matches(uid, nil); err != nil || !matches {
		t.Errorf("without devices: %v, %v", matches, err)
	}
	if got, err := s.List(); err != nil || len(got) != 0 {
		t.Errorf("specs %v, %v", got, err)
	}
}

func TestWhatTheLibraryRefusesIsNotWritten(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(d []Device) []Device{
		"a device that gives nothing": func(d []Device) []Device { d[0].Edits = ledger.Edits{}; return d },
		"a name with a slash":         func(d []Device) []Device { d[0].Name = "a/b"; return d },
		"a name twice":                func(d []Device) []Device { return append(d, d[0]) },
		"no host path":                func(d []Device) []Device { d[1].Edits.Mounts[0].Host = ""; return d },
		"no variable":                 func(d []Device) []Device { d[1].Edits.Env = []string{"=x"}; return d },
	} {
		fsys := durabletest.New()
		if _, err := New(Options{FS: fsys}).Write(uid, spoil(DevicesOf(claim()))); err == nil || fsys.Changes() != 0 {
			t.Errorf("%s: %v, %d changes", name, err, fsys.Changes())
		}
	}
	if _, err := New(Options{FS: durabletest.New()}).Write("../x", DevicesOf(claim())); err == nil {
		t.Error("a path as UID: taken")
	}
}

func TestDeviceNamesAreValidAndDiffer(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, request := range []string{"main", "main/sub", "main-sub"} {
		for _, share := range []string{"", "9b2f"} {
			name := DeviceName(uid, request, "gpu-0000-1b-00-0", share)
			if err := parser.ValidateDeviceName(name); err != nil || seen[name] {
				t.Errorf("%q: seen %v, %v", name, seen[name], err)
			}
			seen[name] = true
			if vendor, class, device, err := parser.ParseQualifiedName(Qualified(name)); err != nil || vendor+"/"+class != Kind || device != name {
				t.Errorf("%q is %q of %s/%s, %v", Qualified(name), device, vendor, class, err)
			}
		}
	}
}

func TestSweepRemovesOnlyOurSpecsThatNobodyKeeps(t *testing.T) {
	t.Parallel()
	fsys := durabletest.New()
	s := New(Options{FS: fsys})
	if got, err := s.Sweep(func(string) bool { return false }); err != nil || len(got) != 0 {
		t.Errorf("without a directory: %v, %v", got, err)
	}
	for _, id := range []string{"kept", "left"} {
		if _, err := s.Write(id, []Device{{Name: id, Edits: ledger.Edits{Env: []string{"A=b"}}}}); err != nil {
			t.Fatal(err)
		}
	}
	foreign := []string{"nvidia.com-gpu.json", "hearth.dev-other_left.json", "hearth.dev-claim.yaml", "README", prefix + "notes.yaml"}
	for _, name := range slices.Concat(foreign, []string{prefix + "left.tmp"}) {
		if err := durable.WriteFile(fsys, filepath.Join(DefaultDir, name), []byte("{}"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := s.List(); err != nil || !slices.Equal(got, []string{"kept", "left"}) {
		t.Errorf("specs %v, %v", got, err)
	}
	removed, err := s.Sweep(func(id string) bool { return id == "kept" })
	if err != nil || !slices.Equal(removed, []string{"left"}) {
		t.Errorf("removed %v, %v", removed, err)
	}
	entries, err := fsys.ReadDir(DefaultDir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	want := slices.Sorted(slices.Values(append(foreign, prefix+"kept.json")))
	if !slices.Equal(names, want) {
		t.Errorf("left are %v, want %v", names, want)
	}
	if err := errors.Join(s.Remove("kept"), s.Remove("kept"), s.Remove("never")); err != nil {
		t.Error(err)
	}
}

func TestAWriteThatFailsLeavesTheOldSpecWhole(t *testing.T) {
	t.Parallel()
	for n := 1; ; n++ {
		fsys := durabletest.New()
		s := New(Options{FS: fsys})
		old := []Device{{Name: "d", Edits: ledger.Edits{Env: []string{"A=old"}}}}
		if _, err := s.Write(uid, old); err != nil {
			t.Fatal(err)
		}
		fsys.FailAt(fsys.Changes()+n, syscall.ENOSPC)
		_, err := s.Write(uid, DevicesOf(claim()))
		if err == nil {
			if n < 3 {
				t.Errorf("only %d changes could fail", n-1)
			}
			return
		}
		if matches, matchErr := s.Matches(uid, old); matchErr != nil || !matches || !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), uid) {
			t.Errorf("change %d: %v; the old spec: %v, %v", n, err, matches, matchErr)
		}
		if entries, err := fsys.ReadDir(DefaultDir); err != nil || len(entries) != 1 {
			t.Errorf("change %d: %v, %v", n, entries, err)
		}
	}
}

func TestARuntimeThatReadsAllTheWhileNeverSeesHalfASpec(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := New(Options{Dir: dir})
	done := make(chan error, 1)
	go func() {
		defer close(done)
		for i := range 200 {
			e := claim()
			e.Results[1].Edits.Env = append(e.Results[1].Edits.Env, fmt.Sprintf("I=%s%d", strings.Repeat("x", 7*i), i))
			if _, err := s.Write(uid, DevicesOf(e)); err != nil {
				done <- err
				return
			}
		}
	}()
	for {
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
			if got := load(t, dir).ListDevices(); len(got) != 2 {
				t.Errorf("at the end: %v", got)
			}
			return
		default:
			load(t, dir)
		}
	}
}

func TestWhereTheFolderIsAFileThereAreNoSpecsAndNoneCanBeWritten(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "cdi")
	if err := os.WriteFile(dir, []byte("a file"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := New(Options{Dir: dir})
	if err := s.Remove(uid); err != nil {
		t.Errorf("remove: %v", err)
	}
	if got, err := s.List(); err != nil || len(got) != 0 {
		t.Errorf("specs %v, %v", got, err)
	}
	if got, err := s.Sweep(func(string) bool { return false }); err != nil || len(got) != 0 {
		t.Errorf("swept %v, %v", got, err)
	}
	if matches, err := s.Matches(uid, nil); err != nil || !matches {
		t.Errorf("without devices: %v, %v", matches, err)
	}
	if matches, err := s.Matches(uid, DevicesOf(claim())); err != nil || matches {
		t.Errorf("with devices: %v, %v", matches, err)
	}
	if _, err := s.Write(uid, DevicesOf(claim())); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("write: %v, want an error that names %s", err, dir)
	}
	if text, err := os.ReadFile(dir); err != nil || string(text) != "a file" {
		t.Errorf("the file has %q, %v", text, err)
	}
}

func TestAFolderInASpecsPlaceIsNoSpec(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	foreign := filepath.Join(dir, prefix+uid+suffix, "something")
	if err := os.MkdirAll(foreign, 0o700); err != nil {
		t.Fatal(err)
	}
	s := New(Options{Dir: dir})
	if err := s.Remove(uid); err != nil {
		t.Errorf("remove: %v", err)
	}
	if got, err := s.Sweep(func(string) bool { return false }); err != nil || len(got) != 0 {
		t.Errorf("swept %v, %v", got, err)
	}
	if _, err := s.Write(uid, DevicesOf(claim())); err == nil {
		t.Error("a spec was written in the place of a folder")
	}
	if _, err := os.Stat(foreign); err != nil {
		t.Error(err)
	}
}
