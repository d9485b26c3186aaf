package ledger

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
)

func journalText(t *testing.T, fsys durable.FS, name string) string {
	t.Helper()
	data, err := durable.ReadFile(fsys, filepath.Join(testDir, "journal", name), maxJournalTotal)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestTheJournalSaysWhoHadWhichDeviceFromWhenToWhen(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), newClock()
	l := mustOpen(t, fsys, c)
	prepared(t, l, planOf("a", "gpu-0"))
	c.pass(time.Minute)
	prepared(t, l, planOf("b", "gpu-1"))
	c.pass(time.Hour)
	if err := bury(l, "a"); err != nil {
		t.Fatal(err)
	}
	if err := begin(l, planOf("c", "gpu-2")); err != nil {
		t.Fatal(err)
	}
	if err := bury(l, "c"); err != nil { // it was never prepared, so it had nothing
		t.Fatal(err)
	}
	digest := `"artifacts":["010203` + strings.Repeat("0", 58) + `"]`
	want := `{"v":1,"n":1,"event":"prepared","at":"2026-11-29T12:00:00Z","claim":"0c1a-a","namespace":"team","name":"a","pods":["pod-a"],"devices":["GPU-gpu-0"],` + digest + `,"kvNamespace":"team","from":"2026-11-29T12:00:00Z"}
{"v":1,"n":2,"event":"prepared","at":"2026-11-29T12:01:00Z","claim":"0c1a-b","namespace":"team","name":"b","pods":["pod-b"],"devices":["GPU-gpu-1"],"sharers":["0c1a-a"],` + digest + `,"kvNamespace":"team","from":"2026-11-29T12:01:00Z"}
{"v":1,"n":3,"event":"unprepared","at":"2026-11-29T13:01:00Z","claim":"0c1a-a","namespace":"team","name":"a","pods":["pod-a"],"devices":["GPU-gpu-0"],"sharers":["0c1a-b"],` + digest + `,"kvNamespace":"team","from":"2026-11-29T12:00:00Z","to":"2026-11-29T13:01:00Z"}
`
	if got := journalText(t, fsys, "2026-11.jsonl"); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}

func TestTheJournalBeginsAFileWithEachMonthAndNeverGoesBack(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), newClock()
	l := mustOpen(t, fsys, c)
	for i, step := range []time.Duration{0, 3 * 24 * time.Hour, -7 * 24 * time.Hour} {
		c.pass(step)
		prepared(t, l, planOf(fmt.Sprint(i), fmt.Sprintf("gpu-%d", i)))
	}
	if got := strings.Count(journalText(t, fsys, "2026-11.jsonl"), "\n"); got != 1 {
		t.Errorf("November has %d lines", got)
	}
	if got := strings.Count(journalText(t, fsys, "2026-12.jsonl"), "\n"); got != 2 {
		t.Errorf("December has %d lines", got)
	}
}

func TestTheJournalIsBoundedAndItsOldestFilesGo(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), newClock()
	l := mustOpen(t, fsys, c)
	write := func(name string, size int) {
		t.Helper()
		if err := durable.WriteFile(fsys, filepath.Join(l.journal.dir, name), make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 20 {
		write(fmt.Sprintf("20%02d-01.jsonl", i), 1)
	}
	write("2025-01.jsonl", maxJournalTotal/2)
	write("2025-01.2.jsonl", maxJournalTotal/2)
	write("2025-01.10.jsonl", 2)
	prepared(t, l, planOf("a", "gpu-0"))
	if err := l.Sweep(ctx); err != nil {
		t.Fatal(err)
	}
	files, err := l.journal.files()
	want := []monthFile{{"2025-01", 2}, {"2025-01", 10}, {"2026-11", 1}}
	if err != nil || !slices.Equal(files, want) {
		t.Errorf("left are %v, %v", files, err)
	}
}

func TestAFullFileOfAMonthIsFollowedByTheNext(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), newClock()
	l := mustOpen(t, fsys, c)
	prepared(t, l, planOf("a", "gpu-0"))
	l.journal.size = maxJournalFile + 1
	prepared(t, l, planOf("b", "gpu-1"))
	if got := strings.Count(journalText(t, fsys, "2026-11.2.jsonl"), "\n"); got != 1 {
		t.Errorf("the second file has %d lines", got)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = mustOpen(t, fsys, c)
	prepared(t, l, planOf("c", "gpu-2"))
	if got := strings.Count(journalText(t, fsys, "2026-11.2.jsonl"), "\n"); got != 2 {
		t.Errorf("after a restart the second file has %d lines", got)
	}
}

func TestLinesThatTheDriveRefusesAreWrittenLater(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"open", "write", "datasync", "syncdir"} {
		fsys, c := durabletest.New(), newClock()
		l := mustOpen(t, fsys, c)
		c.pass(31 * 24 * time.Hour) // another month: there is a file to be made
		fsys.FailWhen(func(at, path string) error {
			if at == op && strings.Contains(path, "/journal") {
				return syscall.ENOSPC
			}
			return nil
		})
		prepared(t, l, planOf("a", "gpu-0"))
		if err := l.Sweep(ctx); err == nil {
			t.Errorf("%s: nobody was told", op)
		}
		fsys.Heal()
		prepared(t, l, planOf("b", "gpu-1"))
		if err := l.Sweep(ctx); err != nil {
			t.Fatal(err)
		}
		want := []string{"001 prepared a", "002 prepared b"}
		if got := journalLines(t, fsys.Crash(nil)); !slices.Equal(got, want) {
			t.Errorf("%s: the journal has %v", op, got)
		}
	}
}

func TestLinesOfALongJournalAreNotWrittenTwice(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), newClock()
	l := mustOpen(t, fsys, c)
	prepared(t, l, planOf("old", "gpu-0"))
	for i := 0; l.journal.size < 2*window; i++ {
		e := planOf(fmt.Sprint(i), "gpu-1")
		prepared(t, l, e)
		if err := bury(l, e.Name); err != nil {
			t.Fatal(err)
		}
	}
	before := l.journal.last
	l = mustOpen(t, fsys.Crash(nil), c)
	if got := l.journal.last; got != before {
		t.Errorf("numbers go on from %d, want %d", got, before)
	}
	for _, missing := range l.journal.waiting {
		if missing.Name == "old" {
			t.Error("a line that is on the drive is written again")
		}
	}
}

func TestAJournalThatCannotBeReadStopsNoClaim(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), newClock()
	l := mustOpen(t, fsys, c)
	prepared(t, l, planOf("a", "gpu-0"))
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	fsys = fsys.Crash(nil)
	fsys.FailReadWhen(func(_, path string) error {
		if strings.Contains(path, "/journal/") {
			return syscall.EIO
		}
		return nil
	})
	l = mustOpen(t, fsys, c)
	if len(l.Problems()) != 0 || len(l.Entries()) != 1 {
		t.Errorf("problems %v, claims %v", l.Problems(), l.Entries())
	}
	if err := bury(l, "a"); err != nil {
		t.Error(err)
	}
	fsys.Heal()
	if err := l.Sweep(ctx); err != nil {
		t.Fatal(err)
	}
	want := []string{"001 prepared a", "002 unprepared a"}
	if got := journalLines(t, fsys.Crash(nil)); !slices.Equal(got, want) {
		t.Errorf("once it can be read: %v", got)
	}
}
