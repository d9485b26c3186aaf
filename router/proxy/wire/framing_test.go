package wire

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
)

func TestBodiesEndWhereTheirFramingSays(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		method, answer, body string
		status               int
		reused               bool
	}{
		"length":            {"POST", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "hello", 200, true},
		"same length twice": {"POST", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\ncontent-length:5\r\n\r\nhello", "hello", 200, true},
		"no reason phrase":  {"POST", "HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", "", 200, true},
		"bare line feeds":   {"POST", "HTTP/1.1 200 OK\nContent-Length: 5\n\nhello", "hello", 200, true},
		"chunks":            {"POST", "HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n2;x=\"y\"\r\nhe\r\n03 \r\nllo\r\n0\r\n\r\n", "hello", 200, true},
		"trailers":          {"POST", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-T: 1\r\nX-U: 2\r\n\r\n", "hello", 200, true},
		"to the end":        {"POST", "HTTP/1.1 200 OK\r\n\r\nhello", "hello", 200, false},
		"HTTP/1.0":          {"POST", "HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", "hello", 200, false},
		"HTTP/1.0 kept":     {"POST", "HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 5\r\n\r\nhello", "hello", 200, true},
		"asked to close":    {"POST", "HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 5\r\n\r\nhello", "hello", 200, false},
		"HEAD":              {"HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "", 200, true},
		"204":               {"POST", "HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n", "", 204, true},
		"304":               {"GET", "HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", "", 304, true},
		"100 and 103":       {"POST", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok", "ok", 201, true},
		"bytes nobody asked for": {
			"POST", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", "ok", 200, false,
		},
	} {
		for _, piece := range []int{1, 3, 1 << 20} { // whole, and as a trickle
			t.Run(fmt.Sprintf("%s by %d", name, piece), func(t *testing.T) {
				t.Parallel()
				evil := strings.HasSuffix(c.answer, "evil")
				sent := make(chan struct{}, 2)
				e := newEngine(t, func(_ int, conn *net.TCPConn, in *bufio.Reader) {
					for readRequest(in) == nil {
						for rest := c.answer; rest != ""; {
							n := min(piece, len(rest))
							if _, err := io.WriteString(conn, rest[:n]); err != nil {
								break // the client saw what it got and closed
							}
							rest = rest[n:]
						}
						if evil {
							sent <- struct{}{}
							continue
						}
						if !c.reused {
							return
						}
					}
				})
				tr := newTransport(t, Options{})
				for range 2 {
					req := post(e)
					req.Method = c.method
					status, body, err := whole(t.Context(), tr, req)
					if err != nil || status != c.status || body != c.body {
						t.Fatalf("got %d %q, %v", status, body, err)
					}
					if evil {
						<-sent // bytes that come behind the next request are its answer to anybody
					}
				}
				if n := e.accepted.Load(); (n == 1) != c.reused {
					t.Fatalf("%d connections", n)
				}
			})
		}
	}
}

func TestBrokenAnswersAreRefused(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]string{
		"garbage":             "\x16\x03\x01 this is no answer\r\n\r\n",
		"HTTP/2":              "HTTP/2.0 200 OK\r\n\r\n",
		"no status":           "HTTP/1.1 OK\r\n\r\n",
		"long status":         "HTTP/1.1 2000 OK\r\n\r\n",
		"two lengths":         "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
		"list of lengths":     "HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello",
		"negative length":     "HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
		"signed length":       "HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nhello",
		"huge length":         "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nhello",
		"length and chunks":   "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"chunked twice":       "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"another encoding":    "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
		"chunks in 1.0":       "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"folded line":         "HTTP/1.1 200 OK\r\nX-A: 1\r\n 2\r\nContent-Length: 0\r\n\r\n",
		"space before colon":  "HTTP/1.1 200 OK\r\nContent-Length : 0\r\n\r\n",
		"no colon":            "HTTP/1.1 200 OK\r\nContent-Length\r\n\r\n",
		"empty name":          "HTTP/1.1 200 OK\r\n: 0\r\n\r\n",
		"NUL in a value":      "HTTP/1.1 200 OK\r\nX-A: \x00\r\n\r\n",
		"CR in a value":       "HTTP/1.1 200 OK\r\nX-A: 1\rX-B: 2\r\n\r\n",
		"endless head":        "HTTP/1.1 200 OK\r\n" + strings.Repeat("X-A: "+strings.Repeat("a", 1000)+"\r\n", 100) + "\r\n",
		"one endless line":    "HTTP/1.1 200 OK\r\nX-A: " + strings.Repeat("a", 200_000) + "\r\n\r\n",
		"too many fields":     "HTTP/1.1 200 OK\r\n" + strings.Repeat("X-A: 1\r\n", 1000) + "\r\n",
		"endless 100":         strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 100),
		"protocol switch":     "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
		"no chunk size":       "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\nhello\r\n0\r\n\r\n",
		"negative chunk":      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
		"huge chunk":          "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nhello\r\n0\r\n\r\n",
		"0x":                  "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
		"long chunk":          "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello!\r\n0\r\n\r\n",
		"bare LF chunk":       "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n",
		"LF in an extension":  "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x\nhello\r\n0\r\n\r\n",
		"endless extension":   "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;" + strings.Repeat("x", 10_000) + "\r\nhello\r\n0\r\n\r\n",
		"endless trailers":    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + strings.Repeat("X-A: 1\r\n", 20_000) + "\r\n",
		"endless size":        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + strings.Repeat("0", 10_000) + "5\r\nhello\r\n0\r\n\r\n",
		"trailer without end": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\rX\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := answering(t, answer)
			tr := newTransport(t, Options{})
			for range 2 {
				if _, _, err := whole(t.Context(), tr, post(e)); !errors.Is(err, ErrMalformed) {
					t.Fatalf("got %v", err)
				}
			}
			if n := e.accepted.Load(); n != 2 {
				t.Fatalf("a connection was used again: %d", n)
			}
		})
	}
}

func TestAnswersCutShortAreNeverWhole(t *testing.T) {
	t.Parallel()
	for _, answer := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhell",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
		"HTTP/1.1 200 OK\r\nContent-Le",
		"HTTP/1.1 100 Continue\r\n\r\n",
	} {
		e := newEngine(t, func(_ int, c *net.TCPConn, in *bufio.Reader) {
			_ = readRequest(in)
			_, _ = io.WriteString(c, answer)
		})
		_, _, err := whole(t.Context(), newTransport(t, Options{}), post(e))
		var lost *LostError
		if !errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &lost) && lost.BeforeByte {
			t.Fatalf("%q gave %v", answer, err)
		}
	}
}
