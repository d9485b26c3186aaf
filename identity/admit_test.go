package identity

import (
	"crypto/tls"
	"net"
	"net/http"
	"testing"
	"time"
)

func TestProbesNeedNoCertificateAndAllElseARole(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	config, err := OpenTLS(newSide(t, ca, RoleAgent, "node-1", IssueOptions{}))
	if err != nil {
		t.Fatal(err)
	}
	listener, err := tls.Listen("tcp", "127.0.0.1:0", config)
	if err != nil {
		t.Fatal(err)
	}
	ok := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	server := &http.Server{Handler: ForRoles(ok, RoleClient, RoleRouter), ReadHeaderTimeout: time.Minute}
	served := make(chan struct{})
	go func() { defer close(served); _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close(); <-served })

	ask := func(method, path string, role Role) int {
		t.Helper()
		client := &tls.Config{InsecureSkipVerify: true}
		if role != "" {
			if client, err = ClientTLS(newSide(t, ca, role, "caller", IssueOptions{}), RoleAgent); err != nil {
				t.Fatal(err)
			}
		}
		transport := &http.Transport{TLSClientConfig: client}
		defer transport.CloseIdleConnections()
		request, err := http.NewRequestWithContext(t.Context(), method, "https://"+listener.Addr().(*net.TCPAddr).String()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := transport.RoundTrip(request)
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
		return response.StatusCode
	}
	for _, c := range []struct {
		method, path string
		role         Role
		want         int
	}{
		{"GET", "/healthz", "", 204},
		{"GET", "/readyz", "", 204},
		{"HEAD", "/readyz", RoleAgent, 204},
		{"POST", "/readyz", "", 403},
		{"GET", "/metrics", "", 403},
		{"GET", "/healthz/../metrics", "", 403},
		{"GET", "/metrics", RoleAgent, 403},
		{"GET", "/metrics", RoleClient, 204},
		{"GET", "/v1/status", RoleRouter, 204},
	} {
		if got := ask(c.method, c.path, c.role); got != c.want {
			t.Errorf("%s %s with role %q gave %d, want %d", c.method, c.path, c.role, got, c.want)
		}
	}
}
