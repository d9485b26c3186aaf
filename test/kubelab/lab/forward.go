package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"
)

// RunForwards is the work of the process that hands connections from this
// system's loopback to the API server and to services. The sockets were opened
// in this system's network and are inherited, descriptor 3 for the API server
// and one more for each forward in dir, the control plane's directory; what is
// dialled is dialled in the control plane's network. It ends with ctx.
func RunForwards(ctx context.Context, dir string) error {
	client, err := newAPI(apiURL(), filepath.Join(dir, "pki"))
	if err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(dir, "forwards.json"))
	if err != nil {
		return fmt.Errorf("read forwards: %w", err)
	}
	var forwards []Forward
	if err := json.Unmarshal(text, &forwards); err != nil {
		return fmt.Errorf("read forwards: %w", err)
	}
	targets := []func(context.Context) (string, error){func(context.Context) (string, error) {
		return net.JoinHostPort(controlAddress, strconv.Itoa(apiPort)), nil
	}}
	for _, f := range forwards {
		targets = append(targets, endpointsOf(client, f))
	}
	return serveForwards(ctx, targets)
}

// RunForward is RunForwards for one service, given as the JSON of a Forward,
// with descriptor 3 as its socket.
func RunForward(ctx context.Context, dir, forward string) error {
	client, err := newAPI(apiURL(), filepath.Join(dir, "pki"))
	if err != nil {
		return err
	}
	var f Forward
	if err := json.Unmarshal([]byte(forward), &f); err != nil {
		return fmt.Errorf("read forward: %w", err)
	}
	return serveForwards(ctx, []func(context.Context) (string, error){endpointsOf(client, f)})
}

// serveForwards serves the sockets from descriptor 3 on, one for each target.
func serveForwards(ctx context.Context, targets []func(context.Context) (string, error)) error {
	failed := make(chan error, len(targets))
	for i, target := range targets {
		const first = 3
		file := os.NewFile(uintptr(first+i), "listener")
		l, err := net.FileListener(file)
		if err := errors.Join(err, file.Close()); err != nil {
			return fmt.Errorf("forward connections: %w", err)
		}
		defer l.Close()
		defer context.AfterFunc(ctx, func() { l.Close() })()
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					failed <- fmt.Errorf("forward connections: %w", err)
					return
				}
				go handOn(ctx, conn, target)
			}
		}()
	}
	select {
	case err := <-failed:
		if ctx.Err() != nil {
			return nil
		}
		return err
	case <-ctx.Done():
		return nil
	}
}

// handOn joins a connection to its target, each direction until its end.
func handOn(ctx context.Context, conn net.Conn, target func(context.Context) (string, error)) {
	defer conn.Close()
	dialing, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	address, err := target(dialing)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	var dialer net.Dialer
	far, err := dialer.DialContext(dialing, "tcp", address)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	defer far.Close()
	defer context.AfterFunc(ctx, func() { conn.Close(); far.Close() })()
	ended := make(chan struct{}, 2)
	join := func(to, from net.Conn) {
		_, err := io.Copy(to, from)
		if half, ok := to.(*net.TCPConn); ok && err == nil {
			_ = half.CloseWrite() // the other end has gone
		} else {
			to.Close()
		}
		ended <- struct{}{}
	}
	go join(far, conn)
	go join(conn, far)
	<-ended
	<-ended
}

// endpointsOf gives the addresses of a service's ready endpoints in turn, asked
// for at each connection.
func endpointsOf(client *api, f Forward) func(context.Context) (string, error) {
	var turn atomic.Uint64
	return func(ctx context.Context) (string, error) {
		found, err := client.endpoints(ctx, f.Namespace, f.Service, f.Port)
		if err != nil {
			return "", err
		}
		if len(found) == 0 {
			return "", fmt.Errorf("forward connection: service %s/%s has no ready endpoint with port %s", f.Namespace, f.Service, f.Port)
		}
		return found[turn.Add(1)%uint64(len(found))], nil
	}
}

// endpoints lists "address:port" of a service's ready endpoints. port is a name
// or a number; empty gives bare addresses.
func (a *api) endpoints(ctx context.Context, namespace, service, port string) ([]string, error) {
	var list struct {
		Items []struct {
			Endpoints []struct {
				Addresses  []string
				Conditions struct{ Ready *bool }
			}
			Ports []struct {
				Name string
				Port int
			}
		}
	}
	selector := url.Values{"labelSelector": {"kubernetes.io/service-name=" + service}}
	path := "/apis/discovery.k8s.io/v1/namespaces/" + url.PathEscape(namespace) + "/endpointslices?" + selector.Encode()
	if err := a.do(ctx, http.MethodGet, path, nil, &list); err != nil {
		return nil, err
	}
	var found []string
	for _, slice := range list.Items {
		number := 0
		for _, p := range slice.Ports {
			if p.Name == port || strconv.Itoa(p.Port) == port {
				number = p.Port
			}
		}
		for _, e := range slice.Endpoints {
			if e.Conditions.Ready != nil && !*e.Conditions.Ready || len(e.Addresses) == 0 {
				continue
			}
			switch {
			case port == "":
				found = append(found, e.Addresses[0])
			case number != 0:
				found = append(found, net.JoinHostPort(e.Addresses[0], strconv.Itoa(number)))
			}
		}
	}
	return found, nil
}

// openListener opens a port of this system's loopback: the one asked for if it
// is free, any other if not.
func openListener(ctx context.Context, port int) (*os.File, int, error) {
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil && port != 0 {
		l, err = config.Listen(ctx, "tcp", "127.0.0.1:0")
	}
	if err != nil {
		return nil, 0, fmt.Errorf("open port for the lab: %w", err)
	}
	defer l.Close()
	tcp, ok := l.(*net.TCPListener)
	if !ok {
		return nil, 0, errors.New("open port for the lab: not a TCP socket")
	}
	file, err := tcp.File()
	if err != nil {
		return nil, 0, fmt.Errorf("open port for the lab: %w", err)
	}
	return file, tcp.Addr().(*net.TCPAddr).Port, nil
}
