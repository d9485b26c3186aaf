package resp

import (
	"errors"
	"net"
	"os"
	"strconv"
	"sync/atomic"
	"time"
)

// conn is one client. One goroutine reads its commands, does them and writes
// the replies, so that they come in order and at most one block is held.
type conn struct {
	listening *listening
	server    *Server
	net       net.Conn
	socket    socket
	id        uint64
	reader    *reader
	out       []byte // replies that are not written yet
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

const (
	writeBuffer = 512      // bytes for replies at first
	keepBuffer  = 8 << 10  // bytes that an idle connection may keep
	flushAt     = 16 << 10 // bytes of replies that are written at once
	inlineValue = 4 << 10  // bytes of a value that is copied to the other replies
	slowestRate = 4 << 20  // bytes a second that a reply may take, on top of the timeout
)

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
		_ = c.net.Close()
		c.become(nil)
		if c.native {
			totals.native.Add(-1)
		}
	}()
	if c.become(c.listening.access.Tenant); c.tenant == nil {
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
	_ = c.flush()
}

// become moves the connection to a tenant, or away from all.
func (c *conn) become(tenant *Tenant) {
	if c.tenant == tenant {
		return
	}
	if c.tenant != nil {
		c.tenant.figures.connections.Add(-1)
		c.tenant.pins.leave(c.id)
	}
	c.tenant, c.lastModel = tenant, nil
	c.order, c.sizes = order{}, ownSizes{}
	if tenant != nil {
		tenant.figures.connections.Add(1)
		if c.reader.open {
			c.readBy(0)
		}
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
}

// Read reads from the client once all replies are written: who waits for
// one would not send more.
func (c *conn) Read(into []byte) (int, error) {
	if len(c.out) > 0 {
		if err := c.flush(); err != nil {
			return 0, err
		}
	}
	n, err := c.net.Read(into)
	c.server.totals.bytesIn.Add(uint64(n))
	return n, err
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

// writeBy bounds the time to take n bytes.
func (c *conn) writeBy(n int) {
	if !c.native {
		_ = c.net.SetWriteDeadline(time.Now().Add(c.server.options.WriteTimeout + time.Duration(n)*time.Second/slowestRate))
	}
	if until := c.until.Load(); until != 0 {
		_ = c.net.SetWriteDeadline(time.Unix(0, until))
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

// flush writes the replies.
func (c *conn) flush() error {
	if len(c.out) == 0 {
		return nil
	}
	c.writeBy(len(c.out))
	n, err := c.net.Write(c.out)
	return c.wrote(n, err)
}

func (c *conn) wrote(n int, err error) error {
	c.server.totals.bytesOut.Add(uint64(n))
	c.out = c.out[:0]
	if cap(c.out) > keepBuffer {
		c.out = make([]byte, 0, writeBuffer)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) && c.until.Load() == 0 {
		c.server.totals.slowReaders.Add(1)
	}
	return err
}

// value answers with a bulk string. Afterwards its bytes may change.
func (c *conn) value(bytes []byte) error {
	c.header('$', int64(len(bytes)))
	if len(bytes) <= inlineValue {
		c.out = append(c.out, bytes...)
		c.out = append(c.out, '\r', '\n')
		return c.spill()
	}
	c.writeBy(len(c.out) + len(bytes))
	c.vectors = [3][]byte{c.out, bytes, crlf}
	c.buffers = c.vectors[:]
	sent, err := 0, error(nil)
	if c.socket.enter(len(bytes)) {
		sent, c.buffers, err = c.socket.send(c.buffers)
	}
	if err == nil && len(c.buffers) > 0 {
		var rest int64
		rest, err = c.buffers.WriteTo(c.net)
		sent += int(rest)
	}
	c.vectors = [3][]byte{}
	return c.wrote(sent, err)
}

var crlf = []byte("\r\n")

// spill writes the replies where many are waiting.
func (c *conn) spill() error {
	if len(c.out) < flushAt {
		return nil
	}
	return c.flush()
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
