//go:build outside

package outside

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/units"
)

// openTenant is the one of clients that show no password.
var openTenant = rig.KVTenant{Name: "lm", Memory: 512 * units.MiB, NVMe: units.GiB}

func startKV(ctx context.Context, t *testing.T, r *rig.Rig, tenants ...rig.KVTenant) *rig.KVServer {
	t.Helper()
	s, err := r.StartKV(ctx, "kv", tenants...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// startOracle starts valkey, whose answers a client has a right to.
func startOracle(ctx context.Context, t *testing.T, r *rig.Rig, password string) *rig.KVServer {
	t.Helper()
	s, err := r.StartValkey(ctx, "valkey", password)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// foundParts are parts that were found to start, which is worth finding out once.
var foundParts struct {
	sync.Mutex
	paths map[string]string
}

// partOnce is part for one that many commands need.
func partOnce(ctx context.Context, t *testing.T, r *rig.Rig, name string) string {
	t.Helper()
	foundParts.Lock()
	defer foundParts.Unlock()
	if foundParts.paths == nil {
		foundParts.paths = map[string]string{}
	}
	if foundParts.paths[name] == "" {
		foundParts.paths[name] = part(ctx, t, r, name)
	}
	return foundParts.paths[name]
}

// callKV runs one call of a script of testdata, which must succeed, and decodes
// what it gives.
func callKV(ctx context.Context, t *testing.T, r *rig.Rig, script, call string, args map[string]any, into any) {
	t.Helper()
	text, err := json.Marshal(args)
	if err != nil {
		t.Fatal(err)
	}
	c := pythonCommand(r, script, nil, call, string(text))
	c.Path = filepath.Join(partOnce(ctx, t, r, "kv"), "bin", "python")
	var out struct {
		OK             json.RawMessage
		Error, Message string
	}
	runJSON(ctx, t, r, c, &out)
	if out.Error != "" {
		t.Fatalf("%s: %s: %s", call, out.Error, out.Message)
	}
	if err := json.Unmarshal(out.OK, into); err != nil {
		t.Fatalf("%s: %v: %s", call, err, out.OK)
	}
}

// way is how redis-py reaches a server.
type way struct {
	protocol int
	unix     bool
}

var ways = []way{{2, false}, {2, true}, {3, false}, {3, true}}

func (w way) String() string {
	return fmt.Sprintf("RESP%d over %s", w.protocol, map[bool]string{true: "unix", false: "tcp"}[w.unix])
}

func (w way) args(s *rig.KVServer, more map[string]any) map[string]any {
	args := map[string]any{"url": "redis://" + s.Addr, "protocol": w.protocol}
	if w.unix {
		args["url"] = "unix://" + s.Socket(openTenant.Name)
	}
	maps.Copy(args, more)
	return args
}

func TestFastRedisPyGetsTheAnswersThatValkeyGives(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	kv, oracle := startKV(ctx, t, r, openTenant), startOracle(ctx, t, r, "")
	for _, w := range ways {
		for _, call := range []string{"answers", "answers_async"} {
			var got, want []json.RawMessage
			callKV(ctx, t, r, "kv_redis", call, w.args(kv, nil), &got)
			callKV(ctx, t, r, "kv_redis", call, w.args(oracle, nil), &want)
			if len(got) != len(want) {
				t.Fatalf("%s, %s: %d answers, want %d", w, call, len(got), len(want))
			}
			for i := range want {
				if !slices.Equal(got[i], want[i]) {
					t.Errorf("%s, %s: answer %d is %.2000s, want %.2000s", w, call, i, got[i], want[i])
				}
			}
		}
	}
}

// wrongValues is what the scripts tell of values that they compared.
type wrongValues struct {
	Sizes, Calls, Hits, Misses, Own int
	Wrong                           any
	Failed                          []string
}

func (w wrongValues) none() bool {
	list, isList := w.Wrong.([]any)
	return w.Wrong == 0.0 || isList && len(list) == 0
}

func TestFastRedisPyGetsEveryByteBackOfValuesFromOneKiBTo64MiB(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	kv := startKV(ctx, t, r, openTenant)
	sizes := []int{1, 28, 1 << 10, 4095, 4096, 4097, 64 << 10, 512<<10 - 1, 1<<20 + 1, 2 << 20, 5_000_001, 32 << 20, 64 << 20}
	for _, w := range ways {
		var out wrongValues
		callKV(ctx, t, r, "kv_redis", "values", w.args(kv, map[string]any{"sizes": sizes}), &out)
		if out.Sizes != len(sizes) || !out.none() {
			t.Errorf("%s: %+v", w, out)
		}
	}
}

func TestFastManyRedisConnectionsNeverReadAMixedValue(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	kv := startKV(ctx, t, r, openTenant)
	for _, w := range []way{{2, false}, {3, true}} {
		var out wrongValues
		callKV(ctx, t, r, "kv_redis", "storm", w.args(kv, map[string]any{"workers": 24, "rounds": 60}), &out)
		if !out.none() || len(out.Failed) > 0 || out.Hits == 0 || out.Own == 0 {
			t.Errorf("%s: %+v", w, out)
		}
	}
}

func TestFastWhatRedisPyStoredIsThereAfterARestart(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	kv := startKV(ctx, t, r, openTenant)
	const count = 16
	stored := map[string]any{"count": count, "size": 512 << 10, "seed": 7}
	var ok []bool
	callKV(ctx, t, r, "kv_redis", "store", ways[3].args(kv, stored), &ok)
	if len(ok) != count || slices.Contains(ok, false) {
		t.Fatalf("stored %v", ok)
	}
	kv.End(30 * time.Second)
	if err := kv.Err(); err != nil {
		t.Fatalf("the agent ended with %v: %s", err, kv.LogTail())
	}
	if err := kv.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	var got struct{ Exists, Equal, Wrong int }
	callKV(ctx, t, r, "kv_redis", "load", ways[0].args(kv, stored), &got)
	if got.Exists != count || got.Equal != count || got.Wrong != 0 {
		t.Errorf("of %d values %+v", count, got)
	}
}

func TestFastAClientNeedsItsTenantsPassword(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	const secret = "a password with spaces"
	kv := startKV(ctx, t, r, rig.KVTenant{Name: "lm", Memory: 64 * units.MiB, NVMe: units.GiB, Password: secret})
	oracle := startOracle(ctx, t, r, secret)
	passwords := map[string]any{"passwords": []any{secret, "another", nil, secret}}
	for _, user := range []any{nil, "default"} {
		passwords["username"] = user
		for _, w := range []way{{2, false}, {3, false}} {
			var got, want []any
			callKV(ctx, t, r, "kv_redis", "login", w.args(kv, passwords), &got)
			callKV(ctx, t, r, "kv_redis", "login", w.args(oracle, passwords), &want)
			if !slices.Equal(got, want) || want[0] != nil || want[1] == nil || want[2] == nil {
				t.Errorf("%s, user %v: %v, want %v", w, user, got, want)
			}
		}
		var got, want []any
		callKV(ctx, t, r, "kv_glide", "login", glideArgs(kv, passwords), &got)
		callKV(ctx, t, r, "kv_glide", "login", glideArgs(oracle, passwords), &want)
		if !slices.Equal(got, want) || want[0] != nil || want[1] == nil || want[2] == nil {
			t.Errorf("GLIDE, user %v: %v, want %v", user, got, want)
		}
	}
}

func TestFastTenantsSeeNothingOfEachOther(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	tenants := []rig.KVTenant{
		openTenant,
		{Name: "one", Memory: 64 * units.MiB, NVMe: units.GiB, Password: "first"},
		{Name: "two", Memory: 64 * units.MiB, NVMe: units.GiB, Password: "second"},
	}
	kv := startKV(ctx, t, r, tenants...)
	const count = 8
	args := func(i int, unix bool) map[string]any {
		a := map[string]any{"url": "redis://" + kv.Addr, "protocol": 3, "count": count, "size": 100_000, "seed": i}
		if unix {
			a["url"] = "unix://" + kv.Socket(tenants[i].Name)
		} else if tenants[i].Password != "" {
			a["password"] = tenants[i].Password
		}
		return a
	}
	for i := range tenants {
		var got struct{ Exists, Equal, Wrong int }
		callKV(ctx, t, r, "kv_redis", "load", args(i, true), &got)
		if got.Exists != 0 || got.Equal != 0 || got.Wrong != 0 {
			t.Errorf("tenant %s has another's values: %+v", tenants[i].Name, got)
		}
		var ok []bool
		callKV(ctx, t, r, "kv_redis", "store", args(i, false), &ok)
	}
	for i := range tenants {
		for _, unix := range []bool{true, false} {
			var got struct{ Exists, Equal, Wrong int }
			callKV(ctx, t, r, "kv_redis", "load", args(i, unix), &got)
			if got.Exists != count || got.Equal != count || got.Wrong != 0 {
				t.Errorf("tenant %s, unix %t: of its %d values %+v", tenants[i].Name, unix, count, got)
			}
		}
	}
}

// glideArgs are those of a call of GLIDE, which knows no unix sockets.
func glideArgs(s *rig.KVServer, more map[string]any) map[string]any {
	args := map[string]any{"host": s.Host(), "port": s.Port()}
	maps.Copy(args, more)
	return args
}

func TestFastGlideGetsTheAnswersThatValkeyGives(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	kv, oracle := startKV(ctx, t, r, openTenant), startOracle(ctx, t, r, "")
	for _, call := range []string{"answers", "role", "databases"} {
		var got, want []any
		callKV(ctx, t, r, "kv_glide", call, glideArgs(kv, nil), &got)
		callKV(ctx, t, r, "kv_glide", call, glideArgs(oracle, nil), &want)
		if !slices.Equal(got, want) || len(want) == 0 {
			t.Errorf("%s: %v, want %v", call, got, want)
		}
	}
}

func TestFastGlideGetsEveryByteBackAndManyOfItAtOnce(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	kv := startKV(ctx, t, r, openTenant)
	sizes := []int{1, 1 << 10, 64 << 10, 2 << 20, 5_000_001, 64 << 20}
	var out wrongValues
	callKV(ctx, t, r, "kv_glide", "values", glideArgs(kv, map[string]any{"sizes": sizes}), &out)
	if out.Sizes != len(sizes) || !out.none() {
		t.Errorf("values: %+v", out)
	}
	out = wrongValues{}
	callKV(ctx, t, r, "kv_glide", "together", glideArgs(kv, map[string]any{"workers": 8, "rounds": 30, "size": 300_000}), &out)
	if out.Calls != 240 || !out.none() {
		t.Errorf("together: %+v", out)
	}
}
