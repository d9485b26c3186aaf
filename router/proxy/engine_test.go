package proxy

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
)

// rawEngine serves each connection with serve, which closes it.
func rawEngine(t *testing.T, serve func(n int, c net.Conn, in *bufio.Reader)) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	var accepted atomic.Int32
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				stop := context.AfterFunc(t.Context(), func() { _ = c.Close() })
				defer stop()
				serve(int(accepted.Add(1)), c, bufio.NewReader(c))
			}()
		}
	}()
	return "http://" + l.Addr().String()
}

func TestAnEngineThatRefusesABodyEarlyIsHeard(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, echo)
	r.targets[0].URL = rawEngine(t, func(_ int, c net.Conn, in *bufio.Reader) {
		if _, err := http.ReadRequest(in); err != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 413 Too Large\r\nContent-Type: application/json\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}")
		_, _ = io.Copy(io.Discard, in)
	})
	resp, got := r.post(t, "/v1/completions", `{"model":"m","prompt":"`+strings.Repeat("x", 20<<20)+`"}`)
	if resp.StatusCode != http.StatusRequestEntityTooLarge || got != "{}" || len(resp.Header["Content-Length"]) != 1 {
		t.Fatalf("got %d %q %v", resp.StatusCode, got, resp.Header)
	}
	if x := <-r.done; x.Outcome != "engine_error" || r.held != 0 {
		t.Fatalf("exchange %+v", x)
	}
}

func TestAConnectionThatTheEngineDropsAsItIsReusedCostsNoRequest(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, echo)
	r.targets[0].URL = rawEngine(t, func(_ int, c net.Conn, in *bufio.Reader) {
		req, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, req.Body)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
		_, _ = in.Peek(1) // takes the second request's first byte and hangs up
	})
	for range 4 { // two exchanges of which each but the first of a pair is sent twice
		if resp, got := r.post(t, "/v1/chat/completions", chat); resp.StatusCode != 200 || got != "{}" {
			t.Fatalf("got %d %q", resp.StatusCode, got)
		}
	}
	if len(r.outcomes) < 5 || r.held != 0 {
		t.Fatalf("outcomes %+v, held %d", r.outcomes, r.held)
	}
}

func TestAnAnswerWithBrokenFramingIsNeitherPassedOnNorAskedForAgain(t *testing.T) {
	t.Parallel()
	var asked atomic.Int32
	r := newRig(t, Options{}, echo, echo)
	for i := range r.targets {
		r.targets[i].URL = rawEngine(t, func(_ int, c net.Conn, in *bufio.Reader) {
			req, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			_, _ = io.Copy(io.Discard, req.Body)
			asked.Add(1)
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
		})
	}
	resp, got := r.post(t, "/v1/chat/completions", chat)
	wantError(t, resp, got, 502, "engine_lost")
	if asked.Load() != 1 {
		t.Fatalf("%d engines were asked", asked.Load())
	}
}
