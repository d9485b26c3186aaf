package engine

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"math"
	"math/rand/v2"
	"net/http"

	"github.com/cespare/xxhash/v2"
)

// defaultDimensions is the length of an embedding whose request names none.
const defaultDimensions = 64

// handleEmbeddings answers one unit vector per input, a pure function of the
// input and the seed.
func (e *Engine) handleEmbeddings(w http.ResponseWriter, r *http.Request) {
	var req struct {
		sampling
		Input      json.RawMessage `json:"input"`
		Format     string          `json:"encoding_format"`
		Dimensions int             `json:"dimensions"`
	}
	if err := e.decode(w, r, &req, &req.Model); err != nil {
		refuse(w, err)
		return
	}
	list, err := prompts(req.Input)
	if err != nil {
		refuse(w, badRequest("input", "read input: %v", err))
		return
	}
	if req.Dimensions == 0 {
		req.Dimensions = defaultDimensions
	}
	if req.Dimensions < 1 || req.Dimensions > 8192 {
		refuse(w, badRequest("dimensions", "dimensions must be from 1 to 8192, got %d", req.Dimensions))
		return
	}
	one := 1
	req.MaxTokens, req.MaxCompletionTokens, req.MaxOutputTokens = &one, nil, nil
	g, err := e.begin(r, "embd-", req.sampling)
	if err != nil || g.refusal(w) {
		refuseIf(w, err)
		return
	}
	var data []any
	for i, text := range list {
		s := &sequence{text: text, prompt: len(text), maxTokens: 1}
		if len(text) == 0 {
			refuse(w, badRequest("input", "input %d is empty", i))
			return
		}
		if err := e.admit(r.Context(), s); err != nil {
			refuse(w, err)
			return
		}
		g.task.admitted(s)
		err := e.compute(r.Context(), s)
		e.finish(s, "stop")
		if err != nil {
			refuse(w, err)
			return
		}
		g.usage.add(s, 0)
		g.timings.add(e, s)
		vector := embed(text, g.engine.opts.Seed, req.Dimensions)
		var value any = vector
		if req.Format == "base64" {
			b := make([]byte, 0, 4*len(vector))
			for _, f := range vector {
				b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f))
			}
			value = base64.StdEncoding.EncodeToString(b)
		}
		data = append(data, map[string]any{"object": "embedding", "index": i, "embedding": value})
	}
	g.task.whole(g.usage)
	writeJSON(w, http.StatusOK, map[string]any{
		"id": g.id, "object": "list", "created": g.created, "model": req.Model, "data": data, "usage": g.usage,
	})
}

func embed(text []byte, seed uint64, n int) []float32 {
	rng := rand.New(rand.NewPCG(xxhash.Sum64(text), seed))
	v := make([]float32, n)
	var sum float64
	for i := range v {
		f := rng.NormFloat64()
		v[i] = float32(f)
		sum += f * f
	}
	norm := float32(math.Sqrt(sum))
	for i := range v {
		v[i] /= norm
	}
	return v
}
