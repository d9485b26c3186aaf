package bench

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// What sock_diag(7) speaks, beside golang.org/x/sys: include/uapi/linux/inet_diag.h.
const (
	sockDiagByFamily  = 20
	inetDiagInfo      = 2 // struct tcp_info
	inetDiagMemory    = 7 // SK_MEMINFO, an array of 32-bit numbers
	inetDiagRequest   = 56
	inetDiagMessage   = 72
	tcpBytesReceived  = 128 // offsets in struct tcp_info
	tcpBytesSent      = 200
	memoryOptions     = 6 // index in SK_MEMINFO: optmem, with what programs keep of a socket
	diagReceiveBuffer = 64 << 10
)

// diag asks the kernel about the TCP sockets of a room as `ss -ti` does.
type diag struct {
	fd  int
	buf []byte
}

// diagnosed is what it tells of one connection.
type diagnosed struct {
	sent, received uint64
	options        uint32 // bytes
}

func (r *room) diag() (*diag, error) {
	d := &diag{buf: make([]byte, diagReceiveBuffer)}
	err := r.do(func() (err error) {
		d.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_INET_DIAG)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open sock_diag: %w", err)
	}
	return d, nil
}

func (d *diag) end() { _ = unix.Close(d.fd) }

// dump gives every IPv4 connection that is open, with one of the attributes.
func (d *diag) dump(attribute uint16, each func(diagnosed)) error {
	request := make([]byte, unix.SizeofNlMsghdr+inetDiagRequest)
	n := binary.NativeEndian
	n.PutUint32(request, uint32(len(request)))
	n.PutUint16(request[4:], sockDiagByFamily)
	n.PutUint16(request[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	body := request[unix.SizeofNlMsghdr:]
	body[0], body[1], body[2] = unix.AF_INET, unix.IPPROTO_TCP, 1<<(attribute-1)
	n.PutUint32(body[4:], 1<<1) // TCP_ESTABLISHED
	if err := unix.Sendto(d.fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("ask sock_diag: %w", err)
	}
	for {
		got, _, err := unix.Recvfrom(d.fd, d.buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("read sock_diag: %w", err)
		}
		if done, err := messages(d.buf[:got], each); done || err != nil {
			return err
		}
	}
}

var errDiag = errors.New("a message of sock_diag is cut off")

// messages reads what came at once; done is true at the end of the dump.
func messages(raw []byte, each func(diagnosed)) (done bool, err error) {
	n := binary.NativeEndian
	for len(raw) >= unix.SizeofNlMsghdr {
		size := int(n.Uint32(raw))
		if size < unix.SizeofNlMsghdr || size > len(raw) {
			return false, errDiag
		}
		body := raw[unix.SizeofNlMsghdr:size]
		switch n.Uint16(raw[4:]) {
		case unix.NLMSG_DONE:
			return true, nil
		case unix.NLMSG_ERROR:
			if len(body) < 4 {
				return false, errDiag
			}
			return false, fmt.Errorf("read sock_diag: %w", unix.Errno(-int32(n.Uint32(body))))
		}
		if len(body) < inetDiagMessage {
			return false, errDiag
		}
		each(attributes(body[inetDiagMessage:]))
		raw = raw[min(len(raw), (size+3)&^3):]
	}
	return false, nil
}

func attributes(raw []byte) (d diagnosed) {
	n := binary.NativeEndian
	for len(raw) >= unix.SizeofNlAttr {
		size := int(n.Uint16(raw))
		if size < unix.SizeofNlAttr || size > len(raw) {
			return d
		}
		value := raw[unix.SizeofNlAttr:size]
		switch kind := n.Uint16(raw[2:]); {
		case kind == inetDiagInfo && len(value) >= tcpBytesSent+8:
			d.received, d.sent = n.Uint64(value[tcpBytesReceived:]), n.Uint64(value[tcpBytesSent:])
		case kind == inetDiagMemory && len(value) >= 4*(memoryOptions+1):
			d.options = n.Uint32(value[4*memoryOptions:])
		}
		raw = raw[min(len(raw), (size+3)&^3):]
	}
	return d
}
