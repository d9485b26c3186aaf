package ledger

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
)

func TestOnAFullDrivePrepareSaysSoAndUnprepareSucceeds(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fill func(fsys *durabletest.FS)
		want error
	}{
		"blocks": {func(fsys *durabletest.FS) { fsys.SetCapacity(1) }, syscall.ENOSPC},
		"quota":  {func(fsys *durabletest.FS) { fsys.SetQuota(1) }, syscall.EDQUOT},
		"inodes": {func(fsys *durabletest.FS) { fsys.SetInodes(1) }, syscall.ENOSPC},
	} {
		fsys, clock := durabletest.New(), newClock()
		l := mustOpen(t, fsys, clock)
		prepared(t, l, planOf("a", "gpu-0"))
		if err := begin(l, planOf("b", "gpu-1")); err != nil {
			t.Fatal(err)
		}
		c.fill(fsys)
		err := begin(l, planOf("c", "gpu-2"))
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), "team/c") || !strings.Contains(err.Error(), "no space left at "+testDir) {
			t.Errorf("%s: Begin: %v", name, err)
		}
		if name != "inodes" { // an append needs none
			if err := commit(l, doneOf(planOf("b", "gpu-1"))); !errors.Is(err, c.want) {
				t.Errorf("%s: Commit: %v", name, err)
			}
		}
		if errs := l.Tombstone(ctx, uidOf("a"), uidOf("b")); errors.Join(errs...) != nil {
			t.Errorf("%s: Unprepare: %v", name, errs)
		}
		if got := l.Owners("node-1", "gpu-0"); len(got) != 0 {
			t.Errorf("%s: the device still has owners %v", name, got)
		}
		again := mustOpen(t, fsys.Crash(nil), clock)
		if got := again.Entries(); len(got) != 0 {
			t.Errorf("%s: after a restart %v is there again", name, got)
		}
	}
}

func TestARefusedCommitCanBeRepeatedOnceThereIsRoom(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), newClock()
	l := mustOpen(t, fsys, c)
	plan := planOf("a", "gpu-0")
	if err := begin(l, plan); err != nil {
		t.Fatal(err)
	}
	fsys.SetCapacity(1)
	if err := commit(l, doneOf(plan)); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("on a full drive: %v", err)
	}
	if got := says(l, plan.UID); got != said(Begun, plan) {
		t.Errorf("after the refusal: %s", got)
	}
	fsys.SetCapacity(0)
	if err := commit(l, doneOf(plan)); err != nil {
		t.Fatal(err)
	}
	if got := says(mustOpen(t, fsys.Crash(nil), c), plan.UID); got != said(Prepared, doneOf(plan)) {
		t.Errorf("after a crash: %s", got)
	}
}

func TestOnADriveThatTakesNothingUnprepareSaysWhyAndTheClaimKeepsItsDevices(t *testing.T) {
	t.Parallel()
	for text, fail := range map[string]func(fsys *durabletest.FS, on bool){
		testDir + " is read-only": func(fsys *durabletest.FS, on bool) { fsys.SetReadOnly(on) },
		"the drive of " + testDir + " fails": func(fsys *durabletest.FS, on bool) {
			fsys.FailWhen(func(string, string) error { return syscall.EIO })
			if !on {
				fsys.Heal()
			}
		},
	} {
		fsys, c := durabletest.New(), newClock()
		l := mustOpen(t, fsys, c)
		done := prepared(t, l, planOf("a", "gpu-0"))
		fail(fsys, true)
		for what, err := range map[string]error{"Prepare": begin(l, planOf("b", "gpu-1")), "Unprepare": bury(l, "a")} {
			if err == nil || !strings.Contains(err.Error(), text) || !strings.Contains(err.Error(), "claim team/") {
				t.Errorf("%s is told %v, want %q", what, err, text)
			}
		}
		if got := says(l, done.UID); got != said(Prepared, done) {
			t.Errorf("after the refusal: %s", got)
		}
		if err := bury(l, "unknown"); err != nil {
			t.Errorf("an unknown claim: %v", err)
		}
		fail(fsys, false)
		if err := bury(l, "a"); err != nil {
			t.Errorf("once it can be written: %v", err)
		}
		if got := mustOpen(t, fsys.Crash(nil), c).Entries(); len(got) != 0 {
			t.Errorf("after a crash: %v", got)
		}
	}
}

// damage opens a ledger with three prepared claims of which one's file is
// changed.
func damage(t *testing.T, change func(data []byte) []byte) (*durabletest.FS, *clock) {
	t.Helper()
	fsys, c := durabletest.New(), newClock()
	l := mustOpen(t, fsys, c)
	for i, name := range []string{"a", "b", "c"} {
		prepared(t, l, planOf(name, fmt.Sprintf("gpu-%d", i)))
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	path := l.path(uidOf("b"))
	data, err := durable.ReadFile(fsys, path, maxFile)
	if err != nil {
		t.Fatal(err)
	}
	if err := durable.WriteFile(fsys, path, change(data), 0o600); err != nil {
		t.Fatal(err)
	}
	return fsys, c
}

func flip(at int) func([]byte) []byte {
	return func(data []byte) []byte {
		data[(at+len(data))%len(data)] ^= 4
		return data
	}
}

func TestADamagedFileCostsItsClaimAloneAndIsKeptAside(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func([]byte) []byte{
		"empty":                func([]byte) []byte { return nil },
		"noise":                func([]byte) []byte { return []byte("{}\n") },
		"a bit of the header":  flip(3),
		"a bit of the version": flip(13),
		"a bit of the first":   flip(200),
		"a bit of the last":    flip(-20),
		"its last line feed":   flip(-1),
		"an unknown field":     func([]byte) []byte { return record(1, `{"uid":"`+uidOf("b")+`","surprise":1}`) },
		"another claim's":      func([]byte) []byte { return record(1, `{"uid":"x","namespace":"n","name":"m","state":"begun"}`) },
		"a state that is none": func([]byte) []byte {
			return record(1, `{"uid":"`+uidOf("b")+`","namespace":"n","name":"m","state":"?"}`)
		},
		"more than a file holds": func(data []byte) []byte { return append(data, make([]byte, maxFile)...) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fsys, c := damage(t, change)
			for round := range 3 {
				l := mustOpen(t, fsys, c)
				if got := len(l.Entries()); got != 2 {
					t.Fatalf("%d claims are left, want 2", got)
				}
				if got := l.Unsettled(); !slices.Equal(got, []string{uidOf("b")}) {
					t.Fatalf("round %d: unsettled %v", round, got)
				}
				problems := l.Problems()
				if len(problems) != 1 || problems[0].UID != uidOf("b") || problems[0].Reason == "" || filepath.Dir(problems[0].File) != l.badDir() {
					t.Fatalf("round %d: problems %v", round, problems)
				}
				if _, err := fsys.Stat(problems[0].File); err != nil {
					t.Error(err)
				}
				if err := l.Close(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

func TestADamagedClaimIsSettledByUnprepareOrByANewPrepare(t *testing.T) {
	t.Parallel()
	for name, settle := range map[string]func(t *testing.T, l *Ledger){
		"unprepare": func(t *testing.T, l *Ledger) {
			t.Helper()
			if err := bury(l, "b"); err != nil {
				t.Fatal(err)
			}
		},
		"prepare": func(t *testing.T, l *Ledger) { t.Helper(); prepared(t, l, planOf("b", "gpu-1")) },
	} {
		fsys, c := damage(t, flip(-20))
		l := mustOpen(t, fsys, c)
		settle(t, l)
		for range 2 {
			if got := l.Unsettled(); len(got) != 0 {
				t.Errorf("%s: unsettled %v", name, got)
			}
			old, err := fsys.ReadDir(l.oldDir())
			if err != nil || len(old) != 1 {
				t.Errorf("%s: kept for people: %v, %v", name, old, err)
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			l = mustOpen(t, fsys, c)
		}
	}
}

// record makes a record of any version and body.
func record(version int, body string) []byte {
	body += "\n"
	head := header(version, len(body))
	return []byte(head + " sha256:" + sum(head, []byte(body)) + "\n" + body)
}

func TestALedgerOfANewerVersionIsRefusedUntouched(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func([]byte) []byte{
		"alone":                    func([]byte) []byte { return record(Version+1, `{"anything":true}`) },
		"after one that is known":  func(data []byte) []byte { return append(data, record(Version+1, `[]`)...) },
		"before one that is known": func(data []byte) []byte { return append(record(Version+1, `1`), data...) },
	} {
		fsys, c := damage(t, change)
		if err := durable.WriteFile(fsys, testDir+"/bad-neighbour.json", []byte("noise"), 0o600); err != nil {
			t.Fatal(err)
		}
		before := fsys.Changes()
		if _, err := open(fsys, c); !errors.Is(err, ErrNewer) || !strings.Contains(err.Error(), uidOf("b")) {
			t.Errorf("%s: %v", name, err)
		}
		if got := fsys.Changes(); got != before {
			t.Errorf("%s: %d changes were made", name, got-before)
		}
	}
}

func TestAnUnreadableFileCostsItsClaimAlone(t *testing.T) {
	t.Parallel()
	fsys, c := damage(t, func(data []byte) []byte { return data })
	fsys.FailReadWhen(func(op, path string) error {
		if op == "read" && strings.HasSuffix(path, uidOf("b")+".json") {
			return syscall.EIO
		}
		return nil
	})
	l := mustOpen(t, fsys, c)
	if got := len(l.Entries()); got != 2 || len(l.Problems()) != 1 || !slices.Equal(l.Unsettled(), []string{uidOf("b")}) {
		t.Errorf("%d claims, problems %v, unsettled %v", got, l.Problems(), l.Unsettled())
	}
}

func TestForeignFilesInTheDirectoryAreLeftAlone(t *testing.T) {
	t.Parallel()
	fsys, c := damage(t, func(data []byte) []byte { return data })
	for _, name := range []string{"README", "bad/README", "journal/README"} {
		if err := durable.WriteFile(fsys, testDir+"/"+name, []byte("of an operator"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	temp := durable.TempName(testDir + "/" + uidOf("z") + ".json")
	if err := durable.WriteFile(fsys, temp, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	l := mustOpen(t, fsys, c)
	if len(l.Problems()) != 0 || len(l.Entries()) != 3 {
		t.Errorf("problems %v, %d claims", l.Problems(), len(l.Entries()))
	}
	for _, name := range []string{"README", "bad/README", "journal/README"} {
		if _, err := fsys.Stat(testDir + "/" + name); err != nil {
			t.Error(err)
		}
	}
	if _, err := fsys.Stat(temp); err == nil {
		t.Error("the rest of an interrupted write is still there")
	}
}
