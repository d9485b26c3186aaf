package soak

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/router"
	"github.com/hearth-dev/hearth/router/pool"
	"github.com/hearth-dev/hearth/test/sim/engine"
)

// Faults makes the parts of a Fabric fail, one thing of each sort at a time,
// so that there is always an engine that could answer.
type Faults struct {
	Fabric *Fabric
	Seed   uint64

	mu     sync.Mutex
	count  map[string]int // guarded by mu
	failed []error        // guarded by mu: what the faults themselves could not do
}

func (f *Faults) did(what string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.count == nil {
		f.count = map[string]int{}
	}
	f.count[what]++
}

func (f *Faults) could(err error) {
	if err == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failed = append(f.failed, err)
}

// Count gives how often each fault was made.
func (f *Faults) Count() map[string]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.count)
}

// Run makes faults until ctx ends, and then takes back those that stay.
func (f *Faults) Run(ctx context.Context) {
	var group sync.WaitGroup
	for i, sort := range []func(context.Context, *rand.Rand){f.answers, f.engines, f.agents, f.configurations, f.restarts} {
		group.Go(func() { sort(ctx, rand.New(rand.NewPCG(f.Seed, uint64(1000+i)))) })
	}
	group.Wait()
	for _, e := range f.Fabric.engines {
		e.signal(syscall.SIGKILL) // with it ends what hangs there; the next has no fault
	}
}

// between waits from least to most.
func between(ctx context.Context, rng *rand.Rand, least, most time.Duration) bool {
	return pause(ctx, least+time.Duration(rng.Int64N(int64(most-least)))) == nil
}

// answers makes engines answer as they should not.
func (f *Faults) answers(ctx context.Context, rng *rand.Rand) {
	modes := []string{
		engine.FaultHang, engine.FaultReset, engine.FaultRST, engine.FaultTrickle, engine.FaultGarbage,
		engine.FaultStatus, engine.FaultEarly, engine.FaultEnd, engine.FaultHints, engine.FaultDie,
	}
	statuses := []int{500, 502, 503, 429, 400, 529}
	for between(ctx, rng, 50*time.Millisecond, 400*time.Millisecond) {
		fault := engine.Fault{Mode: modes[rng.IntN(len(modes))], Count: 1 + rng.IntN(3), AfterTokens: rng.IntN(12)}
		switch fault.Mode {
		case engine.FaultTrickle:
			fault.Delay = 60_000_000
		case engine.FaultStatus, engine.FaultEarly:
			fault.Status = statuses[rng.IntN(len(statuses))]
			if rng.IntN(2) == 0 {
				fault.RetryAfter = "1"
			}
		case engine.FaultHang, engine.FaultDie:
			if fault.Count = 1; rng.IntN(4) > 0 {
				continue // these cost the most
			}
		}
		e := f.Fabric.engines[rng.IntN(len(f.Fabric.engines))]
		if e.fault(ctx, fault) == nil { // else it is being started again
			f.did(fault.Mode)
		}
	}
}

func (e *engineProcess) fault(ctx context.Context, fault engine.Fault) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url+"/sim/fault", bytes.NewReader(encode(fault)))
	if err != nil {
		return err
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	if err := resp.Body.Close(); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("set fault: %s", resp.Status)
	}
	return nil
}

// engines kills and freezes processes.
func (f *Faults) engines(ctx context.Context, rng *rand.Rand) {
	for between(ctx, rng, time.Second, 4*time.Second) {
		e := f.Fabric.engines[rng.IntN(len(f.Fabric.engines))]
		if rng.IntN(3) > 0 {
			e.signal(syscall.SIGKILL)
			f.did("kill engine")
			continue
		}
		e.signal(syscall.SIGSTOP)
		between(ctx, rng, 200*time.Millisecond, 1500*time.Millisecond)
		e.signal(syscall.SIGCONT)
		f.did("freeze engine")
	}
}

// agents reports device faults and kills agents.
func (f *Faults) agents(ctx context.Context, rng *rand.Rand) {
	rest := context.WithoutCancel(ctx)
	for between(ctx, rng, time.Second, 3*time.Second) {
		e := f.Fabric.engines[rng.IntN(len(f.Fabric.engines))]
		if rng.IntN(3) == 0 {
			e.agent.process.Kill()
			f.did("kill agent")
			between(ctx, rng, 100*time.Millisecond, 2*time.Second)
			f.could(e.agent.start(rest, f.Fabric.rig))
			continue
		}
		xid := []int{79, 48, 94, 31}[rng.IntN(4)]
		_, err := e.agent.client.Inject(rest, admin.InjectRequest{Device: e.device, XID: xid})
		f.could(err)
		f.did("device fault")
		between(ctx, rng, 200*time.Millisecond, 2*time.Second)
		_, err = e.agent.client.Inject(rest, admin.InjectRequest{Device: e.device, Clear: true})
		f.could(err)
	}
}

// configurations rewrites the files of the routers that last, now and then
// with one that is none.
func (f *Faults) configurations(ctx context.Context, rng *rand.Rand) {
	restore := func(r *routerProcess) { f.could(writeConfig(r.path, router.Kind, r.cfg)) }
	for between(ctx, rng, 2*time.Second, 6*time.Second) {
		r := f.Fabric.lasting[rng.IntN(len(f.Fabric.lasting))]
		next := r.cfg
		switch rng.IntN(4) {
		case 0:
			f.could(replaceFile(r.path, []byte("apiVersion: hearth.dev/v1alpha1\nkind: RouterConfig\nnodes: [")))
			f.did("bad configuration")
			continue
		case 1:
			next.Policy = pool.PolicyRoundRobin
		case 2:
			next.Models = append(models(), pool.ModelConfig{Name: "more", Targets: []pool.TargetConfig{{Pool: Models[0], ServedModel: ServedModel, Weight: 1}}})
		case 3:
		}
		f.could(writeConfig(r.path, router.Kind, next))
		f.did("configuration")
	}
	for _, r := range f.Fabric.lasting {
		restore(r)
	}
}

// restarts replaces the router that is there to be replaced.
func (f *Faults) restarts(ctx context.Context, rng *rand.Rand) {
	for round := 1; between(ctx, rng, 8*time.Second, 20*time.Second); round++ {
		if err := f.Fabric.roll(context.WithoutCancel(ctx), round); err != nil {
			f.could(err)
			if _, gone := os.Stat(f.Fabric.rig.Dir); gone != nil {
				return
			}
		}
		f.did("router restart")
	}
}
