package proxy

import (
	"context"
	"io"
	"net"
	"sync/atomic"
	"syscall"
)

// engineConn is a connection to an engine that tells its reader when a read is
// about to wait. The relay flushes the client then: never while more bytes are
// there to be had, and never later than the moment there are none.
type engineConn struct {
	*net.TCPConn
	raw     syscall.RawConn
	waiting atomic.Pointer[answer] // told before a wait; nil between answers

	// Of the read in progress; a connection has one reader at a time.
	told *answer
	p    []byte
	n    int
	err  error
	try  func(fd uintptr) bool // c.attempt, bound once
}

// dialEngine is the transport's DialContext.
func dialEngine(d *net.Dialer) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := d.DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		tcp, ok := conn.(*net.TCPConn)
		if !ok {
			return conn, nil
		}
		raw, err := tcp.SyscallConn()
		if err != nil {
			return conn, nil //nolint:nilerr // a plain connection does, with more flushes
		}
		c := &engineConn{TCPConn: tcp, raw: raw}
		c.try = c.attempt
		return c, nil
	}
}

// Read implements io.Reader.
func (c *engineConn) Read(p []byte) (int, error) {
	a := c.waiting.Load()
	if a == nil || len(p) == 0 {
		return c.TCPConn.Read(p)
	}
	c.told, c.p, c.n, c.err = a, p, 0, nil
	err := c.raw.Read(c.try)
	n, failed := c.n, c.err
	c.told, c.p, c.err = nil, nil, nil
	switch {
	case err != nil:
		return 0, err // deadline or closed
	case failed != nil:
		return 0, &net.OpError{Op: "read", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: failed}
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

// attempt reads once; false asks the runtime to wait for more.
func (c *engineConn) attempt(fd uintptr) bool {
	for {
		n, err := syscall.Read(int(fd), c.p)
		switch err {
		case nil:
			c.n = n
			return true
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			if c.told != nil {
				c.told.beforeWait()
				c.told = nil
			}
			return false
		default:
			c.err = err
			return true
		}
	}
}
