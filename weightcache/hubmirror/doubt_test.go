package hubmirror_test

import (
	"bytes"
	"context"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hearth-dev/hearth/weightcache"
)

func TestAClientThatLeftWithWrongBytesStartsAgainThoughNobodyReadWhenTheyWereFound(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const path, segment = "part-00.bin", 1 << 20
		b := inBubble(t, newMemory(1, 3*segment), nil)
		right := b.src.files[path]
		if _, err := b.puller.Manifest(t.Context(), tinyRef); err != nil {
			t.Fatal(err)
		}
		wrong := bytes.Clone(right)
		wrong[7] ^= 1
		rest := make(chan time.Time)
		b.src.set(func() {
			b.src.files[path] = wrong
			b.src.delay = func(_ string, off int64) <-chan time.Time {
				if off >= segment {
					return rest
				}
				return nil
			}
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		url := "/acme/tiny/resolve/main/" + path
		left := b.Get(ctx, url)
		if len(left.Body) < segment/2 || left.Body[7] != wrong[7] {
			t.Fatalf("the client left with %d bytes, %v", len(left.Body), left.Err)
		}
		b.src.set(func() { b.src.files[path] = right })
		close(rest)
		if _, err := b.puller.Ensure(t.Context(), tinyRef, weightcache.EnsureOptions{}); err != nil {
			t.Fatal(err)
		}
		if got := b.puller.Stats().Mismatches; got != 1 {
			t.Fatalf("%d mismatches", got)
		}
		got := b.Get(t.Context(), url, "Range", "bytes=524288-")
		if got.Status != http.StatusOK || !bytes.Equal(got.Body, right) {
			t.Errorf("the rest was asked for: %d with %d bytes, want the whole file", got.Status, len(got.Body))
		}
		wait(t, 2*time.Hour)
		if got := b.Get(t.Context(), url, "Range", "bytes=524288-"); got.Status != http.StatusPartialContent {
			t.Errorf("after two hours: %d", got.Status)
		}
	})
}
