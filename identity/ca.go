package identity

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Role is what a peer is, as its certificate says.
type Role string

// Roles of certificates.
const (
	RoleAgent  Role = "agent"  // a node's agent: serves reports
	RoleRouter Role = "router" // a router: reads reports
	RoleClient Role = "client" // a caller of the router's ingress or of an admin listener
)

// Errors that callers branch on.
var (
	ErrWrongRole  = errors.New("peer has another role")
	ErrNoIdentity = errors.New("certificate has no hearth identity")
)

// Clock skew that a new certificate allows for.
const backdate = 5 * time.Minute

// Peer is who a certificate says its holder is.
type Peer struct {
	Domain string // trust domain, such as Domain
	Role   Role
	Name   string // node, router or client name
}

// URI gives the text form, "spiffe://DOMAIN/hearth/ROLE/NAME".
func (p Peer) URI() string {
	return (&url.URL{Scheme: "spiffe", Host: p.Domain, Path: "/" + Name + "/" + string(p.Role) + "/" + p.Name}).String()
}

// PeerOf reads the identity from a certificate's URI SAN. A certificate with
// none, more than one or a malformed one gives ErrNoIdentity.
func PeerOf(cert *x509.Certificate) (Peer, error) {
	if len(cert.URIs) != 1 {
		return Peer{}, fmt.Errorf("read peer identity: %w: %d URI names", ErrNoIdentity, len(cert.URIs))
	}
	u := cert.URIs[0]
	parts := strings.Split(u.Path, "/")
	if u.Scheme != "spiffe" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" || len(parts) != 4 || parts[1] != Name {
		return Peer{}, fmt.Errorf("read peer identity: %w: %q", ErrNoIdentity, u)
	}
	p := Peer{Domain: u.Host, Role: Role(parts[2]), Name: parts[3]}
	if !validRole(p.Role) || !ValidName(p.Name) {
		return Peer{}, fmt.Errorf("read peer identity: %w: %q", ErrNoIdentity, u)
	}
	return p, nil
}

func validRole(r Role) bool { return r == RoleAgent || r == RoleRouter || r == RoleClient }

// ValidName reports whether a peer may have a name: 1 to 253 letters, digits,
// dashes, underscores and dots.
func ValidName(name string) bool {
	if name == "" || len(name) > 253 || name == "." || name == ".." {
		return false
	}
	for _, c := range name {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("-_.", c)) {
			return false
		}
	}
	return true
}

// CA signs the certificates of one trust domain. It keeps its key in memory;
// Save writes it.
type CA struct {
	domain string
	cert   *x509.Certificate
	key    *ecdsa.PrivateKey
	pem    []byte
}

// Pair is a certificate (with its chain, leaf first) and its private key, as PEM.
type Pair struct {
	Cert []byte
	Key  []byte
}

// NewCA makes a CA for a trust domain, valid for the given time from now.
func NewCA(domain string, validity time.Duration) (*CA, error) {
	if !ValidName(domain) || validity <= 0 {
		return nil, fmt.Errorf("make certificate authority: bad domain %q or validity %v", domain, validity)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make certificate authority: %w", err)
	}
	now := time.Now()
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: Name + " " + domain},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(validity),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		URIs:                  []*url.URL{{Scheme: "spiffe", Host: domain}},
	}
	cert, encoded, err := sign(template, template, &key.PublicKey, key)
	if err != nil {
		return nil, fmt.Errorf("make certificate authority: %w", err)
	}
	return &CA{domain: domain, cert: cert, key: key, pem: encoded}, nil
}

// Cert is the CA's certificate as PEM: what the other side trusts.
func (c *CA) Cert() []byte { return bytes.Clone(c.pem) }

// IssueOptions refine a leaf certificate.
type IssueOptions struct {
	// NotBefore and NotAfter bound the validity; zero is now and 30 days later.
	NotBefore, NotAfter time.Time
	// Hosts are DNS names or IP addresses for callers that check a host name,
	// such as browsers. Hearth's own peers check the role instead.
	Hosts []string
}

// Issue signs a leaf certificate with a fresh key for a role and a name. It
// serves as server and as client certificate.
func (c *CA) Issue(role Role, name string, opts IssueOptions) (Pair, error) {
	if !validRole(role) || !ValidName(name) {
		return Pair{}, fmt.Errorf("issue certificate: bad role %q or name %q", role, name)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Pair{}, fmt.Errorf("issue certificate: %w", err)
	}
	if opts.NotBefore.IsZero() {
		opts.NotBefore = time.Now().Add(-backdate)
	}
	if opts.NotAfter.IsZero() {
		opts.NotAfter = time.Now().Add(30 * 24 * time.Hour)
	}
	uri, err := url.Parse(Peer{Domain: c.domain, Role: role, Name: name}.URI())
	if err != nil {
		return Pair{}, fmt.Errorf("issue certificate: %w", err)
	}
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: name},
		NotBefore:   opts.NotBefore,
		NotAfter:    opts.NotAfter,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		URIs:        []*url.URL{uri},
	}
	for _, host := range opts.Hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	_, cert, err := sign(template, c.cert, &key.PublicKey, c.key)
	if err != nil {
		return Pair{}, fmt.Errorf("issue certificate: %w", err)
	}
	encoded, err := encodeKey(key)
	if err != nil {
		return Pair{}, fmt.Errorf("issue certificate: %w", err)
	}
	return Pair{Cert: cert, Key: encoded}, nil
}

// WritePair writes a certificate (0644) and its key (0600). Each file is
// replaced by a rename, the key first, so that a reader sees whole files.
func WritePair(certFile, keyFile string, pair Pair) error {
	if err := replaceFile(keyFile, pair.Key, 0o600); err != nil {
		return err
	}
	return replaceFile(certFile, pair.Cert, 0o644)
}

func replaceFile(path string, data []byte, perm os.FileMode) error {
	temp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, writeErr := temp.Write(data)
	err = errors.Join(writeErr, temp.Chmod(perm), temp.Sync(), temp.Close())
	if err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		_ = os.Remove(temp.Name())
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

func sign(template, parent *x509.Certificate, public *ecdsa.PublicKey, key *ecdsa.PrivateKey) (*x509.Certificate, []byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, nil, fmt.Errorf("draw serial: %w", err)
	}
	template.SerialNumber = serial.Add(serial, big.NewInt(1))
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, key)
	if err != nil {
		return nil, nil, fmt.Errorf("sign certificate: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, nil, fmt.Errorf("sign certificate: %w", err)
	}
	return cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}
