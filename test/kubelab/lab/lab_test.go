package lab

import (
	"crypto/tls"
	"crypto/x509"
	"maps"
	"net"
	"slices"
	"strings"
	"testing"
)

func TestACertificateIsForItsUserAndSignedByTheAuthority(t *testing.T) {
	t.Parallel()
	made, err := newAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := writeFiles(dir, map[string][]byte{"ca.crt": made.pem, "ca.key": made.keyPEM}); err != nil {
		t.Fatal(err)
	}
	read, err := readAuthority(dir)
	if err != nil {
		t.Fatal(err)
	}
	id, err := read.sign("system:node:node-0", []string{"system:nodes"}, nil, []net.IP{net.ParseIP(nodeAddress(0))})
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(id.certificate, id.key)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(made.certificate)
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: "10.99.0.10", KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
		t.Error(err)
	}
	if pair.Leaf.Subject.CommonName != "system:node:node-0" || !slices.Equal(pair.Leaf.Subject.Organization, []string{"system:nodes"}) {
		t.Errorf("the subject is %s", pair.Leaf.Subject)
	}
}

func TestEveryNodeHasItsOwnAddressAndPods(t *testing.T) {
	t.Parallel()
	_, nodes, err := net.ParseCIDR("10.99.0.0/24")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{controlAddress: true}
	for i := range MaxNodes {
		_, pods, err := net.ParseCIDR(podSubnet(i))
		if err != nil || !nodes.Contains(net.ParseIP(nodeAddress(i))) {
			t.Fatalf("node %d: %s, %v", i, nodeAddress(i), err)
		}
		if seen[nodeAddress(i)] || seen[pods.String()] {
			t.Errorf("node %d has what another has", i)
		}
		seen[nodeAddress(i)], seen[pods.String()] = true, true
	}
}

func TestFeatureGatesAreReadStrictlyAndWrittenSorted(t *testing.T) {
	t.Parallel()
	gates, err := ParseFeatureGates("B=false,A=true")
	if err != nil || !maps.Equal(gates, map[string]bool{"A": true, "B": false}) {
		t.Errorf("%v, %v", gates, err)
	}
	if got := gateFlag(gates); got != "A=true,B=false" {
		t.Errorf("the flag is %q", got)
	}
	for _, bad := range []string{"A", "A=1", "=true", "A=true,B"} {
		if _, err := ParseFeatureGates(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

func TestWrongOptionsAreRefusedBeforeAnythingIsMade(t *testing.T) {
	t.Parallel()
	for want, o := range map[string]Options{
		"lower-case":   {Name: "../x"},
		"at most 20":   {Name: strings.Repeat("x", 21)},
		"1 to 64":      {Nodes: 65},
		"no component": {Args: map[string][]string{"kubelete": nil}},
	} {
		if _, err := Up(t.Context(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}
