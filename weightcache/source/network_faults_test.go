package source_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/weightcache/artifact"
	"github.com/hearth-dev/hearth/weightcache/source"
)

var anyRef = artifact.Ref{Scheme: artifact.SchemeHub, Name: "a/b", Revision: "main"}

// rawServer answers every connection by a function of it; TLS where config is
// given.
func rawServer(t *testing.T, config *tls.Config, answer func(c net.Conn)) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	scheme := "http://"
	if config != nil {
		l, scheme = tls.NewListener(l, config), "https://"
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go answer(c)
		}
	}()
	return scheme + l.Addr().String()
}

// rootsOf trusts the certificate of a test server.
func rootsOf(s *httptest.Server) *x509.CertPool {
	roots := x509.NewCertPool()
	roots.AddCert(s.Certificate())
	return roots
}

// drip hears the other side out, sends a text without its end and holds the
// connection until the other side closes it.
func drip(text string) func(c net.Conn) {
	return func(c net.Conn) {
		defer func() { _ = c.Close() }()
		_, _ = c.Read(make([]byte, 4096))
		_, _ = io.WriteString(c, text)
		_, _ = io.Copy(io.Discard, c)
	}
}

func TestEachFailureOnTheWayToAnOriginIsUnavailableAndNamed(t *testing.T) {
	t.Parallel()
	untrusted := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(untrusted.Close)
	for name, c := range map[string]struct {
		opts source.HubOptions
		says string
	}{
		"no such host": {source.HubOptions{URL: "http://hub.invalid", DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			// A resolver whose every server is gone; the name cannot be found.
			none := &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
				return nil, errors.New("no resolver answers")
			}}
			return (&net.Dialer{Resolver: none}).DialContext(ctx, network, address)
		}}, "hub.invalid"},
		"refused":               {source.HubOptions{URL: "http://127.0.0.1:1"}, "refused"},
		"certificate untrusted": {source.HubOptions{URL: untrusted.URL}, "certificate"},
		"certificate of another host": {source.HubOptions{
			URL: strings.Replace(untrusted.URL, "127.0.0.1", "localhost", 1), TLSConfig: &tls.Config{ServerName: "elsewhere.test", RootCAs: rootsOf(untrusted)},
		}, "elsewhere.test"},
		"handshake stalls":     {source.HubOptions{URL: strings.Replace(rawServer(t, nil, drip("")), "http:", "https:", 1), TLSTimeout: 30 * time.Millisecond}, "TLS"},
		"plain text for TLS":   {source.HubOptions{URL: strings.Replace(rawServer(t, nil, drip("HTTP/1.1 200 OK\r\n\r\n")), "http:", "https:", 1)}, ""},
		"no answer":            {source.HubOptions{URL: rawServer(t, nil, drip("")), HeaderTimeout: 30 * time.Millisecond}, "timeout"},
		"half a head":          {source.HubOptions{URL: rawServer(t, nil, drip("HTTP/1.1 200 OK\r\nContent-Le")), HeaderTimeout: 30 * time.Millisecond}, "timeout"},
		"no HTTP":              {source.HubOptions{URL: rawServer(t, nil, drip("SSH-2.0-OpenSSH_9.9\r\n"))}, "malformed"},
		"a head without end":   {source.HubOptions{URL: rawServer(t, nil, drip("HTTP/1.1 200 OK\r\nX: "+strings.Repeat("x", 1<<20)))}, "headers"},
		"dial that never ends": {source.HubOptions{URL: "http://hub.invalid", DialTimeout: 30 * time.Millisecond, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { <-ctx.Done(); return nil, ctx.Err() }}, "deadline"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.opts.Name = "far"
			h, err := source.NewHub(c.opts)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(h.Close)
			l := &artifact.Listing{Ref: anyRef, Commit: strings.Repeat("a", 40)}
			_, resolve := h.Resolve(t.Context(), anyRef)
			_, open := h.Open(t.Context(), l, artifact.File{Path: "f", Size: 10}, 0, 10)
			for _, err := range []error{resolve, open} {
				var typed *source.Error
				if !errors.Is(err, source.ErrUnavailable) || !errors.As(err, &typed) || typed.Source != "far" {
					t.Errorf("error %v, want %v of source far", err, source.ErrUnavailable)
				} else if !strings.Contains(err.Error(), c.says) {
					t.Errorf("error %q does not say %q", err, c.says)
				}
			}
		})
	}
}

func TestASignedAddressOfTheHubItselfMayExpireToo(t *testing.T) {
	t.Parallel()
	rig := newHub(t, hub.Options{Redirect: hub.RedirectRelative})
	l, err := rig.hub.Resolve(t.Context(), rig.Ref)
	if err != nil {
		t.Fatal(err)
	}
	hops := 0
	rig.origin.SetFault(func(r *http.Request) *hub.Fault {
		if strings.Contains(r.URL.Path, "/resolve/") {
			return nil
		}
		hops++
		return &hub.Fault{Status: 403}
	})
	_, err = readAll(t.Context(), rig.hub, l, "model.safetensors", 0, 10)
	if !errors.Is(err, source.ErrUnavailable) || hops != 1 {
		t.Errorf("after %d redirected requests: %v, want %v", hops, err, source.ErrUnavailable)
	}
}

// TestRedirectsBetweenHostsLoopNowhereAndCarryNothing follows a chain over
// three origins that leads back to its start.
func TestRedirectsBetweenHostsLoopNowhereAndCarryNothing(t *testing.T) {
	t.Parallel()
	var asked []string
	var urls [3]string
	for i := range urls {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			asked = append(asked, r.Header.Get("Authorization")+r.Header.Get("Cookie"))
			w.Header().Set("Set-Cookie", "session="+secret)
			http.Redirect(w, r, urls[(i+1)%3]+r.URL.RequestURI(), http.StatusTemporaryRedirect)
		}))
		t.Cleanup(s.Close)
		urls[i] = s.URL
	}
	token := t.TempDir() + "/token"
	writeFiles(t, token[:len(token)-len("/token")], map[string][]byte{"token": []byte(secret)})
	h, err := source.NewHub(source.HubOptions{Name: "ring", URL: urls[0], TokenFile: token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	l := &artifact.Listing{Ref: anyRef, Commit: strings.Repeat("a", 40)}
	_, err = h.Open(t.Context(), l, artifact.File{Path: "f", Size: 10}, 0, 10)
	if !errors.Is(err, source.ErrProtocol) || !strings.Contains(err.Error(), "loop") {
		t.Errorf("error %v, want a redirect loop", err)
	}
	if len(asked) != 3 || asked[0] != "Bearer "+secret || asked[1] != "" || asked[2] != "" {
		t.Errorf("credentials sent: %q", asked)
	}
}
