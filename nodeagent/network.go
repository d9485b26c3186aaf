package nodeagent

import (
	"context"
	"net"
	"syscall"

	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/nodeagent/netattr"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
	"github.com/hearth-dev/hearth/weightcache"
	"github.com/hearth-dev/hearth/weightcache/source"
)

// network is who moves bytes over the node's network, and the records of
// scale-outs, of the role data.
type network struct {
	collector *netattr.Collector
	scaleouts *scaleout.Book
	pods      podSeries
	fromPeer  func(source string) bool // whether it is another node
}

// buildNetwork loads what the kernel allows, before the first socket of the data
// role is made.
func (a *Agent) buildNetwork() {
	o := a.config.networkOptions()
	o.Log = a.log
	n := &network{collector: netattr.New(o), fromPeer: a.config.FromPeer}
	n.scaleouts = scaleout.NewBook(scaleout.Options{Node: a.config.Node, Sampler: n.collector, Fetched: a.fetched, Log: a.log})
	a.network = n
}

// fetched is what a pull that runs has received.
func (a *Agent) fetched(flight uint32) int64 { return a.puller.FlightBytes(flight) }

// began begins the record of a pull.
func (n *network) began(f weightcache.Flight) (ended func(weightcache.FlightEnd)) {
	end := n.scaleouts.Began(scaleout.Flight{
		ID: f.ID, Ref: f.Ref, Digest: f.Digest, Source: f.Source, Peer: n.fromPeer(f.Source), Reason: f.Reason, Size: f.Size, Missing: f.Missing,
	})
	return func(e weightcache.FlightEnd) { end(scaleout.End{Err: e.Err, Bytes: e.Bytes}) }
}

// run samples until ctx is done.
func (n *network) run(ctx context.Context, start func(name string, run func() error)) {
	start("network", func() error { return n.collector.Run(ctx) })
	start("scale-outs", func() error { return n.scaleouts.Run(ctx) })
}

func (n *network) close() {
	if n != nil {
		n.collector.Close()
	}
}

// mark gives listeners of a class their tag, which their connections have too;
// nothing where the data role runs apart.
func (n *network) mark(class traffic.Class) func(fd uintptr) error {
	return func(fd uintptr) error {
		if n != nil {
			n.collector.Tag(fd, class, 0)
		}
		return nil
	}
}

// dial makes connections of a class, those of a pull with its flight.
func (a *Agent) dial(class traffic.Class) func(ctx context.Context, network, address string) (net.Conn, error) {
	if a.opts.DialContext != nil {
		return a.opts.DialContext
	}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		flight, _ := source.FlightOf(ctx)
		d := dialer
		d.Control = func(_, _ string, conn syscall.RawConn) error {
			return conn.Control(func(fd uintptr) { a.network.collector.Tag(fd, class, flight) })
		}
		return d.DialContext(ctx, network, address)
	}
}

// networkOf is a sample as the admin API has it.
func (a *Agent) networkOf() admin.Network {
	s := a.network.collector.Snapshot()
	n := admin.Network{
		At: s.At.UTC(), Since: s.Started.UTC(), Sight: s.Sight.String(), Reason: s.Reason,
		Devices: admin.NetBytes{Received: s.OnWire[traffic.Receive], Transmitted: s.OnWire[traffic.Transmit]},
		Owned:   admin.NetBytes{Received: s.Attributed[traffic.Receive], Transmitted: s.Attributed[traffic.Transmit]},
		Unattributed: admin.NetBytes{
			Received: s.Unattributed[traffic.Receive], Transmitted: s.Unattributed[traffic.Transmit],
		},
		Totals: []admin.NetTotal{}, Owners: []admin.NetOwner{},
		Live: admin.NetLive{Connections: s.Live.Connections, P50: s.Live.RTT.Quantile(0.5).Seconds(), P90: s.Live.RTT.Quantile(0.9).Seconds()},
	}
	for _, sensor := range s.Sensors {
		n.Sensors = append(n.Sensors, admin.NetSensor{Name: sensor.Name, On: sensor.On, Wanted: sensor.Wanted, Reason: sensor.Reason})
	}
	for _, kind := range s.Kinds() {
		n.Totals = append(n.Totals, admin.NetTotal{
			Class: kind.Class.String(), Locality: kind.Locality.String(), Transport: kind.Transport.String(), NetBytes: netBytes(s.Totals[kind]),
		})
	}
	for _, share := range s.Shares {
		owner := admin.NetOwner{
			PodUID: share.PodUID, Container: share.Container, Unit: share.Unit, Class: share.Class.String(), Locality: share.Locality.String(),
			Transport: share.Transport.String(), NetBytes: netBytes(share.Counts),
		}
		if p, known := s.Pods[share.PodUID]; known && share.PodUID != "" {
			owner.Pod = p.Namespace + "/" + p.Name
		}
		n.Owners = append(n.Owners, owner)
	}
	admin.SortOwners(n.Owners)
	if len(n.Owners) > admin.MaxOwners {
		n.MoreOwners = len(n.Owners) - admin.MaxOwners
		n.Owners = n.Owners[:admin.MaxOwners]
	}
	return n
}

func netBytes(c traffic.Counts) admin.NetBytes {
	return admin.NetBytes{Received: c.Received, Transmitted: c.Transmitted, Retransmitted: c.Retransmitted}
}
