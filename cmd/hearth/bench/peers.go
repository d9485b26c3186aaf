package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// peer is a proxy of others, running in front of the bench's engine.
type peer struct {
	name    string
	process *process
}

// peerPrograms are the peers and how each is started in front of one engine. The
// versions stand in peers-requirements.txt.
var peerPrograms = []struct {
	name, program string
	args          func(b *routerBench, dir, host, port, metrics string) ([]string, error)
}{
	{"nginx", "nginx", nginxArgs},
	{"vllm-router round_robin", "vllm-router", func(b *routerBench, _, host, port, metrics string) ([]string, error) {
		return []string{"--host", host, "--port", port, "--worker-urls", "http://" + b.engine.addr, "--policy", "round_robin", "--prometheus-port", metrics}, nil
	}},
	{"vllm-router cache_aware", "vllm-router", func(b *routerBench, _, host, port, metrics string) ([]string, error) {
		return []string{"--host", host, "--port", port, "--worker-urls", "http://" + b.engine.addr, "--policy", "cache_aware", "--prometheus-port", metrics}, nil
	}},
	{"smg round_robin", "smg", func(b *routerBench, _, host, port, metrics string) ([]string, error) {
		return smgArgs(b, host, port, metrics, "round_robin"), nil
	}},
	{"smg cache_aware", "smg", func(b *routerBench, _, host, port, metrics string) ([]string, error) {
		return smgArgs(b, host, port, metrics, "cache_aware"), nil
	}},
}

func smgArgs(b *routerBench, host, port, metrics, policy string) []string {
	return []string{
		"launch", "--host", host, "--port", port, "--worker-urls", "http://" + b.engine.addr, "--policy", policy,
		"--prometheus-port", metrics, "--max-concurrent-requests", "-1",
	}
}

// nginxArgs writes a configuration of one worker that keeps its connections to the
// engine and passes streams on unbuffered.
func nginxArgs(b *routerBench, dir, host, port, _ string) ([]string, error) {
	config := fmt.Sprintf(`daemon off;
worker_processes 1;
pid %[1]s/nginx.pid;
error_log stderr error;
events { worker_connections 8192; }
http {
  access_log off;
  client_body_temp_path %[1]s/body;
  proxy_temp_path %[1]s/proxy;
  fastcgi_temp_path %[1]s/fastcgi;
  uwsgi_temp_path %[1]s/uwsgi;
  scgi_temp_path %[1]s/scgi;
  client_max_body_size 64m;
  client_body_buffer_size 1m;
  keepalive_requests 1000000;
  upstream engine { server %[2]s; keepalive 1024; keepalive_requests 1000000; }
  server {
    listen %[3]s;
    location / {
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }
  }
}
`, dir, b.engine.addr, net.JoinHostPort(host, port))
	path := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		return nil, fmt.Errorf("write nginx configuration: %w", err)
	}
	return []string{"-p", dir, "-c", path}, nil
}

// startPeers starts every peer. What is lacking is an error that names it.
func (b *routerBench) startPeers(ctx context.Context) error {
	for _, program := range peerPrograms {
		found, err := exec.LookPath(program.program)
		if err != nil {
			return fmt.Errorf("find peer %s: %w; run: make bench-peers", program.name, err)
		}
		if err := b.startPeer(ctx, program.name, found, program.args); err != nil {
			return err
		}
	}
	return nil
}

func (b *routerBench) startPeer(ctx context.Context, name, program string, args func(b *routerBench, dir, host, port, metrics string) ([]string, error)) error {
	addr, err := freeAddr(ctx)
	if err != nil {
		return err
	}
	metrics, err := freeAddr(ctx)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(b.dir, "peer-")
	if err != nil {
		return fmt.Errorf("make directory of peer: %w", err)
	}
	host, port, _ := net.SplitHostPort(addr)
	_, metricsPort, _ := net.SplitHostPort(metrics)
	words, err := args(b, dir, host, port, metricsPort)
	if err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return fmt.Errorf("make log of peer: %w", err)
	}
	defer func() { _ = log.Close() }()
	p, err := startProgram(ctx, b.core, addr, log, program, words...)
	if err == nil {
		b.peers = append(b.peers, peer{name, p})
		err = ready(ctx, addr)
	}
	if err != nil {
		text, _ := os.ReadFile(log.Name())
		return fmt.Errorf("start peer %s: %w; it said: %s", name, err, text[max(0, len(text)-2000):])
	}
	b.progress("started " + name)
	p.pin(b.core)
	return nil
}

// ready waits until a peer passes a request on: it listens before it has found its
// engine alive.
func ready(ctx context.Context, addr string) error {
	deadline, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	retry := time.NewTicker(100 * time.Millisecond)
	defer retry.Stop()
	for {
		c, err := dial(deadline, addr)
		if err == nil {
			err = c.do(requestBytes(modeJSON, false, 800, "ready"))
			_ = c.conn.Close()
		}
		if err == nil {
			return nil
		}
		select {
		case <-retry.C:
		case <-deadline.Done():
			return errors.Join(fmt.Errorf("no request passes after %s", startTimeout), err)
		}
	}
}
