package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Guard puts the proxy between a server of plain HTTP/1 and its connections:
// what the server refuses before a handler sees it is answered in OpenAI's
// form, and a client that has closed its sending side still gets its answer
// (of HTTP/1.0, where that has begun).
// The server takes its connections from the listener that is given back. A
// server that speaks TLS does without: net/http wants to see those itself.
func (p *Proxy) Guard(s *http.Server, l net.Listener) net.Listener {
	handler := s.Handler
	s.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c := clientOf(r.Context()); c != nil {
			c.begin(r.ProtoAtLeast(1, 1))
			switch yes, unsure := c.head.ambiguous(r); {
			case yes:
				w.Header()["Connection"] = []string{"close"}
				p.refuse(w, r, p.begin(w, r, "other"), ambiguousLength())
				return
			case unsure:
				w.Header()["Connection"] = []string{"close"}
			}
		}
		handler.ServeHTTP(w, r)
	})
	s.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		return context.WithValue(ctx, clientKey{}, c)
	}
	s.ConnState = func(c net.Conn, state http.ConnState) {
		if client, ok := c.(*clientConn); ok && state == http.StateIdle {
			client.rest()
		}
	}
	return &guarded{l, p}
}

type clientKey struct{}

// clientOf is the connection a request came on, nil where it is not guarded.
func clientOf(ctx context.Context) *clientConn {
	c, _ := ctx.Value(clientKey{}).(*clientConn)
	return c
}

type guarded struct {
	net.Listener
	p *Proxy
}

// Accept implements net.Listener.
func (g *guarded) Accept() (net.Conn, error) {
	c, err := g.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		return &clientConn{Conn: tcp, tcp: tcp, p: g.p, fresh: true, resting: true}, nil
	}
	return c, nil
}

// clientConn is a client's connection as net/http's server uses it.
type clientConn struct {
	net.Conn
	tcp *net.TCPConn
	p   *Proxy

	mu       sync.Mutex // guards what follows
	head     framing    // of the request that is read; left alone while a handler has it
	fresh    bool       // nothing of it has been read
	resting  bool       // no handler has a request: what comes is a head
	room     int        // what the server asks for when it holds nothing, in bytes
	early    [1]byte    // the byte of the next request that the watch has read
	hasOne   bool
	handling bool // a handler has the request
	interim  bool // its client takes 1xx responses
	answered bool // bytes of its answer have been written
	ended    bool // the watch has met the client's end, and waits

	probing sync.Mutex
	probe   func() // writes to an answer under way; guarded by probing
}

// begin says that a handler has a request of the connection.
func (c *clientConn) begin(interim bool) {
	c.mu.Lock()
	c.resting, c.handling, c.interim, c.answered = false, true, interim, false
	ended := c.ended
	c.mu.Unlock()
	if ended && !c.poke() {
		_ = c.SetReadDeadline(time.Unix(1, 0)) // ends the watch, which ends the request
	}
}

// rest says that an exchange is over and another may come.
func (c *clientConn) rest() {
	c.mu.Lock()
	c.head, c.fresh, c.resting, c.handling = framing{}, true, true, false
	if c.hasOne {
		c.head.feed(c.early[:])
	}
	c.mu.Unlock()
}

// hasBody says whether a body of n bytes came with its request's head, so that
// no read of the connection is needed for it.
func (c *clientConn) hasBody(n int64) bool {
	if c == nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.head.whole(n)
}

// saw looks at what the server has read in answer to asked bytes.
func (c *clientConn) saw(b []byte, asked int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.resting && !c.head.past:
		if c.fresh {
			// A server that holds bytes of this request from reads before, or all of
			// it, asks for fewer than it does with nothing in its hands.
			held := 0
			if c.hasOne {
				held = 1
			}
			if c.room == 0 {
				c.room = asked
			}
			c.head.blind = asked+held != c.room
			c.fresh, c.hasOne = false, false
		}
		c.head.feed(b)
	default:
		if c.hasOne = asked == 1; c.hasOne { // the watch's; else a body's
			c.early[0] = b[0]
		}
	}
}

// watching says whether a read of one byte is the server's watch over a client
// whose request is whole.
func (c *clientConn) watching() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.resting || c.head.past
}

const interimContinue = "HTTP/1.1 100 Continue\r\n\r\n"

// Write implements net.Conn. What is written while no handler has a request is
// the server's own refusal, in plain text, after which it closes.
func (c *clientConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	handling := c.handling
	if handling && !c.answered && string(b) != interimContinue {
		c.answered = true
	}
	c.mu.Unlock()
	if !handling {
		if e := unreadable(b); e != nil {
			return c.refuse(e, len(b))
		}
	}
	return c.Conn.Write(b)
}

// Bounds of the wait for a client that still sends what nobody will read.
const (
	refusedDrainTime  = 500 * time.Millisecond
	refusedDrainBytes = 1 << 20
)

// refuse answers in place of the server's n bytes. What the client still sends
// is taken for a moment: a connection closed over unread bytes is reset, and a
// reset may overtake the answer.
func (c *clientConn) refuse(e *Refusal, n int) (int, error) {
	x := &Exchange{ID: requestID(nil), Start: c.p.options.Now(), Path: "other", Consumer: "anonymous"}
	x.Outcome, x.Status, x.Reason = "refused", e.Status, e.Reason
	c.p.finish(x)
	body := e.json()
	head := "HTTP/1.1 " + strconv.Itoa(e.Status) + " " + http.StatusText(e.Status) +
		"\r\nContent-Type: application/json\r\nContent-Length: " + strconv.Itoa(len(body)) +
		"\r\nConnection: close\r\nX-Should-Retry: false\r\n" + ReasonHeader + ": " + e.Reason +
		"\r\nX-Request-Id: " + x.ID + "\r\n\r\n"
	if _, err := c.Conn.Write(append([]byte(head), body...)); err != nil {
		return 0, err
	}
	if c.tcp.CloseWrite() == nil && c.SetReadDeadline(time.Now().Add(refusedDrainTime)) == nil {
		_, _ = io.CopyN(io.Discard, c.Conn, refusedDrainBytes)
	}
	return n, nil
}

// unreadable is the refusal that stands for the server's own, nil for
// anything that is none.
func unreadable(b []byte) *Refusal {
	line, _, _ := strings.Cut(string(b[:min(len(b), 256)]), "\r\n")
	rest, ok := strings.CutPrefix(line, "HTTP/1.1 ")
	if !ok || len(rest) < 3 {
		return nil
	}
	status, _ := strconv.Atoi(rest[:3])
	if status < 400 {
		return nil
	}
	code, message := "invalid_http", "The request is not HTTP as this router reads it"
	switch status {
	case http.StatusRequestHeaderFieldsTooLarge:
		code, message = "headers_too_large", "The request's headers are longer than this router's limit"
	case http.StatusNotImplemented:
		code, message = "unsupported_transfer_encoding", "The request's transfer encoding is not supported: send chunked, or a length"
	case http.StatusExpectationFailed:
		code, message = "expectation_failed", "The expectation of the request's Expect header is not supported"
	case http.StatusHTTPVersionNotSupported:
		code, message = "unsupported_http_version", "The request's HTTP version is not supported"
	}
	if _, detail, ok := strings.Cut(rest, ": "); ok {
		message += ": " + detail
	}
	return invalid(status, code, "bad-http", message+".")
}

// CloseWrite closes the sending side; the server asks for it by name.
func (c *clientConn) CloseWrite() error { return c.tcp.CloseWrite() }

// Read implements net.Conn. While a handler runs, and the body has been read,
// the server watches the connection with reads of one byte, and takes their end
// for a client that has left. The end may also mean that the client has sent all
// it wants to, so it is kept back until the client is known to be gone.
func (c *clientConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.saw(b[:n], len(b))
		return n, err
	}
	if len(b) == 1 && err == io.EOF && c.watching() { //nolint:errorlint // a connection's end is bare
		return 0, c.awaitReset()
	}
	return n, err
}

// awaitReset waits, after the client's end, until it refuses what it is sent,
// or the server calls the read back. A client that is gone answers the next
// bytes with a reset; where none are due, it is sent some that mean nothing. One
// that can be sent none before its answer is taken for gone.
func (c *clientConn) awaitReset() error {
	c.mu.Lock()
	c.ended = true
	handling := c.handling
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		c.ended = false
		c.mu.Unlock()
	}()
	if handling && !c.poke() {
		return io.EOF
	}
	raw, err := c.tcp.SyscallConn()
	if err != nil {
		return io.EOF
	}
	err = raw.Read(func(fd uintptr) bool {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		return err != nil || info.State == tcpClose
	})
	if err == nil || errors.Is(err, net.ErrClosed) {
		err = syscall.ECONNRESET
	}
	return err
}

// tcpClose is TCP_CLOSE of the kernel's connection states.
const tcpClose = 7

// poke sends bytes that change nothing for a client that still reads; false
// where the answer has not begun and an older client takes nothing before it.
func (c *clientConn) poke() bool {
	c.mu.Lock()
	answered, interim := c.answered, c.interim
	if !answered && interim {
		_, _ = io.WriteString(c.Conn, interimContinue) // every client takes one it did not ask for
	}
	c.mu.Unlock()
	if !answered {
		return interim
	}
	c.probing.Lock()
	defer c.probing.Unlock()
	if c.probe != nil {
		c.probe()
	}
	return true
}

// setProbe names what writes meaningless bytes into the answer under way; nil
// takes it back, and it is not running any more then.
func (c *clientConn) setProbe(probe func()) {
	c.probing.Lock()
	c.probe = probe
	c.probing.Unlock()
}
