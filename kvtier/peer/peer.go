// Package peer gets blocks of KV from other nodes and gives this node's to them.
// PROTOCOL.md is its contract.
//
// The agent makes a Peers of the nodes in its configuration, runs it, and hands
// Blocks to the protocols that engines speak; and a Server, to which it gives a
// listener and the tenants that share. This package owns the connections between
// nodes, what is known of where blocks are, and the transfers. It never decides
// what stays in the tier, never replaces what was stored here, stores nothing on
// another node, and keeps nothing on a drive.
package peer

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/gate"
	"github.com/hearth-dev/hearth/units"
)

// Class is the traffic class of every byte of this package.
const Class = "kv"

// Peer is another node.
type Peer struct {
	Name string // unique in the list
	Addr string // host:port
	Zone string
}

// MaxPeers bounds the list.
const MaxPeers = 64

// Limiter bounds a rate of bytes: WaitN takes n and waits until they may pass.
// Its error is the context's cause.
type Limiter interface {
	WaitN(ctx context.Context, n int) error
}

// Options configure a Peers; zero values stand for what PROTOCOL.md says.
type Options struct {
	List []Peer
	// Zone is this node's own. Peers of others are asked only with AllZones, and
	// after those.
	Zone     string
	AllZones bool
	// TLS secures the connections: identity.ClientTLS for role agent. Nil is plain.
	TLS *tls.Config
	// DialContext makes the connections; nil dials TCP.
	DialContext func(ctx context.Context, network, address string) (net.Conn, error)
	// Limiter paces what is received; nil does not.
	Limiter Limiter
	// Connections to one peer for blocks, besides the one to ask.
	Connections int
	// InFlight bounds the blocks that are awaited, in bytes.
	InFlight units.Bytes
	// LookupWait is how long a lookup waits for answers, PinWait a pin for a block
	// on its way.
	LookupWait, PinWait time.Duration
	Log                 *slog.Logger
}

// Peers gets blocks from other nodes. It is safe for concurrent use.
type Peers struct {
	opts    Options
	log     *slog.Logger
	began   time.Time
	remotes []*remote
	room    *semaphore.Weighted // bytes awaited
	totals  totals

	mu        sync.Mutex
	running   bool
	known     memory
	questions map[name]*question
	flights   map[name]*flight
	tenants   map[*kvtier.Tenant]*room // of each
	// quiet are namespaces whose blocks were all ended here, and until when none of
	// them is asked for, monotonic.
	quiet map[block.Namespace]time.Duration
}

// room is the bytes that may be awaited at a time.
type room struct {
	*semaphore.Weighted
	most int64
}

// name names a block on any node.
type name struct {
	space block.Namespace
	key   block.Key
}

// totals are figures of all peers.
type totals struct {
	asked, found, notFound, unanswered           atomic.Int64
	blocks, blockBytes, tokens                   atomic.Int64
	absent, damaged, failed, gated, full, noRoom atomic.Int64
	waited, waitedOut                            atomic.Int64
	bytesIn, bytesOut, awaited                   atomic.Int64
}

// Stats are the figures since the start, but for those of now.
type Stats struct {
	// Asked are keys in questions to one peer each. Found are blocks that any peer
	// said to have, NotFound those that none has, Unanswered those that not all
	// peers answered for and none said to have.
	Asked, Found, NotFound, Unanswered int64
	// Blocks came and were stored, of which Tokens need not be computed here.
	Blocks, BlockBytes, Tokens int64
	// Blocks that did not come: gone from the peer, not what was stored there, cut
	// off, not worth it, too many in the row, no room here.
	Absent, Damaged, Failed, Gated, Full, NoRoom int64
	// Waited are Gets that waited for a block on its way until that ended, WaitedOut
	// those that gave up.
	Waited, WaitedOut int64
	// BytesIn and BytesOut are all that went over the network, of class kv.
	BytesIn, BytesOut int64
	Awaited           units.Bytes // now
	Peers             []PeerStats
}

// PeerStats are the figures of one peer.
type PeerStats struct {
	Peer
	Asked              bool // is asked now: it is of a right zone and has not failed just now
	Failures, Damaged  int64
	Blocks, BlockBytes int64
	Speed              gate.Speed
}

// Bounds that PROTOCOL.md names.
const (
	rowLimit     = 4096 // flights and questions that wait for one peer
	batchBytes   = 8 << 20
	batchBlocks  = 64
	knownLimit   = 65536
	hereFor      = 10 * time.Second
	absentFor    = 2 * time.Second
	deletedFor   = time.Minute
	firstBackoff = time.Second
	maxBackoff   = 30 * time.Second
	damagedFor   = time.Minute
	askWithin    = 250 * time.Millisecond
	openWithin   = 5 * time.Second
	idleAfter    = time.Minute
	longest      = 2 * time.Second // wait for a block where nobody knows what computing takes
)

// seed is the speed of a peer of which nothing is known: 10 Gbit/s.
var seed = gate.Speed{Bandwidth: 1.2e9, Latency: 500 * time.Microsecond}

// New makes a Peers; Run lets it work.
func New(opts Options) *Peers {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.DialContext == nil {
		opts.DialContext = (&net.Dialer{}).DialContext
	}
	opts.TLS = bulk(opts.TLS)
	orElse(&opts.Connections, 4)
	orElse(&opts.InFlight, 256*units.MiB)
	orElse(&opts.LookupWait, 2*time.Millisecond)
	orElse(&opts.PinWait, 5*time.Millisecond)
	p := &Peers{
		opts: opts, log: opts.Log, began: time.Now(), room: semaphore.NewWeighted(int64(opts.InFlight)), known: newMemory(knownLimit),
		questions: map[name]*question{}, flights: map[name]*flight{}, tenants: map[*kvtier.Tenant]*room{}, quiet: map[block.Namespace]time.Duration{},
	}
	for _, one := range opts.List {
		p.remotes = append(p.remotes, newRemote(one, opts.Zone))
	}
	return p
}

// bulk is a configuration for bytes of which nobody reads the first ones early.
func bulk(config *tls.Config) *tls.Config {
	if config == nil {
		return nil
	}
	config = config.Clone()
	config.DynamicRecordSizingDisabled = true
	return config
}

func orElse[T int | units.Bytes | time.Duration](v *T, otherwise T) {
	if *v <= 0 {
		*v = otherwise
	}
}

// now is monotonic time.
func (p *Peers) now() time.Duration { return time.Since(p.began) }

// Run asks and fetches until ctx ends.
func (p *Peers) Run(ctx context.Context) error {
	p.mu.Lock()
	p.running = true
	p.mu.Unlock()
	var group sync.WaitGroup
	for _, r := range p.remotes {
		if !r.near && !p.opts.AllZones {
			continue
		}
		group.Go(func() { p.runAsks(ctx, r) })
		for range p.opts.Connections {
			group.Go(func() { p.runFetches(ctx, r) })
		}
	}
	<-ctx.Done()
	p.mu.Lock()
	p.running = false
	p.mu.Unlock()
	group.Wait()
	p.abandon()
	return nil
}

// abandon ends what nobody works on any more.
func (p *Peers) abandon() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, q := range p.questions {
		q.settle()
		delete(p.questions, id)
	}
	for _, f := range p.flights {
		f.read.Failed()
		p.endLocked(f)
	}
}

// Leave forgets a tenant that ended.
func (p *Peers) Leave(t *kvtier.Tenant) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.tenants, t)
}

// Stats tells what happened.
func (p *Peers) Stats() Stats {
	c := &p.totals
	s := Stats{
		Asked: c.asked.Load(), Found: c.found.Load(), NotFound: c.notFound.Load(), Unanswered: c.unanswered.Load(),
		Blocks: c.blocks.Load(), BlockBytes: c.blockBytes.Load(), Tokens: c.tokens.Load(),
		Absent: c.absent.Load(), Damaged: c.damaged.Load(), Failed: c.failed.Load(), Gated: c.gated.Load(), Full: c.full.Load(), NoRoom: c.noRoom.Load(),
		Waited: c.waited.Load(), WaitedOut: c.waitedOut.Load(),
		BytesIn: c.bytesIn.Load(), BytesOut: c.bytesOut.Load(), Awaited: units.Bytes(c.awaited.Load()),
	}
	for _, r := range p.remotes {
		s.Peers = append(s.Peers, PeerStats{
			Peer: r.Peer, Asked: (r.near || p.opts.AllZones) && !r.down(p.now()), Failures: r.failures.Load(), Damaged: r.damaged.Load(),
			Blocks: r.blocks.Load(), BlockBytes: r.blockBytes.Load(), Speed: r.speed.Speed(),
		})
	}
	return s
}
