package resp

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// bothEnds gives both ends of a connection of the kernel's.
func bothEnds(t *testing.T, network string) (server, client net.Conn) {
	t.Helper()
	at := "127.0.0.1:0"
	if network == "unix" {
		at = filepath.Join(t.TempDir(), "s")
	}
	l, err := (&net.ListenConfig{}).Listen(t.Context(), network, at)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if client, err = (&net.Dialer{}).DialContext(t.Context(), network, l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = server.Close(), client.Close() })
	return server, client
}

func descriptor(t *testing.T, c net.Conn) int {
	t.Helper()
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	fd := -1
	if err := raw.Control(func(of uintptr) { fd = int(of) }); err != nil {
		t.Fatal(err)
	}
	return fd
}

func TestTheHeadOfALargeReplyGoesByItself(t *testing.T) {
	t.Parallel()
	for _, network := range []string{"tcp", "unix"} {
		server, client := bothEnds(t, network)
		header, value := []byte("$300000\r\n"), bytes.Repeat([]byte("0123456789"), 30_000)
		buffers := [][]byte{header, value, crlf}
		if n := sendHead(descriptor(t, server), buffers, network == "tcp"); n != shift {
			t.Fatalf("%s: %d bytes went by themselves, want %d", network, n, shift)
		}
		// Over TCP they wait for more, unlike here.
		if network == "tcp" {
			if _, err := server.Write([]byte("!")); err != nil {
				t.Fatal(err)
			}
		}
		got := make([]byte, shift)
		if _, err := io.ReadFull(client, got); err != nil || !bytes.Equal(got, append(header, value...)[:shift]) {
			t.Errorf("%s: client got %q... (%v)", network, got[:20], err)
		}
	}
}

// A pipe that could not be emptied is not used again: its bytes are another's.
func TestAHeadThatTheSocketDoesNotTakeIsNotLeftInAPipe(t *testing.T) {
	t.Parallel()
	full, _ := bothEnds(t, "tcp")
	fd := descriptor(t, full)
	for {
		if _, err := unix.SendmsgBuffers(fd, [][]byte{make([]byte, 1<<20)}, nil, nil, unix.MSG_DONTWAIT); errors.Is(err, unix.EAGAIN) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	other := bytes.Repeat([]byte("other's "), 1<<10)
	for range 20 {
		if n := sendHead(fd, [][]byte{other}, true); n != 0 {
			t.Fatalf("a full socket took %d bytes", n)
		}
	}
	server, client := bothEnds(t, "tcp")
	own := bytes.Repeat([]byte("own "), 1<<10)
	for range 20 {
		if n := sendHead(descriptor(t, server), [][]byte{own}, true); n != shift {
			t.Fatalf("%d bytes went, want %d", n, shift)
		}
	}
	_ = server.Close()
	if got, err := io.ReadAll(client); err != nil || !bytes.Equal(got, bytes.Repeat(own[:shift], 20)) {
		t.Errorf("client got %d bytes that begin %q (%v)", len(got), got[:min(len(got), 20)], err)
	}
}

// Replies of sizes about the bound, to clients with small buffers that send many
// commands before they read: every byte comes once and in order.
func TestLargeRepliesComeWholeThroughSmallBuffers(t *testing.T) {
	t.Parallel()
	for _, network := range []string{"tcp", "unix"} {
		tier := newMemory(64 << 20)
		tenant := tenantOf("t", tier)
		values := map[string]string{}
		random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // bytes of a test
		for _, size := range []int{shiftFromTCP - 20, shiftFromTCP - 9, shiftFromTCP, shiftFromTCP + shift + 1, shiftFromUnix - 11, shiftFromUnix, 1 << 20, 3<<20 + 7} {
			value := make([]byte, size)
			for i := range value {
				value[i] = byte(random.Uint32())
			}
			key := strings.Repeat("k", 1+len(values))
			values[key] = string(value)
		}
		s := New(Options{})
		server, client := bothEnds(t, network)
		if tcp, ok := client.(*net.TCPConn); ok {
			_ = tcp.SetReadBuffer(16 << 10)
		}
		l := &listening{server: s, access: Access{Tenant: tenant}, ctx: t.Context()}
		done := make(chan struct{})
		go func() { newConn(l, server).serve(); close(done) }()
		setter := func(key, value string) {
			if _, err := io.WriteString(client, wire("SET", key, value)); err != nil {
				t.Error(err)
			}
			ok := make([]byte, len("+OK\r\n"))
			if _, err := io.ReadFull(client, ok); err != nil {
				t.Error(err)
			}
		}
		var question, want strings.Builder
		for key, value := range values {
			setter(key, value)
		}
		for range 3 {
			for key, value := range values {
				question.WriteString(wire("GET", key))
				want.WriteString(bulk(value))
			}
		}
		if _, err := io.WriteString(client, question.String()); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, want.Len())
		if n, err := io.ReadFull(client, got); err != nil || string(got) != want.String() {
			t.Errorf("%s: %d of %d bytes came (%v), or they differ", network, n, want.Len(), err)
		}
		_ = client.Close()
		<-done
	}
}
