package resp

import (
	"errors"
	"net"
	"strconv"
	"sync/atomic"
	"time"
)

// conn is one client. One goroutine reads its commands, does them and writes the
// replies, so that they come in order and at most one block is held. Only where the
// client does not take its replies, another writes them: see queue.
type conn struct {
	listening *listening
	server    *Server
	net       net.Conn
	socket    socket
	id        uint64
	reader    *reader
	out       []byte // replies that are not written yet
	queue     *queue // of those before them; nil where the client takes them
	vectors   [3][]byte
	buffers   net.Buffers

	tenant   *Tenant // nil before authentication
	native   bool    // nothing was sent that LMCache's native client never sends
	resp3    bool
	database uint32
	name     string
	library  string
	version  string
	quit     bool

	order order
	sizes ownSizes
	// lastModel saves looking up the figures of the model once more.
	lastModel     *model
	lastModelName []byte

	until atomic.Int64 // unix nanoseconds: the server ends, and writing has to end by then
}

func newConn(l *listening, connection net.Conn) *conn {
	c := &conn{listening: l, server: l.server, net: connection, id: l.server.ids.Add(1), native: true, out: make([]byte, 0, writeBuffer)}
	c.reader = newReader(c)
	c.socket = openSocket(connection)
	return c
}

// serve does the client's commands until it or the server ends.
func (c *conn) serve() {
	totals := &c.server.totals
	totals.native.Add(1)
	defer func() {
		c.settle()
		_ = c.net.Close()
		c.become(nil)
		if c.native {
			totals.native.Add(-1)
		}
	}()
	if c.become(c.listening.access.anonymous()); c.tenant == nil {
		c.readBy(c.server.options.AuthTimeout)
	}
	c.reader.open = c.tenant == nil
	for !c.quit {
		cmd, err := c.reader.next()
		switch {
		case err == nil:
			err = c.do(cmd)
		case errors.Is(err, errTooLong):
			c.notNative()
			c.error("ERR command with too many arguments or bytes")
			err = nil
		}
		if wrong, ok := errors.AsType[protocolError](err); ok {
			totals.protocolErrors.Add(1)
			c.error("ERR " + string(wrong))
			break
		}
		if err != nil {
			return
		}
	}
}

// become moves the connection to a tenant, or away from all.
func (c *conn) become(tenant *Tenant) {
	if c.tenant == tenant {
		return
	}
	if c.tenant != nil {
		c.tenant.figures.connections.Add(-1)
		c.tenant.connected.remove(c)
		c.tenant.pins.leave(c.id)
	}
	c.tenant, c.lastModel = tenant, nil
	c.order, c.sizes = order{}, ownSizes{}
	if tenant != nil {
		tenant.figures.connections.Add(1)
		if c.reader.open {
			c.readBy(0)
		}
		c.quit = !tenant.connected.add(c) || c.quit
	}
	c.reader.open = tenant == nil
}

// notNative ends the guess that this is LMCache's native client.
func (c *conn) notNative() {
	if !c.native {
		return
	}
	c.native = false
	c.server.totals.native.Add(-1)
	if c.tenant != nil {
		c.tenant.pins.leave(c.id)
	}
	if c.queue != nil {
		c.queue.notNative()
	}
}

// Read reads from the client once all replies are written or wait in order: who
// waits for one would not send more.
func (c *conn) Read(into []byte) (int, error) {
	if len(c.out) > 0 {
		if err := c.flush(); err != nil {
			return 0, err
		}
	}
	n, err := c.net.Read(into)
	c.arrived(n)
	return n, err
}

// arrived counts bytes that the client sent.
func (c *conn) arrived(n int) {
	c.server.totals.bytesIn.Add(uint64(n))
	if n > 0 && c.queue != nil {
		c.queue.heard.Store(int64(time.Since(c.queue.began)))
	}
}

// readBy bounds the wait for the client's next bytes; 0 is without bound.
func (c *conn) readBy(timeout time.Duration) {
	deadline := time.Time{}
	if timeout > 0 {
		deadline = time.Now().Add(timeout)
	}
	_ = c.net.SetReadDeadline(deadline)
	if c.until.Load() != 0 { // the server ends: what was set just now must not undo it
		_ = c.net.SetReadDeadline(time.Unix(1, 0))
	}
}

// finish ends the connection: it reads no more, and writes no longer than until.
func (c *conn) finish(until time.Time) {
	c.until.Store(until.UnixNano())
	_ = c.net.SetReadDeadline(time.Unix(1, 0))
	_ = c.net.SetWriteDeadline(until)
	if half, ok := c.net.(interface{ CloseRead() error }); ok {
		_ = half.CloseRead() // wakes a thread that waits for a value
	}
}

func (c *conn) header(mark byte, number int64) {
	c.out = append(c.out, mark)
	c.out = strconv.AppendInt(c.out, number, 10)
	c.out = append(c.out, '\r', '\n')
}

func (c *conn) integer(number int64) { c.header(':', number) }

func (c *conn) simple(text string) {
	c.out = append(c.out, '+')
	c.out = append(c.out, text...)
	c.out = append(c.out, '\r', '\n')
}

// error answers with an error; text is one line.
func (c *conn) error(text string) {
	c.out = append(c.out, '-')
	c.out = append(c.out, text...)
	c.out = append(c.out, '\r', '\n')
}

func (c *conn) bulk(text string) {
	c.header('$', int64(len(text)))
	c.out = append(c.out, text...)
	c.out = append(c.out, '\r', '\n')
}

// text answers with a bulk string that RESP3 marks as text.
func (c *conn) text(text string) {
	if !c.resp3 {
		c.bulk(text)
		return
	}
	c.header('=', int64(len(text)+4))
	c.out = append(c.out, "txt:"...)
	c.out = append(c.out, text...)
	c.out = append(c.out, '\r', '\n')
}

func (c *conn) null() {
	if c.resp3 {
		c.out = append(c.out, "_\r\n"...)
	} else {
		c.out = append(c.out, "$-1\r\n"...)
	}
}

// dict begins a map of count pairs.
func (c *conn) dict(count int64) {
	if c.resp3 {
		c.header('%', count)
	} else {
		c.header('*', 2*count)
	}
}

// paddedNull is a nil as long as the header of a value of size bytes, which is
// what a native client reads before it looks at it.
func (c *conn) paddedNull(size int) {
	digits := 0
	for ; size > 0; size /= 10 {
		digits++
	}
	c.out = append(c.out, '$', '-')
	for range digits - 2 {
		c.out = append(c.out, '0')
	}
	if digits > 1 {
		c.out = append(c.out, '1')
	}
	c.out = append(c.out, '\r', '\n')
}
