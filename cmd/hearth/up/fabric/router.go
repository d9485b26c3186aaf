package fabric

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"strconv"

	"github.com/hearth-dev/hearth/router/admin"
)

// portsPerRouter are the ingress and the admin listener.
const portsPerRouter = 2

// Router is one router process and where it answers.
type Router struct {
	*Process
	URL   string // ingress, http://127.0.0.1:port
	Admin string // admin listener, http://127.0.0.1:port
	// client asks the admin listener.
	client *admin.Client
}

func (f *Fabric) newRouter(name, policy string, ports []int) (*Router, error) {
	r := &Router{
		URL:   "http://127.0.0.1:" + strconv.Itoa(ports[0]),
		Admin: "http://127.0.0.1:" + strconv.Itoa(ports[1]),
	}
	var err error
	if r.client, err = admin.NewClient(r.Admin); err != nil {
		return nil, fmt.Errorf("lay out %s: %w", name, err)
	}
	config := filepath.Join(f.opts.Dir, name+".yaml")
	if err := f.configureRouter(r, name, policy, config); err != nil {
		return nil, err
	}
	r.Process = newProcess(f.opts.Dir, name, nil, f.opts.Program, "router", "--config", config)
	return r, nil
}

// AddRouter starts one more router over the same nodes, with another policy.
func (f *Fabric) AddRouter(ctx context.Context, name, policy string) (*Router, error) {
	ports, err := freePorts(ctx, portsPerRouter)
	if err != nil {
		return nil, err
	}
	r, err := f.newRouter(name, policy, ports)
	if err != nil {
		return nil, err
	}
	f.OtherRouters = append(f.OtherRouters, r)
	return r, f.StartRouter(ctx, r)
}

// StartRouter starts a router and waits until it is ready.
func (f *Fabric) StartRouter(ctx context.Context, r *Router) error {
	if err := r.Start(); err != nil {
		return err
	}
	return r.await(ctx, startLimit, func(ctx context.Context) error {
		return call(ctx, http.MethodGet, r.Admin+"/readyz")
	})
}

// AwaitEndpoints waits until a router can use every engine.
func (f *Fabric) AwaitEndpoints(ctx context.Context, r *Router) error {
	err := r.await(ctx, startLimit, func(ctx context.Context) error {
		for _, n := range f.Nodes {
			if err := n.unreachable(ctx); err != nil {
				return err
			}
		}
		return f.usable(ctx, r)
	})
	if err != nil {
		return fmt.Errorf("wait for the engines: %w", err)
	}
	return nil
}

// usable tells why a router cannot use every engine yet, nil once it can.
func (f *Fabric) usable(ctx context.Context, r *Router) error {
	status, err := r.client.Status(ctx)
	if err != nil {
		return fmt.Errorf("read status of %s: %w", r.Name, err)
	}
	for _, n := range status.Nodes {
		if !n.Connected {
			return fmt.Errorf("%s has no report from %s: %s", r.Name, n.Address, n.LastError)
		}
	}
	list, err := r.client.Endpoints(ctx)
	if err != nil {
		return fmt.Errorf("list endpoints of %s: %w", r.Name, err)
	}
	good := 0
	for _, e := range list {
		if e.Reachable && !e.Suspended && e.Health == "healthy" {
			good++
		}
	}
	if good != len(f.Engines) {
		return fmt.Errorf("%s can use %d of %d engines", r.Name, good, len(f.Engines))
	}
	return nil
}
