package engine

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// writeModel makes a directory of two shards and returns it.
func writeModel(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	put := func(name, content string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("config.json", `{"model_type":"sim"}`)
	put("model.safetensors.index.json", `{"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}}`)
	for i, name := range []string{"a", "b"} {
		header := fmt.Sprintf(`{%q:{"dtype":"U8","shape":[64],"data_offsets":[0,64]}}`, name)
		length := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
		put(fmt.Sprintf("model-%d.safetensors", i+1), string(length)+header+strings.Repeat(name, 64))
	}
	return dir
}

func TestAWholeModelLoadsAndHasAStableDigest(t *testing.T) {
	t.Parallel()
	w, err := LoadWeights(t.Context(), writeModel(t), "")
	if err != nil {
		t.Fatal(err)
	}
	again, err := LoadWeights(t.Context(), writeModel(t), w.Digest)
	if err != nil || again != w || w.Files != 4 || w.Tensors != 2 {
		t.Errorf("second load: %+v, %+v, %v", w, again, err)
	}
}

func TestADamagedModelStopsTheEngineAndNamesTheFile(t *testing.T) {
	t.Parallel()
	good, err := LoadWeights(t.Context(), writeModel(t), "")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		damage func(dir string) error
		want   string
	}{
		"no config":     {func(d string) error { return os.Remove(filepath.Join(d, "config.json")) }, "config.json"},
		"missing shard": {func(d string) error { return os.Remove(filepath.Join(d, "model-2.safetensors")) }, "model-2.safetensors"},
		"short shard":   {func(d string) error { return os.Truncate(filepath.Join(d, "model-1.safetensors"), 100) }, "model-1.safetensors"},
		"empty shard":   {func(d string) error { return os.Truncate(filepath.Join(d, "model-1.safetensors"), 0) }, "model-1.safetensors"},
		"bad index": {func(d string) error {
			return os.WriteFile(filepath.Join(d, "model.safetensors.index.json"), []byte("{"), 0o600)
		}, "index.json"},
		"flipped byte": {func(d string) error {
			path := filepath.Join(d, "model-2.safetensors")
			raw, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			raw[len(raw)-1] ^= 1
			return os.WriteFile(path, raw, 0o600)
		}, "differs from what was published"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := writeModel(t)
			if err := c.damage(dir); err != nil {
				t.Fatal(err)
			}
			if _, err := LoadWeights(t.Context(), dir, good.Digest); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error: got %v, want one with %q", err, c.want)
			}
		})
	}
}
