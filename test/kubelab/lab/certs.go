package lab

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// authority signs the certificates of one lab. Each lab has its own.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	pem         []byte
	keyPEM      []byte
}

// validity is longer than anybody keeps a lab.
const validity = 365 * 24 * time.Hour

func newAuthority(name string) (*authority, error) {
	key, keyPEM, err := newKey()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(validity),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make certificate authority: %w", err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("make certificate authority: %w", err)
	}
	return &authority{certificate: certificate, key: key, pem: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), keyPEM: keyPEM}, nil
}

// readAuthority reads the authority that a lab's pki directory holds.
func readAuthority(pki string) (*authority, error) {
	var a authority
	var err error
	if a.pem, err = os.ReadFile(filepath.Join(pki, "ca.crt")); err != nil {
		return nil, fmt.Errorf("read certificate authority: %w", err)
	}
	if a.keyPEM, err = os.ReadFile(filepath.Join(pki, "ca.key")); err != nil {
		return nil, fmt.Errorf("read certificate authority: %w", err)
	}
	pair, err := tls.X509KeyPair(a.pem, a.keyPEM)
	if err != nil {
		return nil, fmt.Errorf("read certificate authority: %w", err)
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok {
		return nil, errors.New("read certificate authority: its key is of another kind")
	}
	a.certificate, a.key = pair.Leaf, key
	return &a, nil
}

// identity is a certificate with its key, for one user or one server.
type identity struct{ certificate, key []byte }

// sign makes a certificate for a user, whose groups are organizations, and for
// the names and addresses of a server.
func (a *authority) sign(user string, groups []string, names []string, addresses []net.IP) (identity, error) {
	key, keyPEM, err := newKey()
	if err != nil {
		return identity{}, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 100))
	if err != nil {
		return identity{}, fmt.Errorf("make certificate of %s: %w", user, err)
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: user, Organization: groups},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(validity),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		DNSNames:     names,
		IPAddresses:  addresses,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		return identity{}, fmt.Errorf("make certificate of %s: %w", user, err)
	}
	return identity{pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), keyPEM}, nil
}

func newKey() (*ecdsa.PrivateKey, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("make key: %w", err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, nil, fmt.Errorf("make key: %w", err)
	}
	return key, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

// kubeconfig gives the file with which a user reaches an API server.
func (a *authority) kubeconfig(cluster, server, user string, id identity) ([]byte, error) {
	encode := base64.StdEncoding.EncodeToString
	named := func(name, kind string, value any) []any { return []any{map[string]any{"name": name, kind: value}} }
	return json.MarshalIndent(map[string]any{
		"apiVersion":      "v1",
		"kind":            "Config",
		"current-context": cluster,
		"clusters":        named(cluster, "cluster", map[string]any{"server": server, "certificate-authority-data": encode(a.pem)}),
		"contexts":        named(cluster, "context", map[string]any{"cluster": cluster, "user": user}),
		"users": named(user, "user", map[string]any{
			"client-certificate-data": encode(id.certificate), "client-key-data": encode(id.key),
		}),
	}, "", "  ")
}

// writeFiles writes files below dir, readable by their owner alone: most hold keys.
func writeFiles(dir string, files map[string][]byte) error {
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("write files of lab: %w", err)
		}
		if err := os.WriteFile(path, text, 0o600); err != nil {
			return fmt.Errorf("write files of lab: %w", err)
		}
	}
	return nil
}
