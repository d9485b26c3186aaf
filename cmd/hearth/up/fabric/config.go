package fabric

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/router"
	"github.com/hearth-dev/hearth/router/pool"
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
		c.Nodes = append(c.Nodes, router.Node{Name: n.Name, Address: n.Report})
	}
	c.Policy = policy
	c.Pools = []pool.PoolConfig{{Name: poolName, ContinuousUsage: f.opts.EngineKind == "sim"}}
	c.Models = []pool.ModelConfig{{Name: f.opts.Served, Targets: []pool.TargetConfig{{
		Pool: poolName, ServedModel: f.opts.Served, Weight: 1, Ref: f.opts.Ref,
	}}}}
	c.Metering.File = filepath.Join(dir, "usage.jsonl")
	return writeConfig(path, router.Kind, &c)
}

func (f *Fabric) configureNode(*Node, string) error {
	return errors.New("configure agent: not wired yet")
}
