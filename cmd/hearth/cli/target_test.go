package cli

import (
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/cmd/hearth/upstate"
)

func TestCommandsFindTheAgentsOfARunningUp(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	t.Setenv(envAgent, "")
	if _, complaint, code := hearth(t, "status"); code != terminal.ExitUnreachable || !strings.Contains(complaint, "start 'hearth up'") {
		t.Errorf("nothing running: status %d: %s", code, complaint)
	}
	if err := upstate.Write(upstate.State{Agents: []upstate.Agent{
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
