package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/rest"

	"github.com/hearth-dev/hearth/units"
)

// Threshold is how little free space makes a kubelet evict pods: a share of
// the file system, or bytes. Zero is never.
type Threshold struct {
	Share float64 // 0.1 is 10 %
	Bytes units.Bytes
}

// of gives the threshold of a file system in bytes.
func (t Threshold) of(size units.Bytes) units.Bytes {
	return max(t.Bytes, units.Bytes(math.Ceil(t.Share*float64(size))))
}

// String gives "10 %" or "1.0 GiB".
func (t Threshold) String() string {
	if t.Share > 0 {
		return strconv.FormatFloat(t.Share*100, 'f', -1, 64) + " %"
	}
	return t.Bytes.Human()
}

// Thresholds are those of a kubelet's two file systems.
type Thresholds struct {
	NodeFS  Threshold // of its root directory
	ImageFS Threshold // of the container runtime
}

// DefaultThresholds are those of a kubelet that is told none.
var DefaultThresholds = Thresholds{NodeFS: Threshold{Share: 0.10}, ImageFS: Threshold{Share: 0.15}}

// Thresholds asks the kubelet, through the API server, for the thresholds it
// runs with. It needs the right to get nodes/proxy, which the agent's manifests
// do not give: without it the error says so, and DefaultThresholds are a fair guess.
func (c *Client) Thresholds(ctx context.Context) (Thresholds, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	client, ok := c.opts.Client.CoreV1().RESTClient().(*rest.RESTClient)
	if !ok || client == nil {
		return DefaultThresholds, errors.New("ask the kubelet for its configuration: this client has no connection of its own")
	}
	answer, err := client.Get().Resource("nodes").Name(c.opts.Node).SubResource("proxy", "configz").SetHeader("Accept", "application/json").DoRaw(ctx)
	if err != nil {
		return DefaultThresholds, fmt.Errorf("ask the kubelet for its configuration: %w", err)
	}
	return parseConfigz(answer)
}

func parseConfigz(text []byte) (Thresholds, error) {
	var said struct {
		Kubelet struct {
			Hard map[string]string `json:"evictionHard"`
			Soft map[string]string `json:"evictionSoft"`
		} `json:"kubeletconfig"`
	}
	if err := json.Unmarshal(text, &said); err != nil {
		return DefaultThresholds, fmt.Errorf("read the kubelet's configuration: %w", err)
	}
	hard, soft := said.Kubelet.Hard, said.Kubelet.Soft
	if hard == nil {
		return ParseThresholds(map[string]string{nodeFS: "10%", imageFS: "15%"}, soft)
	}
	return ParseThresholds(hard, soft)
}

// Signals of a kubelet's evictionHard and evictionSoft.
const (
	nodeFS  = "nodefs.available"
	imageFS = "imagefs.available"
)

// ParseThresholds reads a kubelet's evictionHard and evictionSoft: "10%" or
// "1Gi" by signal, of which others than those of file systems are left alone.
// The higher of two counts; a signal that is absent never evicts. With an error
// it gives DefaultThresholds.
func ParseThresholds(sets ...map[string]string) (Thresholds, error) {
	var found Thresholds
	for _, set := range sets {
		for signal, into := range map[string]*Threshold{nodeFS: &found.NodeFS, imageFS: &found.ImageFS} {
			t, err := parseThreshold(set[signal])
			if err != nil {
				return DefaultThresholds, fmt.Errorf("read eviction thresholds: %s: %w", signal, err)
			}
			into.Share, into.Bytes = max(into.Share, t.Share), max(into.Bytes, t.Bytes)
		}
	}
	return found, nil
}

// parseThreshold reads "10%" or "1Gi"; empty is never.
func parseThreshold(text string) (Threshold, error) {
	if text == "" {
		return Threshold{}, nil
	}
	if number, ok := strings.CutSuffix(text, "%"); ok {
		share, err := strconv.ParseFloat(number, 64)
		if err != nil || share < 0 || share > 100 {
			return Threshold{}, fmt.Errorf("threshold is %q", text)
		}
		return Threshold{Share: share / 100}, nil
	}
	quantity, err := resource.ParseQuantity(text)
	if err != nil {
		return Threshold{}, fmt.Errorf("threshold is %q", text)
	}
	return Threshold{Bytes: units.Bytes(quantity.Value())}, nil
}

// FileSystem is a mounted file system.
type FileSystem struct {
	Device uint64   // st_dev
	ID     [2]int32 // f_fsid; zero where it has none
	Size   units.Bytes
	Free   units.Bytes // to programs without privileges
}

// same reports whether two are one: the same device, or, where a file system
// has several (subvolumes), the same id.
func (f FileSystem) same(o FileSystem) bool {
	return f.Device == o.Device || f.ID == o.ID && f.ID != [2]int32{}
}

// FileSystemOf finds the file system of a path, or of its nearest folder that exists.
func FileSystemOf(path string) (FileSystem, error) {
	for {
		var stat unix.Stat_t
		err := unix.Stat(path, &stat)
		if errors.Is(err, fs.ErrNotExist) && path != filepath.Dir(path) {
			path = filepath.Dir(path)
			continue
		}
		var statfs unix.Statfs_t
		if err == nil {
			err = unix.Statfs(path, &statfs)
		}
		if err != nil {
			return FileSystem{}, fmt.Errorf("find file system of %s: %w", path, err)
		}
		return FileSystem{Device: stat.Dev, ID: statfs.Fsid.Val, Size: units.Bytes(statfs.Blocks) * units.Bytes(statfs.Bsize), Free: units.Bytes(statfs.Bavail) * units.Bytes(statfs.Bsize)}, nil
	}
}

// Store is a folder that takes bytes of its drive, and what bounds it.
type Store struct {
	Field string // of the configuration, "weights.dir"
	Dir   string
	// Reserve is never taken of the drive's free space, as ReserveField says; a
	// store that has no such field has neither.
	Reserve      units.Bytes
	ReserveField string
	// Takes is the most that the store may still take, as TakesField bounds it;
	// 0 is without bound.
	Takes      units.Bytes
	TakesField string
}

// leaves is how much free space there is on the drive after the store took all it may.
func (s Store) leaves(drive FileSystem) units.Bytes {
	if s.Takes == 0 {
		return s.Reserve
	}
	return max(s.Reserve, drive.Free-s.Takes)
}

// remedy says what to set so that at least least bytes stay free.
func (s Store) remedy(drive FileSystem, least units.Bytes) string {
	var ways []string
	if s.ReserveField != "" {
		// Whole GiB above it, for a person to type.
		ways = append(ways, fmt.Sprintf("set %s to at least %s (it is %s)", s.ReserveField, (least/units.GiB+1)*units.GiB, s.Reserve))
	}
	if room := (drive.Free - least) / units.GiB * units.GiB; s.ReserveField == "" && s.TakesField != "" && room > 0 {
		ways = append(ways, fmt.Sprintf("set %s to at most %s", s.TakesField, room))
	}
	return strings.Join(append(ways, "put it on a drive of its own"), ", or ")
}

// KubeletPaths are where a kubelet's file systems are seen.
type KubeletPaths struct {
	Root    string // on nodefs: its root directory
	Runtime string // on imagefs; empty tries the usual ones
}

// runtimePaths are on the file system of the container runtime: its root where
// the agent runs on the node itself, and in a pod a file that the runtime
// mounts from there.
var runtimePaths = []string{"/var/lib/containerd", "/var/lib/containers/storage", "/etc/hostname"}

func (p KubeletPaths) runtime() string {
	if p.Runtime != "" {
		return p.Runtime
	}
	for _, path := range runtimePaths[:len(runtimePaths)-1] {
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	if os.Getenv("KUBERNETES_SERVICE_HOST") != "" {
		return runtimePaths[len(runtimePaths)-1]
	}
	return ""
}

// CheckStore refuses a store that could fill a file system of the kubelet until
// it evicts pods: one on the kubelet's own or on the container runtime's file
// system that may leave no more free there than the threshold.
func CheckStore(s Store, paths KubeletPaths, t Thresholds) error {
	return checkStore(s, paths, t, FileSystemOf)
}

func checkStore(s Store, paths KubeletPaths, t Thresholds, find func(path string) (FileSystem, error)) error {
	own, err := find(s.Dir)
	if err != nil {
		return err
	}
	for _, of := range []struct {
		path, whose, name string
		threshold         Threshold
	}{
		{paths.Root, "the kubelet's", "nodefs", t.NodeFS},
		{paths.runtime(), "the container runtime's", "imagefs", t.ImageFS},
	} {
		if of.path == "" {
			continue
		}
		theirs, err := find(of.path)
		if err != nil {
			return err
		}
		least := of.threshold.of(own.Size)
		if !own.same(theirs) || least == 0 || s.leaves(own) > least {
			continue
		}
		return fmt.Errorf("use %s %s: it is on %s file system (%s, as %s is), where less than %s free of %s makes the kubelet evict pods; %s",
			s.Field, s.Dir, of.whose, of.name, of.path, of.threshold, own.Size.Human(), s.remedy(own, least))
	}
	return nil
}
