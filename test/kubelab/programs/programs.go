// Package programs builds the programs that a lab runs, from Go modules at the
// versions of the go.mod files beside it: Kubernetes and etcd in one program,
// containerd with its shim and client, runc, and the image of the process that
// holds a pod's namespaces open.
//
// It owns the directory of built programs in the user's cache: one folder for
// each set of sources, complete or absent. The lab and the command line call
// it. It starts none of the programs it builds.
package programs

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"
)

// PauseImage is the name of the image that PackPause makes.
const PauseImage = "hearth.dev/pause:lab"

// Programs is a complete folder of built programs.
type Programs struct{ Dir string }

// Path gives the absolute path of a program: kubernetes, containerd,
// containerd-shim-runc-v2, ctr, runc or pause.
func (p Programs) Path(name string) string { return filepath.Join(p.Dir, name) }

// PackPause writes the image PauseImage, whose process holds a pod's namespaces
// open, as an archive.
func (p Programs) PackPause(ctx context.Context, source, archive string) error {
	script := filepath.Join(source, "..", "..", "scripts", "image")
	output, err := exec.CommandContext(ctx, script, "--user", "65535", PauseImage, archive, p.Path("pause")).CombinedOutput()
	if err != nil {
		return fmt.Errorf("pack image of pause: %w: %s", err, output)
	}
	return nil
}

// Source finds the folder test/kubelab of the checkout that the working
// directory is in.
func Source() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find sources of the lab: %w", err)
	}
	for at := dir; ; at = filepath.Dir(at) {
		for _, candidate := range []string{at, filepath.Join(at, "test", "kubelab")} {
			if _, err := os.Stat(filepath.Join(candidate, "programs", "kubernetes", "go.mod")); err == nil {
				return candidate, nil
			}
		}
		if at == filepath.Dir(at) {
			return "", fmt.Errorf("find sources of the lab: %s is in no checkout of Hearth", dir)
		}
	}
}

// Cache is the directory of everything the lab keeps: KUBELAB_CACHE, or
// hearth/kubelab in the user's cache directory.
func Cache() (string, error) {
	if dir := os.Getenv("KUBELAB_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find cache of the lab: %w", err)
	}
	return filepath.Join(dir, "hearth", "kubelab"), nil
}

// Build gives the programs for the sources in source, the folder test/kubelab:
// those in the cache, or new ones, whose progress is written to log. Two builds
// at a time are one, and one that is killed leaves nothing that is taken for
// complete. What Debian packages have to provide is installed first.
func Build(ctx context.Context, source, cache string, log io.Writer) (Programs, error) {
	if err := system(ctx, log); err != nil {
		return Programs{}, err
	}
	key, err := key(ctx, source)
	if err != nil {
		return Programs{}, err
	}
	built := Programs{Dir: filepath.Join(cache, "programs", key)}
	if _, err := os.Stat(built.Dir); err == nil {
		return built, nil
	}
	if err := os.MkdirAll(filepath.Dir(built.Dir), 0o755); err != nil {
		return Programs{}, fmt.Errorf("make cache of programs: %w", err)
	}
	unlock, err := lock(ctx, filepath.Join(cache, "programs", "lock"))
	if err != nil {
		return Programs{}, err
	}
	defer unlock()
	if _, err := os.Stat(built.Dir); err == nil {
		return built, nil
	}
	unfinished := filepath.Join(cache, "programs", "unfinished")
	if err := os.RemoveAll(unfinished); err != nil {
		return Programs{}, fmt.Errorf("clear unfinished programs: %w", err)
	}
	if err := os.Mkdir(unfinished, 0o755); err != nil {
		return Programs{}, fmt.Errorf("make cache of programs: %w", err)
	}
	if err := buildAll(ctx, source, unfinished, log); err != nil {
		return Programs{}, err
	}
	if err := publish(unfinished, built.Dir); err != nil {
		return Programs{}, fmt.Errorf("publish programs: %w", err)
	}
	return built, nil
}

// publish renames a folder once all that is in it is on the drive.
func publish(unfinished, final string) error {
	entries, err := os.ReadDir(unfinished)
	if err != nil {
		return err
	}
	paths := []string{unfinished}
	for _, entry := range entries {
		paths = append(paths, filepath.Join(unfinished, entry.Name()))
	}
	for _, path := range paths {
		if err := syncFile(path); err != nil {
			return err
		}
	}
	if err := os.Rename(unfinished, final); err != nil {
		return err
	}
	return syncFile(filepath.Dir(final))
}

func syncFile(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(file.Sync(), file.Close())
}

// lock takes a file's lock, which also a killed process gives back.
func lock(ctx context.Context, path string) (unlock func(), err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock cache of programs: %w", err)
	}
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { file.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			file.Close()
			return nil, fmt.Errorf("lock cache of programs: %w", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			file.Close()
			return nil, fmt.Errorf("lock cache of programs: %w", context.Cause(ctx))
		}
	}
}

// key names what a build is made of: the versions, to be read, and a hash over
// all that the result depends on.
func key(ctx context.Context, source string) (string, error) {
	compiler, err := exec.CommandContext(ctx, "go", "version").Output()
	if err != nil {
		return "", fmt.Errorf("ask go for its version: %w", err)
	}
	all, err := targets(source)
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	fmt.Fprintf(sum, "%s%+v\n", compiler, all)
	for _, name := range []string{
		"programs/kubernetes/go.mod", "programs/kubernetes/go.sum", "programs/kubernetes/main.go",
		"programs/containerd/go.mod", "programs/containerd/go.sum", "programs/runc/go.mod", "programs/runc/go.sum",
		"pause/main.go",
	} {
		text, err := os.ReadFile(filepath.Join(source, name))
		if err != nil {
			return "", fmt.Errorf("read sources of the lab: %w", err)
		}
		fmt.Fprintf(sum, "%s %d\n", name, len(text))
		sum.Write(text)
	}
	var versions []string
	for _, of := range []struct{ folder, module, short string }{
		{"kubernetes", "k8s.io/kubernetes", "kubernetes"},
		{"containerd", "github.com/containerd/containerd/v2", "containerd"},
		{"runc", "github.com/opencontainers/runc", "runc"},
	} {
		version, err := version(source, of.folder, of.module)
		if err != nil {
			return "", err
		}
		versions = append(versions, of.short+"-"+strings.TrimPrefix(version, "v"))
	}
	return strings.Join(versions, "_") + "_" + hex.EncodeToString(sum.Sum(nil))[:12], nil
}

// version reads the version of a module that a folder's go.mod requires.
func version(source, folder, module string) (string, error) {
	text, err := os.ReadFile(filepath.Join(source, "programs", folder, "go.mod"))
	if err != nil {
		return "", fmt.Errorf("read sources of the lab: %w", err)
	}
	match := regexp.MustCompile(`(?m)^(?:require)?\s+` + regexp.QuoteMeta(module) + ` (v\S+)`).FindSubmatch(text)
	if match == nil {
		return "", fmt.Errorf("read version of %s: programs/%s/go.mod does not require it", module, folder)
	}
	return string(match[1]), nil
}
