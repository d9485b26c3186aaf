package meter

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"net/http"
	"slices"
	"strings"
)

// Anonymous is the consumer of a request that shows no identity.
const Anonymous = "anonymous"

// maxConsumerBytes bounds a name taken from a header.
const maxConsumerBytes = 256

// Consumers tells who a request is charged to. It is immutable.
type Consumers struct {
	header  string
	trusted []string
	tokens  map[[sha256.Size]byte]string
}

// Token names the bearer of a token that is known by its SHA-256 only.
type Token struct {
	Name   string
	SHA256 string // 64 hexadecimal digits
}

// NewConsumers checks and keeps the rules. header may be empty; trusted are
// names of client certificates whose header is believed.
func NewConsumers(header string, trusted []string, tokens []Token) (*Consumers, error) {
	c := &Consumers{trusted: slices.Clone(trusted), tokens: make(map[[sha256.Size]byte]string, len(tokens))}
	if header != "" {
		c.header = http.CanonicalHeaderKey(header)
	}
	for _, t := range tokens {
		raw, err := hex.DecodeString(t.SHA256)
		if err != nil || len(raw) != sha256.Size {
			return nil, fmt.Errorf("token %q: sha256 is not 64 hexadecimal digits", t.Name)
		}
		c.tokens[[sha256.Size]byte(raw)] = t.Name
	}
	return c, nil
}

// Of names the consumer of r; METERING.md gives the order. The listener must
// verify every certificate that a client shows.
func (c *Consumers) Of(r *http.Request) string {
	certificate := ""
	if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
		certificate = CertificateName(r.TLS.PeerCertificates[0])
	}
	if certificate != "" {
		if c.header != "" && slices.Contains(c.trusted, certificate) {
			if v := r.Header[c.header]; len(v) == 1 && v[0] != "" && len(v[0]) <= maxConsumerBytes {
				return v[0]
			}
		}
		return certificate
	}
	if len(c.tokens) > 0 {
		if auth := r.Header["Authorization"]; len(auth) == 1 {
			if scheme, token, ok := strings.Cut(auth[0], " "); ok && strings.EqualFold(scheme, "Bearer") {
				if name, known := c.tokens[sha256.Sum256([]byte(strings.TrimSpace(token)))]; known {
					return name
				}
			}
		}
	}
	return Anonymous
}

// CertificateName is the first URI SAN, else the first DNS SAN, else the common name.
func CertificateName(cert *x509.Certificate) string {
	if len(cert.URIs) > 0 {
		return cert.URIs[0].String()
	}
	if len(cert.DNSNames) > 0 {
		return cert.DNSNames[0]
	}
	return cert.Subject.CommonName
}
