package engine

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Weights is what LoadWeights found in a model directory.
type Weights struct {
	Files   int
	Bytes   int64
	Tensors int
	// Digest is the artifact digest: SHA-256 over the sorted lines
	// "sha256 size path", as 64 hex digits.
	Digest string
}

// maxHeader is the longest safetensors header in bytes, as the reference
// reader has it.
const maxHeader = 100_000_000

// LoadWeights reads a model directory as an engine does at start: config.json
// must be JSON, every shard the index names must be there, every safetensors
// header must account for each byte of its file, and every byte of every file
// is read. Where want is not empty the artifact digest must equal it, so that
// a flipped byte in a tensor stops the engine too. Errors name the file.
func LoadWeights(ctx context.Context, dir, want string) (Weights, error) {
	var w Weights
	config, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return w, fmt.Errorf("read model config: %w", err)
	}
	if !json.Valid(config) {
		return w, fmt.Errorf("read model config: %s is not JSON", filepath.Join(dir, "config.json"))
	}
	paths, err := modelFiles(dir)
	if err != nil {
		return w, err
	}
	lines := make([]string, 0, len(paths))
	tensors := map[string]string{} // tensor to file
	for _, path := range paths {
		if err := ctx.Err(); err != nil {
			return w, err
		}
		sum, size, err := readWhole(filepath.Join(dir, path))
		if err != nil {
			return w, fmt.Errorf("read model file %s: %w", path, err)
		}
		if strings.HasSuffix(path, ".safetensors") {
			names, err := checkSafetensors(filepath.Join(dir, path), size)
			if err != nil {
				return w, fmt.Errorf("check model file %s: %w", path, err)
			}
			for _, name := range names {
				tensors[name] = path
			}
		}
		lines = append(lines, fmt.Sprintf("%s %d %s\n", sum, size, path))
		w.Files++
		w.Bytes += size
	}
	w.Tensors = len(tensors)
	if w.Tensors == 0 && !slices.ContainsFunc(paths, func(p string) bool { return strings.HasSuffix(p, ".gguf") }) {
		return w, fmt.Errorf("read model directory %s: no weights: want *.safetensors or *.gguf", dir)
	}
	if err := checkIndex(dir, tensors); err != nil {
		return w, err
	}
	slices.Sort(lines)
	sum := sha256.Sum256([]byte(strings.Join(lines, "")))
	w.Digest = hex.EncodeToString(sum[:])
	if want != "" && want != w.Digest {
		return w, fmt.Errorf("check model directory %s: artifact digest is %s, want %s: a file differs from what was published", dir, w.Digest, want)
	}
	return w, nil
}

// modelFiles lists the files below dir, following links as a hub cache's
// snapshot has them; slash separated, sorted.
func modelFiles(dir string) ([]string, error) {
	var paths []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			return fmt.Errorf("%s is not a regular file", path)
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		paths = append(paths, filepath.ToSlash(rel))
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list model directory: %w", err)
	}
	slices.Sort(paths)
	return paths, nil
}

func readWhole(path string) (sum string, size int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return "", 0, err
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if size, err = io.Copy(h, f); err != nil {
		return "", 0, err
	}
	return hex.EncodeToString(h.Sum(nil)), size, nil
}

// checkSafetensors checks that the header's tensors cover the file exactly and
// returns their names.
func checkSafetensors(path string, size int64) ([]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	var length [8]byte
	if _, err := io.ReadFull(f, length[:]); err != nil {
		return nil, fmt.Errorf("read header length: %w", err)
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > maxHeader || int64(n) > size-8 {
		return nil, fmt.Errorf("header of %d bytes does not fit into a file of %d", n, size)
	}
	header := make([]byte, n)
	if _, err := io.ReadFull(f, header); err != nil {
		return nil, fmt.Errorf("read header: %w", err)
	}
	var entries map[string]json.RawMessage
	if err := json.Unmarshal(header, &entries); err != nil {
		return nil, fmt.Errorf("read header: %w", err)
	}
	var names []string
	var spans [][2]int64
	for name, raw := range entries {
		if name == "__metadata__" {
			continue
		}
		var t struct {
			Offsets [2]int64 `json:"data_offsets"`
		}
		if err := json.Unmarshal(raw, &t); err != nil {
			return nil, fmt.Errorf("read tensor %q: %w", name, err)
		}
		names = append(names, name)
		spans = append(spans, t.Offsets)
	}
	slices.SortFunc(spans, func(a, b [2]int64) int { return int(a[0] - b[0]) })
	var at int64
	for _, s := range spans {
		if s[0] != at || s[1] < s[0] {
			return nil, fmt.Errorf("tensor data begins at %d, want %d", s[0], at)
		}
		at = s[1]
	}
	if end := 8 + int64(n) + at; end != size {
		return nil, fmt.Errorf("tensors end at byte %d of a file of %d", end, size)
	}
	return names, nil
}

// checkIndex checks that each tensor of the sharded index, where there is one,
// is in the shard it names.
func checkIndex(dir string, tensors map[string]string) error {
	const name = "model.safetensors.index.json"
	raw, err := os.ReadFile(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(raw, &index); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	for tensor, shard := range index.WeightMap {
		if tensors[tensor] != shard {
			return fmt.Errorf("check %s: tensor %q is not in %s", name, tensor, shard)
		}
	}
	return nil
}
