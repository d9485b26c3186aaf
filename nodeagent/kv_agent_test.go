package nodeagent_test

import (
	"bufio"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/credentials/insecure"

	"github.com/hearth-dev/hearth/configfile"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/units"
)

// kvConfig is that of an agent with a KV tenant on a socket of its own.
func kvConfig(t *testing.T) nodeagent.Config {
	t.Helper()
	_, url := newOrigin(t)
	c := newConfig(t, url)
	c.KV.Dir = filepath.Join(filepath.Dir(c.Listen.Socket), "kv")
	c.KV.Memory, c.KV.NVMe = 8*units.MiB, 100*units.MiB
	c.KV.Tenants = []nodeagent.KVTenant{{
		Name: "chat", Memory: 2 * units.MiB, NVMe: 40 * units.MiB, Socket: filepath.Join(filepath.Dir(c.Listen.Socket), "chat.sock"),
	}}
	return c
}

// save writes a configuration as its file.
func save(t *testing.T, path string, c nodeagent.Config) {
	t.Helper()
	text, err := configfile.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	head := "apiVersion: " + configfile.APIVersion + "\nkind: " + nodeagent.Kind + "\n"
	if err := os.WriteFile(path+".new", append([]byte(head), text...), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

func TestTheConfigurationFilesBudgetsAreTakenWhenItChanges(t *testing.T) {
	t.Parallel()
	c := kvConfig(t)
	file := filepath.Join(t.TempDir(), "agent.yaml")
	save(t, file, c)
	r := runWith(t, c, nodeagent.Options{ConfigFile: file, Load: func() (nodeagent.Config, error) {
		read := nodeagent.Default()
		if err := configfile.Load(file, nodeagent.Kind, &read); err != nil {
			return read, err
		}
		return read, read.Validate()
	}})
	shows := func(budget units.Bytes) {
		await(t, r, insecure.NewCredentials(), func(s *report.State) bool { return s.KV().GetRam().GetBudgetBytes() == int64(budget) })
	}
	shows(2 * units.MiB)
	changed := c
	changed.KV.Memory = 16 * units.MiB
	changed.KV.Tenants = []nodeagent.KVTenant{c.KV.Tenants[0]}
	changed.KV.Tenants[0].Memory = 5 * units.MiB
	changed.Weights.Streams++
	save(t, file, changed)
	shows(5 * units.MiB)
	problems := func() string {
		node, err := r.client.Node(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(node.Problems, "\n")
	}
	if got := problems(); !strings.Contains(got, "needs a restart: weights") {
		t.Errorf("problems are %q", got)
	}
	_, taken := get(t, "http://"+r.Listeners()["admin"]+"/debug/config")
	if !strings.Contains(taken, "memory: 16MiB") {
		t.Errorf("the configuration that is shown is\n%s", taken)
	}

	// A file that is invalid leaves what was taken, and a good one heals it.
	if err := os.WriteFile(file, []byte("kind: nothing\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	(&fabric{t: t}).until("the problem", func() bool { return strings.Contains(problems(), "which is tried again") })
	changed.Weights.Streams--
	changed.KV.Tenants[0].Memory = 6 * units.MiB
	save(t, file, changed)
	shows(6 * units.MiB)
	if got := problems(); got != "" {
		t.Errorf("problems are %q", got)
	}
}

func TestAConfigurationIsTakenOnceWhatItNeedsIsThere(t *testing.T) {
	t.Parallel()
	c := kvConfig(t)
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte(strings.Repeat("k", 32)), 0o600); err != nil {
		t.Fatal(err)
	}
	c.KV.Tenants[0].EncryptionKeyFile = key
	file := filepath.Join(t.TempDir(), "agent.yaml")
	save(t, file, c)
	r := runWith(t, c, nodeagent.Options{ConfigFile: file, Load: func() (nodeagent.Config, error) {
		read := nodeagent.Default()
		return read, configfile.Load(file, nodeagent.Kind, &read)
	}})
	if err := os.Rename(key, key+".aside"); err != nil {
		t.Fatal(err)
	}
	c.KV.Tenants = []nodeagent.KVTenant{c.KV.Tenants[0]}
	c.KV.Tenants[0].Memory = 3 * units.MiB
	save(t, file, c)
	problems := func() string {
		node, err := r.client.Node(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(node.Problems, "\n")
	}
	(&fabric{t: t}).until("the problem", func() bool { return strings.Contains(problems(), key) })
	if err := os.Rename(key+".aside", key); err != nil {
		t.Fatal(err)
	}
	await(t, r, insecure.NewCredentials(), func(s *report.State) bool {
		return s.KV().GetRam().GetBudgetBytes() == int64(3*units.MiB)
	})
	(&fabric{t: t}).until("no problem", func() bool { return problems() == "" })
}

func TestTheStateOfTheKVStoreIsToldAndChangedOverTheSocket(t *testing.T) {
	t.Parallel()
	r := run(t, kvConfig(t))
	kv, err := r.client.KV(t.Context())
	if err != nil || len(kv.Tenants) != 1 || kv.Tenants[0].Name != "chat" || kv.NVMe.Claims != int64(60*units.MiB) || !kv.Wear.Bounded {
		t.Fatalf("the state is %+v: %v", kv, err)
	}
	for _, c := range []struct {
		call func() error
		code string
	}{
		{func() error {
			_, err := r.client.KVPin(t.Context(), admin.KVPinRequest{Tenant: "chat", Keys: []string{"k"}, Pin: true})
			return err
		}, admin.CodeUnknownBlock},
		{func() error {
			_, err := r.client.KVPin(t.Context(), admin.KVPinRequest{Tenant: "nobody", Keys: []string{"k"}})
			return err
		}, admin.CodeUnknownTenant},
		{func() error { _, err := r.client.KVPin(t.Context(), admin.KVPinRequest{Tenant: "chat"}); return err }, admin.CodeBadRequest},
		{func() error { _, err := r.client.KVDrop(t.Context(), admin.KVDropRequest{Tenant: "chat"}); return err }, admin.CodeBadRequest},
		{func() error {
			_, err := r.client.KVDrop(t.Context(), admin.KVDropRequest{Tenant: "chat", Keys: []string{"k"}, All: true})
			return err
		}, admin.CodeBadRequest},
		{func() error {
			_, err := r.client.KVDrop(t.Context(), admin.KVDropRequest{Tenant: "nobody", All: true})
			return err
		}, admin.CodeUnknownTenant},
		{func() error {
			_, err := r.client.KVDrop(t.Context(), admin.KVDropRequest{Tenant: "chat", Keys: []string{"k"}})
			return err
		}, ""},
		{func() error {
			_, err := r.client.KVDrop(t.Context(), admin.KVDropRequest{Tenant: "chat", All: true})
			return err
		}, ""},
	} {
		if err := c.call(); codeOf(err) != c.code {
			t.Errorf("gave %v, want code %q", err, c.code)
		}
	}
	if status, text := get(t, "http://"+r.Listeners()["admin"]+"/metrics"); status != http.StatusOK || !strings.Contains(text, `hearth_kv_budget_bytes{tenant="chat",tier="ram"} 2.097152e+06`) {
		t.Errorf("the metrics have no budget of the tenant: %d", status)
	}
	node, err := r.client.Node(t.Context())
	if err != nil || node.KV == nil || node.KV.NVMeBudget != int64(40*units.MiB) {
		t.Errorf("the node has KV %+v: %v", node.KV, err)
	}
}

func TestCallsAboutTheKVStoreReachTheDataRoleApart(t *testing.T) {
	t.Parallel()
	f := newFabric(t, kvConfig(t))
	f.start(nodeagent.RoleData)
	f.start(nodeagent.RoleControl)
	kv, err := f.control.KV(t.Context())
	if err != nil || len(kv.Tenants) != 1 {
		t.Fatalf("the state is %+v: %v", kv, err)
	}
	if got, err := f.control.KVDrop(t.Context(), admin.KVDropRequest{Tenant: "chat", All: true}); err != nil || got.Dropped != 0 {
		t.Errorf("to drop gave %+v, %v", got, err)
	}
	await(t, listeners(t, f.control), insecure.NewCredentials(), func(s *report.State) bool {
		return s.KV().GetNvme().GetBudgetBytes() == int64(40*units.MiB)
	})
}

func TestTheFirstTenantWithAPasswordIsServedWithoutARestart(t *testing.T) {
	t.Parallel()
	c := kvConfig(t)
	c.Listen.RESP = "127.0.0.1:0"
	file := filepath.Join(t.TempDir(), "agent.yaml")
	save(t, file, c)
	r := runWith(t, c, nodeagent.Options{ConfigFile: file, Load: func() (nodeagent.Config, error) {
		read := nodeagent.Default()
		return read, configfile.Load(file, nodeagent.Kind, &read)
	}})
	if addr := r.Listeners()["resp"]; addr != "" {
		t.Fatalf("listen.resp is bound to %s for nobody", addr)
	}
	password := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(password, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.KV.Tenants = append(c.KV.Tenants, nodeagent.KVTenant{Name: "batch", Memory: units.MiB, CredentialFile: password})
	save(t, file, c)
	(&fabric{t: t}).until("listen.resp to be bound", func() bool { return r.Listeners()["resp"] != "" })
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", r.Listeners()["resp"])
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	replies := bufio.NewReader(conn)
	for _, one := range [][2]string{
		{"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n", "-NOAUTH"}, {"*2\r\n$4\r\nAUTH\r\n$6\r\nsecret\r\n", "+OK"}, {"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n", "+OK"},
	} {
		if _, err := conn.Write([]byte(one[0])); err != nil {
			t.Fatal(err)
		}
		if reply, err := replies.ReadString('\n'); err != nil || !strings.HasPrefix(reply, one[1]) {
			t.Fatalf("%q gave %q, %v; want %s", one[0], reply, err, one[1])
		}
	}
	// Another password counts as soon as its file has it.
	if err := os.WriteFile(password, []byte("second\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	(&fabric{t: t}).until("the new password", func() bool {
		if _, err := conn.Write([]byte("AUTH second\r\n")); err != nil {
			t.Fatal(err)
		}
		reply, err := replies.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		return reply == "+OK\r\n"
	})
	kv, err := r.client.KV(t.Context())
	if err != nil || len(kv.Tenants) != 2 || kv.Tenants[0].Name != "batch" || kv.Tenants[0].Blocks != 1 || kv.RESP.Address != r.Listeners()["resp"] {
		t.Errorf("the state is %+v: %v", kv.Tenants, err)
	}
}

func TestAConfigurationThatCameFromAPipeIsReadAtTheStartAlone(t *testing.T) {
	t.Parallel()
	c := kvConfig(t)
	pipe := filepath.Join(t.TempDir(), "agent.yaml")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	r := runWith(t, c, nodeagent.Options{ConfigFile: pipe, Load: func() (nodeagent.Config, error) {
		_, err := os.ReadFile(pipe) // waits for ever
		return c, err
	}})
	(&fabric{t: t}).until("the problem", func() bool {
		node, err := r.client.Node(t.Context())
		return err == nil && strings.Contains(strings.Join(node.Problems, "\n"), "the configuration file is not read again")
	})
}
