package upstate

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestStateIsReadBackByItsOwnerOnly(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	if _, err := Read(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Read with nothing running = %v, want os.ErrNotExist", err)
	}
	want := State{
		PID: os.Getpid(), StartedAt: time.Unix(1e9, 0).UTC(),
		Router: "http://127.0.0.1:7400", RouterAdmin: "http://127.0.0.1:7401",
		Agents: []Agent{{Node: "node-1", Socket: "/run/a.sock", Admin: "http://127.0.0.1:7412"}},
	}
	if err := Write(want); err != nil {
		t.Fatal(err)
	}
	got, err := Read()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]State{want}, got); diff != "" {
		t.Errorf("state (-want +got):\n%s", diff)
	}
	path := Path(want.PID)
	file, _ := os.Stat(path)
	dir, _ := os.Stat(Dir())
	if file.Mode().Perm() != 0o600 || dir.Mode().Perm() != 0o700 {
		t.Errorf("modes are %v in %v, want 0600 in 0700", file.Mode(), dir.Mode())
	}
	if err := os.Chmod(path, 0o622); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(); !errors.Is(err, ErrForeign) {
		t.Errorf("Read of a file others may write = %v, want ErrForeign", err)
	}
	if err := Remove(want.PID); err != nil {
		t.Fatal(err)
	}
	if err := Remove(want.PID); err != nil {
		t.Errorf("second Remove = %v", err)
	}
	if _, err := Read(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Read with everything removed = %v, want os.ErrNotExist", err)
	}
}

func TestTheNewestOfSeveralComesFirstAndThoseGoneAreForgotten(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	const gone = 1<<31 - 1 // past the highest process id of Linux
	for pid, age := range map[int]time.Duration{os.Getpid(): time.Hour, os.Getppid(): time.Minute, gone: 0} {
		if err := Write(State{PID: pid, StartedAt: time.Now().Add(-age)}); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Read()
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].PID != os.Getppid() || got[1].PID != os.Getpid() {
		t.Errorf("Read = %+v, want this process's parent, then this process", got)
	}
	if _, err := os.Stat(Path(gone)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file of a process that is gone: %v, want it removed", err)
	}
}

func TestStateBehindALinkIsNotBelieved(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	path := Path(os.Getpid())
	if err := Write(State{PID: os.Getpid()}); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path, path+".real"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path+".real", path); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(); err == nil {
		t.Error("Read followed a symbolic link")
	}
}
