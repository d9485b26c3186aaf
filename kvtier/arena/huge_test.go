package arena

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// ofHugePages is how many bytes of huge pages the kernel has mapped where p is.
func ofHugePages(t *testing.T, p []byte) (bytes int64) {
	t.Helper()
	for _, line := range smapsOf(t, p, "ShmemPmdMapped:") {
		var kib int64
		if n, _ := fmt.Sscanf(line, "ShmemPmdMapped: %d kB", &kib); n == 1 {
			bytes += kib << 10
		}
	}
	return bytes
}

// smapsOf gives the lines that begin so, of what the kernel tells of the mapping of p.
func smapsOf(t *testing.T, p []byte, prefix string) (lines []string) {
	t.Helper()
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	at, in := uint64(reflect.ValueOf(p).Pointer()), false
	for line := range strings.Lines(string(smaps)) {
		var from, to uint64
		if n, _ := fmt.Sscanf(line, "%x-%x ", &from, &to); n == 2 {
			in = from <= at && at < to
		} else if in && strings.HasPrefix(line, prefix) {
			lines = append(lines, line)
		}
	}
	return lines
}

func TestSlotsHaveHugePagesWhereTheKernelMakesThemOnRequest(t *testing.T) {
	t.Parallel()
	a, err := New(Options{Capacity: 64 * mib, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	if can := enlarges() && !grantsHugePages(hugePageSettings); can != (a.enlarge != nil) {
		t.Fatalf("the kernel makes huge pages on request: %v, and is asked: %v", can, a.enlarge != nil)
	}
	var slots []Slot
	var bytes int64
	for id := range uint64(8) {
		slot := alloc(t, a, 4*mib)
		fill(a.Bytes(slot, 4*mib), id)
		bytes = max(bytes, ofHugePages(t, a.Bytes(slot, 4*mib)))
		slots = append(slots, slot)
	}
	resident(t, a)
	for id, slot := range slots {
		if !isFilled(a.Bytes(slot, 4*mib), uint64(id)) {
			t.Errorf("block %d was changed", id)
		}
		a.Free(slot)
	}
	if a.enlarge != nil && bytes == 0 && enlarges() { // and has some still
		t.Error("the kernel makes huge pages on request, and no slot has one")
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}

func TestMappingsOfHugePagesBeginAtOne(t *testing.T) {
	t.Parallel()
	m, err := newMemory(1)
	if err != nil {
		t.Fatal(err)
	}
	var wholes [][]byte
	for i := range int64(16) {
		off := regionOf(0) + i*minStep
		p, whole, err := m.mapped(off, minStep, true)
		if err != nil {
			t.Fatal(err)
		}
		wholes = append(wholes, whole)
		if before(p) != 0 || len(p) != minStep || cap(p) != minStep {
			t.Errorf("mapping %d begins %d bytes before a huge page and has %d of %d bytes", i, before(p), len(p), cap(p))
		}
		p[0], p[len(p)-1] = byte(i+1), byte(i+101)
	}
	// Each begins in the file where it was asked for.
	plain, whole, err := m.mapped(regionOf(0), 16*minStep, false)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 16 {
		if first, last := plain[i*minStep], plain[(i+1)*minStep-1]; first != byte(i+1) || last != byte(i+101) {
			t.Errorf("mapping %d: the file has %d and %d at its ends", i, first, last)
		}
	}
	for _, p := range append(wholes, whole) {
		err = errors.Join(err, unmap(p))
	}
	if err := errors.Join(err, m.close()); err != nil {
		t.Error(err)
	}
}

// TestMemoryIsAskedToBeEnlargedOnceWhileNobodyHasIt holds that huge pages are asked
// for where a slot has no memory so far, and for no byte that it has.
func TestMemoryIsAskedToBeEnlargedOnceWhileNobodyHasIt(t *testing.T) {
	t.Parallel()
	a := openWith(t, 64*mib, 4096, true)
	var asked []int
	yes := true
	a.enlarge = func(p []byte) bool {
		asked = append(asked, len(p)/hugePage)
		return yes
	}
	take := func(n int) { a.Free(alloc(t, a, n)) }
	take(4 * mib)
	take(4 * mib) // the same memory
	take(3 * mib) // plain pages
	take(8 * mib)
	take(6 * mib) // the same, less of it
	take(8 * mib) // what was given back
	if want := []int{2, 4, 1}; !slices.Equal(asked, want) {
		t.Errorf("asked for %v huge pages, want %v", asked, want)
	}
	// Where there are none it is not asked for long.
	yes, asked = false, nil
	for range 2 * (pauseAfter + 1) {
		take(2 * mib)
		a.SetCapacity(0)
		a.SetCapacity(64 * mib)
	}
	if len(asked) != 2 {
		t.Errorf("asked %d times in %d, want 2", len(asked), 2*(pauseAfter+1))
	}
}

func TestEnlargedMemoryAgreesWithAModel(t *testing.T) {
	t.Parallel()
	a := openWith(t, 48*mib, 4096, true)
	// It may fail, and then gives plain pages; what it does to a new slot's first
	// bytes nobody sees.
	a.enlarge = enlarge
	randomUse(t, a, rand.New(rand.NewPCG(1, 9)), 1500)
}
