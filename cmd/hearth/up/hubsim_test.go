package up

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// lines collects what a command writes, line by line.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
	news chan struct{}
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer func() {
		select {
		case l.news <- struct{}{}:
		default:
		}
	}()
	return l.text.Write(p)
}

func (l *lines) find(t *testing.T, pattern *regexp.Regexp) []string {
	t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	for {
		l.mu.Lock()
		match := pattern.FindStringSubmatch(l.text.String())
		l.mu.Unlock()
		if match != nil {
			return match
		}
		select {
		case <-l.news:
		case <-deadline.C:
			t.Fatalf("no %s in %s", pattern, l.text.String())
		}
	}
}

func TestAHubSimServesAModelThatItMadeOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for range 2 {
		ctx, stop := context.WithCancel(t.Context())
		out := &lines{news: make(chan struct{}, 1)}
		c := HubSimCommand()
		c.SetErr(out)
		c.SetArgs([]string{"--dir", dir, "--repo", "demo/tiny", "--size", "1MiB", "--port", "0"})
		done := make(chan error, 1)
		go func() { done <- c.ExecuteContext(ctx) }()
		address := out.find(t, regexp.MustCompile(`"address":"([^"]+)"`))[1]
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/demo/tiny/resolve/main/config.json", nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		_ = response.Body.Close()
		if err != nil || response.StatusCode != http.StatusOK || !strings.Contains(string(body), "model_type") {
			t.Errorf("config.json gave %d %s, %v", response.StatusCode, body, err)
		}
		stop()
		if err := <-done; err != nil {
			t.Errorf("the command ended with %v", err)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, ".new-*")); len(left) > 0 {
			t.Errorf("left %v", left)
		}
		// The second run must find it and leave it as it is.
		if err := os.Chmod(filepath.Join(dir, "demo", "tiny"), 0o555); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAHubSimMakesNothingOutsideItsFolder(t *testing.T) {
	t.Parallel()
	for _, repo := range []string{"tiny", "../tiny", "a/../b", "a/.hidden", "a/b/c", "/etc/x", "a/"} {
		c := HubSimCommand()
		c.SetErr(io.Discard)
		c.SetOut(io.Discard)
		c.SilenceUsage = true
		c.SetArgs([]string{"--dir", t.TempDir(), "--repo", repo, "--port", "0"})
		if err := c.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), "want ORG/NAME") {
			t.Errorf("--repo %s gave %v", repo, err)
		}
	}
}
