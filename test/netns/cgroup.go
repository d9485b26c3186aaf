package netns

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Cgroup is a group of processes in the unified hierarchy.
type Cgroup struct {
	Path string // its directory
	ID   uint64 // what the kernel calls it: the directory's inode
}

// CgroupRoot finds where the unified hierarchy is mounted.
func CgroupRoot(t testing.TB) Cgroup {
	t.Helper()
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = mounts.Close() }()
	for lines := bufio.NewScanner(mounts); lines.Scan(); {
		before, after, _ := strings.Cut(lines.Text(), " - ")
		if fields := strings.Fields(before); strings.HasPrefix(after, "cgroup2 ") && len(fields) > 4 && fields[3] == "/" {
			return cgroup(t, fields[4])
		}
	}
	t.Fatal("find cgroups: no cgroup2 is mounted")
	return Cgroup{}
}

// NewCgroup makes a group right below the root.
func NewCgroup(t testing.TB) Cgroup {
	t.Helper()
	return CgroupRoot(t).Below(t, "")
}

// Below makes a group in this one. Empty, the name is made up.
func (c Cgroup) Below(t testing.TB, name string) Cgroup {
	t.Helper()
	var made string
	var err error
	if name == "" {
		made, err = os.MkdirTemp(c.Path, "hearth-test-") //nolint:usetesting // a directory here is a cgroup
	} else {
		made = filepath.Join(c.Path, name)
		err = os.Mkdir(made, 0o755)
	}
	if err != nil {
		t.Fatalf("make cgroup: %v", err)
	}
	below := cgroup(t, made)
	t.Cleanup(func() {
		// Processes in it were started later and so have ended.
		if err := below.Remove(); err != nil {
			t.Error(err)
		}
	})
	return below
}

// Remove takes the group away, which must have no processes. Again does nothing.
func (c Cgroup) Remove() error {
	if err := os.Remove(c.Path); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("remove cgroup: %w", err)
	}
	return nil
}

func cgroup(t testing.TB, path string) Cgroup {
	t.Helper()
	var about syscall.Stat_t
	if err := syscall.Stat(path, &about); err != nil {
		t.Fatalf("look at cgroup %s: %v", path, err)
	}
	return Cgroup{Path: path, ID: about.Ino}
}

// MountBPF mounts a BPF file system for the test and gives its folder.
func MountBPF(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("bpf", dir, "bpf", 0, "mode=0700"); err != nil {
		t.Fatalf("mount BPF file system: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Errorf("unmount BPF file system: %v", err)
		}
	})
	return dir
}
