package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/router/proxy/wire"
)

// reset makes the close of a connection an RST in place of a FIN.
func reset(c net.Conn) { _ = c.(*net.TCPConn).SetLinger(0) }

// readWhole takes one request off the connection, false if none came.
func readWhole(in *bufio.Reader) bool {
	req, err := http.ReadRequest(in)
	if err != nil {
		return false
	}
	_, err = io.Copy(io.Discard, req.Body)
	return err == nil
}

// script is an engine that answers each request with the same bytes, cut into
// pieces of step bytes (0: whole), and then as end says.
type script struct {
	bytes string
	step  int
	end   string // "" keeps the connection; "fin", "rst", "half" end it, "hang" keeps it silent
	asked atomic.Int32
	conns atomic.Int32
}

func (s *script) serve(n int, c net.Conn, in *bufio.Reader) {
	s.conns.Store(int32(n))
	for readWhole(in) {
		s.asked.Add(1)
		step := s.step
		if step == 0 {
			step = max(len(s.bytes), 1)
		}
		for rest := s.bytes; rest != ""; {
			piece := rest[:min(step, len(rest))]
			if _, err := io.WriteString(c, piece); err != nil {
				return
			}
			rest = rest[len(piece):]
		}
		switch s.end {
		case "fin":
			return
		case "rst":
			reset(c)
			return
		case "half":
			_ = c.(*net.TCPConn).CloseWrite()
		}
	}
}

const okHead = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

const streamHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"

// inChunk is s as one chunk.
func inChunk(s string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(s), s) }

func TestWhateverAnEngineDoesTheClientIsNotMisledAndNothingIsHeld(t *testing.T) {
	t.Parallel()
	full := `{"id":"x","choices":[{"text":"a"}],"usage":{"prompt_tokens":5,"completion_tokens":2}}`
	length := fmt.Sprintf("Content-Length: %d\r\n\r\n", len(full))
	const lostCode, broken = "engine_lost", "<broken>"
	events := event("a") + event("b") + "data: [DONE]\n\n"
	big := "data: {\"choices\":[{\"delta\":{\"content\":\"" + strings.Repeat("x", 300<<10) + "\"}}]}\n\n"
	type want struct {
		status  int
		body    string // whole; an error code where the router answers; broken for an end that is no end
		outcome string
		reused  bool // two requests over one connection
		asked   int32
	}
	lost := want{502, lostCode, "engine_lost", false, 1}
	cut := want{body: broken, outcome: "engine_lost", asked: 1}
	good := want{200, full, "ok", true, 1}
	once := want{200, full, "ok", false, 1}
	stream := want{200, events, "ok", true, 1}
	unended := want{body: broken, outcome: "engine_lost", reused: true, asked: 1}
	const chunked = "Transfer-Encoding: chunked\r\n\r\n"
	finish := "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n"
	last := strings.Replace(event("b"), `"finish_reason":null`, `"finish_reason" : "length"`, 1)
	for name, c := range map[string]struct {
		script *script
		body   string
		want   want
	}{
		// Death.
		"FIN before the head":        {&script{end: "fin"}, chat, want{502, lostCode, "engine_lost", false, 2}},
		"RST before the head":        {&script{end: "rst"}, chat, want{502, lostCode, "engine_lost", false, 2}},
		"half-close before the head": {&script{end: "half"}, chat, want{502, lostCode, "engine_lost", false, 2}},
		"FIN in the status line":     {&script{bytes: "HTTP/1.1 20", end: "fin"}, chat, lost},
		"RST in the status line":     {&script{bytes: "HTTP/1.1 20", end: "rst"}, chat, want{502, lostCode, "engine_lost", false, 0}},
		"FIN in the head":            {&script{bytes: okHead + "X: y", end: "fin"}, chat, lost},
		"FIN before the body":        {&script{bytes: okHead + length, end: "fin"}, chat, lost},
		"FIN in the body":            {&script{bytes: okHead + length + full[:9], end: "fin"}, chat, lost},
		"RST in the body":            {&script{bytes: okHead + length + full[:9], end: "rst"}, chat, want{502, lostCode, "engine_lost", false, 0}},
		"FIN in a chunk":             {&script{bytes: okHead + "Transfer-Encoding: chunked\r\n\r\n50\r\n" + full[:9], end: "fin"}, chat, cut},
		"FIN before the last chunk":  {&script{bytes: okHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk(full), end: "fin"}, chat, cut},
		"FIN in the last chunk":      {&script{bytes: okHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk(full) + "0\r\n", end: "fin"}, chat, cut},
		"FIN in the trailers":        {&script{bytes: okHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk(full) + "0\r\nX: y\r\n", end: "fin"}, chat, cut},
		// The end may come as the connection is used again, and cost a second attempt.
		"half-close behind an answer": {&script{bytes: okHead + length + full, end: "half"}, chat, want{200, full, "ok", false, 0}},
		"RST behind an answer":        {&script{bytes: okHead + length + full, end: "fin"}, chat, once},
		// Slowness.
		"one byte at a time":         {&script{bytes: okHead + length + full, step: 1}, chat, good},
		"stream, one byte at a time": {&script{bytes: streamHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk(events) + "0\r\n\r\n", step: 1}, chatStream, stream},
		"stream, byte chunks":        {&script{bytes: streamHead + "Transfer-Encoding: chunked\r\n\r\n1\r\nd\r\n1\r\na\r\n" + inChunk(events[2:]) + "0\r\n\r\n", step: 7}, chatStream, stream},
		// Garbage.
		"another protocol":           {&script{bytes: "SSH-2.0-OpenSSH_9.2\r\n\r\n"}, chat, lost},
		"HTTP/0.9":                   {&script{bytes: "<html>hi</html>\n\n", end: "fin"}, chat, lost},
		"HTTP/2 frames":              {&script{bytes: "\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64\r\n\r\n"}, chat, lost},
		"a later version":            {&script{bytes: "HTTP/2.0 200 OK\r\n\r\n"}, chat, lost},
		"no status":                  {&script{bytes: "HTTP/1.1 abc OK\r\n\r\n"}, chat, lost},
		"a status of two digits":     {&script{bytes: "HTTP/1.1 99 X\r\n\r\n"}, chat, lost},
		"a status of four digits":    {&script{bytes: "HTTP/1.1 2000 X\r\n\r\n"}, chat, lost},
		"no field name":              {&script{bytes: okHead + ": x\r\n\r\n"}, chat, lost},
		"NUL in a field":             {&script{bytes: okHead + "X: \x00\r\n\r\n"}, chat, lost},
		"a folded field":             {&script{bytes: okHead + "X: a\r\n b\r\n\r\n"}, chat, lost},
		"an endless head":            {&script{bytes: okHead + strings.Repeat("X: y\r\n", 20000)}, chat, lost},
		"an endless line":            {&script{bytes: okHead + "X: " + strings.Repeat("y", 200<<10)}, chat, lost},
		"two lengths":                {&script{bytes: okHead + "Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}"}, chat, lost},
		"a negative length":          {&script{bytes: okHead + "Content-Length: -1\r\n\r\n{}"}, chat, lost},
		"length and encoding":        {&script{bytes: okHead + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"}, chat, lost},
		"another encoding":           {&script{bytes: okHead + "Transfer-Encoding: gzip\r\n\r\n{}"}, chat, lost},
		"a chunk size that is none":  {&script{bytes: okHead + "Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n"}, chat, cut},
		"a chunk size past all":      {&script{bytes: okHead + "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}"}, chat, cut},
		"a chunk longer than said":   {&script{bytes: okHead + "Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n"}, chat, cut},
		"bytes behind the answer":    {&script{bytes: okHead + length + full + "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad"}, chat, once},
		"bytes behind the chunks":    {&script{bytes: okHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk(full) + "0\r\n\r\nx"}, chat, once},
		"a page with 200":            {&script{bytes: "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>"}, chat, want{200, "<html>", "ok", true, 1}},
		"no type, no length, no end": {&script{bytes: "HTTP/1.1 200 OK\r\n\r\n" + full, end: "fin"}, chat, once},
		"HTTP/1.0":                   {&script{bytes: "HTTP/1.0 200 OK\r\n" + length + full}, chat, once},
		"HTTP/1.0 kept alive":        {&script{bytes: "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n" + length + full}, chat, good},
		"Connection: close":          {&script{bytes: okHead + "Connection: close\r\n" + length + full}, chat, once},
		"an unknown status":          {&script{bytes: "HTTP/1.1 799 Odd\r\nContent-Length: 2\r\n\r\n{}"}, chat, want{799, "{}", "engine_error", true, 1}},
		"404 with a body":            {&script{bytes: "HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"}, chat, want{404, "{}", "engine_error", true, 1}},
		"204 with a body":            {&script{bytes: "HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello"}, chat, want{204, "", "ok", false, 1}},
		"304 with a length":          {&script{bytes: "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"}, chat, want{304, "", "ok", true, 1}},
		"304 with a body":            {&script{bytes: "HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"}, chat, want{304, "", "ok", false, 1}},
		// Interim responses and trailers.
		"100 unasked":             {&script{bytes: "HTTP/1.1 100 Continue\r\n\r\n" + okHead + length + full}, chat, good},
		"103 and 102":             {&script{bytes: "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n" + okHead + length + full}, chat, good},
		"eight interim ones":      {&script{bytes: strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 8) + okHead + length + full}, chat, good},
		"interim ones for ever":   {&script{bytes: strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 1000) + okHead + length + full}, chat, lost},
		"101 that nobody asked":   {&script{bytes: "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"}, chat, lost},
		"an interim one and FIN":  {&script{bytes: "HTTP/1.1 100 Continue\r\n\r\n", end: "fin"}, chat, lost},
		"trailers":                {&script{bytes: okHead + "Trailer: X-T\r\nTransfer-Encoding: chunked\r\n\r\n" + inChunk(full) + "0\r\nX-T: 1\r\nContent-Length: 3\r\n\r\n"}, chat, good},
		"trailers without an end": {&script{bytes: okHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk(full) + "0\r\n" + strings.Repeat("X: y\r\n", 20000)}, chat, cut},
		// Streams.
		"a stream with a length":    {&script{bytes: streamHead + fmt.Sprintf("Content-Length: %d\r\n\r\n", len(events)) + events}, chatStream, stream},
		"a stream until FIN":        {&script{bytes: streamHead + "\r\n" + events, end: "fin"}, chatStream, want{200, events, "ok", false, 1}},
		"a stream of CRLF":          {&script{bytes: streamHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk("data:{\"a\":1}\r\n\r\n: hi\r\nevent: x\r\nid: 1\r\nretry: 5\r\ndata: [DONE]\r\n\r\n") + "0\r\n\r\n"}, chatStream, want{200, "data:{\"a\":1}\r\n\r\n: hi\r\nevent: x\r\nid: 1\r\nretry: 5\r\ndata: [DONE]\r\n\r\n", "ok", true, 1}},
		"a stream of CR":            {&script{bytes: streamHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk("data: {}\r\rdata: [DONE]\r\r") + "0\r\n\r\n", step: 5}, chatStream, want{200, "data: {}\r\rdata: [DONE]\r\r", "ok", true, 1}},
		"a giant line":              {&script{bytes: streamHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk(big+events) + "0\r\n\r\n", step: 4000}, chatStream, want{200, big + events, "ok", true, 1}},
		"NUL and bytes in a stream": {&script{bytes: streamHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk("\xef\xbb\xbf\x00\xff\n\n"+events) + "0\r\n\r\n"}, chatStream, want{200, "\xef\xbb\xbf\x00\xff\n\n" + events, "ok", true, 1}},
		"events that are no JSON":   {&script{bytes: streamHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk("data: {\"usage\":{\n\ndata: \"\\\n\ndata\n\n\n\n"+events) + "0\r\n\r\n"}, chatStream, want{200, "data: {\"usage\":{\n\ndata: \"\\\n\ndata\n\n\n\n" + events, "ok", true, 1}},
		"no line end at the end":    {&script{bytes: streamHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk(event("a")+"data: [DONE]") + "0\r\n\r\n"}, chatStream, want{200, event("a") + "data: [DONE]", "ok", true, 1}},
		"bytes behind [DONE]":       {&script{bytes: streamHead + "Transfer-Encoding: chunked\r\n\r\n" + inChunk(events+event("c")) + "0\r\n\r\n"}, chatStream, want{200, events + event("c"), "ok", true, 1}},
		"an empty stream":           {&script{bytes: streamHead + chunked + "0\r\n\r\n"}, chatStream, unended},
		"a stream without [DONE]":   {&script{bytes: streamHead + "\r\n" + event("a"), end: "fin"}, chatStream, cut},
		"chunks without [DONE]":     {&script{bytes: streamHead + chunked + inChunk(event("a")) + "0\r\n\r\n"}, chatStream, unended},
		"half a line at the end":    {&script{bytes: streamHead + chunked + inChunk(event("a")+`data: {"choices":[{"delta":{"content":"b`) + "0\r\n\r\n"}, chatStream, unended},
		"no [DONE], but a reason":   {&script{bytes: streamHead + chunked + inChunk(event("a")+finish) + "0\r\n\r\n"}, chatStream, want{200, event("a") + finish, "ok", true, 1}},
		"a second choice cut off":   {&script{bytes: streamHead + chunked + inChunk(finish+event("a")) + "0\r\n\r\n"}, chatStream, unended},
		"text and reason in one":    {&script{bytes: streamHead + chunked + inChunk(event("a")+last) + "0\r\n\r\n"}, chatStream, want{200, event("a") + last, "ok", true, 1}},
		"a stream of another type":  {&script{bytes: okHead + length + full}, chatStream, good},
	} {
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, Options{})
			r.targets = []Target{{URL: rawEngine(t, c.script.serve), EndpointID: "e", Pool: "p", LogicalModel: "m"}}
			asked := int32(0)
			for range 2 {
				resp, got := r.ask(t, c.body)
				switch {
				case c.want.body == broken:
					if !strings.HasSuffix(got, ">") {
						t.Errorf("a broken answer looks whole: %d %.300q", resp.StatusCode, got)
					}
				case resp.StatusCode >= 500 && resp.Header.Get("Retry-After") != "":
					wantError(t, resp, got, c.want.status, c.want.body)
				case got != c.want.body:
					t.Errorf("got %d %.300q, want %.300q", resp.StatusCode, got, c.want.body)
				}
				if c.want.status != resp.StatusCode && c.want.body != broken {
					t.Errorf("got %d, want %d", resp.StatusCode, c.want.status)
				}
				if x := <-r.done; x.Outcome != c.want.outcome {
					t.Errorf("the outcome is %s, want %s: %+v", x.Outcome, c.want.outcome, x)
				}
				asked += c.want.asked
			}
			if got := c.script.asked.Load(); asked > 0 && got != asked {
				t.Errorf("the engine was asked %d times, want %d", got, asked)
			}
			if reused := c.script.conns.Load() == 1; reused != c.want.reused {
				t.Errorf("%d connections for two requests", c.script.conns.Load())
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.held != 0 {
				t.Errorf("%d reservations are held", r.held)
			}
		})
	}
}

// ask sends a body and gives what came of it; a connection that ends without
// an answer is one of status 0 that breaks off.
func (r *rig) ask(t *testing.T, body string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/v1/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return new(http.Response), "<" + err.Error() + ">"
	}
	defer func() { _ = resp.Body.Close() }()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		got = append(got, ("<" + err.Error() + ">")...)
	}
	return resp, string(got)
}

func TestAnEngineThatHangsWithinItsHeadIsGivenUpInTime(t *testing.T) {
	t.Parallel()
	for _, sent := range []string{"", "HTTP/1.1 2", okHead, "HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 100 Continue\r\n\r\nHTTP"} {
		r := newRig(t, Options{Transport: wire.New(wire.Options{HeaderTimeout: 50 * time.Millisecond})})
		s := &script{bytes: sent, end: "hang"}
		r.targets = []Target{{URL: rawEngine(t, s.serve), EndpointID: "e", Pool: "p", LogicalModel: "m"}}
		resp, got := r.post(t, "/v1/completions", chat)
		wantError(t, resp, got, 504, "engine_timeout")
		if x := <-r.done; x.Outcome != "timeout" || r.held != 0 || s.asked.Load() != 1 {
			t.Errorf("after %q: %+v, held %d, asked %d", sent, x, r.held, s.asked.Load())
		}
	}
}
