package bench

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/hearth-dev/hearth/router/index"
	"github.com/hearth-dev/hearth/router/pick"
)

// pickRow times one decision over 100 endpoints.
func pickRow() (Row, error) {
	candidates := make([]pick.Candidate, 100)
	for i := range candidates {
		candidates[i] = pick.Candidate{
			ID: fmt.Sprintf("node-%d/engine-%d", i/4, i%4), MatchedBlocks: i % 7, Running: i % 13, InFlight: i % 5,
			InFlightPromptTokens: 100 * (i % 3), KVUsage: float64(i%10) / 10, PrefillRate: 8000,
		}
	}
	request := &pick.Request{Model: benchModel, Keys: make([]pick.Key, 32), PromptBytes: 8192, PromptTokens: 2048, MaxTokens: 256}
	for i := range request.Keys {
		request.Keys[i] = uint64(i) * 0x9e3779b97f4a7c15
	}
	return alone(Row{Name: "pick_100_endpoints", Unit: "us", Better: lower, Aim: 20, Note: "one decision, in process"}, 5, func() (float64, error) {
		return nanoseconds(func(b *testing.B) {
			for i := range b.N {
				request.Tie = uint64(i)
				pick.Pick(request, candidates, pick.Default())
			}
		}) / 1e3, nil
	})
}

// indexRow is the heap of an index that holds a million prefix blocks.
func indexRow() (Row, error) {
	const blocks = 1 << 20
	return alone(Row{Name: "prefix_block_memory", Unit: "B/block", Better: lower, Aim: 64, Note: "heap of an index full of 2^20 blocks over 16 endpoints"}, 1, func() (float64, error) {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		x := index.New(index.Options{MaxBlocks: blocks})
		keys := make([]uint64, 256)
		for s := range 16 {
			slot := x.Add(blocks / 16)
			for i := range blocks / 16 / len(keys) {
				for j := range keys {
					keys[j] = (uint64(s)<<40 | uint64(i)<<16 | uint64(j)) * 0x9e3779b97f4a7c15
				}
				x.Insert(slot, keys, uint64(s))
			}
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		held := x.Len()
		runtime.KeepAlive(x)
		if held == 0 {
			return 0, fmt.Errorf("fill index: it holds nothing")
		}
		return float64(after.HeapAlloc-before.HeapAlloc) / float64(held), nil
	})
}
