package bpf

import (
	"bufio"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// errNotAllTasks: the walk over descriptors sees the process ids of this
// container alone.
var errNotAllTasks = errors.New("connections older than the agent are known only where its container shares the node's process ids: set hostPID: true (they count as unattributed until they end)")

// maxGroups bounds how many cgroups are looked at for a process without an id.
const maxGroups = 20_000

// seesAllTasks reports whether every process of the node has an id for this one:
// in the first pid namespace, whose inode the kernel fixes (PROC_PID_INIT_INO),
// and where no process of the node's cgroups is shown as 0, which stands for one
// of a namespace that is not seen. A node in a namespace has all its processes
// in a later one.
func seesAllTasks(cgroups string) bool {
	name, err := os.Readlink("/proc/self/ns/pid")
	return err != nil || name == "pid:[4026531836]" || cgroups != "" && allHaveIDs(cgroups)
}

// allHaveIDs reports whether no process in a tree of cgroups is shown as 0.
func allHaveIDs(root string) bool {
	left := maxGroups
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // removed meanwhile
			}
			return err
		}
		if left--; left < 0 {
			return fs.SkipAll
		}
		file, err := os.Open(filepath.Join(path, "cgroup.procs"))
		if err != nil {
			return nil // it is gone, or its processes are not to be read
		}
		defer func() { _ = file.Close() }()
		for lines := bufio.NewScanner(file); lines.Scan(); {
			if lines.Text() == "0" {
				return errNotAllTasks
			}
		}
		return nil
	})
	return err == nil
}
