package cli

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/identity"
)

func TestCertsPrintsSecretsOfOneAuthorityWithTheRolesInThem(t *testing.T) {
	t.Parallel()
	var out, complaint bytes.Buffer
	code := Run(t.Context(), []string{"certs", "--namespace", "gpu", "--domain", "example.org", "--router-host", "10.0.0.7"},
		terminal.Streams{In: strings.NewReader(""), Out: &out, Err: &complaint})
	if code != terminal.ExitOK {
		t.Fatalf("status %d: %s", code, complaint.String())
	}
	want := map[string]string{"hearth-agent-tls": "spiffe://example.org/hearth/agent/nodes", "hearth-router-tls": "spiffe://example.org/hearth/router/router"}
	seen := 0
	for document := range strings.SplitSeq(out.String(), "---\n") {
		if document == "" {
			continue
		}
		var secret corev1.Secret
		if err := yaml.UnmarshalStrict([]byte(document), &secret); err != nil {
			t.Fatal(err)
		}
		seen++
		pair, err := tls.X509KeyPair(secret.Data["tls.crt"], secret.Data["tls.key"])
		if err != nil {
			t.Fatal(err)
		}
		leaf, err := x509.ParseCertificate(pair.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(secret.Data["ca.crt"])
		if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
			t.Errorf("%s: %v", secret.Name, err)
		}
		if peer, err := identity.PeerOf(leaf); err != nil || peer.URI() != want[secret.Name] || secret.Namespace != "gpu" || secret.Type != corev1.SecretTypeTLS {
			t.Errorf("%s/%s of type %s is for %v, %v", secret.Namespace, secret.Name, secret.Type, peer, err)
		}
		if secret.Name == "hearth-router-tls" {
			if err := leaf.VerifyHostname("10.0.0.7"); err != nil {
				t.Error(err)
			}
		}
	}
	if seen != len(want) {
		t.Errorf("%d secrets", seen)
	}
}

func TestCertsGivesANamespaceThatYAMLWouldTakeForSomethingElseAsItIs(t *testing.T) {
	t.Parallel()
	for _, namespace := range []string{"true", "null", "123", "1e3"} {
		out, said, code := hearth(t, "certs", "--namespace", namespace)
		if code != terminal.ExitOK {
			t.Fatalf("--namespace %s ended with %d: %s", namespace, code, said)
		}
		for document := range strings.SplitSeq(strings.TrimPrefix(out, "---\n"), "---\n") {
			var secret corev1.Secret
			if err := yaml.UnmarshalStrict([]byte(document), &secret); err != nil || secret.Namespace != namespace {
				t.Errorf("--namespace %s is %q, %v", namespace, secret.Namespace, err)
			}
		}
	}
}

func TestCertsRefusesAValidityThatIsNone(t *testing.T) {
	t.Parallel()
	for _, days := range []string{"0", "-1", "3651"} {
		if code := Run(t.Context(), []string{"certs", "--days", days}, terminal.Streams{In: strings.NewReader(""), Out: &bytes.Buffer{}, Err: &bytes.Buffer{}}); code != terminal.ExitUsage {
			t.Errorf("--days %s ended with %d", days, code)
		}
	}
}
