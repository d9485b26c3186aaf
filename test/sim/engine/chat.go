package engine

import (
	"encoding/json"
	"net/http"
	"strings"
)

func (e *Engine) handleChat(w http.ResponseWriter, r *http.Request) {
	var req struct {
		sampling
		Messages []Message       `json:"messages"`
		Tools    json.RawMessage `json:"tools"`
	}
	if err := e.decode(w, r, &req, &req.Model); err != nil {
		refuse(w, err)
		return
	}
	if len(req.Messages) == 0 {
		refuse(w, badRequest("messages", "messages is empty"))
		return
	}
	text, err := Render(req.Messages, req.Tools)
	if err != nil {
		refuse(w, badRequest("messages", "%v", err))
		return
	}
	g, err := e.begin(r, "chatcmpl-", req.sampling)
	if err != nil || g.refusal(w) {
		refuseIf(w, err)
		return
	}
	const object = "chat.completion.chunk"
	choice := func(delta map[string]any, finish any) []any {
		return []any{map[string]any{"index": 0, "delta": delta, "logprobs": nil, "finish_reason": finish}}
	}
	out := &stream{w: w}
	var whole strings.Builder
	admitted := func(s *sequence) error {
		g.noteHeader(w, s)
		if !req.Stream {
			return nil
		}
		return g.chunk(out, object, choice(map[string]any{"role": "assistant", "content": ""}, nil), g.running(s, 0), false)
	}
	token := func(t string, s *sequence, n int) error {
		if !req.Stream {
			whole.WriteString(t)
			return nil
		}
		return g.chunk(out, object, choice(map[string]any{"content": t}, nil), g.running(s, n), false)
	}
	_, finish, err := g.run(r.Context(), req.salt(text), admitted, token)
	if err != nil {
		out.fail(err)
		return
	}
	if req.Stream {
		if err := g.chunk(out, object, choice(map[string]any{}, finish), nil, true); err == nil {
			_ = g.close(out, object) // the client is gone: nothing to tell it
		}
		return
	}
	g.answer(w, "chat.completion", []any{map[string]any{
		"index": 0, "message": map[string]any{"role": "assistant", "content": whole.String()},
		"logprobs": nil, "finish_reason": finish,
	}})
}

func (e *Engine) handleCompletions(w http.ResponseWriter, r *http.Request) {
	var req struct {
		sampling
		Prompt json.RawMessage `json:"prompt"`
	}
	if err := e.decode(w, r, &req, &req.Model); err != nil {
		refuse(w, err)
		return
	}
	list, err := prompts(req.Prompt)
	if err != nil {
		refuse(w, badRequest("prompt", "read prompt: %v", err))
		return
	}
	g, err := e.begin(r, "cmpl-", req.sampling)
	if err != nil || g.refusal(w) {
		refuseIf(w, err)
		return
	}
	const object = "text_completion"
	out := &stream{w: w}
	var choices []any
	for i, text := range list {
		choice := func(t string, finish any) map[string]any {
			return map[string]any{"index": i, "text": t, "logprobs": nil, "finish_reason": finish}
		}
		var whole strings.Builder
		admitted := func(s *sequence) error {
			if i == 0 {
				g.noteHeader(w, s)
			}
			return nil
		}
		token := func(t string, s *sequence, n int) error {
			if !req.Stream {
				whole.WriteString(t)
				return nil
			}
			return g.chunk(out, object, []any{choice(t, nil)}, g.running(s, n), false)
		}
		_, finish, err := g.run(r.Context(), req.salt(text), admitted, token)
		if err == nil && req.Stream {
			err = g.chunk(out, object, []any{choice("", finish)}, nil, true)
		}
		if err != nil {
			out.fail(err)
			return
		}
		choices = append(choices, choice(whole.String(), finish))
	}
	if req.Stream {
		_ = g.close(out, object) // the client is gone: nothing to tell it
		return
	}
	g.answer(w, object, choices)
}

// answer writes a whole answer.
func (g *generation) answer(w http.ResponseWriter, object string, choices []any) {
	g.task.whole(g.usage)
	if g.fault.Mode == FaultGarbage {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte("{\"id\": \x00\xff not json")) // the client is gone: nothing to tell it
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"id": g.id, "object": object, "created": g.created, "model": g.opts.Model,
		"choices": choices, "usage": g.usage, "timings": g.timings,
	})
}

func refuseIf(w http.ResponseWriter, err error) {
	if err != nil {
		refuse(w, err)
	}
}
