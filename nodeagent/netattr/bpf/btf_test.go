//go:build root

package bpf

import (
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestAKernelWithoutBTFIsNamedAsTheCause(t *testing.T) {
	t.Parallel()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread and its view end here
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
				return err
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return err
			}
			if err := unix.Mount("none", "/sys/kernel/btf", "tmpfs", 0, ""); err != nil {
				return err
			}
			p, err := Open(Options{})
			if err == nil {
				_ = p.Close()
			}
			return err
		}()
	}()
	err := <-done
	if err == nil || !strings.Contains(err.Error(), "BTF") || !strings.Contains(err.Error(), "5.15") {
		t.Errorf("the error is %v, want one that names BTF and the kernel to have", err)
	}
}
