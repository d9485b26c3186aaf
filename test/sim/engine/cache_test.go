package engine

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
)

func TestBlocksOfAPrefixAreAPrefixOfTheBlocks(t *testing.T) {
	t.Parallel()
	text := []byte(strings.Repeat("0123456789", 50))
	whole := Blocks(text, 4)
	if len(whole) != 500/16 {
		t.Fatalf("blocks: got %d, want %d", len(whole), 500/16)
	}
	for i, h := range Blocks(text[:333], 4) {
		if h != whole[i] {
			t.Fatalf("block %d differs", i)
		}
	}
	text[0]++
	if Blocks(text, 4)[30] == whole[30] {
		t.Error("a change in the first block left a later hash alone")
	}
}

func TestOldestChainIsEvictedTailFirst(t *testing.T) {
	t.Parallel()
	c := newBlockCache()
	for _, chain := range [][]uint64{{1, 2, 3}, {11, 12}} {
		c.insert(chain, 0)
		c.release(chain)
	}
	c.shrink(3)
	if n := c.match([]uint64{1, 2, 3}, 9); n != 1 {
		t.Errorf("old chain: %d blocks left, want its first alone", n)
	}
	if n := c.match([]uint64{11, 12}, 9); n != 2 {
		t.Errorf("young chain: %d blocks left, want 2", n)
	}
	c.shrink(0)
	if len(c.blocks) != 3 {
		t.Errorf("referenced blocks were evicted: %d left", len(c.blocks))
	}
}

func TestCacheNeverHoldsMoreThanItsCapacity(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, func(o *Options) { o.KVTokens = 160 }) // ten blocks
		for i := range 20 {
			prompt := strings.Repeat(fmt.Sprintf("%04d", i), 50)
			if r := post(t.Context(), e, "/v1/completions", `{"model":"m","prompt":"`+prompt+`","max_tokens":8}`); r.Status != 200 {
				t.Fatal(r.Raw)
			}
			if n := len(e.mu.cache.blocks); n > 10 {
				t.Fatalf("%d blocks cached, want at most 10", n)
			}
		}
		last := strings.Repeat("0019", 50)
		r := post(t.Context(), e, "/v1/completions", `{"model":"m","prompt":"`+last+`","max_tokens":8}`)
		if r.Usage.Details["cached_tokens"] != 48 {
			t.Errorf("the latest prompt is not cached: %s", r.Raw)
		}
	})
}
