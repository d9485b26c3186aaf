package engine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"

	"github.com/cespare/xxhash/v2"
)

// Message is one turn of a conversation. Content is a string, a list of parts
// or null, as the API allows.
type Message struct {
	Role       string          `json:"role"`
	Content    json.RawMessage `json:"content,omitempty"`
	ToolCalls  json.RawMessage `json:"tool_calls,omitempty"`
	ToolCallID string          `json:"tool_call_id,omitempty"`
}

// Render is the engine's chat template: tools first, then each message, then
// the opening of the answer. A conversation's rendering begins with the
// rendering of its earlier turns and their answers.
func Render(messages []Message, tools json.RawMessage) ([]byte, error) {
	var b bytes.Buffer
	if len(tools) > 0 && !bytes.Equal(tools, []byte("null")) {
		fmt.Fprintf(&b, "<|tools|>%s<|end|>\n", tools)
	}
	for i, m := range messages {
		text, err := contentText(m.Content)
		if err != nil {
			return nil, fmt.Errorf("read messages[%d].content: %w", i, err)
		}
		if m.Role == "" {
			return nil, fmt.Errorf("read messages[%d]: role is empty", i)
		}
		fmt.Fprintf(&b, "<|%s|>%s", m.Role, text)
		if len(m.ToolCalls) > 0 {
			b.Write(m.ToolCalls)
		}
		b.WriteString("<|end|>\n")
	}
	b.WriteString("<|assistant|>")
	return b.Bytes(), nil
}

// contentText joins the text of a content value; parts that are not text are
// rendered as they stand.
func contentText(raw json.RawMessage) (string, error) {
	if len(raw) == 0 || bytes.Equal(raw, []byte("null")) {
		return "", nil
	}
	if raw[0] == '"' {
		var s string
		err := json.Unmarshal(raw, &s)
		return s, err
	}
	var parts []json.RawMessage
	if err := json.Unmarshal(raw, &parts); err != nil {
		return "", fmt.Errorf("want a string or a list of parts: %w", err)
	}
	var b bytes.Buffer
	for _, raw := range parts {
		var part struct {
			Text *string `json:"text"`
		}
		if err := json.Unmarshal(raw, &part); err != nil {
			return "", fmt.Errorf("want a part with a type: %w", err)
		}
		if part.Text != nil {
			b.WriteString(*part.Text)
		} else {
			b.Write(raw)
		}
	}
	return b.String(), nil
}

// words are of three letters: a word and a space are one token.
var words = []string{
	"ash", "bay", "cob", "dry", "elm", "fir", "gem", "hot", "ice", "jar", "keg", "log", "map", "net", "oak", "pot",
	"red", "sun", "tin", "urn", "vat", "wax", "yew", "zip", "arc", "bow", "cup", "dew", "ewe", "fog", "gas", "hue",
}

// answer is the text an engine gives to a prompt: a pure function of the two
// and the seed.
type answer struct {
	rng    *rand.Rand
	length int // natural length in tokens
}

func newAnswer(prompt []byte, seed uint64) *answer {
	rng := rand.New(rand.NewPCG(xxhash.Sum64(prompt), seed))
	return &answer{rng: rng, length: 24 + rng.IntN(40)}
}

// token returns the next four bytes.
func (a *answer) token() string {
	w := words[a.rng.IntN(len(words))]
	return w + " "
}

// Text is the answer that an engine of this seed gives to a rendered prompt,
// and its length in tokens, where a request bounds it to most tokens, lets it
// stop where it would and brings no seed of its own.
func Text(prompt []byte, seed uint64, most int) (text string, tokens int) {
	a := newAnswer(prompt, seed)
	n := min(a.length, most)
	var b bytes.Buffer
	for range n {
		b.WriteString(a.token())
	}
	return b.String(), n
}

// Vector is the embedding that an engine of this seed gives to an input.
func Vector(input []byte, seed uint64, dimensions int) []float32 {
	return embed(input, seed, dimensions)
}
