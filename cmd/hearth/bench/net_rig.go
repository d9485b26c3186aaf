package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// room is a network namespace of the bench's own, with nothing in it but a
// loopback device that has the addresses 10.x: connections there are alone, and
// to the accounting they are between addresses of a node as any are.
type room struct {
	calls chan func()
}

// Addresses in a room.
var (
	roomServer = [4]byte{10, 77, 0, 1}
	roomClient = [4]byte{10, 77, 0, 2}
)

// newRoom makes a room. It lasts until end, and as long as sockets are in it.
func newRoom() (*room, error) {
	r := &room{calls: make(chan func())}
	made := make(chan error, 1)
	go func() {
		// The thread stays locked, so that it ends with the goroutine.
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err != nil {
			made <- cannot{fmt.Errorf("make network namespace: %w", err)}
			return
		}
		if err = furnish(); err != nil {
			made <- cannot{err}
			return
		}
		made <- nil
		for call := range r.calls {
			call()
		}
	}()
	if err := <-made; err != nil {
		return nil, err
	}
	return r, nil
}

func (r *room) end() { close(r.calls) }

// do runs f on the thread that is in the room: sockets that f makes are there.
func (r *room) do(f func() error) error {
	done := make(chan error)
	r.calls <- func() { done <- f() }
	return <-done
}

func furnish() error {
	// As many connections may end as a rate of them takes: none keeps its ports for
	// a minute, best effort.
	_ = os.WriteFile("/proc/sys/net/ipv4/tcp_max_tw_buckets", []byte("0"), 0)
	_ = os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("1024 65000"), 0)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("set up loopback: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("set up loopback: %w", err)
	}
	lo.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo); err != nil {
		return fmt.Errorf("set up loopback: %w", err)
	}
	if err := lo.SetInet4Addr(roomServer[:]); err != nil {
		return fmt.Errorf("set up loopback: %w", err)
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFADDR, lo); err != nil {
		return fmt.Errorf("set up loopback: %w", err)
	}
	return nil
}

// server is a listener in a room, and the connections that are kept with it.
type server struct {
	room  *room
	fd    int
	at    *unix.SockaddrInet4
	pairs [][2]int // descriptors: who called, who answered
}

func (r *room) listen() (*server, error) {
	s := &server{room: r, fd: -1}
	err := r.do(func() (err error) {
		if s.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err := unix.Bind(s.fd, &unix.SockaddrInet4{Addr: roomServer}); err != nil {
			return err
		}
		if err := unix.Listen(s.fd, 128); err != nil {
			return err
		}
		at, err := unix.Getsockname(s.fd)
		if v4, ok := at.(*unix.SockaddrInet4); ok {
			s.at = v4
		}
		return err
	})
	if err != nil {
		s.end()
		return nil, fmt.Errorf("listen: %w", err)
	}
	return s, nil
}

func (s *server) end() {
	for _, pair := range s.pairs {
		closePair(pair)
	}
	if s.fd >= 0 {
		_ = unix.Close(s.fd)
	}
	s.pairs, s.fd = nil, -1
}

func closePair(pair [2]int) {
	_ = unix.Close(pair[0])
	_ = unix.Close(pair[1])
}

// connect makes a connection. The caller is in the room. from another address
// than the server's it costs a call more.
func (s *server) connect(from *[4]byte) (pair [2]int, err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return pair, fmt.Errorf("connect: %w", err)
	}
	if from != nil {
		// The port is chosen once it is known to whom.
		err = unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
		if err == nil {
			err = unix.Bind(fd, &unix.SockaddrInet4{Addr: *from})
		}
	}
	if err == nil {
		err = unix.Connect(fd, s.at)
	}
	if err != nil {
		_ = unix.Close(fd)
		return pair, fmt.Errorf("connect: %w", err)
	}
	for {
		answer, _, err := unix.Accept4(s.fd, unix.SOCK_CLOEXEC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			_ = unix.Close(fd)
			return pair, fmt.Errorf("accept: %w", err)
		}
		return [2]int{fd, answer}, nil
	}
}

// hold keeps so many connections, with two sockets each.
func (s *server) hold(connections int) error {
	if err := mayOpen(2*connections + 200); err != nil {
		return err
	}
	return s.room.do(func() error {
		for len(s.pairs) < connections {
			pair, err := s.connect(&roomClient)
			if err != nil {
				return err
			}
			s.pairs = append(s.pairs, pair)
		}
		return nil
	})
}

// mayOpen raises the limit of open files where it is too low.
func mayOpen(files int) error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("read limit of open files: %w", err)
	}
	if limit.Cur >= uint64(files) {
		return nil
	}
	limit.Cur = uint64(files)
	limit.Max = max(limit.Max, limit.Cur)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return cannot{fmt.Errorf("open %d files: raise the limit: %w", files, err)}
	}
	return nil
}

// touch passes a few bytes on one in so many of the connections held.
func (s *server) touch(oneIn int) error {
	out, in := make([]byte, 100), make([]byte, 200)
	for i := 0; i < len(s.pairs); i += oneIn {
		if _, err := unix.Write(s.pairs[i][0], out); err != nil {
			return fmt.Errorf("write: %w", err)
		}
		if _, err := unix.Read(s.pairs[i][1], in); err != nil {
			return fmt.Errorf("read: %w", err)
		}
	}
	return nil
}

// churn makes connections and ends them, one after another, while more says so
// of how many there were. It gives the time that one took.
func (s *server) churn(ctx context.Context, from *[4]byte, more func(int) bool) (each time.Duration, err error) {
	err = s.room.do(func() error {
		made, begin := 0, time.Now()
		for ; more(made); made++ {
			if err := ctx.Err(); err != nil {
				return err
			}
			pair, err := s.connect(from)
			if err != nil {
				return err
			}
			closePair(pair)
		}
		each = time.Since(begin) / time.Duration(max(1, made))
		return nil
	})
	return each, err
}

func upTo(n int) func(int) bool { return func(made int) bool { return made < n } }

func within(d time.Duration) func(int) bool {
	begin := time.Now()
	return func(int) bool { return time.Since(begin) < d }
}
