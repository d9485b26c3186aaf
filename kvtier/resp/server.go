// Package resp serves LMCache: the part of the Redis protocol that its clients
// need, over one tenant's blocks of the KV tier each. PROTOCOL.md is its contract.
//
// The agent makes a Server, gives it listeners and says whose blocks each serves.
// This package owns the connections, what EXISTS pins for a while, and what it
// knows about the sizes of values. It never decides what stays in the tier, never
// takes a client's word for whose blocks it may see, and keeps nothing on a drive.
package resp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// Options of a Server; zero values stand for what PROTOCOL.md says.
type Options struct {
	Log *slog.Logger
	// MaxConnections of a listener that does not say its own.
	MaxConnections int
	// WriteTimeout is for a reply, on top of a second for each 4 MiB.
	WriteTimeout time.Duration
	// BodyTimeout is for the next bytes of a value that is being sent.
	BodyTimeout time.Duration
	// AuthTimeout is for a needed AUTH.
	AuthTimeout time.Duration
	// Drain is for replies that are being written when the context ends.
	Drain time.Duration
}

// Access says whose blocks a listener serves.
type Access struct {
	// Tenant of connections without a credential; nil demands one.
	Tenant *Tenant
	// TenantNow stands in for Tenant where it is not nil: it is asked anew for every
	// connection.
	TenantNow func() *Tenant
	// Authenticate finds the tenant of a credential, in constant time; nil ignores
	// credentials. (*Credentials).Authenticate is one.
	Authenticate func(user, password []byte) (*Tenant, bool)
	// MaxConnections at a time; 0 is that of the Server.
	MaxConnections int
}

// anonymous is the tenant of a connection without a credential, nil for none.
func (a Access) anonymous() *Tenant {
	if a.TenantNow != nil {
		return a.TenantNow()
	}
	return a.Tenant
}

// Server answers clients on any number of listeners.
type Server struct {
	options Options
	ids     atomic.Uint64
	queued  atomic.Int64 // bytes of replies without values that wait for clients which do not read
	totals  totals
	former  rate.Sometimes // how often is said that the end of a value cannot be written
}

// totals are figures of all listeners.
type totals struct {
	connections, native atomic.Int64
	accepted, refused   atomic.Uint64
	protocolErrors      atomic.Uint64
	authFailures        atomic.Uint64
	slowReaders         atomic.Uint64
	bytesIn, bytesOut   atomic.Uint64
	commands            [commandCount]atomic.Uint64
}

// Stats are the figures of a Server since its start, but for those of now.
type Stats struct {
	Connections        int64 // now
	Native             int64 // of these
	Accepted           uint64
	RefusedConnections uint64 // beyond the bound, closed when accepted
	ProtocolErrors     uint64
	AuthFailures       uint64
	SlowReaders        uint64            // closed because they did not take a reply
	BytesIn, BytesOut  uint64            // on the wire
	Commands           map[string]uint64 // by name in lower case, "other" for unknown ones
}

// New makes a server; Serve gives it work.
func New(options Options) *Server {
	if options.Log == nil {
		options.Log = slog.New(slog.DiscardHandler)
	}
	if options.MaxConnections <= 0 {
		options.MaxConnections = 1024
	}
	orElse(&options.WriteTimeout, 30*time.Second)
	orElse(&options.BodyTimeout, 30*time.Second)
	orElse(&options.AuthTimeout, 10*time.Second)
	orElse(&options.Drain, 2*time.Second)
	return &Server{options: options, former: rate.Sometimes{First: 1, Interval: 10 * time.Second}}
}

func orElse(d *time.Duration, otherwise time.Duration) {
	if *d <= 0 {
		*d = otherwise
	}
}

// Stats is a snapshot of the server's figures.
func (s *Server) Stats() Stats {
	t := &s.totals
	stats := Stats{
		Connections: t.connections.Load(), Native: t.native.Load(), Accepted: t.accepted.Load(), RefusedConnections: t.refused.Load(),
		ProtocolErrors: t.protocolErrors.Load(), AuthFailures: t.authFailures.Load(), SlowReaders: t.slowReaders.Load(),
		BytesIn: t.bytesIn.Load(), BytesOut: t.bytesOut.Load(), Commands: make(map[string]uint64),
	}
	for i := range t.commands {
		if count := t.commands[i].Load(); count > 0 {
			stats.Commands[commandNames[i]] = count
		}
	}
	return stats
}

// listening is one listener and its connections.
type listening struct {
	server *Server
	access Access
	ctx    context.Context

	mu      sync.Mutex
	open    map[*conn]struct{}
	closing bool
	ended   sync.WaitGroup
}

// Serve takes connections from a listener until the context ends, closes it, and
// returns once all of its connections have ended, at most Options.Drain later and
// what the tier takes to give up a call. The error is the listener's, nil where the context ended.
func (s *Server) Serve(ctx context.Context, listener net.Listener, access Access) error {
	if access.Tenant == nil && access.TenantNow == nil && access.Authenticate == nil {
		return errors.New("serve resp: a listener has a tenant or credentials")
	}
	if access.MaxConnections <= 0 {
		access.MaxConnections = s.options.MaxConnections
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l := &listening{server: s, access: access, ctx: ctx, open: make(map[*conn]struct{})}
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	defer stop()
	err := l.accept(listener)
	if ctx.Err() != nil {
		err = nil
	} else {
		_ = listener.Close()
		err = fmt.Errorf("accept resp connection: %w", err)
	}
	cancel()
	l.end()
	return err
}

func (l *listening) accept(listener net.Listener) error {
	pause := time.Duration(0)
	for {
		connection, err := listener.Accept()
		if err == nil {
			pause = 0
			l.take(connection)
			continue
		}
		if l.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return err
		}
		// Out of descriptors or memory, or the peer was gone: both pass.
		pause = min(max(2*pause, 5*time.Millisecond), time.Second)
		l.server.options.Log.Warn("accepting a KV connection failed", slog.Any("error", err), slog.Duration("pause", pause))
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-l.ctx.Done():
			timer.Stop()
			return err
		}
	}
}

// take begins to serve a connection, or closes it where there is no place.
func (l *listening) take(connection net.Conn) {
	totals := &l.server.totals
	l.mu.Lock()
	if l.closing || len(l.open) >= l.access.MaxConnections {
		l.mu.Unlock()
		totals.refused.Add(1)
		_ = connection.Close()
		return
	}
	c := newConn(l, connection)
	l.open[c] = struct{}{}
	l.ended.Add(1)
	l.mu.Unlock()
	totals.accepted.Add(1)
	totals.connections.Add(1)
	go func() {
		defer l.ended.Done()
		c.serve()
		totals.connections.Add(-1)
		l.mu.Lock()
		delete(l.open, c)
		l.mu.Unlock()
	}()
}

// end closes all connections: what waits for a command at once, what writes a
// reply after a while.
func (l *listening) end() {
	l.mu.Lock()
	l.closing = true
	all := make([]*conn, 0, len(l.open))
	for c := range l.open {
		all = append(all, c)
	}
	l.mu.Unlock()
	until := time.Now().Add(l.server.options.Drain)
	for _, c := range all {
		c.finish(until)
	}
	l.ended.Wait()
}
