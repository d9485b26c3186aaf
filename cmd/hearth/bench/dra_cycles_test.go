package bench

import (
	"os"
	"testing"
)

// mib are readings of so many MiB of live heap, and ten times that of memory.
func mib(values ...float64) (at []memory) {
	for _, v := range values {
		at = append(at, memory{heap: v, anon: 10 * v, rss: 100})
	}
	return at
}

func TestMemoryThatWarmsUpIsNoLeakAndMemoryThatGoesOnGrowingIs(t *testing.T) {
	t.Parallel()
	cycles := []int{500, 1000, 1500, 2000}
	warm := memoryRows(cycles, mib(2, 4, 4.02, 4), "")
	if heap, anon := warm[0], warm[1]; !heap.Met || heap.Value != 0 || !anon.Met || anon.Value != 0 {
		t.Errorf("after a warm-up: %+v", warm)
	}
	leak := memoryRows(cycles, mib(2, 3, 4, 5), "")
	if heap, anon := leak[0], leak[1]; heap.Met || heap.Value != 2 || anon.Met || anon.Value != 20 {
		t.Errorf("with a leak of 2 KiB a cycle: %+v", leak)
	}
}

func TestPrepareAndUnprepareLeaveNothingWithTheDriver(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "hb") //nolint:usetesting // t.TempDir is too long a path for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r, err := startDRA(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.stop)
	rows, err := r.cycleRows(t.Context(), []int{1, 2, 3})
	if err != nil {
		t.Fatal(err)
	}
	if left := rows[len(rows)-1]; left.Name != "cycles_left" || left.Value != 0 || !left.Met {
		t.Errorf("left: %+v", left)
	}
	m, err := r.memory(t.Context())
	if err != nil || m.heap <= 0 || m.anon <= m.heap || m.rss <= m.anon || m.goroutines <= 0 {
		t.Errorf("memory %+v, %v", m, err)
	}
}
