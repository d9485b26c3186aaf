package admin

import (
	"bufio"
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

// maxAnswer bounds one answer or one line of a stream, in bytes.
const maxAnswer = 64 << 20

// ErrCut says that a pull's stream ended without its last line: the pull may go on.
var ErrCut = errors.New("answer was cut short")

// ErrNotAdmin says that something else than an agent's admin listener or local
// socket answered: an answer without the header Hearth-API.
var ErrNotAdmin = errors.New("this is not the admin listener of an agent")

// Client calls an agent. It is safe for concurrent use.
type Client struct {
	base string
	http *http.Client
	addr string
}

// NewClient makes a client of an agent at a socket path ("/run/hearth/agent.sock"
// or "unix:///run/hearth/agent.sock") or at "http://host:port".
func NewClient(addr string) (*Client, error) { return NewTLSClient(addr, nil) }

// NewTLSClient is NewClient with the caller's side of mTLS, which checks the
// agent's role, for "https://host:port". A nil config is the system's.
func NewTLSClient(addr string, config *tls.Config) (*Client, error) {
	transport := &http.Transport{MaxIdleConns: 2, IdleConnTimeout: 30 * time.Second, DisableCompression: true, TLSClientConfig: config}
	c := &Client{addr: addr, http: &http.Client{Transport: transport}}
	path, isURL := strings.CutPrefix(addr, "unix://") // an address without the prefix is left whole
	switch {
	case isURL || filepath.IsAbs(addr):
		c.base = "http://agent"
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}
	default:
		u, err := url.Parse(addr)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.Path != "" && u.Path != "/" {
			return nil, fmt.Errorf("make agent client: address %q is neither a socket path nor http://host:port", addr)
		}
		c.base = strings.TrimSuffix(addr, "/")
	}
	return c, nil
}

// Close gives idle connections back.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Node asks who the agent is.
func (c *Client) Node(ctx context.Context) (Node, error) { return get[Node](ctx, c, "/v1/node") }

// Models lists the models of the node by ref.
func (c *Client) Models(ctx context.Context) ([]Model, error) {
	list, err := get[modelList](ctx, c, "/v1/models")
	return list.Models, err
}

// Model shows one model with its files.
func (c *Client) Model(ctx context.Context, ref string) (Model, error) {
	return get[Model](ctx, c, "/v1/models/show?ref="+url.QueryEscape(ref))
}

// Endpoints lists the local engines by name.
func (c *Client) Endpoints(ctx context.Context) ([]Endpoint, error) {
	list, err := get[endpointList](ctx, c, "/v1/endpoints")
	return list.Endpoints, err
}

// Devices lists the devices by id.
func (c *Client) Devices(ctx context.Context) ([]Device, error) {
	list, err := get[deviceList](ctx, c, "/v1/devices")
	return list.Devices, err
}

// Claims lists the claims that have something on the node, by namespace and name.
func (c *Client) Claims(ctx context.Context) ([]Claim, error) {
	list, err := get[claimList](ctx, c, "/v1/claims")
	return list.Claims, err
}

// Remove drops a ref and the bytes no other artifact uses.
func (c *Client) Remove(ctx context.Context, ref string) error {
	_, err := post[struct{}](ctx, c, "/v1/models/rm", RefRequest{Ref: ref})
	return err
}

// Verify reads every file of a model again.
func (c *Client) Verify(ctx context.Context, ref string) (VerifyResult, error) {
	return post[VerifyResult](ctx, c, "/v1/models/verify", RefRequest{Ref: ref})
}

// Inject reports an XID of a device or clears its conditions, and gives the
// device after it.
func (c *Client) Inject(ctx context.Context, request InjectRequest) (Device, error) {
	return post[Device](ctx, c, "/v1/inject", request)
}

// Pull waits until a model is Ready and calls progress (nil for none) with
// each line, the last one included. It gives the model's last state. Errors
// are *Error where the agent said why, or wrap ErrCut.
func (c *Client) Pull(ctx context.Context, request PullRequest, progress func(Progress)) (Model, error) {
	response, err := c.do(ctx, http.MethodPost, "/v1/models/pull", request)
	if err != nil {
		return Model{}, err
	}
	defer func() { _ = response.Body.Close() }()
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, maxAnswer)
	var model Model
	for lines.Scan() {
		var p Progress
		if err := json.Unmarshal(lines.Bytes(), &p); err != nil {
			return model, fmt.Errorf("read pull progress: %w", err)
		}
		if p.Model != nil {
			model = *p.Model
		}
		if progress != nil {
			progress(p)
		}
		if p.Error != nil {
			return model, p.Error
		}
		if p.Done {
			return model, nil
		}
	}
	if err := lines.Err(); err != nil {
		return model, fmt.Errorf("read pull progress: %w: %w", ErrCut, err)
	}
	return model, fmt.Errorf("read pull progress: %w", ErrCut)
}

func get[T any](ctx context.Context, c *Client, path string) (T, error) {
	return ask[T](ctx, c, http.MethodGet, path, nil)
}

func post[T any](ctx context.Context, c *Client, path string, body any) (T, error) {
	return ask[T](ctx, c, http.MethodPost, path, body)
}

func ask[T any](ctx context.Context, c *Client, method, path string, body any) (T, error) {
	var answer T
	response, err := c.do(ctx, method, path, body)
	if err != nil {
		return answer, err
	}
	defer func() { _ = response.Body.Close() }()
	if err := json.NewDecoder(io.LimitReader(response.Body, maxAnswer)).Decode(&answer); err != nil {
		return answer, fmt.Errorf("read agent answer: %w", err)
	}
	return answer, nil
}

// do makes one call; an answer of 400 and above is an *Error.
func (c *Client) do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var content io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("call agent: %w", err)
		}
		content = bytes.NewReader(data)
	}
	request, err := http.NewRequestWithContext(ctx, method, c.base+path, content)
	if err != nil {
		return nil, fmt.Errorf("call agent: %w", err)
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	response, err := c.http.Do(request)
	if err != nil {
		return nil, fmt.Errorf("call agent at %s: %w", c.addr, err)
	}
	if response.Header.Get("Hearth-API") == "" {
		_ = response.Body.Close()
		return nil, fmt.Errorf("call agent at %s: %w", c.addr, ErrNotAdmin)
	}
	if response.StatusCode < http.StatusBadRequest {
		return response, nil
	}
	defer func() { _ = response.Body.Close() }()
	var answer struct {
		Error *Error `json:"error"`
	}
	data, _ := io.ReadAll(io.LimitReader(response.Body, 64<<10))
	if json.Unmarshal(data, &answer) != nil || answer.Error == nil {
		return nil, fmt.Errorf("call agent at %s: %w", c.addr, &Error{Code: CodeInternal, Message: "status " + response.Status, Status: response.StatusCode})
	}
	answer.Error.Status = response.StatusCode
	return nil, answer.Error
}

type (
	modelList struct {
		Models []Model `json:"models"`
	}
	endpointList struct {
		Endpoints []Endpoint `json:"endpoints"`
	}
	deviceList struct {
		Devices []Device `json:"devices"`
	}
	leaseList struct {
		Leases []Lease `json:"leases"`
	}
	errorAnswer struct {
		Error *Error `json:"error"`
	}
)
