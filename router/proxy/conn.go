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
	net.Conn // an interface, so that no WriteTo of it can pass by the bytes read ahead
	raw      syscall.RawConn
	waiting  atomic.Pointer[answer] // told before a wait; nil between answers

	// Of the read in progress; a connection has one reader at a time.
	told *answer
	n    int
	err  error
	try  func(fd uintptr) bool // c.attempt, bound once

	// Bytes read ahead, so that a burst costs one call to the kernel. The buffer
	// is taken for the time it holds any, never for a wait.
	ahead []byte
	from  int
}

// aheadBytes is the size class of read-ahead buffers.
const aheadBytes = 32 << 10

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
		c := &engineConn{Conn: tcp, raw: raw}
		c.try = c.attempt
		return c, nil
	}
}

// Read implements io.Reader.
func (c *engineConn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if c.ahead == nil {
		c.told, c.n, c.err = c.waiting.Load(), 0, nil
		err := c.raw.Read(c.try)
		failed := c.err
		c.told, c.err = nil, nil
		switch {
		case err != nil:
			return 0, err // deadline or closed
		case failed != nil:
			return 0, &net.OpError{Op: "read", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: failed}
		case c.n == 0:
			return 0, io.EOF
		}
	}
	n := copy(p, c.ahead[c.from:])
	if c.from += n; c.from == len(c.ahead) {
		putBuffer(c.ahead)
		c.ahead, c.from = nil, 0
	}
	return n, nil
}

// attempt reads once, into a buffer it keeps only if bytes came; false asks
// the runtime to wait for more.
func (c *engineConn) attempt(fd uintptr) bool {
	buffer := getBuffer(aheadBytes)
	for {
		n, err := syscall.Read(int(fd), buffer[:cap(buffer)])
		if err == nil && n > 0 {
			c.n, c.ahead, c.from = n, buffer[:n], 0
			return true
		}
		if err == syscall.EINTR {
			continue
		}
		putBuffer(buffer)
		switch err {
		case nil:
			return true
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
