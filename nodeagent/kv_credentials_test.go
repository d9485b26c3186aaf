package nodeagent

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/units"
)

// onTCP serves clients with passwords until the test ends, and gives the address.
func onTCP(t *testing.T, k *kvSpace) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- k.serveTCP(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

// talker is a client whose connection stands.
type talker struct {
	t    *testing.T
	conn net.Conn
	in   *bufio.Reader
}

func talk(t *testing.T, address string) *talker {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	return &talker{t, conn, bufio.NewReader(conn)}
}

// says sends a line and wants another one.
func (c *talker) says(command, want string) {
	c.t.Helper()
	if _, err := io.WriteString(c.conn, command+"\r\n"); err != nil {
		c.t.Fatal(err)
	}
	line, err := c.in.ReadString('\n')
	if err == nil && strings.HasPrefix(line, "$") && line != "$-1\r\n" {
		line, err = c.in.ReadString('\n')
	}
	if err != nil || strings.TrimSpace(line) != want {
		c.t.Fatalf("%s gave %q, %v; want %s", command, line, err, want)
	}
}

// ended waits until the server has closed the connection.
func (c *talker) ended() {
	c.t.Helper()
	if line, err := c.in.ReadString('\n'); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		c.t.Fatalf("the connection stands: %q, %v", line, err)
	}
}

func TestTheClientsOfATenantThatIsRemovedAndAddedAgainComeAnew(t *testing.T) {
	t.Parallel()
	c := newKV(t)
	password := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(password, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	code := KVTenant{Name: "code", Memory: units.MiB, CredentialFile: password}
	open := KVTenant{Name: "open", Memory: units.MiB, Anonymous: true}
	stays := KVTenant{Name: "stays", Memory: units.MiB, Socket: filepath.Join(t.TempDir(), "stays.sock")}
	c.Tenants = []KVTenant{stays, code, open}
	k := openedKV(t, c, plenty)
	address := onTCP(t, k)
	take := func(tenants ...KVTenant) {
		t.Helper()
		next := c
		next.Tenants = tenants
		if late, err := k.take(t.Context(), next); err != nil || len(late) != 0 {
			t.Fatalf("late %q: %v", late, err)
		}
	}
	known, nobody := talk(t, address), talk(t, address)
	known.says("AUTH secret", "+OK")
	known.says("SET k v", "+OK")
	nobody.says("SET k w", "+OK")

	take(stays, slices.Clone(c.Tenants)[1]) // "open" goes
	nobody.ended()
	talk(t, address).says("GET k", "-NOAUTH Authentication required.")
	known.says("GET k", "v")

	take(stays)
	known.ended()
	talk(t, address).says("AUTH secret", "-WRONGPASS invalid username-password pair or user is disabled.")

	take(stays, code, open)
	known, nobody = talk(t, address), talk(t, address)
	known.says("AUTH secret", "+OK")
	nobody.says("SET k x", "+OK")
	known.says("SET k y", "+OK")
	known.says("GET k", "y")
	nobody.says("GET k", "x")
	for name, want := range map[string]int64{"code": 1, "open": 1} {
		for _, served := range k.list() {
			if served.tenant.Name() == name && served.tenant.Stats().Total != want {
				t.Errorf("%s has %d blocks: its clients are another's", name, served.tenant.Stats().Total)
			}
		}
	}
}

func TestAPasswordIsTakenWhenItsFileChangesAndStandsWhileThatIsBad(t *testing.T) {
	t.Parallel()
	c := newKV(t)
	file := filepath.Join(t.TempDir(), "password")
	write := func(text string) {
		t.Helper()
		_ = os.Remove(file) // it may be a pipe
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("first\n")
	other := filepath.Join(t.TempDir(), "other")
	if err := os.WriteFile(other, []byte("taken\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.Tenants = []KVTenant{
		{Name: "code", Memory: units.MiB, CredentialFile: file}, {Name: "other", Memory: units.MiB, CredentialFile: other},
	}
	k := openedKV(t, c, plenty)
	address := onTCP(t, k)
	client := talk(t, address)
	client.says("AUTH first", "+OK")
	client.says("SET k v", "+OK")
	const wrong = "-WRONGPASS invalid username-password pair or user is disabled."
	problems := func() string { return strings.Join(k.told(), "\n") }

	write("second\n")
	k.lookAtCredentials()
	talk(t, address).says("AUTH first", wrong)
	talk(t, address).says("AUTH second", "+OK")
	client.says("GET k", "v") // who is connected stays
	if got := problems(); got != "" {
		t.Errorf("problems are %q", got)
	}
	for what, spoil := range map[string]func(){
		"it is empty": func() { write("\n") },
		"the same password as that of KV tenant other": func() { write("taken\n") },
		"no regular file": func() { _ = errors.Join(os.Remove(file), syscall.Mkfifo(file, 0o600)) },
		"no such file":    func() { _ = os.Remove(file) },
	} {
		spoil()
		k.lookAtCredentials()
		if got := problems(); !strings.Contains(got, "KV tenant code keeps the password of before") || !strings.Contains(got, what) {
			t.Errorf("%s: problems are %q", what, got)
		}
		talk(t, address).says("AUTH second", "+OK")
		talk(t, address).says("AUTH taken", "+OK") // the other tenant's
		if served, err := k.tenantNamed("other"); err != nil || served.resp.Stats().Connections == 0 {
			t.Errorf("the other tenant's password is another's: %v", err)
		}
		// The configuration is taken all the same.
		if _, err := k.take(t.Context(), c); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	write("second\n")
	k.lookAtCredentials()
	if got := problems(); got != "" {
		t.Errorf("problems stay: %q", got)
	}
}

func TestATenantWithThePasswordOfAnotherCostsNobodyElseTheirs(t *testing.T) {
	t.Parallel()
	c := newKV(t)
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	one := KVTenant{Name: "one", Memory: units.MiB, CredentialFile: write("one", "first")}
	third := KVTenant{Name: "third", Memory: units.MiB, CredentialFile: write("third", "before")}
	c.Tenants = []KVTenant{one, third}
	k := openedKV(t, c, plenty)
	address := onTCP(t, k)
	two := KVTenant{Name: "two", Memory: units.MiB, CredentialFile: write("two", "first"), Socket: filepath.Join(dir, "two.sock")}
	next := c
	next.Tenants = []KVTenant{one, third, two}
	if _, err := k.take(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	if told := strings.Join(k.told(), "\n"); k.serves(kvtier.TenantCredential, "two") || !strings.Contains(told, "KV tenant two is not served") {
		t.Errorf("a tenant with the password of another is served, problems are %q", told)
	}
	write("third", "after")
	k.lookAtCredentials()
	talk(t, address).says("AUTH after", "+OK")
	if len(k.told()) != 1 {
		t.Errorf("problems are %q", k.told())
	}
	write("two", "second")
	k.tryRefused(t.Context(), time.Now().Add(time.Hour))
	talk(t, address).says("AUTH second", "+OK")
	talk(t, address).says("AUTH first", "+OK")
	if _, err := os.Stat(two.Socket); err != nil || len(k.told()) != 0 {
		t.Errorf("with a password of its own: %v, %q", err, k.told())
	}
}

// passwords has tenants a, b and c, each with a password of its name, and gives what
// writes their files and what says who is asked for with a password.
func passwords(t *testing.T) (k *kvSpace, write func(name, text string), whose func(password string) string) {
	t.Helper()
	c, dir := newKV(t), t.TempDir()
	write = func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"a", "b", "c"} {
		write(name, "of "+name)
		c.Tenants = append(c.Tenants, KVTenant{Name: name, Memory: units.MiB, CredentialFile: filepath.Join(dir, name)})
	}
	k = openedKV(t, c, plenty)
	return k, write, func(password string) string {
		tenant, ok := k.authenticate(nil, []byte(password))
		if !ok {
			return "nobody"
		}
		return tenant.Name()
	}
}

func TestPasswordsMayChangePlaces(t *testing.T) {
	t.Parallel()
	k, write, whose := passwords(t)
	check := func(when string, want ...string) {
		t.Helper()
		for i, password := range []string{"of a", "of b", "of c", "new"} {
			if got := whose(password); got != want[i] {
				t.Errorf("%s: %q is the password of %s, want %s", when, password, got, want[i])
			}
		}
	}
	check("at first", "a", "b", "c", "nobody")
	write("a", "of b")
	k.lookAtCredentials()
	check("with one file written", "a", "b", "c", "nobody")
	if told := strings.Join(k.told(), "\n"); !strings.Contains(told, "KV tenant a keeps the password of before") || strings.Contains(told, "KV tenant b keeps") {
		t.Errorf("problems are %q", told)
	}
	write("b", "of a")
	k.lookAtCredentials()
	check("with both", "b", "a", "c", "nobody")
	if told := k.told(); len(told) != 0 {
		t.Errorf("problems stay: %q", told)
	}
	// All three at once, one of which has one that is new.
	write("a", "of c")
	write("c", "of a")
	write("b", "new")
	k.lookAtCredentials()
	check("in a ring", "c", "nobody", "a", "b")
}

func TestTwoWhoWantOnePasswordKeepNobodyElseFromTheirs(t *testing.T) {
	t.Parallel()
	k, write, whose := passwords(t)
	write("a", "same")
	write("b", "same")
	write("c", "new")
	k.lookAtCredentials()
	for password, want := range map[string]string{"same": "nobody", "of a": "a", "of b": "b", "new": "c", "of c": "nobody"} {
		if got := whose(password); got != want {
			t.Errorf("%q is the password of %s, want %s", password, got, want)
		}
	}
	told := strings.Join(k.told(), "\n")
	for _, want := range []string{"KV tenant a keeps the password of before", "KV tenant b keeps the password of before"} {
		if !strings.Contains(told, want) {
			t.Errorf("problems are %q, want %q", told, want)
		}
	}
	// What one of them wants may not become another's who comes: nobody could say
	// whose it is.
	next := k.settings()
	next.Tenants = append(slices.Clone(next.Tenants), next.Tenants[0])
	next.Tenants[3].Name = "d"
	if _, err := k.take(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	if got := whose("same"); got != "nobody" || k.serves("credential", "d") {
		t.Errorf("the password that three want is that of %s", got)
	}
	write("a", "of a")
	write("b", "of b")
	write("c", "of c")
	next.Tenants = next.Tenants[:3]
	if _, err := k.take(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	if told := k.told(); len(told) != 0 || whose("of c") != "c" {
		t.Errorf("problems stay: %q", told)
	}
}

func TestAtAStartNobodyHasThePasswordOfTwo(t *testing.T) {
	t.Parallel()
	c := newKV(t)
	file := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(file, []byte("same\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.Tenants = []KVTenant{{Name: "a", Memory: units.MiB, CredentialFile: file}, {Name: "b", Memory: units.MiB, CredentialFile: file}}
	k := openedKV(t, c, plenty)
	if tenant, ok := k.authenticate(nil, []byte("same")); ok {
		t.Errorf("the password of two is that of %s", tenant.Name())
	}
	if n := k.refusedTenants()["credential"]; n != 2 {
		t.Errorf("%d tenants are refused, want both", n)
	}
	own := filepath.Join(t.TempDir(), "own")
	if err := os.WriteFile(own, []byte("own\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	next := c
	next.Tenants = slices.Clone(c.Tenants)
	next.Tenants[1].CredentialFile = own
	if late, err := k.take(t.Context(), next); err != nil || len(late) > 0 {
		t.Fatal(late, err)
	}
	for password, want := range map[string]string{"same": "a", "own": "b"} {
		if tenant, ok := k.authenticate(nil, []byte(password)); !ok || tenant.Name() != want {
			t.Errorf("%s: is not the password of %s", password, want)
		}
	}
}
