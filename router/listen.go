package router

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
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
	// adminBody bounds how long a question may take to arrive.
	adminBody = time.Minute
)

// ingressName is the ingress in the list of listeners.
const ingressName = "ingress"

// listen opens every listener, or none.
func (r *Router) listen(ctx context.Context) (servers []*server, err error) {
	defer func() {
		if err != nil {
			for _, s := range servers {
				_ = s.listener.Close()
				s.cut(nil)
			}
		}
	}()
	add := func(name string, l net.Listener, handler http.Handler, config *tls.Config, drain time.Duration) {
		base, cut := context.WithCancelCause(context.WithoutCancel(ctx))
		s := &server{name: name, listener: l, drain: drain, cut: cut, http: &http.Server{
			BaseContext: func(net.Listener) context.Context { return base },
			Handler:     handler, ReadHeaderTimeout: readHeaderTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
			ErrorLog: slog.NewLogLogger(r.log.Handler(), slog.LevelDebug),
		}}
		if config != nil {
			config.NextProtos = []string{"h2", "http/1.1"}
			s.http.TLSConfig = config
			s.listener = tls.NewListener(l, config)
		} else if name == ingressName {
			s.listener = r.proxy.Guard(s.http, l)
		}
		servers = append(servers, s)
		r.mu.Lock()
		r.listeners[name] = l.Addr().String()
		r.mu.Unlock()
	}
	ingressTLS, adminTLS, err := r.serverTLS()
	if err != nil {
		return nil, err
	}
	l, err := identity.ListenTCP(ctx, r.cfg.Listen.Ingress, identity.StalledTimeout)
	if err != nil {
		return nil, fmt.Errorf("listen for ingress: %w", err)
	}
	add(ingressName, l, r.proxy, ingressTLS, r.cfg.Limits.DrainTimeout.Std())
	admin := identity.BodyWithin(r.adminHandler(), adminBody)
	if r.cfg.Listen.Admin != "" {
		l, err := identity.ListenTCP(ctx, r.cfg.Listen.Admin, identity.StalledTimeout)
		if err != nil {
			return servers, fmt.Errorf("listen for admin: %w", err)
		}
		add("admin", l, identity.ForRoles(admin, identity.RoleRouter, identity.RoleClient), adminTLS, adminDrain)
	}
	if r.cfg.Listen.Socket != "" {
		l, err := identity.ListenSocket(ctx, r.cfg.Listen.Socket)
		if err != nil {
			return servers, err
		}
		add("socket", l, admin, nil, adminDrain)
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
	if r.cfg.Listen.Admin != "" && r.cfg.TLS.set() && !identity.IsLoopback(r.cfg.Listen.Admin) {
		files := r.cfg.TLS.files()
		files.Failed = failed
		if admin, err = identity.OpenTLS(files); err != nil {
			return nil, nil, fmt.Errorf("read certificates: %w", err)
		}
	}
	return ingress, admin, nil
}
