package pool

import (
	"container/list"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/router/pick"
)

// cache is an engine's prefix cache: token blocks in LRU order, of which a
// prompt uses the leading ones that are there.
type cache struct {
	capacity int
	order    *list.List
	byBlock  map[uint64]*list.Element
}

func newCache(capacity int) *cache {
	return &cache{capacity: capacity, order: list.New(), byBlock: map[uint64]*list.Element{}}
}

// serve counts the leading blocks found and keeps all blocks, the first the
// most recent, as engines free a prompt's blocks last to first.
func (c *cache) serve(blocks []uint64) (hits int) {
	for hits < len(blocks) && c.byBlock[blocks[hits]] != nil {
		hits++
	}
	for _, b := range slices.Backward(blocks) {
		if el := c.byBlock[b]; el != nil {
			c.order.MoveToFront(el)
			continue
		}
		if len(c.byBlock) == c.capacity {
			last := c.order.Back()
			delete(c.byBlock, c.order.Remove(last).(uint64))
		}
		c.byBlock[b] = c.order.PushFront(b)
	}
	return hits
}

// world is a pool of simulated engines, and the prompts of conversations.
type world struct {
	pools  *Pools
	caches map[string]*cache
	hits   int
	cached int // by prediction, in tokens
}

const tokensPerBlock = 16 // of the engines' blocks: 64 bytes, four in one of ours

func newWorld(t testing.TB, policy string, engines, kvTokens int) *world {
	t.Helper()
	cfg := oneModel()
	cfg.Policy = policy
	cfg.Pools = []PoolConfig{{Name: "p", KVCapacityTokens: kvTokens}}
	w := &world{caches: map[string]*cache{}}
	for i := range engines {
		url := fmt.Sprintf("http://127.0.0.1:%d", 9000+i)
		cfg.Pools[0].Endpoints = append(cfg.Pools[0].Endpoints, EndpointConfig{URL: url})
		w.caches[url] = newCache(kvTokens / tokensPerBlock)
	}
	var err error
	if w.pools, err = New(cfg, Options{}); err != nil {
		t.Fatal(err)
	}
	return w
}

// send puts the first blocks of a conversation to the router and lets the
// chosen engine serve it.
func (w *world) send(t testing.TB, conversation uint64, blocks int, tie uint64) {
	t.Helper()
	keys := promptKeys(conversation, blocks)
	req := &pick.Request{
		Model: "m", Keys: keys, PromptBytes: blocks * pick.BlockBytes, PromptTokens: blocks * pick.BlockBytes / 4, Tie: tie,
	}
	r, err := w.pools.Acquire(req, nil)
	if err != nil {
		t.Fatal(err)
	}
	var tokens []uint64
	for _, k := range keys {
		tokens = append(tokens, k, k+1, k+2, k+3)
	}
	hit := w.caches[r.EndpointID].serve(tokens) * tokensPerBlock
	w.hits += hit
	w.cached += r.Decision().CreditTokens
	r.FirstByte()
	r.Done(Outcome{Usage: true, PromptTokens: req.PromptTokens, CachedTokens: hit, TTFT: time.Duration(req.PromptTokens-hit+1) * 100 * time.Microsecond})
}

// turns sends conversations turn by turn in one fixed order and gives the
// tokens that engines with endless caches and perfect routing would find.
func (w *world) turns(t testing.TB, conversations, turns int) (ideal int) {
	t.Helper()
	for turn := 1; turn <= turns; turn++ {
		for c := range conversations {
			w.send(t, uint64(c)+100, 8*turn, uint64(turn*conversations+c))
			ideal += 8 * (turn - 1) * pick.BlockBytes / 4
		}
	}
	return ideal
}

func TestConversationsFindTheirPrefixTwiceAsOftenAsByTurns(t *testing.T) {
	t.Parallel()
	own, turns := newWorld(t, PolicyHearth, 4, 200_000), newWorld(t, PolicyRoundRobin, 4, 200_000)
	ideal := own.turns(t, 9, 6)
	turns.turns(t, 9, 6)
	t.Logf("hits %d of ideal %d, by turns %d", own.hits, ideal, turns.hits)
	if float64(own.hits) < 0.95*float64(ideal) || own.hits < 2*turns.hits {
		t.Errorf("hits %d of ideal %d, by turns %d", own.hits, ideal, turns.hits)
	}
	used := map[pick.Reason]uint64{}
	for reason, n := range own.pools.Stats().Pools[0].Reasons {
		used[reason] += n
	}
	if used[pick.ReasonPrefix] != 9*5 || used[pick.ReasonCold] != 9 {
		t.Errorf("decided by %v", used)
	}
}

func TestThePredictionFollowsTheEnginesWhereTheyForget(t *testing.T) {
	t.Parallel()
	// 40 conversations of up to 6,144 tokens each do not fit four caches of 24,000.
	w := newWorld(t, PolicyHearth, 4, 24_000)
	rng := rand.New(rand.NewPCG(1, 2))
	length := map[uint64]int{}
	for i := range uint64(3000) {
		// Some conversations are more alive than others.
		c := min(rng.Uint64N(40), rng.Uint64N(40))
		length[c] = min(length[c]+4, 96)
		w.send(t, c, length[c], i)
	}
	t.Logf("engines found %d tokens, predicted %d", w.hits, w.cached)
	if ratio := float64(w.cached) / float64(w.hits); ratio < 0.95 || ratio > 1.05 {
		t.Errorf("predicted %d tokens, the engines found %d", w.cached, w.hits)
	}
}

func TestColdConversationsSpreadOverTheEnginesMemory(t *testing.T) {
	t.Parallel()
	w := newWorld(t, PolicyHearth, 4, 400_000)
	for c := range uint64(200) {
		w.send(t, c, 16, c)
	}
	for _, e := range w.pools.Stats().Endpoints {
		if e.HeldBlocks < 200*16/4/2 || e.HeldBlocks > 200*16/4*3/2 {
			t.Errorf("%s holds %d of %d blocks", e.ID, e.HeldBlocks, 200*16)
		}
	}
}

// TestAHotPrefixSpreadsAsItsHolderFills holds many requests with one long
// system prompt in flight at once.
func TestAHotPrefixSpreadsAsItsHolderFills(t *testing.T) {
	t.Parallel()
	cfg := oneModel()
	cfg.Pools = []PoolConfig{{Name: "p"}}
	for i := range 4 {
		cfg.Pools[0].Endpoints = append(cfg.Pools[0].Endpoints, EndpointConfig{URL: fmt.Sprintf("http://127.0.0.1:%d", 9000+i), MaxRunning: 16})
	}
	pools, err := New(cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	system := promptKeys(1, 90)
	first := map[string]int{}
	var last map[string]int
	for i := range uint64(64) {
		keys := append(system[:90:90], promptKeys(1000+i, 10)...)
		r, err := pools.Acquire(&pick.Request{Model: "m", Keys: keys, PromptBytes: 100 * 256, PromptTokens: 6400, Tie: i}, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.FirstByte()
		if i < 8 {
			first[r.EndpointID]++
		}
		last = map[string]int{}
		for _, e := range pools.Stats().Endpoints {
			last[e.ID] = e.InFlight
		}
	}
	if len(first) != 1 {
		t.Errorf("eight requests of one prefix went to %v, want one endpoint", first)
	}
	for id, n := range last {
		if n > 28 {
			t.Errorf("%s has %d of 64 requests, its engine runs 16 at once", id, n)
		}
	}
	t.Logf("in flight: %v", last)
}
