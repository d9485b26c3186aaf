package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// stage is how far an exchange is when its client leaves.
type stage struct {
	sent   string // what the client has sent
	engine string // what the engine has answered before it falls silent
	reads  int    // bytes of the answer's body that the client waits for
	alone  bool   // the engine never hears of it
}

// holding is an engine that answers some bytes and then waits for its
// connection's end, which it announces.
func holding(t *testing.T, bytes string) (url string, got, ended <-chan struct{}) {
	t.Helper()
	asked, end := make(chan struct{}, 8), make(chan struct{}, 8)
	url = rawEngine(t, func(_ int, c net.Conn, in *bufio.Reader) {
		if !readWhole(in) {
			return
		}
		_, _ = io.WriteString(c, bytes)
		asked <- struct{}{}
		_, _ = in.ReadByte() // the router never sends more
		end <- struct{}{}
	})
	return url, asked, end
}

func (r *rig) dial(t *testing.T) *net.TCPConn {
	t.Helper()
	c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(r.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	return c.(*net.TCPConn)
}

// framed is a request as a client sends it.
func framed(version, body string) string {
	return fmt.Sprintf("POST /v1/completions HTTP/%s\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", version, len(body), body)
}

func receive[T any](t *testing.T, c <-chan T, what string) (v T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	select {
	case v = <-c:
	case <-ctx.Done():
		t.Fatalf("%s did not come", what)
	}
	return v
}

func TestAClientThatLeavesAtAnyStageFreesTheEngineOnce(t *testing.T) {
	t.Parallel()
	whole, stream := framed("1.1", chat), framed("1.1", chatStream)
	const open = streamHead + "Transfer-Encoding: chunked\r\n\r\n"
	for name, s := range map[string]stage{
		"before its body":          {sent: whole[:strings.Index(whole, "\r\n\r\n")+4], alone: true},
		"within its body":          {sent: whole[:len(whole)-5], alone: true},
		"within a chunked body":    {sent: strings.Replace(whole[:len(whole)-5], "Content-Length: 57", "Transfer-Encoding: chunked", 1), alone: true},
		"while the engine waits":   {sent: whole},
		"in the engine's head":     {sent: whole, engine: okHead},
		"behind the head":          {sent: stream, engine: open + inChunk(event("a")), reads: len(event("a"))},
		"within a stream":          {sent: stream, engine: open + inChunk(event("a")) + inChunk(event("b")), reads: 2 * len(event("a"))},
		"without having read":      {sent: stream, engine: open + inChunk(event("a"))},
		"in HTTP/1.0, before all":  {sent: strings.Replace(whole, "HTTP/1.1", "HTTP/1.0", 1)},
		"before the first event":   {sent: stream, engine: open},
		"in HTTP/1.0, before it":   {sent: strings.Replace(stream, "HTTP/1.1", "HTTP/1.0", 1), engine: open},
		"without a body":           {sent: "GET /v1/engine/own HTTP/1.1\r\nHost: x\r\n\r\n"},
		"in HTTP/1.0, without one": {sent: "GET /v1/engine/own HTTP/1.0\r\n\r\n"},
		"in HTTP/1.0, in a stream": {sent: strings.Replace(stream, "HTTP/1.1", "HTTP/1.0", 1), engine: open + inChunk(event("a")), reads: len(event("a"))},
	} {
		for _, end := range []string{"FIN", "RST"} {
			t.Run(strings.ReplaceAll(name+" by "+end, " ", "_"), func(t *testing.T) {
				t.Parallel()
				url, got, ended := holding(t, s.engine)
				r := newRig(t, Options{})
				r.targets = []Target{{URL: url, EndpointID: "e", Pool: "p", LogicalModel: "m"}}
				c := r.dial(t)
				if _, err := io.WriteString(c, s.sent); err != nil {
					t.Fatal(err)
				}
				if !s.alone {
					receive(t, got, "the engine's request")
				}
				if s.reads > 0 {
					resp, err := http.ReadResponse(bufio.NewReader(c), nil)
					if err != nil {
						t.Fatal(err)
					}
					if _, err := io.ReadFull(resp.Body, make([]byte, s.reads)); err != nil {
						t.Fatal(err)
					}
				}
				if end == "RST" {
					_ = c.SetLinger(0)
				}
				_ = c.Close()
				x := receive(t, r.done, "the exchange's end")
				if x.Outcome != "client_gone" {
					t.Errorf("exchange %+v", x)
				}
				if s.alone {
					if x.EndpointID != "" || len(r.outcomes) != 0 {
						t.Errorf("an endpoint had it: %+v", x)
					}
					return
				}
				receive(t, ended, "the end of the engine's connection")
				r.mu.Lock()
				defer r.mu.Unlock()
				if r.held != 0 || len(r.outcomes) != 1 || r.outcomes[0].Failure != FailureClientGone || x.EndpointID != "e" {
					t.Errorf("held %d, outcomes %+v, exchange %+v", r.held, r.outcomes, x)
				}
			})
		}
	}
}

func TestAClientThatClosesItsSendingSideGetsItsAnswer(t *testing.T) {
	t.Parallel()
	const events = "data: [DONE]\n\n"
	for _, version := range []string{"1.0", "1.1"} {
		for name, c := range map[string]struct{ body, first, rest, want string }{
			"an answer":                {chat, "", okHead + "Content-Length: 2\r\n\r\n{}", "{}"},
			"a body under way":         {chat, okHead + "Content-Length: 2\r\n\r\n{", "}", "{}"},
			"a stream":                 {chatStream, "", streamHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk(event("a")+events) + "0\r\n\r\n", event("a") + events},
			"a stream under way":       {chatStream, streamHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk(event("a")), inChunk(events) + "0\r\n\r\n", event("a") + events},
			"within an event":          {chatStream, streamHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk(event("a")+"data: {"), inChunk("}\n\n"+events) + "0\r\n\r\n", event("a") + "data: {}\n\n" + events},
			"a stream that has a size": {chatStream, streamHead + fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(event("a"))+len(events), event("a")), events, event("a") + events},
		} {
			if version == "1.0" && !strings.HasPrefix(c.first, streamHead) {
				continue // nothing may come before its answer: it counts as gone
			}
			t.Run(version+"_"+strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
				t.Parallel()
				asked, goOn := make(chan struct{}, 1), make(chan struct{})
				r := newRig(t, Options{})
				r.targets = []Target{{EndpointID: "e", Pool: "p", LogicalModel: "m", URL: rawEngine(t, func(_ int, conn net.Conn, in *bufio.Reader) {
					if !readWhole(in) {
						return
					}
					_, _ = io.WriteString(conn, c.first)
					asked <- struct{}{}
					<-goOn
					_, _ = io.WriteString(conn, c.rest)
					_, _ = in.ReadByte()
				})}}
				client := r.dial(t)
				_, _ = io.WriteString(client, framed(version, c.body))
				receive(t, asked, "the engine's request")
				in := bufio.NewReader(client)
				begun := ""
				var resp *http.Response
				if underWay := strings.HasPrefix(c.first, streamHead); underWay {
					resp = answerOf(t, in)
					p := make([]byte, len(event("a")))
					if _, err := io.ReadFull(resp.Body, p); err != nil {
						t.Fatal(err)
					}
					begun = string(p)
				}
				_ = client.CloseWrite()
				// The router asks whether anybody is there before it goes on waiting.
				switch {
				case version == "1.1" && c.first == "":
					if line, err := in.ReadString('\n'); err != nil || line != "HTTP/1.1 100 Continue\r\n" {
						t.Errorf("first came %q, %v", line, err)
					}
					_, _ = in.ReadString('\n')
				case name == "a stream under way":
					p := make([]byte, len(":\n\n"))
					if _, err := io.ReadFull(resp.Body, p); err != nil || string(p) != ":\n\n" {
						t.Errorf("next came %q, %v", p, err)
					}
				}
				close(goOn)
				if resp == nil {
					resp = answerOf(t, in)
				}
				rest, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				if got := strings.ReplaceAll(begun+string(rest), ":\n\n", ""); err != nil || got != c.want {
					t.Errorf("got %q, %v, want %q", got, err, c.want)
				}
				if b, err := io.ReadAll(in); err != nil || len(b) > 0 {
					t.Errorf("behind it came %q, %v", b, err)
				}
				if x := receive(t, r.done, "the exchange's end"); x.Outcome != "ok" {
					t.Errorf("exchange %+v", x)
				}
			})
		}
	}
}

// answerOf reads the head of an answer, past interim ones.
func answerOf(t *testing.T, in *bufio.Reader) *http.Response {
	t.Helper()
	for {
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != http.StatusContinue {
			return resp
		}
	}
}
