package programs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// target is one run of go build.
type target struct {
	folder string // below test/kubelab
	output string
	pkg    string
	tags   string
	flags  string // for the linker
	cgo    bool
}

// targets gives what is built, in order: what fails soonest comes first.
func targets(source string) ([]target, error) {
	kubernetes, err := version(source, "kubernetes", "k8s.io/kubernetes")
	if err != nil {
		return nil, err
	}
	containerd, err := version(source, "containerd", "github.com/containerd/containerd/v2")
	if err != nil {
		return nil, err
	}
	const (
		kubernetesVersion = "k8s.io/component-base/version"
		containerdModule  = "github.com/containerd/containerd/v2"
	)
	number := strings.Split(strings.TrimPrefix(kubernetes, "v"), ".")
	if len(number) < 2 {
		return nil, fmt.Errorf("read version of Kubernetes: %q has no minor", kubernetes)
	}
	stamp := fmt.Sprintf("-X %[1]s.gitVersion=%[2]s -X %[1]s.gitMajor=%[3]s -X %[1]s.gitMinor=%[4]s", kubernetesVersion, kubernetes, number[0], number[1])
	all := []target{
		{folder: "pause", output: "pause", pkg: "."},
		{folder: "programs/runc", output: "runc", pkg: "github.com/opencontainers/runc", tags: "seccomp", cgo: true},
	}
	for _, name := range []string{"containerd", "containerd-shim-runc-v2", "ctr"} {
		all = append(all, target{
			folder: "programs/containerd", output: name, pkg: containerdModule + "/cmd/" + name,
			tags: "no_btrfs no_devmapper no_zfs", flags: "-X " + containerdModule + "/version.Version=" + containerd,
		})
	}
	return append(all, target{folder: "programs/kubernetes", output: "kubernetes", pkg: ".", flags: stamp}), nil
}

// buildAll builds every program into dir.
func buildAll(ctx context.Context, source, dir string, log io.Writer) error {
	all, err := targets(source)
	if err != nil {
		return err
	}
	for _, t := range all {
		began := time.Now()
		fmt.Fprintf(log, "building %s\n", t.output)
		if err := again(ctx, log, func() error {
			return run(ctx, log, filepath.Join(source, t.folder), nil, "go", "mod", "download")
		}); err != nil {
			return fmt.Errorf("download modules of %s: %w", t.output, err)
		}
		cgo := "CGO_ENABLED=0"
		if t.cgo {
			cgo = "CGO_ENABLED=1"
		}
		// No -trimpath: what these programs and Hearth have in common is compiled once.
		err := run(ctx, log, filepath.Join(source, t.folder), []string{cgo, "GOWORK=off"},
			"go", "build", "-mod=readonly", "-buildvcs=false", "-tags", t.tags, "-ldflags", "-s -w "+t.flags, "-o", filepath.Join(dir, t.output), t.pkg)
		if err != nil {
			return fmt.Errorf("build %s: %w", t.output, err)
		}
		fmt.Fprintf(log, "built %s in %s\n", t.output, time.Since(began).Round(time.Second))
	}
	return nil
}

// system installs what the programs need of the system and Go does not build,
// where it is missing: the seccomp library for runc, the network plugins, and
// nft for kube-proxy.
func system(ctx context.Context, log io.Writer) error {
	var missing []string
	for _, need := range []struct {
		debian string
		has    func() bool
	}{
		{"gcc", inPath("gcc")},
		{"libc6-dev", exists("/usr/include/stdlib.h")},
		{"pkg-config", inPath("pkg-config")},
		{"libseccomp-dev", func() bool { return exec.CommandContext(ctx, "pkg-config", "--exists", "libseccomp").Run() == nil }},
		{"containernetworking-plugins", exists("/usr/lib/cni/bridge")},
		{"nftables", inPath("nft")},
		{"iproute2", inPath("ip")},
		{"util-linux", inPath("nsenter")},
	} {
		if !need.has() {
			missing = append(missing, need.debian)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	list := strings.Join(missing, " ")
	if _, err := exec.LookPath("apt-get"); err != nil || os.Geteuid() != 0 {
		return fmt.Errorf("install packages: the lab lacks %s (Debian's names); install them, or run as root where apt-get is", list)
	}
	fmt.Fprintf(log, "installing %s\n", list)
	err := again(ctx, log, func() error {
		env := []string{"DEBIAN_FRONTEND=noninteractive"}
		if err := run(ctx, log, "/", env, "apt-get", "-qq", "update"); err != nil {
			return err
		}
		return run(ctx, log, "/", env, "apt-get", append([]string{"-qq", "install", "-y", "--no-install-recommends"}, missing...)...)
	})
	if err != nil {
		return fmt.Errorf("install packages: cannot get %s: %w", list, err)
	}
	return nil
}

func inPath(program string) func() bool {
	return func() bool {
		_, err := exec.LookPath(program)
		return err == nil
	}
}

func exists(path string) func() bool {
	return func() bool {
		_, err := os.Stat(path)
		return err == nil
	}
}

// again tries up to three times, with a pause.
func again(ctx context.Context, log io.Writer, do func() error) error {
	const tries = 3
	for try := 1; ; try++ {
		err := do()
		if err == nil || try == tries || ctx.Err() != nil {
			return err
		}
		fmt.Fprintf(log, "try %d of %d failed: %v\n", try, tries, err)
		pause := time.NewTimer(time.Duration(try) * 5 * time.Second)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return errors.Join(err, context.Cause(ctx))
		}
	}
}

// run runs a program with its output in log; ctx kills it with its children.
func run(ctx context.Context, log io.Writer, dir string, env []string, program string, args ...string) error {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("run %s %s: %w", program, strings.Join(args, " "), err)
	}
	return nil
}
