//go:build vllm

package vllm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync/atomic"

	"github.com/hearth-dev/hearth/test/outside/rig"
)

// usage is the usage object of an answer.
type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Details    struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// answer is what a client got.
type answer struct {
	id     string // its X-Request-Id
	status int
	text   string
	chunks int    // events with content
	usage  *usage // nil where none came
	done   bool   // the stream ended with [DONE]
	errors []string
	broken error // how the body ended, nil for cleanly
}

// record is a line of the router's usage file.
type record struct {
	RequestID  string `json:"requestId"`
	Model      string `json:"model"`
	Served     string `json:"servedModel"`
	Endpoint   string `json:"endpoint"`
	Path       string `json:"path"`
	Prompt     int    `json:"promptTokens"`
	Cached     int    `json:"cachedTokens"`
	Completion int    `json:"completionTokens"`
	Estimated  bool   `json:"estimated"`
	Outcome    string `json:"outcome"`
	Status     int    `json:"status"`
	Retries    int    `json:"retries"`
}

var requests atomic.Int64

// request is one call of the API through the router.
type request struct {
	path string
	body map[string]any
	// onContent, where set, is called with each piece of content of a stream.
	onContent func()
}

// chat is a conversation of which exactly n tokens are generated.
func chat(model string, n int, stream bool, turns ...string) request {
	var messages []map[string]string
	for i, text := range turns {
		messages = append(messages, map[string]string{"role": [...]string{"user", "assistant"}[i%2], "content": text})
	}
	return request{path: "/v1/chat/completions", body: map[string]any{
		"model": model, "messages": messages, "max_tokens": n, "ignore_eos": true, "temperature": 0, "stream": stream,
	}}
}

// withUsage asks for the usage chunk of a stream.
func (q request) withUsage() request {
	q.body["stream_options"] = map[string]any{"include_usage": true}
	return q
}

// ask sends a request to the router and reads all of the answer.
func (f *fabric) ask(ctx context.Context, q request) answer {
	return post(ctx, f.router.URL, q)
}

func post(ctx context.Context, to string, q request) answer {
	a := answer{id: fmt.Sprintf("vllm-test-%d", requests.Add(1))}
	text, err := json.Marshal(q.body)
	if err != nil {
		a.broken = err
		return a
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, to+q.path, bytes.NewReader(text))
	if err != nil {
		a.broken = err
		return a
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", a.id)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		a.broken = err
		return a
	}
	defer func() { _ = resp.Body.Close() }()
	a.status = resp.StatusCode
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		var body []byte
		body, a.broken = io.ReadAll(resp.Body)
		a.take(body, nil)
		return a
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		switch {
		case !ok:
		case string(data) == "[DONE]":
			a.done = true
		default:
			a.take(data, q.onContent)
		}
	}
	a.broken = lines.Err()
	return a
}

// take reads one JSON document: an answer, or an event of one.
func (a *answer) take(data []byte, onContent func()) {
	var doc struct {
		Choices []struct {
			Text    string
			Message struct{ Content string }
			Delta   struct{ Content string }
		}
		Usage *usage
		Error *struct{ Message, Code any }
	}
	if err := json.Unmarshal(data, &doc); err != nil {
		a.errors = append(a.errors, fmt.Sprintf("no JSON: %q", data))
		return
	}
	if doc.Usage != nil {
		a.usage = doc.Usage
	}
	if doc.Error != nil {
		a.errors = append(a.errors, fmt.Sprint(doc.Error.Code, ": ", doc.Error.Message))
	}
	for _, c := range doc.Choices {
		if piece := c.Text + c.Message.Content + c.Delta.Content; piece != "" {
			a.text += piece
			a.chunks++
			if onContent != nil {
				onContent()
			}
		}
	}
}

// whole says what an answer lacks of a good one, nil if nothing.
func (a answer) whole(stream bool) error {
	switch {
	case a.broken != nil:
		return fmt.Errorf("%s: %w", a.id, a.broken)
	case a.status != http.StatusOK || len(a.errors) > 0:
		return fmt.Errorf("%s: status %d: %s", a.id, a.status, a.errors)
	case a.done != stream:
		return fmt.Errorf("%s: a stream with [DONE] is %t, want %t", a.id, a.done, stream)
	case a.text == "":
		return errors.New(a.id + ": no text")
	}
	return nil
}

// records waits until the usage file has a line for each of the ids.
func (f *fabric) records(ctx context.Context, ids ...string) (map[string]record, error) {
	found := map[string]record{}
	err := rig.Until(ctx, "usage records", func(context.Context) (bool, error) {
		text, err := os.ReadFile(f.router.Usage)
		if err != nil {
			return false, err
		}
		for line := range bytes.Lines(text) {
			var r record
			if json.Unmarshal(line, &r) == nil && r.RequestID != "" {
				found[r.RequestID] = r
			}
		}
		for _, id := range ids {
			if _, ok := found[id]; !ok {
				return false, fmt.Errorf("none for %s", id)
			}
		}
		return true, nil
	}, f.router.Process)
	return found, err
}
