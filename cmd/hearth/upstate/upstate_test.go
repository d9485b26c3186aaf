package upstate

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestStateIsReadBackByItsOwnerOnly(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	if _, err := Read(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Read with nothing running = %v, want os.ErrNotExist", err)
	}
	want := State{
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
	if diff := cmp.Diff(&want, got); diff != "" {
		t.Errorf("state (-want +got):\n%s", diff)
	}
	file, _ := os.Stat(Path())
	dir, _ := os.Stat(filepath.Dir(Path()))
	if file.Mode().Perm() != 0o600 || dir.Mode().Perm() != 0o700 {
		t.Errorf("modes are %v in %v, want 0600 in 0700", file.Mode(), dir.Mode())
	}
	if err := os.Chmod(Path(), 0o622); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(); !errors.Is(err, ErrForeign) {
		t.Errorf("Read of a file others may write = %v, want ErrForeign", err)
	}
	if err := Remove(); err != nil {
		t.Fatal(err)
	}
	if err := Remove(); err != nil {
		t.Errorf("second Remove = %v", err)
	}
}

func TestStateBehindALinkIsNotBelieved(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	if err := Write(State{}); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(Path(), Path()+".real"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(Path()+".real", Path()); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(); err == nil {
		t.Error("Read followed a symbolic link")
	}
}
