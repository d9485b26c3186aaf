package admin

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"time"
)

// maxAnswer bounds one answer in bytes.
const maxAnswer = 64 << 20

// ErrNotAdmin says that something else than a router's admin listener or local
// socket answered: an answer without the header Hearth-API.
var ErrNotAdmin = errors.New("this is not the admin listener of a router")

// Client asks a router. It is safe for concurrent use.
type Client struct {
	base, addr string
	http       *http.Client
}

// NewClient makes a client of a router at a socket path ("/run/hearth/router.sock"
// or "unix:///run/hearth/router.sock") or at "http://host:port".
func NewClient(addr string) (*Client, error) { return NewTLSClient(addr, nil) }

// NewTLSClient is NewClient with the caller's side of mTLS, which checks the
// router's role, for "https://host:port". A nil config is the system's.
func NewTLSClient(addr string, config *tls.Config) (*Client, error) {
	transport := &http.Transport{MaxIdleConns: 2, IdleConnTimeout: 30 * time.Second, DisableCompression: true, TLSClientConfig: config}
	c := &Client{addr: addr, http: &http.Client{Transport: transport}}
	if path, isURL := strings.CutPrefix(addr, "unix://"); isURL || filepath.IsAbs(addr) {
		c.base = "http://router"
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}
		return c, nil
	}
	u, err := url.Parse(addr)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || strings.Trim(u.Path, "/") != "" {
		return nil, fmt.Errorf("make router client: address %q is neither a socket path nor http://host:port", addr)
	}
	c.base = strings.TrimSuffix(addr, "/")
	return c, nil
}

// Close gives idle connections back.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Status asks how the router is.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var s Status
	err := c.call(ctx, http.MethodGet, "/v1/status", nil, &s)
	return s, err
}

// Endpoints asks for all endpoints.
func (c *Client) Endpoints(ctx context.Context) ([]Endpoint, error) {
	var list struct {
		Endpoints []Endpoint `json:"endpoints"`
	}
	err := c.call(ctx, http.MethodGet, "/v1/endpoints", nil, &list)
	return list.Endpoints, err
}

// Models asks for the logical models.
func (c *Client) Models(ctx context.Context) ([]Model, error) {
	var list struct {
		Models []Model `json:"models"`
	}
	err := c.call(ctx, http.MethodGet, "/v1/models", nil, &list)
	return list.Models, err
}

// ScaleOuts asks for the scale-outs of all nodes.
func (c *Client) ScaleOuts(ctx context.Context) (ScaleOuts, error) {
	var s ScaleOuts
	err := c.call(ctx, http.MethodGet, "/v1/scaleouts", nil, &s)
	return s, err
}

// Explain asks where a request with this body would go.
func (c *Client) Explain(ctx context.Context, body []byte) (Explanation, error) {
	var e Explanation
	err := c.call(ctx, http.MethodPost, "/v1/explain", body, &e)
	return e, err
}

func (c *Client) call(ctx context.Context, method, path string, body []byte, into any) error {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("ask router: %w", err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("ask router at %s: %w", c.addr, err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.Header.Get("Hearth-API") == "" {
		return fmt.Errorf("ask router at %s: %w", c.addr, ErrNotAdmin)
	}
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("ask router at %s: %w", c.addr, err)
	}
	if resp.StatusCode != http.StatusOK {
		var failed struct {
			Error struct {
				Message string `json:"message"`
			} `json:"error"`
		}
		if json.Unmarshal(raw, &failed) != nil || failed.Error.Message == "" {
			return fmt.Errorf("ask router at %s: %s", c.addr, resp.Status)
		}
		return fmt.Errorf("ask router at %s: %s", c.addr, failed.Error.Message)
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("read router's answer: %w", err)
	}
	return nil
}
