package wire

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// engine is a server on a real socket that a test scripts byte by byte.
type engine struct {
	address  string
	accepted atomic.Int32
}

// newEngine serves each connection with serve, whose end closes it.
func newEngine(t *testing.T, serve func(n int, conn *net.TCPConn, in *bufio.Reader)) *engine {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{address: l.Addr().String()}
	var mu sync.Mutex
	open := map[net.Conn]bool{}
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		defer mu.Unlock()
		for c := range open {
			_ = c.Close()
		}
	})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			n := int(e.accepted.Add(1))
			mu.Lock()
			open[c] = true
			mu.Unlock()
			go func() {
				defer c.Close()
				serve(n, c.(*net.TCPConn), bufio.NewReader(c))
			}()
		}
	}()
	return e
}

// answering gives the same bytes to every request.
func answering(t *testing.T, answer string) *engine {
	t.Helper()
	return newEngine(t, func(_ int, c *net.TCPConn, in *bufio.Reader) {
		for readRequest(in) == nil {
			if _, err := io.WriteString(c, answer); err != nil {
				return
			}
		}
	})
}

func readRequest(in *bufio.Reader) error {
	r, err := http.ReadRequest(in)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, r.Body)
	return err
}

func newTransport(t *testing.T, o Options) *Transport {
	t.Helper()
	tr := New(o)
	t.Cleanup(tr.CloseIdleConnections)
	return tr
}

type shares struct{ n atomic.Int32 }

func (s *shares) Hold()    { s.n.Add(1) }
func (s *shares) Release() { s.n.Add(-1) }

func post(e *engine, body ...string) *Request {
	r := &Request{Method: http.MethodPost, Address: e.address, Host: "engine", Target: "/v1/x?a=b", Header: http.Header{"X-A": {"1", "2"}}, Keeper: new(shares)}
	for _, p := range body {
		r.Body = append(r.Body, []byte(p))
	}
	return r
}

// whole sends req and reads the answer to its end.
func whole(ctx context.Context, tr *Transport, req *Request) (status int, body string, err error) {
	r, err := tr.Do(ctx, req)
	if err != nil {
		return 0, "", err
	}
	defer r.Close()
	var b []byte
	for {
		p, err := r.Next()
		b = append(b, p...)
		if errors.Is(err, io.EOF) {
			return r.Status, string(b), nil
		}
		if err != nil {
			return r.Status, string(b), err
		}
	}
}

// wait polls for what another goroutine brings about.
func wait(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for range 5000 {
		if ok() {
			return
		}
		<-tick.C
	}
	t.Fatalf("%s did not come about", what)
}

func TestARequestArrivesAsItWasGiven(t *testing.T) {
	t.Parallel()
	type seen struct {
		r    *http.Request
		body string
	}
	got := make(chan seen, 10)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got <- seen{r, string(b)}
		_, _ = w.Write(b)
	}))
	t.Cleanup(s.Close)
	tr := newTransport(t, Options{})
	for _, size := range []int{0, 1, 1000, blockBytes, 100_000, 5 << 20} {
		req := post(&engine{address: s.Listener.Addr().String()}, "<", strings.Repeat("0123456789", size/10), ">")
		req.Header["X-Split"] = []string{"a\r\nX-Forged: 1"}
		req.Target = "/v1/a b\n?q=\x7f"
		status, body, err := whole(t.Context(), tr, req)
		if err != nil || status != 200 || len(body) != size/10*10+2 {
			t.Fatalf("%d: status %d, %d bytes, %v", size, status, len(body), err)
		}
		g := <-got
		if g.body != body || g.r.RequestURI != "/v1/a%20b%0A?q=%7F" || g.r.Host != "engine" || g.r.ContentLength != int64(len(body)) ||
			len(g.r.Header["X-A"]) != 2 || g.r.Header.Get("X-Forged") != "" || g.r.Header.Get("X-Split") != "a  X-Forged: 1" {
			t.Fatalf("the engine got %s %v, %d bytes", g.r.RequestURI, g.r.Header, len(g.body))
		}
		wait(t, "the body's release", func() bool { return req.Keeper.(*shares).n.Load() == 0 })
	}
}

func TestAnEngineThatHangsUpIsLostBeforeAByte(t *testing.T) {
	t.Parallel()
	for _, reset := range []bool{false, true} {
		e := newEngine(t, func(_ int, c *net.TCPConn, in *bufio.Reader) {
			_ = readRequest(in)
			if reset {
				_ = c.SetLinger(0)
			}
		})
		_, _, err := whole(t.Context(), newTransport(t, Options{}), post(e, "x"))
		var lost *LostError
		if !errors.As(err, &lost) || !lost.BeforeByte || lost.Reused {
			t.Fatalf("got %v", err)
		}
	}
	gone := answering(t, "")
	gone.address = "127.0.0.1:1" // no other test is given this port
	_, _, err := whole(t.Context(), newTransport(t, Options{}), post(gone))
	var op *net.OpError
	if !errors.As(err, &op) || op.Op != "dial" {
		t.Fatalf("got %v", err)
	}
}

func TestAConnectionTheEngineClosedAtRestIsNotUsed(t *testing.T) {
	t.Parallel()
	closed := make(chan struct{}, 10)
	e := newEngine(t, func(_ int, c *net.TCPConn, in *bufio.Reader) {
		_ = readRequest(in)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		_ = c.CloseWrite() // half closed: the end is there to be seen
		closed <- struct{}{}
		_, _ = in.ReadByte()
	})
	tr := newTransport(t, Options{})
	for range 20 {
		if _, body, err := whole(t.Context(), tr, post(e, "x")); err != nil || body != "ok" {
			t.Fatalf("got %q, %v", body, err)
		}
		<-closed
	}
}

func TestALostReusedConnectionSaysSoAndTakesItsNeighboursAlong(t *testing.T) {
	t.Parallel()
	die := make(chan struct{})
	e := newEngine(t, func(_ int, c *net.TCPConn, in *bufio.Reader) {
		for first := true; readRequest(in) == nil; first = false {
			if !first {
				select {
				case <-die:
					return // the request has been read, and nothing is said
				default:
				}
			}
			if _, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"); err != nil {
				return
			}
		}
	})
	tr := newTransport(t, Options{})
	var open []*Response
	for range 3 {
		r, err := tr.Do(t.Context(), post(e))
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, r)
	}
	for _, r := range open {
		if p, err := r.Next(); string(p) != "ok" || !errors.Is(err, io.EOF) {
			t.Fatalf("got %q, %v", p, err)
		}
		r.Close()
		r.Close()
	}
	close(die)
	_, _, err := whole(t.Context(), tr, post(e))
	var lost *LostError
	if !errors.As(err, &lost) || !lost.BeforeByte || !lost.Reused {
		t.Fatalf("got %v", err)
	}
	if _, body, err := whole(t.Context(), tr, post(e)); err != nil || body != "ok" || e.accepted.Load() != 4 {
		t.Fatalf("got %q, %v with %d connections", body, err, e.accepted.Load())
	}
}

func TestAnEarlyAnswerIsHeardWhileTheBodyIsStillBeingSent(t *testing.T) {
	t.Parallel()
	for _, closes := range []bool{true, false} {
		e := newEngine(t, func(_ int, c *net.TCPConn, in *bufio.Reader) {
			if _, err := http.ReadRequest(in); err != nil {
				return
			}
			_, _ = io.WriteString(c, "HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
			if closes {
				_ = c.CloseWrite()
			}
			<-t.Context().Done()
		})
		tr := newTransport(t, Options{})
		req := post(e, strings.Repeat("x", 32<<20))
		status, body, err := whole(t.Context(), tr, req)
		if err != nil || status != 413 || body != "big" {
			t.Fatalf("got %d %q, %v", status, body, err)
		}
		// The connection is in the middle of a request: it ends, and the body with it.
		wait(t, "the body's release", func() bool { return req.Keeper.(*shares).n.Load() == 0 })
		if len(tr.idle) != 0 {
			t.Fatal("the connection rests")
		}
	}
}

func TestAnEngineThatReadsLateGetsTheWholeBody(t *testing.T) {
	t.Parallel()
	begin := make(chan struct{})
	e := newEngine(t, func(_ int, c *net.TCPConn, in *bufio.Reader) {
		for {
			r, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
			<-begin
			n, _ := io.Copy(io.Discard, r.Body)
			_, _ = fmt.Fprintf(c, "8\r\n%08d\r\n0\r\n\r\n", n)
		}
	})
	tr := newTransport(t, Options{})
	req := post(e, strings.Repeat("x", 20_000_000), strings.Repeat("y", 7))
	r, err := tr.Do(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if p, err := r.Next(); string(p) != "ok" || err != nil {
		t.Fatalf("got %q, %v", p, err)
	}
	close(begin)
	p, err := r.Next()
	if string(p) != "20000007" || err != nil && !errors.Is(err, io.EOF) {
		t.Fatalf("got %q, %v", p, err)
	}
	r.Close()
}

func TestNoHeadInTimeIsATimeout(t *testing.T) {
	t.Parallel()
	silent := newEngine(t, func(_ int, c *net.TCPConn, _ *bufio.Reader) {
		_, _ = io.WriteString(c, "HTTP/1.1 200 O")
		<-t.Context().Done()
	})
	rest := make(chan struct{})
	slow := newEngine(t, func(_ int, c *net.TCPConn, in *bufio.Reader) {
		_ = readRequest(in)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no")
		select {
		case <-rest:
			_, _ = io.WriteString(c, "k")
		case <-t.Context().Done():
		}
	})
	// The bound is on the head alone: it has passed for an answer of which the
	// head came before a silent engine was asked and given up. A machine that is
	// too slow for the bound gets a longer one.
	for bound := 30 * time.Millisecond; ; bound *= 2 {
		tr := newTransport(t, Options{HeaderTimeout: bound})
		r, err := tr.Do(t.Context(), post(slow))
		if isTimeout(err) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := whole(t.Context(), tr, post(silent)); !isTimeout(err) {
			t.Fatalf("a silent engine gave %v", err)
		}
		close(rest)
		var body []byte
		for err == nil {
			var p []byte
			p, err = r.Next()
			body = append(body, p...)
		}
		r.Close()
		if string(body) != "ok" || !errors.Is(err, io.EOF) {
			t.Fatalf("got %q, %v", body, err)
		}
		return
	}
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

func TestACancelledContextEndsWaitingAndReading(t *testing.T) {
	t.Parallel()
	ended := make(chan struct{}, 2)
	began := make(chan struct{}, 2)
	answer := make(chan string, 1)
	e := newEngine(t, func(_ int, c *net.TCPConn, in *bufio.Reader) {
		_ = readRequest(in)
		_, _ = io.WriteString(c, <-answer)
		began <- struct{}{}
		_, _ = in.ReadByte() // until the client leaves
		ended <- struct{}{}
	})
	tr := newTransport(t, Options{})
	for _, a := range []string{"", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell"} {
		answer <- a
		ctx, cancel := context.WithCancel(t.Context())
		go func() { <-began; cancel() }()
		_, _, err := whole(ctx, tr, post(e))
		if err == nil {
			t.Fatal("a cancelled exchange ended well")
		}
		<-ended
		cancel()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := whole(ctx, tr, post(e)); err == nil {
		t.Fatal("an exchange began after its end")
	}
}

func TestRestingConnectionsEndInTime(t *testing.T) {
	t.Parallel()
	ended := make(chan struct{}, 1)
	e := newEngine(t, func(_ int, c *net.TCPConn, in *bufio.Reader) {
		for readRequest(in) == nil {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		}
		ended <- struct{}{}
	})
	tr := newTransport(t, Options{IdleTimeout: 40 * time.Millisecond})
	if _, _, err := whole(t.Context(), tr, post(e)); err != nil {
		t.Fatal(err)
	}
	<-ended
	wait(t, "an empty pool", func() bool {
		tr.mu.Lock()
		defer tr.mu.Unlock()
		return len(tr.idle) == 0 && !tr.sweeping
	})
}

func TestRestingConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	e := answering(t, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
	tr := newTransport(t, Options{MaxIdle: 2})
	var open []*Response
	for range 5 {
		r, err := tr.Do(t.Context(), post(e))
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, r)
	}
	for _, r := range open {
		_, _ = r.Next()
		r.Close()
	}
	if n := len(tr.idle[e.address]); n != 2 {
		t.Fatalf("%d connections rest", n)
	}
}

type counter struct{ n int }

func (c *counter) BeforeWait() error { c.n++; return nil }

type refusing struct{ err error }

func (r refusing) BeforeWait() error { return r.err }

func TestAWaiterIsToldOnceBeforeEachWaitAndCanEndIt(t *testing.T) {
	t.Parallel()
	step := make(chan string)
	e := newEngine(t, func(_ int, c *net.TCPConn, in *bufio.Reader) {
		_ = readRequest(in)
		for s := range step {
			_, _ = io.WriteString(c, s)
		}
	})
	tr := newTransport(t, Options{})
	go func() { step <- "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n" }()
	r, err := tr.Do(t.Context(), post(e))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	told := new(counter)
	r.SetWaiter(told)
	if p, err := r.Next(); string(p) != "ab" || err != nil || told.n != 0 {
		t.Fatalf("got %q, %v, told %d", p, err, told.n)
	}
	refused := errors.New("no")
	r.SetWaiter(refusing{refused})
	if _, err := r.Next(); !errors.Is(err, refused) {
		t.Fatalf("got %v", err)
	}
	close(step)
}

func TestIdleStreamsHoldNeitherGoroutinesNorBuffers(t *testing.T) {
	const streams = 2000
	release := make(chan struct{})
	e := newEngine(t, func(_ int, c *net.TCPConn, in *bufio.Reader) {
		_ = readRequest(in)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
		<-release
		_, _ = io.WriteString(c, "1\r\nb\r\n0\r\n\r\n")
	})
	tr := newTransport(t, Options{DialTimeout: time.Minute})
	before := runtime.NumGoroutine()
	var readers sync.WaitGroup
	var first, done atomic.Int32
	var held atomic.Int64
	for range streams {
		readers.Go(func() {
			r, err := tr.Do(t.Context(), post(e))
			if err != nil {
				t.Error(err)
				return
			}
			defer r.Close()
			var got []byte
			r.SetWaiter(waiterFunc(func() {
				if string(got) != "a" {
					return
				}
				first.Add(1)
				if r.c.block != nil {
					held.Add(1)
				}
			}))
			for {
				p, err := r.Next()
				got = append(got, p...)
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
			if string(got) == "ab" {
				done.Add(1)
			}
		})
	}
	wait(t, "every stream's wait", func() bool { return int(first.Load()) == streams })
	// One goroutine of ours and one of the engine's per stream, and no more.
	if n := runtime.NumGoroutine() - before; n > 2*streams+50 {
		t.Errorf("%d goroutines for %d streams", n, streams)
	}
	if held.Load() != 0 {
		t.Errorf("%d streams hold a buffer while they wait", held.Load())
	}
	close(release)
	readers.Wait()
	if done.Load() != streams {
		t.Errorf("%d streams came whole", done.Load())
	}
	tr.CloseIdleConnections()
	wait(t, "the goroutines' end", func() bool { return runtime.NumGoroutine() <= before+20 })
}

type waiterFunc func()

func (f waiterFunc) BeforeWait() error { f(); return nil }

func TestManyExchangesOverFewConnectionsKeepTheirBytes(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		for len(b) > 0 {
			n := min(len(b), 1+len(b)/3)
			_, _ = w.Write(b[:n])
			b = b[n:]
			if n%2 == 0 {
				w.(http.Flusher).Flush()
			}
		}
	}))
	t.Cleanup(s.Close)
	tr := newTransport(t, Options{MaxIdle: 4})
	var clients sync.WaitGroup
	for c := range 16 {
		clients.Go(func() {
			for i := range 60 {
				want := bytes.Repeat([]byte{byte('a' + (c+i)%26)}, (c*7919+i*104729)%90_000)
				status, got, err := whole(t.Context(), tr, post(&engine{address: s.Listener.Addr().String()}, string(want)))
				if err != nil || status != 200 || got != string(want) {
					t.Errorf("%d bytes came as %d %d bytes, %v", len(want), status, len(got), err)
					return
				}
			}
		})
	}
	clients.Wait()
}

func TestHTTPSGoesThroughNetHTTP(t *testing.T) {
	t.Parallel()
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		_, _ = w.Write(append([]byte(r.RequestURI+" "+r.Host+" "), b...))
	}))
	t.Cleanup(s.Close)
	tr := newTransport(t, Options{})
	tr.secure.TLSClientConfig = s.Client().Transport.(*http.Transport).TLSClientConfig
	req := post(&engine{address: s.Listener.Addr().String()}, "a", "b")
	req.Secure = true
	status, body, err := whole(t.Context(), tr, req)
	if err != nil || status != 200 || body != "/v1/x?a=b engine ab" {
		t.Fatalf("got %d %q, %v", status, body, err)
	}
}
