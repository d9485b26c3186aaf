package safetensors

import (
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
)

// IndexSuffix ends the name of a sharded checkpoint's index.
const IndexSuffix = ".safetensors.index.json"

// MaxIndexBytes is the longest index read, in bytes: 64 MiB.
const MaxIndexBytes = 64 << 20

// ErrIndex is wrapped by every refusal of an index.
var ErrIndex = errors.New("sharded index is broken")

// Index maps tensors to the shard that holds them.
type Index struct {
	// Shards are the files named, relative to the index, sorted.
	Shards []string
	// Tensors maps a tensor's name to its shard.
	Tensors map[string]string
	// TotalSize is what the index claims as bytes of all tensors, 0 if unsaid;
	// it is often wrong and decides nothing.
	TotalSize int64
}

// ParseIndex reads an index. Shards must be clean relative paths that stay
// below the index's folder; at least one must be named.
func ParseIndex(data []byte) (*Index, error) {
	var raw struct {
		Metadata  json.RawMessage   `json:"metadata"`
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(data, &raw); err != nil {
		return nil, fmt.Errorf("parse sharded index: %w: %w", ErrIndex, err)
	}
	if len(raw.WeightMap) == 0 {
		return nil, fmt.Errorf("parse sharded index: %w: no shard is named", ErrIndex)
	}
	idx := &Index{Tensors: raw.WeightMap}
	seen := map[string]bool{}
	for tensor, shard := range raw.WeightMap {
		if shard == "" || path.IsAbs(shard) || path.Clean(shard) != shard || shard == ".." || strings.HasPrefix(shard, "../") {
			return nil, fmt.Errorf("parse sharded index: %w: tensor %.80q is in %.80q, which is no path below the index", ErrIndex, tensor, shard)
		}
		if !seen[shard] {
			seen[shard] = true
			idx.Shards = append(idx.Shards, shard)
		}
	}
	slices.Sort(idx.Shards)
	var metadata struct {
		TotalSize int64 `json:"total_size"`
	}
	if len(raw.Metadata) > 0 && json.Unmarshal(raw.Metadata, &metadata) == nil {
		idx.TotalSize = metadata.TotalSize
	}
	return idx, nil
}

// CheckFiles refuses an index one of whose shards is not among the files.
func (x *Index) CheckFiles(has func(shard string) bool) error {
	for _, shard := range x.Shards {
		if !has(shard) {
			return fmt.Errorf("check sharded index: %w: shard %.80q is missing", ErrIndex, shard)
		}
	}
	return nil
}

// CheckShard refuses an index that places a tensor in a shard whose header
// lacks it. Tensors the index does not name are allowed: engines ignore them.
func (x *Index) CheckShard(shard string, h *Header) error {
	for tensor, in := range x.Tensors {
		if in != shard {
			continue
		}
		if _, found := h.Tensors[tensor]; !found {
			return fmt.Errorf("check sharded index: %w: shard %.80q has no tensor %.80q", ErrIndex, shard, tensor)
		}
	}
	return nil
}
