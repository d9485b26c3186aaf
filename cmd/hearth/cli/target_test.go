package cli

import (
	"crypto/tls"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/cmd/hearth/upstate"
	"github.com/hearth-dev/hearth/identity"
)

func TestCommandsFindTheAgentsOfARunningUp(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	t.Setenv(envAgent, "")
	if _, complaint, code := hearth(t, "status"); code != terminal.ExitUnreachable || !strings.Contains(complaint, "start 'hearth up'") {
		t.Errorf("nothing running: status %d: %s", code, complaint)
	}
	if err := upstate.Write(upstate.State{PID: os.Getpid(), Agents: []upstate.Agent{
		{Node: "node-1", Admin: fakeAgent(t), Socket: "/nowhere/1.sock"},
		{Node: "node-2", Admin: fakeAgent(t), Socket: "/nowhere/2.sock"},
	}}); err != nil {
		t.Fatal(err)
	}
	out, complaint, code := hearth(t, "models", "list")
	if code != terminal.ExitOK || !strings.Contains(out, "node-1") || !strings.Contains(out, "node-2") {
		t.Errorf("models list: status %d: %s%s", code, out, complaint)
	}
	if out, _, _ := hearth(t, "models", "list", "--node", "node-2"); strings.Contains(out, "node-1") || !strings.Contains(out, "node-2") {
		t.Errorf("models list --node node-2: %s", out)
	}
	if _, complaint, code := hearth(t, "models", "rm", testRef); code != terminal.ExitUsage || !strings.Contains(complaint, "say which with --node") {
		t.Errorf("rm on two nodes: status %d: %s", code, complaint)
	}
	if _, complaint, code := hearth(t, "nodes", "--node", "node-9"); code != terminal.ExitNotFound || !strings.Contains(complaint, "node-1, node-2") {
		t.Errorf("unknown node: status %d: %s", code, complaint)
	}
	t.Setenv(envAgent, "no address")
	if _, complaint, code := hearth(t, "nodes"); code != terminal.ExitUsage || !strings.Contains(complaint, "$HEARTH_AGENT") {
		t.Errorf("bad $HEARTH_AGENT: status %d: %s", code, complaint)
	}
}

func TestTheDefaultSocketsAreThoseOfTheRuntimeDirectory(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(envRuntime, dir)
	if got, want := defaultSocket("agent"), filepath.Join(dir, "agent.sock"); got != want {
		t.Errorf("agent's socket is %s, want %s", got, want)
	}
	t.Setenv(envRuntime, "")
	if got, want := defaultSocket("router"), filepath.Join(identity.RuntimeDir, "router.sock"); got != want {
		t.Errorf("router's socket is %s, want %s", got, want)
	}
}

func TestAFileOfAHearthUpThatWasKilledIsNotBelieved(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	t.Setenv(envAgent, "")
	t.Setenv(envRouter, "")
	const gone = "http://127.0.0.1:1" // no other test is given this port
	if err := upstate.Write(upstate.State{PID: os.Getpid(), RouterAdmin: gone, Agents: []upstate.Agent{{Node: "node-1", Admin: gone, Socket: "/nowhere.sock"}}}); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"status"}, {"nodes"}, {"explain", "hi"}, {"inject", "xid", "79", "--device", "gpu-0"}} {
		_, complaint, code := hearth(t, args...)
		if code != terminal.ExitUnreachable || !strings.Contains(complaint, "ended without cleaning up") || !strings.Contains(complaint, upstate.Path(os.Getpid())) {
			t.Errorf("%v: status %d: %s", args, code, complaint)
		}
	}
}

func TestAnAdminListenerUnderCertificatesIsAskedWithOnes(t *testing.T) {
	dir := t.TempDir()
	ca, err := identity.NewCA("test", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	files := func(role identity.Role) identity.Files {
		pair, err := ca.Issue(role, "x", identity.IssueOptions{})
		if err != nil {
			t.Fatal(err)
		}
		f := identity.Files{Cert: filepath.Join(dir, string(role)+".pem"), Key: filepath.Join(dir, string(role)+"-key.pem"), CA: filepath.Join(dir, "ca.pem")}
		if err := identity.WritePair(f.Cert, f.Key, pair); err != nil {
			t.Fatal(err)
		}
		return f
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.pem"), ca.Cert(), 0o600); err != nil {
		t.Fatal(err)
	}
	config, err := identity.ServerTLS(files(identity.RoleAgent), identity.RoleClient)
	if err != nil {
		t.Fatal(err)
	}
	plain, err := url.Parse(fakeAgent(t))
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(httputil.NewSingleHostReverseProxy(plain))
	server.Listener = tls.NewListener(server.Listener, config)
	server.Start()
	t.Cleanup(server.Close)
	addr := server.Listener.Addr().String()
	own := files(identity.RoleClient)
	if out, complaint, code := hearth(t, "nodes", "--addr", addr, "--tls-cert", own.Cert, "--tls-key", own.Key, "--tls-ca", own.CA); code != terminal.ExitOK || !strings.Contains(out, "gpu-0") {
		t.Errorf("with certificates: status %d: %s%s", code, out, complaint)
	}
	if _, complaint, code := hearth(t, "nodes", "--addr", addr, "--tls-cert", own.Cert); code != terminal.ExitUsage || !strings.Contains(complaint, "want all of --tls-cert") {
		t.Errorf("with half of them: status %d: %s", code, complaint)
	}
	t.Setenv(envRouter, "https://"+addr) // an agent's: what counts is whether its certificate is checked by --tls-ca
	if _, complaint, code := hearth(t, "status", "--tls-cert", own.Cert, "--tls-key", own.Key, "--tls-ca", own.CA); code == terminal.ExitOK || !strings.Contains(complaint, "another role") {
		t.Errorf("a router by the flags: status %d: %s", code, complaint)
	}
	wrong := files(identity.RoleRouter)
	t.Setenv(envCert, wrong.Cert)
	t.Setenv(envKey, wrong.Key)
	t.Setenv(envCA, wrong.CA)
	if _, complaint, code := hearth(t, "nodes", "--addr", addr); code == terminal.ExitOK {
		t.Errorf("a certificate of another role was taken: %s", complaint)
	}
	t.Setenv(envCert, own.Cert)
	t.Setenv(envKey, own.Key)
	if _, complaint, code := hearth(t, "nodes", "--addr", addr); code != terminal.ExitOK {
		t.Errorf("with certificates from the environment: status %d: %s", code, complaint)
	}
}
