//go:build vllm

package vllm

import (
	"fmt"
	"strings"
	"sync"
	"testing"
)

// all sends requests at once and waits for every answer.
func all(list []request, ask func(request) answer) []answer {
	answers := make([]answer, len(list))
	var wait sync.WaitGroup
	for i, q := range list {
		wait.Go(func() { answers[i] = ask(q) })
	}
	wait.Wait()
	return answers
}

func TestStreamsAndRecordsAgreeWithTheEnginesCounters(t *testing.T) {
	f, ctx := use(t)
	before, err := f.snapshot(ctx)
	check(t, err)
	var list []request
	for i := range 24 {
		text := fmt.Sprintf("request %d: %s", i, strings.Repeat("which block moves next? ", 1+i%4))
		q := chat(chatModel, 8+i, i%2 == 0, text)
		switch {
		case i%6 == 5:
			q = request{path: "/v1/completions", body: map[string]any{
				"model": chatModel, "prompt": text, "max_tokens": 8 + i, "ignore_eos": true, "stream": false,
			}}
		case i%4 == 0:
			q = q.withUsage()
		}
		list = append(list, q)
	}
	answers := all(list, func(q request) answer { return f.ask(ctx, q) })
	var ids []string
	for i, a := range answers {
		check(t, a.whole(list[i].body["stream"].(bool)))
		ids = append(ids, a.id)
		asked := list[i].body["stream"] == false || list[i].body["stream_options"] != nil
		if asked != (a.usage != nil) {
			t.Errorf("request %d: usage asked for is %t, got %+v", i, asked, a.usage)
		}
	}
	check(t, f.settle(ctx))
	after, err := f.snapshot(ctx)
	check(t, err)
	records, err := f.records(ctx, ids...)
	check(t, err)
	sums := map[string]*[3]int{}
	for i, id := range ids {
		r := records[id]
		if r.Outcome != "ok" || r.Estimated || r.Completion != 8+i || r.Served != base {
			t.Errorf("request %d of %d tokens is recorded as %+v", i, 8+i, r)
		}
		if u := answers[i].usage; u != nil && (u.Prompt != r.Prompt || u.Completion != r.Completion || u.Details.Cached != r.Cached) {
			t.Errorf("request %d is recorded as %+v, its client was told %+v", i, r, *u)
		}
		e := f.byID(r.Endpoint)
		if e == nil {
			t.Fatalf("no engine for the record %+v", r)
		}
		if sums[e.name] == nil {
			sums[e.name] = &[3]int{}
		}
		sums[e.name][0] += r.Prompt
		sums[e.name][1] += r.Completion
		sums[e.name][2] += r.Cached
	}
	for _, e := range f.engines() {
		sum := sums[e.name]
		if sum == nil {
			t.Errorf("%s got none of %d requests at once", e.name, len(list))
			continue
		}
		counted := [3]int{since(before, after, e.name, promptTotal), since(before, after, e.name, outputTotal), since(before, after, e.name, cachedTotal)}
		if *sum != counted {
			t.Errorf("%s: the records say prompt, completion, cached %v, its counters %v", e.name, *sum, counted)
		}
	}
}

func TestTheSecondTurnGoesToTheSameEngineAndFindsItsTokensCached(t *testing.T) {
	f, ctx := use(t)
	for conversation := range 4 {
		question := fmt.Sprintf("conversation %d begins: %s", conversation, strings.Repeat("the router keeps what was said. ", 12))
		first := f.ask(ctx, chat(chatModel, 40, true, question).withUsage())
		check(t, first.whole(true))
		second := f.ask(ctx, chat(chatModel, 16, true, question, first.text, "and what comes next?").withUsage())
		check(t, second.whole(true))
		records, err := f.records(ctx, first.id, second.id)
		check(t, err)
		one, two := records[first.id], records[second.id]
		if one.Endpoint != two.Endpoint {
			t.Errorf("the turns of conversation %d went to %s and %s", conversation, one.Endpoint, two.Endpoint)
		}
		// Whole blocks of the first prompt, at least, are there still.
		want := first.usage.Prompt / blockTokens * blockTokens
		if got := second.usage.Details.Cached; got < want || two.Cached != got {
			t.Errorf("conversation %d: %d of %d tokens cached, recorded as %d, want %d or more", conversation, got, second.usage.Prompt, two.Cached, want)
		}
	}
}

func TestAnAdapterIsAskedForByALogicalModelsName(t *testing.T) {
	f, ctx := use(t)
	const question = "who speaks?"
	plain := f.ask(ctx, chat(chatModel, 24, true, question))
	tuned := f.ask(ctx, chat(adaptedModel, 24, true, question).withUsage())
	check(t, plain.whole(true), tuned.whole(true))
	records, err := f.records(ctx, plain.id, tuned.id)
	check(t, err)
	if r := records[tuned.id]; r.Served != adapted || r.Model != adaptedModel || r.Completion != 24 || r.Outcome != "ok" {
		t.Errorf("recorded as %+v", r)
	}
	if plain.text == tuned.text {
		t.Errorf("with and without the adapter the answer is %q", plain.text)
	}
}
