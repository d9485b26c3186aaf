package engine

import (
	"container/list"
	"slices"

	"github.com/cespare/xxhash/v2"
)

// TokenBytes is the length of a token in bytes of rendered text.
const TokenBytes = 4

// Tokens is the number of tokens in n bytes of rendered text; a partial token
// at the end counts.
func Tokens(n int) int { return (n + TokenBytes - 1) / TokenBytes }

// Blocks gives the chained hashes of the full blocks of a rendered text: hash
// i covers every byte up to the end of block i.
func Blocks(text []byte, blockTokens int) []uint64 {
	size := blockTokens * TokenBytes
	hashes := make([]uint64, 0, len(text)/size)
	var d xxhash.Digest
	d.Reset()
	for len(text) >= size {
		_, _ = d.Write(text[:size]) // never fails
		hashes = append(hashes, d.Sum64())
		text = text[size:]
	}
	return hashes
}

// blockCache is an LRU of KV blocks. Blocks that a running request uses are
// referenced and not evictable; the rest are evicted oldest first, a child
// before its parent. It is not safe for concurrent use.
type blockCache struct {
	blocks map[uint64]*cachedBlock
	idle   *list.List // of *cachedBlock without references, next to go in front
}

type cachedBlock struct {
	hash uint64
	refs int
	at   *list.Element // in idle, nil while referenced
}

func newBlockCache() *blockCache {
	return &blockCache{blocks: map[uint64]*cachedBlock{}, idle: list.New()}
}

// match references the leading blocks that are cached, at most limit, and
// returns how many.
func (c *blockCache) match(hashes []uint64, limit int) int {
	n := 0
	for n < len(hashes) && n < limit {
		b, ok := c.blocks[hashes[n]]
		if !ok {
			break
		}
		c.ref(b)
		n++
	}
	return n
}

// insert references hashes[have:], of which the first have are referenced by
// the caller already, adding the blocks that are missing.
func (c *blockCache) insert(hashes []uint64, have int) {
	for _, h := range hashes[have:] {
		b, ok := c.blocks[h]
		if !ok {
			b = &cachedBlock{hash: h}
			c.blocks[h] = b
		}
		c.ref(b)
	}
}

// release drops one reference of each block. The last of a chain becomes idle
// first, so that it is evicted before the blocks it depends on.
func (c *blockCache) release(hashes []uint64) {
	for _, hash := range slices.Backward(hashes) {
		b, ok := c.blocks[hash]
		if !ok || b.refs == 0 {
			continue
		}
		if b.refs--; b.refs == 0 {
			b.at = c.idle.PushBack(b)
		}
	}
}

// shrink evicts idle blocks until at most n are left.
func (c *blockCache) shrink(n int) {
	for c.idle.Len() > max(n, 0) {
		b, ok := c.idle.Remove(c.idle.Front()).(*cachedBlock)
		if !ok {
			return
		}
		delete(c.blocks, b.hash)
	}
}

// clear forgets every block. No block may be referenced.
func (c *blockCache) clear() {
	clear(c.blocks)
	c.idle.Init()
}

func (c *blockCache) ref(b *cachedBlock) {
	if b.at != nil {
		c.idle.Remove(b.at)
		b.at = nil
	}
	b.refs++
}
