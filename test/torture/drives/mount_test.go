//go:build root

package drives

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// volume is a small file system in a file, mounted for one test.
type volume struct {
	t   *testing.T
	dir string // where it is mounted
}

// mounted makes and mounts an ext4 of so many MiB, with options of mkfs.ext4.
func mounted(t *testing.T, mib string, mkfs ...string) *volume {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("these tests mount file systems: run them as root")
	}
	base, err := os.MkdirTemp("", "drives-") //nolint:usetesting // short enough for a socket's path, and unmounted before it goes
	if err != nil {
		t.Fatal(err)
	}
	v := &volume{t: t, dir: filepath.Join(base, "mount")}
	v.must("truncate", "-s", mib+"M", v.image())
	v.must("mkfs.ext4", append([]string{"-q", "-m", "0", "-e", "remount-ro", v.image()}, mkfs...)...)
	if err := os.Mkdir(v.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	v.must("mount", "-o", "loop", v.image(), v.dir)
	t.Cleanup(func() {
		// A lazy unmount always works; what is still open goes with its process.
		_ = exec.Command("umount", "-l", v.dir).Run()
		_ = os.RemoveAll(base)
	})
	return v
}

// must runs a program of the system.
func (v *volume) must(name string, args ...string) {
	v.t.Helper()
	if out, err := exec.CommandContext(v.t.Context(), name, args...).CombinedOutput(); err != nil {
		v.t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
}

// freeze turns the file system read-only as the kernel does when a drive
// reports errors: a remount by hand is refused while files are open for writing.
func (v *volume) freeze() {
	v.t.Helper()
	v.must("sh", "-c", `echo 1 > "/sys/fs/ext4/$(basename "$(findmnt -n -o SOURCE "$0")")/trigger_fs_error"`, v.dir)
}

// back mounts the file system again, mended where that is due.
func (v *volume) back() {
	v.t.Helper()
	// It ends with 1 where it mended something.
	v.must("sh", "-c", `e2fsck -fy "$0" || [ $? -eq 1 ]`, v.image())
	v.must("mount", "-o", "loop", v.image(), v.dir)
}

// gone takes the file system away; files that are open stay usable.
func (v *volume) gone() {
	v.t.Helper()
	v.must("umount", "-l", v.dir)
}

func (v *volume) image() string { return filepath.Join(filepath.Dir(v.dir), "image") }
