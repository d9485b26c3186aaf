package identity_test

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/identity"
)

func TestASocketIsTakenFromTheDeadAndNeverFromTheLiving(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "deep", "x.sock")
	dead, err := identity.ListenSocket(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o660 {
		t.Fatalf("mode %v, %v", info.Mode(), err)
	}
	if _, err := identity.ListenSocket(t.Context(), path); err == nil || !strings.Contains(err.Error(), "another process answers") {
		t.Fatalf("a living socket gave %v", err)
	}
	unix, ok := dead.(*net.UnixListener)
	if !ok {
		t.Fatalf("a %T", dead)
	}
	unix.SetUnlinkOnClose(false) // as a killed process leaves it
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	next, err := identity.ListenSocket(t.Context(), path)
	if err != nil {
		t.Fatalf("a dead socket gave %v", err)
	}
	_ = next.Close()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := identity.ListenSocket(t.Context(), file); err == nil {
		t.Error("a file that is no socket was taken")
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "kept" {
		t.Errorf("the file holds %q, %v", text, err)
	}
}
