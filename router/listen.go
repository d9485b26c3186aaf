package router

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/hearth-dev/hearth/identity"
)

// Bounds of the listeners' HTTP servers. There is no bound on a whole request:
// streams last as long as they last.
const (
	readHeaderTimeout = 10 * time.Second
	idleTimeout       = 120 * time.Second
	maxHeaderBytes    = 64 << 10
	adminDrain        = 5 * time.Second
)

// listen opens every listener, or none.
func (r *Router) listen(ctx context.Context) (servers []*server, err error) {
	defer func() {
		if err != nil {
			for _, s := range servers {
				_ = s.listener.Close()
			}
		}
	}()
	open := func(name, network, address string, handler http.Handler, config *tls.Config, drain time.Duration) error {
		l, err := (&net.ListenConfig{}).Listen(ctx, network, address)
		if err != nil {
			return fmt.Errorf("listen for %s: %w", name, err)
		}
		s := &server{name: name, listener: l, drain: drain, http: &http.Server{
			Handler: handler, ReadHeaderTimeout: readHeaderTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
			ErrorLog: slog.NewLogLogger(r.log.Handler(), slog.LevelDebug),
		}}
		if config != nil {
			config.NextProtos = []string{"h2", "http/1.1"}
			s.http.TLSConfig = config
			s.listener = tls.NewListener(l, config)
		}
		servers = append(servers, s)
		r.mu.Lock()
		r.listeners[name] = l.Addr().String()
		r.mu.Unlock()
		return nil
	}
	ingressTLS, adminTLS, err := r.serverTLS()
	if err != nil {
		return nil, err
	}
	if err := open("ingress", "tcp", r.cfg.Listen.Ingress, r.proxy, ingressTLS, r.cfg.Limits.DrainTimeout.Std()); err != nil {
		return servers, err
	}
	admin := r.adminHandler()
	if r.cfg.Listen.Admin != "" {
		if err := open("admin", "tcp", r.cfg.Listen.Admin, admin, adminTLS, adminDrain); err != nil {
			return servers, err
		}
	}
	if path := r.cfg.Listen.Socket; path != "" {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return servers, fmt.Errorf("make socket directory: %w", err)
		}
		removeStale(path)
		if err := open("socket", "unix", path, admin, nil, adminDrain); err != nil {
			return servers, err
		}
		if err := os.Chmod(path, 0o660); err != nil {
			return servers, fmt.Errorf("set mode of socket: %w", err)
		}
	}
	return servers, nil
}

// serverTLS gives the listeners' configurations, nil for plain text.
func (r *Router) serverTLS() (ingress, admin *tls.Config, err error) {
	failed := func(err error) { r.log.Error("reload certificates", slog.Any("error", err)) }
	if r.cfg.IngressTLS.set() {
		files := r.cfg.IngressTLS.files()
		files.Failed = failed
		if ingress, err = identity.OpenTLS(files); err != nil {
			return nil, nil, fmt.Errorf("read ingress certificates: %w", err)
		}
	}
	host, _, splitErr := net.SplitHostPort(r.cfg.Listen.Admin)
	if r.cfg.TLS.set() && splitErr == nil && !loopback(host) {
		files := r.cfg.TLS.files()
		files.Failed = failed
		if admin, err = identity.ServerTLS(files, identity.RoleRouter, identity.RoleClient); err != nil {
			return nil, nil, errors.Join(fmt.Errorf("read certificates: %w", err))
		}
	}
	return ingress, admin, nil
}
