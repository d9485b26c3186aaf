package kvtier

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

// givenUp is a history of two drives, with one given up: it could not note that a
// block ended.
func givenUp(t *testing.T) (l *history, bad string) {
	t.Helper()
	l, err := newHistory(2)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.open(); err != nil {
		t.Fatal(err)
	}
	for key := range 40 {
		if err := errors.Join(l.put(x(key)), l.use(x(key)), l.write(l.tenant())); err != nil {
			t.Fatal(err)
		}
	}
	// A tenant of few segments uses one drive.
	bad = l.cache.drives()[l.tenant().drive.Segments()[0].Drive]
	l.fs.FailWhen(anywhere(syscall.EIO, filepath.Join(bad, blocksDir)))
	if err := errors.Join(l.delete(x(1)), l.put(x(2)), l.put(x(5))); err != nil {
		t.Fatal(err)
	}
	if told := l.tenant().Problem(); l.tenant().Stats().DrivesOut != 1 || !strings.Contains(told, bad) || !strings.Contains(told, "input/output error") {
		t.Fatalf("%d drives are given up, and told: %q", l.tenant().Stats().DrivesOut, l.tenant().Problem())
	}
	return l, bad
}

func TestADriveThatWasGivenUpIsUsedAgainOnceItCanBeWritten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, bad := givenUp(t)
		ctx, end := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- l.cache.Run(ctx) }()
		var tries atomic.Int64
		fails := anywhere(syscall.EIO, filepath.Join(bad, blocksDir))
		l.fs.FailWhen(func(op, path string) error {
			err := fails(op, path)
			if err != nil {
				tries.Add(1)
			}
			return err
		})
		time.Sleep(time.Hour) // of the fake clock
		if n := tries.Load(); n < 5 || n > 60 {
			t.Errorf("a bad drive is asked for %d changes in an hour", n)
		}
		if l.tenant().Problem() == "" {
			t.Error("a drive that fails still is said to be well")
		}
		l.fs.Heal()
		if err := l.fs.Rename(bad+"/FORMAT", bad+"/elsewhere"); err != nil { // it is not mounted
			t.Fatal(err)
		}
		time.Sleep(lastRetry + time.Second)
		if l.tenant().Stats().DrivesOut != 1 {
			t.Error("a folder without a drive is used")
		}
		if err := l.fs.Rename(bad+"/elsewhere", bad+"/FORMAT"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(lastRetry + time.Second)
		if s := l.tenant().Stats(); s.DrivesOut != 0 || l.tenant().Problem() != "" {
			t.Errorf("%d drives are given up still: %q", s.DrivesOut, l.tenant().Problem())
		}
		list, _ := l.cache.Events(1, 1<<20)
		lost := 0
		for _, e := range list {
			if e.Kind == EventLost && e.Tenant == "credential a" {
				lost++
			}
		}
		if lost != 1 {
			t.Errorf("%d events tell of what the drive had", lost)
		}
		for n := range l.may {
			if err := l.use(n); err != nil {
				t.Error(err)
			}
		}
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if err := l.cache.Close(); err != nil {
			t.Error(err)
		}
		if err := l.again(l.fs.CrashWith(durabletest.PageSector, durabletest.Nothing)); err != nil {
			t.Error(err)
		}
	})
}

// bareSpec is of a tenant with RAM and drives.
var bareSpec = TenantSpec{Kind: TenantCredential, Name: "a", Memory: 2 * units.MiB, NVMe: 20 * units.MiB, AdmitAll: true}

// noRoomFor has a full file system below a folder.
func noRoomFor(l *history, below string) {
	l.fs.FailWhen(func(op, path string) error {
		if op == "open" && strings.HasPrefix(path, below) {
			return syscall.ENOSPC
		}
		return nil
	})
}

func TestAFullFileSystemAtAStartCostsOldBlocksAndLeavesRAM(t *testing.T) {
	t.Parallel()
	for _, is := range []struct{ fresh, killed bool }{{true, false}, {false, false}, {false, true}} {
		fresh := is.fresh
		l, err := newHistory(1)
		if err != nil {
			t.Fatal(err)
		}
		l.spec = bareSpec
		if err := l.open(); err != nil {
			t.Fatal(err)
		}
		if fresh {
			l.spec.Name = "c"
		} else {
			for key := range 10 {
				if err := errors.Join(l.put(x(key)), l.write(l.tenant())); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := l.cache.Close(); err != nil {
			t.Fatal(err)
		}
		noRoomFor(l, "/kv/")
		if l.cache, err = OpenCache(CacheOptions{Dir: "/kv", Memory: 4 * units.MiB, VerifyEvery: 1, SegmentSize: 4 << 20, FS: l.fs}); err != nil {
			t.Fatal(err)
		}
		tenant, err := l.cache.AddTenant(t.Context(), l.spec)
		if err != nil {
			t.Fatalf("fresh %t: a full file system refuses the tenant: %v", fresh, err)
		}
		if told := tenant.Problem(); !strings.Contains(told, "RAM alone") || !strings.Contains(told, "no space left on device") {
			t.Errorf("fresh %t: nothing is told: %q", fresh, tenant.Problem())
		}
		// A namespace that the drive does not know, beside the one that it does.
		spaces := make([]*Namespace, 2)
		for i, format := range []string{"new", "x"} {
			if spaces[i], err = tenant.Namespace(t.Context(), block.Identity{Format: format}); err != nil {
				t.Fatal(err)
			}
			for key := range 10 {
				if got := get(t, spaces[i], key); got != nil {
					t.Errorf("fresh %t: block %d of before is found", fresh, key)
				}
			}
			mustPut(t, spaces[i], 1, content(1, 100+i, 3000))
		}
		if err := tenant.retryDrives(t.Context()); err == nil {
			t.Errorf("fresh %t: it has drives where there is no room", fresh)
		}
		if string(get(t, spaces[0], 1)) != string(content(1, 100, 3000)) {
			t.Errorf("fresh %t: RAM is lost with a try", fresh)
		}
		if is.killed { // which brings nothing back
			for key := range 10 {
				l.may[x(key)] = map[int]bool{0: true}
			}
			if err := l.again(l.fs.CrashWith(durabletest.PageSector, durabletest.Everything)); err != nil {
				t.Errorf("killed: %v", err)
			}
			_ = l.cache.Close() // of the process that is gone
			continue
		}
		l.fs.Heal()
		if err := tenant.retryDrives(t.Context()); err != nil || tenant.Problem() != "" {
			t.Errorf("fresh %t: with room again: %v, %q", fresh, err, tenant.Problem())
		}
		for i, n := range spaces {
			mustPut(t, n, 2, content(2, 100+i, 3000))
		}
		drain(t, tenant)
		closeCache(t, l.cache)
		if l.cache, err = OpenCache(CacheOptions{Dir: "/kv", Memory: 4 * units.MiB, VerifyEvery: 1, SegmentSize: 4 << 20, FS: l.fs}); err != nil {
			t.Fatal(err)
		}
		if tenant, err = l.cache.AddTenant(t.Context(), l.spec); err != nil {
			t.Fatal(err)
		}
		for i, format := range []string{"new", "x"} {
			n, err := tenant.Namespace(t.Context(), block.Identity{Format: format})
			if err != nil {
				t.Fatal(err)
			}
			if string(get(t, n, 2)) != string(content(2, 100+i, 3000)) {
				t.Errorf("fresh %t: what was stored with room again is lost", fresh)
			}
		}
		closeCache(t, l.cache)
	}
}

func TestAFullFileSystemAtAStartCostsTheOldestSegmentAlone(t *testing.T) {
	t.Parallel()
	l, err := newHistory(1)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.open(); err != nil {
		t.Fatal(err)
	}
	for key := range 50 {
		if err := errors.Join(l.put(x(key)), l.use(x(key)), l.write(l.tenant())); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.cache.Close(); err != nil {
		t.Fatal(err)
	}
	removed := 0
	l.fs.FailWhen(func(op, path string) error {
		if op == "rename" && filepath.Ext(path) == ".out" {
			removed++
		}
		if removed == 0 && op == "open" && strings.HasPrefix(path, "/kv/"+blocksDir) {
			return syscall.ENOSPC
		}
		return nil
	})
	if err := l.open(); err != nil {
		t.Fatal(err)
	}
	if blocks := l.tenant().Stats().NVMe.Blocks; removed != 1 || blocks == 0 || l.tenant().Problem() != "" {
		t.Errorf("%d segments went, %d blocks are left, problem %q", removed, blocks, l.tenant().Problem())
	}
	for n := range l.may {
		if err := l.use(n); err != nil {
			t.Error(err)
		}
	}
	closeCache(t, l.cache)
}

func TestANamespaceThatIsNewWhileATenantCannotBeClearedIsNoOther(t *testing.T) {
	t.Parallel()
	l, err := newHistory(1)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.open(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(l.put(x(1)), l.use(x(1)), l.write(l.tenant())); err != nil {
		t.Fatal(err)
	}
	l.fs.FailWhen(anywhere(syscall.EIO, "/kv/"+blocksDir))
	if _, err := l.tenant().Clear(t.Context()); err == nil {
		t.Fatal("it was cleared")
	}
	if err := l.put(x(2)); !errors.Is(err, ErrDropped) || l.tenant().Problem() == "" {
		t.Errorf("a block is stored while it is cleared: %v, %q", err, l.tenant().Problem())
	}
	if err := l.space("y"); err != nil {
		t.Fatal(err)
	}
	l.fs.Heal()
	if err := l.tenant().retryDrives(t.Context()); err != nil || l.tenant().Problem() != "" {
		t.Fatalf("with the fault over: %v, %q", err, l.tenant().Problem())
	}
	for key := range l.may {
		l.may[key] = map[int]bool{0: true} // it is cleared now
		if err := l.use(key); err != nil {
			t.Error(err)
		}
	}
	if err := l.space("z"); err != nil {
		t.Fatal(err)
	}
	for _, n := range []named{{"a", "y", 1}, {"a", "z", 1}} {
		if err := errors.Join(l.put(n), l.use(n)); err != nil {
			t.Error(err)
		}
	}
	for _, n := range []named{{"a", "y", 1}, {"a", "z", 1}} {
		if version, err := l.look(n); err != nil || version == 0 {
			t.Errorf("%v: version %d, %v", n, version, err)
		}
	}
	closeCache(t, l.cache)
}

func TestADriveWithAnotherRecordOfTheTenantIsNotTakenBack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := onDrive(t, dir)
	defer closeCache(t, c)
	tenant := addTenant(t, c, TenantSpec{Name: "a", Memory: units.MiB, NVMe: 40 * units.MiB}).Tenant()
	if err := os.WriteFile(filepath.Join(dir, format.Name), []byte(format.Prefix+"1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := tenant.usable(0); err != nil {
		t.Error(err)
	}
	// What lay below the file system before it was mounted.
	if err := tenant.writeRecord(newRecord(tenant.kind, tenant.name)); err != nil {
		t.Fatal(err)
	}
	if err := tenant.usable(0); err == nil || !strings.Contains(err.Error(), "another KV space") {
		t.Errorf("another's space is taken: %v", err)
	}
	if err := os.Remove(tenant.recordPath()); err != nil {
		t.Fatal(err)
	}
	if err := tenant.usable(0); err != nil {
		t.Errorf("a space without a record is not taken: %v", err)
	}
}
