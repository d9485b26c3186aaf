//go:build vllm

package vllm

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/nodeagent"
	nodeadmin "github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/router/admin"
	"github.com/hearth-dev/hearth/router/pool"
	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache"
)

// Logical models of the router.
const (
	chatModel    = "chat"
	adaptedModel = "chat-adapted"
)

// fabric is a hub origin, an agent with its mirror, three engines and a router.
type fabric struct {
	rig    *rig.Rig
	root   string // of vLLM
	origin *hub.Origin
	models string // the origin's folder
	node   *rig.Node
	router *rig.Router
	admin  *admin.Client

	mirrored, hubView, flatView *engine

	// What the starts came to.
	coldBytes     int64 // that the origin sent for the first engine's model
	warmRequests  int64 // that the origin got while the other two started
	firstRequests map[string]int64
	startedAfter  time.Duration
	baseSize      int64 // of the model's files, in bytes
}

func (f *fabric) engines() []*engine { return []*engine{f.mirrored, f.hubView, f.flatView} }

// byID finds the engine of a usage record's endpoint.
func (f *fabric) byID(endpoint string) *engine {
	for _, e := range f.engines() {
		if strings.Contains(endpoint, e.name) {
			return e
		}
	}
	return nil
}

func startFabric() (_ *fabric, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*readyLimit)
	defer cancel()
	dir, err := os.MkdirTemp("", "hearth-vllm-")
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(dir, 0o755); err != nil { // views are read by another user
		return nil, err
	}
	r, err := rig.New(dir)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			r.Close()
			err = fmt.Errorf("start the fabric (logs are in %s): %w", dir, err)
		}
	}()
	f := &fabric{rig: r}
	if f.root, err = findRoot(ctx, f.rig); err != nil {
		return nil, err
	}
	if err := f.publish(ctx); err != nil {
		return nil, err
	}
	if err := f.startEngines(ctx); err != nil {
		return nil, err
	}
	return f, f.startRouter(ctx)
}

// publish writes the model and the adapter to an origin and starts the agent
// that pulls from there, with three engines that do not run yet.
func (f *fabric) publish(ctx context.Context) error {
	f.models = filepath.Join(f.rig.Dir, "origin")
	opts := hub.ModelOptions{Size: 512 * units.KiB, Shards: 3, Seed: 32}
	if err := hub.WriteModel(filepath.Join(f.models, base), opts); err != nil {
		return err
	}
	if err := hub.WriteAdapter(filepath.Join(f.models, lora), base, opts); err != nil {
		return err
	}
	f.origin = hub.New(hub.Options{Dir: f.models})
	url, err := f.rig.Serve(ctx, f.origin)
	if err != nil {
		return err
	}
	var endpoints []nodeagent.Endpoint
	for _, e := range []struct {
		name string
		to   **engine
	}{{"mirrored", &f.mirrored}, {"hub-view", &f.hubView}, {"flat-view", &f.flatView}} {
		addr, err := rig.FreeAddr(ctx)
		if err != nil {
			return err
		}
		*e.to = &engine{name: e.name, url: "http://" + addr}
		endpoints = append(endpoints, nodeagent.Endpoint{
			Name: e.name, URL: "http://" + addr, Engine: "vllm", Pool: "tiny", Accelerator: "cpu", Ref: "hub://" + base,
		})
	}
	f.node, err = f.rig.StartNode(ctx, rig.NodeOptions{Origin: url, Endpoints: endpoints})
	return err
}

// startEngines starts the first engine on nothing but a name and the mirror,
// and, once the agent has what that made it pull, the other two on views.
func (f *fabric) startEngines(ctx context.Context) error {
	began := time.Now()
	f.mirrored.source = source{
		model: base, adapter: lora,
		env: []string{"HF_ENDPOINT=" + f.node.Mirror, "HF_HOME=/tmp/hub"},
	}
	if err := f.mirrored.start(f.rig, f.root); err != nil {
		return err
	}
	var m nodeadmin.Model
	err := rig.Until(ctx, "the first engine to fetch its model through the mirror", func(ctx context.Context) (bool, error) {
		var err error
		m, err = f.node.Client.Model(ctx, "hub://"+base)
		return err == nil && m.State == string(weightcache.Ready), err
	}, f.mirrored.Process)
	if err != nil {
		return err
	}
	f.baseSize, f.coldBytes, f.firstRequests = m.Size, f.origin.Bytes(), f.origin.Routes()
	hubView, flatView, err := f.views(ctx, "hub://"+base)
	if err != nil {
		return err
	}
	_, adapter, err := f.views(ctx, "hub://"+lora)
	if err != nil {
		return err
	}
	before := f.origin.Requests()
	offline := []string{"HF_HUB_OFFLINE=1", "HF_ENDPOINT=http://127.0.0.1:9", "HF_HOME=/tmp/hub"}
	f.hubView.source = source{
		model: base, adapter: adapter, folders: []string{hubView, adapter}, user: 65534,
		env: append(slices.Clone(offline), "HF_HUB_CACHE="+hubView),
	}
	f.flatView.source = source{model: flatView, adapter: adapter, folders: []string{flatView, adapter}, user: 65534, env: offline}
	for _, e := range []*engine{f.hubView, f.flatView} {
		if err := e.start(f.rig, f.root); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, readyLimit)
	defer cancel()
	for _, e := range f.engines() {
		if err := e.ready(ctx); err != nil {
			return err
		}
	}
	f.startedAfter = time.Since(began)
	f.warmRequests = f.origin.Requests() - before
	return nil
}

// views makes the agent have an artifact and gives its hub cache view and its
// flat one.
func (f *fabric) views(ctx context.Context, ref string) (hubView, flat string, err error) {
	m, err := f.node.Client.Pull(ctx, nodeadmin.PullRequest{Ref: ref}, nil)
	if err != nil {
		return "", "", err
	}
	for _, dir := range m.Views {
		if repos, err := filepath.Glob(filepath.Join(dir, "models--*")); err == nil && len(repos) > 0 {
			hubView = dir
		} else {
			flat = dir
		}
	}
	if hubView == "" || flat == "" {
		return "", "", fmt.Errorf("find the views of %s, which is %s: among %q", ref, m.State, m.Views)
	}
	return hubView, flat, nil
}

func (f *fabric) startRouter(ctx context.Context) error {
	target := func(served string) []pool.TargetConfig {
		return []pool.TargetConfig{{Pool: "tiny", ServedModel: served, Weight: 1, Ref: "hub://" + base}}
	}
	var err error
	f.router, err = f.rig.StartRouter(ctx, rig.RouterOptions{
		Nodes:  []*rig.Node{f.node},
		Models: []pool.ModelConfig{{Name: chatModel, Targets: target(base)}, {Name: adaptedModel, Targets: target(adapted)}},
		Pools:  []pool.PoolConfig{{Name: "tiny", ContinuousUsage: true}},
	})
	if err != nil {
		return err
	}
	if f.admin, err = admin.NewClient(f.router.Admin); err != nil {
		return err
	}
	f.rig.OnClose(f.admin.Close)
	return nil
}

// settle waits until the engines are idle and the router may use all of them.
func (f *fabric) settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return rig.Until(ctx, "three idle engines in service", func(ctx context.Context) (bool, error) {
		for _, e := range f.engines() {
			if idle, err := e.idle(ctx); !idle {
				return false, err
			}
		}
		list, err := f.admin.Endpoints(ctx)
		serving := 0
		for _, e := range list {
			if e.Reachable && !e.Suspended && e.InFlight == 0 && slices.Contains(e.Served, adapted) {
				serving++
			}
		}
		if err == nil && serving != len(f.engines()) {
			err = fmt.Errorf("%d of %d endpoints serve: %+v", serving, len(list), list)
		}
		return err == nil, err
	})
}

// snapshot reads every engine's counters by endpoint name.
func (f *fabric) snapshot(ctx context.Context) (map[string]counters, error) {
	all := map[string]counters{}
	var problems []error
	for _, e := range f.engines() {
		c, err := e.counters(ctx)
		all[e.name] = c
		problems = append(problems, err)
	}
	return all, errors.Join(problems...)
}

// since is how much the counters grew, over all engines where name is empty.
func since(before, after map[string]counters, engine, counter string) int {
	sum := 0.0
	for name := range maps.Keys(after) {
		if engine == "" || engine == name {
			sum += after[name][counter] - before[name][counter]
		}
	}
	return int(sum)
}
