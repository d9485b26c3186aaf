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

func TestAnIngressWithACertificateAndNoAuthoritiesServesAnyoneOverTLS(t *testing.T) {
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
	mine := issue(t, dir, ca, identity.RoleClient, "someone")
	cfg.IngressTLS.CA = ""
	if err := os.Remove(filepath.Join(dir, "ca.pem")); err != nil {
		t.Fatal(err)
	}
	r, _ := start(t, cfg, Options{})
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca.Cert())
	pair, err := tls.LoadX509KeyPair(mine.Cert, mine.Key)
	if err != nil {
		t.Fatal(err)
	}
	for _, http2 := range []bool{false, true} {
		transport := &http.Transport{ForceAttemptHTTP2: http2, TLSClientConfig: &tls.Config{
			RootCAs: roots, MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair},
		}}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+r.Status().Listeners["ingress"]+"/v1/completions",
			strings.NewReader(`{"model":"m","prompt":"x"}`))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := transport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		transport.CloseIdleConnections()
		if err != nil || resp.StatusCode != 200 {
			t.Errorf("got %d %s, %v", resp.StatusCode, body, err)
		}
	}
}

func TestOnlyTheIngressMayGoWithoutAuthorities(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(*Config){
		"":               func(c *Config) { c.IngressTLS = TLS{Cert: "c", Key: "k"} },
		"ingressTLS: is": func(c *Config) { c.IngressTLS = TLS{Cert: "c", CA: "a"} },
		"tls: is":        func(c *Config) { c.TLS = TLS{Cert: "c", Key: "k"} },
		"ingressTLS.ca: is empty": func(c *Config) {
			c.IngressTLS = TLS{Cert: "c", Key: "k"}
			c.Metering.ConsumerHeader, c.Metering.TrustedClients = "X-Team", []string{"gateway"}
		},
	} {
		cfg := config(t, "http://127.0.0.1:1")
		change(&cfg)
		err := cfg.Validate()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("validate gave %v, want %q", err, want)
		}
	}
	for _, open := range []func(identity.Files) error{
		func(f identity.Files) error { _, err := identity.ServerTLS(f, identity.RoleRouter); return err },
		func(f identity.Files) error { _, err := identity.ClientTLS(f, identity.RoleRouter); return err },
	} {
		if err := open(identity.Files{Cert: "c", Key: "k"}); err == nil || !strings.Contains(err.Error(), "authorities") {
			t.Errorf("a peer is believed without authorities: %v", err)
		}
	}
}
