package nodeagent

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/units"
)

// kvCapacity is what a node has for KV, in bytes; 0 is not known.
type kvCapacity struct {
	memory, nvme units.Bytes
	memoryFrom   string // what bounds the memory, for people
}

// What is left to others of the memory: the kernel and the node's other programs,
// or the agent itself under a limit of its own.
const (
	nodeNeeds  = units.GiB
	agentNeeds = 256 * units.MiB
	needsPart  = 32 // and one in so many bytes
)

// capacityOf finds out what the node has for the KV space of a configuration.
func capacityOf(config Config) kvCapacity {
	if !config.KV.set() {
		return kvCapacity{}
	}
	c := memoryCapacity("/proc", "/sys/fs/cgroup")
	c.nvme = drivesCapacity(config)
	return c
}

// memoryCapacity is the memory of the node, or of the process's control group
// where that is less, without what others need.
func memoryCapacity(proc, cgroups string) kvCapacity {
	var c kvCapacity
	total := readMemTotal(filepath.Join(proc, "meminfo"))
	if total > 0 {
		c.memory, c.memoryFrom = max(1, total-nodeNeeds-total/needsPart), fmt.Sprintf("the node's memory, %s,", total.Human())
	}
	limit := readLimit(proc, cgroups)
	if limit == 0 || total > 0 && limit >= total {
		return c
	}
	if left := max(1, limit-agentNeeds-limit/needsPart); c.memory == 0 || left < c.memory {
		c.memory, c.memoryFrom = left, fmt.Sprintf("the process's memory limit, %s,", limit.Human())
	}
	return c
}

// readMemTotal gives 0 where the file does not say.
func readMemTotal(path string) units.Bytes {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "MemTotal:" {
			continue
		}
		kib, err := strconv.ParseInt(fields[1], 10, 64)
		if err != nil || kib < 0 || kib > 1<<50/1024 {
			return 0
		}
		return units.Bytes(kib) * units.KiB
	}
	return 0
}

// readLimit gives the least memory limit of the process's control group and those
// above it, 0 for none. A process in a namespace of its own sees its group as the
// root.
func readLimit(proc, cgroups string) units.Bytes {
	text, err := os.ReadFile(filepath.Join(proc, "self", "cgroup"))
	if err != nil {
		return 0
	}
	var least units.Bytes
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		root, file := cgroups, "memory.max"
		switch {
		case parts[0] == "0" && parts[1] == "": // version 2
		case strings.Contains(","+parts[1]+",", ",memory,"):
			root, file = filepath.Join(cgroups, "memory"), "memory.limit_in_bytes"
		default:
			continue
		}
		for dir := filepath.Clean("/" + parts[2]); ; dir = filepath.Dir(dir) {
			if n := readBytes(filepath.Join(root, dir, file)); n > 0 && (least == 0 || n < least) {
				least = n
			}
			if dir == "/" {
				break
			}
		}
	}
	return least
}

// readBytes gives the number in a file, 0 for none and for "max".
func readBytes(path string) units.Bytes {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64)
	if err != nil || n < 0 {
		return 0
	}
	return units.Bytes(n)
}

// drivesCapacity is the sum of the file systems that hold blocks, each once, less
// what the weights have of theirs; 0 where one cannot be asked.
func drivesCapacity(config Config) units.Bytes {
	sizes := map[uint64]units.Bytes{}
	for _, dir := range append([]string{config.KV.Dir}, config.KV.Drives...) {
		device, size, err := fileSystem(dir)
		if err != nil {
			return 0
		}
		sizes[device] = size
	}
	w := config.Weights
	if device, _, err := fileSystem(w.Dir); err == nil && config.runs(RoleData) {
		if size, shared := sizes[device]; shared {
			sizes[device] = max(1, size-w.Budget-w.KeepFree)
		}
	}
	var sum units.Bytes
	for _, size := range sizes {
		sum += size
	}
	return sum
}

// fileSystem gives the device and the size of the file system that a directory is
// on, or will be.
func fileSystem(dir string) (device uint64, size units.Bytes, err error) {
	for {
		var at syscall.Stat_t
		if err = syscall.Stat(dir, &at); err == nil {
			device = at.Dev
			break
		}
		if dir == filepath.Dir(dir) {
			return 0, 0, err
		}
		dir = filepath.Dir(dir)
	}
	var fs syscall.Statfs_t
	if err := syscall.Statfs(dir, &fs); err != nil {
		return 0, 0, err
	}
	return device, units.Bytes(fs.Blocks) * units.Bytes(fs.Bsize), nil
}

// within gives the configuration as far as the node has what it says, and texts
// for people on what it lacks. Left are bytes on the drives of tenants that nobody
// serves any more.
func (k KV) within(c kvCapacity, left units.Bytes) (KV, []string) {
	var problems []string
	if c.memory > 0 && k.Memory > c.memory {
		problems = append(problems, fmt.Sprintf("kv.memory is %s, and %s leaves %s: that is offered", k.Memory.Human(), c.memoryFrom, c.memory.Human()))
		k.Memory = c.memory
	}
	if c.nvme > 0 && k.NVMe > c.nvme {
		problems = append(problems, fmt.Sprintf("kv.nvme is %s, and the drives of kv.dir and kv.drives have %s for it: that is offered", k.NVMe.Human(), c.nvme.Human()))
		k.NVMe = c.nvme
	}
	memory, nvme := k.own()
	if memory > k.Memory || nvme > k.NVMe {
		problems = append(problems, fmt.Sprintf("kv.tenants have %s of memory and %s of NVMe, more than the node has for them: their blocks leave early, and claims get none",
			memory.Human(), nvme.Human()))
	}
	if left > 0 {
		problems = append(problems, fmt.Sprintf("tenants that nobody serves have %s on the drives, which claims are not offered: 'hearth kv stat' names them, 'hearth kv drop' ends them", left.Human()))
	}
	return k, problems
}

// claims is what claims may take: what tenants of the configuration leave, and
// those whose blocks nobody serves.
func (k KV) claims(left units.Bytes) kvtier.Budget {
	memory, nvme := k.own()
	return kvtier.Budget{
		Memory: max(0, k.Memory-memory), NVMe: max(0, k.NVMe-nvme-left), NamespaceMemory: k.NamespaceMemory, NamespaceNVMe: k.NamespaceNVMe,
	}
}
