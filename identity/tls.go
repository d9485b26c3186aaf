package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"time"
)

// Files are the PEM files of one side of a connection.
type Files struct {
	Cert string // own certificate, leaf first
	Key  string // its private key
	CA   string // certificates of the authorities that peers are checked against; "" for OpenTLS alone
	// Failed, when set, is called with each failed reload; the certificates
	// read before stay in use.
	Failed func(error)
}

var errNoAuthorities = errors.New("read certificate authorities: none are named")

// ServerTLS gives the configuration of a listener that wants a certificate
// from every caller, signed by one of the authorities and carrying one of the
// given roles. The files are looked at with each handshake and read again
// when one changed. Errors are of the first read.
func ServerTLS(files Files, roles ...Role) (*tls.Config, error) {
	if files.CA == "" {
		return nil, errNoAuthorities
	}
	r, err := newReloader(files)
	if err != nil {
		return nil, err
	}
	config := r.server(tls.RequireAnyClientCert)
	config.VerifyConnection = func(state tls.ConnectionState) error {
		return r.verify(state, x509.ExtKeyUsageClientAuth, roles)
	}
	return config, nil
}

// OpenTLS is ServerTLS for a listener that anyone may call: a certificate is
// optional, and one that is given must be signed by one of the authorities.
// PeerOf tells who gave it. Without authorities no certificate is asked for.
func OpenTLS(files Files) (*tls.Config, error) {
	r, err := newReloader(files)
	if err != nil {
		return nil, err
	}
	if files.CA == "" {
		return r.server(tls.NoClientCert), nil
	}
	config := r.server(tls.RequestClientCert)
	config.VerifyConnection = func(state tls.ConnectionState) error {
		if len(state.PeerCertificates) == 0 {
			return nil
		}
		return r.chain(state, x509.ExtKeyUsageClientAuth)
	}
	return config, nil
}

// ClientTLS gives the configuration of a caller that shows its certificate
// and wants one of the given roles from the server. The role replaces the
// check of the host name. Files reload as in ServerTLS.
func ClientTLS(files Files, roles ...Role) (*tls.Config, error) {
	if files.CA == "" {
		return nil, errNoAuthorities
	}
	r, err := newReloader(files)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, _ := r.current()
			return pair, nil
		},
		// The chain and the role are checked in VerifyConnection, against the
		// authorities as they are now; a node has no host name to check.
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			return r.verify(state, x509.ExtKeyUsageServerAuth, roles)
		},
	}, nil
}

// reloader holds the certificates of Files and reads them anew when a file's
// modification time or size changed.
type reloader struct {
	files Files
	inUse atomic.Pointer[certificates]
}

// certificates are what the files held when they had the stamps seen.
type certificates struct {
	seen  [3]stamp
	pair  *tls.Certificate
	roots *x509.CertPool
}

type stamp struct {
	modified time.Time
	size     int64
}

func newReloader(files Files) (*reloader, error) {
	r := &reloader{files: files}
	seen, err := r.stamps()
	if err != nil {
		return nil, err
	}
	first, err := r.load(seen)
	if err != nil {
		return nil, err
	}
	r.inUse.Store(first)
	return r, nil
}

func (r *reloader) stamps() ([3]stamp, error) {
	var stamps [3]stamp
	for i, path := range []string{r.files.Cert, r.files.Key, r.files.CA} {
		if path == "" {
			continue
		}
		info, err := os.Stat(path)
		if err != nil {
			return stamps, fmt.Errorf("read certificates: %w", err)
		}
		stamps[i] = stamp{info.ModTime(), info.Size()}
	}
	return stamps, nil
}

func (r *reloader) load(seen [3]stamp) (*certificates, error) {
	pair, err := tls.LoadX509KeyPair(r.files.Cert, r.files.Key)
	if err != nil {
		return nil, fmt.Errorf("read certificate %s: %w", r.files.Cert, err)
	}
	if r.files.CA == "" {
		return &certificates{seen: seen, pair: &pair}, nil
	}
	authorities, err := os.ReadFile(r.files.CA)
	if err != nil {
		return nil, fmt.Errorf("read certificate authorities: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(authorities) {
		return nil, fmt.Errorf("read certificate authorities: %s holds no certificate", r.files.CA)
	}
	return &certificates{seen: seen, pair: &pair, roots: roots}, nil
}

// current gives the certificates in use, after a reload where a file changed.
// Handshakes never wait for one another: those that meet a change at once each
// read the files, and the first to finish puts its reading in use for all. The
// stamps are older than what was read, so a change in between is seen by the
// next handshake.
func (r *reloader) current() (*tls.Certificate, *x509.CertPool) {
	now := r.inUse.Load()
	seen, err := r.stamps()
	if err == nil && seen != now.seen {
		var next *certificates
		if next, err = r.load(seen); err == nil {
			if r.inUse.CompareAndSwap(now, next) {
				now = next
			} else {
				now = r.inUse.Load()
			}
		}
	}
	if err != nil && r.files.Failed != nil {
		r.files.Failed(err)
	}
	return now.pair, now.roots
}

func (r *reloader) server(auth tls.ClientAuthType) *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		ClientAuth:             auth,
		SessionTicketsDisabled: true,
		NextProtos:             []string{"h2", "http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			pair, _ := r.current()
			return pair, nil
		},
	}
}

func (r *reloader) chain(state tls.ConnectionState, usage x509.ExtKeyUsage) error {
	if len(state.PeerCertificates) == 0 {
		return errors.New("check peer certificate: none given")
	}
	_, roots := r.current()
	intermediates := x509.NewCertPool()
	for _, cert := range state.PeerCertificates[1:] {
		intermediates.AddCert(cert)
	}
	_, err := state.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: roots, Intermediates: intermediates, KeyUsages: []x509.ExtKeyUsage{usage}})
	if err != nil {
		return fmt.Errorf("check peer certificate: %w", err)
	}
	return nil
}

func (r *reloader) verify(state tls.ConnectionState, usage x509.ExtKeyUsage, roles []Role) error {
	if err := r.chain(state, usage); err != nil {
		return err
	}
	peer, err := PeerOf(state.PeerCertificates[0])
	if err != nil {
		return err
	}
	if !slices.Contains(roles, peer.Role) {
		return fmt.Errorf("check peer certificate: %w: %s is %q, want %q", ErrWrongRole, peer.Name, peer.Role, roles)
	}
	return nil
}
