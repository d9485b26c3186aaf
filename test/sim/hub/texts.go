package hub

import (
	"fmt"
	"os"
	"path/filepath"
)

// chatTemplate is the shape engines render conversations with.
const chatTemplate = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"

// writeTexts writes everything of a model but its tensors.
func writeTexts(dir string, hidden, layers int64) error {
	heads := max(1, hidden/headDim)
	kvHeads := max(1, hidden/4/headDim)
	special := map[string]any{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
	files := map[string]any{
		"config.json": map[string]any{
			"architectures": []string{"LlamaForCausalLM"}, "model_type": "llama", "vocab_size": vocabSize,
			"hidden_size": hidden, "intermediate_size": hidden * 8 / 3 / 64 * 64, "num_hidden_layers": layers,
			"num_attention_heads": heads, "num_key_value_heads": kvHeads, "head_dim": headDim,
			"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": 0, "eos_token_id": 1,
			"tie_word_embeddings": false, "torch_dtype": "bfloat16", "hidden_act": "silu", "initializer_range": 0.02,
		},
		"generation_config.json": map[string]any{"bos_token_id": 0, "eos_token_id": 1},
		"tokenizer_config.json": map[string]any{
			"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, "chat_template": chatTemplate,
			"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
		},
		"special_tokens_map.json": special,
		"tokenizer.json":          tokenizer(),
	}
	for name, v := range files {
		if err := writeJSONFile(filepath.Join(dir, name), v); err != nil {
			return err
		}
	}
	readme := "---\nlicense: apache-2.0\nlibrary_name: transformers\n---\n# Generated llama for demos\n\nRandom weights: it loads, and it says nothing.\n"
	if err := os.WriteFile(filepath.Join(dir, "README.md"), []byte(readme), 0o644); err != nil {
		return fmt.Errorf("write README.md: %w", err)
	}
	return nil
}

// tokenizer is a byte-level BPE without merges: three special tokens, one
// token for each byte, and words up to vocabSize, in the format of the
// tokenizers library. A text has as many tokens as bytes; the words, which no
// text is encoded to, give every id that a model may answer with a text.
func tokenizer() map[string]any {
	vocab, added := map[string]int{}, []map[string]any{}
	for i, s := range []string{"<s>", "</s>", "<unk>"} {
		vocab[s] = i
		added = append(added, map[string]any{
			"id": i, "content": s, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
		})
	}
	for _, r := range byteAlphabet() {
		vocab[string(r)] = len(vocab)
	}
	for id := len(vocab); id < vocabSize; id++ {
		vocab[fmt.Sprintf("%cword%d", byteAlphabet()[' '], id)] = id
	}
	byteLevel := map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}
	return map[string]any{
		"version": "1.0", "truncation": nil, "padding": nil, "added_tokens": added, "normalizer": nil,
		"pre_tokenizer": byteLevel, "post_processor": nil, "decoder": byteLevel,
		"model": map[string]any{
			"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": nil, "end_of_word_suffix": nil,
			"fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": []string{},
		},
	}
}

// byteAlphabet maps each byte to the printable rune that byte-level tokenizers
// write for it (OpenAI's GPT-2 table).
func byteAlphabet() []rune {
	out := make([]rune, 256)
	next := rune(256)
	for b := range out {
		r := rune(b)
		if r >= '!' && r <= '~' || r >= 0xa1 && r <= 0xac || r >= 0xae {
			out[b] = r
			continue
		}
		out[b] = next
		next++
	}
	return out
}
