package ledger

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
)

func TestAPreparedClaimIsThereAfterARestartWithAllItTakesToUndoIt(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "claims")
	o := Options{Dir: dir, BootID: "boot-1", Now: newClock().now}
	l, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	done := prepared(t, l, planOf("a", "gpu-0"))
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	o.BootID = "boot-2"
	if l, err = Open(o); err != nil {
		t.Fatal(err)
	}
	got, ok := l.Get(uidOf("a"))
	if !ok || said(got.State, got) != said(Prepared, done) {
		t.Errorf("after the restart: %v %+v", ok, got)
	}
	if got.Boot != "boot-1" || l.BootID() != "boot-2" {
		t.Errorf("boot of the entry %q, of the ledger %q", got.Boot, l.BootID())
	}
	for _, path := range []string{dir, filepath.Join(dir, uidOf("a")+".json"), filepath.Join(dir, "journal")} {
		info, err := durable.OS.Stat(path)
		if err != nil || info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s: mode %v, %v", path, info.Mode(), err)
		}
	}
}

func TestALedgerHasOneOwner(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l, err := Open(Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{Dir: dir}); !errors.Is(err, durable.ErrLocked) {
		t.Errorf("a second owner: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if l, err = Open(Options{Dir: dir}); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestAPrepareOfOneClaimCostsThreeSyncsAndItsRepetitionNone(t *testing.T) {
	t.Parallel()
	l := mustOpen(t, durabletest.New(), newClock())
	before := l.Stats().Syncs
	plan := planOf("a", "gpu-0")
	done := prepared(t, l, plan)
	if got := l.Stats().Syncs - before; got != 3 {
		t.Errorf("%d syncs, want the file's, its directory's and the commit's", got)
	}
	before = l.Stats().Syncs
	if err := commit(l, done); err != nil {
		t.Fatal(err)
	}
	if err := begin(l, plan); !errors.Is(err, ErrPrepared) {
		t.Errorf("a prepared claim is begun again: %v", err)
	}
	if err := bury(l, "a"); err != nil {
		t.Fatal(err)
	}
	if got := l.Stats().Syncs - before; got != 1 {
		t.Errorf("%d syncs, want the tombstone's alone", got)
	}
	if err := bury(l, "a"); err != nil {
		t.Fatal(err)
	}
	if got := l.Stats().Syncs - before; got != 1 {
		t.Errorf("a repeated Unprepare costs %d syncs", got-1)
	}
}

func TestClaimsOfOneCallShareTheSyncOfTheirDirectory(t *testing.T) {
	t.Parallel()
	l := mustOpen(t, durabletest.New(), newClock())
	before := l.Stats().Syncs
	var plans, done []Entry
	for i := range 8 {
		plans = append(plans, planOf(fmt.Sprint(i), fmt.Sprintf("gpu-%d", i)))
		done = append(done, doneOf(plans[i]))
	}
	if err := errors.Join(l.Begin(ctx, l.Arrive(), plans...)...); err != nil {
		t.Fatal(err)
	}
	if got := l.Stats().Syncs - before; got != 9 {
		t.Errorf("begin: %d syncs, want 8 files and one directory", got)
	}
	if err := errors.Join(l.Commit(ctx, done...)...); err != nil {
		t.Fatal(err)
	}
	if got := l.Stats().Syncs - before; got != 17 {
		t.Errorf("begin and commit: %d syncs, want 17", got)
	}
}

func TestABeginThatChangesNothingWritesNothingAndOneThatDoesReplacesThePlan(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), newClock()
	l := mustOpen(t, fsys, c)
	plan := planOf("a", "gpu-0")
	if err := begin(l, plan); err != nil {
		t.Fatal(err)
	}
	first, _ := l.Get(plan.UID)
	before := fsys.Changes()
	c.pass(time.Minute)
	if err := begin(l, plan); err != nil || fsys.Changes() != before {
		t.Errorf("the same plan again: %d changes, %v", fsys.Changes()-before, err)
	}
	plan.Weights[0].Deadline = c.now().Add(time.Hour)
	if err := begin(l, plan); err != nil {
		t.Fatal(err)
	}
	if got, _ := l.Get(plan.UID); !got.Begun.Equal(first.Begun) || got.Weights[0].Deadline.IsZero() {
		t.Errorf("the new plan: %+v", got)
	}
	if got := says(mustOpen(t, fsys.Crash(nil), c), plan.UID); got != said(Begun, plan) {
		t.Errorf("after a crash: %s", got)
	}
}

func TestAPrepareThatArrivedBeforeItsClaimsUnprepareIsRefused(t *testing.T) {
	t.Parallel()
	l := mustOpen(t, durabletest.New(), newClock())
	plan := planOf("a", "gpu-0")
	late := l.Arrive()
	if err := bury(l, "a"); err != nil {
		t.Fatal(err)
	}
	if err := l.Begin(ctx, late, plan)[0]; !errors.Is(err, ErrUnprepared) {
		t.Errorf("a late Prepare of a claim that was never known: %v", err)
	}
	late = l.Arrive()
	prepared(t, l, plan)
	if err := bury(l, "a"); err != nil {
		t.Fatal(err)
	}
	if err := l.Begin(ctx, late, plan)[0]; !errors.Is(err, ErrUnprepared) {
		t.Errorf("a late Prepare: %v", err)
	}
	if got := l.Owners("node-1", "gpu-0"); len(got) != 0 {
		t.Errorf("the late Prepare left owners %v", got)
	}
}

func TestTheSameClaimIsPreparedAgainWhenItsNextPodComes(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), newClock()
	l := mustOpen(t, fsys, c)
	for range 3 {
		prepared(t, l, planOf("a", "gpu-0"))
		if err := bury(l, "a"); err != nil {
			t.Fatal(err)
		}
	}
	done := prepared(t, l, planOf("a", "gpu-0"))
	if got := says(mustOpen(t, fsys.Crash(nil), c), done.UID); got != said(Prepared, done) {
		t.Errorf("after a crash: %s", got)
	}
}

func TestACommitNeedsTheDevicesThatWereBegun(t *testing.T) {
	t.Parallel()
	l := mustOpen(t, durabletest.New(), newClock())
	plan := planOf("a", "gpu-0")
	if err := commit(l, doneOf(plan)); !errors.Is(err, ErrNotBegun) {
		t.Errorf("commit without a begin: %v", err)
	}
	if err := begin(l, plan); err != nil {
		t.Fatal(err)
	}
	if err := commit(l, doneOf(planOf("a", "gpu-1"))); err == nil {
		t.Error("a device that nobody begun is committed")
	}
	if err := bury(l, "a"); err != nil {
		t.Fatal(err)
	}
	if err := commit(l, doneOf(plan)); !errors.Is(err, ErrNotBegun) {
		t.Errorf("commit of a tombstone: %v", err)
	}
}

func TestACommitInAnotherBootIsWrittenWithThatBoot(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), newClock()
	done := prepared(t, mustOpen(t, fsys, c), planOf("a", "gpu-0"))
	next, err := Open(Options{Dir: testDir, FS: fsys.Crash(nil), BootID: "boot-2", Now: c.now})
	if err != nil {
		t.Fatal(err)
	}
	before, _ := next.Get(done.UID)
	if err := commit(next, done); err != nil {
		t.Fatal(err)
	}
	after, _ := next.Get(done.UID)
	if after.Boot != "boot-2" || !after.Prepared.Equal(before.Prepared) || after.Lines != before.Lines {
		t.Errorf("before %+v, after %+v", before, after)
	}
}

func TestWhatIsGivenOutSharesNothingWithTheLedger(t *testing.T) {
	t.Parallel()
	l := mustOpen(t, durabletest.New(), newClock())
	done := prepared(t, l, planOf("a", "gpu-0"))
	got, _ := l.Get(done.UID)
	got.Results[1].Edits.Mounts[0].Options[0], got.Results[2].Consumed["nvme"], got.KV.NVMe = "rw", 0, 0
	got.Pods[0].Name, got.Weights[0].Size = "other", 0
	if again := says(l, done.UID); again != said(Prepared, done) {
		t.Errorf("a caller changed the ledger: %s", again)
	}
}

func TestACallWaitsForAnotherOfTheSameClaimAndHonoursItsContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := mustOpen(t, durabletest.New(), newClock())
		uid := uidOf("a")
		if err := l.acquire(ctx, []string{uid}); err != nil {
			t.Fatal(err)
		}
		bounded, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if err := l.Begin(bounded, l.Arrive(), planOf("a", "gpu-0"))[0]; !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a wait past the deadline: %v", err)
		}
		outcome := make(chan error, 1)
		ticket := l.Arrive()
		go func() { outcome <- l.Begin(ctx, ticket, planOf("a", "gpu-0"))[0] }()
		synctest.Wait()
		l.release([]string{uid})
		if err := <-outcome; err != nil {
			t.Error(err)
		}
		ended, end := context.WithCancel(ctx)
		end()
		if err := l.Commit(ended, doneOf(planOf("a", "gpu-0")))[0]; !errors.Is(err, context.Canceled) {
			t.Errorf("a call whose caller went away: %v", err)
		}
		if got, _ := l.Get(uid); got.State != Begun {
			t.Errorf("it happened all the same: %s", got.State)
		}
	})
}

func TestOfManyClaimsThatWantOneDeviceExactlyOneGetsIt(t *testing.T) {
	t.Parallel()
	l := mustOpen(t, durabletest.New(), newClock())
	var wg sync.WaitGroup
	got := make([]error, 16)
	for i := range got {
		wg.Go(func() { got[i] = begin(l, planOf(fmt.Sprint(i), "gpu-0")) })
	}
	wg.Wait()
	winners := 0
	for _, err := range got {
		var conflict *Conflict
		switch {
		case err == nil:
			winners++
		case !errors.As(err, &conflict) || conflict.Device != "gpu-0":
			t.Errorf("a loser is told %v", err)
		}
	}
	if owners := l.Owners("node-1", "gpu-0"); winners != 1 || len(owners) != 1 {
		t.Errorf("%d winners, owners %v", winners, owners)
	}
}

func TestTwoClaimsOfOneCallDoNotGetOneDevice(t *testing.T) {
	t.Parallel()
	l := mustOpen(t, durabletest.New(), newClock())
	errs := l.Begin(ctx, l.Arrive(), planOf("a", "gpu-0"), planOf("b", "gpu-0"), planOf("a", "gpu-0"))
	var conflict *Conflict
	if errs[0] != nil || !errors.As(errs[1], &conflict) || conflict.UID != uidOf("a") || errs[2] == nil {
		t.Errorf("errors %v", errs)
	}
}

func TestAFailedBeginGivesItsDevicesBack(t *testing.T) {
	t.Parallel()
	fsys := durabletest.New()
	l := mustOpen(t, fsys, newClock())
	fsys.SetReadOnly(true)
	if err := begin(l, planOf("a", "gpu-0")); err == nil {
		t.Fatal("a read-only drive took a claim")
	}
	fsys.SetReadOnly(false)
	if err := begin(l, planOf("b", "gpu-0")); err != nil {
		t.Errorf("the device is not free: %v", err)
	}
}

func TestMoreClaimsThanTheLedgerTakesAreRefusedByName(t *testing.T) {
	t.Parallel()
	l := mustOpen(t, durabletest.New(), newClock())
	for i := range maxClaims {
		e := Entry{UID: fmt.Sprintf("u%d", i), Namespace: "n", Name: "c", State: Begun}
		l.mu.Lock()
		l.putLocked(&slot{entry: e})
		l.mu.Unlock()
	}
	err := begin(l, planOf("a", "gpu-0"))
	if !errors.Is(err, ErrFull) || !strings.Contains(err.Error(), "team/a") {
		t.Errorf("claim %d: %v", maxClaims+1, err)
	}
	if errs := l.Tombstone(ctx, "u0"); errs[0] != nil {
		t.Fatal(errs[0])
	}
	if err := begin(l, planOf("a", "gpu-0")); err != nil {
		t.Errorf("after one left: %v", err)
	}
}

func TestEntriesThatCannotBeKeptAreRefused(t *testing.T) {
	t.Parallel()
	l := mustOpen(t, durabletest.New(), newClock())
	for name, spoil := range map[string]func(e *Entry){
		"a path as UID":     func(e *Entry) { e.UID = "../x" },
		"no UID":            func(e *Entry) { e.UID = "" },
		"no name":           func(e *Entry) { e.Name = "" },
		"too many devices":  func(e *Entry) { e.Results = make([]Result, MaxResults+1) },
		"too many pods":     func(e *Entry) { e.Pods = make([]Pod, MaxPods+1) },
		"a device twice":    func(e *Entry) { e.Results = append(e.Results, e.Results[0]) },
		"an endless string": func(e *Entry) { e.Results[0].Edits.Env = []string{"A=" + strings.Repeat("x", maxRecord)} },
	} {
		e := planOf("a", "gpu-0")
		spoil(&e)
		if err := begin(l, e); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
	if got := l.Stats(); got.Entries != 0 || len(l.Owners("node-1", "gpu-0")) != 0 {
		t.Errorf("refused entries left %+v", got)
	}
}

func TestTombstonesGoAfterADayOnceNothingIsOwed(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), newClock()
	l := mustOpen(t, fsys, c)
	for i := range 3 {
		prepared(t, l, planOf(fmt.Sprint(i), fmt.Sprintf("gpu-%d", i)))
		if err := bury(l, fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
		c.pass(time.Second)
	}
	l.Released(ctx, uidOf("0"), HeldWeights, HeldKV)
	l.Released(ctx, uidOf("1"), HeldKV)
	left := func() []string {
		var names []string
		for _, e := range l.Gone() {
			names = append(names, e.Name)
		}
		return names
	}
	if err := l.Sweep(ctx); err != nil || !slices.Equal(left(), []string{"0", "1", "2"}) {
		t.Errorf("on the same day: %v, %v", left(), err)
	}
	c.pass(keepTombstone)
	if err := l.Sweep(ctx); err != nil || !slices.Equal(left(), []string{"1", "2"}) {
		t.Errorf("a day later: %v, %v", left(), err)
	}
	if got := l.Gone()[0].Owed; !slices.Equal(got, []Held{HeldWeights}) {
		t.Errorf("owed yet: %v", got)
	}
	if _, err := fsys.Stat(l.path(uidOf("0"))); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file: %v", err)
	}
	// What the power takes back is owed again, so that nothing is forgotten.
	again := mustOpen(t, fsys.Crash(nil), c)
	for _, e := range again.Gone() {
		if !slices.Equal(e.Owed, []Held{HeldWeights, HeldKV}) {
			t.Errorf("claim %s owes %v", e.Name, e.Owed)
		}
	}
}

func TestTombstonesAreBounded(t *testing.T) {
	t.Parallel()
	c := newClock()
	l := mustOpen(t, durabletest.New(), c)
	for i := range maxTombstones + 5 {
		e := planOf(fmt.Sprint(i), "gpu-0")
		prepared(t, l, e)
		if err := bury(l, e.Name); err != nil {
			t.Fatal(err)
		}
		c.pass(time.Millisecond)
	}
	if err := l.Sweep(ctx); err != nil {
		t.Fatal(err)
	}
	gone := l.Gone()
	if len(gone) != maxTombstones || gone[0].Name != "5" {
		t.Errorf("%d tombstones, the oldest of claim %s", len(gone), gone[0].Name)
	}
}

func TestFoldersThatOthersMadeForAllToReadAreClosed(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "claims")
	for _, sub := range []string{"", "bad/settled", "journal"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil { //nolint:gosec // as a kubelet makes it
			t.Fatal(err)
		}
	}
	l, err := Open(Options{Dir: dir, BootID: "boot-1"})
	if err != nil {
		t.Fatal(err)
	}
	for _, sub := range []string{"", "bad", "bad/settled", "journal"} {
		info, err := os.Stat(filepath.Join(dir, sub))
		if err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("claims/%s has mode %v, %v", sub, info.Mode(), err)
		}
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

func TestWhatWasReleasedIsNotOwedAfterARestart(t *testing.T) {
	t.Parallel()
	for _, what := range [][]Held{{HeldWeights, HeldKV}, {HeldKV}, {}} {
		fsys, c := durabletest.New(), newClock()
		l := mustOpen(t, fsys, c)
		prepared(t, l, planOf("a", "gpu-0"))
		if err := bury(l, "a"); err != nil {
			t.Fatal(err)
		}
		before := l.Stats().Syncs
		l.Released(ctx, uidOf("a"), what...)
		l.Released(ctx, uidOf("a"), what...)
		l.Released(ctx, "unknown", what...)
		if got := l.Stats().Syncs - before; got != 0 {
			t.Errorf("%v: it cost %d syncs", what, got)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		want := slices.DeleteFunc([]Held{HeldWeights, HeldKV}, func(h Held) bool { return slices.Contains(what, h) })
		for round := range 2 {
			l := mustOpen(t, fsys, c)
			if gone := l.Gone(); len(gone) != 1 || !slices.Equal(gone[0].Owed, want) {
				t.Errorf("%v, open %d: tombstones %+v, want owed %v", what, round, gone, want)
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		}
		// The power may take it back; then it is owed, and the file is no bad one.
		for _, fate := range fates(fsys, 1) {
			after := mustOpen(t, fsys.CrashWith(durabletest.SmallSector, fate), c)
			if gone := after.Gone(); len(gone) != 1 || len(after.Problems()) > 0 {
				t.Errorf("%v: after a power cut %+v, problems %v", what, gone, after.Problems())
			}
		}
	}
}

func TestAReleaseThatTheDriveDoesNotTakeLeavesTheTombstoneWhole(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), newClock()
	l := mustOpen(t, fsys, c)
	prepared(t, l, planOf("a", "gpu-0"))
	if err := bury(l, "a"); err != nil {
		t.Fatal(err)
	}
	fsys.FailAt(fsys.Changes()+1, syscall.EIO)
	l.Released(ctx, uidOf("a"), HeldWeights, HeldKV)
	if gone := l.Gone(); len(gone) != 1 || len(gone[0].Owed) != 0 {
		t.Errorf("tombstones %+v", gone)
	}
	prepared(t, l, planOf("a", "gpu-0"))
	if err := bury(l, "a"); err != nil {
		t.Fatal(err)
	}
	if gone := mustOpen(t, fsys.Crash(nil), c).Gone(); len(gone) != 1 || len(gone[0].Owed) != 2 {
		t.Errorf("after a crash %+v", gone)
	}
}
