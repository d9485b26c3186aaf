package nodeagent

import (
	"crypto/sha256"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

func TestATokenFileThatCannotBeReadInTimeHoldsUpNobodyElse(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte("before"), 0o600); err != nil {
		t.Fatal(err)
	}
	b := newTokenBook([]Token{{Name: "one", File: path}}, slog.New(slog.DiscardHandler))
	before, after := sha256.Sum256([]byte("before")), sha256.Sum256([]byte("after"))
	if name, known := b.named(before); name != "one" || !known {
		t.Fatalf("at first: %q, %v", name, known)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	b.mu.Lock()
	b.looked = time.Time{}
	b.mu.Unlock()
	first := make(chan bool, 1)
	go func() {
		_, known := b.named(after)
		first <- known
	}()
	// It opens once the first caller reads.
	slow, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	second := make(chan bool, 1)
	go func() {
		_, known := b.named(before)
		second <- known
	}()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	select {
	case known := <-second:
		if !known {
			t.Error("what stood before stands no more")
		}
	case <-deadline.C:
		t.Error("a caller waits for a file that another reads")
	}
	if _, err := slow.WriteString("after"); err != nil {
		t.Fatal(err)
	}
	if err := slow.Close(); err != nil {
		t.Fatal(err)
	}
	if !<-first {
		t.Error("the new token is not known to who read it")
	}
}
