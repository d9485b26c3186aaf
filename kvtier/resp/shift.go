package resp

import (
	"errors"

	"golang.org/x/sys/unix"
)

// A block begins on a page, and so does the memory that the kernel copies a reply
// to, where the reply's header comes first: a byte of the block goes to an address
// a few bytes further into its page than its own. Processors take loads for
// dependent on the stores just before them where the addresses are equal but for
// the page, and the copy then costs up to twice as much. So the begin of a large
// reply goes by itself, and the rest is copied from the middle of pages to their
// begin.
const (
	shift = 2 << 10 // bytes of a reply that go by themselves
	// Bytes of a reply that are worth it. On a unix socket it wakes the client
	// once more.
	shiftFromTCP  = 64 << 10
	shiftFromUnix = 256 << 10
)

// sendHead sends the begin of a large reply, and gives how much went. What hinders
// it hinders what follows, which tells.
func sendHead(fd int, buffers [][]byte, tcp bool) (sent int) {
	var pieces [3][]byte
	head, size := first(pieces[:0], buffers, shift)
	if size < shift {
		return 0
	}
	if tcp {
		return spliceHead(fd, head)
	}
	sent, _ = unix.SendmsgBuffers(fd, head, nil, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
	return max(sent, 0)
}

// spliceHead sends bytes in a page of their own: TCP fills the page where it is,
// but begins a new one after another's.
func spliceHead(fd int, head [][]byte) (sent int) {
	p := takePipe()
	if p == nil {
		return 0
	}
	wrote, err := unix.Writev(p.to, head)
	for err == nil && sent < wrote {
		var n int64
		n, err = unix.Splice(p.from, nil, fd, nil, wrote-sent, unix.SPLICE_F_MORE|unix.SPLICE_F_NONBLOCK)
		if errors.Is(err, unix.EINTR) {
			err = nil
		} else if n <= 0 {
			break
		}
		sent += int(max(n, 0))
	}
	if sent == wrote {
		p.give()
	} else {
		p.close() // bytes are left in it
	}
	return sent
}

// pipe is one that is empty while nobody has it.
type pipe struct{ from, to int }

// emptyPipes are those that nobody has. More than a few are in use only where as many
// threads are within a call of the system.
var emptyPipes = make(chan *pipe, 8)

// takePipe gives an empty pipe, nil where there can be none.
func takePipe() *pipe {
	select {
	case p := <-emptyPipes:
		return p
	default:
	}
	var ends [2]int
	if unix.Pipe2(ends[:], unix.O_CLOEXEC|unix.O_NONBLOCK) != nil {
		return nil
	}
	return &pipe{from: ends[0], to: ends[1]}
}

func (p *pipe) give() {
	select {
	case emptyPipes <- p:
	default:
		p.close()
	}
}

func (p *pipe) close() {
	_ = unix.Close(p.from)
	_ = unix.Close(p.to)
}
