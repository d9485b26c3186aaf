package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/hearth-dev/hearth/test/outside/rig"
)

// load shows that the agent reads each engine's /metrics and /slots, and that
// the router knows: the slots and the tokens generated so far, then a request
// that is seen while it runs.
func (d *demo) load(ctx context.Context) (map[string]any, error) {
	want := map[string]int{}
	for _, t := range d.talks {
		for i, a := range t.turns {
			want[t.engines[i]] += a.completion
		}
	}
	figures := map[string]any{}
	err := rig.Until(ctx, "the agent to report what the engines did", func(ctx context.Context) (bool, error) {
		list, err := d.node.Client.Endpoints(ctx)
		if err != nil {
			return false, err
		}
		for _, e := range list {
			figures[e.Name] = map[string]any{
				"slots": e.Load.MaxRunning, "promptTokens": e.Load.PromptTokens, "generatedTokens": e.Load.GeneratedTokens,
			}
			// The engine's start-up token is counted as well.
			if !e.Reachable || e.Load.MaxRunning != 2 || int(e.Load.GeneratedTokens) < want[d.node.Name+"/"+e.Name] {
				return false, fmt.Errorf("%s: %+v, want 2 slots and at least %d tokens", e.Name, e.Load, want[d.node.Name+"/"+e.Name])
			}
		}
		return len(list) == 2, nil
	}, d.node.Process)
	if err != nil {
		return figures, err
	}
	seen, err := d.seenRunning(ctx)
	figures["seenRunning"] = seen
	return figures, err
}

// seenRunning keeps the engines busy until the router has heard from the agent
// that a request is running on one of them, and names it.
func (d *demo) seenRunning(ctx context.Context) (string, error) {
	busy, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		for n := 1; ; n++ {
			_, err := ask(busy, d.router.URL, fmt.Sprintf("demo-busy-%d", n), "smollm2",
				[]message{{"user", fmt.Sprintf("Count slowly from %d to a hundred, one number a line.", n)}}, 256, io.Discard)
			if err != nil || busy.Err() != nil {
				ended <- err
				return
			}
		}
	}()
	seen := ""
	begun := time.Now()
	err := rig.Until(ctx, "the router to hear of a running request", func(ctx context.Context) (bool, error) {
		select {
		case err := <-ended:
			ended <- err
			return false, err
		default:
		}
		list, err := d.admin.Endpoints(ctx)
		if err != nil {
			return false, err
		}
		for _, e := range list {
			if e.Running > 0 && e.LoadAgeSeconds >= 0 {
				seen = e.ID
			}
		}
		return seen != "", nil
	}, d.router.Process)
	stop()
	if cause := <-ended; cause != nil && !errors.Is(cause, context.Canceled) {
		err = errors.Join(err, cause)
	}
	if err == nil {
		say("\nload: the router heard of a running request on %s after %.1f s", seen, time.Since(begun).Seconds())
	}
	return seen, err
}
