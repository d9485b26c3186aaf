package identity_test

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hearth-dev/hearth/identity"
)

// exchange sends bytes and gives all that comes until the other side ends.
func exchange(t *testing.T, address, text string) string {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(conn, text); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(conn)
	if err != nil {
		t.Fatalf("after %q: %v", got, err)
	}
	return string(got)
}

func TestABodyThatNeverComesHoldsNoServer(t *testing.T) {
	t.Parallel()
	for name, h := range map[string]http.HandlerFunc{
		"the handler leaves it": func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "answer") },
		"the handler reads it": func(w http.ResponseWriter, r *http.Request) {
			if _, err := io.ReadAll(r.Body); err == nil && r.Method == http.MethodPost {
				t.Error("a body was read that was never sent")
			}
			_, _ = io.WriteString(w, "answer")
		},
	} {
		s := httptest.NewServer(identity.BodyWithin(h, 20*time.Millisecond))
		t.Cleanup(s.Close)
		for _, method := range []string{"GET", "HEAD", "POST", "DELETE"} {
			for _, framing := range []string{"Content-Length: 10", "Content-Length: 1000000", "Transfer-Encoding: chunked", "Content-Length: 10\r\nExpect: 100-continue"} {
				got := exchange(t, s.Listener.Addr().String(), method+" / HTTP/1.1\r\nHost: x\r\n"+framing+"\r\n\r\n")
				got = strings.TrimPrefix(got, "HTTP/1.1 100 Continue\r\n\r\n")
				if !strings.HasPrefix(got, "HTTP/1.1 200 OK\r\n") || method != "HEAD" && !strings.HasSuffix(got, "answer") {
					t.Errorf("%s, %s with %s: %q", name, method, framing, got)
				}
			}
		}
	}
}

func TestABodyThatCameBoundsNoAnswer(t *testing.T) {
	t.Parallel()
	const within = 20 * time.Millisecond
	s := httptest.NewServer(identity.BodyWithin(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if text, err := io.ReadAll(r.Body); err != nil || r.Method == http.MethodPost && string(text) != "0123456789" {
			t.Errorf("body %q, %v", text, err)
		}
		later := time.NewTimer(5 * within)
		defer later.Stop()
		select {
		case <-r.Context().Done():
			t.Error("the client was taken for gone")
		case <-later.C:
		}
		_, _ = io.WriteString(w, "answer")
	}), within))
	t.Cleanup(s.Close)
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	answers := bufio.NewReader(conn)
	for _, method := range []string{"POST", "GET", "POST"} { // and the connection serves on
		if _, err := io.WriteString(conn, method+" / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n0123456789"); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(answers, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(resp.Body); err != nil || string(got) != "answer" {
			t.Errorf("%s: %q, %v", method, got, err)
		}
		_ = resp.Body.Close()
	}
}

func TestAClientThatTakesNothingEndsAWrite(t *testing.T) {
	t.Parallel()
	l, err := identity.ListenTCP(t.Context(), "127.0.0.1:0", 300*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	client, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	piece := make([]byte, 1<<20)
	for {
		if _, err := conn.Write(piece); err != nil {
			if timeout, ok := err.(net.Error); ok && timeout.Timeout() && strings.Contains(err.Error(), "i/o timeout") { //nolint:errorlint // net wraps nothing here
				t.Errorf("only the test's own deadline ended the write: %v", err)
			}
			return
		}
	}
}

// option reads one of a listener's and of one of its connections.
func option(t *testing.T, of syscall.Conn, level, name int) int {
	t.Helper()
	conn, err := of.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	value := 0
	var failed error
	if err := conn.Control(func(fd uintptr) { value, failed = syscall.GetsockoptInt(int(fd), level, name) }); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
	return value
}

func TestAListenerIsPlainTCP(t *testing.T) {
	t.Parallel()
	for _, stalled := range []time.Duration{0, time.Minute} { // some kernels refuse options of TCP on a socket of MPTCP
		l, err := identity.ListenTCP(t.Context(), "127.0.0.1:0", stalled)
		if err != nil {
			t.Fatal(err)
		}
		if got := option(t, l.(syscall.Conn), syscall.SOL_SOCKET, unix.SO_PROTOCOL); got != syscall.IPPROTO_TCP {
			t.Errorf("protocol %d, want %d", got, syscall.IPPROTO_TCP)
		}
		_ = l.Close()
	}
}

func TestConnectionsHaveWhatWasSetOnTheirListener(t *testing.T) {
	t.Parallel()
	const stalled = 5 * time.Second
	l, err := identity.ListenTCP(t.Context(), "127.0.0.1:0", stalled, func(fd uintptr) error {
		return syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_LINGER2, 7)
	}, func(fd uintptr) error {
		return syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_SYNCNT, 3)
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	client, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	served, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = served.Close() }()
	for name, of := range map[string]any{"listener": l, "connection": served} {
		socket := of.(syscall.Conn)
		for _, o := range []struct {
			says              string
			level, name, want int
		}{
			{"linger", syscall.IPPROTO_TCP, syscall.TCP_LINGER2, 7},
			{"retries", syscall.IPPROTO_TCP, syscall.TCP_SYNCNT, 3},
			{"user timeout", syscall.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(stalled.Milliseconds())},
		} {
			if got := option(t, socket, o.level, o.name); got != o.want {
				t.Errorf("%s of the %s is %d, want %d", o.says, name, got, o.want)
			}
		}
	}
}

func TestAListenerThatIsNotWhatWasAskedForIsNone(t *testing.T) {
	t.Parallel()
	refused := errors.New("no tag today")
	l, err := identity.ListenTCP(t.Context(), "127.0.0.1:0", 0, func(uintptr) error { return refused })
	if !errors.Is(err, refused) {
		t.Errorf("listen: %v", err)
	}
	if l != nil {
		_ = l.Close()
		t.Error("there is a listener")
	}
}
