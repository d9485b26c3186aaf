package engine

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
)

// apiError is a request the engine refuses, with the status and the OpenAI
// error fields to say so.
type apiError struct {
	status      int
	kind, param string
	message     string
}

func (e *apiError) Error() string { return e.message }

func badRequest(param, format string, args ...any) *apiError {
	return &apiError{http.StatusBadRequest, "BadRequestError", param, fmt.Sprintf(format, args...)}
}

func writeError(w http.ResponseWriter, status int, kind, param, message string) {
	var p any
	if param != "" {
		p = param
	}
	writeJSON(w, status, map[string]any{"error": map[string]any{
		"message": message, "type": kind, "param": p, "code": status,
	}})
}

// refuse answers with what err means before any byte of an answer was sent.
func refuse(w http.ResponseWriter, err error) {
	api, refused := errors.AsType[*apiError](err)
	switch {
	case refused:
		writeError(w, api.status, api.kind, api.param, api.message)
	case errors.Is(err, errTooLong):
		writeError(w, http.StatusBadRequest, "BadRequestError", "input_tokens", err.Error())
	case errors.Is(err, errQueueFull):
		writeError(w, http.StatusServiceUnavailable, "ServiceUnavailableError", "", err.Error())
	default: // the client is gone
		abort()
	}
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // the client is gone: nothing to tell it
}

// abort breaks the connection off, so that the client sees no clean end.
func abort() {
	panic(http.ErrAbortHandler)
}

// decode reads a bounded JSON body into v and checks the model it names.
func (e *Engine) decode(w http.ResponseWriter, r *http.Request, v any, model *string) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, int64(e.opts.BodyLimit)))
	if _, tooBig := errors.AsType[*http.MaxBytesError](err); tooBig {
		return &apiError{http.StatusRequestEntityTooLarge, "BadRequestError", "", "request body is too large"}
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, v); err != nil {
		return &apiError{http.StatusBadRequest, "Bad Request", "", fmt.Sprintf("read JSON body: %v", err)}
	}
	if *model != e.opts.ServedModel {
		return &apiError{http.StatusNotFound, "NotFoundError", "model", fmt.Sprintf("The model `%s` does not exist.", *model)}
	}
	return nil
}

// sampling is what every generating route understands.
type sampling struct {
	Model               string  `json:"model"`
	Stream              bool    `json:"stream"`
	N                   *int    `json:"n"`
	MaxTokens           *int    `json:"max_tokens"`
	MaxCompletionTokens *int    `json:"max_completion_tokens"`
	MaxOutputTokens     *int    `json:"max_output_tokens"`
	IgnoreEOS           bool    `json:"ignore_eos"`
	Seed                *uint64 `json:"seed"`
	CacheSalt           string  `json:"cache_salt"`
	StreamOptions       *struct {
		IncludeUsage         bool `json:"include_usage"`
		ContinuousUsageStats bool `json:"continuous_usage_stats"`
	} `json:"stream_options"`
}

// defaultMaxTokens bounds an answer whose request names no bound.
const defaultMaxTokens = 256

func (s *sampling) maxTokens() (int, error) {
	n := defaultMaxTokens
	for _, p := range []*int{s.MaxTokens, s.MaxCompletionTokens, s.MaxOutputTokens} {
		if p != nil {
			n = *p
		}
	}
	if n < 1 {
		return 0, badRequest("max_tokens", "max_tokens must be at least 1, got %d", n)
	}
	if s.N != nil && *s.N != 1 {
		return 0, badRequest("n", "this engine gives one choice, got n=%d", *s.N)
	}
	return n, nil
}

// salt opens a rendered text, so that differently salted prompts share no block.
func (s *sampling) salt(text []byte) []byte {
	if s.CacheSalt == "" {
		return text
	}
	return append([]byte("<|salt|>"+s.CacheSalt+"<|end|>\n"), text...)
}

// usage is the token count of an answer as the API gives it.
type usage struct {
	Prompt     int            `json:"prompt_tokens"`
	Completion int            `json:"completion_tokens"`
	Total      int            `json:"total_tokens"`
	Details    map[string]int `json:"prompt_tokens_details"`
}

// timings follows llama-server's extension of that name; milliseconds of
// simulated time, before Speedup.
type timings struct {
	CacheN   int     `json:"cache_n"`
	PromptN  int     `json:"prompt_n"`
	PromptMS float64 `json:"prompt_ms"`
}

func (u *usage) add(s *sequence, generated int) {
	u.Prompt += s.promptTokens()
	u.Completion += generated
	u.Total = u.Prompt + u.Completion
	if u.Details == nil {
		u.Details = map[string]int{}
	}
	u.Details["cached_tokens"] += s.cached
}

func (t *timings) add(e *Engine, s *sequence) {
	t.CacheN += s.cached
	t.PromptN += s.promptTokens() - s.cached
	t.PromptMS += e.prefillTime(s).Seconds() * 1000
}

func (e *Engine) handleModels(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": []any{map[string]any{
		"id": e.opts.ServedModel, "object": "model", "created": e.started.Unix(),
		"owned_by": "engine-sim", "max_model_len": e.opts.KVTokens,
	}}})
}

// handleTokenize answers the token ids of a prompt or of rendered messages: an
// id is four bytes of the text, little endian.
func (e *Engine) handleTokenize(w http.ResponseWriter, r *http.Request) {
	var req struct {
		sampling
		Prompt   *string         `json:"prompt"`
		Messages []Message       `json:"messages"`
		Tools    json.RawMessage `json:"tools"`
	}
	if err := e.decode(w, r, &req, &req.Model); err != nil {
		refuse(w, err)
		return
	}
	var text []byte
	if req.Prompt != nil {
		text = []byte(*req.Prompt)
	} else {
		var err error
		if text, err = Render(req.Messages, req.Tools); err != nil {
			refuse(w, badRequest("messages", "%v", err))
			return
		}
	}
	tokens := make([]uint32, 0, Tokens(len(text)))
	for len(text) > 0 {
		var four [TokenBytes]byte
		text = text[copy(four[:], text):]
		tokens = append(tokens, binary.LittleEndian.Uint32(four[:]))
	}
	writeJSON(w, http.StatusOK, map[string]any{"count": len(tokens), "max_model_len": e.opts.KVTokens, "tokens": tokens})
}

// prompts reads the four shapes of a completion prompt or an embedding input:
// a string, strings, token ids, or lists of token ids.
func prompts(raw json.RawMessage) ([][]byte, error) {
	raw = bytes.TrimSpace(raw)
	var s string
	if json.Unmarshal(raw, &s) == nil && len(raw) > 0 && raw[0] == '"' {
		return [][]byte{[]byte(s)}, nil
	}
	var ids []uint32
	if json.Unmarshal(raw, &ids) == nil && len(ids) > 0 {
		return [][]byte{idBytes(ids)}, nil
	}
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil || len(list) == 0 {
		return nil, errors.New("want a string, a list of strings, token ids or a list of token ids")
	}
	out := make([][]byte, 0, len(list))
	for _, item := range list {
		one, err := prompts(item)
		if err != nil || len(one) != 1 {
			return nil, errors.New("want a string, a list of strings, token ids or a list of token ids")
		}
		out = append(out, one[0])
	}
	return out, nil
}

func idBytes(ids []uint32) []byte {
	b := make([]byte, 0, TokenBytes*len(ids))
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	return b
}
