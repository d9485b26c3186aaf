package cli

import (
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/durable"
	"github.com/hearth-dev/hearth/identity"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/nodeagent/admin"
)

// installed is a node on which an agent has run, and its configuration file.
func installed(t *testing.T) (config nodeagent.Config, file string) {
	t.Helper()
	dir := shortDir(t)
	c := nodeagent.Default()
	c.Node = "node-1"
	c.Listen.Socket, c.Listen.DataSocket = filepath.Join(dir, "agent.sock"), filepath.Join(dir, "data.sock")
	c.Weights.Dir, c.Health.StateDir, c.KV.Dir = filepath.Join(dir, "weights"), filepath.Join(dir, "health"), filepath.Join(dir, "kv")
	c.Kubernetes.Enabled = true
	c.Kubernetes.ClaimsDir, c.Kubernetes.CDIDir = filepath.Join(dir, "claims"), filepath.Join(dir, "cdi")
	c.Kubernetes.PluginsDir, c.Kubernetes.RegistrarDir = filepath.Join(dir, "plugins"), filepath.Join(dir, "registry")
	c.Network.Pins = filepath.Join(dir, "pins")
	text, err := configfile.Marshal(&c)
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(dir, "agent.yaml")
	put(t, file, "apiVersion: "+configfile.APIVersion+"\nkind: "+nodeagent.Kind+"\n"+string(text))
	put(t, filepath.Join(c.Health.StateDir, "health.json"), "{}")
	put(t, filepath.Join(c.Health.StateDir, "mine.txt"), "not the agent's")
	put(t, filepath.Join(c.Weights.Dir, "blobs", "sha256", "aa", "x"), "weights")
	put(t, filepath.Join(c.Weights.Dir, "claims", "uid-1.json"), "{}")
	put(t, filepath.Join(c.Kubernetes.PluginsDir, identity.Driver, "dra.sock"), "")
	put(t, filepath.Join(c.Kubernetes.PluginsDir, identity.Driver, "dra-device-metadata", "llm_smol", "gpu", "metadata.json"), "{}")
	put(t, filepath.Join(c.Kubernetes.PluginsDir, "other.example", "dra.sock"), "")
	put(t, filepath.Join(c.Kubernetes.RegistrarDir, identity.Driver+"-reg.sock"), "")
	put(t, filepath.Join(c.Kubernetes.CDIDir, "hearth.dev-claim_uid-1.json"), "{}")
	put(t, filepath.Join(c.Kubernetes.CDIDir, "other.json"), "{}")
	put(t, filepath.Join(c.Network.Pins, "v1-cgroup-0", "acct"), "counts")
	put(t, filepath.Join(c.Network.Pins, "v1-cgroup-77", "acct"), "counts")
	put(t, filepath.Join(c.Network.Pins, "cilium"), "not the agent's")
	return c, file
}

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func openLedger(t *testing.T, dir string) *ledger.Ledger {
	t.Helper()
	book, err := ledger.Open(ledger.Options{Dir: dir, BootID: "boot"})
	if err != nil {
		t.Fatal(err)
	}
	return book
}

func TestUninstallRefusesWhileClaimsArePreparedAndLeavesNothingAfter(t *testing.T) {
	t.Parallel()
	c, file := installed(t)
	book := openLedger(t, c.Kubernetes.ClaimsDir)
	entry := ledger.Entry{
		UID: "uid-1", Namespace: "llm", Name: "smol", Pods: []ledger.Pod{{Name: "engine-0", UID: "pod-1"}},
		Results: []ledger.Result{{Request: "gpu", Pool: "node-1", Device: "gpu-0000-1b-00-0", Kind: ledger.KindGPU}},
	}
	for _, err := range book.Begin(t.Context(), book.Arrive(), entry) {
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := book.Close(); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"uninstall", "--config", file}, {"uninstall", "--config", file, "--check"}, {"uninstall", "--config", file, "--weights"}} {
		out, said, code := hearth(t, args...)
		if code != terminal.ExitRefused || out != "" || !strings.Contains(said, "llm/smol (of engine-0)") {
			t.Errorf("hearth %q with a claim ended with %d: %s%s", args, code, out, said)
		}
	}
	book = openLedger(t, c.Kubernetes.ClaimsDir)
	if got := book.Entries(); len(got) != 1 {
		t.Fatalf("the ledger has %v", got)
	}
	for _, err := range book.Tombstone(t.Context(), "uid-1") {
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, said, code := hearth(t, "uninstall", "--config", file, "--check"); code == 0 {
		t.Errorf("with the ledger in use and no agent at the socket it ended with 0: %s", said)
	}
	if err := book.Close(); err != nil {
		t.Fatal(err)
	}

	if out, said, code := hearth(t, "uninstall", "--config", file, "--check"); code != 0 || !strings.Contains(out, "no claim is prepared") {
		t.Errorf("--check ended with %d: %s%s", code, out, said)
	}
	if out, said, code := hearth(t, "uninstall", "--config", file); code != 0 {
		t.Fatalf("it ended with %d: %s%s", code, out, said)
	}
	gone := []string{
		c.Kubernetes.ClaimsDir, filepath.Join(c.Kubernetes.PluginsDir, identity.Driver), filepath.Join(c.Health.StateDir, "health.json"),
		filepath.Join(c.Kubernetes.RegistrarDir, identity.Driver+"-reg.sock"), filepath.Join(c.Kubernetes.CDIDir, "hearth.dev-claim_uid-1.json"),
		filepath.Join(c.Network.Pins, "v1-cgroup-0"), filepath.Join(c.Network.Pins, "v1-cgroup-77"),
	}
	stay := []string{
		filepath.Join(c.Health.StateDir, "mine.txt"), filepath.Join(c.Kubernetes.PluginsDir, "other.example", "dra.sock"),
		filepath.Join(c.Kubernetes.CDIDir, "other.json"), filepath.Join(c.Network.Pins, "cilium"), filepath.Join(c.Weights.Dir, "blobs", "sha256", "aa", "x"),
	}
	look(t, gone, stay)
	if out, said, code := hearth(t, "uninstall", "--config", file, "--weights"); code != 0 {
		t.Fatalf("with --weights it ended with %d: %s%s", code, out, said)
	}
	look(t, append(gone, c.Weights.Dir), stay[:4])
}

func look(t *testing.T, gone, stay []string) {
	t.Helper()
	for _, path := range gone {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is still there: %v", path, err)
		}
	}
	for _, path := range stay {
		if _, err := os.Stat(path); err != nil {
			t.Errorf("%s was not the agent's and is gone: %v", path, err)
		}
	}
}

func TestUninstallAsksTheAgentThatRuns(t *testing.T) {
	t.Parallel()
	c, file := installed(t)
	book := openLedger(t, c.Kubernetes.ClaimsDir)
	defer func() { _ = book.Close() }()
	var claims []admin.Claim
	listener, err := identity.ListenSocket(t.Context(), c.Listen.Socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: admin.NewSocket(admin.Options{Pass: http.NotFoundHandler(), Claims: func() []admin.Claim { return claims }})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(listener) // that it was closed
	}()
	defer func() {
		_ = server.Close()
		<-done
	}()
	if out, said, code := hearth(t, "uninstall", "--config", file, "--check"); code != 0 {
		t.Errorf("beside an agent without claims --check ended with %d: %s%s", code, out, said)
	}
	if _, said, code := hearth(t, "uninstall", "--config", file); code != terminal.ExitRefused || !strings.Contains(said, "the agent runs") {
		t.Errorf("beside an agent it ended with %d: %s", code, said)
	}
	claims = []admin.Claim{{Namespace: "llm", Name: "old", State: "owing"}, {Namespace: "llm", Name: "smol", State: "prepared", Pods: []string{"engine-0"}}}
	if _, said, code := hearth(t, "uninstall", "--config", file, "--check"); code != terminal.ExitRefused || !strings.Contains(said, "claims prepared: llm/smol (of engine-0)") {
		t.Errorf("beside an agent with a claim --check ended with %d: %s", code, said)
	}
}

func TestUninstallRefusesWhileARoleOfTheAgentRuns(t *testing.T) {
	t.Parallel()
	lock := func(path string) func(t *testing.T) io.Closer {
		return func(t *testing.T) io.Closer {
			put(t, path, "")
			held, err := durable.Lock(path)
			if err != nil {
				t.Fatal(err)
			}
			return held
		}
	}
	listen := func(path string) func(t *testing.T) io.Closer {
		return func(t *testing.T) io.Closer {
			listener, err := identity.ListenSocket(t.Context(), path)
			if err != nil {
				t.Fatal(err)
			}
			return listener
		}
	}
	c, file := installed(t)
	for name, run := range map[string]func(t *testing.T) io.Closer{
		"the store of weights is in use": lock(filepath.Join(c.Weights.Dir, "lock")),
		"the KV space is in use":         lock(filepath.Join(c.KV.Dir, "lock")),
		"a control role listens":         listen(c.Listen.Socket),
		"a data role listens":            listen(c.Listen.DataSocket),
	} {
		role := run(t)
		for _, args := range [][]string{{"uninstall", "--config", file}, {"uninstall", "--config", file, "--weights"}} {
			if out, said, code := hearth(t, args...); code != terminal.ExitRefused || !strings.Contains(said, "the agent runs") || strings.Contains(out, "removed") {
				t.Errorf("where %s hearth %q ended with %d: %s%s", name, args, code, out, said)
			}
		}
		if err := role.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, said, code := hearth(t, "uninstall", "--config", file, "--weights"); code != 0 {
		t.Errorf("after all of them it ended with %d: %s", code, said)
	}
	look(t, []string{c.Weights.Dir, c.KV.Dir, filepath.Join(c.Kubernetes.PluginsDir, identity.Driver)}, nil)
}
