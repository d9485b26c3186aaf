// Command demoreal is `make demo-real`: real weights and a real engine on one
// machine, headless. SmolLM2's GGUF goes from a hub origin through the weight
// cache to two llama-servers, one that pulls with -hf through the mirror and
// one that reads the mounted hub cache view; the router answers conversations
// from both. A person reads along on stderr; stdout ends with one line of check
// JSON. It needs what scripts/outside-deps installs, and proves no speed.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/cmd/hearth/up/check"
	"github.com/hearth-dev/hearth/router/admin"
	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/sim/hub"
)

func main() {
	stay := flag.Bool("stay", false, "keep everything running after the check, until Ctrl-C")
	limit := flag.Duration("timeout", 10*time.Minute, "give up after this time")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	result := run(ctx, *limit, *stay)
	stop()
	text, err := json.Marshal(result)
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo-real: encode result:", err)
		os.Exit(1)
	}
	fmt.Println(string(text))
	if !result.OK {
		os.Exit(1)
	}
}

// run takes the steps in order and stops at the first that fails, since each
// builds on the one before.
func run(ctx context.Context, limit time.Duration, stay bool) check.Result {
	result := check.Result{Schema: check.Schema, OK: true}
	d := &demo{}
	defer d.close()
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for _, s := range []struct {
		name string
		run  func(context.Context) (map[string]any, error)
	}{
		{"programs", d.programs},
		{"weights through the mirror", d.pullThroughMirror},
		{"weights from the mounted view", d.runOnView},
		{"router", d.startRouter},
		{"first turns", d.firstTurns},
		{"second turns", d.secondTurns},
		{"load", d.load},
	} {
		begun := time.Now()
		figures, err := s.run(limited)
		if figures == nil {
			figures = map[string]any{}
		}
		figures["seconds"] = round(time.Since(begun).Seconds())
		step := check.Step{Name: s.name, OK: err == nil, Figures: figures}
		if err != nil {
			step.Error = err.Error()
			result.OK = false
			say("failed: %s: %v", s.name, err)
		}
		result.Steps = append(result.Steps, step)
		if err != nil {
			d.keep = true
			return result
		}
	}
	if stay {
		d.invite()
		<-ctx.Done()
	}
	return result
}

// demo is what the steps share.
type demo struct {
	rig    *rig.Rig
	keep   bool // leave the logs behind
	origin *hub.Origin
	addrs  [2]string // of the two engines
	node   *rig.Node
	router *rig.Router
	admin  *admin.Client
	talks  []*talk
}

func (d *demo) close() {
	if d.rig == nil {
		return
	}
	d.rig.Close()
	if d.keep {
		say("logs are in %s", d.rig.Dir)
		return
	}
	_ = os.RemoveAll(d.rig.Dir)
}

// programs finds the outside programs and builds hearth.
func (d *demo) programs(ctx context.Context) (map[string]any, error) {
	dir, err := os.MkdirTemp("", "hearth-demo-")
	if err != nil {
		return nil, fmt.Errorf("make work folder: %w", err)
	}
	if d.rig, err = rig.New(dir); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	if d.rig.Deps, err = rig.FindDeps(ctx, d.rig.Root); err != nil {
		return nil, err
	}
	if _, err := d.rig.Hearth(ctx); err != nil {
		return nil, err
	}
	st, err := os.Stat(d.rig.Deps.GGUF)
	if err != nil {
		return nil, fmt.Errorf("find the model: %w", err)
	}
	say("engine: llama-server, model: SmolLM2-135M-Instruct (%d MB)", st.Size()>>20)
	return map[string]any{"modelBytes": st.Size()}, nil
}

func (d *demo) invite() {
	say("the router is at %s; try:", d.router.URL)
	say(`curl -N %s/v1/chat/completions -H 'Content-Type: application/json' -d '{"model":"smollm2","stream":true,"max_tokens":100,"messages":[{"role":"user","content":"Why is the sky blue?"}]}'`, d.router.URL)
	say("Ctrl-C ends everything")
}

func say(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// round keeps three decimals.
func round(v float64) float64 { return float64(int64(v*1000+0.5)) / 1000 }
