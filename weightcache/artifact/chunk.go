package artifact

import (
	"crypto/sha256"
	"encoding"
	"errors"
	"fmt"
	"hash"
	"slices"
)

// ChunkSize is the fixed length of a chunk in bytes; the last chunk of a file
// is shorter or equal.
const ChunkSize = 16 << 20

// ChunkCount is the number of chunks of a file of size bytes; an empty file
// has one empty chunk.
func ChunkCount(size int64) int {
	return int(max(1, (size+ChunkSize-1)/ChunkSize))
}

// Chunker computes a file's SHA-256 and its chunk list in one pass: entry i is
// SHA-256's own chaining value (eight big-endian words) after chunk i, the
// last entry is the file's digest. A chunk is thus checked alone by running
// SHA-256 from the entry before it to its own, and a file whose chunks were
// all checked, in any order, has its digest proven without a second pass.
// The zero value is not ready; use NewChunker.
type Chunker struct {
	h      hash.Hash
	size   int64
	chunks []Digest
}

// NewChunker starts at offset 0.
func NewChunker() *Chunker { return &Chunker{h: sha256.New()} }

// Write hashes the next bytes of the file; it never fails.
func (c *Chunker) Write(p []byte) (int, error) {
	written := len(p)
	for len(p) > 0 {
		if c.size > 0 && c.size%ChunkSize == 0 && int64(len(c.chunks)) < c.size/ChunkSize {
			c.chunks = append(c.chunks, chaining(c.h))
		}
		n := min(int64(len(p)), ChunkSize-c.size%ChunkSize)
		_, _ = c.h.Write(p[:n])
		c.size += n
		p = p[n:]
	}
	return written, nil
}

// Size is the number of bytes hashed.
func (c *Chunker) Size() int64 { return c.size }

// Sum gives the digest of the bytes so far and their chunk list.
func (c *Chunker) Sum() (Digest, []Digest) {
	d := Digest(c.h.Sum(nil))
	return d, append(slices.Clip(c.chunks), d)
}

// stateMagic and stateSize describe crypto/sha256's marshalled state: magic,
// eight words, one block of pending input, the length as a big-endian uint64.
const (
	stateMagic = "sha\x03"
	stateSize  = len(stateMagic) + sha256.Size + sha256.BlockSize + 8
)

// chaining reads the chaining value at a block boundary.
func chaining(h hash.Hash) Digest {
	var d Digest
	if m, ok := h.(encoding.BinaryMarshaler); ok {
		if state, err := m.MarshalBinary(); err == nil && len(state) == stateSize {
			copy(d[:], state[len(stateMagic):])
		}
	}
	return d
}

// ErrChunk is wrapped where a chunk's bytes are not those of its list.
var ErrChunk = errors.New("chunk differs")

// CheckChunk verifies the bytes of chunk i of a file of size bytes against its
// chunk list, alone and in any order. It is the reading side of FORMAT.md's
// chunk list: tests hold every list that is made to it. Errors wrap ErrChunk, or
// ErrInvalid for a chunk that does not exist.
func CheckChunk(chunks []Digest, size int64, i int, data []byte) error {
	if len(chunks) != ChunkCount(size) || i < 0 || i >= len(chunks) {
		return fmt.Errorf("check chunk %d: %w: the list has %d", i, ErrInvalid, len(chunks))
	}
	off := int64(i) * ChunkSize
	if want := min(ChunkSize, size-off); int64(len(data)) != want {
		return fmt.Errorf("check chunk %d: %w: %d bytes, want %d", i, ErrChunk, len(data), want)
	}
	h := sha256.New()
	if i > 0 {
		state := make([]byte, stateSize)
		copy(state, stateMagic)
		copy(state[len(stateMagic):], chunks[i-1][:])
		for b := range 8 {
			state[stateSize-1-b] = byte(uint64(off) >> (8 * b))
		}
		restore, ok := h.(encoding.BinaryUnmarshaler)
		if !ok {
			return fmt.Errorf("check chunk %d: %w: sha256 cannot start from a chaining value", i, ErrInvalid)
		}
		if err := restore.UnmarshalBinary(state); err != nil {
			return fmt.Errorf("check chunk %d: %w: %w", i, ErrInvalid, err)
		}
	}
	_, _ = h.Write(data)
	got := chaining(h)
	if i == len(chunks)-1 {
		got = Digest(h.Sum(nil))
	}
	if got != chunks[i] {
		return fmt.Errorf("check chunk %d: %w", i, ErrChunk)
	}
	return nil
}
