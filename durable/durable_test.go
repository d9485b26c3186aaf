package durable_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
)

func TestOperatingSystemPassesTheSuite(t *testing.T) {
	t.Parallel()
	durabletest.Suite(t, func(t *testing.T) (durable.FS, string) { return durable.OS, t.TempDir() })
}

func TestCrashableFileSystemPassesTheSuite(t *testing.T) {
	t.Parallel()
	durabletest.Suite(t, func(t *testing.T) (durable.FS, string) {
		fsys := durabletest.New()
		if err := fsys.MkdirAll("/var/dir", 0o755); err != nil {
			t.Fatal(err)
		}
		return fsys, "/var/dir"
	})
}

func TestWriteFileLeavesOldOrNewContentWhereverItCrashes(t *testing.T) {
	t.Parallel()
	for _, random := range []bool{false, true} {
		finished := false
		for n := 1; !finished; n++ {
			fsys := durabletest.New()
			if err := durable.WriteFile(fsys, "/a", []byte("old content"), 0o600); err != nil {
				t.Fatal(err)
			}
			fsys.CrashAt(fsys.Changes()+n, true)
			err := durable.WriteFile(fsys, "/a", []byte("new"), 0o600)
			finished = err == nil
			var source *rand.Rand
			if random {
				source = rand.New(rand.NewPCG(uint64(n), 7))
			}
			data, readErr := durable.ReadFile(fsys.Crash(source), "/a", 100)
			if readErr != nil || string(data) != "old content" && string(data) != "new" {
				t.Fatalf("crash at change %d: %q, %v", n, data, readErr)
			}
			if finished && string(data) != "new" {
				t.Fatalf("a finished write was forgotten: %q", data)
			}
		}
	}
}

func TestUnsyncedDataAndNamesAreForgotten(t *testing.T) {
	t.Parallel()
	fsys := durabletest.New()
	f, err := fsys.OpenFile("/a", syscall.O_CREAT|syscall.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write([]byte("kept")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Datasync(), fsys.SyncDir("/")); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write([]byte(" and lost")); err != nil {
		t.Fatal(err)
	}
	if err := fsys.Link("/a", "/b"); err != nil {
		t.Fatal(err)
	}
	after := fsys.Crash(nil)
	if data, err := durable.ReadFile(after, "/a", 100); err != nil || string(data) != "kept" {
		t.Errorf("after the crash: %q, %v", data, err)
	}
	if _, err := after.Stat("/b"); err == nil {
		t.Error("an unsynced name survived")
	}
	if _, err := f.Write([]byte("x")); !errors.Is(err, durabletest.ErrCrashed) {
		t.Errorf("write after the crash: %v", err)
	}
}

func TestFailuresHitTheChangeTheyAreSetFor(t *testing.T) {
	t.Parallel()
	fsys := durabletest.New()
	fsys.FailAt(2, syscall.EIO)
	if err := durable.WriteFile(fsys, "/a", []byte("x"), 0o600); !errors.Is(err, syscall.EIO) {
		t.Errorf("WriteFile: %v, want EIO", err)
	}
	if err := durable.WriteFile(fsys, "/a", []byte("x"), 0o600); err != nil {
		t.Error(err)
	}
	fsys.SetCapacity(2)
	if err := durable.WriteFile(fsys, "/b", []byte("xyz"), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("WriteFile on a full drive: %v, want ENOSPC", err)
	}
	fsys.FailWhen(func(op, path string) error {
		if op == "rename" {
			return fmt.Errorf("no rename to %s", path)
		}
		return nil
	})
	if err := durable.WriteFile(fsys, "/a", []byte("y"), 0o600); err == nil {
		t.Error("a failing rename went unnoticed")
	}
	if data, err := durable.ReadFile(fsys, "/a", 10); err != nil || string(data) != "x" {
		t.Errorf("after failed writes: %q, %v", data, err)
	}
}
