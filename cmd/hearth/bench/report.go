package bench

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Schema is the version of the JSON that a bench prints.
const Schema = "hearth.dev/bench/v1"

// Report is the outcome of one bench.
type Report struct {
	Schema  string  `json:"schema"`
	Bench   string  `json:"bench"`
	Commit  string  `json:"commit"`
	Machine Machine `json:"machine"`
	Rows    []Row   `json:"rows"`
}

// Machine says where the figures were taken.
type Machine struct {
	CPU         string `json:"cpu"`
	Cores       int    `json:"cores"`
	MemoryBytes int64  `json:"memoryBytes"`
	Kernel      string `json:"kernel"`
	Go          string `json:"go"`
	Disk        string `json:"disk"`
}

// Row is one measured figure beside what it is compared with.
type Row struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
	// Better is "higher" or "lower".
	Better string `json:"better"`
	// Pairs is the number of interleaved own/reference pairs, Spread the lowest and
	// highest own value among them; where the value is a mean of ratios, its 95 %
	// interval.
	Pairs      int         `json:"pairs"`
	Spread     [2]float64  `json:"spread"`
	References []Reference `json:"references"`
	// Ratio to the first reference, oriented so that more is better; where there is
	// no reference the aim is on the value and Ratio is 0.
	Ratio float64 `json:"ratio,omitempty"`
	Aim   float64 `json:"aim,omitempty"`
	Met   bool    `json:"met"`
	Note  string  `json:"note"`
}

// Reference is what a row is held against.
type Reference struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Ratio float64 `json:"ratio"`
}

const (
	higher = "higher"
	lower  = "lower"
)

// contender is something that a row is measured against in the same run.
type contender struct {
	name    string
	measure func() (float64, error)
}

// rounds measures own and the references in turn, n times, and fills a row with
// the medians and the medians of the rounds' ratios. The order moves on from round
// to round, so that a drift of the machine favours none.
func rounds(row Row, n int, own func() (float64, error), refs ...contender) (Row, error) {
	all := append([]contender{{"", own}}, refs...)
	values := make([][]float64, len(all))
	for round := range n {
		for i := range all {
			at := (i + round) % len(all)
			v, err := all[at].measure()
			if err != nil {
				return row, fmt.Errorf("measure %s %s: %w", row.Name, all[at].name, err)
			}
			values[at] = append(values[at], v)
		}
	}
	owns := values[0]
	row.Value, row.Pairs = median(owns), n
	row.Spread = [2]float64{slices.Min(owns), slices.Max(owns)}
	for i, ref := range refs {
		ratios := make([]float64, n)
		for round, own := range owns {
			ratios[round] = oriented(row.Better, own, values[i+1][round])
		}
		row.References = append(row.References, Reference{Name: ref.name, Value: median(values[i+1]), Ratio: median(ratios)})
	}
	row.Ratio = row.References[0].Ratio
	row.Met = row.Aim == 0 || row.Ratio >= row.Aim
	return row, nil
}

// alone measures a figure that has an absolute aim and no reference.
func alone(row Row, n int, own func() (float64, error)) (Row, error) {
	var owns []float64
	for range n {
		v, err := own()
		if err != nil {
			return row, fmt.Errorf("measure %s: %w", row.Name, err)
		}
		owns = append(owns, v)
	}
	row.Value, row.Pairs = median(owns), n
	row.Spread = [2]float64{slices.Min(owns), slices.Max(owns)}
	row.Met = row.Aim == 0 || (row.Better == lower && row.Value <= row.Aim) || (row.Better == higher && row.Value >= row.Aim)
	return row, nil
}

// onValue puts the aim of a paired row on its value instead of on the ratio, which
// stays with the reference.
func onValue(row Row, most float64) Row {
	row.Aim, row.Ratio, row.Met = most, 0, row.Value <= most
	return row
}

func oriented(better string, own, ref float64) float64 {
	if better == lower {
		own, ref = ref, own
	}
	if ref == 0 {
		return 0
	}
	return own / ref
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	if len(sorted) == 0 {
		return 0
	}
	if mid := len(sorted) / 2; len(sorted)%2 == 1 {
		return sorted[mid]
	}
	return (sorted[len(sorted)/2-1] + sorted[len(sorted)/2]) / 2
}

func thisMachine(dir string) Machine {
	m := Machine{Cores: runtime.NumCPU(), Go: runtime.Version(), CPU: "unknown", Kernel: "unknown", Disk: "unknown"}
	m.CPU = fieldOf("/proc/cpuinfo", "model name")
	if kib, err := strconv.ParseInt(strings.TrimSuffix(fieldOf("/proc/meminfo", "MemTotal"), " kB"), 10, 64); err == nil {
		m.MemoryBytes = kib << 10
	}
	var uts unix.Utsname
	if unix.Uname(&uts) == nil {
		m.Kernel = unix.ByteSliceToString(uts.Release[:])
	}
	var fs unix.Statfs_t
	if unix.Statfs(dir, &fs) == nil {
		m.Disk = fsName(int64(fs.Type))
	}
	return m
}

func fsName(magic int64) string {
	switch magic {
	case unix.EXT4_SUPER_MAGIC:
		return "ext4"
	case unix.XFS_SUPER_MAGIC:
		return "xfs"
	case unix.BTRFS_SUPER_MAGIC:
		return "btrfs"
	case unix.TMPFS_MAGIC:
		return "tmpfs"
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "overlay"
	}
	return fmt.Sprintf("file system 0x%x", magic)
}

// fieldOf returns the value of the first "key : value" line of a proc file.
func fieldOf(path, key string) string {
	f, err := os.Open(path)
	if err != nil {
		return "unknown"
	}
	defer func() { _ = f.Close() }()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if k, v, found := strings.Cut(lines.Text(), ":"); found && strings.TrimSpace(k) == key {
			return strings.TrimSpace(v)
		}
	}
	return "unknown"
}

// commit is the version control revision in the binary, or the one the caller
// knows (HEARTH_COMMIT), else "unknown".
func commit() string {
	if c := os.Getenv("HEARTH_COMMIT"); c != "" {
		return c
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				return s.Value
			}
		}
	}
	return "unknown"
}
