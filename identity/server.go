package identity

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"syscall"
	"time"
)

// StalledTimeout is how long the other side of a TCP connection may take none
// of the bytes that wait for it.
const StalledTimeout = 2 * time.Minute

// tcpUserTimeout is TCP_USER_TIMEOUT of tcp(7).
const tcpUserTimeout = 18

// ListenTCP binds an address. The kernel ends connections whose other side has
// taken nothing for as long as stalled, so that no write to it waits longer; a
// connection on which there is nothing to say may be silent for any time. 0
// leaves that to the kernel. Each control is given the descriptor before it is
// bound, and its error ends the call; connections inherit most of what it sets.
//
// The socket is one of plain TCP. By itself Go listens with MPTCP, where the
// connections that carry the bytes are others than the one with the descriptor:
// options and marks set on it would reach none of them.
func ListenTCP(ctx context.Context, address string, stalled time.Duration, control ...func(fd uintptr) error) (net.Listener, error) {
	config := net.ListenConfig{Control: func(_, _ string, conn syscall.RawConn) error {
		var failed error
		err := conn.Control(func(fd uintptr) {
			if stalled > 0 {
				failed = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(stalled.Milliseconds()))
			}
			for _, act := range control {
				failed = errors.Join(failed, act(fd))
			}
		})
		return errors.Join(err, failed)
	}}
	config.SetMultipathTCP(false)
	return config.Listen(ctx, "tcp", address)
}

// maxUnasked is how much of a body that nobody asked for is taken, in bytes.
const maxUnasked = 256 << 10

// BodyWithin bounds how long a request of HTTP/1 may keep h and its server
// waiting for the body. A server of net/http reads what its handler left of a
// body before it sends the answer, and once more after it, for as long as the
// client likes; here all that ends after within, and then with it the
// connection. Past the body's end nothing is bounded: an answer may go on for
// any time. A body of GET or HEAD, which means nothing, is taken off before h.
func BodyWithin(h http.Handler, within time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor != 1 || r.Body == nil || r.Body == http.NoBody {
			h.ServeHTTP(w, r)
			return
		}
		body := &timedBody{ReadCloser: r.Body, control: http.NewResponseController(w)}
		_ = body.control.SetReadDeadline(time.Now().Add(within))
		own := r.WithContext(r.Context()) // the server goes by the body that it made
		own.Body = body
		if r.Method == http.MethodGet || r.Method == http.MethodHead {
			if _, err := io.CopyN(io.Discard, body, maxUnasked); !errors.Is(err, io.EOF) {
				w.Header().Set("Connection", "close")
			}
			own.Body, own.ContentLength, own.TransferEncoding = http.NoBody, 0, nil
		}
		h.ServeHTTP(w, own)
	})
}

// timedBody takes the deadline back at the body's end. Else the server's watch
// over the client, which begins there, would take it for the client's leave.
type timedBody struct {
	io.ReadCloser
	control *http.ResponseController
}

// Read implements io.Reader.
func (b *timedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		_ = b.control.SetReadDeadline(time.Time{})
	}
	return n, err
}
