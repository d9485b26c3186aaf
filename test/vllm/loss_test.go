//go:build vllm

package vllm

import (
	"context"
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/outside/rig"
)

// An engine is killed while it computes some streams and has others waiting:
// the clients of the first are told, the others never notice.
func TestAnEngineThatDiesBreaksOnlyTheStreamsItHadBegun(t *testing.T) {
	f, ctx := use(t)
	const (
		each     = 2 * maxRunning // streams per engine: as many wait as run
		streamed = 600            // tokens of each
	)
	victim := f.flatView
	streams := each * len(f.engines())
	var begun atomic.Int64
	var list []request
	for i := range streams {
		q := chat(chatModel, streamed, true, fmt.Sprintf("stream %d of the loss", i))
		first := true
		q.onContent = func() {
			if first {
				begun.Add(1)
				first = false
			}
		}
		list = append(list, q)
	}
	answered := make(chan []answer, 1)
	go func() { answered <- all(list, func(q request) answer { return f.ask(ctx, q) }) }()
	check(t, rig.Until(ctx, "the victim to run some streams and let others wait", func(ctx context.Context) (bool, error) {
		c, err := victim.counters(ctx)
		return err == nil && c[runningNow] == maxRunning && c[waitingNow] > 0 && begun.Load() >= int64(len(f.engines())*maxRunning), err
	}, victim.Process))
	before, err := victim.counters(ctx)
	check(t, err)
	victim.Kill()
	waiting := int(before[waitingNow])

	// Meanwhile the others serve, with nobody told of the loss.
	next := f.ask(ctx, chat(chatModel, 8, false, "who is left?"))
	check(t, next.whole(false))
	answers := <-answered
	ids := []string{next.id}
	for _, a := range answers {
		ids = append(ids, a.id)
	}
	records, err := f.records(ctx, ids...)
	check(t, err)
	if e := f.byID(records[next.id].Endpoint); e == victim {
		t.Errorf("the next request is recorded at the dead engine: %+v", records[next.id])
	}
	lost, retried, refused := 0, 0, 0
	for _, a := range answers {
		r := records[a.id]
		if a.whole(true) == nil {
			if r.Outcome != "ok" || r.Completion != streamed || f.byID(r.Endpoint) == victim {
				t.Errorf("a whole stream is recorded as %+v", r)
			}
			retried += r.Retries
			continue
		}
		if a.status == http.StatusBadGateway && a.broken == nil {
			refused++ // the router asks elsewhere for a tenth of its requests, and for three
			continue
		}
		lost++
		if len(a.errors) != 1 || a.broken == nil || a.done || a.chunks == 0 {
			t.Errorf("a broken stream ended with errors %q, cleanly is %t, after %d chunks", a.errors, a.broken == nil, a.chunks)
		}
		if r.Outcome != "engine_lost" || f.byID(r.Endpoint) != victim || r.Completion == 0 || r.Estimated {
			t.Errorf("a broken stream is recorded as %+v", r)
		}
	}
	t.Logf("%d streams ran and %d waited at the engine that died: %d broke off, %d went on elsewhere, %d got a status",
		int(before[runningNow]), waiting, lost, retried, refused)
	// One that waited may have begun in the moment before the kill.
	if lost < maxRunning || lost+retried+refused < maxRunning+waiting || retried < min(3, waiting+maxRunning-lost) {
		t.Errorf("%d streams broke, %d went on elsewhere and %d got a status, of %d that ran and %d that waited", lost, retried, refused, maxRunning, waiting)
	}

	f.revive(ctx, t, victim)
}

// revive starts a dead engine again and waits until the router uses it.
func (f *fabric) revive(ctx context.Context, t *testing.T, e *engine) {
	t.Helper()
	began := time.Now()
	check(t, e.start(f.rig, f.root))
	check(t, e.ready(ctx))
	check(t, f.settle(ctx))
	t.Logf("back in service after %s", time.Since(began))
	a := f.ask(ctx, chat(chatModel, 8, true, "welcome back"))
	check(t, a.whole(true))
}
