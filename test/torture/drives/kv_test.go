//go:build root

package drives

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/torture/kvload"
	"github.com/hearth-dev/hearth/test/torture/victim"
	"github.com/hearth-dev/hearth/units"
)

// kvNode is an agent whose KV space is on a volume of its own, and a tenant of it.
type kvNode struct {
	*node
	tenant *kvload.Tenant
	dice   *rand.Rand
}

func startKV(t *testing.T, v *volume) *kvNode {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*limit)
	t.Cleanup(cancel)
	base, err := os.MkdirTemp("", "drives-") //nolint:usetesting // short enough for a socket's path, and unmounted before it goes
	if err != nil {
		t.Fatal(err)
	}
	r := &rig.Rig{Dir: base}
	t.Cleanup(func() { r.Close(); _ = os.RemoveAll(base) })
	const keys = 200
	k := &kvNode{node: &node{t: t, ctx: ctx, store: filepath.Join(v.dir, "kv")}, dice: rand.New(rand.NewPCG(1, 2))}
	k.tenant = &kvload.Tenant{Name: "a", Network: "unix", Addr: filepath.Join(base, "kv.sock"), Keys: keys, Oracle: kvload.NewOracle(keys)}
	program := os.Getenv("HEARTH_AGENT")
	if program == "" {
		t.Fatal("HEARTH_AGENT names no agent: run make test-root")
	}
	if k.Agent, err = victim.New(ctx, r, victim.Options{
		Dir: base, Weights: filepath.Join(base, "weights"), Views: filepath.Join(base, "views"), Origin: "http://127.0.0.1:1", Program: program,
		Set: func(c *nodeagent.Config) {
			c.KV.Dir, c.KV.Memory, c.KV.NVMe, c.KV.VerifyEvery = k.store, 8*units.MiB, 64*units.MiB, 1
			c.KV.Tenants = []nodeagent.KVTenant{{
				Name: "a", Socket: k.tenant.Addr, Memory: 8 * units.MiB, NVMe: 64 * units.MiB, Admit: nodeagent.AdmitAll,
			}}
		},
	}); err != nil {
		t.Fatal(err)
	}
	k.restart()
	return k
}

// work stores, reads and deletes; whatever becomes of the blocks, no answer is
// wrong. It gives how many reads found a value.
func (k *kvNode) work() int64 {
	k.t.Helper()
	before := k.tenant.Hits.Load()
	for _, hello := range []bool{false, true} {
		c, err := k.tenant.Dial(k.ctx, hello)
		if err != nil {
			k.t.Fatalf("%v; the agent said %s", err, k.LogTail())
		}
		defer c.Close()
		for range 300 {
			// A DEL that could not be made durable says so, and is not taken for done.
			if err := k.tenant.Work(c, k.dice, hello); err != nil && !errors.Is(err, kvload.ErrAnswer) {
				k.t.Fatalf("%v; the agent said %s", err, k.LogTail())
			}
		}
	}
	return k.tenant.Hits.Load() - before
}

// look reads everything.
func (k *kvNode) look() {
	k.t.Helper()
	c, err := k.tenant.Dial(k.ctx, true)
	if err != nil {
		k.t.Fatal(err)
	}
	defer c.Close()
	for key := range k.tenant.Keys {
		if _, err := k.tenant.Get(c, key); err != nil {
			k.t.Fatal(err)
		}
	}
}

func (k *kvNode) kill() {
	k.Kill()
	k.tenant.Oracle.Reborn()
}

// goesOn looks at everything after a start, and wants hits again.
func (k *kvNode) goesOn() {
	k.t.Helper()
	k.restart()
	k.look()
	if hits := k.work(); hits == 0 {
		k.t.Error("nothing is found any more")
	}
	k.alive()
}

func TestAFullDriveCostsKVBlocksAndGivesNoWrongOne(t *testing.T) {
	t.Parallel()
	v := mounted(t, "96")
	k := startKV(t, v)
	k.work()
	release := fill(t, v, 64<<10)
	k.work()
	k.kill()
	release()
	k.goesOn()
	release = fill(t, v, 0)
	k.work()
	k.alive()
	release()
	k.work()
	k.kill()
	k.goesOn()
}

func TestADriveThatTurnsReadOnlyCostsKVBlocksAndGivesNoWrongOne(t *testing.T) {
	t.Parallel()
	v := mounted(t, "96")
	k := startKV(t, v)
	k.work()
	v.freeze()
	k.work()
	k.alive()
	k.kill()
	v.gone()
	v.back()
	k.goesOn()
}

func TestADriveUnmountedUnderItCostsKVBlocksAndGivesNoWrongOne(t *testing.T) {
	t.Parallel()
	v := mounted(t, "96")
	k := startKV(t, v)
	k.work()
	v.gone()
	k.work()
	k.alive()
	k.kill()
	v.back()
	k.goesOn()
}

func TestSegmentsDeletedUnderTheAgentCostKVBlocksAndGiveNoWrongOne(t *testing.T) {
	t.Parallel()
	v := mounted(t, "96")
	k := startKV(t, v)
	k.work()
	if err := os.RemoveAll(k.store); err != nil {
		t.Fatal(err)
	}
	k.work()
	k.alive()
	k.kill()
	k.goesOn()
}
