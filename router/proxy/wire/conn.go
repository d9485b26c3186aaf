package wire

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// blockBytes is the size of a read or send buffer.
const blockBytes = 32 << 10

// block is a buffer that is borrowed for as long as it holds bytes.
type block struct{ b []byte }

var blocks = sync.Pool{New: func() any { return &block{make([]byte, blockBytes)} }}

func getBlock() *block {
	b, _ := blocks.Get().(*block)
	return b
}

func putBlock(b *block) {
	if len(b.b) == blockBytes {
		blocks.Put(b)
	}
}

// LostError is a connection that ended before its response was whole.
type LostError struct {
	BeforeByte bool // no byte of a response had come
	Reused     bool // the connection had carried a request before
	Err        error
}

// Error implements error.
func (e *LostError) Error() string { return "lose connection to engine: " + e.Err.Error() }

// Unwrap gives the cause.
func (e *LostError) Unwrap() error { return e.Err }

// states of the sending of one request.
const (
	sent int32 = iota
	sending
	sendFailed
)

// conn is one connection. It serves one exchange at a time, in the goroutine
// of its caller; only close may be called from elsewhere.
type conn struct {
	t       *Transport
	address string
	tcp     *net.TCPConn
	raw     syscall.RawConn
	since   time.Time // when it came to rest
	reused  bool
	began   bool // a byte of the current exchange's response has come

	// Bytes read and not yet used: block.b[from:end]. The block is nil while
	// there are none and a read waits.
	block     *block
	from, end int
	readErr   error
	waiter    Waiter // told once before a read waits
	told      bool

	out      [][]byte // what is left to send
	writeErr error
	state    atomic.Int32 // sent, sending or sendFailed

	read, write func(fd uintptr) bool // tryRead and tryWrite, bound once
	abort       func()                // close, bound once

	fields []Field // of the last head; the strings are not shared
}

// close ends the connection and whatever waits on it.
func (c *conn) close() { _ = c.tcp.Close() }

// open says whether a resting connection is still good: no end and no byte
// that nobody asked for.
func (c *conn) open() bool {
	alive := false
	err := c.raw.Control(func(fd uintptr) {
		var one [1]byte
		_, _, err := unix.Recvfrom(int(fd), one[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		alive = errors.Is(err, unix.EAGAIN)
	})
	return err == nil && alive
}

// fill reads more bytes behind those there are; io.EOF if there are no more.
func (c *conn) fill() error {
	if c.from == c.end {
		c.from, c.end = 0, 0
	}
	c.told = false
	before := c.end
	if err := c.raw.Read(c.read); err != nil {
		return err // closed, or past the deadline
	}
	if err := c.readErr; err != nil {
		c.readErr = nil
		return err
	}
	if c.end == before {
		return io.EOF
	}
	c.began = true
	return nil
}

// tryRead reads once; false asks the runtime to wait for more. An empty block
// is not kept for the wait.
func (c *conn) tryRead(fd uintptr) bool {
	if c.block == nil {
		c.block = getBlock()
	}
	for {
		n, err := syscall.Read(int(fd), c.block.b[c.end:])
		if n > 0 {
			c.end += n
			return true
		}
		switch err {
		case nil:
			return true
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			c.letBlockGo()
			if c.waiter != nil && !c.told {
				c.told = true
				if c.readErr = c.waiter.BeforeWait(); c.readErr != nil {
					return true
				}
			}
			return false
		default:
			c.readErr = &net.OpError{Op: "read", Net: "tcp", Addr: c.tcp.RemoteAddr(), Err: os.NewSyscallError("read", err)}
			return true
		}
	}
}

// letBlockGo gives an empty block back.
func (c *conn) letBlockGo() {
	if c.block != nil && c.from == c.end {
		putBlock(c.block)
		c.block, c.from, c.end = nil, 0, 0
	}
}

// grow makes room behind the bytes there are, up to maxHeadBytes.
func (c *conn) grow() error {
	if c.block == nil || c.end < len(c.block.b) {
		return nil
	}
	held := c.end - c.from
	if held >= maxHeadBytes {
		return malformed("head longer than %d bytes", maxHeadBytes)
	}
	next := c.block
	if c.from == 0 {
		next = &block{make([]byte, 2*len(c.block.b))}
	}
	copy(next.b, c.block.b[c.from:c.end])
	if next != c.block {
		putBlock(c.block)
	}
	c.block, c.from, c.end = next, 0, held
	return nil
}

// exchange sends req and reads the head of its response into r.
func (c *conn) exchange(req *Request, r *Response) error {
	c.began = false
	c.send(req)
	if timeout := c.t.options.HeaderTimeout; timeout > 0 {
		_ = c.tcp.SetReadDeadline(time.Now().Add(timeout))
	}
	err := c.readHead(req.Method, r)
	if c.t.options.HeaderTimeout > 0 {
		_ = c.tcp.SetReadDeadline(time.Time{})
	}
	return err
}

// lost wraps what ended the connection before the head was whole.
func (c *conn) lost(err error) error {
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		return fmt.Errorf("wait for engine's answer: %w", err)
	}
	if err == io.EOF && c.began { //nolint:errorlint // fill's own
		err = io.ErrUnexpectedEOF
	}
	return &LostError{BeforeByte: !c.began, Reused: c.reused, Err: err}
}

// send writes head and body. What the socket does not take at once is written
// by a goroutine, so that an engine that answers early is heard. A write that
// fails is not reported: the engine may have said why, and the read tells.
func (c *conn) send(req *Request) {
	b := getBlock()
	length := req.length()
	head := appendHead(b.b[:0], req, length)
	c.state.Store(sent)
	if len(head)+length <= blockBytes {
		for _, p := range req.Body {
			head = append(head, p...)
		}
		c.out = append(c.out[:0], head)
	} else {
		c.out = append(append(c.out[:0], head), req.Body...)
	}
	c.writeErr = nil
	if err := c.raw.Write(c.write); err != nil || c.writeErr != nil {
		c.state.Store(sendFailed)
		c.forgetOut()
	}
	if len(c.out) == 0 {
		putBlock(b)
		return
	}
	c.state.Store(sending)
	rest := append(net.Buffers(nil), c.out...)
	c.forgetOut()
	keeper := req.Keeper
	if keeper != nil {
		keeper.Hold()
	}
	go func() {
		_, err := rest.WriteTo(c.tcp) // ends with the connection
		if err != nil {
			c.state.Store(sendFailed)
		} else {
			c.state.Store(sent)
		}
		putBlock(b)
		if keeper != nil {
			keeper.Release()
		}
	}()
}

// forgetOut drops the references to a body.
func (c *conn) forgetOut() {
	clear(c.out)
	c.out = c.out[:0]
}

// maxVectors bounds the pieces of one call to the kernel.
const maxVectors = 8

// tryWrite writes what the socket takes now, and leaves the rest in c.out.
func (c *conn) tryWrite(fd uintptr) bool {
	for len(c.out) > 0 {
		var n int
		var err error
		if len(c.out) == 1 {
			n, err = syscall.Write(int(fd), c.out[0])
		} else {
			n, err = unix.Writev(int(fd), c.out[:min(len(c.out), maxVectors)])
		}
		if err != nil {
			if err == syscall.EINTR { //nolint:errorlint // a system call's own
				continue
			}
			if err != syscall.EAGAIN { //nolint:errorlint // a system call's own
				c.writeErr = err
			}
			return true
		}
		c.advance(n)
	}
	return true
}

// advance takes n bytes off the front of c.out.
func (c *conn) advance(n int) {
	done := 0
	for done < len(c.out) && n >= len(c.out[done]) {
		n -= len(c.out[done])
		done++
	}
	left := copy(c.out, c.out[done:])
	clear(c.out[left:])
	c.out = c.out[:left]
	if left > 0 {
		c.out[0] = c.out[0][n:]
	}
}
