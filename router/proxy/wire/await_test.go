package wire

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// headOf begins an answer whose body comes, or does not, when the test says so.
func headOf(t *testing.T, framing string) (e *engine, body chan<- string) {
	t.Helper()
	rest := make(chan string)
	return newEngine(t, func(_ int, c *net.TCPConn, in *bufio.Reader) {
		if readRequest(in) != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n"+framing+"\r\n")
		select {
		case b := <-rest:
			_, _ = io.WriteString(c, b)
		case <-t.Context().Done():
		}
	}), rest
}

func TestAwaitWaitsForTheBodyAndTakesNothingOfIt(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ framing, body, want string }{
		"chunked":      {"Transfer-Encoding: chunked\r\n", "1\r\na\r\n0\r\n\r\n", "a"},
		"empty chunks": {"Transfer-Encoding: chunked\r\n", "0\r\n\r\n", ""},
		"a length":     {"Content-Length: 2\r\n", "ab", "ab"},
		"no length":    {"", "abc", "abc"},
		"an empty one": {"Content-Length: 0\r\n", "", ""},
	} {
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			t.Parallel()
			e, body := headOf(t, c.framing)
			r, err := newTransport(t, Options{}).Do(t.Context(), post(e))
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			go func() { body <- c.body }()
			for range 2 {
				if err := r.Await(); err != nil {
					t.Fatal(err)
				}
			}
			var got []byte
			for err == nil {
				var p []byte
				p, err = r.Next()
				got = append(got, p...)
			}
			if string(got) != c.want || !errors.Is(err, io.EOF) {
				t.Fatalf("got %q, %v", got, err)
			}
		})
	}
}

func TestAwaitSaysThatTheEngineWasLostBeforeAByteOfTheBody(t *testing.T) {
	t.Parallel()
	for _, framing := range []string{"Transfer-Encoding: chunked\r\n", "Content-Length: 2\r\n", ""} {
		e, body := headOf(t, framing)
		r, err := newTransport(t, Options{}).Do(t.Context(), post(e))
		if err != nil {
			t.Fatal(err)
		}
		body <- ""
		if err := r.Await(); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("framing %q: got %v", framing, err)
		}
		r.Close()
	}
}

func TestAwaitDoesTheSameOverTLS(t *testing.T) {
	t.Parallel()
	goOn := make(chan struct{})
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		<-goOn
		if r.URL.Path == "/lost" {
			panic(http.ErrAbortHandler)
		}
		_, _ = io.WriteString(w, "abc")
	}))
	t.Cleanup(s.Close)
	tr := newTransport(t, Options{})
	tr.secure.TLSClientConfig = s.Client().Transport.(*http.Transport).TLSClientConfig
	ask := func(path string) *Response {
		req := post(&engine{address: s.Listener.Addr().String()})
		req.Secure, req.Target = true, path
		r, err := tr.Do(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(r.Close)
		return r
	}
	answered, lost := ask("/answered"), ask("/lost")
	close(goOn)
	if err := errors.Join(answered.Await(), answered.Await()); err != nil {
		t.Fatal(err)
	}
	if p, err := answered.Next(); string(p) != "abc" || err != nil && !errors.Is(err, io.EOF) {
		t.Fatalf("got %q, %v", p, err)
	}
	if err := lost.Await(); err == nil {
		t.Fatal("a lost engine's body has come")
	}
}
