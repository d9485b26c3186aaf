package hubmirror

import (
	"fmt"
	"net/http"
	"testing"
)

func TestRangesAreCutAsTheRFCSays(t *testing.T) {
	t.Parallel()
	const big = "99999999999999999999999"
	for _, c := range []struct {
		header string
		size   int64
		want   span
	}{
		{"bytes=0-0", 10, span{0, 1, 206}},
		{"bytes=0-", 10, span{0, 10, 206}},
		{"bytes=3-5", 10, span{3, 3, 206}},
		{"bytes=9-9", 10, span{9, 1, 206}},
		{"bytes=5-100", 10, span{5, 5, 206}},
		{"bytes=5-" + big, 10, span{5, 5, 206}},
		{"bytes=-4", 10, span{6, 4, 206}},
		{"bytes=-100", 10, span{0, 10, 206}},
		{"bytes=-" + big, 10, span{0, 10, 206}},
		{"Bytes = 1-2", 10, span{1, 2, 206}},
		{"bytes=10-", 10, span{0, 0, 416}},
		{"bytes=" + big + "-", 10, span{0, 0, 416}},
		{"bytes=10-20", 10, span{0, 0, 416}},
		{"bytes=-0", 10, span{0, 0, 416}},
		{"bytes=0-0", 0, span{0, 0, 200}},
		{"bytes=0-", 0, span{0, 0, 200}},
		{"bytes=0-99999", 0, span{0, 0, 200}},
		{"bytes=-1", 0, span{0, 0, 200}},
		{"bytes=-0", 0, span{0, 0, 416}},
		{"bytes=1-", 0, span{0, 0, 416}},
		{"bytes=5-3", 10, span{0, 10, 200}},
		{"bytes=0-1,3-4", 10, span{0, 10, 200}},
		{"bytes=", 10, span{0, 10, 200}},
		{"bytes=-", 10, span{0, 10, 200}},
		{"bytes=a-b", 10, span{0, 10, 200}},
		{"bytes=+1-2", 10, span{0, 10, 200}},
		{"bytes=1--2", 10, span{0, 10, 200}},
		{"lines=0-1", 10, span{0, 10, 200}},
		{"bytes 0-1", 10, span{0, 10, 200}},
	} {
		if got := parseRange(c.header, c.size); got != c.want {
			t.Errorf("%q of %d bytes: got %+v, want %+v", c.header, c.size, got, c.want)
		}
	}
}

func FuzzParseRangeStaysInsideTheFile(f *testing.F) {
	for _, s := range []string{"bytes=0-0", "bytes=-5", "bytes=5-", "bytes=1-2,3-4", "bytes=9223372036854775807-", "x"} {
		f.Add(s, int64(10))
	}
	f.Fuzz(func(t *testing.T, header string, size int64) {
		if size < 0 {
			return
		}
		s := parseRange(header, size)
		switch s.status {
		case http.StatusOK:
			if s.from != 0 || s.n != size {
				t.Errorf("whole answer is %+v of %d", s, size)
			}
		case http.StatusPartialContent:
			if s.from < 0 || s.n < 1 || s.from > size-s.n {
				t.Errorf("part %+v leaves a file of %d bytes", s, size)
			}
			if again := parseRange(fmt.Sprintf("bytes=%d-%d", s.from, s.from+s.n-1), size); again != s {
				t.Errorf("part %+v reads back as %+v", s, again)
			}
		case http.StatusRequestedRangeNotSatisfiable:
			if s.n != 0 {
				t.Errorf("unsatisfiable range has bytes: %+v", s)
			}
		default:
			t.Errorf("status %d", s.status)
		}
	})
}
