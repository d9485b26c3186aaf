package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
)

func TestAnAnswerThatComesBeforeTheBodyIsTakenIsWholeAndItsConnectionIsNotUsedAgain(t *testing.T) {
	t.Parallel()
	for _, answer := range []string{
		okHead + "Content-Length: 2\r\n\r\n{}", okHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk("{}") + "0\r\n\r\n",
		"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\n{}", "HTTP/1.1 100 Continue\r\n\r\n" + okHead + "Content-Length: 2\r\n\r\n{}",
	} {
		conns := make(chan int, 8)
		r := newRig(t, Options{})
		r.targets = []Target{{EndpointID: "e", Pool: "p", LogicalModel: "m", URL: rawEngine(t, func(n int, c net.Conn, in *bufio.Reader) {
			conns <- n
			req, err := http.ReadRequest(in) // the head alone
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, answer)
			_, _ = io.Copy(io.Discard, req.Body) // until the router closes
		})}}
		for i := range 2 {
			resp, got := r.post(t, "/v1/completions", `{"model":"m","prompt":"`+strings.Repeat("x", 8<<20)+`"}`)
			if got != "{}" || resp.StatusCode >= 500 {
				t.Errorf("%.30q: got %d %q", answer, resp.StatusCode, got)
			}
			if n := receive(t, conns, "a connection"); n != i+1 {
				t.Errorf("%.30q: connection %d for request %d", answer, n, i)
			}
			receive(t, r.done, "the exchange's end")
		}
		wantRoom(t, r, 0) // the body that was still being sent is let go
	}
}

func TestAHEADOfAPathOfTheEnginesOwnHasNoBodyAndKeepsItsConnection(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		bytes string
		conns int32
	}{
		"a length":      {okHead + "Content-Length: 5\r\n\r\n", 1},
		"chunks":        {okHead + "Transfer-Encoding: chunked\r\n\r\n", 1},
		"neither":       {okHead + "\r\n", 1},
		"a body anyway": {okHead + "Content-Length: 5\r\n\r\nhello", 2},
	} {
		s := &script{bytes: c.bytes}
		r := newRig(t, Options{})
		r.targets = []Target{{URL: rawEngine(t, s.serve), EndpointID: "e", Pool: "p", LogicalModel: "m"}}
		for range 2 {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodHead, r.url+"/v1/engine/own", nil)
			if err != nil {
				t.Fatal(err)
			}
			if resp, got := do(t, req); resp.StatusCode != 200 || got != "" {
				t.Errorf("%s: got %d %q", name, resp.StatusCode, got)
			}
			receive(t, r.done, "the exchange's end")
		}
		if got := s.conns.Load(); got != c.conns {
			t.Errorf("%s: %d connections", name, got)
		}
	}
}

func TestRequestsInAPipelineAreAnsweredInOrderAndEndWithTheConnection(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, echo)
	c := r.dial(t)
	ask := func(n string) string { return framed("1.1", `{"model":"m","n":`+n+`}`) }
	last := strings.Replace(ask("3"), "Host: x\r\n", "Host: x\r\nConnection: close\r\n", 1)
	_, _ = io.WriteString(c, ask("1")+ask("2")+last+ask("4"))
	in := bufio.NewReader(c)
	for _, n := range []string{"1", "2", "3"} {
		resp := answerOf(t, in)
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if want := `{"model":"served","n":` + n + `}`; err != nil || string(body) != want {
			t.Errorf("got %q, %v, want %q", body, err, want)
		}
	}
	if b, err := io.ReadAll(in); len(b) > 0 {
		t.Errorf("behind the end came %q, %v", b, err)
	}
	for range 3 {
		receive(t, r.done, "an exchange's end")
	}
	if len(r.done) > 0 {
		t.Error("a request behind the end was served")
	}
}

func TestUsageThatIsNoNumberIsNoUsage(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]usage{
		`{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}`:      {prompt: 5, completion: 2, cached: 4, known: true, cachedKnown: true},
		`{"prompt_tokens":5,"completion_tokens":null,"prompt_tokens_details":{"cached_tokens":"4"}}`: {prompt: 5, known: true},
		`{"prompt_tokens":"5","completion_tokens":[2],"total_tokens":{}}`:                            {},
		`{"prompt_tokens":-5,"completion_tokens":-2}`:                                                {},
		`{"prompt_tokens":1e30,"completion_tokens":99999999999999999999}`:                            {known: true},
		`{"prompt_tokens":5`: {}, `{}`: {}, `{"usage":{"prompt_tokens":5}}`: {}, `{"prompt_tokens_details":7}`: {},
	} {
		var got usage
		got.readUsage([]byte(text))
		if got != want {
			t.Errorf("%s was read as %+v, want %+v", text, got, want)
		}
	}
}

// TestAPipelinedRequestWhoseHeadWasReadInTwoIsNotTakenForAPlainOne cuts a head so
// that its second part alone would be a head that gives one length.
func TestAPipelinedRequestWhoseHeadWasReadInTwoIsNotTakenForAPlainOne(t *testing.T) {
	t.Parallel()
	first, second := framed("1.1", chat), "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nX: POST /v1/completions"
	r := newRig(t, Options{}, echo)
	c := r.dial(t)
	in := bufio.NewReader(c)
	_, _ = io.WriteString(c, first+second)
	resp := answerOf(t, in)
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	_, _ = io.WriteString(c, fmt.Sprintf(" HTTP/1.1\r\nContent-Length: %d\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(chat)+11, len(chat), chat))
	resp = answerOf(t, in)
	body, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if !resp.Close {
		t.Errorf("a length said twice was let through on a connection that goes on: %d %s", resp.StatusCode, body)
	}
}

// TestAConnectionInDoubtEndsHoweverItsAnswerComes asks over a connection whose
// second head the router cannot see, of engines that break off or that name
// Connection as a field of their own connection.
func TestAConnectionInDoubtEndsHoweverItsAnswerComes(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]string{
		"broken off": okHead + "Content-Length: 9\r\n\r\n{}",
		"named":      okHead + "Connection: connection\r\nContent-Length: 2\r\n\r\n{}",
	} {
		s := &script{bytes: answer, end: "fin"}
		r := newRig(t, Options{})
		r.targets = []Target{{URL: rawEngine(t, s.serve), EndpointID: "e", Pool: "p", LogicalModel: "m"}}
		c := r.dial(t)
		in := bufio.NewReader(c)
		_, _ = io.WriteString(c, framed("1.1", chat)+"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"+inChunk(chat)+"0\r\n\r\n")
		for i, closed := range []bool{false, true} {
			resp := answerOf(t, in)
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
			if resp.Close != closed {
				t.Errorf("%s: answer %d of status %d ends the connection: %v", name, i, resp.StatusCode, resp.Close)
			}
		}
	}
}

func TestRequestsWithChunksKeepTheirConnection(t *testing.T) {
	t.Parallel()
	r := newRig(t, Options{}, echo)
	c := r.dial(t)
	in := bufio.NewReader(c)
	for i := range 5 {
		_, _ = io.WriteString(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"+inChunk(chat)+"0\r\n\r\n")
		resp := answerOf(t, in)
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != 200 || resp.Close {
			t.Fatalf("request %d got %d, close %v", i, resp.StatusCode, resp.Close)
		}
	}
}

func TestARequestWithoutABodyAndThePartsOfTheNextAreKeptApart(t *testing.T) {
	t.Parallel()
	asked, goOn := make(chan struct{}, 1), make(chan struct{}, 1)
	r := newRig(t, Options{}, func(_ http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			asked <- struct{}{}
			<-goOn
		}
	})
	c := r.dial(t)
	in := bufio.NewReader(c)
	for i := range 3 {
		_, _ = io.WriteString(c, "GET /v1/engine/own HTTP/1.1\r\nHost: x\r\n\r\n")
		receive(t, asked, "the engine's request")
		next := "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + inChunk(chat) + "0\r\n\r\n"
		_, _ = io.WriteString(c, next) // the watch reads its first byte
		goOn <- struct{}{}
		for range 2 {
			resp := answerOf(t, in)
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
			if resp.StatusCode != 200 || resp.Close {
				t.Fatalf("round %d: got %d, close %v", i, resp.StatusCode, resp.Close)
			}
		}
	}
}
