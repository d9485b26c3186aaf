package check

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/cmd/hearth/up/fabric"
	"github.com/hearth-dev/hearth/router/pool"
)

// prefixRouting compares the router with a second one that takes turns, each
// with empty engine caches and the same conversations.
func (s *scenario) prefixRouting(ctx context.Context, figures map[string]any) error {
	ours, hits, err := s.measure(ctx, s.client)
	if err != nil {
		return err
	}
	turns, err := s.f.AddRouter(ctx, "router-in-turn", pool.PolicyRoundRobin)
	if err != nil {
		return err
	}
	defer turns.Stop()
	if err := s.f.AwaitEndpoints(ctx, turns); err != nil {
		return err
	}
	other := newClient(turns.URL)
	defer other.close()
	theirs, theirHits, err := s.measure(ctx, other)
	if err != nil {
		return err
	}
	figures["idealHitTokens"], figures["hitTokens"], figures["roundRobinHitTokens"] = ours.idealHits, hits, theirHits
	figures["promptTokens"] = ours.prompt
	figures["hitsOfIdeal"] = round(hits / float64(ours.idealHits))
	figures["hitsOfRoundRobin"] = round(hits / max(theirHits, 1))
	figures["laterTTFTms"], figures["roundRobinLaterTTFTms"] = round(ours.laterTTFTMS), round(theirs.laterTTFTMS)
	figures["laterTTFTOfRoundRobin"] = round(ours.laterTTFTMS / theirs.laterTTFTMS)
	switch {
	case ours.idealHits != theirs.idealHits:
		return fmt.Errorf("the two runs were not the same: ideals of %d and %d tokens", ours.idealHits, theirs.idealHits)
	case hits < 0.95*float64(ours.idealHits):
		return fmt.Errorf("engines counted %.0f cached tokens, want at least 0.95 of the ideal %d", hits, ours.idealHits)
	case hits < 2*theirHits:
		return fmt.Errorf("engines counted %.0f cached tokens, want at least twice round robin's %.0f", hits, theirHits)
	case ours.laterTTFTMS > 0.6*theirs.laterTTFTMS:
		return fmt.Errorf("later turns wait %.1f ms for their first token, want at most 0.6 of round robin's %.1f", ours.laterTTFTMS, theirs.laterTTFTMS)
	}
	return nil
}

// measure sends the conversations to one router, with empty caches before.
func (s *scenario) measure(ctx context.Context, c *client) (converseResult, float64, error) {
	var result converseResult
	for _, e := range s.f.Engines {
		if err := e.ResetCache(ctx); err != nil {
			return result, 0, err
		}
	}
	before, err := s.sum(ctx)
	if err != nil {
		return result, 0, err
	}
	if result, err = converse(ctx, c, served, blockTokens); err != nil {
		return result, 0, err
	}
	after, err := s.sum(ctx)
	return result, after.PrefixHits - before.PrefixHits, err
}

// answerFor is the length in tokens of an answer that lasts about d.
func answerFor(d time.Duration) int {
	return int(d / (decodeMS * time.Millisecond / speedup))
}

// xid makes the device of a busy engine report XID 79. New requests must stop
// going there, although their prefix is warm there; the stream in flight must
// finish.
func (s *scenario) xid(ctx context.Context, figures map[string]any) error {
	const limit = 10 * time.Second
	conversation := []message{{"system", strings.Join(dialogues()[0], "")}, {"user", "Tell me a long story."}}
	first := make(chan struct{})
	var begun sync.Once
	var tokens atomic.Int64
	type ended struct {
		answer *chatAnswer
		err    error
	}
	finished := make(chan ended, 1)
	length := answerFor(8 * time.Second)
	go func() {
		a, err := s.client.chat(ctx, chatRequest{
			Model: served, Messages: conversation, MaxTokens: length, Stream: true, IgnoreEOS: true,
		}, func(a *chatAnswer) {
			if a.Text != "" {
				begun.Do(func() { close(first) })
			}
			tokens.Add(1)
		})
		finished <- ended{a, err}
	}()
	select {
	case <-first:
	case end := <-finished:
		return fmt.Errorf("start the stream: %w", errors.Join(end.err, errors.New("it ended at once")))
	}
	sick, err := s.busy(ctx)
	if err != nil {
		return err
	}
	// Each probe continues the conversation that is warm on this engine.
	probe := func() (bool, error) { return s.probe(ctx, sick, conversation) }
	attracted := 0
	for range 3 {
		landed, err := probe()
		if err != nil {
			return err
		}
		if landed {
			attracted++
		}
	}
	if attracted == 0 {
		return fmt.Errorf("no request went to %s although its prefix is warm there: the step would show nothing", sick.Name)
	}
	if len(finished) > 0 {
		return fmt.Errorf("the stream was over before %s was injected XID 79: the step would show nothing of streams in flight", sick.Device)
	}
	if err := s.f.NodeOf(sick).InjectXID(ctx, sick.Device, 79); err != nil {
		return err
	}
	injected := time.Now()
	atInject := tokens.Load()
	var last time.Duration
	landed, elsewhere := 0, 0
	for elsewhere < 10 {
		sent := time.Since(injected)
		if sent > limit {
			return fmt.Errorf("requests still go to %s %v after its device was injected XID 79", sick.Name, limit)
		}
		there, err := probe()
		if err != nil {
			return err
		}
		if there {
			landed, elsewhere, last = landed+1, 0, sent
		} else {
			elsewhere++
		}
	}
	afterProbes := tokens.Load()
	end := <-finished
	if end.err != nil {
		return fmt.Errorf("finish the stream that was in flight: %w", end.err)
	}
	figures["requestsBeforeInjection"] = attracted
	figures["requestsAfterInjection"], figures["secondsUntilStopped"] = landed, round(last.Seconds())
	figures["streamTokensAtInjection"], figures["streamTokensAfterProbes"], figures["streamTokens"] = atInject, afterProbes, end.answer.Tokens
	figures["must"] = "secondsUntilStopped <= 1"
	if !end.answer.Done || end.answer.Tokens != length || end.answer.Finish != "length" {
		return fmt.Errorf("the stream in flight ended with %d of %d tokens, finish %q", end.answer.Tokens, length, end.answer.Finish)
	}
	if err := s.f.NodeOf(sick).ClearDevice(ctx, sick.Device); err != nil {
		return err
	}
	return s.awaitAll(ctx)
}

// probe sends a short request that shares its prefix with a conversation, and
// reports whether it went to the engine.
func (s *scenario) probe(ctx context.Context, e *fabric.Engine, conversation []message) (bool, error) {
	before, err := e.Counters(ctx)
	if err != nil {
		return false, err
	}
	if _, err := s.client.chat(ctx, chatRequest{
		Model: served, Messages: append(slices.Clip(conversation), message{"user", "And briefly?"}), MaxTokens: 1,
	}, nil); err != nil {
		return false, fmt.Errorf("send probe: %w", err)
	}
	after, err := e.Counters(ctx)
	return after.PrefixQueries > before.PrefixQueries, err
}

// busy finds the engine that runs a request.
func (s *scenario) busy(ctx context.Context) (*fabric.Engine, error) {
	for _, e := range s.f.Engines {
		if e.PID() == 0 {
			continue
		}
		c, err := e.Counters(ctx)
		if err != nil {
			return nil, err
		}
		if c.Running > 0 {
			return e, nil
		}
	}
	return nil, errors.New("no engine is busy")
}

// engineKilled kills an engine under load. Requests that had not begun to
// answer are sent elsewhere; none of them may be lost.
func (s *scenario) engineKilled(ctx context.Context, figures map[string]any) error {
	const requests, budget = 12, 3
	type ended struct {
		answer *chatAnswer
		err    error
		stream bool
	}
	length := answerFor(4 * time.Second)
	results := make(chan ended, requests)
	for i := range requests {
		go func() {
			stream := i%4 == 3 // a stream begins to answer once it runs
			a, err := s.client.chat(ctx, chatRequest{
				Model: served, Messages: []message{{"user", fmt.Sprintf("Request %d of the storm.", i)}},
				MaxTokens: length, IgnoreEOS: true, Stream: stream,
			}, nil)
			results <- ended{a, err, stream}
		}()
	}
	err := poll(ctx, readyLimit, "all requests at the engines", func(ctx context.Context) (bool, error) {
		c, err := s.sum(ctx)
		return c.Running+c.Waiting == requests, err
	})
	if err != nil {
		return err
	}
	victim, held, err := s.victim(ctx, budget)
	if err != nil {
		return err
	}
	victim.Kill()
	lost, broken, begun := 0, 0, 0
	var why error
	for range requests {
		end := <-results
		whole := end.err == nil && end.answer.Done && end.answer.Tokens == length
		switch {
		case whole:
		case end.answer.Begun:
			begun++ // it had begun to answer; it must not look finished
			if end.err == nil {
				broken++
			}
		default:
			lost++
			why = errors.Join(why, end.err)
		}
	}
	figures["requests"], figures["atKilledEngine"], figures["retryBudget"] = requests, held.Running+held.Waiting, budget
	figures["waitingAtKilledEngine"], figures["lost"], figures["brokenAfterBegun"] = held.Waiting, lost, begun
	figures["sentElsewhere"] = held.Running + held.Waiting - begun - lost
	if lost > 0 {
		return fmt.Errorf("%d requests that had not begun to answer were lost: %w", lost, why)
	}
	if broken > 0 {
		return fmt.Errorf("%d streams of the killed engine ended as if they were whole", broken)
	}
	if held.Running+held.Waiting <= begun {
		return fmt.Errorf("all %d requests of the killed engine had begun to answer: the step would show nothing of those sent elsewhere", begun)
	}
	if err := s.f.StartEngine(ctx, victim); err != nil {
		return err
	}
	return s.awaitAll(ctx)
}

// victim picks an engine that holds requests, but no more than the budget.
func (s *scenario) victim(ctx context.Context, budget int) (*fabric.Engine, fabric.Counters, error) {
	var best *fabric.Engine
	var held fabric.Counters
	for _, e := range s.f.Engines {
		c, err := e.Counters(ctx)
		if err != nil {
			return nil, held, err
		}
		if n := c.Running + c.Waiting; n > 0 && n <= budget && (best == nil || n > held.Running+held.Waiting) {
			best, held = e, c
		}
	}
	if best == nil {
		return nil, held, fmt.Errorf("no engine holds from 1 to %d requests", budget)
	}
	return best, held, nil
}
