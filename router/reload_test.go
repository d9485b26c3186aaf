package router

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestAConfigurationThatIsAPipeIsNotReadAgain(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	pipe, file := filepath.Join(dir, "pipe"), filepath.Join(dir, "file")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if hashFile(pipe) != irregular { // and does not wait for who writes there
		t.Error("a pipe has the hash of a file")
	}
	before := hashFile(file)
	if err := os.WriteFile(file, []byte("a: b"), 0o600); err != nil {
		t.Fatal(err)
	}
	if now := hashFile(file); now == before || now == irregular {
		t.Error("a file that comes has the hash of none")
	}
}
