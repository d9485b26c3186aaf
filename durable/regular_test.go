package durable_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/hearth-dev/hearth/durable"
)

func TestWhatIsNoRegularFileIsNotReadAsOne(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	if err := errors.Join(syscall.Mkfifo(at("pipe"), 0o600), os.Mkdir(at("folder"), 0o700), os.WriteFile(at("file"), []byte("text"), 0o600),
		os.Symlink("file", at("link"))); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"pipe", "folder"} { // nobody writes to the pipe
		if _, err := durable.ReadRegular(durable.OS, at(name), 10); !errors.Is(err, durable.ErrIrregular) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"file", "link"} {
		if data, err := durable.ReadRegular(durable.OS, at(name), 4); err != nil || string(data) != "text" {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
	if _, err := durable.ReadRegular(durable.OS, at("file"), 3); !errors.Is(err, durable.ErrTooLong) {
		t.Errorf("a longer one: %v", err)
	}
	if _, err := durable.ReadRegular(durable.OS, at("none"), 3); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("none: %v", err)
	}
}
