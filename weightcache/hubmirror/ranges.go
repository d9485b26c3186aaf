package hubmirror

import (
	"net/http"
	"strconv"
	"strings"
)

// span is the part of a file to send.
type span struct {
	from, n int64
	status  int // 200, 206 or 416
}

// parseRange reads a Range header for a file of size bytes (RFC 9110, 14.2). A
// header that is malformed, of another unit or of several ranges is ignored,
// which the RFC allows: the whole file is sent. Numbers past 63 bits are as
// large as can be. So is a range that begins at the start of an empty file, or
// counts from its end: clients begin with "bytes=0-0" and would fail on it.
func parseRange(header string, size int64) span {
	whole := span{0, size, http.StatusOK}
	beyond := span{0, 0, http.StatusRequestedRangeNotSatisfiable}
	unit, spec, found := strings.Cut(header, "=")
	if !found || !strings.EqualFold(strings.TrimSpace(unit), "bytes") || strings.Contains(spec, ",") {
		return whole
	}
	first, last, dash := strings.Cut(strings.TrimSpace(spec), "-")
	if !dash {
		return whole
	}
	if first == "" {
		n, ok := number(last)
		switch {
		case !ok:
			return whole
		case n == 0:
			return beyond
		case size == 0:
			return whole
		}
		n = min(n, size)
		return span{size - n, n, http.StatusPartialContent}
	}
	from, ok := number(first)
	if !ok {
		return whole
	}
	to := size - 1
	if last != "" {
		end, ok := number(last)
		if !ok || end < from {
			return whole
		}
		to = min(to, end)
	}
	switch {
	case from == 0 && size == 0:
		return whole
	case from >= size:
		return beyond
	}
	return span{from, to - from + 1, http.StatusPartialContent}
}

// number reads decimal digits alone, saturating at the largest int64.
func number(text string) (int64, bool) {
	if text == "" || strings.ContainsFunc(text, func(r rune) bool { return r < '0' || r > '9' }) {
		return 0, false
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 1<<63 - 1, true
	}
	return n, true
}

// matches says whether a condition's list of entity tags holds the quoted tag.
// Clients send tags as they keep them: quoted, weak or bare. The tag is a digest
// of the bytes, so that all three name the same ones.
func matches(list, tag string) bool {
	for item := range strings.SplitSeq(list, ",") {
		item = strings.TrimPrefix(strings.TrimSpace(item), "W/")
		if item == "*" || item == tag || item == strings.Trim(tag, `"`) {
			return true
		}
	}
	return false
}
