package bench

import (
	"os"
	"testing"
	"time"
)

func TestTheFilesOfACallAreMadeAloneAndRemoved(t *testing.T) {
	t.Parallel()
	dir, cdi := t.TempDir(), t.TempDir()
	whole, syncs, err := rawCalls(dir, cdi, shapes[3], 2)
	if err != nil || len(whole) != 2 || len(syncs) != 2 || syncs[0] <= 0 || whole[0] <= syncs[0] {
		t.Fatalf("took %v, fsyncs %v, %v", whole, syncs, err)
	}
	for _, place := range []string{dir, cdi} {
		if left, err := os.ReadDir(place); err != nil || len(left) > 0 {
			t.Errorf("left are %v, %v", left, err)
		}
	}
}

func TestACallsTimeBeyondItsFsyncsIsLessThanItsWhole(t *testing.T) {
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
	before, err := r.stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	f, err := r.measure(t.Context(), shapes[3], 2)
	if err != nil {
		t.Fatal(err)
	}
	after, err := r.stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i := range f.wall {
		if sum := f.syncs[i] + f.beyond[i]; f.syncs[i] <= 0 || f.beyond[i] <= 0 || sum-f.wall[i] > 1e-6 || f.wall[i]-sum > 1e-6 {
			t.Errorf("call %d: %.3f ms are %.3f of fsyncs and %.3f beyond", i, f.wall[i], f.syncs[i], f.beyond[i])
		}
	}
	// Prepare of 8 claims: 8 files, their directory, 8 commits. Unprepare: 8 tombstones.
	if syncs := after.Syncs - before.Syncs; syncs != 2*(17+8) || after.SyncTime-before.SyncTime < time.Duration((f.syncs[0]+f.syncs[1])*float64(time.Millisecond)) {
		t.Errorf("%d fsyncs in %s, of which Prepare's %v ms", syncs, after.SyncTime-before.SyncTime, f.syncs)
	}
	rows, err := r.prepareRows(t.Context(), shapes[0], 2, 1)
	if err != nil {
		t.Fatal(err)
	}
	if n, what, err := r.left(t.Context()); n != 0 || err != nil {
		t.Errorf("left are %d things%s, %v", n, what, err)
	}
	for _, row := range rows {
		if row.Value <= 0 || row.Pairs != 2 {
			t.Errorf("row %+v", row)
		}
	}
}
