//go:build root

package bpf

import (
	"errors"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/test/netns/mover"
)

// Reuser is a socket that is connected several times, in a process of its own.
type Reuser struct{}

// Reuse is what it is asked.
type Reuse struct {
	Address string
	Times   int
	Request mover.Request
}

// Run connects a socket, makes a request, dissolves the connection by connecting
// to AF_UNSPEC, and does so again with the same socket. What listens sees each
// end by RST.
func (*Reuser) Run(r Reuse, totals *mover.Counts) error {
	at, err := netip.ParseAddrPort(r.Address)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	limit := unix.NsecToTimeval(patience.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return err
	}
	for i := range r.Times {
		if err := unix.Connect(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}); err != nil {
			return fmt.Errorf("connect the %dth time: %w", i+1, err)
		}
		n, err := unix.Write(fd, append(r.Request.Head(), make([]byte, r.Request.Up)...))
		if err != nil {
			return err
		}
		totals.Sent += uint64(n)
		in := make([]byte, 1<<16)
		for left := r.Request.Down; left > 0; {
			n, err := unix.Read(fd, in[:min(left, uint64(len(in)))])
			if err != nil || n == 0 {
				return fmt.Errorf("read the last %d bytes: %w", left, errors.Join(err, unix.ECONNRESET))
			}
			totals.Received += uint64(n)
			left -= uint64(n)
		}
		nobody := unix.RawSockaddr{Family: unix.AF_UNSPEC}
		if _, _, err := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&nobody)), unsafe.Sizeof(nobody)); err != 0 {
			return fmt.Errorf("dissolve connection: %w", err)
		}
	}
	return nil
}
