package bench

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// dialFD connects a blocking socket to host:port or to the socket of a path. Its
// buffers are as the kernel makes them.
func dialFD(addr string) (fd int, err error) {
	var to unix.Sockaddr
	family := unix.AF_UNIX
	if filepath.IsAbs(addr) {
		to = &unix.SockaddrUnix{Name: addr}
	} else {
		ap, err := netip.ParseAddrPort(addr)
		if err != nil || !ap.Addr().Is4() {
			return -1, fmt.Errorf("address %q is no IPv4 address with a port", addr)
		}
		family, to = unix.AF_INET, &unix.SockaddrInet4{Port: int(ap.Port()), Addr: ap.Addr().As4()}
	}
	if fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, err
	}
	wait, last := unix.NsecToTimeval(kvPatience.Nanoseconds()), unix.NsecToTimeval(kvTimeout.Nanoseconds())
	errs := []error{
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &last),
	}
	if family == unix.AF_INET {
		errs = append(errs, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
	}
	if err := errors.Join(append(errs, connect(fd, to))...); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// connect is unix.Connect, whom a signal does not end.
func connect(fd int, to unix.Sockaddr) error {
	for {
		switch err := unix.Connect(fd, to); {
		case errors.Is(err, unix.EISCONN): // meanwhile
			return nil
		case !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EALREADY):
			return err
		}
	}
}
