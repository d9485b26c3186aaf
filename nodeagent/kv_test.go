package nodeagent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/hearth-dev/hearth/kvtier"
	"github.com/hearth-dev/hearth/kvtier/block"
	"github.com/hearth-dev/hearth/kvtier/resp"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/nodeagent/local"
	"github.com/hearth-dev/hearth/units"
)

// plenty is a node that has what it is asked for.
var plenty = kvCapacity{memory: units.TiB, nvme: units.TiB}

func newKV(t *testing.T) KV {
	t.Helper()
	c := Default().KV
	c.Dir = filepath.Join(t.TempDir(), "kv")
	c.Memory, c.NVMe = 8*units.MiB, 200*units.MiB
	return c
}

// openedKV opens and runs a KV space until the test ends.
func openedKV(t *testing.T, c KV, capacity kvCapacity) *kvSpace {
	t.Helper()
	k, err := openKV(c, capacity, kvPeering{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- k.run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-done, k.Close()); err != nil {
			t.Error(err)
		}
	})
	return k
}

func tenant(name string, memory, nvme units.Bytes) KVTenant {
	return KVTenant{Name: name, Memory: memory, NVMe: nvme, Anonymous: true, Admit: AdmitAll}
}

// store puts a value as a client of a tenant would, through the cache.
func store(t *testing.T, k *kvSpace, kind, name, key, value string) {
	t.Helper()
	tenant, err := k.cache.Tenant(kind, name)
	if err != nil {
		t.Fatal(err)
	}
	n, err := tenant.Namespace(t.Context(), block.Identity{Format: resp.Format, Hash: resp.HashName})
	if err != nil {
		t.Fatal(err)
	}
	put, err := n.Put(admin.KeyOf(key), len(value), kvtier.PutOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer put.Abort()
	copy(put.Bytes(), value)
	put.Fill(len(value))
	if err := put.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func has(t *testing.T, k *kvSpace, kind, name, key string) bool {
	t.Helper()
	tenant, err := k.cache.Tenant(kind, name)
	if err != nil {
		return false
	}
	n, err := tenant.Namespace(t.Context(), block.Identity{Format: resp.Format, Hash: resp.HashName})
	if err != nil {
		t.Fatal(err)
	}
	_, ok := n.Lookup(admin.KeyOf(key))
	return ok
}

func TestBudgetsAndTenantsChangeWhileTheStoreServes(t *testing.T) {
	t.Parallel()
	c := newKV(t)
	c.Tenants = []KVTenant{tenant("a", 2*units.MiB, 40*units.MiB)}
	k := openedKV(t, c, plenty)
	if _, err := k.Reserve(t.Context(), kvtier.Reservation{Claim: "c-1", Namespace: "team", Memory: units.MiB, NVMe: 40 * units.MiB}); err != nil {
		t.Fatal(err)
	}
	store(t, k, kvtier.TenantCredential, "a", "key", "value")
	if got := k.Budget(); got.Memory != 6*units.MiB || got.NVMe != 160*units.MiB {
		t.Errorf("claims may take %+v", got)
	}
	offered := 0
	k.offers = func() { offered++ }

	next := c
	next.Memory, next.DriveWritesPerDay, next.NamespaceMemory = 16*units.MiB, 2, 3*units.MiB
	b := KVTenant{Name: "b", Memory: units.MiB, CredentialFile: filepath.Join(t.TempDir(), "password")}
	next.Tenants = []KVTenant{tenant("a", 3*units.MiB, 80*units.MiB), b}
	before := k.cache.Wear().Rate
	if late, err := k.take(t.Context(), next); err != nil || len(late) != 0 {
		t.Fatalf("late %q: %v", late, err)
	}
	if k.serves(kvtier.TenantCredential, "b") || k.settings().Memory != next.Memory || offered != 1 {
		t.Error("a tenant whose credentialFile is not there is served, or kept the rest from being taken")
	}
	if err := os.WriteFile(b.CredentialFile, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	late, err := k.take(t.Context(), next)
	if err != nil || len(late) != 0 {
		t.Fatalf("late %q: %v", late, err)
	}
	if got := k.Budget(); got.Memory != 12*units.MiB || got.NVMe != 120*units.MiB || got.NamespaceMemory != 3*units.MiB || offered != 2 {
		t.Errorf("claims may take %+v, told %d times", got, offered)
	}
	if got := k.cache.Wear().Rate; got != 2*before {
		t.Errorf("the drives' rate is %d, was %d", got, before)
	}
	a, err := k.cache.Tenant(kvtier.TenantCredential, "a")
	if err != nil || a.Spec().Memory != 3*units.MiB || a.Spec().NVMe != 80*units.MiB || !has(t, k, kvtier.TenantCredential, "a", "key") {
		t.Errorf("the tenant that stays has %+v: %v", a.Spec(), err)
	}
	if _, ok := k.authenticate([]byte("b"), []byte("secret")); !ok {
		t.Error("the password of the new tenant is not taken")
	}

	// Less than claims have is refused whole.
	less := next
	less.NVMe, less.DriveWritesPerDay = 110*units.MiB, 5
	if _, err := k.take(t.Context(), less); !errors.Is(err, kvtier.ErrNoSpace) || !strings.Contains(err.Error(), "claims have reserved 40.0 MiB of NVMe") {
		t.Errorf("a budget below what claims have gave %v", err)
	}
	if k.settings().NVMe != next.NVMe || k.cache.Wear().Rate != 2*before {
		t.Error("what was refused changed something")
	}
	// A new password counts, the old one no more.
	if err := os.WriteFile(b.CredentialFile, []byte("other\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := k.take(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	_, old := k.authenticate(nil, []byte("secret"))
	if _, ok := k.authenticate(nil, []byte("other")); !ok || old {
		t.Errorf("the new password counts: %t, the old one: %t", ok, old)
	}
}

func TestATenantThatIsRemovedLeavesItsBlocksUntilTheyAreDropped(t *testing.T) {
	t.Parallel()
	c := newKV(t)
	c.Tenants = []KVTenant{tenant("a", 2*units.MiB, 40*units.MiB), {Name: "b", Memory: units.MiB, Socket: filepath.Join(t.TempDir(), "b.sock")}}
	k := openedKV(t, c, plenty)
	store(t, k, kvtier.TenantCredential, "a", "key", "value")
	next := c
	next.Tenants = c.Tenants[1:]
	if late, err := k.take(t.Context(), next); err != nil || len(late) != 0 {
		t.Fatalf("late %q: %v", late, err)
	}
	if k.serves(kvtier.TenantCredential, "a") || len(k.told()) != 1 || !strings.Contains(k.told()[0], "hearth kv drop") {
		t.Errorf("problems are %q", k.told())
	}
	// What is left on the drives is not offered to claims.
	if got := k.Budget().NVMe; got != 196*units.MiB {
		t.Errorf("claims may take %s", got)
	}
	d, err := k.Describe(t.Context())
	if err != nil || len(d.Left) != 1 || d.Left[0].Name != "a" || d.Left[0].Bytes != 4<<20 || len(d.Tenants) != 1 {
		t.Errorf("the description has %+v and left %+v: %v", d.Tenants, d.Left, err)
	}
	// It comes back with its blocks.
	if _, err := k.take(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if !has(t, k, kvtier.TenantCredential, "a", "key") {
		t.Error("the block is lost")
	}
	if _, err := k.take(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	if _, err := k.DropAll(t.Context(), "credential/a"); err != nil {
		t.Fatal(err)
	}
	if got := k.Budget().NVMe; got != 200*units.MiB || len(k.told()) != 0 {
		t.Errorf("after the drop claims may take %s; problems %q", got, k.told())
	}
	if _, err := k.DropAll(t.Context(), "a"); !errors.Is(err, kvtier.ErrUnknown) {
		t.Errorf("to drop it again gave %v", err)
	}
}

func TestWhatNeedsARestartIsNamedAndStays(t *testing.T) {
	t.Parallel()
	c := newKV(t)
	c.Tenants = []KVTenant{tenant("a", 2*units.MiB, 40*units.MiB)}
	want := c
	want.Dir, want.Drives, want.VerifyEvery, want.DriveWritesPerDay = "/elsewhere", []string{"/d"}, 1, 0
	want.DriveCapacity, want.DriveEndurance = 1, 1
	want.Tenants = []KVTenant{{Name: "a", Memory: units.MiB, Socket: "/s", EncryptionKeyFile: "/k", CredentialFile: "/c"}}
	next, late := c.with(want)
	for _, field := range []string{
		"kv.dir", "kv.drives", "kv.verifyEvery", "kv.driveWritesPerDay from or to 0", "kv.driveCapacity", "kv.driveEndurance", "kv.tenants[a].socket",
		"kv.tenants[a].encryptionKeyFile", "kv.tenants[a].credentialFile", "kv.tenants[a].anonymous", "kv.tenants[a].nvme from or to 0",
	} {
		if !slices.Contains(late, field) {
			t.Errorf("%s is not named in %q", field, late)
		}
	}
	if next.Dir != c.Dir || next.DriveWritesPerDay != c.DriveWritesPerDay || !next.Tenants[0].Anonymous || next.Tenants[0].NVMe != 40*units.MiB {
		t.Errorf("taken is %+v", next)
	}
	if next.Tenants[0].Memory != units.MiB || want.Tenants[0].Socket != "/s" {
		t.Error("what can change did not, or the file's own content did")
	}
	k := openedKV(t, c, plenty)
	if late, err := k.take(t.Context(), KV{Dir: c.Dir, DriveWritesPerDay: 1, VerifyEvery: 64}); err != nil || len(late) != 1 || k.settings().Memory != c.Memory {
		t.Errorf("to nothing at all: late %q: %v", late, err)
	}
	none := openedKV(t, KV{Dir: filepath.Join(t.TempDir(), "kv")}, plenty)
	if late, err := none.take(t.Context(), c); err != nil || len(late) == 0 {
		t.Errorf("from nothing: late %q: %v", late, err)
	}
}

func TestClaimsAreOfferedWhatTheNodeHas(t *testing.T) {
	t.Parallel()
	c := newKV(t)
	c.Memory, c.NVMe = 100*units.GiB, 10*units.TiB
	c.Tenants = []KVTenant{tenant("a", 4*units.MiB, 40*units.MiB)}
	k := openedKV(t, c, kvCapacity{memory: 20 * units.MiB, nvme: 100 * units.MiB, memoryFrom: "the node's memory, 24 MiB,"})
	if got := k.Budget(); got.Memory != 16*units.MiB || got.NVMe != 60*units.MiB {
		t.Errorf("claims may take %+v", got)
	}
	told := strings.Join(k.told(), "\n")
	if !strings.Contains(told, "kv.memory is 100.0 GiB, and the node's memory, 24 MiB, leaves 20.0 MiB") || !strings.Contains(told, "kv.nvme is 10.0 TiB") {
		t.Errorf("problems are %q", told)
	}
	over := openedKV(t, func() KV { c := c; c.Dir = filepath.Join(t.TempDir(), "kv"); return c }(), kvCapacity{memory: 2 * units.MiB, nvme: 10 * units.MiB})
	if got := over.Budget(); got.Memory != 0 || got.NVMe != 0 || !strings.Contains(strings.Join(over.told(), "\n"), "more than the node has") {
		t.Errorf("claims may take %+v; problems %q", got, over.told())
	}
}

func TestTheMemoryOfANodeIsTheLeastOfItsLimits(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(path, text string) {
		path = filepath.Join(dir, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	proc, cgroups := filepath.Join(dir, "proc"), filepath.Join(dir, "cgroup")
	if got := memoryCapacity(proc, cgroups); got.memory != 0 {
		t.Errorf("nothing known gives %s", got.memory)
	}
	write("proc/meminfo", "MemTotal:       67108864 kB\nMemFree: 1 kB\n") // 64 GiB
	if got := memoryCapacity(proc, cgroups); got.memory != 61*units.GiB || !strings.Contains(got.memoryFrom, "the node's memory, 64.0 GiB") {
		t.Errorf("a node of 64 GiB gives %s of %q", got.memory, got.memoryFrom)
	}
	write("proc/self/cgroup", "0::/pods/one\n")
	write("cgroup/pods/one/memory.max", "max\n")
	write("cgroup/pods/memory.max", "34359738368\n") // 32 GiB, above it
	if got := memoryCapacity(proc, cgroups); got.memory != 31*units.GiB-256*units.MiB || !strings.Contains(got.memoryFrom, "limit, 32.0 GiB") {
		t.Errorf("a limit of 32 GiB gives %s of %q", got.memory, got.memoryFrom)
	}
	write("proc/self/cgroup", "4:cpu,memory:/x\n0::/\n")
	write("cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712\n")
	write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
	if got := memoryCapacity(proc, cgroups); got.memory != 61*units.GiB {
		t.Errorf("version 1 without a limit gives %s", got.memory)
	}
	write("cgroup/memory/x/memory.limit_in_bytes", "1000\n")
	if got := memoryCapacity(proc, cgroups); got.memory != 1 {
		t.Errorf("a limit below what the agent needs gives %s", got.memory)
	}
}

func TestTheDrivesOfOneFileSystemCountOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := Default()
	c.KV.Dir, c.Weights.Dir = filepath.Join(dir, "kv"), filepath.Join(dir, "weights")
	c.Weights.KeepFree = 0
	_, size, err := fileSystem(dir)
	if err != nil {
		t.Fatal(err)
	}
	if got := drivesCapacity(c); got != size {
		t.Errorf("capacity is %s of %s", got, size)
	}
	c.KV.Drives = []string{filepath.Join(dir, "one"), filepath.Join(dir, "two")}
	c.Weights.Budget, c.Weights.KeepFree = units.MiB, units.MiB
	if got := drivesCapacity(c); got != size-2*units.MiB {
		t.Errorf("capacity with weights beside is %s of %s", got, size)
	}
}

func TestMetricsHaveAsManyTenantsAndModelsAsTheirBoundsSay(t *testing.T) {
	t.Parallel()
	c := newKV(t)
	c.Memory = 64 * units.MiB
	for i := range 100 {
		c.Tenants = append(c.Tenants, KVTenant{Name: fmt.Sprintf("t%03d", i), Memory: 64 * units.KiB, Socket: filepath.Join(t.TempDir(), fmt.Sprint(i))})
	}
	k := openedKV(t, c, plenty)
	for i := range 3 {
		r := kvtier.Reservation{Claim: fmt.Sprint("c-", i), Namespace: "team", Memory: units.MiB}
		if _, err := k.Reserve(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		store(t, k, kvtier.TenantClaim, r.Claim, "key", "value")
		has(t, k, kvtier.TenantClaim, r.Claim, "key")
	}
	values := func() map[string]map[string]bool {
		seen := map[string]map[string]bool{}
		see := func(d *prometheus.Desc, labels ...string) {
			if text := d.String(); len(labels) > 0 && strings.Contains(text, `variableLabels: {tenant`) {
				name, _, _ := strings.Cut(strings.TrimPrefix(text, `Desc{fqName: "`), `"`)
				if seen[name] == nil {
					seen[name] = map[string]bool{}
				}
				seen[name][labels[0]] = true
			}
		}
		k.collect(func(d *prometheus.Desc, _ float64, labels ...string) { see(d, labels...) }, func(d *prometheus.Desc, _ int64, labels ...string) { see(d, labels...) })
		return seen
	}
	for name, seen := range values() {
		if len(seen) > maxKVTenants || !seen[labelClaims] || !seen[labelOther] || !seen["t000"] {
			t.Errorf("%s has %d values of tenant", name, len(seen))
		}
	}
	if got := len(values()["hearth_kv_lookups_total"]); got != maxKVTenants {
		t.Errorf("there are %d tenants, want %d", got, maxKVTenants)
	}
	claims := k.figures()[labelClaims].stats
	if claims.RAM.Blocks != 3 || claims.LookupHits != 3 {
		t.Errorf("claims have %d blocks and %d hits together", claims.RAM.Blocks, claims.LookupHits)
	}
	// What counts goes on counting when a claim ends, and what it had goes.
	if err := k.Release(t.Context(), "c-1"); err != nil {
		t.Fatal(err)
	}
	claims = k.figures()[labelClaims].stats
	if claims.RAM.Blocks != 2 || claims.LookupHits != 3 || claims.RAM.Budget != 2*units.MiB {
		t.Errorf("after one ended they have %d blocks, %s and %d hits", claims.RAM.Blocks, claims.RAM.Budget, claims.LookupHits)
	}

	var sum kvSum
	for tenant := range 3 {
		models := map[string]resp.ModelStats{}
		for i := range 50 {
			models[fmt.Sprintf("m%d-%02d", tenant, i)] = resp.ModelStats{NVMe: resp.ModelHits{Hits: 1, Tokens: 16}}
		}
		sum.add(kvSum{models: models})
	}
	var hits uint64
	for _, m := range sum.models {
		hits += m.NVMe.Hits
	}
	if other := sum.models[labelOther]; len(sum.models) != maxKVModels+1 || hits != 150 || other.NVMe != (resp.ModelHits{Hits: 86, Tokens: 86 * 16}) {
		t.Errorf("%d models with %d hits, other has %+v", len(sum.models), hits, other)
	}
}

func TestTheFillIsToldAnewWhereItMatters(t *testing.T) {
	t.Parallel()
	var f fillKeeper
	figures := func(used units.Bytes, hits, damaged int64) map[string]*kvSum {
		return map[string]*kvSum{"a": {stats: kvtier.TenantStats{RAM: kvtier.TierStats{Used: used, Budget: 1000, Hits: hits, Damaged: damaged}}}}
	}
	f.look(figures(100, 0, 0))
	first := f.told()
	f.look(figures(109, 50, 0))
	if f.told() != first {
		t.Error("a hundredth of the budget and a count are told at once")
	}
	f.look(figures(111, 50, 0))
	if got := f.told(); got == first || got.RAM.Used != 111 || got.RAM.Hits != 50 {
		t.Errorf("a move of the fill is told as %+v", got)
	}
	f.look(figures(111, 50, 1))
	if f.told().RAM.Damaged != 1 {
		t.Error("damage is not told")
	}
	if got := *f.told(); fillMatters(got, got) || got == (local.KVFill{}) {
		t.Error("what is the same matters")
	}
}

func TestPinsAndDropsNameTenantsAndKeysAsPeopleDo(t *testing.T) {
	t.Parallel()
	c := newKV(t)
	c.Tenants = []KVTenant{tenant("same", 2*units.MiB, 0)}
	k := openedKV(t, c, plenty)
	if _, err := k.Reserve(t.Context(), kvtier.Reservation{Claim: "same", Namespace: "team", Memory: units.MiB}); err != nil {
		t.Fatal(err)
	}
	store(t, k, kvtier.TenantCredential, "same", "model@1", "value")
	hash := block.HashOf([]byte("model@1")).String()
	if admin.KeyOf(hash) != admin.KeyOf("model@1") {
		t.Fatal("a hash names another block than its key")
	}
	keys := []block.Key{admin.KeyOf("model@1")}
	for tenant, want := range map[string]error{"same": kvtier.ErrInvalid, "claim/same": kvtier.ErrMiss, "none": kvtier.ErrUnknown, "root/same": kvtier.ErrUnknown, "credential/same": nil} {
		if _, err := k.Pin(t.Context(), tenant, keys, true); !errors.Is(err, want) {
			t.Errorf("to pin a block of %s gave %v, want %v", tenant, err, want)
		}
	}
	if got, err := k.Pin(t.Context(), "credential/same", keys, false); err != nil || got != (admin.KVPinned{Changed: 1}) {
		t.Errorf("to unpin it gave %+v, %v", got, err)
	}
	if got, err := k.Drop(t.Context(), "credential/same", keys); err != nil || got.Dropped != 1 || has(t, k, kvtier.TenantCredential, "same", "model@1") {
		t.Errorf("to drop it gave %+v, %v", got, err)
	}
}

// ask sends commands in the inline form and gives the first line of each reply.
func ask(t *testing.T, network, address string, commands ...string) (replies []string) {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), network, address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	lines := bufio.NewReader(conn)
	for _, command := range commands {
		var text strings.Builder
		words := strings.Fields(command)
		fmt.Fprintf(&text, "*%d\r\n", len(words))
		for _, word := range words {
			fmt.Fprintf(&text, "$%d\r\n%s\r\n", len(word), word)
		}
		if _, err := conn.Write([]byte(text.String())); err != nil {
			t.Fatal(err)
		}
		line, err := lines.ReadString('\n')
		if err == nil && strings.HasPrefix(line, "$") && line != "$-1\r\n" {
			line, err = lines.ReadString('\n')
		}
		if err != nil {
			t.Fatalf("%s: %v", command, err)
		}
		replies = append(replies, strings.TrimSpace(line))
	}
	return replies
}

func TestAClaimsClientsComeByItsSocket(t *testing.T) {
	t.Parallel()
	k := openedKV(t, newKV(t), plenty)
	dir, err := k.Reserve(t.Context(), kvtier.Reservation{Claim: "c", Namespace: "team", Memory: units.MiB})
	if err != nil {
		t.Fatal(err)
	}
	got := ask(t, "unix", filepath.Join(dir, kvtier.SocketName), "SET k v", "GET k", "EXISTS nothing")
	if !slices.Equal(got, []string{"+OK", "v", ":0"}) {
		t.Errorf("replies are %q", got)
	}
	d, err := k.Describe(t.Context())
	if err != nil || len(d.Tenants) != 1 || d.Tenants[0].Namespace != "team" || d.Tenants[0].Blocks != 1 || d.RESP.Commands["get"] != 1 {
		t.Errorf("the description is %+v: %v", d, err)
	}
	if d.Memory.Reserved != int64(units.MiB) || d.Memory.Configured != int64(8*units.MiB) || len(d.Drives) != 1 || d.Drives[0].Size == 0 {
		t.Errorf("memory is %+v, drives %+v", d.Memory, d.Drives)
	}
}
