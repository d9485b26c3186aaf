package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/torture/victim"
	"github.com/hearth-dev/hearth/units"
)

// repositories are what the origin has.
var repositories = []string{"org/ash", "org/birch", "org/cedar", "org/doug"}

// budget holds all that is Ready and what supersedes it: more than every main
// and its successor need, so that nothing Ready is evicted for want of room.
const budget = 512 * units.MiB

// roundLimit bounds a round: whatever hangs longer is a fault.
const roundLimit = 30 * time.Minute

var errSlowRound = fmt.Errorf("the round took longer than %v", roundLimit)

// options are what a run is asked for.
type options struct {
	rounds  int
	seed    uint64
	dir     string
	program string   // the agent
	args    []string // before --config
	hearth  string   // the command line
	env     []string // of both
	out     io.Writer
	memory  int64 // the most resident memory of an agent, in bytes
}

// torture is one run.
type torture struct {
	options
	rig            *rig.Rig
	origin         *origin
	model          *model
	agent          *victim.Agent
	weights, views string
	bytesAtDeath   int64 // of the origin
	// foul says that wrong bytes may be landing since the store was last at rest:
	// the origin lied, or replaced files between their listing and their bytes.
	foul    atomic.Bool
	summary Summary
	mu      sync.Mutex // over summary
}

// Summary is what a run did, in the JSON at its end.
type Summary struct {
	Seed       uint64         `json:"seed"`
	Rounds     int            `json:"rounds"`
	Kills      int            `json:"kills"`
	Recoveries int            `json:"killsDuringStart"`
	Stops      int            `json:"sigterms"`
	Pauses     int            `json:"sigstops"`
	Commits    int            `json:"commits"`
	Calls      map[string]int `json:"calls"`
	Mirrored   int64          `json:"mirrorBytesCompared"`
	Viewed     int64          `json:"viewBytesCompared"`
	Origin     int64          `json:"originBytes"`
	Resumes    int            `json:"resumesMeasured"`
	Refetched  int64          `json:"maxRefetchedBytes"`
	Start      int64          `json:"maxStartMillis"`
	Memory     int64          `json:"maxMemoryBytes"`
	Seconds    float64        `json:"seconds"`
	Failure    string         `json:"failure,omitempty"`
	Dir        string         `json:"dir,omitempty"`
}

func (t *torture) count(what string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.summary.Calls[what]++
}

func (t *torture) served(n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.summary.Mirrored += n
}

func (t *torture) viewed(n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.summary.Viewed += n
}

func (t *torture) lost(n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.summary.Resumes++
	t.summary.Refetched = max(t.summary.Refetched, n)
}

// run tortures an agent for so many rounds and tells what it did. The first
// fault ends it.
func run(ctx context.Context, o options) (Summary, error) {
	began := time.Now()
	r := &rig.Rig{Dir: o.dir}
	defer r.Close()
	t := &torture{
		options: o, rig: r, weights: filepath.Join(o.dir, "store", "weights"), views: filepath.Join(o.dir, "store", "views"),
		summary: Summary{Seed: o.seed, Calls: map[string]int{}},
	}
	dice := rand.New(rand.NewPCG(o.seed, 0))
	err := func() (err error) {
		if t.origin, err = newOrigin(ctx, r, o.dir, dice, repositories); err != nil {
			return err
		}
		t.model = &model{origin: t.origin, refs: map[string]*ref{}}
		if t.agent, err = victim.New(ctx, r, victim.Options{
			Dir: o.dir, Weights: t.weights, Views: t.views, Origin: t.origin.url, Program: o.program, Args: o.args, Env: o.env,
			Set: func(c *nodeagent.Config) { c.Weights.Budget = budget },
		}); err != nil {
			return err
		}
		for i := range o.rounds {
			// Each round has its own dice, so that it does not hang on how many
			// throws the goroutines of the one before made.
			if err := t.round(ctx, i, rand.New(rand.NewPCG(o.seed, uint64(i)+1))); err != nil {
				return fmt.Errorf("round %d: %w", i+1, err)
			}
			t.summary.Rounds++
		}
		return nil
	}()
	t.summary.Seconds = time.Since(began).Seconds()
	if t.origin != nil {
		t.summary.Origin = t.origin.Bytes()
		t.summary.Commits = t.origin.made
	}
	if err != nil {
		if t.agent != nil {
			t.agent.Dump()
		}
		t.summary.Failure, t.summary.Dir = err.Error(), o.dir
	}
	return t.summary, err
}

// round works the agent, ends it at a random moment, starts it, checks, up to
// three times; then the origin is clear and everything must come right.
func (t *torture) round(ctx context.Context, n int, dice *rand.Rand) error {
	began := time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, roundLimit, errSlowRound)
	defer cancel()
	t.origin.setWeather(weather{})
	lives := 1 + dice.IntN(3)
	var deaths []string
	for range lives {
		if err := t.start(ctx, dice); err != nil {
			return err
		}
		death, err := t.live(ctx, dice)
		if err != nil {
			return err
		}
		deaths = append(deaths, death)
	}
	if err := t.start(ctx, dice); err != nil {
		return err
	}
	if err := t.settle(ctx); err != nil {
		return err
	}
	t.foul.Store(false)
	memory, err := t.note()
	if err != nil {
		return err
	}
	if err := t.agent.Terminate(); err != nil {
		return err
	}
	if t.bytesAtDeath, err = t.origin.rested(ctx); err != nil {
		return err
	}
	if err := t.quiet(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(t.out, "round %3d: %-34s %5.1f s, origin %4d MiB, mirror %4d MiB, memory %3d MiB, refetched at most %4d KiB\n",
		n+1, strings.Join(deaths, ", "), time.Since(began).Seconds(), t.origin.Bytes()>>20, t.summary.Mirrored>>20, memory>>20, t.summary.Refetched>>10)
	return err
}

// start starts the agent, sometimes killing it on its way up, and checks it as
// soon as it answers.
func (t *torture) start(ctx context.Context, dice *rand.Rand) error {
	for range dice.IntN(3) {
		if err := t.agent.Launch(); err != nil {
			return err
		}
		_ = pause(ctx, time.Duration(dice.IntN(120))*time.Millisecond)
		t.agent.Kill()
		t.summary.Recoveries++
	}
	if err := t.agent.Launch(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	took, err := t.agent.Ready(ctx)
	if err != nil {
		return err
	}
	t.summary.Start = max(t.summary.Start, took.Milliseconds())
	for _, r := range t.model.all() {
		r.reborn()
	}
	return t.afterStart(ctx)
}

// live works the agent under some weather and ends it.
func (t *torture) live(ctx context.Context, dice *rand.Rand) (string, error) {
	// What the last life left half done is measured before the weather turns.
	if !t.foul.Load() {
		if err := t.resume(ctx); err != nil {
			return "", err
		}
	}
	w := someWeather(dice)
	if w.wrong > 0 {
		t.foul.Store(true)
	}
	t.origin.setWeather(w)
	t.origin.SetRate(units.Rate(8+dice.IntN(60)) * units.Rate(units.MiB))
	working, cancel := context.WithCancel(ctx)
	defer cancel()
	dying := make(chan struct{})
	wait := t.work(working, dice, dying)
	paused, err := t.events(ctx, dice, w)
	if _, noteErr := t.note(); err == nil {
		err = noteErr
	}
	close(dying)
	death := "kill"
	switch {
	case err != nil:
		t.agent.Kill()
	case !paused && dice.IntN(5) == 0: // a stopped process cannot end by itself
		death = "term"
		t.summary.Stops++
		err = t.agent.Terminate()
	default:
		if paused {
			death = "stop+kill"
		}
		t.summary.Kills++
		t.agent.Kill()
	}
	cancel()
	if workErr := wait(); workErr != nil {
		err = workErr
	}
	t.origin.setWeather(weather{})
	t.origin.SetRate(0)
	var restErr error
	t.bytesAtDeath, restErr = t.origin.rested(ctx)
	return death, errors.Join(err, restErr, t.quiet())
}

// events lets a life go on for a while, in which main moves, the origin goes
// down and the agent is stopped and continued.
func (t *torture) events(ctx context.Context, dice *rand.Rand, w weather) (paused bool, err error) {
	for range 1 + dice.IntN(4) {
		_ = pause(ctx, time.Duration(20+dice.IntN(350))*time.Millisecond)
		switch dice.IntN(6) {
		case 0, 1:
			t.foul.Store(true)
			if err := t.origin.publish(dice, repositories[dice.IntN(len(repositories))]); err != nil {
				return false, err
			}
		case 2:
			down := w
			down.down = true
			t.origin.setWeather(down)
			_ = pause(ctx, time.Duration(dice.IntN(500))*time.Millisecond)
			t.origin.setWeather(w)
		case 3:
			t.summary.Pauses++
			t.agent.Signal(syscall.SIGSTOP)
			_ = pause(ctx, time.Duration(dice.IntN(500))*time.Millisecond)
			if dice.IntN(3) == 0 {
				return true, nil
			}
			t.agent.Signal(syscall.SIGCONT)
		}
		select {
		case <-t.agent.Done():
			return false, fmt.Errorf("the agent ended by itself: %w: %s", errors.Join(errDied, t.agent.Err()), t.agent.LogTail())
		default:
		}
	}
	return false, nil
}

var errDied = errors.New("it died")

// note takes the agent's peak memory.
func (t *torture) note() (int64, error) {
	memory, err := t.agent.PeakMemory()
	if err != nil {
		return 0, err
	}
	t.summary.Memory = max(t.summary.Memory, memory)
	if memory > t.memory {
		return memory, fmt.Errorf("the agent takes %d bytes of memory, at most %d are right", memory, t.memory)
	}
	return memory, nil
}

// quiet finds what a log must not say.
func (t *torture) quiet() error {
	text, err := os.ReadFile(t.agent.Log)
	if err != nil {
		return fmt.Errorf("read agent log: %w", err)
	}
	for _, word := range []string{"panic: ", "DATA RACE", "fatal error: "} {
		if i := strings.Index(string(text), word); i >= 0 {
			return fmt.Errorf("the agent's log says %q", text[i:min(len(text), i+2000)])
		}
	}
	return nil
}
