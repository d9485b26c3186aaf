//go:build vllm

package vllm

import (
	"bytes"
	"context"
	"os"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/outside/rig"
)

// readings counts the reads of an engine's metrics page in its own access log.
func readings(e *engine) (int, error) {
	text, err := os.ReadFile(e.Log)
	return bytes.Count(text, []byte(`"GET /metrics HTTP/1.1" 200`)), err
}

// The agent says that its reads cost an engine at most 0.5 % of one core, at
// most one a second and at least one in ten.
func TestTheAgentReadsTheMetricsPageAtTheStatedCost(t *testing.T) {
	f, ctx := use(t)
	e := f.hubView
	const own = 60
	begin, err := e.counters(ctx)
	check(t, err)
	size := 0
	for range own {
		page, err := e.page(ctx)
		check(t, err)
		size = max(size, len(page))
	}
	end, err := e.counters(ctx)
	check(t, err)
	const cpu = "process_cpu_seconds_total"
	perRead := (end[cpu] - begin[cpu]) / (own + 1)

	before, err := readings(e)
	check(t, err)
	began, count := time.Now(), 0
	check(t, rig.Until(ctx, "the agent's reads", func(context.Context) (bool, error) {
		now, err := readings(e)
		count = now - before
		return count >= 10, err
	}, e.Process))
	took := time.Since(began)
	perSecond := float64(count) / took.Seconds()
	t.Logf("%d bytes a read, %.1f reads a minute, %.1f ms of CPU each: %.2f %% of a core, %.0f KB/s",
		size, 60*perSecond, 1000*perRead, 100*perSecond*perRead, perSecond*float64(size)/1000)
	if count > int(took/time.Second)+1 {
		t.Errorf("%d reads in %s, want at most one a second", count, took)
	}
	// What a read costs differs by some from one to the next; the agent goes by the cheapest.
	if share := perSecond * perRead; share > 0.0075 {
		t.Errorf("reading costs %.2f %% of a core, want 0.5", 100*share)
	}
	if size < 32<<10 || size > 128<<10 {
		t.Errorf("the page has %d bytes, want about 64 KiB", size)
	}
}
