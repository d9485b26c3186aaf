package ledger

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
)

var ctx = context.Background()

// act is one call of a life, with what it promises of each claim.
type act struct {
	name  string
	do    func(l *Ledger) []error
	after map[string][]string // uid -> what the ledger may say once the call succeeded
}

// promises are what a ledger may say of each claim: one thing after a call that
// succeeded, the old or the new after one that did not.
type promises map[string][]string

func newPromises() promises {
	p := promises{}
	for _, name := range []string{"a", "b", "c"} {
		p[uidOf(name)] = []string{nothing}
	}
	return p
}

// note takes a call's outcome into the promises.
func (p promises) note(a act, errs []error) {
	failed := errors.Join(errs...) != nil
	for uid, after := range a.after {
		if failed {
			after = append(slices.Clone(p[uid]), after...)
		}
		p[uid] = after
	}
}

func (p promises) check(t *testing.T, l *Ledger, when string) {
	t.Helper()
	for uid, allowed := range p {
		if got := says(l, uid); !slices.Contains(allowed, got) {
			t.Fatalf("%s: claim %s is %s\nallowed: %s", when, uid, got, strings.Join(allowed, "\n"))
		}
	}
	if problems := l.Problems(); len(problems) > 0 {
		t.Fatalf("%s: a crash made a file bad: %v", when, problems)
	}
}

func beginning(plans ...Entry) act {
	a := act{name: "begin", after: map[string][]string{}}
	a.do = func(l *Ledger) []error { return l.Begin(ctx, l.Arrive(), plans...) }
	for _, p := range plans {
		a.name += " " + p.Name
		a.after[p.UID] = []string{said(Begun, p)}
	}
	return a
}

func committing(plans ...Entry) act {
	a := act{name: "commit", after: map[string][]string{}}
	var done []Entry
	for _, p := range plans {
		a.name += " " + p.Name
		done = append(done, doneOf(p))
		a.after[p.UID] = []string{said(Prepared, doneOf(p))}
	}
	a.do = func(l *Ledger) []error { return l.Commit(ctx, done...) }
	return a
}

// joining is a commit of claims that are prepared and have other pods.
func joining(plans ...Entry) act {
	a := committing(plans...)
	a.name = "join" + strings.TrimPrefix(a.name, "commit")
	return a
}

// burying ends a prepared claim. A drive without room leaves no tombstone.
func burying(full bool, entries ...Entry) act {
	a := act{name: "bury", after: map[string][]string{}}
	var uids []string
	for _, e := range entries {
		a.name += " " + e.Name
		uids = append(uids, e.UID)
		a.after[e.UID] = []string{said(Gone, e)}
		if full {
			a.after[e.UID] = append(a.after[e.UID], nothing)
		}
	}
	a.do = func(l *Ledger) []error { return l.Tombstone(ctx, uids...) }
	return a
}

// life is a sequence of calls that reaches every state and every way into it.
// With full, the drive may lack room.
func life(c *clock, full bool) []act {
	a, b, again := planOf("a", "gpu-0"), planOf("b", "gpu-1"), planOf("a", "gpu-2")
	third := planOf("c", "gpu-0")
	changed := b.clone()
	changed.Weights[0].Digest[0] = 9
	joined := changed.clone()
	joined.Pods = append(joined.Pods, Pod{Name: "joined", UID: "77-joined"})
	return []act{
		beginning(a, b),
		committing(a),
		beginning(changed),
		committing(changed),
		joining(joined),
		burying(full, doneOf(a)),
		beginning(third),
		burying(full, third),
		beginning(again),
		committing(again),
		{"sweep", func(l *Ledger) []error {
			c.pass(25 * time.Hour)
			l.Released(ctx, third.UID, HeldWeights, HeldKV)
			return []error{l.Sweep(ctx)}
		}, map[string][]string{third.UID: {nothing}}},
		burying(full, doneOf(again), doneOf(joined)),
	}
}

// live plays a life until a call fails as stop says, and gives what was
// promised.
func live(l *Ledger, acts []act, stop func(error) bool) (promises, error) {
	p := newPromises()
	for _, a := range acts {
		errs := a.do(l)
		p.note(a, errs)
		if err := errors.Join(errs...); stop(err) {
			return p, err
		}
	}
	return p, nil
}

func crashed(err error) bool { return errors.Is(err, durabletest.ErrCrashed) }

// everyFate has each crash leave more at random, and each thing it may leave
// crash again (`make crash`); without it a sample of both is tried.
var everyFate = os.Getenv("CRASH") == "full"

// fates are what a crash leaves: the extremes, all but one change, only one,
// and some at random.
func fates(fsys *durabletest.FS, seed uint64) []durabletest.Survives {
	all := []durabletest.Survives{durabletest.Nothing, durabletest.Everything, durabletest.NamesAlone, durabletest.BytesAlone}
	for _, n := range fsys.Unsynced() {
		all = append(all, durabletest.Only(n), durabletest.Without(n))
	}
	random := uint64(2)
	if everyFate {
		random = 12
	}
	for i := range random {
		all = append(all, durabletest.Randomly(rand.New(rand.NewPCG(seed, i))))
	}
	return all
}

func TestAfterACrashAtAnyChangeEachClaimIsWhatTheCallsPromised(t *testing.T) {
	t.Parallel()
	for _, tear := range []bool{false, true} {
		for n := 1; ; n++ {
			fsys, c := durabletest.New(), newClock()
			fsys.CrashAt(n, tear)
			p := newPromises()
			l, err := open(fsys, c)
			if err == nil {
				p, err = live(l, life(c, false), crashed)
			}
			if err != nil && !crashed(err) {
				t.Fatalf("change %d: %v", n, err)
			}
			for i, fate := range fates(fsys, uint64(n)) {
				sector := []int64{durabletest.PageSector, durabletest.SmallSector}[i%2]
				when := fmt.Sprintf("crash at change %d (torn %v), fate %d", n, tear, i)
				after := fsys.CrashWith(sector, fate)
				p.check(t, reopened(t, after, c, when), when)
				if i < 4 || everyFate {
					crashAgain(t, fsys, sector, fate, c, p, when)
				}
			}
			if err == nil {
				break
			}
		}
	}
}

// reopened opens the ledger after a crash.
func reopened(t *testing.T, fsys *durabletest.FS, c *clock, when string) *Ledger {
	t.Helper()
	l, err := open(fsys, c)
	if err != nil {
		t.Fatalf("%s: the ledger does not open: %v", when, err)
	}
	return l
}

// crashAgain crashes at each change of the opening after a crash.
func crashAgain(t *testing.T, fsys *durabletest.FS, sector int64, fate durabletest.Survives, c *clock, p promises, when string) {
	t.Helper()
	for m := 1; ; m++ {
		again := fsys.CrashWith(sector, fate)
		again.CrashAt(m, m%2 == 0)
		_, err := open(again, c)
		if err != nil && !crashed(err) {
			t.Fatalf("%s, then at change %d: %v", when, m, err)
		}
		what := fmt.Sprintf("%s, again at change %d", when, m)
		p.check(t, reopened(t, again.Crash(rand.New(rand.NewPCG(uint64(m), 5))), c, what), what)
		if err == nil {
			return
		}
	}
}

func TestAfterACrashEveryClaimCanGoOn(t *testing.T) {
	t.Parallel()
	for n := 1; ; n++ {
		fsys, c := durabletest.New(), newClock()
		fsys.CrashAt(n, n%2 == 0)
		l, err := open(fsys, c)
		if err == nil {
			_, err = live(l, life(c, false), crashed)
		}
		after := fsys.Crash(rand.New(rand.NewPCG(uint64(n), 11)))
		next := mustOpen(t, after, c)
		if buryErr := errors.Join(next.Tombstone(ctx, uidOf("a"), uidOf("b"), uidOf("c"))...); buryErr != nil {
			t.Fatalf("crash at change %d: %v", n, buryErr)
		}
		for _, e := range []Entry{planOf("a", "gpu-0"), planOf("b", "gpu-1"), planOf("c", "gpu-2")} {
			e.Name, e.UID = e.Name+"2", e.UID+"2"
			prepared(t, next, e)
		}
		if got := len(next.Entries()); got != 3 {
			t.Fatalf("crash at change %d: %d claims, want 3", n, got)
		}
		if err == nil {
			return
		}
	}
}

func TestWhatAKilledProcessLeftIsDurableOnceItIsBelieved(t *testing.T) {
	t.Parallel()
	for n := 1; ; n++ {
		fsys, c := durabletest.New(), newClock()
		fsys.CrashAt(n, n%2 == 0)
		p := newPromises()
		l, err := open(fsys, c)
		if err == nil {
			p, err = live(l, life(c, false), crashed)
		}
		if err == nil {
			return
		}
		fsys.Revive()
		next := mustOpen(t, fsys, c)
		when := fmt.Sprintf("killed at change %d", n)
		p.check(t, next, when)
		if err := next.Sweep(ctx); err != nil {
			t.Fatal(err)
		}
		believed := promises{}
		for uid := range p {
			believed[uid] = []string{says(next, uid)}
		}
		lines := journalLines(t, fsys)
		after := fsys.Crash(nil)
		believed.check(t, mustOpen(t, after, c), when+", then the power went")
		if got := journalLines(t, after); !slices.Equal(got, lines) {
			t.Fatalf("%s: the journal had %v, after the power went %v", when, lines, got)
		}
	}
}

// journalLines gives event and claim of each line by its number.
func journalLines(t *testing.T, fsys *durabletest.FS) []string {
	t.Helper()
	j := &journal{fs: fsys, dir: filepath.Join(testDir, "journal")}
	files, err := j.files()
	if err != nil {
		t.Fatal(err)
	}
	byNumber := map[uint64]string{}
	for _, f := range files {
		data, err := durable.ReadFile(fsys, filepath.Join(j.dir, f.name()), maxJournalFile)
		if err != nil {
			t.Fatal(err)
		}
		for row := range strings.Lines(string(data)) {
			if l, err := decodeLine([]byte(row)); err == nil {
				byNumber[l.Number] = l.Event + " " + l.Name
			}
		}
	}
	var rows []string
	for n, row := range byNumber {
		rows = append(rows, fmt.Sprintf("%03d %s", n, row))
	}
	slices.Sort(rows)
	return rows
}

func TestTheJournalLosesNoLineOfAnEntryWhereverItCrashes(t *testing.T) {
	t.Parallel()
	for n := 1; ; n++ {
		fsys, c := durabletest.New(), newClock()
		fsys.CrashAt(n, n%2 == 0)
		l, err := open(fsys, c)
		promised := map[string]bool{}
		if err == nil {
			for _, a := range life(c, false) {
				if err = errors.Join(a.do(l)...); err != nil {
					break
				}
				verb, names, _ := strings.Cut(a.name, " ")
				event := map[string]string{"commit": "prepared", "join": "pods", "bury": "unprepared"}[verb]
				for name := range strings.FieldsSeq(names) {
					if event != "" && name != "c" { // c was never prepared
						promised[event+" "+name] = true
					}
				}
			}
		}
		for i, fate := range fates(fsys, uint64(n)) {
			after := fsys.CrashWith(durabletest.SmallSector, fate)
			next := mustOpen(t, after, c)
			if err := next.Sweep(ctx); err != nil {
				t.Fatal(err)
			}
			got := strings.Join(journalLines(t, after), "\n") + "\n"
			for row := range promised {
				if !strings.Contains(got, row+"\n") {
					t.Fatalf("crash at change %d, fate %d: no line %q in\n%s", n, i, row, got)
				}
			}
		}
		if err == nil {
			return
		}
	}
}

func TestAnErrorAtAnyChangeIsToldAndTheSameCallLaterSucceeds(t *testing.T) {
	t.Parallel()
	for _, errno := range []syscall.Errno{syscall.EIO, syscall.ENOSPC} {
		for n, changes := 1, 1; n <= changes; n++ {
			fsys, c := durabletest.New(), newClock()
			fsys.FailAt(n, errno)
			l, err := open(fsys, c)
			if err != nil {
				if !errors.Is(err, errno) {
					t.Fatalf("%v at change %d: %v", errno, n, err)
				}
				l = mustOpen(t, fsys, c)
			}
			p := newPromises()
			for _, a := range life(c, true) {
				errs := a.do(l)
				p.note(a, errs)
				if err := errors.Join(errs...); err != nil {
					if !errors.Is(err, errno) {
						t.Fatalf("%v at change %d, %s: %v", errno, n, a.name, err)
					}
					checkAfterPowerCut(t, fsys, c, p, n, a.name)
					errs = a.do(l)
					p.note(a, errs)
				}
				if err := errors.Join(errs...); err != nil {
					t.Fatalf("%v at change %d, %s again: %v", errno, n, a.name, err)
				}
			}
			p.check(t, l, fmt.Sprintf("%v at change %d", errno, n))
			checkAfterPowerCut(t, fsys, c, p, n, "the end")
			changes = fsys.Changes()
		}
	}
}

// checkAfterPowerCut sees what a power cut now would leave; the file system
// goes on.
func checkAfterPowerCut(t *testing.T, fsys *durabletest.FS, c *clock, p promises, n int, when string) {
	t.Helper()
	for i, fate := range []durabletest.Survives{durabletest.Nothing, durabletest.Everything, durabletest.BytesAlone} {
		after := fsys.CrashWith(durabletest.SmallSector, fate)
		l := mustOpen(t, after, c)
		for uid, allowed := range p {
			if got := says(l, uid); !slices.Contains(allowed, got) {
				t.Fatalf("failure at change %d, power cut after %s, fate %d: claim %s is %s\nallowed: %s", n, when, i, uid, got, strings.Join(allowed, "\n"))
			}
		}
	}
	fsys.Revive()
}
