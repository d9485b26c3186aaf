package resp

import (
	"bytes"
	"errors"
	"os"
	"time"
)

// Replies are written by the connection's own goroutine, as long as the client
// takes them. Once it does not, they wait in a queue with a goroutine of its own,
// and the client's commands are read on: one that sends a long pipeline reads
// no reply before all of it is sent.

const (
	writeBuffer = 512      // bytes for replies at first
	keepBuffer  = 8 << 10  // bytes that an idle connection may keep
	flushAt     = 16 << 10 // bytes of replies that are written at once
	inlineValue = 4 << 10  // bytes of a value that is copied to the other replies
	slowestRate = 4 << 20  // bytes a second that a reply may take, on top of the timeout

	// A client that has not taken a reply after stalledAfter, and the time that it
	// takes at usualRate, may be one that sends all its commands first.
	stalledAfter = 10 * time.Millisecond
	usualRate    = 256 << 20 // bytes a second
)

// flush writes the replies.
func (c *conn) flush() error {
	if len(c.out) == 0 {
		return nil
	}
	return c.write(nil, nil)
}

// spill writes the replies where many are waiting.
func (c *conn) spill() error {
	if len(c.out) < flushAt {
		return nil
	}
	return c.flush()
}

// value answers with a bulk string. Its bytes are those of hold, which is released
// once they are written; without hold they are copied where they have to wait.
func (c *conn) value(value []byte, hold Block) error {
	c.header('$', int64(len(value)))
	if len(value) > inlineValue {
		return c.write(value, hold)
	}
	c.out = append(c.out, value...)
	c.out = append(c.out, '\r', '\n')
	letGo(hold)
	return c.spill()
}

func letGo(hold Block) {
	if hold != nil {
		hold.Release()
	}
}

// write sends the replies and, where there is one, a value after them.
func (c *conn) write(value []byte, hold Block) error {
	if c.queued() {
		taken, err := c.queue.add(c.tenant, c.out, value, hold)
		if taken || err != nil {
			c.emptied()
			return err
		}
		c.queue = nil // the client has taken everything meanwhile
	}
	c.vectors = [3][]byte{c.out, value, crlf}
	if c.buffers = c.vectors[:]; value == nil {
		c.buffers = c.vectors[:1]
	}
	count := len(c.buffers)
	stalled, err := c.writeNow(len(c.out) + len(value))
	if stalled {
		c.queue = newQueue(c, reply{parts: c.left(count, hold), hold: hold})
	} else {
		letGo(hold)
	}
	c.vectors, c.buffers = [3][]byte{}, nil
	c.emptied()
	return err
}

// emptied makes c.out ready for the next replies.
func (c *conn) emptied() {
	c.out = c.out[:0]
	if cap(c.out) > keepBuffer {
		c.out = make([]byte, 0, writeBuffer)
	}
}

// writeNow sends c.buffers, and says so where the client does not take them.
func (c *conn) writeNow(size int) (stalled bool, err error) {
	sent := 0
	switch {
	case c.socket.raw == nil:
	case c.socket.enter(size):
		sent, c.buffers, err = c.socket.send(c.buffers, size)
	default:
		sent, c.buffers, err = c.socket.try(c.buffers, size)
	}
	if err == nil && len(c.buffers) > 0 {
		c.writeBy(time.Now().Add(stalledAfter + time.Duration(size)*time.Second/usualRate))
		var rest int64
		rest, err = c.buffers.WriteTo(c.net)
		sent += int(rest)
		if stalled = errors.Is(err, os.ErrDeadlineExceeded) && c.until.Load() == 0; stalled {
			err = nil
		} else if err == nil {
			c.writeBy(time.Time{})
		}
	}
	c.server.totals.bytesOut.Add(uint64(sent))
	return stalled, err
}

// left is what is left of c.buffers, which were count, without memory that is used
// anew: all is copied but a value that is held.
func (c *conn) left(count int, hold Block) (parts [3][]byte) {
	at := count - len(c.buffers)
	for i, buffer := range c.buffers {
		if at+i != 1 || hold == nil {
			buffer = bytes.Clone(buffer)
		}
		parts[at+i] = buffer
	}
	return parts
}

// writeBy bounds the time of writing; the zero time does not.
func (c *conn) writeBy(deadline time.Time) {
	_ = c.net.SetWriteDeadline(deadline)
	if until := c.until.Load(); until != 0 { // the server ends: what was set just now must not undo it
		_ = c.net.SetWriteDeadline(time.Unix(0, until))
	}
}

// queued says that replies have to wait for those before them.
func (c *conn) queued() bool {
	if c.queue != nil && c.queue.idle() {
		c.queue = nil
	}
	return c.queue != nil
}

// settle waits until the client has taken all replies, or never will.
func (c *conn) settle() {
	_ = c.flush()
	if c.queue != nil {
		c.queue.wait()
	}
}

var crlf = []byte("\r\n")
