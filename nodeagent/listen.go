package nodeagent

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/weightcache/hubmirror"
)

// socketMode is that of the unix socket: its owner and its group may change the node.
const socketMode = 0o660

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
	files := identity.Files{Cert: a.config.TLS.Cert, Key: a.config.TLS.Key, CA: a.config.TLS.CA, Failed: func(err error) {
		a.log.Error("certificates not reloaded", slog.Any("error", err))
	}}
	l := a.config.Listen
	if l.Socket != "" {
		listener, err := listenSocket(ctx, l.Socket)
		if err != nil {
			return servers, err
		}
		servers = append(servers, a.http("socket", listener, &http.Server{Handler: admin.NewSocket(a.adminOptions())}))
	}
	if l.Mirror != "" {
		listener, err := a.listenTCP(ctx, "mirror", l.Mirror, files, identity.OpenTLS)
		if err != nil {
			return servers, err
		}
		servers = append(servers, a.http("mirror", listener, hubmirror.NewServer(a.mirror)))
	}
	if l.Admin != "" {
		listener, err := a.listenTCP(ctx, "admin", l.Admin, files, func(f identity.Files) (*tls.Config, error) {
			return identity.ServerTLS(f, identity.RoleClient, identity.RoleRouter)
		})
		if err != nil {
			return servers, err
		}
		servers = append(servers, a.http("admin", listener, &http.Server{Handler: a.adminHandler()}))
	}
	if l.Report != "" {
		s, err := a.listenReport(ctx, l.Report, files)
		if err != nil {
			return servers, err
		}
		servers = append(servers, s)
	}
	return servers, nil
}

// listenTCP binds an address: plain on loopback or where the configuration
// says insecure, else under the certificates.
func (a *Agent) listenTCP(ctx context.Context, name, addr string, files identity.Files, secure func(identity.Files) (*tls.Config, error)) (net.Listener, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen for %s: %w", name, err)
	}
	if isLoopback(addr) || !a.config.TLS.set() {
		return listener, nil
	}
	config, err := secure(files)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen for %s: %w", name, err), listener.Close())
	}
	return tls.NewListener(listener, config), nil
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
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
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

// listenSocket binds a unix socket. A socket file whose owner is gone is
// replaced; one that answers is an error.
func listenSocket(ctx context.Context, path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("make directory of socket: %w", err)
	}
	if info, err := os.Lstat(path); err == nil {
		if info.Mode().Type() != os.ModeSocket {
			return nil, fmt.Errorf("listen on socket %s: a file that is no socket is there", path)
		}
		dialer := net.Dialer{Timeout: time.Second}
		if conn, err := dialer.DialContext(ctx, "unix", path); err == nil {
			_ = conn.Close()
			return nil, fmt.Errorf("listen on socket %s: another agent answers there", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("replace socket: %w", err)
		}
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on socket: %w", err)
	}
	if err := errors.Join(os.Chmod(path, socketMode), shareSocket(path)); err != nil {
		return nil, errors.Join(fmt.Errorf("listen on socket: %w", err), listener.Close())
	}
	return listener, nil
}

// shareSocket gives a socket to the group that carries Hearth's name, where
// the system has one and the agent may.
func shareSocket(path string) error {
	group, err := user.LookupGroup(identity.Name)
	if err != nil || os.Geteuid() != 0 {
		return nil //nolint:nilerr // without the group the socket stays the owner's
	}
	id, err := strconv.Atoi(group.Gid)
	if err != nil {
		return fmt.Errorf("read group %s: %w", identity.Name, err)
	}
	return os.Chown(path, -1, id)
}
