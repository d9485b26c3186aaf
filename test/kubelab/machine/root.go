package machine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// mountAll gives the machine its mounts. What it mounts is seen nowhere else,
// and goes with the machine.
func mountAll(spec Spec) error {
	if err := mount("", "/", "", syscall.MS_PRIVATE|syscall.MS_REC, ""); err != nil {
		return err
	}
	if !spec.PrivateRoot {
		return mount("proc", "/proc", "proc", syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC, "")
	}
	root := filepath.Join(spec.Dir, "root")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return fmt.Errorf("make root of machine: %w", err)
	}
	if err := mount(root, root, "", syscall.MS_BIND, ""); err != nil {
		return err
	}
	for _, build := range []func(string, Spec) error{system, devices, kernel, binds} {
		if err := build(root, spec); err != nil {
			return fmt.Errorf("make root of machine: %w", err)
		}
	}
	// The old root is put over the new one and taken off again, which needs no
	// directory to put it in.
	if err := os.Chdir(root); err != nil {
		return fmt.Errorf("enter root of machine: %w", err)
	}
	if err := syscall.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("enter root of machine: %w", err)
	}
	if err := syscall.Unmount(".", syscall.MNT_DETACH); err != nil {
		return fmt.Errorf("leave root of system: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return fmt.Errorf("enter root of machine: %w", err)
	}
	// As on any system with an init: a mount that a pod makes for its node
	// reaches the node and the node's other pods.
	return mount("", "/", "", syscall.MS_SHARED|syscall.MS_REC, "")
}

// system fills a root with the programs of this system, read-only, with copies
// of the few files of /etc that they need, and with directories to write in.
func system(root string, spec Spec) error {
	for _, name := range []string{"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"} {
		from, to := filepath.Join("/", name), filepath.Join(root, name)
		info, err := os.Lstat(from)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return err
		case info.Mode()&fs.ModeSymlink != 0:
			err = symlink(from, to)
		default:
			err = bindReadOnly(from, to)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for _, name := range []string{"etc", "home", "mnt", "opt/cni", "root", "run", "srv", "var/cache", "var/lib", "var/log", "dev", "proc", "sys"} {
		if err := os.MkdirAll(filepath.Join(root, name), 0o755); err != nil {
			return err
		}
	}
	for _, name := range []string{"tmp", "var/tmp"} {
		dir := filepath.Join(root, name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := os.Chmod(dir, 0o777|fs.ModeSticky); err != nil {
			return err
		}
	}
	// Relative where it can be, so that they also lead right from outside.
	for link, target := range map[string]string{"var/run": "../run", "var/lock": "../run/lock", "opt/cni/bin": "/usr/lib/cni"} {
		if err := os.Symlink(target, filepath.Join(root, link)); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	for _, name := range []string{"passwd", "group", "nsswitch.conf", "ld.so.cache", "ld.so.conf", "protocols", "services", "localtime"} {
		text, err := os.ReadFile(filepath.Join("/etc", name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(root, "etc", name), text, 0o644); err != nil {
			return err
		}
	}
	for _, name := range []string{"ssl", "alternatives", "ld.so.conf.d", "iproute2"} {
		if err := bindReadOnly(filepath.Join("/etc", name), filepath.Join(root, "etc", name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	hosts := "127.0.0.1 localhost\n127.0.1.1 " + spec.Name + "\n"
	if err := os.WriteFile(filepath.Join(root, "etc", "hosts"), []byte(hosts), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(root, "etc", "hostname"), []byte(spec.Name+"\n"), 0o644)
}

// devices gives a root a /dev with the devices that every system has and none
// of this machine's drives.
func devices(root string, _ Spec) error {
	dev := filepath.Join(root, "dev")
	if err := mount("devtmp", dev, "tmpfs", syscall.MS_NOSUID, "mode=755,size=16m"); err != nil {
		return err
	}
	for _, name := range []string{"null", "zero", "full", "random", "urandom", "tty", "kmsg", "fuse", "net/tun"} {
		var stat syscall.Stat_t
		if err := syscall.Stat(filepath.Join("/dev", name), &stat); err != nil {
			continue // this system lacks it, and so does the machine
		}
		file := filepath.Join(dev, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := syscall.Mknod(file, stat.Mode, int(stat.Rdev)); err != nil {
			return &os.PathError{Op: "mknod", Path: file, Err: err}
		}
		if err := os.Chmod(file, fs.FileMode(stat.Mode&0o777)); err != nil {
			return err
		}
	}
	for link, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx",
	} {
		if err := os.Symlink(target, filepath.Join(dev, link)); err != nil {
			return err
		}
	}
	for _, m := range []struct{ name, kind, data string }{
		{"pts", "devpts", "newinstance,ptmxmode=0666,mode=0620,gid=5"},
		{"shm", "tmpfs", "mode=1777"},
		{"mqueue", "mqueue", ""},
	} {
		to := filepath.Join(dev, m.name)
		if err := os.Mkdir(to, 0o755); err != nil {
			return err
		}
		if err := mount(m.kind, to, m.kind, syscall.MS_NOSUID|syscall.MS_NOEXEC, m.data); err != nil {
			return err
		}
	}
	return nil
}

// kernel mounts what the kernel shows: the machine's own processes and network,
// the cgroups of this system and the machine's own part of them, and a boot id as
// if the machine had booted.
func kernel(root string, spec Spec) error {
	const safe = syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC
	if err := mount("proc", filepath.Join(root, "proc"), "proc", safe, ""); err != nil {
		return err
	}
	if err := mount("sysfs", filepath.Join(root, "sys"), "sysfs", safe, ""); err != nil {
		return err
	}
	if err := mount("/sys/fs/cgroup", filepath.Join(root, "sys/fs/cgroup"), "", syscall.MS_BIND|syscall.MS_REC, ""); err != nil {
		return err
	}
	if err := mount("bpf", filepath.Join(root, "sys/fs/bpf"), "bpf", safe, "mode=700"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := mount("run", filepath.Join(root, "run"), "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, "mode=755"); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(root, "run/lock"), 0o755); err != nil {
		return err
	}
	if spec.Cgroup != "" {
		to := filepath.Join(root, CgroupAt)
		if err := os.MkdirAll(to, 0o755); err != nil {
			return err
		}
		if err := mount(spec.Cgroup, to, "", syscall.MS_BIND, ""); err != nil {
			return err
		}
	}
	file := filepath.Join(root, "etc/boot_id")
	if err := os.WriteFile(file, []byte(spec.BootID+"\n"), 0o444); err != nil {
		return err
	}
	return mount(file, filepath.Join(root, "proc/sys/kernel/random/boot_id"), "", syscall.MS_BIND, "")
}

func binds(root string, spec Spec) error {
	for _, b := range spec.Binds {
		if err := bindReadOnly(b.From, filepath.Join(root, b.To)); err != nil {
			return err
		}
	}
	return nil
}

// symlink makes to the same link as from.
func symlink(from, to string) error {
	target, err := os.Readlink(from)
	if err != nil {
		return err
	}
	if err := os.Symlink(target, to); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// bindReadOnly shows a file or directory at a second path, which it makes.
func bindReadOnly(from, to string) error {
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	if info.IsDir() {
		err = os.MkdirAll(to, 0o755)
	} else if err = os.MkdirAll(filepath.Dir(to), 0o755); err == nil {
		var file *os.File
		if file, err = os.OpenFile(to, os.O_CREATE|os.O_RDONLY, 0o644); err == nil {
			err = file.Close()
		}
	}
	if err != nil {
		return err
	}
	if err := mount(from, to, "", syscall.MS_BIND|syscall.MS_REC, ""); err != nil {
		return err
	}
	return mount("", to, "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY, "")
}

func mount(from, to, kind string, flags uintptr, data string) error {
	if err := syscall.Mount(from, to, kind, flags, data); err != nil {
		return &os.PathError{Op: "mount " + kind, Path: to, Err: err}
	}
	return nil
}
