package proxy

import (
	"net/http"
	"strings"
	"testing"
)

// framedBy is what a head fed in pieces of step bytes says of a request.
func framedBy(head string, step int, r *http.Request) (yes, unsure bool) {
	var f framing
	for head != "" {
		n := min(step, len(head))
		f.feed([]byte(head[:n]))
		head = head[n:]
	}
	return f.ambiguous(r)
}

func TestALengthSaidTwiceIsSeenHoweverTheHeadIsWrittenAndCut(t *testing.T) {
	t.Parallel()
	const line = "POST /v1/completions HTTP/1.1\r\n"
	chunkedRequest := &http.Request{ProtoMajor: 1, ProtoMinor: 1, TransferEncoding: []string{"chunked"}}
	plain := &http.Request{ProtoMajor: 1, ProtoMinor: 1}
	old := &http.Request{ProtoMajor: 1, ProtoMinor: 0}
	for _, c := range []struct {
		head string
		r    *http.Request
		want bool
	}{
		{line + "Host: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nbody", chunkedRequest, true},
		{line + "TRANSFER-ENCODING:chunked\ncontent-LENGTH:5\n\n", chunkedRequest, true},
		{"\r\n" + line + "Content-Length: 5\r\nX: y\r\nTransfer-Encoding: chunked\r\n\r\n", chunkedRequest, true},
		{line + "Transfer-Encoding: chunked\r\n\r\nContent-Length: 5\r\n\r\n", chunkedRequest, false}, // in the body
		{line + "X-Content-Length: 5\r\nTransfer-Encodings: x\r\nTransfer-Encoding: chunked\r\n\r\n", chunkedRequest, false},
		{line + "X: a\r\n Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", chunkedRequest, false}, // a folded value
		{line + "Content-Length: 5\r\n\r\n", plain, false},
		{strings.Replace(line, "1.1", "1.0", 1) + "Transfer-Encoding: chunked\r\n\r\n", old, true},
		{strings.Replace(line, "1.1", "1.0", 1) + "Content-Length: 5\r\n\r\n", old, false},
	} {
		for _, step := range []int{len(c.head), 1, 2, 3, 7, 31} {
			yes, unsure := framedBy(c.head, step, c.r)
			if yes != c.want || unsure {
				t.Errorf("%q in pieces of %d: %v, unsure %v, want %v", c.head, step, yes, unsure, c.want)
			}
		}
	}
	if yes, unsure := framedBy("Content-Length: 5\r\n", 100, chunkedRequest); yes || !unsure {
		t.Errorf("a part of a head: %v, unsure %v", yes, unsure)
	}
	if _, unsure := framedBy("", 1, plain); unsure {
		t.Error("a request with a length and no head seen is doubted")
	}
}

func TestABodyIsKnownToBeWholeOnlyWhereItCameWithItsHead(t *testing.T) {
	t.Parallel()
	const head = "POST /v1/completions HTTP/1.1\r\nContent-Length: 4\r\n\r\n"
	for _, c := range []struct {
		reads []string
		blind bool
		n     int64
		want  bool
	}{
		{[]string{head + "body"}, false, 4, true},
		{[]string{head + "body and more"}, false, 4, true},
		{[]string{head[:20], head[20:] + "body"}, false, 4, true},
		{[]string{"\r\n" + head + "body"}, false, 4, true},
		{[]string{head}, false, 0, true},
		{[]string{head + "bod"}, false, 4, false},
		{[]string{head, "body"}, false, 4, false}, // its reads are not looked at
		{[]string{head + "body"}, true, 4, false},
		{[]string{head + "4\r\nbody\r\n0\r\n\r\n"}, false, -1, false},
		{[]string{head[:20]}, false, 0, false},
	} {
		var f framing
		f.blind = c.blind
		for _, read := range c.reads {
			f.feed([]byte(read))
		}
		if got := f.whole(c.n); got != c.want {
			t.Errorf("%q, blind %v: a body of %d bytes is whole: %v, want %v", c.reads, c.blind, c.n, got, c.want)
		}
	}
}
