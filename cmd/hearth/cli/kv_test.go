package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/cmd/hearth/terminal"
	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	routeradmin "github.com/hearth-dev/hearth/router/admin"
	"github.com/hearth-dev/hearth/router/feed"
	"github.com/hearth-dev/hearth/units"
)

// kvNode is a node with a KV store for a tenant "chat", and its configuration file.
func kvNode(t *testing.T) (config nodeagent.Config, file string) {
	t.Helper()
	dir := shortDir(t)
	c := nodeagent.Default()
	c.Node = "node-1"
	c.Listen = nodeagent.Listen{Socket: filepath.Join(dir, "agent.sock")}
	c.Weights.Dir, c.Health.StateDir, c.KV.Dir = filepath.Join(dir, "weights"), filepath.Join(dir, "health"), filepath.Join(dir, "kv")
	c.Network.Pins = filepath.Join(dir, "pins")
	c.Weights.KeepFree = 0
	c.KV.Drives = []string{filepath.Join(dir, "drive")}
	c.KV.Memory, c.KV.NVMe, c.KV.Admit = 8*units.MiB, 100*units.MiB, nodeagent.AdmitAll
	c.KV.Tenants = []nodeagent.KVTenant{{Name: "chat", Memory: 4 * units.MiB, NVMe: 40 * units.MiB, Socket: filepath.Join(dir, "chat.sock")}}
	text, err := configfile.Marshal(&c)
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(dir, "agent.yaml")
	put(t, file, "apiVersion: "+configfile.APIVersion+"\nkind: "+nodeagent.Kind+"\n"+string(text))
	return c, file
}

// runAgent runs an agent until stop, which waits for its end.
func runAgent(t *testing.T, c nodeagent.Config) (stop func()) {
	t.Helper()
	agent, err := nodeagent.New(c, nodeagent.Options{Version: "test", BootID: "boot"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- agent.Run(ctx) }()
	select {
	case <-agent.Ready():
	case err := <-done:
		t.Fatalf("the agent ended: %v", err)
	}
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(stop)
	return stop
}

// set stores values as a client on a tenant's socket.
func set(t *testing.T, socket string, values map[string]string) {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	replies := bufio.NewReader(conn)
	for key, value := range values {
		fmt.Fprintf(conn, "*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", len(key), key, len(value), value)
		if reply, err := replies.ReadString('\n'); err != nil || reply != "+OK\r\n" {
			t.Fatalf("SET %s gave %q, %v", key, reply, err)
		}
	}
}

func TestTheKVStoreOfANodeIsShownPinnedDroppedAndChecked(t *testing.T) {
	t.Parallel()
	c, file := kvNode(t)
	stop := runAgent(t, c)
	set(t, c.KV.Tenants[0].Socket, map[string]string{"k-1": strings.Repeat("a", 20_000), "k-2": strings.Repeat("b", 20_000), "k-3": "c"})
	at := []string{"--socket", c.Listen.Socket}

	out, complaint, code := hearth(t, append([]string{"kv", "stat"}, at...)...)
	for _, want := range []string{"node-1  ram", "8.0 MiB", "node-1  nvme", "100.0 MiB  40.0 MiB", "tenant  chat", "of 4.0 MiB", c.KV.Drives[0]} {
		if code != terminal.ExitOK || !strings.Contains(out, want) {
			t.Errorf("kv stat: status %d, the tables lack %q:\n%s%s", code, want, out, complaint)
		}
	}
	out, _, code = hearth(t, append([]string{"kv", "stat", "--json"}, at...)...)
	var said struct{ Nodes []nodeKV }
	if err := json.Unmarshal([]byte(out), &said); err != nil || code != terminal.ExitOK || len(said.Nodes) != 1 || said.Nodes[0].Tenants[0].Blocks != 3 {
		t.Errorf("kv stat --json: status %d, %v: %s", code, err, out)
	}
	hash := block.HashOf([]byte("k-2")).String()
	for _, test := range []struct {
		args []string
		code terminal.Code
		says string
	}{
		{[]string{"kv", "pin", "chat", "k-1", hash}, terminal.ExitOK, "chat: 2 blocks pinned, 2 are pinned now, 39.1 KiB"},
		{[]string{"kv", "pin", "credential/chat", "k-1"}, terminal.ExitOK, "0 blocks pinned, 2 are pinned now"},
		{[]string{"kv", "pin", "tenant/chat", "k-1"}, terminal.ExitOK, "0 blocks pinned, 2 are pinned now"},
		{[]string{"kv", "pin", "chat", "nothing"}, terminal.ExitNotFound, "hint: only a block that is there can be pinned"},
		{[]string{"kv", "pin", "nobody", "k-1"}, terminal.ExitNotFound, "hint: hearth kv stat shows the tenants"},
		{[]string{"kv", "unpin", "chat", "k-1", "nothing"}, terminal.ExitOK, "1 blocks unpinned, 1 are pinned now"},
		{[]string{"kv", "drop", "chat"}, terminal.ExitUsage, "want either keys or --all"},
		{[]string{"kv", "drop", "chat", "k-1", "--all"}, terminal.ExitUsage, "want either keys or --all"},
		{[]string{"kv", "drop", "chat", "k-1", "nothing"}, terminal.ExitOK, "chat: 1 blocks dropped"},
		{[]string{"kv", "drop", "nobody", "--all"}, terminal.ExitNotFound, "no such tenant"},
	} {
		out, complaint, code := hearth(t, append(test.args, at...)...)
		if code != test.code || !strings.Contains(out+complaint, test.says) {
			t.Errorf("%q: status %d, want %d and %q: %s%s", test.args, code, test.code, test.says, out, complaint)
		}
	}
	if out, _, code := hearth(t, append([]string{"__complete", "kv", "pin", "ch"}, at...)...); code != terminal.ExitOK || strings.Contains(out, "credential") {
		t.Errorf("completion: status %d: %s", code, out)
	}
	// The check wants the store for itself, and leaves it as it is.
	_, complaint, code = hearth(t, "kv", "check", "--config", file)
	if code != terminal.ExitRefused || !strings.Contains(complaint, "an agent serves the KV store") || !strings.Contains(complaint, "hint: stop it first") {
		t.Errorf("check beside an agent: status %d: %s", code, complaint)
	}
	stop()
	out, complaint, code = hearth(t, "kv", "check", "--config", file)
	if code != terminal.ExitOK || !strings.Contains(out, "tenant  chat") {
		t.Errorf("check: status %d: %s%s", code, out, complaint)
	}
	segments, err := filepath.Glob(filepath.Join(filepath.Dir(file), "*", "blocks", "*", "*.seg"))
	if err != nil || len(segments) != 1 {
		t.Fatal(segments, err)
	}
	data, err := os.ReadFile(segments[0])
	if err != nil {
		t.Fatal(err)
	}
	at0 := strings.Index(string(data), strings.Repeat("b", 20_000))
	if at0 < 0 {
		t.Fatal("the value is not in the segment")
	}
	data[at0+5] = 'x'
	if err := os.WriteFile(segments[0], data, 0o600); err != nil {
		t.Fatal(err)
	}
	out, complaint, code = hearth(t, "kv", "check", "--config", file)
	if code != terminal.ExitFailure || !strings.Contains(out, hash) || !strings.Contains(out, segments[0]) || !strings.Contains(complaint, "1 things are not as they were written") {
		t.Errorf("check of a damaged block: status %d: %s%s", code, out, complaint)
	}
	out, _, code = hearth(t, "kv", "check", "--config", file, "--json")
	var checked struct {
		Tenants []checkedTenant
		Damaged int
	}
	if err := json.Unmarshal([]byte(out), &checked); err != nil || code != terminal.ExitFailure || checked.Damaged != 1 || checked.Tenants[0].Damaged[0].Key != hash {
		t.Errorf("check --json: status %d, %v: %s", code, err, out)
	}
	// What is damaged is a miss to the agent; all else is there.
	runAgent(t, c)
	if out, _, code = hearth(t, append([]string{"kv", "drop", "chat", "--all"}, at...)...); code != terminal.ExitOK || !strings.Contains(out, "chat: 2 blocks dropped") {
		t.Errorf("drop --all: status %d: %s", code, out)
	}
}

func TestUninstallRemovesTheDrivesOfTheKVStore(t *testing.T) {
	t.Parallel()
	c, file := kvNode(t)
	stop := runAgent(t, c)
	if _, complaint, code := hearth(t, "uninstall", "--config", file, "--weights"); code != terminal.ExitRefused {
		t.Errorf("beside an agent: status %d: %s", code, complaint)
	}
	stop()
	out, complaint, code := hearth(t, "uninstall", "--config", file, "--weights")
	if code != terminal.ExitOK {
		t.Fatalf("status %d: %s", code, complaint)
	}
	for _, dir := range []string{c.KV.Dir, c.KV.Drives[0]} {
		if _, err := os.Stat(dir); err == nil || !strings.Contains(out, "removed "+dir) {
			t.Errorf("%s is left, and told:\n%s", dir, out)
		}
	}
}

func TestTheStatusShowsTheKVOfNodes(t *testing.T) {
	t.Parallel()
	if got := kvFill(&admin.KVFill{MemoryUsed: 1 << 30, MemoryBudget: 4 << 30, NVMeBudget: 10 << 30}); got != "1.0 GiB of 4.0 GiB + 0 B of 10.0 GiB nvme" {
		t.Errorf("the fill is shown as %q", got)
	}
	if got := kvFill(nil); got != "" {
		t.Errorf("none is shown as %q", got)
	}
	sections := routerSections(&routerState{Status: routeradmin.Status{Nodes: []routeradmin.Node{
		{Node: "node-1", Connected: true}, {Node: "node-2", Connected: true, KV: &feed.KVStats{
			RAM: feed.KVTier{Used: 1 << 20, Budget: 1 << 21, Hits: 3, SavedTokens: 48, Damaged: 1}, NVMe: feed.KVTier{Hits: 4}, Blocks: 5, Misses: 6, Dropped: 7,
		}},
	}}})
	at := slices.IndexFunc(sections, func(s section) bool { return s.header[0] == "REPORTED BY" })
	want := []string{"node-2", "1.0 MiB of 2.0 MiB", "5", "7", "48", "6", "7", "1"}
	if at < 0 || len(sections[at].rows) != 1 || !slices.Equal(sections[at].rows[0], want) {
		t.Errorf("what routers were told is shown as %v", sections)
	}
}

func TestANewerKVStoreIsCheckedByNewerPrograms(t *testing.T) {
	t.Parallel()
	c, file := kvNode(t)
	put(t, filepath.Join(c.KV.Dir, "FORMAT"), "hearth kvtier 9\n")
	_, complaint, code := hearth(t, "kv", "check", "--config", file)
	if code != terminal.ExitFailure || !strings.Contains(complaint, "version 9, this code knows 1") {
		t.Errorf("status %d: %s", code, complaint)
	}
	if _, err := os.Stat(filepath.Join(c.KV.Dir, "lock")); err == nil {
		t.Error("the check wrote into it")
	}
}
