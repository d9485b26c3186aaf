package fabric

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/identity"
)

// Engine is one engine process and where it answers.
type Engine struct {
	*Process
	Node   string // name of its node
	Device string // id of the device it runs on
	URL    string // http://127.0.0.1:port
	port   int
}

// Counters are the figures an engine counts itself; tokens unless said.
type Counters struct {
	Running, Waiting          int // requests
	PrefixHits, PrefixQueries float64
	Started                   float64 // seconds since the Unix epoch
}

// maxPage bounds a metrics page, in bytes.
const maxPage = 1 << 20

// Counters reads the engine's metrics page.
func (e *Engine) Counters(ctx context.Context) (Counters, error) {
	var c Counters
	body, err := get(ctx, e.URL+"/metrics")
	if err != nil {
		return c, fmt.Errorf("read counters of %s: %w", e.Name, err)
	}
	lines := bufio.NewScanner(strings.NewReader(body))
	for lines.Scan() {
		series, value, ok := strings.Cut(lines.Text(), " ")
		if !ok || strings.HasPrefix(series, "#") {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			continue
		}
		name, _, _ := strings.Cut(series, "{")
		switch name {
		case "vllm:num_requests_running":
			c.Running = int(v)
		case "vllm:num_requests_waiting":
			c.Waiting = int(v)
		case "vllm:prefix_cache_hits_total":
			c.PrefixHits = v
		case "vllm:prefix_cache_queries_total":
			c.PrefixQueries = v
		case "process_start_time_seconds":
			c.Started = v
		}
	}
	return c, nil
}

// ResetCache empties the prefix cache of a simulated engine.
func (e *Engine) ResetCache(ctx context.Context) error {
	if err := call(ctx, http.MethodPost, e.URL+"/reset_prefix_cache"); err != nil {
		return fmt.Errorf("reset cache of %s: %w", e.Name, err)
	}
	return nil
}

// answers reports whether the engine serves: /health where it has one, else
// /v1/models.
func (e *Engine) answers(ctx context.Context) error {
	err := call(ctx, http.MethodGet, e.URL+"/health")
	var status *statusError
	if errors.As(err, &status) && status.code == http.StatusNotFound {
		err = call(ctx, http.MethodGet, e.URL+"/v1/models")
	}
	return err
}

// direct is the client for all short calls within the fabric.
var direct = &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 8}}

type statusError struct {
	code int
	body string
}

func (e *statusError) Error() string { return fmt.Sprintf("status %d: %s", e.code, e.body) }

func call(ctx context.Context, method, url string) error {
	_, err := exchange(ctx, method, url)
	return err
}

func get(ctx context.Context, url string) (string, error) {
	return exchange(ctx, http.MethodGet, url)
}

func exchange(ctx context.Context, method, url string) (string, error) {
	r, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		return "", fmt.Errorf("make request: %w", err)
	}
	resp, err := direct.Do(r)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxPage))
	if err != nil {
		return "", fmt.Errorf("read answer: %w", err)
	}
	if resp.StatusCode >= 300 {
		return "", &statusError{resp.StatusCode, strings.TrimSpace(string(body[:min(len(body), 300)]))}
	}
	return string(body), nil
}

// freePorts finds n free TCP ports of the loopback. Another program may take
// one before it is used; the process that wanted it then says so and ends.
func freePorts(ctx context.Context, n int) ([]int, error) {
	ports := make([]int, 0, n)
	for range n {
		l, err := identity.ListenTCP(ctx, "127.0.0.1:0", 0)
		if err != nil {
			return nil, fmt.Errorf("find free port: %w", err)
		}
		defer func() { _ = l.Close() }() // all are held until all are found
		if addr, ok := l.Addr().(*net.TCPAddr); ok {
			ports = append(ports, addr.Port)
		}
	}
	return ports, nil
}
