package nodeagent

import (
	"context"
	"fmt"
	"net"
	"slices"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/peer"
	"github.com/hearth-dev/hearth/kvtier/resp"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache"
)

// Whom a node asks for blocks.
const (
	PeersOwn = "own" // peers of its zone
	PeersAll = "all" // and then the others
)

// validatePeers says what is wrong with the blocks between nodes.
func (k KV) validatePeers(v *configfile.Problems, listen string, tls TLS) {
	if listen != "" {
		_, port, err := net.SplitHostPort(listen)
		v.Check(err == nil && port != "", "listen.kvPeer", "is %q, want host:port", listen)
		v.Check(identity.IsLoopback(listen) || tls.set(), "listen.kvPeer", "%q is not loopback: want tls.cert, tls.key and tls.ca", listen)
	}
	v.Check(len(k.Peers) <= peer.MaxPeers, "kv.peers", "has %d entries, want at most %d", len(k.Peers), peer.MaxPeers)
	names, addrs := map[string]bool{}, map[string]bool{}
	for i, p := range k.Peers {
		field := fmt.Sprintf("kv.peers[%d]", i)
		v.Check(p.Name != "" && len(p.Name) <= 253 && !names[p.Name], field+".name", "is %q, want a node's name that no other peer has", p.Name)
		host, port, err := net.SplitHostPort(p.Addr)
		v.Check(err == nil && host != "" && port != "" && !addrs[p.Addr], field+".addr", "is %q, want host:port that no other peer has", p.Addr)
		v.Check(err != nil || identity.IsLoopback(p.Addr) || tls.set(), field+".addr", "%q is not loopback: want tls.cert, tls.key and tls.ca", p.Addr)
		v.Check(len(p.Zone) <= 253, field+".zone", "has %d bytes, want at most 253", len(p.Zone))
		names[p.Name], addrs[p.Addr] = true, true
	}
	v.Check(slices.Contains([]string{PeersOwn, PeersAll}, k.PeerZones), "kv.peerZones", "is %q, want %s or %s", k.PeerZones, PeersOwn, PeersAll)
	v.Check(k.PeerRate >= 0, "kv.peerRate", "is %s, want a rate such as 1GB/s, or unlimited", k.PeerRate)
}

// peersOf are the other nodes of the list, and the zone of this one: its own
// entry, if it has one, says where it is, too.
func (k KV) peersOf(node string) (list []peer.Peer, zone string) {
	zone = k.Zone
	for _, p := range k.Peers {
		if p.Name == node {
			zone = or(k.Zone, p.Zone)
			continue
		}
		list = append(list, peer.Peer{Name: p.Name, Addr: p.Addr, Zone: p.Zone})
	}
	return list, zone
}

// kvPeering is this node's part in the blocks between nodes; the zero value has
// none.
type kvPeering struct {
	peers  *peer.Peers  // nil without other nodes
	server *peer.Server // nil without listen.kvPeer
	sent   *weightcache.Limiter
}

// newKVPeering makes it as the configuration says. What comes passes limiter, as
// pulls do, and what goes one of its own.
func (a *Agent) newKVPeering(limiter *weightcache.Limiter) (p kvPeering, err error) {
	config := a.config
	if !config.KV.set() {
		return p, nil
	}
	if list, zone := config.KV.peersOf(config.Node); len(list) > 0 {
		opts := peer.Options{
			List: list, Zone: zone, AllZones: config.KV.PeerZones == PeersAll, DialContext: a.dial(traffic.KV), Limiter: limiter, Log: a.log,
		}
		if config.TLS.set() {
			if opts.TLS, err = identity.ClientTLS(a.certificateFiles(), identity.RoleAgent); err != nil {
				return p, fmt.Errorf("call KV peers: %w", err)
			}
		}
		p.peers = peer.New(opts)
	}
	if config.Listen.KVPeer != "" {
		p.sent = weightcache.NewLimiter(config.KV.PeerRate)
		opts := peer.ServerOptions{Limiter: p.sent, Log: a.log}
		if config.TLS.set() {
			if opts.TLS, err = identity.ServerTLS(a.certificateFiles(), identity.RoleAgent); err != nil {
				return p, fmt.Errorf("serve KV peers: %w", err)
			}
		}
		p.server = peer.NewServer(opts)
	}
	return p, nil
}

// join gives the blocks of a tenant: those of other nodes, too, where it shares.
func (p kvPeering) join(n *kvtier.Namespace, share bool) resp.Store {
	if share && p.server != nil {
		p.server.Share(n.Tenant())
	}
	if share && p.peers != nil {
		return p.peers.Blocks(n)
	}
	return n
}

// leave ends what join began for a tenant's other nodes.
func (p kvPeering) leave(t *kvtier.Tenant) {
	if p.server != nil {
		p.server.Unshare(t)
	}
	if p.peers != nil {
		p.peers.Leave(t)
	}
}

// dropped says that people end blocks of a tenant, those of keys or, without any,
// all: other nodes are not to give them back at once.
func (p kvPeering) dropped(ctx context.Context, t *kvtier.Tenant, keys ...block.Key) error {
	if p.peers == nil {
		return nil
	}
	n, err := t.Namespace(ctx, block.Identity{Format: resp.Format, Hash: resp.HashName})
	switch {
	case err != nil:
		return fmt.Errorf("drop blocks that KV peers may have: %w", err)
	case len(keys) == 0:
		p.peers.DroppedAll(n.ID())
	default:
		p.peers.Dropped(n.ID(), keys...)
	}
	return nil
}

func (p kvPeering) setRate(rate units.Rate) {
	if p.sent != nil {
		p.sent.SetRate(rate)
	}
}

// run gets blocks of other nodes, until ctx ends.
func (p kvPeering) run(ctx context.Context) error {
	if p.peers == nil {
		return nil
	}
	return p.peers.Run(ctx)
}

// kvPeerServer gives blocks to other nodes.
func (a *Agent) kvPeerServer(ctx context.Context, listener net.Listener) server {
	a.bound("kvPeer", listener.Addr())
	serving, end := context.WithCancel(context.WithoutCancel(ctx))
	return server{
		serve: func() error {
			if err := a.space.peering.server.Serve(serving, listener); err != nil {
				return fmt.Errorf("serve kvPeer: %w", err)
			}
			return nil
		},
		stop: func(context.Context) { end(); _ = listener.Close() },
	}
}
