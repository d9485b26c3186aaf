package check

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
)

// message is one turn as the API takes it.
type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// chatRequest is the part of a chat request that the check uses.
type chatRequest struct {
	Model         string         `json:"model"`
	Messages      []message      `json:"messages"`
	MaxTokens     int            `json:"max_tokens"`
	Stream        bool           `json:"stream,omitempty"`
	StreamOptions *streamOptions `json:"stream_options,omitempty"`
	IgnoreEOS     bool           `json:"ignore_eos,omitempty"`
}

type streamOptions struct {
	IncludeUsage bool `json:"include_usage"`
}

// chatAnswer is what came back, as far as it came.
type chatAnswer struct {
	Text     string
	Finish   string // finish_reason, empty where none came
	Prompt   int    // tokens
	Cached   int    // prompt tokens found in a cache, as the engine reports
	Tokens   int    // completion tokens
	PromptMS float64
	Begun    bool // something of the answer came
	Done     bool // the stream ended with its terminator, or the body was whole
}

// answerBody is the union of a whole answer and a chunk.
type answerBody struct {
	Choices []struct {
		Message      struct{ Content string }
		Delta        struct{ Content string }
		FinishReason string `json:"finish_reason"`
	} `json:"choices"`
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Details    struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
	Timings *struct {
		PromptMS float64 `json:"prompt_ms"`
	} `json:"timings"`
	Error *struct {
		Message string `json:"message"`
	} `json:"error"`
}

// merge adds what one chunk says.
func (a *chatAnswer) merge(b *answerBody) error {
	if b.Error != nil {
		return fmt.Errorf("answer broke off: %s", b.Error.Message)
	}
	a.Begun = true
	for _, c := range b.Choices {
		a.Text += c.Message.Content + c.Delta.Content
		if c.FinishReason != "" {
			a.Finish = c.FinishReason
		}
	}
	if b.Usage != nil {
		a.Prompt, a.Cached, a.Tokens = b.Usage.Prompt, b.Usage.Details.Cached, b.Usage.Completion
	}
	if b.Timings != nil {
		a.PromptMS = b.Timings.PromptMS
	}
	return nil
}

// maxAnswer bounds an answer that is read whole, in bytes.
const maxAnswer = 16 << 20

// client sends chat requests to one address.
type client struct {
	base string
	http *http.Client
}

func newClient(base string) *client {
	return &client{base: base, http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}
}

func (c *client) close() { c.http.CloseIdleConnections() }

// chat sends one request and reads the answer to its end. For a stream, seen
// is called after the first chunk and after every later one. The answer is
// what came before the error.
func (c *client) chat(ctx context.Context, req chatRequest, seen func(*chatAnswer)) (*chatAnswer, error) {
	answer := &chatAnswer{}
	if req.Stream {
		req.StreamOptions = &streamOptions{IncludeUsage: true}
	}
	body, err := json.Marshal(req)
	if err != nil {
		return answer, fmt.Errorf("encode request: %w", err)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return answer, fmt.Errorf("make request: %w", err)
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(r)
	if err != nil {
		return answer, fmt.Errorf("send request: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // best effort: it only explains
		return answer, fmt.Errorf("send request: status %d: %s", resp.StatusCode, bytes.TrimSpace(text))
	}
	if req.Stream {
		return answer, answer.stream(resp.Body, seen)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return answer, fmt.Errorf("read answer: %w", err)
	}
	var b answerBody
	if err := json.Unmarshal(text, &b); err != nil {
		return answer, fmt.Errorf("read answer: %w", err)
	}
	if err := answer.merge(&b); err != nil {
		return answer, err
	}
	answer.Done = true
	return answer, nil
}

func (a *chatAnswer) stream(body io.Reader, seen func(*chatAnswer)) error {
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			a.Done = true
			continue
		}
		var b answerBody
		if err := json.Unmarshal([]byte(data), &b); err != nil {
			return fmt.Errorf("read chunk: %w", err)
		}
		if err := a.merge(&b); err != nil {
			return err
		}
		if seen != nil {
			seen(a)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read stream: %w", err)
	}
	if !a.Done {
		return errors.New("read stream: it ended without its terminator")
	}
	return nil
}
