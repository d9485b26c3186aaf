package programs

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestTheKeyNamesTheVersionsAndChangesWithTheSources(t *testing.T) {
	t.Parallel()
	source, err := Source()
	if err != nil {
		t.Fatal(err)
	}
	first, err := key(t.Context(), source)
	if err != nil || !strings.HasPrefix(first, "kubernetes-1.37.2_containerd-2.4.2_runc-1.5.3_") {
		t.Fatalf("%s, %v", first, err)
	}
	copied := filepath.Join(t.TempDir(), "kubelab")
	if err := os.CopyFS(copied, os.DirFS(source)); err != nil {
		t.Fatal(err)
	}
	if same, err := key(t.Context(), copied); same != first || err != nil {
		t.Errorf("a copy has the key %s, %v", same, err)
	}
	if err := os.WriteFile(filepath.Join(copied, "pause/main.go"), []byte("package main\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if other, err := key(t.Context(), copied); other == first || err != nil {
		t.Errorf("changed sources have the key %s, %v", other, err)
	}
}

func TestWhatIsPublishedIsWholeAndWhatIsNotIsGone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	unfinished, final := filepath.Join(dir, "unfinished"), filepath.Join(dir, "final")
	if err := os.Mkdir(unfinished, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(unfinished, "program"), []byte("text"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := publish(unfinished, final); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(filepath.Join(final, "program")); string(text) != "text" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
	if _, err := os.Stat(unfinished); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

func TestTheLockIsOneBuildersAtATime(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	unlock, err := lock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := lock(short, path); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a second lock: %v", err)
	}
	unlock()
	again, err := lock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	again()
}

func TestNoTryFollowsTheEndOfItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	tries := 0
	err := again(ctx, io.Discard, func() error {
		tries++
		cancel()
		return errors.New("out of reach")
	})
	if tries != 1 || err == nil || !strings.Contains(err.Error(), "out of reach") {
		t.Errorf("%d tries, %v", tries, err)
	}
}
