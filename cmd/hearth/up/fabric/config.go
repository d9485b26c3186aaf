package fabric

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/router"
	"github.com/hearth-dev/hearth/router/feed"
	"github.com/hearth-dev/hearth/router/pool"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// poolName is the one pool of a fabric.
const poolName = "demo"

// writeConfig writes a component's configuration file.
func writeConfig(path, kind string, config any) error {
	text, err := configfile.Marshal(config)
	if err != nil {
		return fmt.Errorf("write configuration %s: %w", path, err)
	}
	head := fmt.Sprintf("apiVersion: %s\nkind: %s\n", configfile.APIVersion, kind)
	if err := os.WriteFile(path, append([]byte(head), text...), 0o600); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	return nil
}

// configureRouter writes the configuration of a router over all nodes.
func (f *Fabric) configureRouter(r *Router, name, policy, path string) error {
	files, err := f.certs.issue(identity.RoleRouter, name)
	if err != nil {
		return err
	}
	dir := filepath.Join(f.opts.Dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("lay out %s: %w", name, err)
	}
	c := router.Default()
	c.Name = name
	c.Listen.Ingress = strings.TrimPrefix(r.URL, "http://")
	c.Listen.Admin = strings.TrimPrefix(r.Admin, "http://")
	c.Listen.Socket = filepath.Join(dir, "r.sock")
	c.TLS = router.TLS{Cert: files.Cert, Key: files.Key, CA: files.CA}
	for _, n := range f.Nodes {
		c.Nodes = append(c.Nodes, feed.Node{Name: n.Name, Address: n.Report})
	}
	c.Policy = policy
	c.Pools = []pool.PoolConfig{{Name: poolName, ContinuousUsage: f.opts.EngineKind == "sim"}}
	c.Models = []pool.ModelConfig{{Name: f.opts.Served, Targets: []pool.TargetConfig{{
		Pool: poolName, ServedModel: f.opts.Served, Weight: 1, Ref: f.opts.Ref,
	}}}}
	c.Limits.DrainTimeout = units.Duration(stopGrace / 2)
	c.Metering.File = filepath.Join(dir, "usage.jsonl")
	return writeConfig(path, router.Kind, &c)
}

// configureNode writes the configuration of an agent with its engines, one
// simulated device for each.
func (f *Fabric) configureNode(n *Node, origin string) error {
	files, err := f.certs.issue(identity.RoleAgent, n.Name)
	if err != nil {
		return err
	}
	ref, err := artifact.ParseRef(f.opts.Ref)
	if err != nil {
		return fmt.Errorf("configure %s: %w", n.Name, err)
	}
	c := nodeagent.Default()
	c.Node = n.Name
	c.Listen = nodeagent.Listen{
		Mirror: strings.TrimPrefix(n.Mirror, "http://"), Report: n.Report,
		Admin: strings.TrimPrefix(n.Admin, "http://"), Socket: n.Socket,
	}
	c.TLS = nodeagent.TLS{Cert: files.Cert, Key: files.Key, CA: files.CA}
	c.Weights.Dir = filepath.Join(n.dir, "weights")
	c.Weights.KeepFree = 256 * units.MiB
	if f.opts.SegmentSize > 0 {
		c.Weights.SegmentSize = f.opts.SegmentSize
	}
	if f.opts.Streams > 0 {
		c.Weights.Streams = f.opts.Streams
	}
	c.Health.StateDir = filepath.Join(n.dir, "health")
	c.Health.AllowInject = true
	c.Network.Pins = "" // a fabric leaves nothing behind
	c.Sources = []nodeagent.Source{f.source(ref, origin)}
	c.Inventory.Sim = n.inventory
	for _, e := range n.engines {
		if n.inventory == "" {
			c.Devices = append(c.Devices, nodeagent.Device{ID: e.Device, Product: "simulated"})
		}
		c.Endpoints = append(c.Endpoints, nodeagent.Endpoint{
			Name: e.Name, URL: e.URL, Engine: f.opts.EngineKind, Pool: poolName, Accelerator: "simulated",
			Devices: []string{e.Device}, Ref: ref.String(), Models: []string{f.opts.Served},
		})
	}
	return writeConfig(filepath.Join(f.opts.Dir, n.Name+".yaml"), nodeagent.Kind, &c)
}

// source is the one origin an agent may pull from, for the repositories of the
// fabric's own origin or for the one ref.
func (f *Fabric) source(ref artifact.Ref, origin string) nodeagent.Source {
	if ref.Scheme == artifact.SchemeDir {
		return nodeagent.Source{Name: "folder", Type: nodeagent.SourceDir, Root: filepath.Dir(ref.Name), Refs: []string{ref.Name}}
	}
	s := nodeagent.Source{Name: "origin", Type: nodeagent.SourceHub, URL: origin, Refs: []string{ref.Name}}
	if f.opts.Origin == "" {
		s.Refs = slices.Sorted(maps.Keys(f.opts.Repos))
	}
	return s
}
