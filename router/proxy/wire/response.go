package wire

import (
	"errors"
	"io"
)

// Waiter is told when reading a body is about to wait for the engine, in the
// goroutine that reads. An error ends the read and is given back by Next.
type Waiter interface{ BeforeWait() error }

// How a body ends.
const (
	bodyDone = iota
	bodyLength
	bodyChunked
	bodyToEnd
)

// Response is the answer to one request. It belongs to one goroutine.
type Response struct {
	Status int
	// Fields are the head's lines in order; valid until Close.
	Fields []Field
	// Length of the body as declared, -1 if it was not.
	Length int64

	c      *conn // nil once closed
	secure *secureBody
	stop   func() bool // ends the watch on the context
	keep   bool        // head and framing allow another request
	body   int
	toEnd  bool  // the connection's end is the body's
	left   int64 // of a body with a length
	chunks chunks
}

// Delimited says whether the body says itself where it ends.
func (r *Response) Delimited() bool {
	if r.secure != nil {
		return r.secure.delimited
	}
	return !r.toEnd
}

// Get is the first field of that canonical name, "" if there is none.
func (r *Response) Get(name string) string {
	for i := range r.Fields {
		if r.Fields[i].Name == name {
			return r.Fields[i].Value
		}
	}
	return ""
}

// SetWaiter names who is told before a wait; nil for nobody.
func (r *Response) SetWaiter(w Waiter) {
	if r.secure != nil {
		r.secure.waiter = w
	} else if r.c != nil {
		r.c.waiter = w
	}
}

// Await waits until a byte of the body has come, or the end of a body without
// one, and leaves it to Next. An error means that the engine was lost before.
func (r *Response) Await() error {
	if r.secure != nil {
		return r.secure.await()
	}
	c := r.c
	if c == nil {
		return errors.New("read response: closed")
	}
	if r.body == bodyDone || c.from < c.end {
		return nil
	}
	err := c.fill()
	if err != nil {
		r.keep = false
	}
	if err == io.EOF { //nolint:errorlint // fill's own
		return io.ErrUnexpectedEOF
	}
	return err
}

// Next gives the next bytes of the body, as many as have been read, valid and
// the caller's to change until the next call. The last bytes come together
// with io.EOF where their end is known; a body cut short ends with
// io.ErrUnexpectedEOF or the connection's error.
func (r *Response) Next() ([]byte, error) {
	if r.secure != nil {
		return r.secure.next()
	}
	c := r.c
	if c == nil {
		return nil, errors.New("read response: closed")
	}
	for r.body != bodyDone {
		if c.from == c.end {
			if err := c.fill(); err != nil {
				r.keep = false
				if err != io.EOF { //nolint:errorlint // fill's own
					return nil, err
				}
				if r.body == bodyToEnd {
					r.body = bodyDone
					break
				}
				return nil, io.ErrUnexpectedEOF
			}
		}
		p, err := r.decode(c.block.b[c.from:c.end])
		if err != nil {
			r.keep = false
			return p, err
		}
		if r.body == bodyDone {
			return p, io.EOF
		}
		if len(p) > 0 {
			return p, nil
		}
	}
	return nil, io.EOF
}

// decode takes the body's bytes off the unread ones.
func (r *Response) decode(p []byte) ([]byte, error) {
	switch r.body {
	case bodyLength:
		p = p[:min(int64(len(p)), r.left)]
		r.c.from += len(p)
		if r.left -= int64(len(p)); r.left == 0 {
			r.body = bodyDone
		}
		return p, nil
	case bodyChunked:
		payload, used, err := r.chunks.decode(p)
		r.c.from += used
		if r.chunks.state == chunkEnd {
			r.body = bodyDone
		}
		return p[:payload], err
	}
	r.c.from = r.c.end
	return p, nil
}

// Close ends the exchange. The connection serves another if this one was read
// to its end and nothing speaks against it. A second call does nothing.
func (r *Response) Close() {
	if r.secure != nil {
		r.secure.close()
		return
	}
	c := r.c
	if c == nil {
		return
	}
	r.c, r.Fields = nil, nil
	c.waiter = nil
	clear(c.fields)
	watched := r.stop()
	clean := watched && r.keep && r.body == bodyDone && c.from == c.end && c.state.Load() == sent
	if c.block != nil {
		c.from, c.end = 0, 0
		c.letBlockGo()
	}
	if !clean {
		c.close()
		return
	}
	c.t.put(c)
}
