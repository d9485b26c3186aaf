package kvtier

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/units"
)

// faultStride is how many changes are passed over between two faults.
func faultStride() int {
	switch {
	case everyCrash:
		return 1
	case testing.Short():
		return 211
	}
	return 83
}

// rest plays the script, where a step may fail that meets a fault and has to work
// when it is done again. It gives how often that was.
func (l *history) rest() (failed int, err error) {
	steps := l.script()
	for i, step := range steps {
		first := step()
		if first == nil {
			continue
		}
		failed++
		if i == len(steps)-1 {
			break // a close is not done again
		}
		if err := step(); err != nil {
			return failed, fmt.Errorf("step %d fails again, when the fault is over: %w, after: %w", i, err, first)
		}
	}
	return failed, nil
}

// oneFault plays the script with one change or read that fails, and holds what is
// found after a kill or a power cut to what was said.
func oneFault(t *testing.T, cause error, reads bool) {
	t.Helper()
	for drives := 1; drives <= 2; drives++ {
		random := rand.New(rand.NewPCG(uint64(drives), 5))
		met := 0
		for n := 1 + random.IntN(faultStride()); ; n += faultStride() {
			l, err := newHistory(drives)
			if err != nil {
				t.Fatal(err)
			}
			count := l.fs.Changes
			if reads {
				l.fs.FailReadAt(l.fs.Reads()+n, cause)
				count = l.fs.Reads
			} else {
				l.fs.FailAt(l.fs.Changes()+n, cause)
			}
			last := count() + n
			failed, err := l.rest()
			if err != nil {
				t.Fatalf("%d drives, fault at %d: %v", drives, n, err)
			}
			met += failed
			reached := count() >= last
			l.fs.Heal()
			for _, survives := range []durabletest.Survives{durabletest.Everything, durabletest.Nothing} {
				if err := l.again(l.fs.CrashWith(durabletest.PageSector, survives)); err != nil {
					t.Fatalf("%d drives, fault at %d, started again: %v", drives, n, err)
				}
			}
			if !reached {
				break
			}
		}
		t.Logf("%d drives: %d steps failed", drives, met)
	}
}

// again opens what was left and looks at everything.
func (l *history) again(after *durabletest.FS) error {
	next := &history{fs: after, drives: l.drives, spec: l.spec, spaces: map[string]*Namespace{}, next: l.next, may: l.may}
	if err := errors.Join(next.open(), next.space("z"), next.addOther()); err != nil {
		return err
	}
	for n := range l.may {
		if _, err := next.look(n); err != nil {
			return err
		}
	}
	return next.cache.Close()
}

func TestIOErrorAtAnyChangeCostsBlocksAndNothingElse(t *testing.T) {
	t.Parallel()
	oneFault(t, syscall.EIO, false)
}

func TestFullDriveAtAnyChangeCostsBlocksAndNothingElse(t *testing.T) {
	t.Parallel()
	oneFault(t, syscall.ENOSPC, false)
}

func TestIOErrorAtAnyReadCostsBlocksAndNothingElse(t *testing.T) {
	t.Parallel()
	oneFault(t, syscall.EIO, true)
}

func TestIOErrorOfTooManyOpenFilesAtAnyReadCostsBlocksAndNothingElse(t *testing.T) {
	t.Parallel()
	oneFault(t, syscall.EMFILE, true)
}

// onSegments is a fault of some operations on the files of blocks.
func onSegments(err error, below string, ops ...string) func(op, path string) error {
	return func(op, path string) error {
		if !strings.HasPrefix(path, below) || filepath.Ext(path) != ".seg" || !slices.Contains(ops, op) {
			return nil
		}
		return err
	}
}

// anywhere is a fault of some operations, or of all, on all that is below a folder.
func anywhere(err error, below string, ops ...string) func(op, path string) error {
	return func(op, path string) error {
		if !strings.HasPrefix(path, below) || len(ops) > 0 && !slices.Contains(ops, op) {
			return nil
		}
		return err
	}
}

// lasting are faults that stay for a while.
var lasting = map[string]func(f *durabletest.FS){
	"WritesToSegments": func(f *durabletest.FS) { f.FailWhen(onSegments(syscall.EIO, "/", "write")) },
	"SyncsOfSegments":  func(f *durabletest.FS) { f.FailWhen(onSegments(syscall.EIO, "/", "datasync", "sync")) },
	"AllSyncs":         func(f *durabletest.FS) { f.FailWhen(anywhere(syscall.EIO, "/", "datasync", "sync", "syncdir")) },
	"AllChanges":       func(f *durabletest.FS) { f.FailWhen(anywhere(syscall.EIO, "/")) },
	"ReadsOfSegments":  func(f *durabletest.FS) { f.FailReadWhen(onSegments(syscall.EIO, "/", "read")) },
	"AllReads":         func(f *durabletest.FS) { f.FailReadWhen(anywhere(syscall.EIO, "/")) },
	"Opens":            func(f *durabletest.FS) { f.FailReadWhen(anywhere(syscall.EMFILE, "/", "open")) },
	"Creates":          func(f *durabletest.FS) { f.FailWhen(anywhere(syscall.EMFILE, "/", "open", "mkdir")) },
	"ReadOnly":         func(f *durabletest.FS) { f.SetReadOnly(true) },
	"FullDrive":        func(f *durabletest.FS) { f.SetCapacity(1) },
	"SpentQuota":       func(f *durabletest.FS) { f.SetQuota(1) },
	"NoInodes":         func(f *durabletest.FS) { f.SetInodes(1) },
	"TheOtherDriveIsGone": func(f *durabletest.FS) {
		f.FailWhen(anywhere(syscall.ENODEV, "/drive1"))
		f.FailReadWhen(anywhere(syscall.ENODEV, "/drive1"))
	},
}

func heal(f *durabletest.FS) {
	f.Heal()
	f.SetCapacity(0)
	f.SetQuota(0)
	f.SetInodes(0)
}

// TestIOErrorsReadOnlyAndFullDrivesThatLastEndWithTheFault has a fault come and go in
// the middle of the script: meanwhile nothing wrong is found, afterwards all works.
func TestIOErrorsReadOnlyAndFullDrivesThatLastEndWithTheFault(t *testing.T) {
	t.Parallel()
	tries := 1
	if everyCrash {
		tries = 60
	}
	for name, begin := range lasting {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for drives := 1; drives <= 2; drives++ {
				for try := range tries {
					random := rand.New(rand.NewPCG(uint64(drives), uint64(try)+uint64(len(name))))
					if err := lastingFault(drives, begin, random); err != nil {
						t.Fatalf("%d drives, try %d: %v", drives, try, err)
					}
				}
			}
		})
	}
}

func lastingFault(drives int, begin func(f *durabletest.FS), random *rand.Rand) error {
	l, err := newHistory(drives)
	if err != nil {
		return err
	}
	steps := l.script()
	from := 1 + random.IntN(len(steps)-3)
	to := from + 1 + random.IntN(len(steps)-2-from)
	for i, step := range steps[:len(steps)-1] {
		switch i {
		case from:
			begin(l.fs)
		case to:
			heal(l.fs)
			l.patience = 1000
		}
		err := step()
		if _, wrong := errors.AsType[wrongBytes](err); wrong {
			return fmt.Errorf("step %d, fault from %d to %d: %w", i, from, to, err)
		}
		if err != nil && (i < from || i >= to) {
			return fmt.Errorf("step %d, without a fault: it was from %d to %d: %w", i, from, to, err)
		}
	}
	heal(l.fs)
	l.patience = 1000
	if err := l.works(); err != nil {
		return fmt.Errorf("after a fault from %d to %d: %w", from, to, err)
	}
	if random.IntN(2) == 0 {
		if err := l.cache.Close(); err != nil {
			return err
		}
	}
	for _, survives := range []durabletest.Survives{durabletest.Everything, durabletest.Nothing} {
		if err := l.again(l.fs.CrashWith(durabletest.PageSector, survives)); err != nil {
			return fmt.Errorf("fault from %d to %d, started again: %w", from, to, err)
		}
	}
	return nil
}

// works says whether the tenant stores and writes.
func (l *history) works() error {
	before := l.tenant().Stats()
	for key := 200; key < 210; key++ {
		if err := errors.Join(l.put(x(key)), l.use(x(key))); err != nil {
			return err
		}
	}
	if err := l.write(l.tenant()); err != nil {
		return err
	}
	after := l.tenant().Stats()
	if after.Written == before.Written {
		return fmt.Errorf("%w: of ten blocks none was written: %+v", errLosing, after)
	}
	return nil
}

func TestWritesThatFailAreCountedAndNobodyWaits(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	t.Cleanup(func() { _ = w.cache.Close() })
	w.failSegments(syscall.EIO)
	for key := range 5 {
		mustPut(t, w.spaces[0], key, content(key, 1, 50_000))
	}
	if _, err := w.tenant().writeSome(t.Context()); err == nil {
		t.Error("a write that failed is said to have worked")
	}
	if s := w.tenant().Stats(); s.DroppedDrive != 5 || s.NVMe.Blocks != 0 || s.Waiting != 0 {
		t.Errorf("%d of 5 drops are counted, %d blocks are on the drives, %d bytes wait", s.DroppedDrive, s.NVMe.Blocks, s.Waiting)
	}
	for key := range 5 {
		if get(t, w.spaces[0], key) == nil {
			t.Errorf("block %d left RAM with its write", key)
		}
	}
	w.fs.Heal()
	// A drive that failed again and again is tried now and then.
	for range 200 {
		for key := range 5 {
			if get(t, w.spaces[0], key) == nil {
				t.Fatalf("block %d left RAM", key)
			}
		}
		_, _ = w.tenant().writeSome(t.Context())
	}
	if s := w.tenant().Stats(); s.NVMe.Blocks != 5 {
		t.Errorf("%d of 5 blocks are on the drives after the fault", s.NVMe.Blocks)
	}
}

// shortFS is a file system whose reads end early, each time or now and then.
type shortFS struct {
	durable.FS
	short func() bool
}

func (s shortFS) OpenFile(name string, flag int, perm fs.FileMode) (durable.File, error) {
	f, err := s.FS.OpenFile(name, flag, perm)
	if err != nil || filepath.Ext(name) != ".seg" {
		return f, err
	}
	return shortFile{f, s.short}, nil
}

type shortFile struct {
	durable.File
	short func() bool
}

func (f shortFile) ReadAt(p []byte, off int64) (int, error) {
	if len(p) > 1 && f.short() {
		p = p[:len(p)/2]
	}
	return f.File.ReadAt(p, off)
}

func TestShortReadsGiveNoWrongByte(t *testing.T) {
	t.Parallel()
	drive := durabletest.New()
	if err := durable.MkdirAllSynced(drive, "/kv", 0o700); err != nil {
		t.Fatal(err)
	}
	var always bool
	random := rand.New(rand.NewPCG(4, 4))
	short := func() bool { return always || random.IntN(3) == 0 }
	open := func() (*Cache, *Namespace) {
		transit := units.Bytes(0)
		c, err := OpenCache(CacheOptions{Dir: "/kv", Memory: units.MiB, Transit: &transit, VerifyEvery: 1, SegmentSize: 4 << 20, FS: shortFS{drive, short}})
		if err != nil {
			t.Fatal(err)
		}
		tenant, err := c.AddTenant(t.Context(), TenantSpec{Kind: TenantCredential, Name: "a", Memory: units.MiB, NVMe: 40 * units.MiB, AdmitAll: true})
		if err != nil {
			t.Fatal(err)
		}
		n, err := tenant.Namespace(context.Background(), block.Identity{Format: "x"})
		if err != nil {
			t.Fatal(err)
		}
		return c, n
	}
	c, n := open()
	for key := range 60 {
		mustPut(t, n, key, content(key, 0, 90_000))
		drain(t, n.tenant)
	}
	found := 0
	look := func() {
		for key := range 60 {
			if got := get(t, n, key); got != nil {
				if found++; string(got) != string(content(key, 0, 90_000)) {
					t.Fatalf("block %d has other bytes", key)
				}
			}
		}
	}
	look()
	if found == 0 {
		t.Error("no block is found where two of three reads are whole")
	}
	closeCache(t, c)
	c, n = open()
	look()
	always = true
	look()
	always = false
	mustPut(t, n, 61, content(61, 0, 90_000))
	drain(t, n.tenant)
	closeCache(t, c)
}
