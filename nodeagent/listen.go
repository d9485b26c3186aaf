package nodeagent

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/weightcache/hubmirror"
)

// bodyWithin bounds how long a call to admin or the socket may take to arrive.
const bodyWithin = 10 * time.Second

// server is one bound listener.
type server struct {
	serve func() error
	stop  func(ctx context.Context)
}

// listen binds every listener. On an error those bound before are closed.
func (a *Agent) listen(ctx context.Context) (servers []server, err error) {
	defer func() {
		if err != nil {
			ended, cancel := context.WithCancel(ctx)
			cancel()
			stopAll(ended, servers)
			servers = nil
		}
	}()
	files := a.certificateFiles()
	l := a.config.Listen
	if a.runs(RoleData) && a.config.apart() {
		s, err := a.listenData(ctx)
		if err != nil {
			return servers, err
		}
		servers = append(servers, s)
	}
	if l.Socket != "" && a.runs(RoleControl) {
		listener, err := identity.ListenSocket(ctx, l.Socket)
		if err != nil {
			return servers, err
		}
		servers = append(servers, a.http("socket", listener, &http.Server{Handler: identity.BodyWithin(admin.NewSocket(a.adminOptions()), bodyWithin)}))
	}
	if l.Mirror != "" && a.runs(RoleData) {
		listener, err := a.listenTCP(ctx, "mirror", l.Mirror, traffic.Weights, files, identity.OpenTLS)
		if err != nil {
			return servers, err
		}
		servers = append(servers, a.http("mirror", listener, hubmirror.NewServer(a.mirror)))
	}
	name, addr := "admin", l.Admin
	if !a.runs(RoleControl) {
		name, addr = "dataAdmin", l.DataAdmin
	}
	if addr != "" {
		listener, err := a.listenTCP(ctx, name, addr, traffic.Other, files, identity.OpenTLS)
		if err != nil {
			return servers, err
		}
		servers = append(servers, a.http(name, listener, &http.Server{Handler: identity.BodyWithin(identity.ForRoles(a.adminHandler(), identity.RoleClient, identity.RoleRouter), bodyWithin)}))
	}
	if l.RESP != "" && a.runs(RoleData) && a.space.hasClients() {
		listener, err := identity.ListenTCP(ctx, l.RESP, identity.StalledTimeout, a.network.mark(traffic.KV))
		if err != nil {
			return servers, fmt.Errorf("listen for resp: %w", err)
		}
		servers = append(servers, a.respServer(ctx, listener))
	}
	if l.KVPeer != "" && a.runs(RoleData) && a.space.cache != nil {
		listener, err := identity.ListenTCP(ctx, l.KVPeer, identity.StalledTimeout, a.network.mark(traffic.KV))
		if err != nil {
			return servers, fmt.Errorf("listen for kvPeer: %w", err)
		}
		servers = append(servers, a.kvPeerServer(ctx, listener))
	}
	if l.Report != "" && a.runs(RoleControl) {
		s, err := a.listenReport(ctx, l.Report, files)
		if err != nil {
			return servers, err
		}
		servers = append(servers, s)
	}
	return servers, nil
}

// certificateFiles are those of the configuration.
func (a *Agent) certificateFiles() identity.Files {
	return identity.Files{Cert: a.config.TLS.Cert, Key: a.config.TLS.Key, CA: a.config.TLS.CA, Failed: func(err error) {
		a.log.Error("certificates not reloaded", slog.Any("error", err))
	}}
}

// listenData binds the data role's socket: the control role's calls, and those
// of the admin API that it passes on.
func (a *Agent) listenData(ctx context.Context) (server, error) {
	listener, err := identity.ListenSocket(ctx, a.config.Listen.DataSocket)
	if err != nil {
		return server{}, err
	}
	mux := http.NewServeMux()
	calls := local.NewHandler(local.HandlerOptions{Data: a.inside, Problems: a.problemTexts, Log: a.log})
	mux.Handle(local.Prefix, calls)
	mux.Handle("/", admin.NewSocket(a.adminOptions()))
	s := &http.Server{Handler: identity.BodyWithin(mux, bodyWithin)}
	s.RegisterOnShutdown(calls.End)
	return a.http("dataSocket", listener, s), nil
}

// listenTCP binds an address, whose traffic is of a class: plain on loopback or
// where the configuration says insecure, else under the certificates.
func (a *Agent) listenTCP(ctx context.Context, name, addr string, class traffic.Class, files identity.Files, secure func(identity.Files) (*tls.Config, error)) (net.Listener, error) {
	listener, err := identity.ListenTCP(ctx, addr, identity.StalledTimeout, a.network.mark(class))
	if err != nil {
		return nil, fmt.Errorf("listen for %s: %w", name, err)
	}
	if identity.IsLoopback(addr) || !a.config.TLS.set() {
		return listener, nil
	}
	config, err := secure(files)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen for %s: %w", name, err), listener.Close())
	}
	return tls.NewListener(listener, config), nil
}

// respServer serves the tenants of the configuration by their passwords.
func (a *Agent) respServer(ctx context.Context, listener net.Listener) server {
	a.bound("resp", listener.Addr())
	serving, end := context.WithCancel(context.WithoutCancel(ctx))
	return server{
		serve: func() error { return a.space.serveTCP(serving, listener) },
		stop:  func(context.Context) { end(); _ = listener.Close() },
	}
}

func (a *Agent) listenReport(ctx context.Context, addr string, files identity.Files) (server, error) {
	options := report.ServerOptions()
	if a.config.TLS.set() {
		config, err := identity.ServerTLS(files, identity.RoleRouter)
		if err != nil {
			return server{}, fmt.Errorf("listen for report: %w", err)
		}
		options = append(options, grpc.Creds(credentials.NewTLS(config)))
	}
	listener, err := identity.ListenTCP(ctx, addr, 0, a.network.mark(traffic.Other))
	if err != nil {
		return server{}, fmt.Errorf("listen for report: %w", err)
	}
	a.bound("report", listener.Addr())
	s := grpc.NewServer(options...)
	report.RegisterNodeReportServer(s, a.publisher)
	return server{
		serve: func() error {
			if err := s.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				return fmt.Errorf("serve report: %w", err)
			}
			return nil
		},
		// Streams never end by themselves; readers keep their state and reconnect.
		stop: func(context.Context) { s.Stop(); _ = listener.Close() },
	}, nil
}

// http makes a server of a bound listener.
func (a *Agent) http(name string, listener net.Listener, s *http.Server) server {
	a.bound(name, listener.Addr())
	if s.ReadHeaderTimeout == 0 {
		s.ReadHeaderTimeout = 10 * time.Second
	}
	if s.IdleTimeout == 0 {
		s.IdleTimeout = 2 * time.Minute
	}
	if s.MaxHeaderBytes == 0 {
		s.MaxHeaderBytes = 32 << 10
	}
	if s.ErrorLog == nil {
		s.ErrorLog = slog.NewLogLogger(a.log.Handler(), slog.LevelDebug)
	}
	// Streams that go on for minutes end when the agent stops.
	base, cancel := context.WithCancel(context.Background())
	s.BaseContext = func(net.Listener) context.Context { return base }
	return server{
		serve: func() error {
			if err := s.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
				return fmt.Errorf("serve %s: %w", name, err)
			}
			return nil
		},
		stop: func(ctx context.Context) {
			grace, end := context.WithTimeout(ctx, 2*time.Second)
			defer end()
			err := s.Shutdown(grace)
			cancel()
			if err != nil {
				_ = s.Close()
			}
			_ = listener.Close()
		},
	}
}

func (a *Agent) bound(name string, addr net.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.listeners[name] = addr.String()
}

// stopAll stops all servers at once and waits for them.
func stopAll(ctx context.Context, servers []server) {
	var all sync.WaitGroup
	for _, s := range servers {
		all.Go(func() { s.stop(ctx) })
	}
	all.Wait()
}
