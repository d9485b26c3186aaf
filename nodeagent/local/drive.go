package local

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/dradriver/stock"
)

// Tiers of a drive.
const (
	tierNVMe = "nvme"
	tierDisk = "disk"
	tierRAM  = "ram"
)

// maxBelow bounds how many block devices one is made of, in turn.
const maxBelow = 64

// driveOf tells what holds a directory, by the kernel's view of its devices
// below sysfs. What it does not show stays unknown.
func driveOf(dir, sysfs string) stock.Drive {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err == nil && (fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC) {
		return stock.Drive{Tier: tierRAM}
	}
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return stock.Drive{Tier: tierDisk}
	}
	return deviceFacts(sysfs, unix.Major(st.Dev), unix.Minor(st.Dev))
}

// deviceFacts tells what the block device of a number is made of: its drives,
// where it is a volume of several, and a fact only where all of them agree.
func deviceFacts(sysfs string, major, minor uint32) stock.Drive {
	facts := stock.Drive{Tier: tierDisk}
	dir, err := filepath.EvalSymlinks(filepath.Join(sysfs, "dev/block", fmt.Sprintf("%d:%d", major, minor)))
	if err != nil {
		return facts
	}
	drives := drivesBelow(dir, maxBelow)
	for i, d := range drives {
		one := driveFacts(sysfs, d)
		if i == 0 {
			facts = one
			continue
		}
		if one.Tier != facts.Tier {
			facts.Tier = tierDisk
		}
		if one.PCIRoot != facts.PCIRoot {
			facts.PCIRoot = ""
		}
		if one.NUMA == nil || facts.NUMA == nil || *one.NUMA != *facts.NUMA {
			facts.NUMA = nil
		}
	}
	return facts
}

// drivesBelow gives the directories of the drives that a block device is made
// of, at most most: itself, or what its volume or its NVMe subsystem has below.
func drivesBelow(dir string, most int) []string {
	if most <= 0 {
		return nil
	}
	var below []string
	if slaves, err := filepath.Glob(filepath.Join(dir, "slaves", "*")); err == nil {
		below = append(below, slaves...)
	}
	if strings.Contains(dir, "/nvme-subsystem/") {
		subsystem := dir
		for filepath.Base(filepath.Dir(subsystem)) != "nvme-subsystem" {
			subsystem = filepath.Dir(subsystem)
		}
		paths, _ := filepath.Glob(filepath.Join(subsystem, "nvme[0-9]*"))
		for _, p := range paths {
			if info, err := os.Lstat(p); err == nil && info.Mode().Type() == os.ModeSymlink {
				below = append(below, p) // a controller; namespaces are directories
			}
		}
	}
	if len(below) == 0 {
		return []string{dir}
	}
	slices.Sort(below)
	var drives []string
	for _, b := range below {
		if target, err := filepath.EvalSymlinks(b); err == nil {
			drives = append(drives, drivesBelow(target, most-len(drives)-1)...)
		}
	}
	return drives
}

// driveFacts reads one drive's facts from its place among the kernel's devices.
func driveFacts(sysfs, dir string) stock.Drive {
	facts := stock.Drive{Tier: tierDisk}
	root, err := filepath.EvalSymlinks(sysfs)
	if err != nil {
		return facts
	}
	rel, err := filepath.Rel(root, dir)
	if err != nil || strings.HasPrefix(rel, "..") {
		return facts
	}
	names := strings.Split(rel, string(filepath.Separator))
	for _, name := range names {
		if strings.HasPrefix(name, "pci") && strings.Contains(name, ":") && facts.PCIRoot == "" {
			facts.PCIRoot = name
		}
	}
	switch base := filepath.Base(dir); {
	case slices.ContainsFunc(names, func(n string) bool { return n == "nvme" || n == "nvme-subsystem" }):
		facts.Tier = tierNVMe
	case strings.HasPrefix(base, "ram") || strings.HasPrefix(base, "zram") || strings.HasPrefix(base, "pmem"):
		facts.Tier = tierRAM
	}
	for ; dir != root && len(dir) > len(root); dir = filepath.Dir(dir) {
		for _, file := range []string{"numa_node", "device/numa_node"} {
			text, err := os.ReadFile(filepath.Join(dir, file))
			node, convErr := strconv.Atoi(strings.TrimSpace(string(text)))
			if err == nil && convErr == nil && node >= 0 {
				facts.NUMA = &node
				return facts
			}
		}
	}
	return facts
}
