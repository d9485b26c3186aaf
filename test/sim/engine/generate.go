package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
)

// generation is one request being answered: its prompts in order and what
// every one of them produced.
type generation struct {
	engine  *Engine
	id      string
	created int64
	fault   Fault
	opts    sampling
	max     int
	usage   usage
	timings timings
	task    *task
}

// begin checks the sampling options and gives the request an id.
func (e *Engine) begin(r *http.Request, prefix string, s sampling) (*generation, error) {
	n, err := s.maxTokens()
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mu.serial++
	id := r.Header.Get("X-Request-Id")
	if id == "" {
		id = fmt.Sprintf("%016x%08x", e.started.UnixNano(), e.mu.serial)
	}
	g := &generation{
		engine: e, id: prefix + id, created: e.opts.Now().Unix(), opts: s, max: n, fault: e.takeFaultLocked(), task: taskOf(r.Context()),
	}
	if g.task != nil {
		g.task.Fault = g.fault.Mode
	}
	return g, nil
}

func (g *generation) seed() uint64 {
	if g.opts.Seed == nil {
		return g.engine.opts.Seed
	}
	return g.engine.opts.Seed ^ (*g.opts.Seed + 0x9e3779b97f4a7c15)
}

// run takes one prompt through the engine. admitted is called once it is in
// the batch, before its prefill; token for every token, with the number
// generated so far. It returns the finish reason.
func (g *generation) run(ctx context.Context, text []byte, admitted func(*sequence) error, token func(string, *sequence, int) error) (*sequence, string, error) {
	e := g.engine
	s := &sequence{text: slices.Clip(text), prompt: len(text), maxTokens: g.max}
	if len(text) == 0 {
		return nil, "", badRequest("prompt", "the prompt is empty")
	}
	if err := e.admit(ctx, s); err != nil {
		return nil, "", err
	}
	reason := "abort"
	defer func() { e.finish(s, reason) }()
	g.task.admitted(s)
	if err := admitted(s); err != nil {
		return nil, "", err
	}
	if err := e.compute(ctx, s); err != nil {
		return nil, "", err
	}
	a := newAnswer(text, g.seed())
	n, end := g.max, "length"
	if !g.opts.IgnoreEOS && a.length <= g.max {
		n, end = a.length, "stop"
	}
	for i := range n {
		if err := g.beforeToken(ctx, i); err != nil {
			return nil, "", err
		}
		t := a.token()
		if err := e.step(ctx, s, t); err != nil {
			return nil, "", err
		}
		g.task.generated()
		if err := token(t, s, i+1); err != nil {
			return nil, "", err
		}
	}
	reason = end
	g.usage.add(s, n)
	g.timings.add(e, s)
	return s, end, nil
}

// stream writes server-sent events, each flushed as it is made.
type stream struct {
	w     http.ResponseWriter
	begun bool
}

func (s *stream) begin() {
	if s.begun {
		return
	}
	s.begun = true
	h := s.w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Cache-Control", "no-cache")
	s.w.WriteHeader(http.StatusOK)
}

// send writes one event; name is empty except where the API names its events.
func (s *stream) send(name string, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode event: %w", err)
	}
	if name != "" {
		name = "event: " + name + "\n"
	}
	return s.raw(name + "data: " + string(body) + "\n\n")
}

func (s *stream) raw(text string) error {
	s.begin()
	if _, err := s.w.Write([]byte(text)); err != nil {
		return fmt.Errorf("write event: %w", err)
	}
	if err := http.NewResponseController(s.w).Flush(); err != nil {
		return fmt.Errorf("flush event: %w", err)
	}
	return nil
}

// fail ends a stream that cannot go on: an error answer before the first byte,
// a broken connection after it, or what its fault asks for.
func (s *stream) fail(err error) {
	switch {
	case errors.Is(err, errRST):
		reset(s.w)
		return
	case errors.Is(err, errEnd) && s.begun:
		return
	case errors.Is(err, errEnd):
		half(s.w)
		return
	case s.begun:
		abort()
	}
	refuse(s.w, err)
}

// chunk sends one chat or completion chunk. final chunks carry the timings.
func (g *generation) chunk(s *stream, object string, choices []any, u *usage, final bool) error {
	if g.fault.Mode == FaultGarbage {
		return s.raw("data: {\"id\": \x00\xff not json\n\n")
	}
	c := map[string]any{
		"id": g.id, "object": object, "created": g.created, "model": g.opts.Model, "choices": choices,
	}
	if u != nil {
		c["usage"] = u
	}
	if final {
		c["timings"] = g.timings
	}
	return s.send("", c)
}

// running gives the usage so far where the request asked for it in every chunk.
func (g *generation) running(s *sequence, generated int) *usage {
	o := g.opts.StreamOptions
	if o == nil || !o.ContinuousUsageStats {
		return nil
	}
	u := g.usage
	u.Details = map[string]int{"cached_tokens": g.usage.Details["cached_tokens"]}
	u.add(s, generated)
	return &u
}

// close sends the usage chunk, if asked for, and the terminator.
func (g *generation) close(s *stream, object string) error {
	g.task.whole(g.usage)
	if o := g.opts.StreamOptions; o != nil && o.IncludeUsage {
		if err := g.chunk(s, object, []any{}, &g.usage, true); err != nil {
			return err
		}
	}
	return s.raw("data: [DONE]\n\n")
}

// HeaderPrefill carries the simulated prefill time of an answer in
// milliseconds, before Speedup.
const HeaderPrefill = "X-Sim-Prefill-Ms"

func (g *generation) noteHeader(w http.ResponseWriter, s *sequence) {
	ms := g.engine.prefillTime(s).Seconds() * 1000
	w.Header().Set(HeaderPrefill, strconv.FormatFloat(ms, 'f', 3, 64))
}
