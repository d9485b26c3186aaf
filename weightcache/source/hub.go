package source

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// HubOptions configures a Hub. Name and URL are required; zero durations mean
// the defaults named beside them.
type HubOptions struct {
	// Name is the configured name, used in errors and metrics.
	Name string
	// URL is the base of the hub or mirror: http or https, with an optional
	// path, without credentials, query or fragment.
	URL string
	// TokenFile holds a bearer token; it is read for every request, so that a
	// rotated token takes effect at once. Empty means no token.
	TokenFile string
	// UserAgent of the requests; empty means "hearth".
	UserAgent string
	// DialContext makes the connections; nil means the standard dialer. Where
	// the environment names a proxy for URL (HTTP_PROXY, HTTPS_PROXY, NO_PROXY,
	// as net/http reads them once per process) it dials the proxy. Its ctx tells
	// by FlightOf which flight the connection is for, and that alone.
	DialContext func(ctx context.Context, network, address string) (net.Conn, error)
	// TLSConfig holds further roots; nil means the system's.
	TLSConfig *tls.Config
	// DialTimeout bounds one dial (10 s), TLSTimeout a handshake (10 s) and
	// HeaderTimeout the wait for an answer's headers (30 s).
	DialTimeout, TLSTimeout, HeaderTimeout time.Duration
	// BodyTimeout ends an answer of Resolve that yields no byte for so long
	// (30 s) and ListTimeout a whole Resolve (5 min), both with ErrUnavailable.
	// The body of an Open is bounded by the caller's ctx.
	BodyTimeout, ListTimeout time.Duration
	// Streams is the number of idle connections kept per origin and flight; 0
	// means 16.
	Streams int
	// Now tells the time, for Retry-After dates; nil means time.Now.
	Now func() time.Time
}

// Limits on what a hub may answer.
const (
	maxRedirects   = 5
	maxTokenBytes  = 4 << 10  // of a token file
	maxInfoBytes   = 64 << 20 // of a repository's info
	maxPageBytes   = 16 << 20 // of one tree page
	maxPages       = 2000     // of one tree
	maxETags       = 4096     // remembered validators
	maxErrorReason = 200      // bytes quoted from an error answer
)

// Hub is the source behind hub:// refs: the public hub's API at any URL. It is
// safe for concurrent use. Requests of a flight have a connection pool of their
// own until EndFlight, those of none share one.
type Hub struct {
	opts  HubOptions
	base  *url.URL
	pools *pools

	lastToken atomic.Pointer[string] // for redact

	mu    sync.Mutex
	etags map[string]string // "host\x00path" -> ETag first seen for it
}

var _ Source = (*Hub)(nil)

// NewHub checks the options. It makes no connection and reads no file.
func NewHub(opts HubOptions) (*Hub, error) {
	base, err := url.Parse(opts.URL)
	switch {
	case opts.Name == "":
		return nil, errors.New("configure hub source: name is empty")
	case err != nil || base.Host == "" || base.Scheme != "http" && base.Scheme != "https":
		return nil, fmt.Errorf("configure hub source %q: url must be http:// or https:// and name a host", opts.Name)
	case base.User != nil || base.RawQuery != "" || base.Fragment != "":
		return nil, fmt.Errorf("configure hub source %q: url must not hold credentials, a query or a fragment; put a token in a file", opts.Name)
	}
	base.Path, base.RawPath = strings.TrimRight(base.Path, "/"), ""
	if opts.DialTimeout <= 0 {
		opts.DialTimeout = 10 * time.Second
	}
	if opts.TLSTimeout <= 0 {
		opts.TLSTimeout = 10 * time.Second
	}
	if opts.HeaderTimeout <= 0 {
		opts.HeaderTimeout = 30 * time.Second
	}
	if opts.BodyTimeout <= 0 {
		opts.BodyTimeout = 30 * time.Second
	}
	if opts.ListTimeout <= 0 {
		opts.ListTimeout = 5 * time.Minute
	}
	if opts.Streams <= 0 {
		opts.Streams = 16
	}
	if opts.UserAgent == "" {
		opts.UserAgent = "hearth"
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	dial := opts.DialContext
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	return &Hub{
		opts: opts, base: base, etags: map[string]string{},
		pools: newPools(func() *pool { return &pool{Client: newClient(opts, dial)} }),
	}, nil
}

// newClient makes a client with connections of its own. Redirects are followed
// by hand, so that credentials, schemes and loops are judged at each hop.
func newClient(opts HubOptions, dial func(ctx context.Context, network, address string) (net.Conn, error)) *http.Client {
	transport := &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, opts.DialTimeout)
			defer cancel()
			return dial(ctx, network, address)
		},
		Proxy:                  http.ProxyFromEnvironment,
		TLSClientConfig:        opts.TLSConfig.Clone(),
		TLSHandshakeTimeout:    opts.TLSTimeout,
		ResponseHeaderTimeout:  opts.HeaderTimeout,
		MaxResponseHeaderBytes: 256 << 10,
		DisableCompression:     true,
		MaxIdleConns:           4 * opts.Streams,
		MaxIdleConnsPerHost:    opts.Streams,
		IdleConnTimeout:        60 * time.Second,
		ReadBufferSize:         64 << 10,
	}
	return &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
}

// Name returns the configured name.
func (h *Hub) Name() string { return h.opts.Name }

// Close drops idle connections. Calls in flight are not disturbed.
func (h *Hub) Close() { h.pools.closeIdle() }

// EndFlight drops the connections of a flight: the idle ones now, the others
// once what they carry is done. A request of that flight after it opens new
// ones, to be ended again.
func (h *Hub) EndFlight(id uint32) { h.pools.end(id) }

// token reads the token file. The error never quotes its content.
func (h *Hub) token() (string, error) {
	if h.opts.TokenFile == "" {
		return "", nil
	}
	info, err := os.Stat(h.opts.TokenFile)
	if err != nil {
		return "", unreadToken(err)
	}
	if info.Size() > maxTokenBytes {
		return "", fmt.Errorf("%w: token file is longer than %d bytes", ErrUnauthorized, maxTokenBytes)
	}
	text, err := os.ReadFile(h.opts.TokenFile)
	if err != nil {
		return "", unreadToken(err)
	}
	token := strings.TrimSpace(string(text))
	if token == "" || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", fmt.Errorf("%w: token file must hold one token of printable characters", ErrUnauthorized)
	}
	h.lastToken.Store(&token)
	return token, nil
}

// unreadToken says what a token file means that could not be read. Only one that
// is not there, or not ours to read, is like a token that the hub refuses; where
// the node is out of descriptors or its drive fails nobody has refused anything.
func unreadToken(err error) error {
	for _, definite := range []error{fs.ErrNotExist, fs.ErrPermission, syscall.EISDIR, syscall.ENOTDIR, syscall.ELOOP, syscall.ENAMETOOLONG} {
		if errors.Is(err, definite) {
			return fmt.Errorf("%w: read token file: %w", ErrUnauthorized, err)
		}
	}
	return fmt.Errorf("%w: read token file: %w", ErrUnavailable, err)
}

// refuse wraps a cause as this source's Error.
func (h *Hub) refuse(op, what string, err error) error {
	if _, known := errors.AsType[*Error](err); known {
		return err
	}
	return &Error{Source: h.opts.Name, Op: op, What: what, Err: h.redact(err)}
}

// redact drops the text of an error in which an answer echoed the token.
func (h *Hub) redact(err error) error {
	token := h.lastToken.Load()
	if token == nil || *token == "" || !strings.Contains(err.Error(), *token) {
		return err
	}
	for _, kind := range []error{ErrNoRevision, ErrNotFound, ErrUnauthorized, ErrForbidden, ErrThrottled, ErrUnavailable, ErrChanged, ErrNoRange, ErrProtocol} {
		if errors.Is(err, kind) {
			return fmt.Errorf("%w: the answer quoted the credential", kind)
		}
	}
	return fmt.Errorf("%w: the answer quoted the credential", ErrProtocol)
}

// describe names a ref, or a ref and one of its files.
func describe(ref artifact.Ref, file string) string {
	if file == "" {
		return ref.String()
	}
	return fmt.Sprintf("%s file %q", ref, file)
}

// sameOrigin compares scheme, host and port.
func sameOrigin(a, b *url.URL) bool {
	return a.Scheme == b.Scheme && strings.EqualFold(a.Host, b.Host)
}
