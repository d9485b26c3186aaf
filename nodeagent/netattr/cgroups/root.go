package cgroups

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNotMounted says that no cgroup2 file system is mounted where this process
// can see it, so that ids have no owners.
var ErrNotMounted = errors.New("cgroup2 is not mounted")

// FindRoot gives the directory where cgroup2 is mounted: fs/cgroup below sys, or
// fs/cgroup/unified where version 1 has that place, else the first mount of it
// in mountinfo, which is this process's own (/proc/self/mountinfo). Of several
// it takes one that shows the whole tree. The error is ErrNotMounted where
// there is none.
func FindRoot(sys string, mountinfo io.Reader) (dir string, err error) {
	return findRoot(sys, mountinfo, isCgroup2)
}

// Root gives the directory that dir is, past links, whose inode is the root's id.
// The error is ErrNotMounted where it is no directory of cgroup2: ids looked for
// in it would be nobody's.
func Root(dir string) (string, error) {
	root, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return "", fmt.Errorf("find cgroup2: %w", err)
	}
	if info, err := os.Stat(root); err != nil || !info.IsDir() || !isCgroup2(root) {
		return "", fmt.Errorf("find cgroup2: %w: %s is no directory of it", ErrNotMounted, dir)
	}
	return root, nil
}

func isCgroup2(dir string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(dir, &fs) == nil && int64(fs.Type) == unix.CGROUP2_SUPER_MAGIC
}

func findRoot(sys string, mountinfo io.Reader, is func(dir string) bool) (string, error) {
	usual := []string{filepath.Join(sys, "fs/cgroup"), filepath.Join(sys, "fs/cgroup/unified")}
	for _, dir := range usual {
		if is(dir) {
			return dir, nil
		}
	}
	part := "" // a mount that shows a part of the tree
	lines := bufio.NewScanner(mountinfo)
	for lines.Scan() {
		below, at, ok := mountOfCgroup2(lines.Text())
		// What is mounted over a mount hides it.
		if !ok || !is(at) {
			continue
		}
		if below == "/" {
			return at, nil
		}
		if part == "" {
			part = at
		}
	}
	if part != "" {
		return part, nil
	}
	if err := lines.Err(); err != nil {
		return "", fmt.Errorf("find cgroup2: read mountinfo: %w", err)
	}
	return "", fmt.Errorf("find cgroup2: %w: neither %s nor any mount of this process is one", ErrNotMounted, strings.Join(usual, " nor "))
}

// mountOfCgroup2 reads a line of mountinfo: which directory of cgroup2 is
// mounted, and where. See proc_pid_mountinfo(5).
func mountOfCgroup2(line string) (below, at string, ok bool) {
	mount, fs, cut := strings.Cut(line, " - ")
	fields := strings.Fields(mount)
	if kind, _, _ := strings.Cut(fs, " "); !cut || kind != "cgroup2" || len(fields) < 5 {
		return "", "", false
	}
	return unescape.Replace(fields[3]), unescape.Replace(fields[4]), true
}

// unescape reverses what the kernel does to names in mountinfo.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
