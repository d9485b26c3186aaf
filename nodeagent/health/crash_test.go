package health

import (
	"math/rand/v2"
	"testing"

	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
)

const crashPath = "/health/health.json"

// reopen makes a Tracker over what a crash left; it must open and must not
// find the file malformed.
func reopen(t *testing.T, n int, table Table, files *durabletest.FS) *Tracker {
	t.Helper()
	tracker, err := New(Options{Devices: []device.Device{{ID: "gpu-0"}}, Table: table, Path: crashPath, FS: files})
	if err != nil {
		t.Fatalf("crash at change %d: the state does not open: %v", n, err)
	}
	if bad := tracker.Quarantined(); bad != "" {
		t.Fatalf("crash at change %d: the state was malformed", n)
	}
	return tracker
}

func TestAFactThatWasTakenSurvivesACrashAtAnyChange(t *testing.T) {
	t.Parallel()
	table := builtInTable(t)
	codes := []int{63, 48, 79, 74}
	for n := 1; ; n++ {
		files := durabletest.New()
		if err := durable.MkdirAllSynced(files, "/health", 0o700); err != nil {
			t.Fatal(err)
		}
		files.CrashAt(files.Changes()+n, n%2 == 0)
		tracker := reopen(t, n, table, files)
		taken := 0
		for _, code := range codes {
			if tracker.apply(device.Fact{Device: "gpu-0", Kind: device.FactXID, Code: code}) != nil {
				break
			}
			taken++
		}
		for _, random := range []*rand.Rand{nil, rand.New(rand.NewPCG(uint64(n), 1))} {
			left := files.Crash(random)
			after := reopen(t, n, table, left)
			counts := after.Counts()["gpu-0"]
			for _, code := range codes[:taken] {
				if counts[code] != 1 {
					t.Errorf("crash at change %d: xid %d was taken and is gone: %v", n, code, counts)
				}
			}
			if err := after.apply(device.Fact{Device: "gpu-0", Kind: device.FactXID, Code: 79}); err != nil {
				t.Errorf("crash at change %d: no fact is taken after it: %v", n, err)
			}
			entries, err := left.ReadDir("/health")
			if err != nil || len(entries) != 1 {
				t.Errorf("crash at change %d: %d files are left: %v", n, len(entries), err)
			}
		}
		if taken == len(codes) {
			return
		}
	}
}

func TestAFactCountsWhenTheDriveIsFull(t *testing.T) {
	t.Parallel()
	files := durabletest.New()
	if err := durable.MkdirAllSynced(files, "/health", 0o700); err != nil {
		t.Fatal(err)
	}
	files.SetCapacity(1)
	tracker := reopen(t, 0, builtInTable(t), files)
	if err := tracker.apply(device.Fact{Device: "gpu-0", Kind: device.FactXID, Code: 79}); err == nil {
		t.Error("a full drive was not told")
	}
	if s, _ := tracker.Snapshot().Find("gpu-0"); s.Health != device.Unhealthy {
		t.Errorf("the device is %v", s.Health)
	}
}
