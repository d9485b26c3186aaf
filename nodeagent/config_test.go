package nodeagent_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/units"
)

const example = `apiVersion: hearth.dev/v1alpha1
kind: AgentConfig
node: node-a
listen: {mirror: "0.0.0.0:7410", insecure: true}
weights: {dir: /var/lib/w, budget: 2TiB, rate: 500MB/s, streams: 16}
sources:
  - {name: hub, type: hub, url: "https://hub.example", tokenFile: /etc/hearth/token, refs: ["org/*"]}
  - {name: nfs, type: dir, root: /models, refs: ["/models/**"]}
  - {name: next, type: hub, url: "https://node-b:7410", refs: ["org/*"], peer: true}
models: ["hub://org/name@main"]
devices: [{id: gpu-0, product: NVIDIA H200}]
endpoints:
  - {name: e0, url: "http://127.0.0.1:8000", engine: vllm, pool: chat, accelerator: H200, devices: [gpu-0]}
health: {allowInject: true}
`

func TestAConfigurationFileIsReadOverTheDefaultsAndBack(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "agent.yaml")
	if err := os.WriteFile(path, []byte(example), 0o600); err != nil {
		t.Fatal(err)
	}
	c := nodeagent.Default()
	if err := configfile.Load(path, nodeagent.Kind, &c); err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	if c.Weights.Budget != 2*units.TiB || c.Weights.SegmentSize != 16*units.MiB || c.Listen.Report != "127.0.0.1:7411" {
		t.Errorf("read %+v", c)
	}
	if !c.FromPeer("next") || c.FromPeer("hub") || c.FromPeer("nfs") || c.FromPeer("none") {
		t.Errorf("the sources are %+v: one of them is a peer", c.Sources)
	}
	text, err := configfile.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	again := nodeagent.Default()
	head := "apiVersion: hearth.dev/v1alpha1\nkind: AgentConfig\n"
	if err := os.WriteFile(path, append([]byte(head), text...), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := configfile.Load(path, nodeagent.Kind, &again); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(c, again, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("written and read again (-first +second):\n%s", diff)
	}
}

func TestValidateNamesTheFieldAndWhatWouldBeRight(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*nodeagent.Config)
		want   string
	}{
		"no node":         {func(c *nodeagent.Config) { c.Node = "" }, "node: is"},
		"an unknown role": {func(c *nodeagent.Config) { c.Roles = []string{"data", "worker"} }, "roles: are"},
		"no role":         {func(c *nodeagent.Config) { c.Roles = nil }, "roles: are"},
		"a role twice":    {func(c *nodeagent.Config) { c.Roles = []string{"data", "data"} }, "roles: are"},
		"a role without a way to the other": {func(c *nodeagent.Config) {
			c.Roles, c.Listen.DataSocket = []string{"data"}, ""
		}, "listen.dataSocket: is empty"},
		"one socket for two":        {func(c *nodeagent.Config) { c.Listen.DataSocket = c.Listen.Socket }, "listen.dataSocket: is"},
		"a relative KV dir":         {func(c *nodeagent.Config) { c.KV.Dir = "kv" }, "kv.dir"},
		"more for one than for all": {func(c *nodeagent.Config) { c.KV.NamespaceNVMe = 1 }, "kv.namespaceNVMe: is 1B, want at most kv.nvme, 0B"},
		"open plain text":           {func(c *nodeagent.Config) { c.Listen.Mirror = "0.0.0.0:7410" }, "listen.insecure: true"},
		"a host name":               {func(c *nodeagent.Config) { c.Listen.Admin = "node-a:7412" }, "listen.admin"},
		"no port":                   {func(c *nodeagent.Config) { c.Listen.Report = "127.0.0.1" }, "listen.report"},
		"a long socket path":        {func(c *nodeagent.Config) { c.Listen.Socket = "/" + strings.Repeat("x", 120) }, "listen.socket"},
		"half a tls":                {func(c *nodeagent.Config) { c.TLS.Cert = "/c" }, "tls: wants all"},
		"a small segment":           {func(c *nodeagent.Config) { c.Weights.SegmentSize = 1 }, "weights.segmentSize: is 1B, want 64KiB to 64MiB"},
		"no streams":                {func(c *nodeagent.Config) { c.Weights.Streams = 0 }, "weights.streams"},
		"a relative dir":            {func(c *nodeagent.Config) { c.Weights.Dir = "w" }, "weights.dir"},
		"a source without refs":     {func(c *nodeagent.Config) { c.Sources = []nodeagent.Source{{Name: "a", Type: "dir", Root: "/m"}} }, "sources[0].refs: is empty"},
		"an unknown source": {func(c *nodeagent.Config) {
			c.Sources = []nodeagent.Source{{Name: "a", Type: "ftp", Refs: []string{"*"}}}
		}, "sources[0].type"},
		"a hub without url": {func(c *nodeagent.Config) {
			c.Sources = []nodeagent.Source{{Name: "a", Type: "hub", Refs: []string{"*"}}}
		}, "sources[0].url"},
		"a hub with a password": {func(c *nodeagent.Config) {
			c.Sources = []nodeagent.Source{{Name: "a", Type: "hub", URL: "https://u:secret@hub.example", Refs: []string{"*"}}}
		}, "want a token in tokenFile"},
		"a folder of a peer": {func(c *nodeagent.Config) {
			c.Sources = []nodeagent.Source{{Name: "a", Type: "dir", Root: "/m", Refs: []string{"*"}, Peer: true}}
		}, "sources[0].peer: is for type hub only"},
		"a bad ref":      {func(c *nodeagent.Config) { c.Models = []string{"x"} }, "models[0]"},
		"a device twice": {func(c *nodeagent.Config) { c.Devices = []nodeagent.Device{{ID: "a"}, {ID: "a"}} }, "devices[1].id"},
		"an unknown engine": {func(c *nodeagent.Config) {
			c.Endpoints = []nodeagent.Endpoint{{Name: "e", URL: "http://h:1", Engine: "x", Pool: "p"}}
		}, "endpoints[0].engine"},
		"an unknown device": {func(c *nodeagent.Config) {
			c.Endpoints = []nodeagent.Endpoint{{Name: "e", URL: "http://h:1", Engine: "sim", Pool: "p", Devices: []string{"gpu-9"}}}
		}, "endpoints[0].devices"},
		"an empty served name": {func(c *nodeagent.Config) {
			c.Endpoints = []nodeagent.Endpoint{{Name: "e", URL: "http://h:1", Engine: "sim", Pool: "p", Models: []string{""}}}
		}, "endpoints[0].models"},
		"a mark that no mark has": {func(c *nodeagent.Config) { c.Network.Mark = 1<<32 - 5 }, "network.mark: is 4294967291, want at most 4294967290"},
		"a relative state dir":    {func(c *nodeagent.Config) { c.Health.StateDir = "h" }, "health.stateDir"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := nodeagent.Default()
			config.Node = "node-a"
			if err := config.Validate(); err != nil {
				t.Fatalf("the defaults are refused: %v", err)
			}
			c.change(&config)
			if err := config.Validate(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("gave %v, want %q", err, c.want)
			} else if strings.Contains(err.Error(), "secret") || !errors.Is(err, configfile.ErrInvalid) {
				t.Errorf("gave %v", err)
			}
		})
	}
}
