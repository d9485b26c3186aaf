package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/hearth-dev/hearth/router/admin"
	"github.com/hearth-dev/hearth/router/pool"
	"github.com/hearth-dev/hearth/test/outside/rig"
)

// talk is one conversation. The two begin differently, so that neither finds
// anything of the other in a cache.
type talk struct {
	name     string
	next     []string // what the user says, turn by turn
	messages []message
	turns    []*answer
	engines  []string // endpoint id of each turn, by the usage record
}

func talks() []*talk {
	return []*talk{
		{
			name: "geography", next: []string{
				"What is the capital of France? Answer in one sentence.",
				"And what is the capital of Italy?",
			},
			messages: []message{{"system", "You are a patient geography teacher at a small school by the sea. Your pupils are " +
				"ten years old and ask about countries, capitals, rivers and mountains. You answer each question in one short, " +
				"complete sentence, you never invent names of places, and you say so when you do not know. You use plain words " +
				"and the names of places as they stand on an English map. You do not repeat the question, and you do not add " +
				"lists, headings, jokes or advice that nobody asked for."}},
		},
		{
			name: "kitchen", next: []string{
				"Name one thing I need to bake bread. Answer in one sentence.",
				"Why is it needed?",
			},
			messages: []message{{"system", "You help people who bake at home for the first time. They stand in their kitchen " +
				"with flour on their hands and little time to read, so every answer is one short sentence that says what to " +
				"do or what a thing is for. You know about bread, cakes, ovens, yeast and flour, and you speak of nothing " +
				"else. You give amounts in grams and temperatures in degrees Celsius, and only where someone asks for them. " +
				"You stay friendly, calm and brief."}},
		},
	}
}

// startRouter starts the router over both engines and waits until it has heard
// of the load of each.
func (d *demo) startRouter(ctx context.Context) (map[string]any, error) {
	var err error
	d.router, err = d.rig.StartRouter(ctx, rig.RouterOptions{
		Nodes: []*rig.Node{d.node},
		Models: []pool.ModelConfig{{Name: "smollm2", Targets: []pool.TargetConfig{
			{Pool: "llama", ServedModel: rig.LlamaAlias, Weight: 1, Ref: "hub://" + rig.GGUFRepo},
		}}},
	})
	if err != nil {
		return nil, err
	}
	client, err := admin.NewClient(d.router.Admin)
	if err != nil {
		return nil, err
	}
	d.rig.OnClose(client.Close)
	d.admin = client
	err = rig.Until(ctx, "the router to see both engines", func(ctx context.Context) (bool, error) {
		models, err := client.Models(ctx)
		if err != nil || len(models) != 1 || len(models[0].Targets) != 1 {
			return false, err
		}
		target := models[0].Targets[0]
		if !target.Ready || target.Endpoints != 2 {
			return false, fmt.Errorf("the target is %+v", target)
		}
		list, err := client.Endpoints(ctx)
		if err != nil {
			return false, err
		}
		for _, e := range list {
			if !e.Reachable || e.LoadAgeSeconds < 0 {
				return false, fmt.Errorf("no load of %s yet: %+v", e.ID, e)
			}
		}
		return len(list) == 2, nil
	}, d.router.Process, d.node.Process)
	if err != nil {
		return nil, err
	}
	say("the router answers at %s", d.router.URL)
	return map[string]any{"endpoints": 2}, nil
}

// firstTurns begins both conversations at once, so that load spreads them.
func (d *demo) firstTurns(ctx context.Context) (map[string]any, error) {
	d.talks = talks()
	g, together := errgroup.WithContext(ctx)
	for _, t := range d.talks {
		g.Go(func() error { return d.turn(together, t) })
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	engines := map[string]bool{}
	for _, t := range d.talks {
		if err := d.attribute(ctx, t); err != nil {
			return nil, err
		}
		engines[t.engines[0]] = true
	}
	figures := d.figures(0)
	figures["engines"] = len(engines)
	return figures, nil
}

// secondTurns goes on with each: the turn belongs to the engine that holds the
// conversation, which must find it in its cache.
func (d *demo) secondTurns(ctx context.Context) (map[string]any, error) {
	for _, t := range d.talks {
		if err := d.turn(ctx, t); err != nil {
			return nil, err
		}
		if err := d.attribute(ctx, t); err != nil {
			return nil, err
		}
	}
	figures := d.figures(1)
	var wrong []error
	for _, t := range d.talks {
		if t.engines[1] != t.engines[0] {
			wrong = append(wrong, fmt.Errorf("the second turn of %s went to %s, the first to %s", t.name, t.engines[1], t.engines[0]))
		}
		if t.turns[1].cached == 0 {
			wrong = append(wrong, fmt.Errorf("the second turn of %s found nothing in the engine's cache", t.name))
		}
	}
	return figures, errors.Join(wrong...)
}

// turn says the next thing of a conversation and prints it with its answer.
func (d *demo) turn(ctx context.Context, t *talk) error {
	said := t.next[0]
	t.next = t.next[1:]
	t.messages = append(t.messages, message{"user", said})
	a, err := ask(ctx, d.router.URL, t.id(len(t.turns)), "smollm2", t.messages, 48, io.Discard)
	if err != nil {
		return fmt.Errorf("turn %d of %s: %w", len(t.turns)+1, t.name, err)
	}
	if len(strings.Fields(a.text)) < 2 {
		return fmt.Errorf("turn %d of %s: the engine said %q: want a sentence", len(t.turns)+1, t.name, a.text)
	}
	t.messages = append(t.messages, message{"assistant", a.text})
	t.turns = append(t.turns, a)
	printing.Lock()
	defer printing.Unlock()
	say("\n[%s] user:    %s", t.name, said)
	say("[%s] smollm2: %s", t.name, strings.TrimSpace(a.text))
	say("[%s]          %d prompt tokens, %d of them cached; first token after %d ms", t.name, a.prompt, a.cached, a.firstContent.Milliseconds())
	return nil
}

// printing keeps turns that end together apart.
var printing sync.Mutex

func (t *talk) id(turn int) string { return fmt.Sprintf("demo-%s-%d", t.name, turn+1) }

// attribute reads from the router's usage records which engine answered the
// last turn.
func (d *demo) attribute(ctx context.Context, t *talk) error {
	id := t.id(len(t.turns) - 1)
	return rig.Until(ctx, "the usage record of "+id, func(context.Context) (bool, error) {
		text, err := os.ReadFile(d.router.Usage)
		if err != nil {
			return false, err
		}
		for line := range strings.Lines(string(text)) {
			var record struct {
				RequestID        string `json:"requestId"`
				Endpoint         string `json:"endpoint"`
				CompletionTokens int    `json:"completionTokens"`
				Estimated        bool   `json:"estimated"`
			}
			if json.Unmarshal([]byte(line), &record) != nil || record.RequestID != id {
				continue
			}
			last := t.turns[len(t.turns)-1]
			if record.Estimated || record.CompletionTokens != last.completion {
				return false, fmt.Errorf("record has %d completion tokens (estimated: %t), the engine reported %d",
					record.CompletionTokens, record.Estimated, last.completion)
			}
			t.engines = append(t.engines, record.Endpoint)
			return true, nil
		}
		return false, nil
	}, d.router.Process)
}

// figures are those of one turn of all conversations.
func (d *demo) figures(turn int) map[string]any {
	figures := map[string]any{}
	for _, t := range d.talks {
		a := t.turns[turn]
		figures[t.name] = map[string]any{
			"text": strings.TrimSpace(a.text), "engine": t.engines[turn],
			"promptTokens": a.prompt, "cachedTokens": a.cached, "completionTokens": a.completion,
			"ttftSeconds": round(a.firstContent.Seconds()), "firstChunkSeconds": round(a.firstChunk.Seconds()),
		}
	}
	return figures
}
