package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/durable/durabletest"
)

func TestAFileThatCannotBeReadNowIsNoDamagedOne(t *testing.T) {
	t.Parallel()
	for _, errno := range []syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.EACCES} {
		fsys, c := damage(t, func(data []byte) []byte { return data })
		before := fsys.Changes()
		fsys.FailReadWhen(func(_, path string) error {
			if strings.HasSuffix(path, uidOf("b")+".json") {
				return errno
			}
			return nil
		})
		if _, err := open(fsys, c); !errors.Is(err, errno) || !strings.Contains(err.Error(), uidOf("b")) {
			t.Errorf("%v: %v", errno, err)
		}
		if got := fsys.Changes() - before; got != 0 {
			t.Errorf("%v: %d changes were made", errno, got)
		}
		fsys.Heal()
		l := mustOpen(t, fsys, c)
		if len(l.Entries()) != 3 || len(l.Problems()) != 0 {
			t.Errorf("%v: %d claims later, problems %v", errno, len(l.Entries()), l.Problems())
		}
	}
}

func TestADamagedFileThatStayedInItsPlaceIsSettledForGood(t *testing.T) {
	t.Parallel()
	for name, settle := range map[string]func(t *testing.T, l *Ledger){
		"unprepare": func(t *testing.T, l *Ledger) {
			t.Helper()
			if err := bury(l, "b"); err != nil {
				t.Error(err)
			}
		},
		"prepare": func(t *testing.T, l *Ledger) { t.Helper(); prepared(t, l, planOf("b", "gpu-1")) },
	} {
		fsys, c := damage(t, flip(-20))
		fsys.FailWhen(func(op, _ string) error {
			if op == "rename" {
				return syscall.EIO
			}
			return nil
		})
		l := mustOpen(t, fsys, c)
		if got := l.Unsettled(); !slices.Equal(got, []string{uidOf("b")}) {
			t.Fatalf("%s: unsettled %v", name, got)
		}
		fsys.Heal()
		settle(t, l)
		for _, when := range []string{"now", "after a power cut"} {
			if when != "now" {
				l = mustOpen(t, fsys.Crash(nil), c)
			}
			if got := l.Unsettled(); len(got) != 0 {
				t.Errorf("%s, %s: unsettled %v", name, when, got)
			}
		}
	}
}

func TestWhatIsKeptForPeopleOutlivesAPowerCutAndTakesNoFilesOfTheirs(t *testing.T) {
	t.Parallel()
	fsys, c := damage(t, flip(-20))
	l := mustOpen(t, fsys, c)
	names := []string{"0-notes"}
	for i := range maxBad {
		names = append(names, fmt.Sprintf("%d-old.json", 100+i))
	}
	for _, name := range names {
		if err := durable.WriteFile(fsys, filepath.Join(l.oldDir(), name), []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := bury(l, "b"); err != nil {
		t.Fatal(err)
	}
	after := fsys.Crash(nil)
	entries, err := after.ReadDir(l.oldDir())
	if err != nil {
		t.Fatal(err)
	}
	var kept []string
	for _, e := range entries {
		kept = append(kept, e.Name())
	}
	newest := slices.ContainsFunc(kept, func(name string) bool { return strings.HasSuffix(name, "-"+uidOf("b")+".json") })
	if len(kept) != maxBad+1 || !newest || !slices.Contains(kept, "0-notes") || slices.Contains(kept, "100-old.json") {
		t.Errorf("kept are %v", kept)
	}
}

func TestClaimsOfOneCallPastTheLimitAreRefused(t *testing.T) {
	t.Parallel()
	l := mustOpen(t, durabletest.New(), newClock())
	l.live = maxClaims - 1
	errs := l.Begin(ctx, l.Arrive(), planOf("a", "gpu-0"), planOf("b", "gpu-1"))
	if errs[0] != nil || !errors.Is(errs[1], ErrFull) || !strings.Contains(errs[1].Error(), "4096") {
		t.Errorf("the last claim that there is room for: %v, one more: %v", errs[0], errs[1])
	}
}

// counting is a file system that counts open files.
type counting struct {
	durable.FS
	mu         sync.Mutex
	open, most int
}

type counted struct {
	durable.File
	fs *counting
}

func (c *counting) OpenFile(path string, flag int, perm fs.FileMode) (durable.File, error) {
	f, err := c.FS.OpenFile(path, flag, perm)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open++
	c.most = max(c.most, c.open)
	return &counted{f, c}, nil
}

func (f *counted) Close() error {
	f.fs.mu.Lock()
	f.fs.open--
	f.fs.mu.Unlock()
	return f.File.Close()
}

func TestAnOpeningNeedsFewDescriptorsHoweverManyClaimsThereAre(t *testing.T) {
	t.Parallel()
	fsys, c := durabletest.New(), newClock()
	l := mustOpen(t, fsys, c)
	for i := range 5*maxSyncs + 3 {
		prepared(t, l, planOf(fmt.Sprint(i), fmt.Sprintf("gpu-%d", i)))
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	count := &counting{FS: fsys}
	again, err := Open(Options{Dir: testDir, FS: count, BootID: "boot-1", Now: c.now})
	if err != nil {
		t.Fatal(err)
	}
	if got := len(again.Entries()); got != 5*maxSyncs+3 || count.most > maxSyncs || count.open != 0 {
		t.Errorf("%d claims with %d files open at once, %d at the end", got, count.most, count.open)
	}
}
