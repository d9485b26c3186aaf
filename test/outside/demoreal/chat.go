package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// answer is one streamed turn.
type answer struct {
	text         string
	finish       string
	firstChunk   time.Duration // llama-server sends it, empty, before prefill ends
	firstContent time.Duration // this is the time to first token
	prompt       int           // tokens, as the engine reports
	cached       int           // of those, found in its cache
	completion   int
}

// ask streams one turn from the router and prints it as it comes. id is the
// request's id, unique in the run.
func ask(ctx context.Context, url, id, model string, messages []message, maxTokens int, out io.Writer) (*answer, error) {
	body, err := json.Marshal(map[string]any{
		"model": model, "messages": messages, "max_tokens": maxTokens, "temperature": 0,
		"stream": true, "stream_options": map[string]any{"include_usage": true},
	})
	if err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", id)
	begun := time.Now()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask the router: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // it only explains
		return nil, fmt.Errorf("ask the router: %s: %s", resp.Status, bytes.TrimSpace(text))
	}
	a := &answer{}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			if a.text == "" || a.completion == 0 {
				return a, errors.New("read answer: the stream ended without text or usage")
			}
			return a, nil
		}
		part, err := a.add(data, time.Since(begun))
		if err != nil {
			return a, err
		}
		_, _ = io.WriteString(out, part)
	}
	return a, fmt.Errorf("read answer: the stream ended without [DONE]: %w", errors.Join(lines.Err(), io.ErrUnexpectedEOF))
}

// add takes one chunk that came after the given time and returns its text.
func (a *answer) add(data string, after time.Duration) (string, error) {
	var c struct {
		Choices []struct {
			Delta        struct{ Content string }
			FinishReason string `json:"finish_reason"`
		}
		Usage *struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
			Details    struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
		Error *struct{ Message string }
	}
	if err := json.Unmarshal([]byte(data), &c); err != nil {
		return "", fmt.Errorf("read answer: %w: %s", err, data)
	}
	if c.Error != nil {
		return "", fmt.Errorf("read answer: it broke off: %s", c.Error.Message)
	}
	if a.firstChunk == 0 {
		a.firstChunk = after
	}
	if c.Usage != nil {
		a.prompt, a.cached, a.completion = c.Usage.Prompt, c.Usage.Details.Cached, c.Usage.Completion
	}
	var text string
	if len(c.Choices) > 0 { // the engines are asked for one choice
		choice := c.Choices[0]
		text = choice.Delta.Content
		if choice.FinishReason != "" {
			a.finish = choice.FinishReason
		}
	}
	if text != "" && a.firstContent == 0 {
		a.firstContent = after
	}
	a.text += text
	return text, nil
}
