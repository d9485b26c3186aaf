package wire

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"net/http/httputil"
	"strings"
	"testing"
)

// FuzzHead holds every head this package accepts against net/http's reading of
// it: where both accept, they agree on status, framing and reuse.
func FuzzHead(f *testing.F) {
	for _, s := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HTTP/1.0 404\r\nConnection: keep-alive\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nx-a: \tb \r\n\r\n", "HTTP/1.1 200 OK\nA:b\n\n", "HTTP/1.1 200 OK\r\n a: b\r\n\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		end := headEnd(raw)
		if end == 0 {
			return
		}
		raw = raw[:end]
		var h head
		if err := h.parse(raw); err != nil {
			return
		}
		if h.status < 200 {
			return
		}
		resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(raw)), nil)
		if err != nil {
			t.Fatalf("net/http refuses %q: %v", raw, err)
		}
		if resp.StatusCode != h.status {
			t.Fatalf("%q: status %d and %d", raw, h.status, resp.StatusCode)
		}
		if h.status != http.StatusNoContent && h.status != http.StatusNotModified {
			if chunked := len(resp.TransferEncoding) > 0; chunked != h.chunked || resp.ContentLength != h.length {
				t.Fatalf("%q: length %d and %d, chunked %v and %v", raw, h.length, resp.ContentLength, h.chunked, chunked)
			}
		}
		for _, field := range h.fields {
			if strings.ContainsAny(field.Value, "\r\n\x00") || field.Name == "" {
				t.Fatalf("%q: field %q", raw, field)
			}
		}
	})
}

// headEnd is the length of the head at the front of raw, 0 if it has none.
func headEnd(raw []byte) int {
	line := 0
	for i, c := range raw {
		if c != '\n' {
			continue
		}
		if line > 0 && (i == line || i == line+1 && raw[line] == '\r') {
			return i + 1
		}
		line = i + 1
	}
	return 0
}

// FuzzChunks holds the decoder against net/http's: what it accepts, net/http
// reads as the same payload, and how the bytes are split changes nothing.
func FuzzChunks(f *testing.F) {
	for _, s := range []string{
		"5\r\nhello\r\n0\r\n\r\n", "2;a=b\r\nhe\r\n3\r\nllo\r\n0\r\nX: y\r\n\r\nrest", "0\r\n\r\n", "05 \r\nhello\r\n00\r\n\r\n", "5\nhello\r\n0\r\n\r\n", "0 0\r\n000000000\n\r\n",
	} {
		f.Add([]byte(s), uint8(1))
	}
	f.Fuzz(func(t *testing.T, raw []byte, step uint8) {
		decode := func(step int) (out []byte, used int, whole bool, err error) {
			var d chunks
			for used < len(raw) {
				p := bytes.Clone(raw[used:min(len(raw), used+step)])
				payload, n, err := d.decode(p)
				out = append(out, p[:payload]...)
				used += n
				if err != nil {
					return out, used, false, err
				}
				if d.state == chunkEnd {
					return out, used, true, nil
				}
				if n != len(p) {
					t.Fatalf("used %d of %d bytes before the end", n, len(p))
				}
			}
			return out, used, false, nil
		}
		out, used, whole, err := decode(len(raw) + 1)
		again, used2, whole2, err2 := decode(int(step) + 1)
		if !bytes.Equal(out, again) || used != used2 || whole != whole2 || (err == nil) != (err2 == nil) {
			t.Fatalf("%q: %q %d %v %v in one piece, %q %d %v %v in pieces of %d", raw, out, used, whole, err, again, used2, whole2, err2, int(step)+1)
		}
		if !whole {
			return
		}
		want, err := io.ReadAll(httputil.NewChunkedReader(bytes.NewReader(raw[:used])))
		if err != nil || !bytes.Equal(want, out) {
			t.Fatalf("%q: %q, net/http has %q, %v", raw, out, want, err)
		}
	})
}
