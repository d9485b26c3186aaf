package bpf

import (
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// TestProgramsCallNothingThatALockedKernelRefuses holds the committed object to
// the helpers that are allowed under lockdown=confidentiality and with BPF and
// PERFMON alone: what is read is read through BTF pointers.
func TestProgramsCallNothingThatALockedKernelRefuses(t *testing.T) {
	t.Parallel()
	spec, err := loadNetattr()
	if err != nil {
		t.Fatal(err)
	}
	allowed := []asm.BuiltinFunc{
		asm.FnMapLookupElem, asm.FnMapUpdateElem, asm.FnMapDeleteElem, asm.FnSkbLoadBytes, asm.FnSkbCgroupId, asm.FnSkStorageGet, asm.FnSeqWrite,
		asm.FnSkcToTcpSock, asm.FnSockFromFile, asm.FnKtimeGetNs,
	}
	for name, program := range spec.Programs {
		calls := 0
		for _, i := range program.Instructions {
			if !i.IsBuiltinCall() {
				continue
			}
			calls++
			if f := asm.BuiltinFunc(i.Constant); !slices.Contains(allowed, f) {
				t.Errorf("program %s calls %v", name, f)
			}
		}
		// 4,096 is what a verifier of any version reads of a program.
		if n := len(program.Instructions); calls == 0 || n >= 4096 {
			t.Errorf("program %s has %d calls and %d instructions", name, calls, n)
		}
	}
}

func TestOnlyDatagramsAreOnThePathOfPackets(t *testing.T) {
	t.Parallel()
	spec, err := loadNetattr()
	if err != nil {
		t.Fatal(err)
	}
	var packets []string
	for name, program := range spec.Programs {
		if program.Type != ebpf.Tracing {
			packets = append(packets, name)
		}
	}
	slices.Sort(packets)
	if want := []string{netattrProgDatagramIn, netattrProgDatagramOut}; !slices.Equal(packets, want) {
		t.Errorf("programs %v are no tracing programs, want %v", packets, want)
	}
}
