package hub

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"path/filepath"

	"github.com/hearth-dev/hearth/units"
)

// ModelOptions describes a generated model.
type ModelOptions struct {
	// Size is the approximate sum of all tensor bytes; 0 means 256 MiB. The
	// result is within one transformer layer of it, and at least 300 KiB.
	Size units.Bytes
	// Shards is the number of safetensors files; 0 means 4.
	Shards int
	// Seed fixes every byte of the result.
	Seed uint64
}

const (
	vocabSize = 512
	headDim   = 64
)

type tensor struct {
	name  string
	shape []int64
	ones  bool // a norm: filled with 1.0
}

func (t tensor) bytes() int64 {
	n := int64(2)
	for _, d := range t.shape {
		n *= d
	}
	return n
}

// WriteModel generates a llama-architecture model in dir, as a user would
// publish it: configuration, a byte-level tokenizer that transformers loads,
// and sharded BF16 safetensors of pseudo-random values with their index. Equal
// options give equal bytes. Memory stays flat whatever the size.
func WriteModel(dir string, opts ModelOptions) error {
	if opts.Size == 0 {
		opts.Size = 256 * units.MiB
	}
	if opts.Shards == 0 {
		opts.Shards = 4
	}
	if opts.Size < 0 || opts.Shards < 0 || opts.Shards > 1000 {
		return errors.New("write model: size and shard count must not be negative, and at most 1000 shards")
	}
	hidden, layers := modelShape(int64(opts.Size))
	tensors := llamaTensors(hidden, layers)
	if opts.Shards > len(tensors) {
		return fmt.Errorf("write model: %d shards wanted for %d tensors", opts.Shards, len(tensors))
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write model: %w", err)
	}
	if err := writeTexts(dir, hidden, layers); err != nil {
		return fmt.Errorf("write model: %w", err)
	}
	if err := writeShards(dir, tensors, opts); err != nil {
		return fmt.Errorf("write model: %w", err)
	}
	return nil
}

// layerBytes is the size of one layer of modelShape's proportions.
func layerBytes(hidden int64) int64 {
	var n int64
	for _, t := range layerTensors(hidden, 0) {
		n += t.bytes()
	}
	return n
}

// modelShape picks the hidden size and layer count for a total of size bytes:
// wide enough to look like a model, with at least eight layers where possible.
func modelShape(size int64) (hidden, layers int64) {
	hidden = 64
	for _, h := range []int64{128, 256, 512, 768, 1024, 2048} {
		if layerBytes(h)*8 <= size {
			hidden = h
		}
	}
	outer := 2*2*vocabSize*hidden + 2*hidden
	return hidden, max(1, (size-outer)/layerBytes(hidden))
}

func layerTensors(hidden, layer int64) []tensor {
	p := fmt.Sprintf("model.layers.%d.", layer)
	kv := max(headDim, hidden/4/headDim*headDim)
	inter := hidden * 8 / 3 / 64 * 64
	return []tensor{
		{p + "input_layernorm.weight", []int64{hidden}, true},
		{p + "mlp.down_proj.weight", []int64{hidden, inter}, false},
		{p + "mlp.gate_proj.weight", []int64{inter, hidden}, false},
		{p + "mlp.up_proj.weight", []int64{inter, hidden}, false},
		{p + "post_attention_layernorm.weight", []int64{hidden}, true},
		{p + "self_attn.k_proj.weight", []int64{kv, hidden}, false},
		{p + "self_attn.o_proj.weight", []int64{hidden, hidden}, false},
		{p + "self_attn.q_proj.weight", []int64{hidden, hidden}, false},
		{p + "self_attn.v_proj.weight", []int64{kv, hidden}, false},
	}
}

func llamaTensors(hidden, layers int64) []tensor {
	out := []tensor{{"model.embed_tokens.weight", []int64{vocabSize, hidden}, false}}
	for l := range layers {
		out = append(out, layerTensors(hidden, l)...)
	}
	return append(out, tensor{"model.norm.weight", []int64{hidden}, true}, tensor{"lm_head.weight", []int64{vocabSize, hidden}, false})
}

// splitShards cuts the tensors into n runs of about equal bytes, none empty.
func splitShards(tensors []tensor, n int) [][]tensor {
	var total int64
	for _, t := range tensors {
		total += t.bytes()
	}
	var out [][]tensor
	start, seen := 0, int64(0)
	for i, t := range tensors {
		seen += t.bytes()
		left := n - len(out)
		full := seen >= total*int64(len(out)+1)/int64(n)
		if left > 1 && (full || len(tensors)-i-1 == left-1) && len(tensors)-i-1 >= left-1 {
			out = append(out, tensors[start:i+1])
			start = i + 1
		}
	}
	return append(out, tensors[start:])
}

func writeShards(dir string, tensors []tensor, opts ModelOptions) error {
	shards := splitShards(tensors, opts.Shards)
	weightMap, total := map[string]string{}, int64(0)
	for i, shard := range shards {
		name := fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, len(shards))
		if err := writeShard(filepath.Join(dir, name), shard, opts.Seed); err != nil {
			return err
		}
		for _, t := range shard {
			weightMap[t.name] = name
			total += t.bytes()
		}
	}
	return writeJSONFile(filepath.Join(dir, "model.safetensors.index.json"), map[string]any{
		"metadata": map[string]any{"total_size": total}, "weight_map": weightMap,
	})
}

type header struct {
	DType   string   `json:"dtype"`
	Shape   []int64  `json:"shape"`
	Offsets [2]int64 `json:"data_offsets"`
}

// writeShard writes one safetensors file: length, header, tensors.
func writeShard(file string, shard []tensor, seed uint64) (err error) {
	head, at := map[string]any{"__metadata__": map[string]string{"format": "pt"}}, int64(0)
	for _, t := range shard {
		head[t.name] = header{"BF16", t.shape, [2]int64{at, at + t.bytes()}}
		at += t.bytes()
	}
	text, err := json.Marshal(head)
	if err != nil {
		return fmt.Errorf("encode header: %w", err)
	}
	for len(text)%8 != 0 {
		text = append(text, ' ')
	}
	f, err := os.Create(file)
	if err != nil {
		return fmt.Errorf("create shard: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := bufio.NewWriterSize(f, 1<<20)
	if err := binary.Write(w, binary.LittleEndian, uint64(len(text))); err != nil {
		return fmt.Errorf("write shard: %w", err)
	}
	if _, err := w.Write(text); err != nil {
		return fmt.Errorf("write shard: %w", err)
	}
	for _, t := range shard {
		if err := writeTensor(w, t, seed); err != nil {
			return err
		}
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("write shard: %w", err)
	}
	return nil
}

// writeTensor writes BF16 values: 1.0 for norms, else magnitudes between 2^-9
// and 2^-5 of either sign.
func writeTensor(w *bufio.Writer, t tensor, seed uint64) error {
	name := fnv.New64a()
	_, _ = name.Write([]byte(t.name))
	random := rand.NewPCG(seed, name.Sum64())
	var buf [8192]byte
	for left := t.bytes(); left > 0; {
		n := min(int64(len(buf)), left)
		for i := int64(0); i < n; i += 8 {
			bits := uint64(0x3f803f803f803f80)
			if !t.ones {
				v := random.Uint64()
				// Each 16-bit lane: random sign, exponent 118..121, random mantissa.
				bits = v&0x807f807f807f807f | (v>>7&0x0003000300030003+0x0076007600760076)<<7
			}
			binary.LittleEndian.PutUint64(buf[i:], bits)
		}
		if _, err := w.Write(buf[:n]); err != nil {
			return fmt.Errorf("write tensor: %w", err)
		}
		left -= n
	}
	return nil
}

func writeJSONFile(file string, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("encode %s: %w", filepath.Base(file), err)
	}
	if err := os.WriteFile(file, append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("write %s: %w", filepath.Base(file), err)
	}
	return nil
}
