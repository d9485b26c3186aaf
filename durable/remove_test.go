package durable_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/durable"
)

// nest makes folders within each other, each with a file, below dir.
func nest(t *testing.T, dir string, levels int) {
	t.Helper()
	at, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range levels {
		name := fmt.Sprintf("level-%d", i)
		file, err := unix.Openat(at, "file", unix.O_CREAT|unix.O_WRONLY, 0o600)
		if err == nil {
			err = errors.Join(unix.Close(file), unix.Mkdirat(at, name, 0o755))
		}
		if err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err := errors.Join(err, unix.Close(at)); err != nil {
			t.Fatal(err)
		}
		at = next
	}
	if err := unix.Close(at); err != nil {
		t.Fatal(err)
	}
}

func TestATreeOfAnyDepthIsRemovedWithFewFilesOpen(t *testing.T) {
	// The limit counts for the whole process, so that no other test runs beside.
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "tree")
	if err := os.MkdirAll(filepath.Join(dir, "beside"), 0o755); err != nil {
		t.Fatal(err)
	}
	nest(t, dir, 2000)
	narrow := before
	narrow.Cur = 100
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &narrow); err != nil {
		t.Fatal(err)
	}
	err := durable.OS.RemoveAll(dir)
	if back := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); back != nil {
		t.Fatal(back)
	}
	if err != nil {
		t.Errorf("a tree of 2000 levels is not removed: %v", err)
		if err := durable.OS.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the tree is there: %v", err)
	}
}

func TestRemovingATreeTakesAllOfItAndFollowsNoLink(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	outside, dir := filepath.Join(root, "outside"), filepath.Join(root, "tree")
	for _, d := range []string{outside, filepath.Join(dir, "a", "b"), filepath.Join(dir, "wide")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	kept := filepath.Join(outside, "kept")
	if err := os.WriteFile(kept, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, link := range []string{filepath.Join(dir, "link"), filepath.Join(dir, "a", "b", "link")} {
		if err := os.Symlink(outside, link); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 3000 {
		if err := os.WriteFile(filepath.Join(dir, "wide", fmt.Sprint(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(root, "link")
	if err := os.Symlink(outside, link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, link, filepath.Join(root, "never")} {
		if err := durable.OS.RemoveAll(path); err != nil {
			t.Errorf("remove %s: %v", path, err)
		}
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is there: %v", path, err)
		}
	}
	if _, err := os.Stat(kept); err != nil {
		t.Errorf("what a link named is gone: %v", err)
	}
}
