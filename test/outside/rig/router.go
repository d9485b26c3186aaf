package rig

import (
	"context"
	"path/filepath"

	"github.com/hearth-dev/hearth/router"
	"github.com/hearth-dev/hearth/router/feed"
	"github.com/hearth-dev/hearth/router/pool"
	"github.com/hearth-dev/hearth/units"
)

// RouterOptions describe a router process.
type RouterOptions struct {
	Nodes  []*Node
	Models []pool.ModelConfig
	Pools  []pool.PoolConfig
	// Body is the longest request body; 0 means the router's default.
	Body units.Bytes
}

// Router is a running `hearth router`.
type Router struct {
	*Process
	URL    string // http://127.0.0.1:port of the ingress
	Admin  string // http://127.0.0.1:port
	Usage  string // path of the usage records
	Config string // path of its configuration
}

// StartRouter writes a configuration, starts the router and waits until it
// answers.
func (r *Rig) StartRouter(ctx context.Context, opts RouterOptions) (*Router, error) {
	ingress, err := FreeAddr(ctx)
	if err != nil {
		return nil, err
	}
	adminAddr, err := FreeAddr(ctx)
	if err != nil {
		return nil, err
	}
	cfg := router.Default()
	cfg.Listen = router.Listen{Ingress: ingress, Admin: adminAddr, Socket: filepath.Join(r.Dir, "router.sock")}
	cfg.Models, cfg.Pools = opts.Models, opts.Pools
	cfg.Metering.File = filepath.Join(r.Dir, "usage.jsonl")
	if opts.Body > 0 {
		cfg.Limits.BodyBytes = opts.Body
	}
	for _, n := range opts.Nodes {
		cfg.Nodes = append(cfg.Nodes, feed.Node{Name: n.Name, Address: n.Report})
	}
	rt := &Router{
		URL: "http://" + ingress, Admin: "http://" + adminAddr,
		Usage: cfg.Metering.File, Config: filepath.Join(r.Dir, "router.yaml"),
	}
	if err := writeConfig(rt.Config, router.Kind, cfg); err != nil {
		return nil, err
	}
	bin, err := r.Hearth(ctx)
	if err != nil {
		return nil, err
	}
	rt.Process, err = r.Start(Command{Name: "router", Path: bin, Args: []string{"router", "--config", rt.Config}})
	if err != nil {
		return nil, err
	}
	return rt, Until(ctx, "the router to answer", func(ctx context.Context) (bool, error) {
		return Answers(ctx, rt.Admin+"/readyz")
	}, rt.Process)
}
