package proxy

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// frame is one HTTP/2 frame.
func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	b := make([]byte, 9, 9+len(payload))
	b[0], b[1], b[2] = byte(len(payload)>>16), byte(len(payload)>>8), byte(len(payload))
	b[3], b[4] = kind, flags
	binary.BigEndian.PutUint32(b[5:], stream)
	return append(b, payload...)
}

// literal is a header field of HPACK without an index.
func literal(name, value string) []byte {
	b := append([]byte{0, byte(len(name))}, name...)
	return append(append(b, byte(len(value))), value...)
}

// TestAnHTTP2ClientThatStallsOneStreamLosesThatStreamAlone speaks HTTP/2 by hand:
// a stream whose window is never opened, on a connection that answers pings.
func TestAnHTTP2ClientThatStallsOneStreamLosesThatStreamAlone(t *testing.T) {
	t.Parallel()
	ended := make(chan struct{}, 1)
	t.Run("an endless stream", func(t *testing.T) {
		t.Parallel()
		stallAnHTTP2Stream(t, 65535, "client_gone", ended, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for r.Context().Err() == nil {
				if _, err := io.WriteString(w, event(strings.Repeat("x", 1000))); err != nil {
					break
				}
			}
			ended <- struct{}{}
		})
	})
	t.Run("the server's own buffer", func(t *testing.T) { // the exchange is over when it stalls
		t.Parallel()
		over := make(chan struct{}, 1)
		over <- struct{}{}
		stallAnHTTP2Stream(t, 0, "ok", over, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, "{}")
		})
	})
}

// stallAnHTTP2Stream asks for a stream with a window of so many bytes and expects
// its reset, the end of the engine's part and a connection that lives on.
func stallAnHTTP2Stream(t *testing.T, window uint32, outcome string, ended <-chan struct{}, answer http.HandlerFunc) {
	t.Helper()
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		answer(w, r)
	}))
	t.Cleanup(engine.Close)
	r := newRig(t, Options{StalledWrite: 100 * time.Millisecond})
	r.targets = []Target{{URL: engine.URL, EndpointID: "e", Pool: "p", LogicalModel: "m"}}
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	s := httptest.NewUnstartedServer(r.proxy)
	s.Config.Protocols = protocols
	s.Start()
	t.Cleanup(s.Close)
	c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	head := bytes.Join([][]byte{
		literal(":method", "POST"), literal(":scheme", "http"), literal(":path", "/v1/completions"), literal(":authority", "x"), literal("content-type", "application/json"),
	}, nil)
	const headers, data, reset, settings, ping, endHeaders, endStream = 1, 0, 3, 4, 6, 4, 1
	out := []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	out = append(out, frame(settings, 0, 0, binary.BigEndian.AppendUint32([]byte{0, 4}, window))...)
	out = append(out, frame(headers, endHeaders, 1, head)...)
	out = append(out, frame(data, endStream, 1, []byte(chatStream))...)
	if _, err := c.Write(out); err != nil {
		t.Fatal(err)
	}
	for {
		var h [9]byte
		if _, err := io.ReadFull(c, h[:]); err != nil {
			t.Fatalf("read frame: %v", err)
		}
		payload := make([]byte, int(h[0])<<16|int(h[1])<<8|int(h[2]))
		if _, err := io.ReadFull(c, payload); err != nil {
			t.Fatal(err)
		}
		if h[3] == reset && binary.BigEndian.Uint32(h[5:]) == 1 {
			break
		}
	}
	receive(t, ended, "the end of the engine's stream")
	if x := receive(t, r.done, "the exchange's end"); x.Outcome != outcome || (r.outcomes[0].Failure == FailureClientGone) != (outcome == "client_gone") {
		t.Errorf("exchange %+v", x)
	}
	if _, err := c.Write(frame(ping, 0, 0, make([]byte, 8))); err != nil {
		t.Errorf("the connection ended with its stream: %v", err)
	}
	for {
		var h [9]byte
		if _, err := io.ReadFull(c, h[:]); err != nil {
			t.Fatalf("no answer to a ping: %v", err)
		}
		if _, err := io.CopyN(io.Discard, c, int64(h[0])<<16|int64(h[1])<<8|int64(h[2])); err != nil {
			t.Fatal(err)
		}
		if h[3] == ping && h[4] == 1 {
			return
		}
	}
}
