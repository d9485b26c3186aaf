package router

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"syscall"
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
	// stalledTimeout is how long a client may take none of the bytes that wait
	// for it. One that does not read holds an engine's place all that time.
	stalledTimeout = 2 * time.Minute
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
	l, err := listenIngress(ctx, r.cfg.Listen.Ingress, stalledTimeout)
	if err != nil {
		return nil, fmt.Errorf("listen for ingress: %w", err)
	}
	add(ingressName, l, r.proxy, ingressTLS, r.cfg.Limits.DrainTimeout.Std())
	admin := r.adminHandler()
	if r.cfg.Listen.Admin != "" {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", r.cfg.Listen.Admin)
		if err != nil {
			return servers, fmt.Errorf("listen for admin: %w", err)
		}
		add("admin", l, admin, adminTLS, adminDrain)
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

// tcpUserTimeout is TCP_USER_TIMEOUT of tcp(7).
const tcpUserTimeout = 18

// listenIngress binds the address. The kernel ends connections whose client
// has taken nothing for as long as stalled; a stream that has nothing to say
// may be silent for longer.
func listenIngress(ctx context.Context, address string, stalled time.Duration) (net.Listener, error) {
	config := net.ListenConfig{Control: func(_, _ string, conn syscall.RawConn) error {
		var failed error
		err := conn.Control(func(fd uintptr) {
			failed = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(stalled.Milliseconds()))
		})
		return errors.Join(err, failed)
	}}
	return config.Listen(ctx, "tcp", address)
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
		if admin, err = identity.ServerTLS(files, identity.RoleRouter, identity.RoleClient); err != nil {
			return nil, nil, fmt.Errorf("read certificates: %w", err)
		}
	}
	return ingress, admin, nil
}
