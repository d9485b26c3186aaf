package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/identity"
)

// Modes of the fixed engine, chosen by the "user" field that opens each request.
const (
	modeJSON    = "bench-json"
	modeStream1 = "bench-one"
	modeBurst64 = "bench-burst"
	modePaced1  = "bench-slow1"
	modePaced64 = "bench-slow64"
	modeIdle    = "bench-idle"
)

const (
	chatPath    = "/v1/chat/completions"
	streamHead  = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
	streamEnd   = "0\r\n\r\n"
	pacedPeriod = 5 * time.Millisecond
)

// fixedEngine answers with prepared bytes, so that an engine's own cost stays out
// of the comparison. It speaks just enough HTTP/1.1 for the proxies under test.
type fixedEngine struct {
	json, one, burst     []byte
	chunk, usage, done   []byte
	oneUsage, burstUsage []byte
}

func newFixedEngine() *fixedEngine {
	e := &fixedEngine{}
	event := func(data string) []byte { return httpChunk("data: " + data + "\n\n") }
	e.chunk = event(`{"id":"cmpl-0123456789","object":"chat.completion.chunk","created":1764400000,"model":"served","choices":[{"index":0,"delta":{"content":" twenty bytes of text"},"logprobs":null,"finish_reason":null}]}`)
	e.usage = event(`{"id":"cmpl-0123456789","object":"chat.completion.chunk","created":1764400000,"model":"served","choices":[],"usage":{"prompt_tokens":200,"completion_tokens":64,"total_tokens":264,"prompt_tokens_details":{"cached_tokens":128}}}`)
	e.done = append(event("[DONE]"), streamEnd...)
	e.one = concat([]byte(streamHead), e.chunk, e.done)
	e.oneUsage = concat([]byte(streamHead), e.chunk, e.usage, e.done)
	e.burst = concat([]byte(streamHead), bytes.Repeat(e.chunk, 64), e.done)
	e.burstUsage = concat([]byte(streamHead), bytes.Repeat(e.chunk, 64), e.usage, e.done)
	body := `{"id":"cmpl-0123456789","object":"chat.completion","created":1764400000,"model":"served","choices":[{"index":0,"message":{"role":"assistant","content":"` +
		strings.Repeat("x", 60) + `"},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":200,"completion_tokens":15,"total_tokens":215,"prompt_tokens_details":{"cached_tokens":128}}}`
	e.json = []byte("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body)
	return e
}

func httpChunk(s string) []byte { return fmt.Appendf(nil, "%x\r\n%s\r\n", len(s), s) }

func concat(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// serve accepts connections until ctx ends.
func (e *fixedEngine) serve(ctx context.Context, addr string) error {
	l, err := identity.ListenTCP(ctx, addr, 0)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		go e.converse(conn)
	}
}

func (e *fixedEngine) converse(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	in := bufio.NewReaderSize(conn, 4<<10)
	var body bytes.Buffer
	for {
		path, err := readMessage(in, &body)
		if err != nil {
			return
		}
		if path != chatPath {
			if _, err := conn.Write(e.probe(path)); err != nil {
				return
			}
			continue
		}
		asked := bytes.Contains(body.Bytes(), []byte(`"include_usage"`))
		if err := e.answer(conn, modeOf(body.Bytes()), asked); err != nil {
			return
		}
	}
}

// modeOf finds the "user" field: where the request opens, or wherever a proxy that
// writes requests anew has put it.
func modeOf(body []byte) []byte {
	for _, part := range [][]byte{body[:min(len(body), 64)], body} {
		if _, value, found := bytes.Cut(part, []byte(`"user":`)); found {
			return value[:min(len(value), 16)]
		}
	}
	return nil
}

func (e *fixedEngine) answer(conn net.Conn, head []byte, usage bool) error {
	write := func(parts ...[]byte) error {
		for _, p := range parts {
			if _, err := conn.Write(p); err != nil {
				return fmt.Errorf("write: %w", err)
			}
		}
		return nil
	}
	tail := e.done
	if usage {
		tail = concat(e.usage, e.done)
	}
	switch {
	case bytes.Contains(head, []byte(modeStream1)):
		if usage {
			return write(e.oneUsage)
		}
		return write(e.one)
	case bytes.Contains(head, []byte(modeBurst64)):
		if usage {
			return write(e.burstUsage)
		}
		return write(e.burst)
	case bytes.Contains(head, []byte(modePaced64)):
		return e.paced(conn, 64, tail)
	case bytes.Contains(head, []byte(modePaced1)):
		return e.paced(conn, 1, tail)
	case bytes.Contains(head, []byte(modeIdle)):
		if err := write([]byte(streamHead), e.chunk); err != nil {
			return err
		}
		_, err := conn.Read(make([]byte, 1)) // until the proxy leaves
		return err
	}
	return write(e.json)
}

func (e *fixedEngine) paced(conn net.Conn, chunks int, tail []byte) error {
	tick := time.NewTicker(pacedPeriod)
	defer tick.Stop()
	if _, err := io.WriteString(conn, streamHead); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	for range chunks {
		<-tick.C
		if _, err := conn.Write(e.chunk); err != nil {
			return fmt.Errorf("write: %w", err)
		}
	}
	_, err := conn.Write(tail)
	return err
}

// probe answers what routers ask of an engine beside requests: whether it lives
// and what it serves. What else they ask for it does not have.
func (e *fixedEngine) probe(path string) []byte {
	status, body := "200 OK", ""
	switch path {
	case "/health":
	case "/v1/models":
		body = `{"object":"list","data":[{"id":"` + benchModel + `","object":"model","created":1764400000,"owned_by":"bench"}]}`
	default:
		status, body = "404 Not Found", `{"detail":"Not Found"}`
	}
	return fmt.Appendf(nil, "HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", status, len(body), body)
}

// readMessage reads one HTTP/1.1 request, leaves its body in body and returns its
// path.
func readMessage(in *bufio.Reader, body *bytes.Buffer) (string, error) {
	path, length, chunked, err := readHead(in)
	if err != nil {
		return "", err
	}
	body.Reset()
	if !chunked {
		_, err := io.CopyN(body, in, int64(length))
		return path, err
	}
	return path, readChunks(in, body)
}

// readHead reads the start line, of which it returns the second word (a request's
// path, an answer's status), and the headers.
func readHead(in *bufio.Reader) (word string, length int, chunked bool, err error) {
	line, err := in.ReadSlice('\n')
	if err != nil {
		return "", 0, false, err
	}
	if words := bytes.Fields(line); len(words) > 1 {
		word = string(words[1])
	}
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return "", 0, false, err
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			return word, length, chunked, nil
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		switch {
		case bytes.EqualFold(name, []byte("Content-Length")):
			if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
				return "", 0, false, fmt.Errorf("parse content length: %w", err)
			}
		case bytes.EqualFold(name, []byte("Transfer-Encoding")):
			chunked = bytes.Contains(bytes.ToLower(value), []byte("chunked"))
		}
	}
}

func readChunks(in *bufio.Reader, body io.Writer) error {
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return err
		}
		size, err := strconv.ParseInt(string(bytes.TrimRight(line, "\r\n")), 16, 64)
		if err != nil {
			return fmt.Errorf("parse chunk size: %w", err)
		}
		if _, err := io.CopyN(body, in, size); err != nil {
			return err
		}
		if _, err := in.Discard(2); err != nil {
			return err
		}
		if size == 0 {
			return nil
		}
	}
}
