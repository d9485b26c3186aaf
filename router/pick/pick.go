package pick

import (
	"math"

	"github.com/cespare/xxhash/v2"
)

// Reason says in one word why an endpoint was chosen. The set is bounded, so
// that it may label a metric.
type Reason string

// Reasons of a Decision.
const (
	ReasonNone        Reason = "none"         // no candidate may take a request
	ReasonOnlyOne     Reason = "only-one"     // one candidate of its tier
	ReasonPinned      Reason = "pinned"       // the request names its endpoint
	ReasonPrefix      Reason = "prefix"       // it holds the longest prefix at a bearable load
	ReasonSaturated   Reason = "saturated"    // another holds more of the prefix and has too much to do
	ReasonCold        Reason = "cold"         // nobody holds the prefix: its home by rendezvous hash
	ReasonLeastLoaded Reason = "least-loaded" // the least cost, nothing else to tell them apart
	ReasonTie         Reason = "tie"          // one of several equal ones, by Request.Tie
	ReasonTurn        Reason = "round-robin"  // Config.RoundRobin
	ReasonLeastBad    Reason = "least-bad"    // only unhealthy ones are left
	ReasonLastResort  Reason = "last-resort"  // only suspended ones are left
)

// Reasons lists every Reason, for metrics that want the whole set.
func Reasons() []Reason {
	return []Reason{
		ReasonNone, ReasonOnlyOne, ReasonPinned, ReasonPrefix, ReasonSaturated, ReasonCold,
		ReasonLeastLoaded, ReasonTie, ReasonTurn, ReasonLeastBad, ReasonLastResort,
	}
}

// Config holds the weights of the choice. The zero value of a field means the
// value of Default.
type Config struct {
	// PrefillRate is prompt tokens per second where a candidate has none.
	PrefillRate float64
	// StickySeconds is what a whole matched prompt is worth beyond the prefill
	// it saves: the memory not duplicated and the turns that follow. A
	// conversation leaves its endpoint when that one is so much slower.
	StickySeconds float64
	// DecodeSeconds is what one more running request costs a new one.
	DecodeSeconds float64
	// DecodeTokenSeconds is what one token of context held by requests that
	// decode costs a new request.
	DecodeTokenSeconds float64
	// ServiceSeconds is how long a request holds a slot, for the wait in a queue.
	ServiceSeconds float64
	// KVFullSeconds is what an endpoint without free KV costs; from KVFree on
	// the cost rises in a line.
	KVFullSeconds float64
	// DegradedSeconds is the handicap of a degraded endpoint.
	DegradedSeconds float64
	// NearSeconds is the difference of cost below which candidates are equal to
	// a cold prefix, so that routers with slightly different views agree.
	NearSeconds float64
	// LoadHalfLife is the age in seconds, past the first FreshSeconds, at which
	// a reported load counts half.
	LoadHalfLife float64
	// RoundRobin takes turns by Request.Tie and looks at nothing but health: the
	// reference that the policy is compared with.
	RoundRobin bool
}

// FreshSeconds is the age up to which a load report counts in full, and KVFree
// the KV usage from which on an endpoint counts as short of KV.
const (
	FreshSeconds = 2.0
	KVFree       = 0.85
)

// Default returns the weights that the router starts with.
func Default() Config {
	return Config{
		PrefillRate:        8000,
		StickySeconds:      0.5,
		DecodeSeconds:      0.03,
		DecodeTokenSeconds: 2e-6,
		ServiceSeconds:     2,
		KVFullSeconds:      1,
		DegradedSeconds:    5,
		NearSeconds:        0.04,
		LoadHalfLife:       5,
	}
}

// withDefaults fills fields that are zero or not a positive number.
func (c Config) withDefaults() Config {
	d := Default()
	for _, f := range [...]struct {
		value *float64
		std   float64
	}{
		{&c.PrefillRate, d.PrefillRate},
		{&c.StickySeconds, d.StickySeconds},
		{&c.DecodeSeconds, d.DecodeSeconds},
		{&c.DecodeTokenSeconds, d.DecodeTokenSeconds},
		{&c.ServiceSeconds, d.ServiceSeconds},
		{&c.KVFullSeconds, d.KVFullSeconds},
		{&c.DegradedSeconds, d.DegradedSeconds},
		{&c.NearSeconds, d.NearSeconds},
		{&c.LoadHalfLife, d.LoadHalfLife},
	} {
		if !(*f.value > 0) || math.IsInf(*f.value, 0) {
			*f.value = f.std
		}
	}
	return c
}

// Decision is the answer of Pick.
type Decision struct {
	// Index is the chosen candidate, -1 where none may take a request.
	Index  int
	Reason Reason
	// Alarm is set when the chosen endpoint is unhealthy or suspended: the pool
	// serves with the least bad it has.
	Alarm bool
	// CreditTokens is how much of the prompt the endpoint is expected to find in
	// its cache, UncachedTokens what it has to compute.
	CreditTokens, UncachedTokens int
	// MatchedBlocks is the candidate's count of leading keys.
	MatchedBlocks int
	// CostSeconds is the cost by which it was chosen; 0 under RoundRobin.
	CostSeconds float64
}

// Term is what one candidate's cost is made of, in seconds.
type Term struct {
	ID     string  `json:"id"`
	Tier   string  `json:"tier"`   // usable, unhealthy, suspended, both or draining
	Chosen bool    `json:"chosen"` // Pick took it
	Cost   float64 `json:"costSeconds"`
	// The parts of Cost.
	Prefill  float64 `json:"prefillSeconds"`  // the prompt's uncached tokens
	Backlog  float64 `json:"backlogSeconds"`  // uncached tokens in flight before it
	Decode   float64 `json:"decodeSeconds"`   // requests and context it decodes
	Queue    float64 `json:"queueSeconds"`    // wait for a slot
	Memory   float64 `json:"memorySeconds"`   // KV near full
	Sticky   float64 `json:"stickySeconds"`   // the part of the prompt that is not there
	Handicap float64 `json:"handicapSeconds"` // degraded device
	// What they were computed from.
	MatchedBlocks int     `json:"matchedBlocks"`
	CreditTokens  int     `json:"creditTokens"`
	Load          float64 `json:"load"`       // requests believed to run or wait there
	Confidence    float64 `json:"confidence"` // in the reported load, 0..1
}

// tier orders candidates by health; a lower one is used while it has a member.
type tier uint8

const (
	tierUsable tier = iota
	// An unhealthy device still answers; a suspended endpoint did not connect,
	// and its half-open probe brings it back without risking more requests.
	tierUnhealthy
	tierSuspended
	tierBoth
	tierDraining // never used
)

func (t tier) String() string {
	return [...]string{"usable", "unhealthy", "suspended", "both", "draining"}[t]
}

func tierOf(c *Candidate) tier {
	switch {
	case c.Draining:
		return tierDraining
	case c.Suspended && c.Health >= Unhealthy:
		return tierBoth
	case c.Suspended:
		return tierSuspended
	case c.Health >= Unhealthy:
		return tierUnhealthy
	}
	return tierUsable
}

// Pick chooses the candidate of least cost in the best tier of health. A
// candidate that drains is never chosen, one that a request pins is the only
// one that may be; every other property only weighs. It allocates nothing for
// up to 256 candidates.
func Pick(req *Request, candidates []Candidate, cfg Config) Decision {
	cfg = cfg.withDefaults()
	if req.Pin != "" {
		return pickPinned(req, candidates, &cfg)
	}
	best, members, last := tierDraining, 0, -1
	for i := range candidates {
		switch t := tierOf(&candidates[i]); {
		case t < best:
			best, members, last = t, 1, i
		case t == best && t != tierDraining:
			members, last = members+1, i
		}
	}
	if best == tierDraining {
		return Decision{Index: -1, Reason: ReasonNone}
	}
	if cfg.RoundRobin {
		return pickTurn(req, candidates, best, members)
	}
	if members == 1 {
		return decide(req, candidates, &cfg, last, best, ReasonOnlyOne)
	}
	var buffer [256]float64
	among := field{req: req, candidates: candidates, cfg: &cfg, tier: best, members: members}
	if len(candidates) <= len(buffer) {
		among.costs = buffer[:len(candidates)]
	} else {
		among.costs = make([]float64, len(candidates))
	}
	index, reason := among.pick()
	return decide(req, candidates, &cfg, index, best, reason)
}

// Explain does what Pick does and gives the cost of every candidate.
func Explain(req *Request, candidates []Candidate, cfg Config) (Decision, []Term) {
	d := Pick(req, candidates, cfg)
	cfg = cfg.withDefaults()
	terms := make([]Term, len(candidates))
	for i := range candidates {
		terms[i] = termsOf(req, &candidates[i], &cfg)
		terms[i].Chosen = i == d.Index
	}
	return d, terms
}

func pickPinned(req *Request, candidates []Candidate, cfg *Config) Decision {
	for i := range candidates {
		if c := &candidates[i]; c.ID == req.Pin && !c.Draining {
			return decide(req, candidates, cfg, i, tierOf(c), ReasonPinned)
		}
	}
	return Decision{Index: -1, Reason: ReasonNone}
}

func pickTurn(req *Request, candidates []Candidate, best tier, members int) Decision {
	turn := int(req.Tie % uint64(members))
	for i := range candidates {
		if tierOf(&candidates[i]) != best {
			continue
		}
		if turn == 0 {
			credit := creditTokens(req, &candidates[i])
			return Decision{
				Index: i, Reason: ReasonTurn, Alarm: best != tierUsable, MatchedBlocks: candidates[i].MatchedBlocks,
				CreditTokens: credit, UncachedTokens: max(req.PromptTokens, 0) - credit,
			}
		}
		turn--
	}
	return Decision{Index: -1, Reason: ReasonNone}
}

func decide(req *Request, candidates []Candidate, cfg *Config, index int, t tier, reason Reason) Decision {
	c := &candidates[index]
	credit := creditTokens(req, c)
	d := Decision{
		Index: index, Reason: reason, Alarm: t != tierUsable, MatchedBlocks: c.MatchedBlocks,
		CreditTokens: credit, UncachedTokens: max(req.PromptTokens, 0) - credit, CostSeconds: costOf(req, c, cfg),
	}
	if reason != ReasonPinned {
		switch t {
		case tierUnhealthy:
			d.Reason = ReasonLeastBad
		case tierSuspended, tierBoth:
			d.Reason = ReasonLastResort
		}
	}
	return d
}

// field is the choice among the members of one tier, two or more.
type field struct {
	req        *Request
	candidates []Candidate
	cfg        *Config
	tier       tier
	members    int
	costs      []float64 // by candidate, infinite outside the tier
}

func (f *field) pick() (int, Reason) {
	least, cheapest, longest, used := math.Inf(1), -1, 0, 0.0
	for i := range f.candidates {
		c := &f.candidates[i]
		if tierOf(c) != f.tier {
			f.costs[i] = math.Inf(1)
			continue
		}
		used += memoryUse(c, 0)
		longest = max(longest, c.MatchedBlocks)
		cost := costOf(f.req, c, f.cfg)
		f.costs[i] = cost
		if cost < least || cheapest < 0 {
			least, cheapest = cost, i
		}
	}
	if longest > 0 && f.candidates[cheapest].MatchedBlocks == longest {
		return f.equal(least, longest, ReasonPrefix)
	}
	if longest > 0 {
		return f.equal(least, max(f.candidates[cheapest].MatchedBlocks, 0), ReasonSaturated)
	}
	if len(f.req.Keys) > 0 {
		if i := f.home(least+f.cfg.NearSeconds, used/float64(f.members)); i >= 0 {
			return i, ReasonCold
		}
	}
	return f.equal(least, 0, ReasonLeastLoaded)
}

// memoryUse is the part of its prefix memory that an endpoint has in use, less
// the given blocks; where the capacity is unknown it is a number of blocks.
func memoryUse(c *Candidate, less int) float64 {
	return float64(max(c.HeldBlocks, 0)-less) / float64(max(c.CapacityBlocks, 1))
}

// home gives the rendezvous home of the request's first blocks among the
// candidates near the least cost. Its load is bounded: one whose memory is, even
// without this request, in use by a quarter more than the mean is passed by. It is -1
// where that leaves none.
func (f *field) home(upTo, mean float64) int {
	// The fourth key covers the first KiB: it tells conversations apart, and
	// what the client appends later does not change it.
	key := f.req.Keys[min(len(f.req.Keys), 4)-1]
	home, highest := -1, uint64(0)
	for i, cost := range f.costs {
		if cost > upTo || memoryUse(&f.candidates[i], len(f.req.Keys)) > 1.25*mean {
			continue
		}
		if score := mix(key ^ xxhash.Sum64String(f.candidates[i].ID)); home < 0 || score > highest {
			home, highest = i, score
		}
	}
	return home
}

// equalSeconds is the difference below which costs are the same.
const equalSeconds = 1e-6

// equal spreads over the candidates of equal least cost that hold exactly the
// given number of blocks; one alone keeps the reason it was found for.
func (f *field) equal(least float64, blocks int, reason Reason) (int, Reason) {
	chosen, highest, equal := -1, uint64(0), 0
	for i, cost := range f.costs {
		if cost > least+equalSeconds || max(f.candidates[i].MatchedBlocks, 0) != blocks {
			continue
		}
		equal++
		if score := mix(f.req.Tie ^ xxhash.Sum64String(f.candidates[i].ID)); chosen < 0 || score > highest {
			chosen, highest = i, score
		}
	}
	if equal > 1 && reason == ReasonLeastLoaded {
		reason = ReasonTie
	}
	return chosen, reason
}

// mix spreads the bits of x (the finaliser of splitmix64).
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
