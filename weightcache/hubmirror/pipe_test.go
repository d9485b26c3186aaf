package hubmirror

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"
)

// Pipe is a listener in memory, so that a server and its clients live in one
// synctest bubble. It is exported for the tests of package hubmirror_test.
type Pipe struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

// NewPipe serves m on a Pipe until the test ends; call End inside the bubble.
func NewPipe(m *Mirror) (p *Pipe, end func()) {
	p = &Pipe{conns: make(chan net.Conn), done: make(chan struct{})}
	server := NewServer(m)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(p)
	}()
	return p, func() {
		_ = server.Close()
		<-served
	}
}

func (p *Pipe) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *Pipe) Close() error {
	p.once.Do(func() { close(p.done) })
	return nil
}

func (p *Pipe) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }

// Got is what one client saw of one body.
type Got struct {
	Status  int
	Header  http.Header
	Body    []byte
	Err     error
	Silence time.Duration // the longest wait for a byte, from the request on
	First   time.Duration // the wait for the first byte of the body
}

// Get fetches a path as a client of its own, on its own connection, and
// measures how long it was left without a byte.
func (p *Pipe) Get(ctx context.Context, path string, header ...string) Got {
	client, server := net.Pipe()
	p.conns <- server
	transport := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return client, nil }}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://mirror"+path, nil)
	if err != nil {
		return Got{Err: err}
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	began := time.Now()
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return Got{Err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	got := Got{Status: resp.StatusCode, Header: resp.Header, Silence: time.Since(began)}
	buf := make([]byte, 64<<10)
	for last := time.Now(); ; last = time.Now() {
		n, err := resp.Body.Read(buf)
		if n > 0 && len(got.Body) == 0 {
			got.First = time.Since(began)
		}
		got.Body = append(got.Body, buf[:n]...)
		got.Silence = max(got.Silence, time.Since(last))
		if err == io.EOF {
			return got
		}
		if err != nil {
			got.Err = err
			return got
		}
	}
}

// inBubble runs a small library with content behind weights.bin on a Pipe.
func inBubble(t *testing.T, opts Options, content func() (Content, error)) (*Mirror, *Pipe) {
	t.Helper()
	m := newMirror(t, opts, content)
	p, end := NewPipe(m)
	t.Cleanup(end)
	return m, p
}
