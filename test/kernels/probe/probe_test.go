//go:build kernels

// Package probe says what the machine of test/kernels offers to the suites that
// run in it. A failure here is the machine's, not Hearth's.
package probe

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestTheMachineHasTheFileSystemsOfANode(t *testing.T) {
	t.Parallel()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s %s\n%s", unix.ByteSliceToString(name.Release[:]), unix.ByteSliceToString(name.Version[:]), mounts)
	if err := os.WriteFile(filepath.Join(t.ArtifactDir(), "mounts.txt"), mounts, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{" /proc proc ", " /sys sysfs ", " /sys/fs/cgroup cgroup2 ", " /sys/fs/bpf bpf ", " /tmp tmpfs ", " /dev devtmpfs "} {
		if !bytes.Contains(mounts, []byte(want)) {
			t.Errorf("no mount%s", want)
		}
	}
}

func TestTheKernelDescribesItsTypes(t *testing.T) {
	t.Parallel()
	info, err := os.Stat("/sys/kernel/btf/vmlinux")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes of BTF", info.Size())
}

func TestTheSuiteRunsAsRootInTheRootOfCgroup2(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Errorf("user %d", os.Getuid())
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	if strings.TrimSpace(string(own)) != "0::/" {
		t.Errorf("cgroups %q", own)
	}
	if err := os.Mkdir("/sys/fs/cgroup/probe", 0o755); err != nil {
		t.Error(err)
	}
}

func TestLoopbackCarriesBothProtocols(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		listener, err := net.Listen("tcp", address)
		if err != nil {
			t.Error(err)
			continue
		}
		defer listener.Close()
		conn, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			t.Error(err)
			continue
		}
		conn.Close()
	}
}

func TestNetworkNamespacesCanBeTied(t *testing.T) {
	t.Parallel()
	loaded, err := os.ReadFile("/proc/modules")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"veth", "sch_netem", "dummy"} {
		if !bytes.Contains(append([]byte("\n"), loaded...), []byte("\n"+name+" ")) {
			t.Errorf("module %s is not loaded", name)
		}
	}
}
