package nodeagent_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/units"
)

// peerConfig is that of a node whose tenants chat, which shares, and own, which
// does not, have a socket each.
func peerConfig(t *testing.T, ca *identity.CA, node string) nodeagent.Config {
	t.Helper()
	c := kvConfig(t)
	dir := filepath.Dir(c.Listen.Socket)
	c.Node, c.Listen.KVPeer = node, "127.0.0.1:0"
	pair, err := ca.Issue(identity.RoleAgent, node, identity.IssueOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c.TLS = nodeagent.TLS{Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem"), CA: filepath.Join(dir, "ca.pem")}
	if err := errors.Join(identity.WritePair(c.TLS.Cert, c.TLS.Key, pair), os.WriteFile(c.TLS.CA, ca.Cert(), 0o600)); err != nil {
		t.Fatal(err)
	}
	c.KV.Tenants[0].Peers = true
	c.KV.Tenants = append(c.KV.Tenants, nodeagent.KVTenant{Name: "own", Memory: units.MiB, Socket: filepath.Join(dir, "own.sock")})
	return c
}

// says sends a command to a socket, and gives the first line of the answer and,
// where that announces one, the next.
func says(t *testing.T, socket, command string) string {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := fmt.Fprintf(conn, "%s\r\n", command); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(conn)
	line, err := in.ReadString('\n')
	if err == nil && strings.HasPrefix(line, "$") && line != "$-1\r\n" {
		line, err = in.ReadString('\n')
	}
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(line)
}

func TestATenantThatSharesHasItsBlocksOnOtherNodes(t *testing.T) {
	t.Parallel()
	ca, err := identity.NewCA(identity.Domain, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	giving := peerConfig(t, ca, "node-a")
	giver := run(t, giving)
	taking := peerConfig(t, ca, "node-b")
	// A list for all nodes names this one, too, and says its zone.
	taking.KV.Peers = []nodeagent.KVPeer{
		{Name: "node-a", Addr: giver.Listeners()["kvPeer"], Zone: "z1"},
		{Name: "node-b", Addr: "127.0.0.1:1", Zone: "z1"},
		{Name: "node-c", Addr: "127.0.0.1:2", Zone: "z2"},
	}
	var dialed atomic.Int64
	taker := runWith(t, taking, nodeagent.Options{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		if address != giver.Listeners()["kvPeer"] {
			t.Errorf("dialed %s", address)
		}
		dialed.Add(1)
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}})
	of := func(c nodeagent.Config, tenant string) string {
		return filepath.Join(filepath.Dir(c.Listen.Socket), tenant+".sock")
	}
	for _, tenant := range []string{"chat", "own"} {
		if got := says(t, of(giving, tenant), "SET key value-of-"+tenant); got != "+OK" {
			t.Fatal(got)
		}
	}
	(&fabric{t: t}).until("the block of the other node", func() bool { return says(t, of(taking, "chat"), "GET key") == "value-of-chat" })
	if got := says(t, of(taking, "chat"), "EXISTS key"); got != ":1" {
		t.Errorf("to ask whether it is there gave %s", got)
	}
	if got := says(t, of(taking, "own"), "GET key"); got != "$-1" {
		t.Errorf("a tenant that does not share got %s", got)
	}
	if dialed.Load() == 0 {
		t.Error("the injected DialContext was not used")
	}
	_, text := get(t, metricsURL(taker))
	for _, want := range []string{
		`hearth_kv_peer_blocks_total{peer="node-a"} 1`, `hearth_kv_peer_up{peer="node-a"} 1`, `hearth_kv_peer_up{peer="node-c"} 0`,
		`hearth_kv_peer_bytes_total{class="kv",direction="in",side="caller"}`, `hearth_kv_peer_server_connections 0`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the taker's metrics lack %s", want)
		}
	}
	if _, text := get(t, metricsURL(giver)); !strings.Contains(text, `hearth_kv_peer_server_blocks_total{result="given"} 1`) {
		t.Error("the giver's metrics lack the block")
	}
	// What people drop does not come back from the other node at once.
	for _, request := range []admin.KVDropRequest{{Tenant: "chat", Keys: []string{"key"}}, {Tenant: "chat", All: true}} {
		if _, err := taker.client.KVDrop(t.Context(), request); err != nil {
			t.Fatal(err)
		}
		if got := says(t, of(taking, "chat"), "GET key"); got != "$-1" {
			t.Errorf("what was dropped is %s", got)
		}
	}
}

// metricsURL is where an agent on loopback tells its metrics.
func metricsURL(r running) string { return "http://" + r.Listeners()["admin"] + "/metrics" }

func TestThePeersOfTheKVStoreAreValidated(t *testing.T) {
	t.Parallel()
	secured := nodeagent.TLS{Cert: "/c", Key: "/k", CA: "/a"}
	one := nodeagent.KVPeer{Name: "b", Addr: "10.0.0.2:7415"}
	for name, c := range map[string]struct {
		change func(*nodeagent.Config)
		want   string
	}{
		"plain text off loopback": {func(c *nodeagent.Config) { c.Listen.KVPeer, c.Listen.Insecure = "0.0.0.0:7415", true }, "listen.kvPeer: \"0.0.0.0:7415\" is not loopback"},
		"no port":                 {func(c *nodeagent.Config) { c.Listen.KVPeer = "127.0.0.1" }, "listen.kvPeer: is"},
		"a peer in plain text":    {func(c *nodeagent.Config) { c.KV.Peers = []nodeagent.KVPeer{one} }, "kv.peers[0].addr: \"10.0.0.2:7415\" is not loopback"},
		"a peer twice": {func(c *nodeagent.Config) {
			c.TLS, c.KV.Peers = secured, []nodeagent.KVPeer{one, {Name: "b", Addr: "10.0.0.3:1"}}
		}, "kv.peers[1].name"},
		"an address twice": {func(c *nodeagent.Config) {
			c.TLS, c.KV.Peers = secured, []nodeagent.KVPeer{one, {Name: "c", Addr: one.Addr}}
		}, "kv.peers[1].addr"},
		"a peer without a name": {func(c *nodeagent.Config) { c.TLS, c.KV.Peers = secured, []nodeagent.KVPeer{{Addr: one.Addr}} }, "kv.peers[0].name"},
		"a peer without a port": {func(c *nodeagent.Config) {
			c.TLS, c.KV.Peers = secured, []nodeagent.KVPeer{{Name: "b", Addr: "10.0.0.2"}}
		}, "kv.peers[0].addr"},
		"too many": {func(c *nodeagent.Config) {
			c.TLS = secured
			for i := range 65 {
				c.KV.Peers = append(c.KV.Peers, nodeagent.KVPeer{Name: fmt.Sprint(i), Addr: fmt.Sprintf("10.0.0.2:%d", i+1)})
			}
		}, "kv.peers: has 65 entries"},
		"unknown zones":  {func(c *nodeagent.Config) { c.KV.PeerZones = "near" }, "kv.peerZones: is"},
		"a rate below 0": {func(c *nodeagent.Config) { c.KV.PeerRate = -1 }, "kv.peerRate: is"},
		"what can be, all": {func(c *nodeagent.Config) {
			c.TLS, c.Listen.KVPeer, c.KV.Peers, c.KV.PeerZones = secured, "0.0.0.0:7415", []nodeagent.KVPeer{one}, "all"
		}, ""},
	} {
		config := nodeagent.Default()
		config.Node = "node-a"
		c.change(&config)
		err := config.Validate()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s gave %v, want %q", name, err, c.want)
		}
	}
}
