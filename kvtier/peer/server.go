package peer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
)

// ServerOptions configure a Server.
type ServerOptions struct {
	// TLS secures the connections: identity.ServerTLS for role agent. Nil is plain.
	TLS *tls.Config
	// Limiter paces what is sent; nil does not.
	Limiter Limiter
	Log     *slog.Logger
}

// Bounds of connections, see PROTOCOL.md.
const (
	maxConnections = 256
	maxOfCaller    = 16
	serverIdle     = 150 * time.Second
)

// Server gives this node's blocks to other nodes.
type Server struct {
	opts   ServerOptions
	log    *slog.Logger
	totals served

	mu     sync.Mutex
	shared []*kvtier.Tenant
	open   map[net.Conn]struct{}
	of     map[string]int // connections by certificate and address
}

// served are a server's figures.
type served struct {
	connections                  atomic.Int64
	accepted, refused, strangers atomic.Int64
	protocol, slow               atomic.Int64
	found, notFound, absent      atomic.Int64
	blocks, blockBytes           atomic.Int64
	bytesIn, bytesOut            atomic.Int64
}

// ServerStats are the figures since the start, but for Connections.
type ServerStats struct {
	Connections int64 // now
	// Accepted connections; Refused were beyond a bound, Strangers showed no
	// certificate of an agent or did not say hello.
	Accepted, Refused, Strangers int64
	// Protocol counts connections closed for what they sent, Slow those closed
	// because they did not take what they had asked for.
	Protocol, Slow int64
	// Found are blocks that others asked about and that are here, NotFound those
	// that are not.
	Found, NotFound int64
	// Blocks were sent; Absent were asked for and not there any more.
	Blocks, BlockBytes, Absent int64
	// BytesIn and BytesOut are all that went over the network, of class kv.
	BytesIn, BytesOut int64
}

// NewServer makes a server that shares nothing yet.
func NewServer(opts ServerOptions) *Server {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	opts.TLS = bulk(opts.TLS)
	return &Server{opts: opts, log: opts.Log, open: map[net.Conn]struct{}{}, of: map[string]int{}}
}

// Share lets other nodes have a tenant's blocks.
func (s *Server) Share(t *kvtier.Tenant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shared = append(slices.Clip(s.shared), t)
}

// Unshare ends that.
func (s *Server) Unshare(t *kvtier.Tenant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shared = slices.DeleteFunc(slices.Clone(s.shared), func(o *kvtier.Tenant) bool { return o == t })
}

// Stats tells what happened.
func (s *Server) Stats() ServerStats {
	c := &s.totals
	return ServerStats{
		Connections: c.connections.Load(), Accepted: c.accepted.Load(), Refused: c.refused.Load(), Strangers: c.strangers.Load(),
		Protocol: c.protocol.Load(), Slow: c.slow.Load(), Found: c.found.Load(), NotFound: c.notFound.Load(),
		Blocks: c.blocks.Load(), BlockBytes: c.blockBytes.Load(), Absent: c.absent.Load(),
		BytesIn: c.bytesIn.Load(), BytesOut: c.bytesOut.Load(),
	}
}

// find gives the namespace of a tenant that shares.
func (s *Server) find(id block.Namespace) (*kvtier.Namespace, bool) {
	s.mu.Lock()
	shared := s.shared
	s.mu.Unlock()
	for _, t := range shared {
		if n, ok := t.NamespaceOf(id); ok {
			return n, true
		}
	}
	return nil, false
}

// Serve takes connections until ctx ends, closes the listener, and returns once
// all have ended. The error is the listener's, nil where ctx ended.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	for {
		raw, err := l.Accept()
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("accept KV peer: %w", err)
		default:
			// Out of descriptors or memory, or the peer was gone: all pass.
			s.log.Warn("a KV peer is not accepted", slog.Any("error", err))
			if within(ctx, nil, acceptAgain); ctx.Err() != nil {
				return nil
			}
			continue
		}
		if !s.take(raw) {
			s.totals.refused.Add(1)
			_ = raw.Close()
			continue
		}
		all.Go(func() { s.serve(ctx, raw) })
	}
}

// acceptAgain is the pause after a failed accept.
const acceptAgain = 100 * time.Millisecond

func (s *Server) take(raw net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.open) >= maxConnections {
		return false
	}
	s.open[raw] = struct{}{}
	return true
}

// serve serves one connection.
func (s *Server) serve(ctx context.Context, raw net.Conn) {
	s.totals.accepted.Add(1)
	s.totals.connections.Add(1)
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	defer func() {
		stop()
		_ = raw.Close()
		s.totals.connections.Add(-1)
		s.mu.Lock()
		delete(s.open, raw)
		s.mu.Unlock()
	}()
	var conn net.Conn = counted{raw, &s.totals.bytesIn, &s.totals.bytesOut}
	c := &caller{server: s, conn: conn}
	_ = conn.SetDeadline(time.Now().Add(openWithin))
	who, err := c.greet(ctx)
	if err != nil {
		if ctx.Err() == nil {
			s.totals.strangers.Add(1)
			s.log.Warn("a caller is no KV peer", slog.String("addr", raw.RemoteAddr().String()), slog.Any("error", err))
		}
		return
	}
	// One certificate may be that of all nodes.
	if address, _, err := net.SplitHostPort(raw.RemoteAddr().String()); err == nil {
		who += " at " + address
	}
	if !s.count(who, 1) {
		s.totals.refused.Add(1)
		return
	}
	defer s.count(who, -1)
	err = c.serve(ctx)
	var timeout net.Error
	switch {
	case ctx.Err() != nil || errors.Is(err, io.EOF):
	case errors.Is(err, ErrProtocol):
		s.totals.protocol.Add(1)
		s.log.Warn("a KV peer sends what it should not, its connection is closed", slog.String("peer", who), slog.Any("error", err))
	case c.writing && errors.As(err, &timeout) && timeout.Timeout():
		s.totals.slow.Add(1)
	}
}

// count counts a connection of a caller, where it may have one more.
func (s *Server) count(who string, n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n > 0 && s.of[who] >= maxOfCaller {
		return false
	}
	if s.of[who] += n; s.of[who] == 0 {
		delete(s.of, who)
	}
	return true
}
