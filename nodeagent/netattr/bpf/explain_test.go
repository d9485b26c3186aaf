package bpf

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

// verifier is what the library gives for a program that the kernel refused.
func verifier(cause error) error {
	return fmt.Errorf("program walk: load program: %w", &ebpf.VerifierError{Cause: cause, Log: []string{"0: R1=ctx", "invalid access"}})
}

func TestARefusalIsToldByItsCause(t *testing.T) {
	t.Parallel()
	const (
		memlock   = "map create: %w (MEMLOCK may be too low, consider rlimit.RemoveMemlock)"
		none      = "Name:\thearth-agent\nCapEff:\t0000000000000000\n"
		bpfOnly   = "CapEff:\t0000008000000000\n"
		core      = "CapEff:\t000000c000000000\n"
		coreAdmin = "CapEff:\t000000c000001000\n"
		root      = "CapEff:\t000001ffffffffff\n"
		sysAdmin  = "CapEff:\t0000000000200000\n"
	)
	for name, one := range map[string]struct {
		err    error
		needs  []capability
		status string
		files  map[string]string
		want   string // beginning of the cause; empty: none is known
	}{
		"no types": {btf.ErrNotFound, loading, root, nil, "the kernel is too old or does not describe its types (BTF): Linux 5.15"},
		"no BTF":   {fmt.Errorf("load: %w", btf.ErrNotSupported), loading, root, nil, "the kernel is too old or does not describe its types (BTF): Linux 5.15"},
		"too old":  {fmt.Errorf("create: %w", ebpf.ErrNotSupported), loading, root, nil, "the kernel is too old or does not"},
		"too old for the verifier": {
			verifier(unix.EINVAL), loading, root,
			map[string]string{"/proc/sys/kernel/osrelease": "5.10.0-33-cloud-amd64\n"},
			"this kernel (5.10.0-33-cloud-amd64) is too old: Linux 5.15",
		},
		"a verifier that is new enough": {
			verifier(unix.EINVAL), loading, root, map[string]string{"/proc/sys/kernel/osrelease": "6.18.44-fc\n"}, "the kernel refused the program",
		},
		"a field that is not there": {
			verifier(errors.New("bad CO-RE relocation")), loading, root,
			map[string]string{"/proc/sys/kernel/osrelease": "7.2.1\n"},
			"the kernel's types lack a field",
		},
		"access refused by the verifier": {verifier(unix.EACCES), loading, none, nil, "the kernel refused the program"},
		"no capabilities":                {fmt.Errorf(memlock, unix.EPERM), loading, none, nil, "the agent lacks the capabilities BPF and PERFMON:"},
		"CAP_BPF alone":                  {fmt.Errorf(memlock, unix.EPERM), loading, bpfOnly, nil, "the agent lacks the capabilities PERFMON:"},
		"CAP_SYS_ADMIN instead": {
			fmt.Errorf(memlock, unix.EPERM), loading, sysAdmin, nil, "the kernel refuses it though the capabilities are there: a security module or",
		},
		"no NET_ADMIN to attach":   {unix.EPERM, attaching, core, nil, "the agent lacks the capabilities NET_ADMIN:"},
		"no NET_ADMIN to load":     {unix.EPERM, loading, core, nil, "the kernel refuses it though"},
		"SYS_ADMIN for NET_ADMIN":  {unix.EPERM, attaching, sysAdmin, nil, "the agent lacks the capabilities NET_ADMIN:"},
		"all that attaching takes": {unix.EPERM, attaching, coreAdmin, nil, "the kernel refuses it though"},
		"lockdown for secrets": {
			unix.EPERM, loading, root,
			map[string]string{"/sys/kernel/security/lockdown": "none integrity [confidentiality]\n"},
			"the kernel is locked down (lockdown=confidentiality)",
		},
		"lockdown for integrity": {
			unix.EACCES, loading, root,
			map[string]string{"/sys/kernel/security/lockdown": "none [integrity] confidentiality\n"},
			"the kernel refuses it; it is locked down (lockdown=integrity)",
		},
		"no lockdown":           {unix.EPERM, loading, root, map[string]string{"/sys/kernel/security/lockdown": "[none] integrity confidentiality\n"}, "the kernel refuses it though"},
		"no memory":             {unix.ENOMEM, loading, root, nil, "the kernel has no memory for it: see net.core.optmem_max"},
		"a status without caps": {unix.EPERM, loading, "Name:\tx\n", nil, "the kernel refuses it though"},
		"something else":        {os.ErrNotExist, loading, root, nil, ""},
		"explained already":     {refusal{why: "so it is", err: unix.EPERM}, loading, none, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := cause(one.err, one.needs, func(path string) string {
				if path == "/proc/self/status" {
					return one.status
				}
				return one.files[path]
			})
			if one.want == "" && got != "" || !strings.HasPrefix(got, one.want) {
				t.Errorf("cause %q, want %q", got, one.want)
			}
		})
	}
}

func TestARefusalIsOneLineWithoutAdviceAboutMemoryLimitsAndKeepsItsCause(t *testing.T) {
	t.Parallel()
	err := refusal{why: "so it is", err: fmt.Errorf("map create: %w (MEMLOCK may be too low, consider rlimit.RemoveMemlock)\nmore", unix.EPERM)}
	if got, want := err.Error(), "so it is (map create: operation not permitted)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if !errors.Is(err, unix.EPERM) {
		t.Error("what the kernel said is lost")
	}
	if explain(nil) != nil {
		t.Error("explained success")
	}
	if other := errors.New("other"); !errors.Is(explain(other), other) {
		t.Error("an error without a known cause is lost")
	}
}
