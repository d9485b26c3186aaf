package resp

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A large value is moved over a unix socket by a thread that waits in the kernel:
// parking the goroutine each time that the socket's buffer is full or empty costs
// about as much processor time as the copy. A thread that waits keeps its place in
// the Go scheduler for a while, so only half of the places may wait at a time, and
// who is slow is left to the runtime's poller: after patience without a byte, when
// a piece came in part only, and after ten times patience in any case. Over TCP the
// kernel sizes buffers to take most values at once, and waiting costs more.
const (
	blockingFrom = 64 << 10 // bytes
	patience     = 5 * time.Millisecond
	pieceSize    = 1 << 20 // bytes that are sent at once
	// unixBuffer was measured to cost least; the kernel's own is of some 200 KiB.
	unixBuffer = 512 << 10 // bytes
)

// blocking counts the threads that wait for sockets, of at most maxBlocking.
var (
	blocking    atomic.Int64
	maxBlocking = int64(max(1, runtime.GOMAXPROCS(0)/2))
)

// socket is a connection's descriptor, where it has one.
type socket struct {
	raw   syscall.RawConn
	waits bool // whether a thread may wait for it
	now   *sending
	both  *receiving
}

// receiving is what read2 receives. It is made once, as sending is.
type receiving struct {
	into [2][]byte
	got  int
	err  error
	step func(fd uintptr) bool
}

// sending is what try sends. It is made once, since each small reply passes it.
type sending struct {
	buffers [][]byte
	large   bool // worth a shift
	tcp     bool
	sent    int
	err     error
	step    func(fd uintptr) bool
}

// openSocket prepares a connection of the kernel's; others have no socket.
func openSocket(connection net.Conn) socket {
	holder, ok := connection.(syscall.Conn)
	if !ok {
		return socket{}
	}
	raw, err := holder.SyscallConn()
	if err != nil {
		return socket{}
	}
	s := socket{raw: raw, now: &sending{}, both: &receiving{}}
	s.now.step, s.both.step = s.now.send, s.both.receive
	switch of := connection.(type) {
	case *net.UnixConn:
		err = raw.Control(func(fd uintptr) { s.waits = prepare(int(fd)) })
	case *net.TCPConn:
		s.now.tcp = true
		// A dead peer is found, a silent one is left alone.
		_ = of.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: time.Minute, Interval: 15 * time.Second, Count: 4})
	default:
		return socket{}
	}
	if err != nil {
		return socket{}
	}
	return s
}

// prepare readies a unix socket for threads that wait, and says whether they may.
func prepare(fd int) bool {
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, unixBuffer)
	timeout := unix.NsecToTimeval(patience.Nanoseconds())
	return unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout) == nil &&
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout) == nil
}

// enter takes one of the threads that may wait.
func (s socket) enter(size int) bool {
	if !s.waits || size < blockingFrom {
		return false
	}
	if blocking.Add(1) > maxBlocking {
		blocking.Add(-1)
		return false
	}
	return true
}

// try writes what the socket takes at once of size bytes, and gives what is left
// of buffers.
func (s socket) try(buffers [][]byte, size int) (sent int, left [][]byte, err error) {
	tcp := s.now.tcp
	large := size >= shiftFromUnix || tcp && size >= shiftFromTCP
	*s.now = sending{buffers: buffers, large: large, tcp: tcp, step: s.now.step}
	lockErr := s.raw.Write(s.now.step)
	left, err = s.now.buffers, s.now.err
	s.now.buffers = nil
	return s.now.sent, left, errors.Join(lockErr, err)
}

func (s *sending) send(fd uintptr) bool {
	if s.large {
		s.sent = sendHead(int(fd), s.buffers, s.tcp)
		s.buffers = after(s.buffers, s.sent)
	}
	for len(s.buffers) > 0 {
		var n int
		if len(s.buffers) == 1 {
			n, s.err = syscall.Write(int(fd), s.buffers[0])
		} else {
			n, s.err = unix.SendmsgBuffers(int(fd), s.buffers, nil, nil, unix.MSG_NOSIGNAL)
		}
		if errors.Is(s.err, unix.EINTR) {
			continue
		}
		if s.err = slow(s.err); s.err != nil || n <= 0 {
			break
		}
		s.sent += n
		s.buffers = after(s.buffers, n)
	}
	return true
}

// send writes buffers of size bytes until all is written or the peer is slow, and
// gives what is left of them.
func (s socket) send(buffers [][]byte, size int) (sent int, left [][]byte, err error) {
	defer blocking.Add(-1)
	lockErr := s.raw.Write(func(fd uintptr) bool {
		if err = unix.SetNonblock(int(fd), false); err != nil {
			return true
		}
		var pieces [3][]byte
		if size >= shiftFromUnix {
			sent = sendHead(int(fd), buffers, false)
			buffers = after(buffers, sent)
		}
		for began := time.Now(); len(buffers) > 0 && time.Since(began) < 10*patience; {
			piece, size := first(pieces[:0], buffers, pieceSize)
			var n int
			n, err = unix.SendmsgBuffers(int(fd), piece, nil, nil, unix.MSG_NOSIGNAL)
			if err != nil {
				break
			}
			sent += n
			if buffers = after(buffers, n); n < size {
				break
			}
		}
		err = errors.Join(restore(fd), slow(err))
		return true
	})
	return sent, buffers, errors.Join(lockErr, err)
}

// read2 reads what is there into two places, the second once the first is full. It
// waits for a byte. No bytes without an error are the end.
func (s socket) read2(into, behind []byte) (got int, err error) {
	s.both.into, s.both.got, s.both.err = [2][]byte{into, behind}, 0, nil
	lockErr := s.raw.Read(s.both.step)
	s.both.into = [2][]byte{}
	return s.both.got, errors.Join(lockErr, s.both.err)
}

func (r *receiving) receive(fd uintptr) bool {
	for {
		r.got, r.err = unix.Readv(int(fd), r.into[:])
		switch {
		case r.err == nil:
			return true
		case errors.Is(r.err, unix.EINTR):
		case errors.Is(r.err, unix.EAGAIN):
			r.got, r.err = 0, nil // nothing came, if the wait ends before anything does
			return false
		default:
			r.err = os.NewSyscallError("readv", r.err)
			r.got = 0
			return true
		}
	}
}

// receive reads until into and then behind are full or the peer is slow. step
// hears of each piece of into; more is how much there is of behind.
func (s socket) receive(into, behind []byte, step func(n int)) (got, more int, err error) {
	defer blocking.Add(-1)
	lockErr := s.raw.Read(func(fd uintptr) bool {
		if err = unix.SetNonblock(int(fd), false); err != nil {
			return true
		}
		for began := time.Now(); got < len(into) && time.Since(began) < 10*patience; {
			piece := into[got:min(got+receiveAtOnce, len(into))]
			pieces := [2][]byte{piece}
			if got+len(piece) == len(into) {
				pieces[1] = behind
			}
			var n int
			n, _, _, _, err = unix.RecvmsgBuffers(int(fd), pieces[:], nil, unix.MSG_WAITALL)
			if err == nil && n == 0 {
				err = io.EOF
			}
			if err != nil {
				break
			}
			more = max(n-len(piece), 0)
			got += n - more
			if step(n - more); n < len(piece) {
				break
			}
		}
		err = errors.Join(restore(fd), slow(err))
		return true
	})
	return got, more, errors.Join(lockErr, err)
}

// restore gives the descriptor back to the runtime's poller as it was.
func restore(fd uintptr) error { return os.NewSyscallError("fcntl", unix.SetNonblock(int(fd), true)) }

// slow turns the end of patience into no error.
func slow(err error) error {
	if err == nil || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
		return nil
	}
	if errors.Is(err, io.EOF) {
		return err
	}
	return os.NewSyscallError("move value", err)
}

// first appends what is to be sent at once of buffers, at most size bytes.
func first(to, buffers [][]byte, size int) ([][]byte, int) {
	total := 0
	for _, buffer := range buffers {
		buffer = buffer[:min(len(buffer), size-total)]
		to = append(to, buffer)
		if total += len(buffer); total == size {
			break
		}
	}
	return to, total
}

// after is what is left of buffers once n bytes are gone.
func after(buffers [][]byte, n int) [][]byte {
	for len(buffers) > 0 && n >= len(buffers[0]) {
		n -= len(buffers[0])
		buffers = buffers[1:]
	}
	if n > 0 {
		buffers[0] = buffers[0][n:]
	}
	return buffers
}
