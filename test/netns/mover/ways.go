package mover

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Way is how a program sends and receives.
type Way int

// Ways. What a way has no call for is written and read.
const (
	Write    Way = iota // write(2), read(2)
	Vector              // writev(2), readv(2)
	Sendfile            // sendfile(2)
	Splice              // splice(2) both ways
	ZeroCopy            // sendmsg(2) with MSG_ZEROCOPY
)

var wayNames = [...]string{"write", "vector", "sendfile", "splice", "zero-copy"}

// Ways lists all.
func Ways() []Way { return []Way{Write, Vector, Sendfile, Splice, ZeroCopy} }

// String names the way.
func (w Way) String() string { return wayNames[w] }

const chunk = 64 << 10

func (e *End) give(conn *net.TCPConn, b []byte) error {
	n, err := conn.Write(b)
	e.sent.Add(uint64(n))
	return err
}

func (e *End) take(conn *net.TCPConn, b []byte) error {
	n, err := io.ReadFull(persistent(conn.Read), b)
	e.received.Add(uint64(n))
	return err
}

// persistent reads on where the runtime takes the word that a zero-copy call is
// done, an error to poll(2), for one of the connection.
type persistent func([]byte) (int, error)

// Read reads.
func (p persistent) Read(b []byte) (int, error) {
	for {
		n, err := p(b)
		if n > 0 || err == nil || !strings.Contains(err.Error(), "not pollable") {
			return max(0, n), err
		}
		runtime.Gosched()
	}
}

func (e *End) send(conn *net.TCPConn, n uint64, how Way) error {
	switch how {
	case Vector:
		return e.pieces(n, func(b []byte) (int, error) {
			at := len(b) / 3
			vector := net.Buffers{b[:at], b[at:]}
			sent, err := vector.WriteTo(conn)
			return int(sent), err
		})
	case Sendfile:
		return e.sendfile(conn, n)
	case Splice:
		return e.spliceOut(conn, n)
	case ZeroCopy:
		return e.zeroCopy(conn, n)
	}
	return e.pieces(n, conn.Write)
}

// pieces sends n bytes by calls of at most a chunk.
func (e *End) pieces(n uint64, write func([]byte) (int, error)) error {
	b := make([]byte, min(n, chunk))
	for n > 0 {
		sent, err := write(b[:min(n, chunk)])
		e.sent.Add(uint64(sent))
		n -= uint64(sent)
		if err != nil {
			return err
		}
	}
	return nil
}

// until calls do, which may say EAGAIN, whenever the connection is ready.
func until(ready func(func(fd uintptr) bool) error, do func(fd int) (int, error)) (int, error) {
	var n int
	var err error
	if closed := ready(func(fd uintptr) bool {
		for n, err = do(int(fd)); errors.Is(err, unix.EINTR); {
			n, err = do(int(fd))
		}
		return !errors.Is(err, unix.EAGAIN)
	}); closed != nil {
		return 0, closed
	}
	return n, err
}

func (e *End) sendfile(conn *net.TCPConn, n uint64) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	file, err := unix.MemfdCreate("payload", 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(file) }()
	if err := unix.Ftruncate(file, chunk); err != nil {
		return err
	}
	return e.pieces(n, func(b []byte) (int, error) {
		var at int64
		return until(raw.Write, func(fd int) (int, error) { return unix.Sendfile(fd, file, &at, len(b)) })
	})
}

func (e *End) spliceOut(conn *net.TCPConn, n uint64) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	out, in, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _, _ = out.Close(), in.Close() }()
	from := int(out.Fd())
	return e.pieces(n, func(b []byte) (int, error) {
		if _, err := in.Write(b); err != nil {
			return 0, err
		}
		sent := 0
		for sent < len(b) {
			// The pipe has what is asked for: only the socket can be full.
			some, err := until(raw.Write, func(fd int) (int, error) {
				n, err := unix.Splice(from, nil, fd, nil, len(b)-sent, unix.SPLICE_F_NONBLOCK)
				return int(n), err
			})
			sent += max(0, some)
			if err != nil {
				return sent, err
			}
		}
		return sent, nil
	})
}

func (e *End) zeroCopy(conn *net.TCPConn, n uint64) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ZEROCOPY, 1) }); err != nil || failed != nil {
		return errors.Join(err, failed)
	}
	// The kernel tells of each call when it is done with its memory, and takes no
	// further calls while too many are not read.
	asked, told := 0, 0
	reap := func(fd int) error {
		var control [128]byte
		_, n, _, _, err := unix.Recvmsg(fd, nil, control[:], unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		if err != nil {
			return err
		}
		messages, err := unix.ParseSocketControlMessage(control[:n])
		if err != nil || len(messages) != 1 {
			return fmt.Errorf("read what is done: %d messages: %w", len(messages), err)
		}
		// struct sock_extended_err: ee_info and ee_data are the first and last call.
		data := messages[0].Data
		first, last := int(le32(data[8:])), int(le32(data[12:]))
		told += last - first + 1
		return nil
	}
	err = e.pieces(n, func(b []byte) (int, error) {
		sent, err := until(raw.Write, func(fd int) (int, error) {
			for {
				sent, err := unix.SendmsgN(fd, b, nil, nil, unix.MSG_ZEROCOPY|unix.MSG_DONTWAIT)
				if !errors.Is(err, unix.ENOBUFS) {
					return sent, err
				}
				if err := awaitTold(fd); err != nil {
					return 0, err
				}
				if err := reap(fd); err != nil && !errors.Is(err, unix.EAGAIN) {
					return 0, err
				}
			}
		})
		if err == nil {
			asked++
		}
		return sent, err
	})
	for err == nil && told < asked {
		_, err = until(func(f func(uintptr) bool) error { return raw.Control(func(fd uintptr) { f(fd) }) }, func(fd int) (int, error) {
			if err := awaitTold(fd); err != nil {
				return 0, err
			}
			if err := reap(fd); !errors.Is(err, unix.EAGAIN) {
				return 0, err
			}
			return 0, nil
		})
	}
	return err
}

// awaitTold waits for the error queue, of which poll tells without being asked.
func awaitTold(fd int) error {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd)}}, int(patience.Milliseconds()))
	if n == 0 && err == nil {
		return os.ErrDeadlineExceeded
	}
	if errors.Is(err, unix.EINTR) {
		return nil
	}
	return err
}

func le32(b []byte) uint32 {
	return uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
}

func (e *End) receive(conn *net.TCPConn, n uint64, how Way) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	b := make([]byte, min(n, chunk))
	read := conn.Read
	switch how {
	case Vector:
		read = func(b []byte) (int, error) {
			at := len(b) / 3
			return until(raw.Read, func(fd int) (int, error) { return unix.Readv(fd, [][]byte{b[:at], b[at:]}) })
		}
	case Splice:
		out, in, err := os.Pipe()
		if err != nil {
			return err
		}
		defer func() { _, _ = out.Close(), in.Close() }()
		to := int(in.Fd())
		read = func(b []byte) (int, error) {
			n, err := until(raw.Read, func(fd int) (int, error) {
				n, err := unix.Splice(fd, nil, to, nil, len(b), unix.SPLICE_F_NONBLOCK)
				return int(n), err
			})
			if n > 0 {
				_, err = io.ReadFull(out, b[:n])
			}
			return n, err
		}
	}
	for n > 0 {
		got, err := persistent(read).Read(b[:min(n, chunk)])
		if got <= 0 && err == nil {
			err = io.ErrUnexpectedEOF
		}
		e.received.Add(uint64(max(0, got)))
		n -= uint64(max(0, got))
		if n > 0 && err != nil {
			return err
		}
	}
	return nil
}
