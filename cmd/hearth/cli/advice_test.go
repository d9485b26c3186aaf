package cli

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent"
)

func TestACertificateThatNobodyWillAcceptIsWarnedOf(t *testing.T) {
	t.Parallel()
	ca, err := identity.NewCA("example.org", 365*24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	files := identity.Files{Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem")}
	now := time.Now()
	for _, c := range []struct {
		what     string
		role     identity.Role
		from, to time.Duration
		want     []string // a part of each warning
	}{
		{"good", identity.RoleAgent, -time.Hour, 30 * 24 * time.Hour, nil},
		{"expired", identity.RoleAgent, -2 * time.Hour, -time.Hour, []string{"is over since"}},
		{"of tomorrow", identity.RoleAgent, time.Hour, 30 * 24 * time.Hour, []string{"begins at"}},
		{"of the last days", identity.RoleAgent, -time.Hour, 6 * 24 * time.Hour, []string{"ends at"}},
		{"of a client", identity.RoleClient, -time.Hour, 30 * 24 * time.Hour, []string{"want one URI SAN spiffe://DOMAIN/hearth/agent/NAME"}},
		{"expired and of a router", identity.RoleRouter, -2 * time.Hour, -time.Hour, []string{"is over since", "want one URI SAN"}},
	} {
		pair, err := ca.Issue(c.role, "node-1", identity.IssueOptions{NotBefore: now.Add(c.from), NotAfter: now.Add(c.to)})
		if err != nil {
			t.Fatal(err)
		}
		if err := identity.WritePair(files.Cert, files.Key, pair); err != nil {
			t.Fatal(err)
		}
		odd := tlsAdvice("tls", files, identity.RoleAgent, now)
		same := slices.EqualFunc(odd, c.want, func(said, want string) bool {
			return strings.HasPrefix(said, "tls.cert: ") && strings.Contains(said, want)
		})
		if !same {
			t.Errorf("a certificate %s: %q, want %q", c.what, odd, c.want)
		}
	}
	files.Cert = files.Key
	if odd := tlsAdvice("ingressTLS", files, "", now); len(odd) != 1 || !strings.Contains(odd[0], "begins with no PEM certificate") {
		t.Errorf("a key in the place of the certificate: %q", odd)
	}
}

func TestATokenFileThatHoldsNothingIsWarnedOf(t *testing.T) {
	t.Parallel()
	c := nodeagent.Default()
	c.Sources = []nodeagent.Source{{Type: nodeagent.SourceHub, TokenFile: "/dev/null"}}
	if odd := tokenAdvice(&c); !slices.Equal(odd, []string{"sources[0].tokenFile: /dev/null is empty"}) {
		t.Errorf("an empty token file: %q", odd)
	}
}
