package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/torture/kvload"
	"github.com/hearth-dev/hearth/test/torture/victim"
	"github.com/hearth-dev/hearth/units"
)

// KVSummary is what a run did to the KV store, in the JSON at its end.
type KVSummary struct {
	Seed       uint64  `json:"seed"`
	Rounds     int     `json:"rounds"`
	Kills      int     `json:"kills"`
	Recoveries int     `json:"killsDuringStart"`
	Stops      int     `json:"sigterms"`
	Sets       int64   `json:"sets"`
	Deletes    int64   `json:"deletes"`
	Gets       int64   `json:"gets"`
	Hits       int64   `json:"hits"`
	Sealed     int     `json:"sealedBlocks"`
	Back       int     `json:"sealedBlocksBack"`
	Start      int64   `json:"maxStartMillis"`
	Memory     int64   `json:"maxMemoryBytes"`
	Seconds    float64 `json:"seconds"`
	Failure    string  `json:"failure,omitempty"`
	Dir        string  `json:"dir,omitempty"`
}

// kvMemory is what an agent may take beyond what one without a KV store takes:
// its blocks in RAM, those on their way and an index.
const kvMemory = 256 << 20

// kvTorture is one run against the KV store.
type kvTorture struct {
	options
	dir     string // the KV space's
	agent   *victim.Agent
	tenants []*kvload.Tenant
	summary KVSummary
}

// runKV ends an agent amid SETs, GETs and DELs of several tenants, so many rounds,
// and holds what it then answers to what it had answered.
func runKV(ctx context.Context, o options) (KVSummary, error) {
	began := time.Now()
	r := &rig.Rig{Dir: o.dir}
	defer r.Close()
	k := &kvTorture{options: o, dir: filepath.Join(o.dir, "kv"), summary: KVSummary{Seed: o.seed}}
	err := k.prepare(ctx, r)
	for i := 0; err == nil && i < o.rounds; i++ {
		if err = k.round(ctx, i, rand.New(rand.NewPCG(o.seed, uint64(i)+1))); err != nil {
			err = fmt.Errorf("KV round %d: %w", i+1, err)
			break
		}
		k.summary.Rounds++
	}
	for _, t := range k.tenants {
		k.summary.Sets += t.Sets.Load()
		k.summary.Deletes += t.Deletes.Load()
		k.summary.Gets += t.Gets.Load()
		k.summary.Hits += t.Hits.Load()
	}
	k.summary.Seconds = time.Since(began).Seconds()
	if err != nil {
		if k.agent != nil {
			k.agent.Dump()
		}
		k.summary.Failure, k.summary.Dir = err.Error(), o.dir
	}
	return k.summary, err
}

// prepare lays out the agent: a tenant on a socket, one with a password and one
// without any on TCP.
func (k *kvTorture) prepare(ctx context.Context, r *rig.Rig) error {
	addr, err := rig.FreeAddr(ctx)
	if err != nil {
		return err
	}
	credential := filepath.Join(k.options.dir, "credential")
	if err := os.WriteFile(credential, []byte("a password\n"), 0o600); err != nil {
		return fmt.Errorf("write credential: %w", err)
	}
	socket := filepath.Join(k.options.dir, "kv.sock")
	tenant := func(name, network, addr, password string) *kvload.Tenant {
		const keys = 300
		return &kvload.Tenant{Name: name, Network: network, Addr: addr, Password: password, Keys: keys, Oracle: kvload.NewOracle(keys)}
	}
	k.tenants = []*kvload.Tenant{tenant("socket", "unix", socket, ""), tenant("password", "tcp", addr, "a password"), tenant("open", "tcp", addr, "")}
	k.agent, err = victim.New(ctx, r, victim.Options{
		Dir: k.options.dir, Weights: filepath.Join(k.options.dir, "weights"), Views: filepath.Join(k.options.dir, "views"), Origin: "http://127.0.0.1:1",
		Program: k.program, Args: k.args, Env: k.env,
		Set: func(c *nodeagent.Config) {
			c.Listen.RESP = addr
			c.KV.DriveWritesPerDay = 100 // hundreds of kills lose what each was granted
			c.KV.Dir, c.KV.Memory, c.KV.NVMe, c.KV.VerifyEvery = k.dir, 32*units.MiB, 256*units.MiB, 1
			c.KV.Tenants = []nodeagent.KVTenant{
				{Name: "socket", Socket: socket, CredentialFile: "", Memory: 8 * units.MiB, MemoryLimit: 12 * units.MiB, NVMe: 64 * units.MiB, Admit: nodeagent.AdmitAll},
				{Name: "password", CredentialFile: credential, Memory: 12 * units.MiB, NVMe: 128 * units.MiB, Admit: nodeagent.AdmitUsed},
				// Its blocks pass through RAM, and stay on the drive alone.
				{Name: "open", Anonymous: true, NVMe: 64 * units.MiB, Admit: nodeagent.AdmitAll},
			}
		},
	})
	return err
}

// round works the agent, ends it at a random moment and looks, up to three times.
func (k *kvTorture) round(ctx context.Context, n int, dice *rand.Rand) error {
	began := time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, roundLimit, errSlowRound)
	defer cancel()
	var deaths []string
	for range 1 + dice.IntN(3) {
		sealed, err := k.sealed()
		if err == nil {
			err = k.start(ctx, dice)
		}
		if err == nil {
			err = k.check(ctx, sealed)
		}
		if err != nil {
			return err
		}
		death, err := k.live(ctx, dice)
		if err == nil {
			err = k.quiet()
		}
		if err != nil {
			return err
		}
		deaths = append(deaths, death)
	}
	_, err := fmt.Fprintf(k.out, "KV round %3d: %-18s %5.1f s, sealed blocks %d of %d back, memory %3d MiB\n",
		n+1, strings.Join(deaths, ", "), time.Since(began).Seconds(), k.summary.Back, k.summary.Sealed, k.summary.Memory>>20)
	return err
}

// sealed lists what has to be back, by tenant.
func (k *kvTorture) sealed() ([][]kvload.Sealed, error) {
	var list [][]kvload.Sealed
	for _, t := range k.tenants {
		blocks, err := t.Sealed(k.dir)
		if err != nil {
			return nil, err
		}
		list = append(list, blocks)
	}
	return list, nil
}

// start starts the agent, sometimes killing it on its way up.
func (k *kvTorture) start(ctx context.Context, dice *rand.Rand) error {
	for range dice.IntN(3) {
		if err := k.agent.Launch(); err != nil {
			return err
		}
		_ = pause(ctx, time.Duration(dice.IntN(120))*time.Millisecond)
		k.agent.Kill()
		k.summary.Recoveries++
	}
	if err := k.agent.Launch(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	took, err := k.agent.Ready(ctx)
	if err != nil {
		return err
	}
	k.summary.Start = max(k.summary.Start, took.Milliseconds())
	for _, t := range k.tenants {
		t.Oracle.Reborn()
	}
	return nil
}

// check reads every key of an agent that just started: nothing is wrong, and of
// what was sealed hardly anything is missing.
func (k *kvTorture) check(ctx context.Context, sealed [][]kvload.Sealed) error {
	for i, t := range k.tenants {
		c, err := t.Dial(ctx, i > 0)
		if err != nil {
			return fmt.Errorf("tenant %s after start: %w", t.Name, err)
		}
		defer c.Close()
		back := 0
		var lost []string
		for _, s := range sealed[i] {
			found, err := t.Get(c, s.Key)
			if err != nil {
				return fmt.Errorf("after start: %w", err)
			}
			if found {
				back++
				continue
			}
			lost = append(lost, fmt.Sprintf("key %d in %s, reused %t", s.Key, filepath.Base(s.Path), s.Reused()))
		}
		k.summary.Sealed += len(sealed[i])
		k.summary.Back += back
		if back*100 < len(sealed[i])*99 {
			return fmt.Errorf("tenant %s: of %d blocks in sealed segments %d are back: %w: %q", t.Name, len(sealed[i]), back, errLost, lost)
		}
		for key := range t.Keys {
			if _, err := t.Get(c, key); err != nil {
				return fmt.Errorf("after start: %w", err)
			}
		}
	}
	return nil
}

var errLost = errors.New("blocks are lost")

// live has clients of every tenant work, and ends the agent among them.
func (k *kvTorture) live(ctx context.Context, dice *rand.Rand) (death string, err error) {
	dying := make(chan struct{})
	failed := make(chan error, 1)
	var all sync.WaitGroup
	for _, t := range k.tenants {
		for i := range 3 {
			own := rand.New(rand.NewPCG(dice.Uint64(), dice.Uint64()))
			all.Go(func() {
				if err := client(ctx, t, own, i > 0, dying); err != nil {
					select {
					case failed <- err:
					default:
					}
				}
			})
		}
	}
	_ = pause(ctx, time.Duration(100+dice.IntN(1500))*time.Millisecond)
	memory, err := k.agent.PeakMemory()
	k.summary.Memory = max(k.summary.Memory, memory)
	if err == nil && memory > k.memory+kvMemory {
		err = fmt.Errorf("the agent takes %d bytes of memory, at most %d are right", memory, k.memory+kvMemory)
	}
	close(dying)
	death = "kill"
	if err == nil && dice.IntN(5) == 0 {
		death = "term"
		k.summary.Stops++
		err = k.agent.Terminate()
	} else {
		k.summary.Kills++
		k.agent.Kill()
	}
	all.Wait()
	select {
	case workErr := <-failed:
		err = errors.Join(workErr, err)
	default:
	}
	return death, err
}

// client works until the agent ends. What it says before is an error where it is
// wrong, and where a connection ends that should not.
func client(ctx context.Context, t *kvload.Tenant, dice *rand.Rand, hello bool, dying <-chan struct{}) error {
	over := func() bool {
		select {
		case <-dying:
			return true
		default:
			return ctx.Err() != nil
		}
	}
	c, err := t.Dial(ctx, hello)
	for err == nil {
		defer c.Close()
		for i := dice.IntN(400); err == nil && i >= 0; i-- {
			err = t.Work(c, dice, hello)
		}
		if err == nil && dice.IntN(2) == 0 {
			c.Close()
			c, err = t.Dial(ctx, hello)
		}
	}
	// An agent that stops may say that it did not do what it was asked for.
	if errors.Is(err, kvload.ErrWrong) || !over() {
		return fmt.Errorf("tenant %s: %w", t.Name, err)
	}
	return nil
}

// quiet finds what a log must not say.
func (k *kvTorture) quiet() error { return (&torture{agent: k.agent}).quiet() }
