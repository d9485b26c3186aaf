package nodeagent

import (
	"fmt"
	"net"
	"net/url"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/dradriver/device"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/endpoints"
	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// Kind is the kind of an agent's configuration file.
const Kind = "AgentConfig"

// Roles of an agent.
const (
	RoleControl = "control" // endpoints, health, report, claims
	RoleData    = "data"    // weights, the mirror and KV space
)

// Types of sources.
const (
	SourceHub = "hub"
	SourceDir = "dir"
)

// Config is an agent's configuration, read by configfile over Default.
type Config struct {
	// Node is the node's name, unique among the nodes a router knows.
	Node string `yaml:"node"`
	// Roles are RoleControl, RoleData or both. A role that runs alone finds the
	// other, in another process of the node, by Listen.DataSocket.
	Roles     []string   `yaml:"roles"`
	Listen    Listen     `yaml:"listen"`
	TLS       TLS        `yaml:"tls"`
	Weights   Weights    `yaml:"weights"`
	KV        KV         `yaml:"kv"`
	Access    Access     `yaml:"access"`
	Network   Network    `yaml:"network"`
	Sources   []Source   `yaml:"sources"`
	Models    []string   `yaml:"models"` // refs that are kept Ready
	Endpoints []Endpoint `yaml:"endpoints"`
	Devices   []Device   `yaml:"devices"`
	Health    Health     `yaml:"health"`
	Inventory Inventory  `yaml:"inventory"`
	// Kubernetes is off unless said: a plain machine has no side of it.
	Kubernetes Kubernetes `yaml:"kubernetes"`
}

// Listen holds the addresses the agent serves on, "host:port" each; empty
// turns a TCP listener off.
type Listen struct {
	Mirror string `yaml:"mirror"`
	Report string `yaml:"report"`
	Admin  string `yaml:"admin"`
	// RESP is where clients of kv.tenants come, which give a password. Nothing
	// listens there while there is no such tenant.
	RESP string `yaml:"resp"`
	// KVPeer is where other nodes get blocks of tenants that share them. Off
	// loopback it wants certificates, whatever Insecure says.
	KVPeer string `yaml:"kvPeer"`
	Socket string `yaml:"socket"` // path of the unix socket; empty turns it off
	// DataSocket is where the data role serves the control role, and DataAdmin
	// its own admin listener, where the two run apart.
	DataSocket string `yaml:"dataSocket"`
	DataAdmin  string `yaml:"dataAdmin"`
	// Insecure allows plain text on addresses that are not loopback.
	Insecure bool `yaml:"insecure"`
}

// TLS holds PEM files. With them the report is always mTLS; mirror and admin
// are TLS where their address is not loopback.
type TLS struct {
	Cert string `yaml:"cert"`
	Key  string `yaml:"key"`
	CA   string `yaml:"ca"`
}

func (t TLS) set() bool { return t != TLS{} }

// Weights configures the weight cache.
type Weights struct {
	Dir      string      `yaml:"dir"`
	ViewsDir string      `yaml:"viewsDir"` // on the file system of dir; empty puts it beside dir
	Budget   units.Bytes `yaml:"budget"`   // 0: what the drive has
	KeepFree units.Bytes `yaml:"keepFree"` // left free on the drive
	Rate     units.Rate  `yaml:"rate"`     // of all pulls together
	// SegmentSize is the length of one ranged request.
	SegmentSize  units.Bytes    `yaml:"segmentSize"`
	Streams      int            `yaml:"streams"` // parallel requests of all pulls
	StallTimeout units.Duration `yaml:"stallTimeout"`
	ScrubEvery   units.Duration `yaml:"scrubEvery"` // 0 never
	ScrubRate    units.Rate     `yaml:"scrubRate"`
}

// Source is an origin of artifacts and the refs it may serve.
type Source struct {
	Name      string   `yaml:"name"`
	Type      string   `yaml:"type"`      // SourceHub or SourceDir
	URL       string   `yaml:"url"`       // hub: base URL of the hub or mirror
	Root      string   `yaml:"root"`      // dir: absolute folder
	TokenFile string   `yaml:"tokenFile"` // hub: file with a bearer token, read per request
	Refs      []string `yaml:"refs"`      // patterns on "org/name" or the path
	// Peer says of a hub that it is the mirror of another node: what comes from it
	// is told as from a peer, and not from the origin.
	Peer bool `yaml:"peer"`
}

// Endpoint is a local engine.
type Endpoint struct {
	Name        string   `yaml:"name"`
	URL         string   `yaml:"url"`
	Engine      string   `yaml:"engine"`
	Pool        string   `yaml:"pool"`
	Accelerator string   `yaml:"accelerator"`
	Devices     []string `yaml:"devices"`
	Ref         string   `yaml:"ref"`
	Models      []string `yaml:"models"` // served names; empty asks the engine
}

// Device is a simulated device.
type Device struct {
	ID      string `yaml:"id"`
	Product string `yaml:"product"`
}

// Health configures the health of devices.
type Health struct {
	XIDTable    string `yaml:"xidTable"`    // file whose rows replace built-in ones
	AllowInject bool   `yaml:"allowInject"` // takes facts from the local socket
	StateDir    string `yaml:"stateDir"`
}

// Default is the configuration of an agent without sources and engines.
func Default() Config {
	local := func(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }
	return Config{
		Roles: []string{RoleControl, RoleData},
		Listen: Listen{
			Mirror: local(identity.PortMirror), Report: local(identity.PortReport), Admin: local(identity.PortAgentAdmin),
			RESP:       local(identity.PortRESP),
			Socket:     identity.RuntimeDir + "/agent.sock",
			DataSocket: identity.RuntimeDir + "/data.sock", DataAdmin: local(identity.PortDataAdmin),
		},
		Weights: Weights{
			Dir: identity.StateDir + "/weights", SegmentSize: 16 * units.MiB, Streams: 8,
			StallTimeout: units.Duration(30 * time.Second), ScrubEvery: units.Duration(7 * 24 * time.Hour),
			ScrubRate: units.Rate(64 * units.MiB), KeepFree: units.GiB,
		},
		KV:     KV{Dir: identity.StateDir + "/kv", DriveWritesPerDay: 1, Admit: AdmitUsed, VerifyEvery: 64, PeerZones: PeersOwn},
		Access: defaultAccess(), Network: defaultNetwork(),
		Health: Health{StateDir: identity.StateDir + "/health"},

		Kubernetes: defaultKubernetes(),
	}
}

// Validate names every field that cannot be, and what would be right.
func (c Config) Validate() error {
	v := &configfile.Problems{}
	v.Check(c.Node != "" && len(c.Node) <= 253 && !strings.ContainsAny(c.Node, "/ \t\n"), "node", "is %q, want this node's name (or --node NAME)", c.Node)
	roles := slices.Compact(slices.Sorted(slices.Values(c.Roles)))
	known := func(role string) bool { return role == RoleControl || role == RoleData }
	v.Check(len(roles) > 0 && len(roles) == len(c.Roles) && !slices.ContainsFunc(roles, func(r string) bool { return !known(r) }),
		"roles", "are %q, want [control, data], or one of them where the other runs in another process", c.Roles)
	v.Check(!c.apart() || c.Listen.DataSocket != "", "listen.dataSocket", "is empty, want the socket between the roles where they run apart")
	c.Listen.validate(v, c.TLS)
	c.KV.validate(v)
	c.KV.validateRESP(v, c.Listen)
	c.KV.validatePeers(v, c.Listen.KVPeer, c.TLS)
	if c.TLS.set() {
		v.Check(c.TLS.Cert != "" && c.TLS.Key != "" && c.TLS.CA != "", "tls", "wants all of cert, key and ca, or none")
	}
	c.Weights.validate(v)
	c.Access.validate(v)
	c.Network.validate(v)
	names := map[string]bool{}
	for i, s := range c.Sources {
		field := fmt.Sprintf("sources[%d]", i)
		v.Check(s.Name != "" && !names[s.Name], field+".name", "is %q, want a name that no other source has", s.Name)
		names[s.Name] = true
		s.validate(v, field)
	}
	for i, ref := range c.Models {
		_, err := artifact.ParseRef(ref)
		v.Check(err == nil, fmt.Sprintf("models[%d]", i), "is not a ref: %v", err)
	}
	ids := map[string]bool{}
	for i, d := range c.Devices {
		v.Check(d.ID != "" && len(d.ID) <= 253 && !ids[d.ID], fmt.Sprintf("devices[%d].id", i), "is %q, want an id that no other device has", d.ID)
		ids[d.ID] = true
	}
	v.Check(len(c.Devices) <= 256, "devices", "has %d entries, want at most 256", len(c.Devices))
	c.validateEndpoints(v, ids)
	v.Check(c.Health.StateDir == "" || filepath.IsAbs(c.Health.StateDir), "health.stateDir", "is %q, want an absolute path", c.Health.StateDir)
	v.Check(c.Health.XIDTable == "" || filepath.IsAbs(c.Health.XIDTable), "health.xidTable", "is %q, want an absolute path", c.Health.XIDTable)
	c.Inventory.validate(v)
	c.Kubernetes.validate(v)
	return v.Err()
}

func (l Listen) validate(v *configfile.Problems, tls TLS) {
	for _, a := range []struct{ field, addr string }{
		{"listen.mirror", l.Mirror}, {"listen.report", l.Report}, {"listen.admin", l.Admin}, {"listen.dataAdmin", l.DataAdmin}, {"listen.resp", l.RESP},
	} {
		if a.addr == "" {
			continue
		}
		_, port, err := net.SplitHostPort(a.addr)
		if err != nil || port == "" {
			v.Check(false, a.field, "is %q, want host:port", a.addr)
			continue
		}
		v.Check(identity.IsLoopback(a.addr) || tls.set() || l.Insecure, a.field, "%q is not loopback: want tls.cert, tls.key and tls.ca, or listen.insecure: true", a.addr)
	}
	for _, s := range []struct{ field, path string }{{"listen.socket", l.Socket}, {"listen.dataSocket", l.DataSocket}} {
		if s.path != "" {
			v.Check(filepath.IsAbs(s.path) && len(s.path) <= identity.MaxSocketPath, s.field, "is %q, want an absolute path of at most %d bytes", s.path, identity.MaxSocketPath)
		}
	}
	v.Check(l.Socket == "" || l.Socket != l.DataSocket, "listen.dataSocket", "is %q, which is listen.socket: want another path", l.DataSocket)
}

func (w Weights) validate(v *configfile.Problems) {
	v.Check(filepath.IsAbs(w.Dir), "weights.dir", "is %q, want an absolute path", w.Dir)
	v.Check(w.ViewsDir == "" || filepath.IsAbs(w.ViewsDir), "weights.viewsDir", "is %q, want an absolute path", w.ViewsDir)
	v.Check(w.SegmentSize >= 64*units.KiB && w.SegmentSize <= 64*units.MiB, "weights.segmentSize", "is %s, want 64KiB to 64MiB", w.SegmentSize)
	v.Check(w.Streams >= 1 && w.Streams <= 64, "weights.streams", "is %d, want 1 to 64", w.Streams)
	v.Check(w.StallTimeout > 0, "weights.stallTimeout", "is %s, want a positive duration such as 30s", w.StallTimeout)
	v.Check(w.ScrubEvery >= 0, "weights.scrubEvery", "is %s, want a duration such as 168h, or 0 for never", w.ScrubEvery)
}

func (s Source) validate(v *configfile.Problems, field string) {
	switch s.Type {
	case SourceHub:
		u, err := url.Parse(s.URL)
		v.Check(err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "", field+".url", "is no base URL of a hub or mirror, such as https://hub.example")
		// Shown in logs and at /debug/config, so it may hold no secret and an error may not repeat one.
		v.Check(err != nil || u.User == nil, field+".url", "holds a user or password, want a token in tokenFile")
		v.Check(s.Root == "", field+".root", "is for type dir only")
		v.Check(s.TokenFile == "" || filepath.IsAbs(s.TokenFile), field+".tokenFile", "is %q, want an absolute path", s.TokenFile)
	case SourceDir:
		v.Check(filepath.IsAbs(s.Root), field+".root", "is %q, want an absolute folder", s.Root)
		v.Check(s.URL == "" && s.TokenFile == "", field, "of type dir takes neither url nor tokenFile")
		v.Check(!s.Peer, field+".peer", "is for type hub only")
	default:
		v.Check(false, field+".type", "is %q, want hub or dir", s.Type)
	}
	v.Check(len(s.Refs) > 0, field+".refs", `is empty, want patterns such as "org/*": nothing is allowed unsaid`)
	for i, pattern := range s.Refs {
		_, err := path.Match(strings.TrimSuffix(pattern, "/**"), "")
		v.Check(err == nil && pattern != "", fmt.Sprintf("%s.refs[%d]", field, i), "is %q, want a pattern such as org/name or org/*", pattern)
	}
}

// FromPeer reports whether a source, by its name, is the mirror of another node.
func (c Config) FromPeer(source string) bool {
	return slices.ContainsFunc(c.Sources, func(s Source) bool { return s.Name == source && s.Peer })
}

func (c Config) validateEndpoints(v *configfile.Problems, devices map[string]bool) {
	names := map[string]bool{}
	v.Check(len(c.Endpoints) <= endpoints.MaxEndpoints, "endpoints", "has %d entries, want at most %d", len(c.Endpoints), endpoints.MaxEndpoints)
	for i, e := range c.Endpoints {
		field := fmt.Sprintf("endpoints[%d]", i)
		v.Check(e.Name != "" && len(e.Name) <= 253 && !strings.Contains(e.Name, "/") && !names[e.Name], field+".name", "is %q, want a name without / that no other endpoint has", e.Name)
		names[e.Name] = true
		v.Check(endpoints.CheckURL(e.URL) == nil, field+".url", "is %q, want http://host:port", e.URL)
		v.Check(slices.Contains(endpoints.Engines, e.Engine), field+".engine", "is %q, want one of %s", e.Engine, strings.Join(endpoints.Engines, ", "))
		v.Check(e.Pool != "", field+".pool", "is empty, want the router's name of the pool")
		v.Check(len(e.Devices) <= report.MaxRepeated, field+".devices", "has %d entries, want at most %d", len(e.Devices), report.MaxRepeated)
		v.Check(len(e.Models) <= report.MaxRepeated && !slices.Contains(e.Models, ""), field+".models", "wants at most %d names, none empty", report.MaxRepeated)
		for _, id := range e.Devices {
			// Those of an inventory are known once its file is read.
			v.Check(devices[id] || c.Inventory.Sim != "", field+".devices", "names %q, which is not under devices", id)
		}
		if e.Ref != "" {
			_, err := artifact.ParseRef(e.Ref)
			v.Check(err == nil, field+".ref", "is not a ref: %v", err)
		}
	}
}

func (c Config) endpoints() []endpoints.Endpoint {
	list := make([]endpoints.Endpoint, 0, len(c.Endpoints))
	for _, e := range c.Endpoints {
		ref := e.Ref
		if parsed, err := artifact.ParseRef(ref); err == nil {
			ref = parsed.String()
		}
		list = append(list, endpoints.Endpoint{
			Name: e.Name, URL: strings.TrimSuffix(e.URL, "/"), Engine: e.Engine, Pool: e.Pool,
			Accelerator: e.Accelerator, Devices: e.Devices, Ref: ref, Models: e.Models,
		})
	}
	return list
}

func (c Config) devices() []device.Device {
	list := make([]device.Device, 0, len(c.Devices))
	for _, d := range c.Devices {
		list = append(list, device.Device{ID: device.ID(d.ID), Product: d.Product})
	}
	return list
}
