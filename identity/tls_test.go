package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

func newSide(t *testing.T, ca *CA, role Role, name string, opts IssueOptions) Files {
	t.Helper()
	dir := t.TempDir()
	files := Files{Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem"), CA: filepath.Join(dir, "ca.pem")}
	issue(t, ca, files, role, name, opts)
	if err := os.WriteFile(files.CA, ca.Cert(), 0o600); err != nil {
		t.Fatal(err)
	}
	return files
}

func issue(t *testing.T, ca *CA, files Files, role Role, name string, opts IssueOptions) {
	t.Helper()
	pair, err := ca.Issue(role, name, opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := WritePair(files.Cert, files.Key, pair); err != nil {
		t.Fatal(err)
	}
}

func newCA(t *testing.T) *CA {
	t.Helper()
	ca, err := NewCA(Domain, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// handshake runs one TLS connection over a real socket and gives both sides' verdicts.
func handshake(t *testing.T, server, client *tls.Config) (peer *x509.Certificate, serverErr, clientErr error) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	done := make(chan error, 1)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			done <- err
			return
		}
		defer func() { _ = conn.Close() }()
		secured := tls.Server(conn, server)
		_, err = secured.Read(make([]byte, 1))
		if certs := secured.ConnectionState().PeerCertificates; len(certs) > 0 {
			peer = certs[0]
		}
		if err == nil {
			_, err = secured.Write([]byte("y"))
		}
		done <- err
	}()
	raw, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn := tls.Client(raw, client)
	defer func() { _ = conn.Close() }()
	if _, clientErr = conn.Write([]byte("x")); clientErr == nil {
		_, clientErr = conn.Read(make([]byte, 1))
	}
	if clientErr != nil {
		_ = conn.Close()
	}
	serverErr = <-done
	return peer, serverErr, clientErr
}

func mustTLS(t *testing.T, make func(Files, ...Role) (*tls.Config, error), files Files, roles ...Role) *tls.Config {
	t.Helper()
	config, err := make(files, roles...)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

func TestPeersOfTheRightRoleMeet(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	server := mustTLS(t, ServerTLS, newSide(t, ca, RoleAgent, "node-a", IssueOptions{}), RoleRouter)
	client := mustTLS(t, ClientTLS, newSide(t, ca, RoleRouter, "router-0", IssueOptions{}), RoleAgent)
	cert, serverErr, clientErr := handshake(t, server, client)
	if serverErr != nil || clientErr != nil {
		t.Fatalf("server: %v, client: %v", serverErr, clientErr)
	}
	peer, err := PeerOf(cert)
	if err != nil || peer != (Peer{Domain, RoleRouter, "router-0"}) || peer.URI() != "spiffe://hearth.dev/hearth/router/router-0" {
		t.Errorf("peer is %+v, %v", peer, err)
	}
}

func TestPeersThatAreNotTrustedAreRefused(t *testing.T) {
	t.Parallel()
	ca, other := newCA(t), newCA(t)
	past := IssueOptions{NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: time.Now().Add(-time.Hour)}
	agent := func(o IssueOptions) Files { return newSide(t, ca, RoleAgent, "node-a", o) }
	router := func(o IssueOptions) Files { return newSide(t, ca, RoleRouter, "router-0", o) }
	cases := map[string]struct {
		server, client *tls.Config
		serverSays     string
		clientSays     string
	}{
		"the caller has another role": {
			mustTLS(t, ServerTLS, agent(IssueOptions{}), RoleRouter),
			mustTLS(t, ClientTLS, newSide(t, ca, RoleClient, "someone", IssueOptions{}), RoleAgent), "another role", "",
		},
		"the server has another role": {
			mustTLS(t, ServerTLS, router(IssueOptions{}), RoleRouter),
			mustTLS(t, ClientTLS, router(IssueOptions{}), RoleAgent), "", "another role",
		},
		"the caller's certificate is over": {
			mustTLS(t, ServerTLS, agent(IssueOptions{}), RoleRouter),
			mustTLS(t, ClientTLS, router(past), RoleAgent), "expired", "",
		},
		"the server's certificate is over": {
			mustTLS(t, ServerTLS, agent(past), RoleRouter),
			mustTLS(t, ClientTLS, router(IssueOptions{}), RoleAgent), "", "expired",
		},
		"the caller is of another authority": {
			mustTLS(t, ServerTLS, agent(IssueOptions{}), RoleRouter),
			func() *tls.Config {
				files := newSide(t, other, RoleRouter, "router-0", IssueOptions{})
				if err := os.WriteFile(files.CA, ca.Cert(), 0o600); err != nil {
					t.Fatal(err)
				}
				return mustTLS(t, ClientTLS, files, RoleAgent)
			}(), "unknown authority", "",
		},
		"the server is of another authority": {
			mustTLS(t, ServerTLS, agent(IssueOptions{}), RoleRouter),
			mustTLS(t, ClientTLS, newSide(t, other, RoleRouter, "router-0", IssueOptions{}), RoleAgent), "", "unknown authority",
		},
		"the caller shows no certificate": {
			mustTLS(t, ServerTLS, agent(IssueOptions{}), RoleRouter),
			&tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}, "certificate", "",
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, serverErr, clientErr := handshake(t, c.server, c.client)
			if serverErr == nil || clientErr == nil {
				t.Fatalf("both sides must fail: server %v, client %v", serverErr, clientErr)
			}
			if !strings.Contains(serverErr.Error(), c.serverSays) || !strings.Contains(clientErr.Error(), c.clientSays) {
				t.Errorf("server: %v\nclient: %v", serverErr, clientErr)
			}
		})
	}
}

func TestChangedFilesAreReadAtTheNextHandshakeAndBadOnesKeepTheOld(t *testing.T) {
	t.Parallel()
	first, second := newCA(t), newCA(t)
	serverFiles := newSide(t, first, RoleAgent, "node-a", IssueOptions{})
	failures := make(chan error, 16)
	serverFiles.Failed = func(err error) { failures <- err }
	server := mustTLS(t, ServerTLS, serverFiles, RoleRouter)
	oldClient := mustTLS(t, ClientTLS, newSide(t, first, RoleRouter, "r", IssueOptions{}), RoleAgent)
	newClient := mustTLS(t, ClientTLS, newSide(t, second, RoleRouter, "r", IssueOptions{}), RoleAgent)

	if err := os.WriteFile(serverFiles.Cert, []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, s, c := handshake(t, server, oldClient); s != nil || c != nil {
		t.Fatalf("a torn file broke the connection: %v, %v", s, c)
	}
	if len(failures) == 0 {
		t.Error("the failed reload was not told")
	}
	issue(t, second, serverFiles, RoleAgent, "node-a", IssueOptions{})
	if err := os.WriteFile(serverFiles.CA, append(second.Cert(), '\n'), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, s, c := handshake(t, server, newClient); s != nil || c != nil {
		t.Errorf("the new authority is refused after the change: %v, %v", s, c)
	}
	if _, s, _ := handshake(t, server, oldClient); s == nil {
		t.Error("the old authority is accepted after the change")
	}
}

func TestAnOpenListenerTakesCallersWithoutACertificateAndChecksThoseThatShowOne(t *testing.T) {
	t.Parallel()
	ca, other := newCA(t), newCA(t)
	server, err := OpenTLS(newSide(t, ca, RoleRouter, "router-0", IssueOptions{Hosts: []string{"127.0.0.1", "localhost"}}))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca.Cert())
	plain := &tls.Config{RootCAs: roots, ServerName: "localhost", MinVersion: tls.VersionTLS13}
	if _, s, c := handshake(t, server, plain); s != nil || c != nil {
		t.Errorf("a caller without certificate: %v, %v", s, c)
	}
	files := newSide(t, other, RoleClient, "someone", IssueOptions{})
	strange := mustTLS(t, ClientTLS, Files{Cert: files.Cert, Key: files.Key, CA: newSide(t, ca, RoleClient, "x", IssueOptions{}).CA}, RoleRouter)
	if _, s, _ := handshake(t, server, strange); s == nil {
		t.Error("a certificate of another authority was accepted")
	}
}

func TestKeysAreWrittenForTheOwnerOnly(t *testing.T) {
	t.Parallel()
	files := newSide(t, newCA(t), RoleAgent, "n", IssueOptions{})
	info, err := os.Stat(files.Key)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("key mode %v, %v", info.Mode(), err)
	}
}

func TestHandshakesThatMeetOneChangeAllGetWhatTheFilesHold(t *testing.T) {
	t.Parallel()
	first, second := newCA(t), newCA(t)
	files := newSide(t, first, RoleAgent, "n", IssueOptions{})
	r, err := newReloader(files)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(files.CA, append(second.Cert(), '\n'), 0o600); err != nil {
		t.Fatal(err)
	}
	want := x509.NewCertPool()
	want.AppendCertsFromPEM(second.Cert())
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			if _, roots := r.current(); !roots.Equal(want) {
				t.Error("a handshake after the change got the authorities of before")
			}
		})
	}
	group.Wait()
}

func TestPeerOfRefusesNamesThatAreNotOurs(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"https://hearth.dev/hearth/agent/a", "spiffe://hearth.dev/other/agent/a", "spiffe://hearth.dev/hearth/admin/a",
		"spiffe://hearth.dev/hearth/agent/", "spiffe://hearth.dev/hearth/agent/a/b", "spiffe:///hearth/agent/a",
		"spiffe://hearth.dev/hearth/agent/a%20b", "spiffe://hearth.dev/hearth/agent/a?x=1",
	} {
		u, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		if peer, err := PeerOf(&x509.Certificate{URIs: []*url.URL{u}}); !errors.Is(err, ErrNoIdentity) {
			t.Errorf("%s gave %+v, %v", text, peer, err)
		}
	}
	if _, err := PeerOf(&x509.Certificate{}); !errors.Is(err, ErrNoIdentity) {
		t.Errorf("no URI gave %v", err)
	}
}

func TestIssueRefusesNamesThatDoNotFitAnIdentity(t *testing.T) {
	t.Parallel()
	ca := newCA(t)
	for _, name := range []string{"", "a/b", "..", "a b", strings.Repeat("x", 254)} {
		if _, err := ca.Issue(RoleAgent, name, IssueOptions{}); err == nil {
			t.Errorf("name %q was accepted", name)
		}
	}
	if _, err := ca.Issue("admin", "a", IssueOptions{}); err == nil {
		t.Error("an unknown role was accepted")
	}
}
