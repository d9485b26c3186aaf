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
// form, and a client that has closed its sending side still gets its answer.
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
		return &clientConn{Conn: tcp, tcp: tcp, p: g.p, resting: true}, nil
	}
	return c, nil
}

// clientConn is a client's connection as net/http's server uses it.
type clientConn struct {
	net.Conn
	tcp *net.TCPConn
	p   *Proxy

	// What follows belongs to the goroutine that reads.
	head    framing // of the request that is read
	resting bool    // between two requests: what comes is a head
	early   [1]byte // the byte of the next request that the watch has read
	hasOne  bool

	mu       sync.Mutex
	handling bool // a handler has the request; guarded by mu
	interim  bool // its client takes 1xx responses; guarded by mu
	answered bool // bytes of its answer have been written; guarded by mu

	probing sync.Mutex
	probe   func() // writes to an answer under way; guarded by probing
}

// begin says that a handler has a request of the connection.
func (c *clientConn) begin(interim bool) {
	c.resting = false
	c.mu.Lock()
	c.handling, c.interim, c.answered = true, interim, false
	c.mu.Unlock()
}

// rest says that an exchange is over and another may come.
func (c *clientConn) rest() {
	c.head, c.resting = framing{}, true
	if c.hasOne {
		c.head.feed(c.early[:])
		c.hasOne = false
	}
	c.mu.Lock()
	c.handling = false
	c.mu.Unlock()
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
	switch {
	case n > 0 && c.resting:
		c.head.feed(b[:n])
	case n == 1 && len(b) == 1:
		c.early[0], c.hasOne = b[0], true
	}
	if n > 0 || len(b) != 1 || err != io.EOF { //nolint:errorlint // a connection's end is bare
		return n, err
	}
	return 0, c.awaitReset()
}

// awaitReset waits, after the client's end, until it refuses what it is sent,
// or the server calls the read back. A client that is gone answers the next
// bytes with a reset; where none are due, it is sent some that mean nothing.
func (c *clientConn) awaitReset() error {
	c.poke()
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

// poke sends bytes that change nothing for a client that still reads.
func (c *clientConn) poke() {
	c.mu.Lock()
	answered := c.answered
	if !answered && c.handling && c.interim {
		_, _ = io.WriteString(c.Conn, interimContinue) // every client takes one it did not ask for
	}
	c.mu.Unlock()
	if !answered {
		return
	}
	c.probing.Lock()
	defer c.probing.Unlock()
	if c.probe != nil {
		c.probe()
	}
}

// setProbe names what writes meaningless bytes into the answer under way; nil
// takes it back, and it is not running any more then.
func (c *clientConn) setProbe(probe func()) {
	c.probing.Lock()
	c.probe = probe
	c.probing.Unlock()
}
