package router

import (
	"encoding/hex"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"time"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/router/feed"
	"github.com/hearth-dev/hearth/router/meter"
	"github.com/hearth-dev/hearth/router/pool"
	"github.com/hearth-dev/hearth/router/proxy"
	"github.com/hearth-dev/hearth/units"
)

// Kind is the kind of the router's configuration file.
const Kind = "RouterConfig"

// Config is the router's configuration. Nodes, Models, Pools, Policy and
// Metering.Tokens follow the file while the router runs; the rest is read once.
type Config struct {
	// Name is the router's name in logs and towards nodes.
	Name   string `yaml:"name"`
	Listen Listen `yaml:"listen"`
	// TLS is the router's identity: shown to nodes, and used by an admin
	// listener that is not on loopback.
	TLS TLS `yaml:"tls"`
	// IngressTLS makes the ingress speak TLS. With a CA clients may show
	// certificates, which it checks.
	IngressTLS TLS `yaml:"ingressTLS"`
	// Nodes are the agents whose reports the router reads.
	Nodes []feed.Node `yaml:"nodes"`
	// Kubernetes is the cluster whose pods are endpoints of pools.
	Kubernetes Kubernetes `yaml:"kubernetes"`
	// Policy, Pools and Models are those of package pool.
	Policy   string             `yaml:"policy"`
	Pools    []pool.PoolConfig  `yaml:"pools"`
	Models   []pool.ModelConfig `yaml:"models"`
	Limits   Limits             `yaml:"limits"`
	Metering Metering           `yaml:"metering"`
}

// Kubernetes says whether the router reads pods and agents of a cluster.
type Kubernetes struct {
	Enabled    bool   `yaml:"enabled"`
	Kubeconfig string `yaml:"kubeconfig"` // "" = the account of the pod it runs in
	Namespace  string `yaml:"namespace"`  // of pools and agents that name none; "" = the pod's, or the kubeconfig's
	Agents     Agents `yaml:"agents"`
}

// Agents names the headless Service whose endpoints are the nodes' agents.
type Agents struct {
	Namespace string `yaml:"namespace"`
	Service   string `yaml:"service"` // "" = none: nodes lists them
	Port      string `yaml:"port"`    // of the report, by name or number
}

// Listen says where the router listens. An address that is not loopback needs
// certificates, or Insecure.
type Listen struct {
	Ingress  string `yaml:"ingress"` // host:port for clients
	Admin    string `yaml:"admin"`   // host:port for metrics and read-only questions; "" = none
	Socket   string `yaml:"socket"`  // path of the local socket with the same API; "" = none
	Insecure bool   `yaml:"insecure"`
}

// TLS are PEM files, all three or none, but that an ingress may do without
// authorities; they are read again when they change.
type TLS struct {
	Cert string `yaml:"cert"`
	Key  string `yaml:"key"`
	CA   string `yaml:"ca"`
}

func (t TLS) set() bool { return t != TLS{} }

func (t TLS) files() identity.Files { return identity.Files{Cert: t.Cert, Key: t.Key, CA: t.CA} }

// Limits bound what requests may take.
type Limits struct {
	BodyBytes     units.Bytes    `yaml:"bodyBytes"`     // longest request body
	BufferedBytes units.Bytes    `yaml:"bufferedBytes"` // all request bodies held at one time
	HeaderTimeout units.Duration `yaml:"headerTimeout"` // wait for an engine's headers; 0 = none
	DialTimeout   units.Duration `yaml:"dialTimeout"`   // connecting to an engine
	DrainTimeout  units.Duration `yaml:"drainTimeout"`  // streams in flight at shutdown
}

// Metering says where usage records go and who consumers are (meter/METERING.md).
type Metering struct {
	File         string      `yaml:"file"` // "" = no records
	MaxFileBytes units.Bytes `yaml:"maxFileBytes"`
	// ConsumerHeader names the consumer where the client certificate is one of
	// TrustedClients.
	ConsumerHeader string   `yaml:"consumerHeader"`
	TrustedClients []string `yaml:"trustedClients"`
	Tokens         []Token  `yaml:"tokens"`
}

// Token names the bearer of a token by the SHA-256 of the token.
type Token struct {
	Name   string `yaml:"name"`
	SHA256 string `yaml:"sha256"` // 64 hexadecimal digits
}

// Default is a router on loopback without nodes and models.
func Default() Config {
	local := func(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
	return Config{
		Name: "router", Policy: pool.PolicyHearth,
		Kubernetes: Kubernetes{Agents: Agents{Port: "report"}},
		Listen:     Listen{Ingress: local(identity.PortIngress), Admin: local(identity.PortRouterAdmin), Socket: filepath.Join(identity.RuntimeDir, "router.sock")},
		Limits: Limits{
			BodyBytes: proxy.DefaultMaxBodyBytes, BufferedBytes: proxy.DefaultMaxBufferedBytes,
			DialTimeout: units.Duration(2 * time.Second), DrainTimeout: units.Duration(30 * time.Second),
		},
		Metering: Metering{File: filepath.Join(identity.StateDir, "usage", "usage.jsonl"), MaxFileBytes: meter.DefaultMaxFileBytes},
	}
}

// Load reads a configuration file over Default and validates it.
func Load(path string) (Config, error) {
	cfg := Default()
	if err := configfile.Load(path, Kind, &cfg); err != nil {
		return Config{}, err
	}
	if err := cfg.Validate(); err != nil {
		return Config{}, fmt.Errorf("check %s: %w", path, err)
	}
	return cfg, nil
}

func (c *Config) pool() pool.Config {
	return pool.Config{Policy: c.Policy, Models: c.Models, Pools: c.Pools}
}

// Validate reports every field that is wrong and what would be right.
func (c *Config) Validate() error {
	var p configfile.Problems
	if c.Name == "" {
		p.Add("name", "is empty", "want a name such as router-1")
	}
	c.Listen.validate(&p, c.TLS.set(), c.IngressTLS.set())
	c.TLS.validate(&p, "tls", false)
	c.IngressTLS.validate(&p, "ingressTLS", true)
	if len(c.Metering.TrustedClients) > 0 && c.IngressTLS.set() && c.IngressTLS.CA == "" {
		p.Add("ingressTLS.ca", "is empty while metering.trustedClients is set, so no client can show who it is", "give the CA of the clients' certificates")
	}
	seen := map[string]bool{}
	for i, n := range c.Nodes {
		at := fmt.Sprintf("nodes[%d].address", i)
		_, _, err := net.SplitHostPort(n.Address)
		switch {
		case err != nil:
			p.Addf(at, "want host:port", "%q", n.Address)
		case seen[n.Address]:
			p.Addf(at, "want each node once", "%q stands twice", n.Address)
		case !identity.IsLoopback(n.Address) && !c.TLS.set() && !c.Listen.Insecure:
			p.Addf(at, "give tls, or say listen.insecure: true", "%q is not loopback and the router has no certificate", n.Address)
		}
		seen[n.Address] = true
	}
	c.validateKubernetes(&p)
	pools := c.pool()
	if err := pools.Validate(); err != nil {
		p.Add("models and pools", err.Error(), "")
	}
	c.Limits.validate(&p)
	c.Metering.validate(&p)
	return p.Err()
}

func (c *Config) validateKubernetes(p *configfile.Problems) {
	k := &c.Kubernetes
	if !k.Enabled {
		if k.Agents.Service != "" {
			p.Add("kubernetes.agents.service", "is set while kubernetes.enabled is false", "say kubernetes.enabled: true")
		}
		for i := range c.Pools {
			if c.Pools[i].Pods.Set() {
				p.Add(fmt.Sprintf("pools[%d].pods", i), "is set while kubernetes.enabled is false", "say kubernetes.enabled: true, which needs a restart")
			}
		}
		return
	}
	if k.Kubeconfig != "" && !filepath.IsAbs(k.Kubeconfig) {
		p.Addf("kubernetes.kubeconfig", "want an absolute path, or nothing for the pod's account", "%q", k.Kubeconfig)
	}
	if k.Agents.Service != "" {
		if k.Agents.Port == "" {
			p.Add("kubernetes.agents.port", "is empty", "want the Service's port of the report, such as report")
		}
		if !c.TLS.set() && !c.Listen.Insecure {
			p.Add("kubernetes.agents", "are not on loopback and the router has no certificate", "give tls, or say listen.insecure: true")
		}
	}
}

func (l *Listen) validate(p *configfile.Problems, identified, ingressTLS bool) {
	check := func(field, address string, covered bool, files string) {
		if _, _, err := net.SplitHostPort(address); err != nil {
			p.Addf(field, "want host:port, such as 127.0.0.1:7400", "%q", address)
			return
		}
		if !identity.IsLoopback(address) && !covered && !l.Insecure {
			p.Addf(field, "give "+files+", listen on loopback, or say listen.insecure: true", "%q is not loopback and has no certificates", address)
		}
	}
	check("listen.ingress", l.Ingress, ingressTLS, "ingressTLS")
	if l.Admin != "" {
		check("listen.admin", l.Admin, identified, "tls")
	}
	if l.Socket != "" && (!filepath.IsAbs(l.Socket) || len(l.Socket) > identity.MaxSocketPath) {
		p.Addf("listen.socket", fmt.Sprintf("want an absolute path of at most %d bytes, or nothing", identity.MaxSocketPath), "%q", l.Socket)
	}
}

func (t *TLS) validate(p *configfile.Problems, field string, anyone bool) {
	switch {
	case !t.set() || t.Cert != "" && t.Key != "" && (t.CA != "" || anyone):
	case anyone:
		p.Add(field, "is incomplete", "want cert and key, and ca where clients show certificates")
	default:
		p.Add(field, "is incomplete", "want cert, key and ca")
	}
}

func (l *Limits) validate(p *configfile.Problems) {
	if l.BodyBytes < units.KiB || l.BodyBytes > units.GiB {
		p.Addf("limits.bodyBytes", "want 1KiB to 1GiB", "%s", l.BodyBytes)
	}
	if l.BufferedBytes < l.BodyBytes {
		p.Addf("limits.bufferedBytes", "want at least limits.bodyBytes", "%s", l.BufferedBytes)
	}
	for field, d := range map[string]units.Duration{
		"limits.headerTimeout": l.HeaderTimeout, "limits.dialTimeout": l.DialTimeout, "limits.drainTimeout": l.DrainTimeout,
	} {
		if d < 0 {
			p.Addf(field, "want 0 or more", "%s", d)
		}
	}
}

func (m *Metering) validate(p *configfile.Problems) {
	if m.File != "" && m.MaxFileBytes < units.MiB {
		p.Addf("metering.maxFileBytes", "want at least 1MiB", "%s", m.MaxFileBytes)
	}
	if m.ConsumerHeader != "" && len(m.TrustedClients) == 0 {
		p.Add("metering.trustedClients", "is empty while consumerHeader is set, so the header is never believed",
			"list the certificate names whose header counts")
	}
	for i, t := range m.Tokens {
		if raw, err := hex.DecodeString(t.SHA256); t.Name == "" || err != nil || len(raw) != 32 {
			p.Add(fmt.Sprintf("metering.tokens[%d]", i), "wants a name and a sha256 of 64 hexadecimal digits",
				"printf %s TOKEN | sha256sum gives it")
		}
	}
}

func (m *Metering) consumers() (*meter.Consumers, error) {
	tokens := make([]meter.Token, 0, len(m.Tokens))
	for _, t := range m.Tokens {
		tokens = append(tokens, meter.Token(t))
	}
	return meter.NewConsumers(m.ConsumerHeader, m.TrustedClients, tokens)
}
