package cli

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"time"

	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/router"
)

// expiresSoon is how long before its end a certificate is warned of.
const expiresSoon = 7 * 24 * time.Hour

// maxTokenFile is past the longest token that anything accepts, in bytes.
const maxTokenFile = 64 << 10

// tokenAdvice names the files of tokens, passwords and keys that an agent could not
// use: without its token a source or a caller is refused, and only then is it seen.
func tokenAdvice(c *nodeagent.Config) []string {
	files := make([]setting, 0, len(c.Sources)+len(c.Access.Tokens))
	for i, s := range c.Sources {
		files = append(files, setting{fmt.Sprintf("sources[%d].tokenFile", i), s.TokenFile})
	}
	for i, t := range c.Access.Tokens {
		files = append(files, setting{fmt.Sprintf("access.tokens[%d].file", i), t.File})
	}
	for i, t := range c.KV.Tenants {
		files = append(files,
			setting{fmt.Sprintf("kv.tenants[%d].credentialFile", i), t.CredentialFile},
			setting{fmt.Sprintf("kv.tenants[%d].encryptionKeyFile", i), t.EncryptionKeyFile})
	}
	var odd []string
	for _, f := range files {
		if f.path == "" {
			continue
		}
		if text, err := durable.ReadFile(durable.OS, f.path, maxTokenFile); err != nil {
			odd = append(odd, fmt.Sprintf("%s: %v", f.field, err))
		} else if len(bytes.TrimSpace(text)) == 0 {
			odd = append(odd, fmt.Sprintf("%s: %s is empty", f.field, f.path))
		}
	}
	return odd
}

// agentTLS and routerTLS are the certificates that a component shows.
func agentTLS(c *nodeagent.Config, now time.Time) []string {
	return tlsAdvice("tls", identity.Files{Cert: c.TLS.Cert, Key: c.TLS.Key, CA: c.TLS.CA}, identity.RoleAgent, now)
}

func routerTLS(c *router.Config, now time.Time) []string {
	odd := tlsAdvice("tls", identity.Files{Cert: c.TLS.Cert, Key: c.TLS.Key, CA: c.TLS.CA}, identity.RoleRouter, now)
	in := c.IngressTLS
	return append(odd, tlsAdvice("ingressTLS", identity.Files{Cert: in.Cert, Key: in.Key, CA: in.CA}, "", now)...)
}

// tlsAdvice says which of the files cannot be read, and what others will hold
// against the certificate: its time, or a role other than the one wanted
// (empty: none is).
func tlsAdvice(field string, files identity.Files, role identity.Role, now time.Time) []string {
	var odd []string
	for _, f := range []setting{{field + ".cert", files.Cert}, {field + ".key", files.Key}, {field + ".ca", files.CA}} {
		if f.path == "" {
			continue
		}
		file, err := os.Open(f.path)
		if err != nil {
			odd = append(odd, fmt.Sprintf("%s: %v", f.field, err))
			continue
		}
		_ = file.Close() // nothing was written
	}
	if len(odd) > 0 || files.Cert == "" {
		return odd
	}
	leaf, err := leafOf(files.Cert)
	if err != nil {
		return []string{fmt.Sprintf("%s.cert: %v", field, err)}
	}
	until := leaf.NotAfter.UTC().Format(time.RFC3339)
	switch {
	case now.After(leaf.NotAfter):
		odd = append(odd, fmt.Sprintf("%s.cert: %s is over since %s; nobody accepts it", field, files.Cert, until))
	case now.Before(leaf.NotBefore):
		odd = append(odd, fmt.Sprintf("%s.cert: %s begins at %s; nobody accepts it before", field, files.Cert, leaf.NotBefore.UTC().Format(time.RFC3339)))
	case now.After(leaf.NotAfter.Add(-expiresSoon)):
		odd = append(odd, fmt.Sprintf("%s.cert: %s ends at %s", field, files.Cert, until))
	}
	if role == "" {
		return odd
	}
	if peer, err := identity.PeerOf(leaf); err != nil || peer.Role != role {
		want := identity.Peer{Domain: "DOMAIN", Role: role, Name: "NAME"}.URI()
		odd = append(odd, fmt.Sprintf("%s.cert: %s does not say who it is for; want one URI SAN %s", field, files.Cert, want))
	}
	return odd
}

// leafOf reads the first certificate of a PEM file.
func leafOf(path string) (*x509.Certificate, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(text)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, fmt.Errorf("%s begins with no PEM certificate", path)
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return leaf, nil
}
