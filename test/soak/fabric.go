package soak

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/router/pool"
	"github.com/hearth-dev/hearth/test/outside/rig"
)

// models offer each pool under its own name, and the other where none of it
// can take a request.
func models() []pool.ModelConfig {
	var list []pool.ModelConfig
	for i, name := range Models {
		list = append(list, pool.ModelConfig{Name: name, Targets: []pool.TargetConfig{
			{Pool: name, ServedModel: ServedModel, Weight: 1}, {Pool: Models[1-i], ServedModel: ServedModel},
		}})
	}
	return list
}

func pools() []pool.PoolConfig {
	return []pool.PoolConfig{{Name: Models[0], ContinuousUsage: true}, {Name: Models[1]}}
}

// Fabric is a set of real processes: an agent for each pool with two engines
// on a device each, two routers that last (one of plain text, one of TLS) and
// one that is replaced again and again.
type Fabric struct {
	rig     *rig.Rig
	roots   *tls.Config
	files   identity.Files
	engines []*engineProcess
	agents  []*agentProcess
	lasting []*routerProcess

	mu      sync.Mutex
	rolled  *routerProcess   // guarded by mu
	retired []*routerProcess // guarded by mu
}

// engineProcess is one `hearth engine-sim` that is started again when it dies.
type engineProcess struct {
	endpoint, device, url, log string
	agent                      *agentProcess
	command                    rig.Command

	mu      sync.Mutex
	process *rig.Process // guarded by mu
}

// agentProcess is one `hearth agent`.
type agentProcess struct {
	name, report, url string
	client            *admin.Client
	command           rig.Command
	process           *rig.Process // of the one goroutine that kills agents
}

// NewFabric lays out a fabric below dir. It starts nothing.
func NewFabric(ctx context.Context, dir string) (*Fabric, error) {
	r, err := rig.New(dir)
	if err != nil {
		return nil, err
	}
	f := &Fabric{rig: r}
	ca, err := identity.NewCA(identity.Domain, 24*time.Hour)
	if err != nil {
		return nil, fmt.Errorf("make certificates: %w", err)
	}
	pair, err := ca.Issue(identity.RoleRouter, "router", identity.IssueOptions{Hosts: []string{"127.0.0.1"}})
	if err != nil {
		return nil, fmt.Errorf("make certificates: %w", err)
	}
	f.files = identity.Files{Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem"), CA: filepath.Join(dir, "ca.pem")}
	if err := identity.WritePair(f.files.Cert, f.files.Key, pair); err != nil {
		return nil, fmt.Errorf("make certificates: %w", err)
	}
	if err := os.WriteFile(f.files.CA, ca.Cert(), 0o600); err != nil {
		return nil, fmt.Errorf("make certificates: %w", err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca.Cert())
	f.roots = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	if err := f.layOutNodes(ctx); err != nil {
		return nil, err
	}
	return f, nil
}

// Close ends every process.
func (f *Fabric) Close() { f.rig.Close() }

// layOutNodes writes the agents' configurations and a model for the engines.
func (f *Fabric) layOutNodes(ctx context.Context) error {
	bin, err := f.rig.Hearth(ctx)
	if err != nil {
		return err
	}
	model := filepath.Join(f.rig.Dir, "model")
	if err := os.MkdirAll(model, 0o700); err != nil {
		return fmt.Errorf("lay out the model: %w", err)
	}
	for name, text := range map[string]string{"config.json": `{"model_type":"sim"}`, "model.gguf": "sim"} {
		if err := os.WriteFile(filepath.Join(model, name), []byte(text), 0o600); err != nil {
			return fmt.Errorf("lay out the model: %w", err)
		}
	}
	for i, poolName := range Models {
		a := &agentProcess{name: fmt.Sprint("node-", i+1)}
		cfg := nodeagent.Default()
		cfg.Node = a.name
		var addrs [3]string
		for i := range addrs {
			if addrs[i], err = rig.FreeAddr(ctx); err != nil {
				return err
			}
		}
		dir := filepath.Join(f.rig.Dir, a.name)
		cfg.Listen = nodeagent.Listen{Mirror: addrs[0], Report: addrs[1], Admin: addrs[2], Socket: filepath.Join(dir, "agent.sock")}
		cfg.Weights.Dir, cfg.Weights.ViewsDir = filepath.Join(dir, "weights"), filepath.Join(dir, "views")
		cfg.Weights.KeepFree = 0
		cfg.Health.StateDir, cfg.Health.AllowInject = filepath.Join(dir, "health"), true
		for n := range 2 {
			e, err := f.layOutEngine(ctx, bin, model, a, n)
			if err != nil {
				return err
			}
			cfg.Devices = append(cfg.Devices, nodeagent.Device{ID: e.device, Product: "simulated"})
			cfg.Endpoints = append(cfg.Endpoints, nodeagent.Endpoint{
				Name: fmt.Sprint("engine-", n), URL: e.url, Engine: "sim", Pool: poolName,
				Accelerator: "simulated", Devices: []string{e.device}, Models: []string{ServedModel},
			})
		}
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("lay out %s: %w", a.name, err)
		}
		path := filepath.Join(f.rig.Dir, a.name+".yaml")
		if err := writeConfig(path, nodeagent.Kind, cfg); err != nil {
			return err
		}
		if a.client, err = admin.NewClient(cfg.Listen.Socket); err != nil {
			return err
		}
		f.rig.OnClose(a.client.Close)
		a.report, a.url = addrs[1], "http://"+addrs[2]
		a.command = rig.Command{Name: a.name, Path: bin, Args: []string{"agent", "--config", path}}
		f.agents = append(f.agents, a)
	}
	return nil
}

func (f *Fabric) layOutEngine(ctx context.Context, bin, model string, a *agentProcess, n int) (*engineProcess, error) {
	addr, err := rig.FreeAddr(ctx)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("%s-engine-%d", a.name, n)
	e := &engineProcess{
		endpoint: fmt.Sprintf("%s/engine-%d", a.name, n), device: fmt.Sprint("gpu-", n), url: "http://" + addr,
		log: filepath.Join(f.rig.Dir, name+".jsonl"), agent: a,
	}
	idle := "0s"
	if n == 1 {
		idle = "60ms" // closes idle connections just as they are used again
	}
	e.command = rig.Command{Name: name, Path: bin, Args: []string{
		"engine-sim", "--model", model, "--served-model", ServedModel, "--port", addr[len("127.0.0.1:"):], "--seed", fmt.Sprint(EngineSeed),
		"--prefill-rate", "50000000", "--decode-ms", "2", "--decode-slope-ms", "0.01", "--kv-tokens", fmt.Sprint(1 << 21), "--block-tokens", "64",
		"--max-running", "64", "--idle-timeout", idle, "--work-log", e.log, "--allow-faults",
	}}
	f.engines = append(f.engines, e)
	return e, nil
}

func writeConfig(path, kind string, cfg any) error {
	text, err := configfile.Marshal(cfg)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	head := fmt.Sprintf("apiVersion: %s\nkind: %s\n", configfile.APIVersion, kind)
	return replaceFile(path, append([]byte(head), text...))
}

// replaceFile puts a file into place whole.
func replaceFile(path string, text []byte) error {
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// keep runs an engine until ctx ends, started again a while after it dies.
func (e *engineProcess) keep(ctx context.Context, r *rig.Rig, rng *rand.Rand) error {
	for ctx.Err() == nil {
		p, err := r.Start(e.command)
		if err != nil {
			return err
		}
		e.mu.Lock()
		e.process = p
		e.mu.Unlock()
		select {
		case <-p.Done():
			_ = pause(ctx, time.Duration(50+rng.IntN(700))*time.Millisecond) // ctx: the loop looks
		case <-ctx.Done():
			p.Signal(syscall.SIGCONT)
			p.End(10 * time.Second)
		}
	}
	return nil
}

func (e *engineProcess) signal(sig syscall.Signal) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.process != nil {
		e.process.Signal(sig)
	}
}

// start starts the agent and waits until it answers.
func (a *agentProcess) start(ctx context.Context, r *rig.Rig) error {
	var err error
	if a.process, err = r.Start(a.command); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return rig.Until(ctx, a.name+" to answer", func(ctx context.Context) (bool, error) {
		return rig.Answers(ctx, a.url+"/readyz")
	}, a.process)
}
