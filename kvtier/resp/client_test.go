package resp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// pipes is a listener whose connections are in memory, for tests with a clock of
// their own.
type pipes struct {
	accept chan net.Conn
	closed chan struct{}
}

func newPipes() *pipes {
	return &pipes{accept: make(chan net.Conn), closed: make(chan struct{})}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.accept:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	select {
	case <-p.closed:
	default:
		close(p.closed)
	}
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }

func (p *pipes) dial() net.Conn {
	mine, theirs := net.Pipe()
	p.accept <- theirs
	return mine
}

// serving is a server under test with one listener.
type serving struct {
	t      *testing.T
	server *Server
	dial   func() net.Conn
	stop   context.CancelFunc
	ended  chan error
}

// serve starts a server on a unix socket of its own.
func serve(t *testing.T, options Options, access Access) *serving {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kv.sock")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	return serveOn(t, options, access, listener, func() net.Conn {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		return c
	})
}

// servePipes does the same in memory, for synctest.
func servePipes(t *testing.T, options Options, access Access) *serving {
	t.Helper()
	listener := newPipes()
	return serveOn(t, options, access, listener, listener.dial)
}

func serveOn(t *testing.T, options Options, access Access, listener net.Listener, dial func() net.Conn) *serving {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	s := &serving{t: t, server: New(options), dial: dial, stop: stop, ended: make(chan error, 1)}
	go func() { s.ended <- s.server.Serve(ctx, listener, access) }()
	t.Cleanup(s.end)
	return s
}

// end stops the server and waits for it; again it does nothing.
func (s *serving) end() {
	s.stop()
	if err, ok := <-s.ended; ok {
		close(s.ended)
		if err != nil {
			s.t.Errorf("Serve: %v", err)
		}
	}
}

// client speaks bytes: nothing is understood that the test does not write down.
type client struct {
	t    *testing.T
	conn net.Conn
	in   *bufio.Reader
}

func (s *serving) client() *client {
	s.t.Helper()
	c := &client{t: s.t, conn: s.dial()}
	c.in = bufio.NewReader(c.conn)
	s.t.Cleanup(func() { _ = c.conn.Close() })
	return c
}

// wire is a command as an array of bulk strings.
func wire(args ...string) string {
	var all strings.Builder
	fmt.Fprintf(&all, "*%d\r\n", len(args))
	for _, arg := range args {
		fmt.Fprintf(&all, "$%d\r\n%s\r\n", len(arg), arg)
	}
	return all.String()
}

func bulk(value string) string { return fmt.Sprintf("$%d\r\n%s\r\n", len(value), value) }

func (c *client) send(raw string) {
	c.t.Helper()
	if _, err := io.WriteString(c.conn, raw); err != nil {
		c.t.Fatalf("send: %v", err)
	}
}

// expect reads exactly these bytes.
func (c *client) expect(raw string) {
	c.t.Helper()
	got := make([]byte, len(raw))
	_ = c.conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	n, err := io.ReadFull(c.in, got)
	if string(got[:n]) != raw {
		c.t.Fatalf("the server answered %.200q (%v), not %.200q", got[:n], err, raw)
	}
}

// do sends a command and expects its reply.
func (c *client) do(reply string, args ...string) {
	c.t.Helper()
	c.send(wire(args...))
	c.expect(reply)
}

// line reads a line without its end.
func (c *client) line() string {
	c.t.Helper()
	_ = c.conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	line, err := c.in.ReadString('\n')
	if err != nil {
		c.t.Fatalf("read line: %v", err)
	}
	return strings.TrimSuffix(line, "\r\n")
}

// closed expects that the server ends the connection and says no more.
func (c *client) closed() {
	c.t.Helper()
	_ = c.conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	rest, err := io.ReadAll(c.in)
	if len(rest) > 0 {
		c.t.Fatalf("the server said %.200q before it closed", rest)
	}
	if err != nil && (errors.Is(err, context.DeadlineExceeded) || strings.Contains(err.Error(), "timeout")) {
		c.t.Fatalf("the connection is open still: %v", err)
	}
}

// tenantOf is a tenant with a tier of its own.
func tenantOf(name string, m *memory) *Tenant {
	return NewTenant(TenantOptions{
		Name: name, Blocks: m,
		PinBytes: func() int64 { return int64(m.limit / 4) }, HoldBytes: func() int64 { return int64(m.limit / 2) }, Count: m.count,
	})
}
