package soak

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"

	"github.com/hearth-dev/hearth/test/sim/engine"
)

func base36(n uint64) string { return strconv.FormatUint(n, 36) }

// ask is one request and what its answer must be.
type ask struct {
	id, kind, path string
	body           []byte
	stream, usage  bool
	want           string // the text, or the vectors in base64
	prompt, tokens int    // as the engine counts them
}

// Kinds of requests.
const (
	kindChat       = "chat"
	kindCompletion = "completion"
	kindEmbedding  = "embedding"
	kindResponse   = "response"
)

// prose is a text of n bytes, with what JSON escapes and what it need not.
func prose(rng *rand.Rand, n int) string {
	words := []string{"hearth ", "warm ", "node\n", "\"quoted\" ", "back\\slash ", "käse ", "火 ", "tab\t", "</s> ", "a "}
	var b strings.Builder
	b.Grow(n + 16)
	for b.Len() < n {
		b.WriteString(words[rng.IntN(len(words))])
	}
	return b.String()
}

// size is mostly small; one in 50 about 400 KB, one in 500 as much as big.
func size(rng *rand.Rand, big int) int {
	switch n := rng.IntN(500); {
	case n == 0:
		return big - 1<<16
	case n < 10:
		return min(400_000, big/2)
	default:
		return 20 + rng.IntN(2000)
	}
}

// shared are openings that many prompts have, so that caches are hit.
const shared = "You are the keeper of a hearth. Keep it warm, keep it honest, and say what is where. "

// plan draws a request.
func plan(rng *rand.Rand, id string, big int) *ask {
	a := &ask{id: id, stream: rng.IntN(3) > 0}
	most := 8 + rng.IntN(56)
	text := prose(rng, size(rng, big))
	if rng.IntN(2) == 0 {
		text = strings.Repeat(shared, 1+rng.IntN(20)) + text
	}
	fields := map[string]any{"model": Models[rng.IntN(len(Models))]}
	switch n := rng.IntN(10); {
	case n < 5:
		a.chat(rng, fields, text, most)
	case n < 7:
		a.completion(rng, fields, text, most)
	case n < 8:
		a.embedding(rng, fields, text)
	default:
		a.response(fields, text, most)
	}
	if a.stream && a.kind != kindEmbedding {
		fields["stream"] = true
		if a.usage = rng.IntN(2) == 0; a.usage && a.kind != kindResponse {
			fields["stream_options"] = map[string]any{"include_usage": true}
		}
	}
	a.body = encode(fields)
	return a
}

func encode(v any) []byte {
	body, err := json.Marshal(v)
	if err != nil { // plain maps, strings and numbers always encode
		return nil
	}
	return body
}

func (a *ask) expect(prompt []byte, most int) {
	text, tokens := engine.Text(prompt, EngineSeed, most)
	a.want += text
	a.tokens += tokens
	a.prompt += engine.Tokens(len(prompt))
}

func (a *ask) chat(rng *rand.Rand, fields map[string]any, text string, most int) {
	a.kind, a.path = kindChat, "/v1/chat/completions"
	var content any = text
	if rng.IntN(4) == 0 {
		half := strings.ToValidUTF8(text[:len(text)/2], "")
		content = []any{map[string]any{"type": "text", "text": half}, map[string]any{"type": "text", "text": "and so on"}}
	}
	messages := []map[string]any{{"role": "system", "content": shared}, {"role": "user", "content": content}}
	fields["messages"] = messages
	fields[[]string{"max_tokens", "max_completion_tokens"}[rng.IntN(2)]] = most
	var list []engine.Message
	if err := json.Unmarshal(encode(messages), &list); err == nil {
		if prompt, err := engine.Render(list, nil); err == nil {
			a.expect(prompt, most)
		}
	}
}

func (a *ask) completion(rng *rand.Rand, fields map[string]any, text string, most int) {
	a.kind, a.path = kindCompletion, "/v1/completions"
	fields["max_tokens"] = most
	fields["prompt"] = text
	a.expect([]byte(text), most)
	if rng.IntN(4) == 0 {
		second := prose(rng, 30)
		fields["prompt"] = []string{text, second}
		a.expect([]byte(second), most)
	}
}

func (a *ask) embedding(rng *rand.Rand, fields map[string]any, text string) {
	a.kind, a.path, a.stream = kindEmbedding, "/v1/embeddings", false
	fields["input"] = text
	if rng.IntN(2) == 0 {
		fields["encoding_format"] = "base64"
	}
	fields["dimensions"] = 16
	a.want = base64Of(engine.Vector([]byte(text), EngineSeed, 16))
	a.prompt = engine.Tokens(len(text))
}

func base64Of(vector []float32) string {
	var b []byte
	for _, f := range vector {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f))
	}
	return base64.StdEncoding.EncodeToString(b)
}

func (a *ask) response(fields map[string]any, text string, most int) {
	a.kind, a.path = kindResponse, "/v1/responses"
	fields["input"], fields["max_output_tokens"], fields["store"] = text, most, false
	if prompt, err := engine.Render([]engine.Message{{Role: "user", Content: encode(text)}}, nil); err == nil {
		a.expect(prompt, most)
	}
}
