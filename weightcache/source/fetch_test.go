package source

import (
	"net/http"
	"testing"
	"time"
)

func TestPausesAreReadInEveryFormAndBounded(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		name, value string
		want        time.Duration
	}{
		{"Retry-After", "7", 7 * time.Second},
		{"Retry-After", " 0.5 ", 500 * time.Millisecond},
		{"Retry-After", "Sun, 01 Nov 2026 12:00:09 GMT", 9 * time.Second},
		{"Retry-After", "Sun, 01 Nov 2026 11:00:00 GMT", 0},
		{"Retry-After", "Mon, 02 Nov 2026 12:00:00 GMT", maxRetryAfter},
		{"Retry-After", "999999999999", maxRetryAfter},
		{"Retry-After", "-5", 0},
		{"Retry-After", "NaN", 0},
		{"Retry-After", "soon", 0},
		{"RateLimit", `"api";r=0;t=55`, 55 * time.Second},
		{"RateLimit", `"api";r=3;t=55`, 0},
		{"RateLimit", `"pages";r=2;t=5, "resolvers"; r=0; t=11`, 11 * time.Second},
		{"RateLimit-Reset", "13", 13 * time.Second},
		{"Date", "x", 0},
	} {
		h := http.Header{}
		h.Set(c.name, c.value)
		if got := retryAfter(h, now); got != c.want {
			t.Errorf("%s: %s: got %v, want %v", c.name, c.value, got, c.want)
		}
	}
}

func FuzzParseContentRangeStaysInsideItsTotal(f *testing.F) {
	for _, s := range []string{"bytes 0-0/1", "bytes 5-9/*", "bytes */10", "bytes 9-5/10", "bytes 0-9223372036854775807/9223372036854775807"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		from, to, total, ok := parseContentRange(text)
		if ok && (from < 0 || to < from || total <= to) {
			t.Errorf("%q reads as %d-%d of %d", text, from, to, total)
		}
	})
}

func FuzzRetryAfterIsBounded(f *testing.F) {
	f.Add("7", `"api";r=0;t=55`)
	f.Fuzz(func(t *testing.T, after, limit string) {
		h := http.Header{"Retry-After": {after}, "Ratelimit": {limit}}
		if d := retryAfter(h, time.Unix(0, 0)); d < 0 || d > maxRetryAfter {
			t.Errorf("pause of %v", d)
		}
	})
}
