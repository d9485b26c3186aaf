package hub

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/hearth-dev/hearth/units"
)

// shapes reads the shapes of a safetensors file by tensor name.
func shapes(t *testing.T, file string) map[string][]int64 {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	entries := map[string]json.RawMessage{}
	if err := json.Unmarshal(text[8:8+binary.LittleEndian.Uint64(text)], &entries); err != nil {
		t.Fatal(err)
	}
	out := map[string][]int64{}
	for name, raw := range entries {
		var h header
		if name == "__metadata__" {
			continue
		}
		if err := json.Unmarshal(raw, &h); err != nil {
			t.Fatal(err)
		}
		out[name] = h.Shape
	}
	return out
}

func TestAWrittenAdapterFitsTheModelWithEqualOptions(t *testing.T) {
	t.Parallel()
	opts := ModelOptions{Size: units.MiB, Shards: 1, Seed: 7}
	model := shapes(t, filepath.Join(writeRepo(t, opts), "acme/tiny/model-00001-of-00001.safetensors"))
	dir := filepath.Join(t.TempDir(), "adapter")
	if err := WriteAdapter(dir, "acme/tiny", opts); err != nil {
		t.Fatal(err)
	}
	adapter := shapes(t, filepath.Join(dir, "adapter_model.safetensors"))
	pairs := 0
	for layer := range 1000 {
		for _, module := range []string{"q_proj", "v_proj"} {
			name := fmt.Sprintf("model.layers.%d.self_attn.%s.", layer, module)
			weight, ok := model[name+"weight"]
			if !ok {
				continue
			}
			pairs++
			a, b := adapter["base_model.model."+name+"lora_A.weight"], adapter["base_model.model."+name+"lora_B.weight"]
			if !slices.Equal(a, []int64{adapterRank, weight[1]}) || !slices.Equal(b, []int64{weight[0], adapterRank}) {
				t.Errorf("%s of shape %v has an adapter of shapes %v and %v", name, weight, a, b)
			}
		}
	}
	if pairs == 0 || len(adapter) != 2*pairs {
		t.Errorf("%d tensors in the adapter for %d projections", len(adapter), pairs)
	}
}

func TestEveryIDOfAWrittenModelHasATextOfItsOwn(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(writeRepo(t, ModelOptions{Size: units.MiB, Shards: 1}), "acme/tiny/tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	var parsed struct {
		Model struct{ Vocab map[string]int }
	}
	if err := json.Unmarshal(text, &parsed); err != nil {
		t.Fatal(err)
	}
	seen := map[int]bool{}
	for _, id := range parsed.Model.Vocab {
		seen[id] = true
	}
	if len(seen) != vocabSize || len(parsed.Model.Vocab) != vocabSize {
		t.Errorf("%d texts for %d ids, want %d of each", len(parsed.Model.Vocab), len(seen), vocabSize)
	}
}
