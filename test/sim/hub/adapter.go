package hub

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/hearth-dev/hearth/units"
)

// adapterRank is the inner dimension of a generated adapter.
const adapterRank = 8

// WriteAdapter generates in dir a LoRA adapter, in the form of the PEFT
// library, for the query and value projections of the model that WriteModel
// makes with equal options. It is strong enough to change what that model
// says. base is the model's name as the adapter tells it.
func WriteAdapter(dir, base string, opts ModelOptions) error {
	if opts.Size == 0 {
		opts.Size = 256 * units.MiB
	}
	hidden, layers := modelShape(int64(opts.Size))
	var tensors []tensor
	for l := range layers {
		for _, t := range layerTensors(hidden, l) {
			module := filepath.Ext(t.name[:len(t.name)-len(".weight")])
			if module != ".q_proj" && module != ".v_proj" {
				continue
			}
			name := "base_model.model." + t.name[:len(t.name)-len("weight")]
			tensors = append(tensors,
				tensor{name + "lora_A.weight", []int64{adapterRank, t.shape[1]}, false},
				tensor{name + "lora_B.weight", []int64{t.shape[0], adapterRank}, false})
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write adapter: %w", err)
	}
	if err := writeShard(filepath.Join(dir, "adapter_model.safetensors"), tensors, opts.Seed+1); err != nil {
		return fmt.Errorf("write adapter: %w", err)
	}
	return writeJSONFile(filepath.Join(dir, "adapter_config.json"), map[string]any{
		"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": adapterRank, "lora_alpha": 64 * adapterRank, "lora_dropout": 0.0,
		"bias": "none", "target_modules": []string{"q_proj", "v_proj"}, "base_model_name_or_path": base,
	})
}
