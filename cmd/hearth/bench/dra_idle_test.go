package bench

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestTheControlRoleIsMeasuredOnceItsSlicesArePublishedBesideADataRole(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "hb") //nolint:usetesting // t.TempDir is too long a path for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	f, err := measureIdle(t.Context(), dir, 10*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if f.anon <= 0 || f.rss <= f.anon {
		t.Errorf("resident are %.1f MiB, of them %.1f anonymous", f.rss, f.anon)
	}
}

func TestAnAgentThatDoesNotStartEndsTheIdleRowWithWhatItSaid(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), strings.Repeat("a-folder-that-leaves-no-room-for-a-socket-", 3))
	if _, err := startIdleNode(t.Context(), dir); err == nil || !strings.Contains(err.Error(), "too long for the kernel's limit on socket paths") {
		t.Errorf("the bench says %v", err)
	}
}
