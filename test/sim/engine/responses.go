package engine

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// responseStore remembers the latest responses of /v1/responses.
type responseStore struct {
	byID  map[string]storedResponse
	order []string
	limit int
}

type storedResponse struct {
	history []Message // the conversation up to and with the answer
	object  map[string]any
}

func newResponseStore(limit int) responseStore {
	return responseStore{byID: map[string]storedResponse{}, limit: limit}
}

func (s *responseStore) add(id string, r storedResponse) {
	if len(s.order) == s.limit {
		delete(s.byID, s.order[0])
		s.order = s.order[1:]
	}
	s.byID[id] = r
	s.order = append(s.order, id)
}

func (e *Engine) stored(id string) (storedResponse, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	r, ok := e.mu.stored.byID[id]
	if !ok {
		return r, &apiError{http.StatusNotFound, "NotFoundError", "response_id", fmt.Sprintf("Response with id '%s' not found.", id)}
	}
	return r, nil
}

func (e *Engine) handleGetResponse(w http.ResponseWriter, r *http.Request) {
	s, err := e.stored(r.PathValue("id"))
	if err != nil {
		refuse(w, err)
		return
	}
	writeJSON(w, http.StatusOK, s.object)
}

type responsesRequest struct {
	sampling
	Input        json.RawMessage `json:"input"`
	Instructions string          `json:"instructions"`
	Tools        json.RawMessage `json:"tools"`
	Previous     string          `json:"previous_response_id"`
	Store        *bool           `json:"store"`
}

// conversation gives the messages of a request, after those of the response
// it continues.
func (e *Engine) conversation(req *responsesRequest) ([]Message, error) {
	var history []Message
	if req.Previous != "" {
		s, err := e.stored(req.Previous)
		if err != nil {
			return nil, err
		}
		history = append(history, s.history...)
	} else if req.Instructions != "" {
		history = append(history, Message{Role: "system", Content: quote(req.Instructions)})
	}
	var text string
	if json.Unmarshal(req.Input, &text) == nil && text != "" {
		return append(history, Message{Role: "user", Content: quote(text)}), nil
	}
	var items []Message
	if err := json.Unmarshal(req.Input, &items); err != nil || len(items) == 0 {
		return nil, badRequest("input", "read input: want a string or a list of messages")
	}
	return append(history, items...), nil
}

func quote(s string) json.RawMessage {
	b, err := json.Marshal(s)
	if err != nil { // a string always encodes
		return json.RawMessage(`""`)
	}
	return b
}

func (e *Engine) handleResponses(w http.ResponseWriter, r *http.Request) {
	var req responsesRequest
	if err := e.decode(w, r, &req, &req.Model); err != nil {
		refuse(w, err)
		return
	}
	messages, err := e.conversation(&req)
	if err != nil {
		refuse(w, err)
		return
	}
	text, err := Render(messages, req.Tools)
	if err != nil {
		refuse(w, badRequest("input", "%v", err))
		return
	}
	g, err := e.begin(r, "resp_", req.sampling)
	if err != nil || g.refusal(w) {
		refuseIf(w, err)
		return
	}
	a := &responseAnswer{g: g, out: &stream{w: w}, streaming: req.Stream, previous: req.Previous}
	_, finish, err := g.run(r.Context(), req.salt(text), func(s *sequence) error {
		g.noteHeader(w, s)
		return a.open()
	}, a.token)
	if err != nil {
		a.out.fail(err)
		return
	}
	status := "completed"
	if finish == "length" {
		status = "incomplete"
	}
	object := a.object(status)
	if req.Store == nil || *req.Store {
		e.mu.Lock()
		e.mu.stored.add(g.id, storedResponse{
			history: append(messages, Message{Role: "assistant", Content: quote(a.whole.String())}), object: object,
		})
		e.mu.Unlock()
	}
	g.task.whole(g.usage)
	if req.Stream {
		_ = a.close(status, object) // the client is gone: nothing to tell it
		return
	}
	writeJSON(w, http.StatusOK, object)
}

// responseAnswer builds a response object and its stream of named events.
type responseAnswer struct {
	g         *generation
	out       *stream
	streaming bool
	previous  string
	whole     strings.Builder
	sequence  int
}

func (a *responseAnswer) itemID() string { return "msg_" + strings.TrimPrefix(a.g.id, "resp_") }

func (a *responseAnswer) part() map[string]any {
	return map[string]any{"type": "output_text", "text": a.whole.String(), "annotations": []any{}}
}

func (a *responseAnswer) item(status string) map[string]any {
	content := []any{}
	if status != "in_progress" {
		content = append(content, a.part())
	}
	return map[string]any{"id": a.itemID(), "type": "message", "role": "assistant", "status": status, "content": content}
}

func (a *responseAnswer) object(status string) map[string]any {
	o := map[string]any{
		"id": a.g.id, "object": "response", "created_at": a.g.created, "model": a.g.opts.Model,
		"status": status, "output": []any{}, "usage": nil, "error": nil, "incomplete_details": nil,
		"instructions": nil, "metadata": map[string]any{}, "parallel_tool_calls": true, "temperature": 1.0,
		"top_p": 1.0, "tool_choice": "auto", "tools": []any{}, "previous_response_id": nil,
	}
	if a.previous != "" {
		o["previous_response_id"] = a.previous
	}
	if status == "in_progress" {
		return o
	}
	if status == "incomplete" {
		o["incomplete_details"] = map[string]any{"reason": "max_output_tokens"}
	}
	u := a.g.usage
	o["output"] = []any{a.item(status)}
	o["usage"] = map[string]any{
		"input_tokens": u.Prompt, "output_tokens": u.Completion, "total_tokens": u.Total,
		"input_tokens_details":  map[string]int{"cached_tokens": u.Details["cached_tokens"]},
		"output_tokens_details": map[string]int{"reasoning_tokens": 0},
	}
	o["timings"] = a.g.timings
	return o
}

func (a *responseAnswer) event(kind string, fields map[string]any) error {
	if !a.streaming {
		return nil
	}
	if a.g.fault.Mode == FaultGarbage {
		return a.out.raw("data: {\"id\": \x00\xff not json\n\n")
	}
	fields["type"] = kind
	fields["sequence_number"] = a.sequence
	a.sequence++
	return a.out.send(kind, fields)
}

func (a *responseAnswer) events(list ...func() error) error {
	for _, f := range list {
		if err := f(); err != nil {
			return err
		}
	}
	return nil
}

func (a *responseAnswer) open() error {
	return a.events(
		func() error {
			return a.event("response.created", map[string]any{"response": a.object("in_progress")})
		},
		func() error {
			return a.event("response.in_progress", map[string]any{"response": a.object("in_progress")})
		},
		func() error {
			return a.event("response.output_item.added", map[string]any{"output_index": 0, "item": a.item("in_progress")})
		},
		func() error {
			return a.event("response.content_part.added", map[string]any{"output_index": 0, "content_index": 0, "item_id": a.itemID(), "part": a.part()})
		},
	)
}

func (a *responseAnswer) token(t string, _ *sequence, _ int) error {
	a.whole.WriteString(t)
	return a.event("response.output_text.delta", map[string]any{
		"output_index": 0, "content_index": 0, "item_id": a.itemID(), "delta": t, "logprobs": []any{},
	})
}

func (a *responseAnswer) close(status string, object map[string]any) error {
	return a.events(
		func() error {
			return a.event("response.output_text.done", map[string]any{
				"output_index": 0, "content_index": 0, "item_id": a.itemID(), "text": a.whole.String(), "logprobs": []any{},
			})
		},
		func() error {
			return a.event("response.content_part.done", map[string]any{"output_index": 0, "content_index": 0, "item_id": a.itemID(), "part": a.part()})
		},
		func() error {
			return a.event("response.output_item.done", map[string]any{"output_index": 0, "item": a.item(status)})
		},
		func() error { return a.event("response."+status, map[string]any{"response": object}) },
	)
}
