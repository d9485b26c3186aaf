// Package wire is the proxy's client side: HTTP/1.1 to engines over plain TCP,
// with a pool of connections per address and no goroutine per connection.
//
// Package proxy calls Transport.Do from the goroutine of the client's request
// and reads the answer there, piece by piece, straight from the read buffer.
// The package never retries, never follows a redirect, never compresses,
// never keeps a read buffer while it waits for a byte of a body, and hands
// https to net/http.
package wire

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"
)

// Defaults and bounds.
const (
	DefaultDialTimeout = 2 * time.Second
	// DefaultIdleTimeout ends idle connections before uvicorn's 5 s do, which
	// would race with a request just being sent.
	DefaultIdleTimeout = 4 * time.Second
	// DefaultMaxIdle is the idle connections kept per address; one more is closed.
	DefaultMaxIdle = 1024
)

// Options shape a Transport.
type Options struct {
	DialTimeout time.Duration // 0 = DefaultDialTimeout
	// HeaderTimeout bounds the wait for a response's head; 0 = none.
	HeaderTimeout time.Duration
	IdleTimeout   time.Duration // 0 = DefaultIdleTimeout
	MaxIdle       int           // per address, 0 = DefaultMaxIdle
}

// Transport sends requests to engines. It is safe for concurrent use.
type Transport struct {
	options Options
	dialer  net.Dialer
	secure  *http.Transport

	mu       sync.Mutex
	idle     map[string][]*conn // by address, the longest idle first; guarded by mu
	sweeping bool               // a sweep is due; guarded by mu
}

// New returns a Transport. It starts nothing.
func New(o Options) *Transport {
	if o.DialTimeout <= 0 {
		o.DialTimeout = DefaultDialTimeout
	}
	if o.IdleTimeout <= 0 {
		o.IdleTimeout = DefaultIdleTimeout
	}
	if o.MaxIdle <= 0 {
		o.MaxIdle = DefaultMaxIdle
	}
	t := &Transport{
		options: o, idle: map[string][]*conn{},
		dialer: net.Dialer{Timeout: o.DialTimeout, KeepAlive: 15 * time.Second},
	}
	t.secure = &http.Transport{
		DialContext: t.dialer.DialContext, DisableCompression: true, TLSHandshakeTimeout: o.DialTimeout,
		MaxIdleConnsPerHost: o.MaxIdle, IdleConnTimeout: o.IdleTimeout, ResponseHeaderTimeout: o.HeaderTimeout,
	}
	return t
}

// Keeper holds the memory of a request body that is still being sent after Do
// has returned: an engine may answer early.
type Keeper interface {
	Hold()
	Release()
}

// Request is one request. It is not kept past Do.
type Request struct {
	Method  string
	Secure  bool   // https
	Address string // host:port to dial
	Host    string // the Host header
	Target  string // path and query as they go on the wire
	// Header has canonical names and end-to-end fields only: Host,
	// Content-Length, Transfer-Encoding and Connection are the transport's.
	Header http.Header
	// Body is sent piece by piece with the sum of the lengths declared; the
	// pieces must not change until Do has returned and Keeper has been let go.
	Body   [][]byte
	Keeper Keeper // required with a Body
}

func (r *Request) length() int {
	n := 0
	for _, p := range r.Body {
		n += len(p)
	}
	return n
}

// Do sends req and reads the answer's head. The caller closes the Response. ctx
// ends both the exchange here and the reading of the body.
//
// Errors: a *net.OpError with Op "dial" if there was no connection; a
// *LostError if it ended before the head was whole; an error whose Timeout()
// is true if no head came in time; ErrMalformed for an answer that is not
// HTTP/1.1 as RFC 9112 has it.
func (t *Transport) Do(ctx context.Context, req *Request) (*Response, error) {
	if req.Secure {
		return t.doSecure(ctx, req)
	}
	c, err := t.take(ctx, req.Address)
	if err != nil {
		return nil, err
	}
	r := &Response{c: c}
	r.stop = context.AfterFunc(ctx, c.abort)
	if err := c.exchange(req, r); err != nil {
		r.stop()
		if c.reused && !c.began {
			// Its neighbours rest on the same engine: what ended one ended most.
			t.closeIdle(c.address)
		}
		c.close()
		return nil, err
	}
	return r, nil
}

// take gives a resting connection that is still open, else a new one.
func (t *Transport) take(ctx context.Context, address string) (*conn, error) {
	now := time.Now()
	for {
		c := t.pop(address)
		if c == nil {
			return t.dial(ctx, address)
		}
		if now.Sub(c.since) >= t.options.IdleTimeout || !c.open() {
			c.close()
			continue
		}
		c.reused = true
		return c, nil
	}
}

func (t *Transport) pop(address string) *conn {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := t.idle[address]
	if len(list) == 0 {
		return nil
	}
	c := list[len(list)-1]
	list[len(list)-1] = nil
	t.idle[address] = list[:len(list)-1]
	return c
}

// put lets a connection rest that is between two exchanges.
func (t *Transport) put(c *conn) {
	c.since = time.Now()
	t.mu.Lock()
	list := t.idle[c.address]
	full := len(list) >= t.options.MaxIdle
	if !full {
		t.idle[c.address] = append(list, c)
		if !t.sweeping {
			t.sweeping = true
			time.AfterFunc(t.options.IdleTimeout/4, t.sweep)
		}
	}
	t.mu.Unlock()
	if full {
		c.close()
	}
}

// sweep closes what has rested too long, and comes again while anything rests.
func (t *Transport) sweep() {
	var old []*conn
	now := time.Now()
	t.mu.Lock()
	for address, list := range t.idle {
		n := 0
		for n < len(list) && now.Sub(list[n].since) >= t.options.IdleTimeout*3/4 {
			n++
		}
		old = append(old, list[:n]...)
		switch {
		case n == len(list):
			delete(t.idle, address)
		case n > 0:
			t.idle[address] = append([]*conn(nil), list[n:]...)
		}
	}
	t.sweeping = len(t.idle) > 0
	if t.sweeping {
		time.AfterFunc(t.options.IdleTimeout/4, t.sweep)
	}
	t.mu.Unlock()
	for _, c := range old {
		c.close()
	}
}

func (t *Transport) closeIdle(address string) {
	t.mu.Lock()
	list := t.idle[address]
	delete(t.idle, address)
	t.mu.Unlock()
	for _, c := range list {
		c.close()
	}
}

// CloseIdleConnections closes every connection that rests.
func (t *Transport) CloseIdleConnections() {
	t.mu.Lock()
	all := t.idle
	t.idle = map[string][]*conn{}
	t.mu.Unlock()
	for _, list := range all {
		for _, c := range list {
			c.close()
		}
	}
	t.secure.CloseIdleConnections()
}

func (t *Transport) dial(ctx context.Context, address string) (*conn, error) {
	nc, err := t.dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	tcp, ok := nc.(*net.TCPConn)
	if !ok {
		_ = nc.Close()
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: net.UnknownNetworkError(nc.LocalAddr().Network())}
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		_ = nc.Close()
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
	}
	c := &conn{t: t, address: address, tcp: tcp, raw: raw}
	c.read, c.write, c.abort = c.tryRead, c.tryWrite, c.close
	return c, nil
}
