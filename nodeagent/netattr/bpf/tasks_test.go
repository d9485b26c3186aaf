package bpf

import (
	"os"
	"path/filepath"
	"testing"
)

func TestAProcessWithoutAnIDIsOneThatIsNotSeen(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	write := func(group, procs string) {
		t.Helper()
		dir := filepath.Join(root, group)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(procs), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("", "")
	write("system.slice/a.service", "1\n20\n")
	if err := os.MkdirAll(filepath.Join(root, "odd"), 0o755); err != nil {
		t.Fatal(err)
	}
	if !allHaveIDs(root) {
		t.Error("all processes have ids, and not all are seen")
	}
	write("kubepods/pod1", "30\n0\n")
	if allHaveIDs(root) {
		t.Error("a process without an id is taken for one that is seen")
	}
}
