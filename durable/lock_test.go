package durable

import (
	"errors"
	"path/filepath"
	"syscall"
	"testing"
)

func TestALockIsGivenBackThoughAChildHasACopyOfItsFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	first, err := Lock(path)
	if err != nil {
		t.Fatal(err)
	}
	// What a fork does between its beginning and its exec.
	fd, err := syscall.Dup(int(first.(held).file.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Close(fd) }()
	if _, err := Lock(path); !errors.Is(err, ErrLocked) {
		t.Errorf("a second owner gets %v, want ErrLocked", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := Lock(path)
	if err != nil {
		t.Fatalf("after the lock was given back: %v", err)
	}
	if err := second.Close(); err != nil {
		t.Error(err)
	}
}
