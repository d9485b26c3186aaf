package wire

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
)

// secureBody is the body of an answer that came over TLS, by net/http.
type secureBody struct {
	r         io.ReadCloser
	block     *block
	waiter    Waiter
	delimited bool
	awaited   bool // the next read was made already: ahead bytes and err
	ahead     int
	err       error
}

// doSecure is Do over TLS. The body is copied: net/http may read it on after
// it has returned.
func (t *Transport) doSecure(ctx context.Context, req *Request) (*Response, error) {
	target, err := url.Parse("https://" + req.Address + req.Target)
	if err != nil {
		return nil, fmt.Errorf("parse engine's address: %w", err)
	}
	var body io.Reader = http.NoBody
	if n := req.length(); n > 0 {
		body = bytes.NewReader(bytes.Join(req.Body, nil))
	}
	out, err := http.NewRequestWithContext(ctx, req.Method, target.String(), body)
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	out.Header, out.Host, out.GetBody = req.Header.Clone(), req.Host, nil
	if out.Header == nil {
		out.Header = http.Header{}
	}
	if out.Header["User-Agent"] == nil {
		out.Header["User-Agent"] = []string{""} // net/http does not name itself
	}
	resp, err := t.secure.RoundTrip(out) //nolint:bodyclose // Response.Close closes it
	if err != nil {
		return nil, secureError(err)
	}
	r := &Response{
		Status: resp.StatusCode, Length: resp.ContentLength,
		secure: &secureBody{r: resp.Body, delimited: resp.ContentLength >= 0 || len(resp.TransferEncoding) > 0},
	}
	for name, values := range resp.Header {
		for _, v := range values {
			r.Fields = append(r.Fields, Field{name, v})
		}
	}
	return r, nil
}

// secureError names a connection that ended before a response byte.
func secureError(err error) error {
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return err
	}
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) ||
		strings.Contains(err.Error(), "server closed idle connection") {
		return &LostError{BeforeByte: true, Err: err}
	}
	return err
}

// await is Response.Await.
func (s *secureBody) await() error {
	if s.awaited {
		return nil
	}
	if s.block == nil {
		s.block = getBlock()
	}
	n, err := s.r.Read(s.block.b)
	if n == 0 && err != nil && (err != io.EOF || !s.delimited) { // only a bare EOF is a clean end
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	s.awaited, s.ahead, s.err = true, n, err
	return nil
}

func (s *secureBody) next() ([]byte, error) {
	if s.awaited {
		s.awaited = false
		return s.block.b[:s.ahead], s.err
	}
	if s.waiter != nil {
		if err := s.waiter.BeforeWait(); err != nil {
			return nil, err
		}
	}
	if s.block == nil {
		s.block = getBlock()
	}
	n, err := s.r.Read(s.block.b)
	return s.block.b[:n], err
}

func (s *secureBody) close() {
	_ = s.r.Close()
	if s.block != nil {
		putBlock(s.block)
		s.block = nil
	}
}
