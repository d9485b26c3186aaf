package nodeagent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestADriverRootBringsItsLibrariesByTheNamesTheyAreLoadedUnder(t *testing.T) {
	t.Parallel()
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	lib := filepath.Join(root, "usr/lib/x86_64-linux-gnu")
	bin := filepath.Join(root, "usr/bin")
	for _, dir := range []string{lib, bin} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{
		filepath.Join(lib, "libcuda.so.580.95.05"), filepath.Join(lib, "libnvidia-ml.so.580.95.05"), filepath.Join(lib, "libc.so.6"),
		filepath.Join(bin, "nvidia-smi"), filepath.Join(bin, "bash"),
	} {
		if err := os.WriteFile(path, []byte("x"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("libcuda.so.580.95.05", filepath.Join(lib, "libcuda.so.1")); err != nil {
		t.Fatal(err)
	}
	mounts, err := driverMounts(root)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, m := range mounts {
		got[m.Container] = m.Host
		if strings.Join(m.Options, ",") != "ro,nosuid,nodev,rbind" {
			t.Errorf("%s is mounted with %q", m.Container, m.Options)
		}
	}
	want := map[string]string{
		"/usr/bin/nvidia-smi":                                 filepath.Join(bin, "nvidia-smi"),
		"/usr/lib/x86_64-linux-gnu/libcuda.so.1":              filepath.Join(lib, "libcuda.so.580.95.05"),
		"/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05":      filepath.Join(lib, "libcuda.so.580.95.05"),
		"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05": filepath.Join(lib, "libnvidia-ml.so.580.95.05"),
	}
	if len(got) != len(want) {
		t.Errorf("mounts are %v", got)
	}
	for container, host := range want {
		if got[container] != host {
			t.Errorf("%s is %q, want %s", container, got[container], host)
		}
	}

	if err := os.Symlink("/etc/passwd", filepath.Join(lib, "libnvidia-leak.so.1")); err != nil {
		t.Fatal(err)
	}
	if _, err := driverMounts(root); err == nil || !strings.Contains(err.Error(), "leads out of it") {
		t.Errorf("a link out of the driver root gave %v", err)
	}
	if _, err := driverMounts(t.TempDir()); err == nil || !strings.Contains(err.Error(), "no libcuda.so") {
		t.Errorf("an empty driver root gave %v", err)
	}
	if mounts, err := driverMounts(""); err != nil || len(mounts) != 0 {
		t.Errorf("no driver root gave %v, %v", mounts, err)
	}
}
