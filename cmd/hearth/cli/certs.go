package cli

import (
	"encoding/base64"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/identity"
)

// maxCertDays bounds the validity of certificates in days.
const maxCertDays = 3650

func (a *app) certs() *cobra.Command {
	var (
		namespace, domain string
		days              int
		hosts             []string
	)
	c := &cobra.Command{
		Use:   "certs",
		Short: "Make the certificates of agents and router, as Secrets of a cluster",
		Long: `certs makes an authority, a certificate for the agents and one for the routers, and
prints them as two Secrets for kubectl:

    hearth certs | kubectl apply -f -

The authority's key is not kept: who runs it again replaces all of them, which
agents and routers take up while they run. A cluster that has an issuer of
certificates makes Secrets of these names and keys with it instead; the URI SANs
are spiffe://DOMAIN/hearth/agent/NAME and spiffe://DOMAIN/hearth/router/NAME.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if days < 1 || days > maxCertDays {
				return terminal.Usagef("--days is %d, want 1 to %d", days, maxCertDays)
			}
			if !identity.ValidName(domain) || !identity.ValidName(namespace) {
				return terminal.Usagef("--domain or --namespace is no name")
			}
			return a.printCerts(namespace, domain, time.Duration(days)*24*time.Hour, hosts)
		},
	}
	c.Flags().StringVar(&namespace, "namespace", "hearth-system", "namespace of the Secrets")
	c.Flags().StringVar(&domain, "domain", "cluster.local", "trust domain in the certificates' names")
	c.Flags().IntVar(&days, "days", 365, "validity in days")
	c.Flags().StringArrayVar(&hosts, "router-host", nil, "DNS name or address of the router that its certificate names too; may be repeated")
	return c
}

func (a *app) printCerts(namespace, domain string, validity time.Duration, hosts []string) error {
	ca, err := identity.NewCA(domain, validity)
	if err != nil {
		return err
	}
	until := time.Now().Add(validity)
	hosts = append([]string{"hearth-router", "hearth-router." + namespace + ".svc"}, hosts...)
	for _, side := range []struct {
		secret string
		role   identity.Role
		name   string
		hosts  []string
	}{
		{"hearth-agent-tls", identity.RoleAgent, "nodes", nil},
		{"hearth-router-tls", identity.RoleRouter, "router", hosts},
	} {
		pair, err := ca.Issue(side.role, side.name, identity.IssueOptions{NotAfter: until, Hosts: side.hosts})
		if err != nil {
			return err
		}
		text := base64.StdEncoding.EncodeToString
		fmt.Fprintf(a.Out, `---
apiVersion: v1
kind: Secret
metadata:
  name: %s
  namespace: %s
type: kubernetes.io/tls
data:
  tls.crt: %s
  tls.key: %s
  ca.crt: %s
`, side.secret, scalar(namespace), text(pair.Cert), text(pair.Key), text(ca.Cert()))
	}
	return nil
}
