package nodeagent

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/hearth-dev/hearth/dradriver/ledger"
)

// maxDriverMounts bounds what one driver root may bring.
const maxDriverMounts = 256

// What of a GPU driver a container needs: its libraries, by the names they are
// loaded under, and the programs that people expect beside them.
var (
	driverLibraryDirs = []string{"usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib"}
	driverLibraries   = []string{"libcuda.so*", "libcudadebugger.so*", "libnvcuvid.so*", "libnvidia-*.so*", "libnvoptix.so*", "libnvsdm.so*"}
	driverPrograms    = []string{"nvidia-smi", "nvidia-debugdump", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"}
)

// driverMounts lists the files of a GPU driver below its root, each to be
// mounted read-only at its own place: the container's loader looks there. A
// link is mounted as the file it leads to. Empty is a driver that comes with
// the container, and gives none.
func driverMounts(root string) ([]ledger.Mount, error) {
	if root == "" {
		return nil, nil
	}
	var list []ledger.Mount
	add := func(path string) error {
		host, err := filepath.EvalSymlinks(path)
		if err != nil {
			return fmt.Errorf("read kubernetes.driverRoot: %w", err)
		}
		inside, err := filepath.Rel(root, host)
		if err != nil || strings.HasPrefix(inside, "..") {
			return fmt.Errorf("read kubernetes.driverRoot: %s leads out of it, to %s", path, host)
		}
		info, err := os.Stat(host)
		if err != nil {
			return fmt.Errorf("read kubernetes.driverRoot: %w", err)
		}
		if !info.Mode().IsRegular() {
			return nil // a folder that is named like one
		}
		list = append(list, ledger.Mount{
			Host: host, Container: "/" + strings.TrimPrefix(strings.TrimPrefix(path, root), "/"), Options: []string{"ro", "nosuid", "nodev", "rbind"},
		})
		return nil
	}
	for _, dir := range driverLibraryDirs {
		for _, pattern := range driverLibraries {
			found, err := fs.Glob(os.DirFS(root), filepath.Join(dir, pattern))
			if err != nil {
				return nil, fmt.Errorf("read kubernetes.driverRoot: %w", err)
			}
			for _, name := range found {
				if err := add(filepath.Join(root, name)); err != nil {
					return nil, err
				}
			}
		}
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("read kubernetes.driverRoot: %s has no libcuda.so below %s", root, strings.Join(driverLibraryDirs, ", "))
	}
	for _, name := range driverPrograms {
		if path := filepath.Join(root, "usr/bin", name); exists(path) {
			if err := add(path); err != nil {
				return nil, err
			}
		}
	}
	if len(list) > maxDriverMounts {
		return nil, fmt.Errorf("read kubernetes.driverRoot: %s has %d files of a driver, want at most %d", root, len(list), maxDriverMounts)
	}
	slices.SortFunc(list, func(a, b ledger.Mount) int { return strings.Compare(a.Container, b.Container) })
	return list, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
