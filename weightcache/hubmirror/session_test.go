package hubmirror_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

var tinyRef = artifact.Ref{Scheme: artifact.SchemeHub, Name: "acme/tiny", Revision: "main"}

// commitOf asks what a revision is, as clients do.
func commitOf(t *testing.T, b bubble, rev string) string {
	t.Helper()
	got := b.Get(t.Context(), "/api/models/acme/tiny/revision/"+rev)
	var info struct{ SHA string }
	if err := json.Unmarshal(got.Body, &info); err != nil || got.Status != http.StatusOK {
		t.Fatalf("revision %s: %d, %.100q, %v", rev, got.Status, got.Body, err)
	}
	if kept := got.Header.Get("X-Repo-Commit"); kept != info.SHA {
		t.Errorf("revision %s is %s and in the header %s", rev, info.SHA, kept)
	}
	return info.SHA
}

// move gives the repository another commit and content, and refreshes the ref.
func move(t *testing.T, b bubble, commit string) {
	t.Helper()
	b.src.set(func() {
		b.src.commit = commit
		b.src.files = map[string][]byte{"config.json": []byte("{} "), "part-00.bin": []byte("new " + commit)}
	})
	if _, err := b.puller.Ensure(t.Context(), tinyRef, weightcache.EnsureOptions{Refresh: true}); err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
}

func TestMainMeansOneCommitForAWholeSessionAndItsBytesStay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := inBubble(t, newMemory(1, 100_000), nil)
		old := b.src.commit
		want := b.src.files["part-00.bin"]
		if _, err := b.puller.Ensure(t.Context(), tinyRef, weightcache.EnsureOptions{}); err != nil {
			t.Fatal(err)
		}
		if got := commitOf(t, b, "main"); got != old {
			t.Fatalf("main is %s", got)
		}
		next := strings.Repeat("cd", 20)
		move(t, b, next)
		// A start asks for main nine times, over minutes, and by HEAD as well.
		for i := range 9 {
			rev := []string{"main", "HEAD"}[i%2]
			if got := commitOf(t, b, rev); got != old {
				t.Errorf("question %d: %s is %s, the session began with %s", i, rev, got, old)
			}
			synctest.Wait()
			wait(t, 5*time.Minute)
		}
		// The source no longer has what the session reads.
		for _, rev := range []string{"main", old} {
			got := b.Get(t.Context(), "/acme/tiny/resolve/"+rev+"/part-00.bin")
			if got.Err != nil || string(got.Body) != string(want) || got.Header.Get("X-Repo-Commit") != old {
				t.Errorf("%s: %d with %d bytes of commit %s, %v", rev, got.Status, len(got.Body), got.Header.Get("X-Repo-Commit"), got.Err)
			}
		}
		if got := b.Get(t.Context(), "/api/models/acme/tiny/tree/"+old); got.Status != http.StatusOK {
			t.Errorf("tree of the session's commit: %d", got.Status)
		}
		// Idle for long enough it ends, and with it what only it held.
		wait(t, time.Hour)
		if got := commitOf(t, b, "main"); got != next {
			t.Errorf("after the session main is %s, want %s", got, next)
		}
		if _, found := b.puller.Held("acme/tiny", old); found {
			t.Error("the old artifact outlives the session")
		}
	})
}

func TestASessionNeverLastsLongerThanItsMaximum(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := inBubble(t, newMemory(1, 1000), nil)
		old := commitOf(t, b, "main")
		if _, err := b.puller.Ensure(t.Context(), tinyRef, weightcache.EnsureOptions{}); err != nil {
			t.Fatal(err)
		}
		next := strings.Repeat("cd", 20)
		move(t, b, next)
		began := time.Now()
		for commitOf(t, b, "main") == old {
			if time.Since(began) > 7*time.Hour {
				t.Fatal("the session goes on for ever")
			}
			wait(t, 9*time.Minute)
		}
		if got := time.Since(began); got < 5*time.Hour {
			t.Errorf("the session ended after %v", got)
		}
	})
}

func TestARefThatWasRemovedEndsItsSessions(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := inBubble(t, newMemory(1, 1000), nil)
		if _, err := b.puller.Ensure(t.Context(), tinyRef, weightcache.EnsureOptions{}); err != nil {
			t.Fatal(err)
		}
		commitOf(t, b, "main")
		if err := b.puller.Remove(t.Context(), tinyRef); err != nil {
			t.Fatalf("a session forbids a removal: %v", err)
		}
		next := strings.Repeat("cd", 20)
		b.src.set(func() {
			b.src.commit = next
			b.src.files = map[string][]byte{"config.json": []byte("{} "), "part-00.bin": []byte("new")}
		})
		if got := commitOf(t, b, "main"); got != next {
			t.Errorf("after the removal main is %s, want %s", got, next)
		}
		b.check(t, "part-00.bin", b.Get(t.Context(), "/acme/tiny/resolve/main/part-00.bin"))
	})
}

func TestASourceThatIsGoneCostsNoMetadataThatWasKnown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := inBubble(t, newMemory(1, 1000), nil)
		old := b.src.commit
		if _, err := b.puller.Ensure(t.Context(), tinyRef, weightcache.EnsureOptions{}); err != nil {
			t.Fatal(err)
		}
		tag := tinyRef
		tag.Revision = "v1"
		if _, err := b.puller.Ensure(t.Context(), tag, weightcache.EnsureOptions{}); err != nil {
			t.Fatal(err)
		}
		move(t, b, strings.Repeat("cd", 20))
		b.src.set(func() { b.src.down = true })
		for _, path := range []string{
			"/api/models/acme/tiny", "/api/models/acme/tiny/revision/main", "/api/models/acme/tiny/refs",
			"/api/models/acme/tiny/revision/v1", "/api/models/acme/tiny/revision/" + old, "/api/models/acme/tiny/tree/" + old,
			"/acme/tiny/resolve/" + old + "/part-00.bin", "/api/models/acme/tiny/commits/main",
		} {
			if got := b.Get(t.Context(), path); got.Status != http.StatusOK || got.Silence > time.Second {
				t.Errorf("%s: %d after %v", path, got.Status, got.Silence)
			}
		}
		got := b.Get(t.Context(), "/api/models/acme/tiny/revision/never-asked")
		if got.Status != http.StatusNotFound || got.Header.Get("X-Error-Code") != "Unavailable" {
			t.Errorf("a revision that was never known: %d %q", got.Status, got.Header.Get("X-Error-Code"))
		}
	})
}

// wait sleeps in a bubble's time.
func wait(t *testing.T, d time.Duration) {
	t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.Context().Done():
	}
}
