package router

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/identity"
)

// issue writes a certificate of a role and gives its files.
func issue(t *testing.T, dir string, ca *identity.CA, role identity.Role, name string) TLS {
	t.Helper()
	pair, err := ca.Issue(role, name, identity.IssueOptions{Hosts: []string{"127.0.0.1"}})
	if err != nil {
		t.Fatal(err)
	}
	files := TLS{Cert: filepath.Join(dir, name+".pem"), Key: filepath.Join(dir, name+"-key.pem"), CA: filepath.Join(dir, "ca.pem")}
	if err := identity.WritePair(files.Cert, files.Key, pair); err != nil {
		t.Fatal(err)
	}
	return files
}

func TestTheIngressSpeaksTLSAndHTTP2AndKnowsItsClientsByCertificate(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ca, err := identity.NewCA("test", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.pem"), ca.Cert(), 0o600); err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(http.HandlerFunc(engine))
	t.Cleanup(s.Close)
	cfg := config(t, s.URL)
	cfg.IngressTLS = issue(t, dir, ca, identity.RoleRouter, "router-1")
	trusted := issue(t, dir, ca, identity.RoleClient, "gateway")
	other := issue(t, dir, ca, identity.RoleClient, "team-a")
	cfg.Metering.ConsumerHeader = "X-Team"
	cfg.Metering.TrustedClients = []string{"spiffe://test/hearth/client/gateway"}
	r, stop := start(t, cfg, Options{})
	url := "https://" + r.Status().Listeners["ingress"] + "/v1/chat/completions"

	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca.Cert())
	ask := func(files TLS, http2 bool) (*http.Response, string, error) {
		config := &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}
		if files.set() {
			pair, err := tls.LoadX509KeyPair(files.Cert, files.Key)
			if err != nil {
				t.Fatal(err)
			}
			config.Certificates = []tls.Certificate{pair}
		}
		transport := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: http2}
		defer transport.CloseIdleConnections()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url,
			strings.NewReader(`{"model":"m","messages":[{"role":"user","content":"hello"}],"stream":true}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Team", "from-the-header")
		resp, err := (&http.Client{Transport: transport}).Do(req)
		if err != nil {
			return nil, "", err
		}
		defer func() { _ = resp.Body.Close() }()
		body, err := io.ReadAll(resp.Body)
		return resp, string(body), err
	}
	for i, c := range []struct {
		files TLS
		http2 bool
	}{{trusted, true}, {other, true}, {TLS{}, false}} {
		resp, body, err := ask(c.files, c.http2)
		if err != nil || resp.StatusCode != 200 || !strings.HasSuffix(body, "data: [DONE]\n\n") {
			t.Fatalf("client %d got %v %q %v", i, resp, body, err)
		}
		if (resp.ProtoMajor == 2) != c.http2 {
			t.Errorf("client %d was answered in %s", i, resp.Proto)
		}
	}
	stranger, err := identity.NewCA("test", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := ask(issue(t, t.TempDir(), stranger, identity.RoleClient, "gateway"), true); err == nil {
		t.Error("a certificate of a strange authority was taken")
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	var consumers []any
	for _, record := range records(t, cfg.Metering.File) {
		consumers = append(consumers, record["consumer"])
	}
	want := []any{"from-the-header", "spiffe://test/hearth/client/team-a", "anonymous"}
	if len(consumers) != 3 || consumers[0] != want[0] || consumers[1] != want[1] || consumers[2] != want[2] {
		t.Errorf("consumers %v, want %v", consumers, want)
	}
}

func TestAnAdminListenerUnderCertificatesRefusesAgents(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ca, err := identity.NewCA("test", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.pem"), ca.Cert(), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := config(t, "http://127.0.0.1:1")
	cfg.TLS = issue(t, dir, ca, identity.RoleRouter, "router-1")
	cfg.Listen.Admin = "0.0.0.0:0"
	r, _ := start(t, cfg, Options{})
	_, port, _ := strings.Cut(r.Status().Listeners["admin"], "]:")
	for role, welcome := range map[identity.Role]bool{identity.RoleClient: true, identity.RoleRouter: true, identity.RoleAgent: false} {
		files := issue(t, dir, ca, role, "a-"+string(role))
		config, err := identity.ClientTLS(files.files(), identity.RoleRouter)
		if err != nil {
			t.Fatal(err)
		}
		transport := &http.Transport{TLSClientConfig: config}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://127.0.0.1:"+port+"/v1/status", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := (&http.Client{Transport: transport}).Do(req)
		if err == nil {
			_ = resp.Body.Close()
		}
		transport.CloseIdleConnections()
		if (err == nil && resp.StatusCode == http.StatusOK) != welcome {
			t.Errorf("role %s: %v", role, err)
		}
	}
}
