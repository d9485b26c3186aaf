package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Errors of admission.
var (
	errQueueFull = errors.New("engine queue is full")
	errTooLong   = errors.New("request is longer than the KV cache")
)

// sequence is one prompt on its way through the engine.
type sequence struct {
	text      []byte // rendered prompt, then what was generated
	prompt    int    // bytes of the prompt
	maxTokens int

	need    int      // blocks reserved
	held    []uint64 // blocks referenced in the cache
	cached  int      // prompt tokens found in the cache
	ran     bool
	granted chan struct{} // closed when the sequence joins the batch
}

func (s *sequence) promptTokens() int { return Tokens(s.prompt) }

// prefillTime is the simulated time to compute what was not cached.
func (e *Engine) prefillTime(s *sequence) time.Duration {
	return time.Duration(float64(s.promptTokens()-s.cached) / e.opts.PrefillRate * float64(time.Second))
}

// admit waits for a place in the running batch and for room in the cache, in
// order of arrival. After a nil error the caller owes finish.
func (e *Engine) admit(ctx context.Context, s *sequence) error {
	capacity := e.opts.KVTokens / e.opts.BlockTokens
	s.need = (Tokens(s.prompt) + s.maxTokens + e.opts.BlockTokens - 1) / e.opts.BlockTokens
	if s.need > capacity {
		return fmt.Errorf("%w: %d prompt tokens and %d to generate, of %d",
			errTooLong, s.promptTokens(), s.maxTokens, e.opts.KVTokens)
	}
	s.granted = make(chan struct{})
	e.mu.Lock()
	if len(e.mu.waiting) >= e.opts.MaxWaiting && !(e.mu.running < e.opts.MaxRunning && len(e.mu.waiting) == 0) {
		e.mu.count.rejected++
		e.mu.Unlock()
		return errQueueFull
	}
	e.mu.waiting = append(e.mu.waiting, s)
	e.grantLocked()
	e.mu.Unlock()
	select {
	case <-s.granted:
		return nil
	case <-ctx.Done():
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.ran { // granted in the same moment
		e.finishLocked(s, "abort")
	} else {
		e.mu.waiting = slices.DeleteFunc(e.mu.waiting, func(o *sequence) bool { return o == s })
		e.grantLocked()
	}
	return ctx.Err()
}

// grantLocked moves waiting sequences into the batch while they fit.
func (e *Engine) grantLocked() {
	capacity := e.opts.KVTokens / e.opts.BlockTokens
	for len(e.mu.waiting) > 0 && e.mu.running < e.opts.MaxRunning {
		s := e.mu.waiting[0]
		if e.mu.reserved+s.need > capacity {
			return
		}
		e.mu.waiting = slices.Delete(e.mu.waiting, 0, 1)
		hashes := Blocks(s.text[:s.prompt], e.opts.BlockTokens)
		// The last token is always computed: its logits give the first new one.
		limit := (s.promptTokens() - 1) / e.opts.BlockTokens
		n := e.mu.cache.match(hashes, limit)
		s.held, s.cached, s.ran = hashes[:n:n], n*e.opts.BlockTokens, true
		e.mu.running++
		e.mu.reserved += s.need
		e.mu.cache.shrink(capacity - e.mu.reserved)
		e.mu.count.queries += uint64(s.promptTokens())
		e.mu.count.hits += uint64(s.cached)
		close(s.granted)
	}
}

// compute runs the prefill of an admitted sequence and puts its prompt blocks
// into the cache.
func (e *Engine) compute(ctx context.Context, s *sequence) error {
	select {
	case e.prefill <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	d := e.prefillTime(s)
	err := e.pause(ctx, d)
	<-e.prefill
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mu.count.prompt += uint64(s.promptTokens())
	e.mu.count.cached += uint64(s.cached)
	e.mu.count.prefillSeconds += d.Seconds()
	e.keepLocked(s)
	return nil
}

// step waits one decode step and appends its token.
func (e *Engine) step(ctx context.Context, s *sequence, token string) error {
	e.mu.Lock()
	others := e.mu.running - 1
	e.mu.Unlock()
	if err := e.pause(ctx, e.opts.DecodeStep+time.Duration(others)*e.opts.DecodeSlope); err != nil {
		return err
	}
	s.text = append(s.text, token...)
	e.mu.Lock()
	e.mu.count.generated++
	e.mu.Unlock()
	return nil
}

// keepLocked caches the full blocks computed so far.
func (e *Engine) keepLocked(s *sequence) {
	hashes := Blocks(s.text, e.opts.BlockTokens)
	e.mu.cache.insert(hashes, len(s.held))
	s.held = hashes
}

// finish takes an admitted sequence out of the batch, keeping its blocks as
// evictable cache.
func (e *Engine) finish(s *sequence, reason string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(s.text) > s.prompt {
		e.keepLocked(s)
	}
	e.finishLocked(s, reason)
}

func (e *Engine) finishLocked(s *sequence, reason string) {
	e.mu.cache.release(s.held)
	e.mu.running--
	e.mu.reserved -= s.need
	e.mu.count.finished[reason]++
	e.mu.cache.shrink(e.opts.KVTokens/e.opts.BlockTokens - e.mu.reserved)
	e.grantLocked()
}
