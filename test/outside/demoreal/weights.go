package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/sim/hub"
)

// pullThroughMirror starts the origin, the agent, and the first engine, which
// pulls by name as it would from a public hub.
func (d *demo) pullThroughMirror(ctx context.Context) (map[string]any, error) {
	root := filepath.Join(d.rig.Dir, "origin")
	if err := d.rig.WriteGGUFRepo(root); err != nil {
		return nil, err
	}
	d.origin = hub.New(hub.Options{Dir: root})
	url, err := d.rig.Serve(ctx, d.origin)
	if err != nil {
		return nil, err
	}
	for i := range d.addrs {
		if d.addrs[i], err = rig.FreeAddr(ctx); err != nil {
			return nil, err
		}
	}
	ref := "hub://" + rig.GGUFRepo
	endpoint := func(name, addr string) nodeagent.Endpoint {
		return nodeagent.Endpoint{
			Name: name, URL: "http://" + addr, Engine: "llama-server", Pool: "llama", Accelerator: "cpu", Ref: ref,
			Models: []string{rig.LlamaAlias},
		}
	}
	d.node, err = d.rig.StartNode(ctx, rig.NodeOptions{
		Origin: url, Refs: []string{rig.GGUFRepo},
		Endpoints: []nodeagent.Endpoint{endpoint("by-mirror", d.addrs[0]), endpoint("by-view", d.addrs[1])},
	})
	if err != nil {
		return nil, err
	}
	say("starting an engine with: llama-server -hf %s, HF_ENDPOINT=%s", rig.GGUFRepo, d.node.Mirror)
	_, err = d.rig.StartLlama(ctx, rig.LlamaOptions{
		Name: "by-mirror", Addr: d.addrs[0], Source: []string{"-hf", rig.GGUFRepo},
		Env: []string{"HF_ENDPOINT=" + d.node.Mirror, "HF_HUB_CACHE=" + filepath.Join(d.rig.Dir, "llama-cache")},
	})
	if err != nil {
		return nil, err
	}
	st, err := os.Stat(d.rig.Deps.GGUF)
	if err != nil {
		return nil, fmt.Errorf("find the model: %w", err)
	}
	got := d.origin.Bytes()
	figures := map[string]any{"originBytes": got, "modelBytes": st.Size()}
	if got < st.Size() || got > st.Size()+st.Size()/20 {
		return figures, fmt.Errorf("the origin sent %d bytes for a model of %d: want it once", got, st.Size())
	}
	return figures, nil
}

// runOnView starts the second engine on the hub cache view: read-only, with
// another user where this one is root, and without any endpoint to pull from.
func (d *demo) runOnView(ctx context.Context) (map[string]any, error) {
	before := d.origin.Bytes()
	dir, err := d.node.HubView(ctx, "hub://"+rig.GGUFRepo)
	if err != nil {
		return nil, err
	}
	pod, err := d.rig.NewPod(dir)
	if err != nil {
		return nil, err
	}
	say("starting an engine with: llama-server -hf %s --offline, HF_HUB_CACHE on the mounted view", rig.GGUFRepo)
	_, err = d.rig.StartLlama(ctx, rig.LlamaOptions{
		Name: "by-view", Addr: d.addrs[1], Source: []string{"-hf", rig.GGUFRepo, "--offline"},
		Env: []string{"HF_HUB_CACHE=" + pod.View}, Pod: pod,
	})
	if err != nil {
		return nil, err
	}
	more := d.origin.Bytes() - before
	figures := map[string]any{"originBytes": more}
	if more != 0 {
		return figures, fmt.Errorf("a second engine on the same node cost the origin %d bytes: want none", more)
	}
	return figures, nil
}
