package lab

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// api is what the lab itself asks of its API server, as the administrator.
type api struct {
	server string
	client *http.Client
}

// newAPI reads the administrator's credentials from the lab's pki directory.
func newAPI(server, pki string) (*api, error) {
	ca, err := os.ReadFile(filepath.Join(pki, "ca.crt"))
	if err != nil {
		return nil, fmt.Errorf("reach API server: %w", err)
	}
	own, err := tls.LoadX509KeyPair(filepath.Join(pki, "admin.crt"), filepath.Join(pki, "admin.key"))
	if err != nil {
		return nil, fmt.Errorf("reach API server: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, errors.New("reach API server: ca.crt holds no certificate")
	}
	return &api{server: server, client: &http.Client{
		Timeout: 10 * time.Second,
		Transport: &http.Transport{
			TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS12},
			MaxIdleConns:    4,
		},
	}}, nil
}

// errNotFound says that the API server has no such object.
var errNotFound = errors.New("not found")

// do sends a request, with body as JSON where there is one, and reads the
// answer into what is not nil.
func (a *api) do(ctx context.Context, method, path string, body, into any) error {
	var reader io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return fmt.Errorf("ask API server: %w", err)
		}
		reader = bytes.NewReader(text)
	}
	request, err := http.NewRequestWithContext(ctx, method, a.server+path, reader)
	if err != nil {
		return fmt.Errorf("ask API server: %w", err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := a.client.Do(request)
	if err != nil {
		return fmt.Errorf("ask API server: %w", err)
	}
	defer response.Body.Close()
	const most = 64 << 20
	text, err := io.ReadAll(io.LimitReader(response.Body, most))
	switch {
	case err != nil:
		return fmt.Errorf("ask API server: %w", err)
	case response.StatusCode == http.StatusNotFound:
		return fmt.Errorf("ask API server for %s: %w", path, errNotFound)
	case response.StatusCode >= http.StatusBadRequest:
		return fmt.Errorf("ask API server for %s: %s: %.300s", path, response.Status, text)
	case into == nil:
		return nil
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("read answer of API server: %w", err)
	}
	return nil
}

// whyNotReady tells why a node is not Ready in a boot, with a kubelet that
// answers; empty where it is.
func (a *api) whyNotReady(ctx context.Context, name, bootID string) string {
	var node struct {
		Status struct {
			Conditions []struct{ Type, Status, Message string }
			NodeInfo   struct{ BootID string }
		}
	}
	if err := a.do(ctx, http.MethodGet, "/api/v1/nodes/"+name, nil, &node); err != nil {
		return err.Error()
	}
	if node.Status.NodeInfo.BootID != bootID {
		return "the kubelet has told of no boot " + bootID
	}
	for _, c := range node.Status.Conditions {
		if c.Type != "Ready" {
			continue
		}
		if c.Status != "True" {
			return c.Message
		}
		// The condition outlives a kubelet by some 40 s.
		return reason(a.do(ctx, http.MethodGet, "/api/v1/nodes/"+name+"/proxy/healthz", nil, nil))
	}
	return "it has no condition Ready"
}

// reason is an error as the reason to wait on; empty without one.
func reason(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// wait asks until check gives no reason to wait on, or fails, or ctx ends.
func wait(ctx context.Context, what string, check func(context.Context) (why string, err error)) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		why, err := check(ctx)
		if err != nil {
			return fmt.Errorf("wait for %s: %w", what, err)
		}
		if why == "" {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w; the last answer was: %s", what, context.Cause(ctx), why)
		}
	}
}
