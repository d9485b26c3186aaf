package bpf

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

// explain gives a refusal its cause, as far as the system tells, in place of the
// advice about memory limits that the library adds to each.
func explain(err error) error { return explainOf(err, loading) }

// explainOf does so for what needs these capabilities.
func explainOf(err error, needs []capability) error {
	if err == nil {
		return nil
	}
	if why := cause(err, needs, readFile); why != "" {
		return refusal{why: why, err: err}
	}
	return err
}

// refusal is an error with a cause in front.
type refusal struct {
	why string
	err error
}

// Error gives the cause and what the kernel said, in one line.
func (r refusal) Error() string {
	text, _, _ := strings.Cut(r.err.Error(), "\n")
	return fmt.Sprintf("%s (%s)", r.why, strings.Replace(text, " (MEMLOCK may be too low, consider rlimit.RemoveMemlock)", "", 1))
}

// Unwrap gives what the kernel said.
func (r refusal) Unwrap() error { return r.err }

func readFile(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return string(text)
}

// capability is one of capabilities(7).
type capability struct {
	name string
	bit  uint
	// instead is another that does as well.
	instead uint
}

// What loading takes, and what attaching to a cgroup takes besides.
var (
	loading   = []capability{{"BPF", unix.CAP_BPF, unix.CAP_SYS_ADMIN}, {"PERFMON", unix.CAP_PERFMON, unix.CAP_SYS_ADMIN}}
	attaching = append(slices.Clip(loading), capability{"NET_ADMIN", unix.CAP_NET_ADMIN, unix.CAP_NET_ADMIN})
)

func cause(err error, needs []capability, read func(path string) string) string {
	switch {
	case errors.As(err, new(refusal)):
		return ""
	case errors.Is(err, btf.ErrNotFound), errors.Is(err, btf.ErrNoExtendedInfo), errors.Is(err, ebpf.ErrNotSupported):
		return "the kernel is too old or does not describe its types (BTF): Linux 5.15 or newer with CONFIG_DEBUG_INFO_BTF is wanted"
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		if _, verified := errors.AsType[*ebpf.VerifierError](err); verified {
			return refused(err, read)
		}
		return forbidden(needs, read)
	case errors.Is(err, unix.ENOMEM):
		return "the kernel has no memory for it: see net.core.optmem_max where sockets are marked"
	}
	if _, verified := errors.AsType[*ebpf.VerifierError](err); verified {
		return refused(err, read)
	}
	return ""
}

// refused says why the verifier may not have taken a program.
func refused(err error, read func(path string) string) string {
	release := strings.TrimSpace(read("/proc/sys/kernel/osrelease"))
	var major, minor int
	if n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor); n == 2 && (major < 5 || major == 5 && minor < 15) {
		return fmt.Sprintf("this kernel (%s) is too old: Linux 5.15 or newer is wanted", release)
	}
	if strings.Contains(err.Error(), "bad CO-RE relocation") {
		return "the kernel's types lack a field that the program reads"
	}
	return "the kernel refused the program"
}

// forbidden says what is missing for a call that was refused with EPERM.
func forbidden(needs []capability, read func(path string) string) string {
	missing := []string{}
	if have, ok := effective(read("/proc/self/status")); ok {
		for _, c := range needs {
			if have&(1<<c.bit|1<<c.instead) == 0 {
				missing = append(missing, c.name)
			}
		}
	}
	switch {
	case len(missing) > 0:
		return "the agent lacks the capabilities " + strings.Join(missing, " and ") + ": add them to its container's securityContext, or its unit's AmbientCapabilities"
	case strings.Contains(read("/sys/kernel/security/lockdown"), "[confidentiality]"):
		return "the kernel is locked down (lockdown=confidentiality)"
	case strings.Contains(read("/sys/kernel/security/lockdown"), "[integrity]"):
		return "the kernel refuses it; it is locked down (lockdown=integrity), and a security module may be in the way"
	}
	return "the kernel refuses it though the capabilities are there: a security module or the container's seccomp profile is in the way"
}

// effective reads CapEff of a process's status.
func effective(status string) (caps uint64, ok bool) {
	for line := range strings.Lines(status) {
		if text, found := strings.CutPrefix(line, "CapEff:"); found {
			caps, err := strconv.ParseUint(strings.TrimSpace(text), 16, 64)
			return caps, err == nil
		}
	}
	return 0, false
}
