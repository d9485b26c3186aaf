package rig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache"
)

// How a Node pulls: in small pieces, so that pulls are met in the middle.
const (
	SegmentSize = units.MiB
	Streams     = 8
)

// NodeOptions describe an agent process.
type NodeOptions struct {
	Name      string   // default "node-1"
	Origin    string   // base URL of the hub it pulls from
	Refs      []string // patterns on "org/name"; default all
	Token     string   // what it shows the origin; default nothing
	Endpoints []nodeagent.Endpoint
}

// Node is a running `hearth agent`.
type Node struct {
	*Process
	Name   string
	Mirror string // http://127.0.0.1:port, for HF_ENDPOINT
	Report string // 127.0.0.1:port, for the router
	Admin  string // http://127.0.0.1:port
	Client *admin.Client

	rig     *Rig
	command Command
}

// StartNode writes a configuration, starts the agent and waits until it
// answers.
func (r *Rig) StartNode(ctx context.Context, opts NodeOptions) (*Node, error) {
	if opts.Name == "" {
		opts.Name = "node-1"
	}
	if len(opts.Refs) == 0 {
		opts.Refs = []string{"*/*"}
	}
	var addrs [3]string
	for i := range addrs {
		var err error
		if addrs[i], err = FreeAddr(ctx); err != nil {
			return nil, err
		}
	}
	dir := filepath.Join(r.Dir, opts.Name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("lay out %s: %w", opts.Name, err)
	}
	cfg := nodeagent.Default()
	cfg.Node = opts.Name
	cfg.Listen = nodeagent.Listen{Mirror: addrs[0], Report: addrs[1], Admin: addrs[2], Socket: filepath.Join(dir, "agent.sock")}
	cfg.Weights.Dir = filepath.Join(dir, "weights")
	cfg.Weights.ViewsDir = filepath.Join(dir, "views")
	cfg.Weights.KeepFree = 0
	cfg.Weights.SegmentSize, cfg.Weights.Streams = SegmentSize, Streams
	cfg.Health.StateDir = filepath.Join(dir, "health")
	cfg.Sources = []nodeagent.Source{{Name: "origin", Type: nodeagent.SourceHub, URL: opts.Origin, Refs: opts.Refs}}
	if opts.Token != "" {
		cfg.Sources[0].TokenFile = filepath.Join(dir, "token")
		if err := os.WriteFile(cfg.Sources[0].TokenFile, []byte(opts.Token), 0o600); err != nil {
			return nil, fmt.Errorf("lay out %s: %w", opts.Name, err)
		}
	}
	cfg.Endpoints = opts.Endpoints
	path := filepath.Join(r.Dir, opts.Name+".yaml")
	if err := writeConfig(path, nodeagent.Kind, cfg); err != nil {
		return nil, err
	}
	client, err := admin.NewClient(cfg.Listen.Socket)
	if err != nil {
		return nil, err
	}
	r.OnClose(client.Close)
	bin, err := r.Hearth(ctx)
	if err != nil {
		return nil, err
	}
	n := &Node{
		Name: opts.Name, Mirror: "http://" + addrs[0], Report: addrs[1], Admin: "http://" + addrs[2], Client: client,
		rig: r, command: Command{Name: opts.Name, Path: bin, Args: []string{"agent", "--config", path}},
	}
	return n, n.Restart(ctx)
}

// Restart starts the agent, which must not be running, and waits until it
// answers.
func (n *Node) Restart(ctx context.Context) error {
	var err error
	if n.Process, err = n.rig.Start(n.command); err != nil {
		return err
	}
	return Until(ctx, n.Name+" to answer", func(ctx context.Context) (bool, error) {
		return Answers(ctx, n.Admin+"/readyz")
	}, n.Process)
}

// Metric reads one series without labels from the agent's metrics page.
func (n *Node) Metric(ctx context.Context, name string) (float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, n.Admin+"/metrics", nil)
	if err != nil {
		return 0, fmt.Errorf("read metric %s: %w", name, err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, fmt.Errorf("read metric %s: %w", name, err)
	}
	defer func() { _ = resp.Body.Close() }()
	page, err := io.ReadAll(io.LimitReader(resp.Body, 4<<20))
	if err != nil {
		return 0, fmt.Errorf("read metric %s: %w", name, err)
	}
	for line := range strings.Lines(string(page)) {
		if value, found := strings.CutPrefix(strings.TrimSpace(line), name+" "); found {
			return strconv.ParseFloat(value, 64)
		}
	}
	return 0, fmt.Errorf("read metric %s: the page of %s lacks it", name, n.Name)
}

// HubView pulls an artifact and gives the directory of its hub cache view, for
// HF_HUB_CACHE.
func (n *Node) HubView(ctx context.Context, ref string) (string, error) {
	m, err := n.Client.Pull(ctx, admin.PullRequest{Ref: ref}, nil)
	if err != nil {
		return "", fmt.Errorf("pull %s: %w", ref, err)
	}
	if m.State != string(weightcache.Ready) {
		return "", fmt.Errorf("pull %s: it ended in state %s: %s", ref, m.State, m.Detail)
	}
	for _, dir := range m.Views {
		if repos, err := filepath.Glob(filepath.Join(dir, "models--*")); err == nil && len(repos) > 0 {
			return dir, nil
		}
	}
	return "", errors.New("find the hub view of " + ref + ": none among " + strings.Join(m.Views, ", "))
}
