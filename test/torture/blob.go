package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/test/torture/victim"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// names are the files that a commit may have.
var names = []string{
	"config.json", "tokenizer.json", "sub/dir/extra.json", "README.md", "empty.bin",
	"model.safetensors", "shard-1.bin", "shard-2.bin", "shard-3.bin", "deep/down/shard-4.gguf",
}

// blob is one file's content.
type blob struct {
	file    string // where the driver keeps it
	size    int64
	sha     artifact.Digest
	tensors bool // it is a safetensors file
}

// makeBlob writes random content fit for a path; number is its own.
func makeBlob(dice *rand.Rand, file string, number int, path string) (*blob, error) {
	segment := int64(victim.SegmentSize)
	var head []byte
	size := int64(0)
	switch {
	case strings.HasSuffix(path, ".safetensors"):
		n := 2 * (1 + dice.Int64N(3<<20))
		text, err := json.Marshal(map[string]any{"w": map[string]any{"dtype": "BF16", "shape": []int64{n / 2}, "data_offsets": []int64{0, n}}})
		if err != nil {
			return nil, fmt.Errorf("make file: %w", err)
		}
		head = append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
		size = n
	case strings.HasSuffix(path, ".json"), strings.HasSuffix(path, ".md"):
		head = fmt.Appendf(nil, "{\"made\": \"%x\"}\n", dice.Uint64())
	case path == "empty.bin":
	default:
		// The lengths around a segment's are where files begin, end and resume.
		edges := []int64{1, segment - 1, segment, segment + 1, 8 * segment, 9*segment + 1}
		if size = edges[dice.IntN(len(edges))]; dice.IntN(2) == 0 {
			size = dice.Int64N(6 << 20)
		}
	}
	var seed [32]byte
	for i := range seed {
		seed[i] = byte(dice.Uint32())
	}
	f, err := os.Create(file)
	if err != nil {
		return nil, fmt.Errorf("make file: %w", err)
	}
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(f, sum), io.MultiReader(bytes.NewReader(head), io.LimitReader(rand.NewChaCha8(seed), size)))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("make file: %w", err)
	}
	// The origin knows files by path, length and time: no two are of one time.
	at := time.Unix(1_000_000_000+int64(number), 0)
	if err := os.Chtimes(file, at, at); err != nil {
		return nil, fmt.Errorf("make file: %w", err)
	}
	return &blob{file: file, size: n, sha: artifact.Digest(sum.Sum(nil)), tensors: strings.HasSuffix(path, ".safetensors")}, nil
}

// differs reads from r, which claims to be the blob from an offset on, and
// gives the number of bytes read and where the first wrong one is, -1 if none.
func (b *blob) differs(r io.Reader, off int64) (n, wrong int64, err error) {
	f, err := os.Open(b.file)
	if err != nil {
		return 0, -1, fmt.Errorf("read what was published: %w", err)
	}
	defer func() { _ = f.Close() }()
	got, want := make([]byte, 64<<10), make([]byte, 64<<10)
	wrong = -1
	for {
		k, readErr := r.Read(got)
		m, _ := f.ReadAt(want[:k], off+n)
		if wrong < 0 && (m != k || !bytes.Equal(got[:k], want[:k])) {
			wrong = off + n
			for i := range min(k, m) {
				if got[i] != want[i] {
					wrong += int64(i)
					break
				}
			}
		}
		n += int64(k)
		if errors.Is(readErr, io.EOF) {
			return n, wrong, nil
		}
		if readErr != nil {
			return n, wrong, readErr
		}
	}
}
