package pick

import "math"

// creditTokens is the part of the prompt that the endpoint is expected to hold.
func creditTokens(req *Request, c *Candidate) int {
	tokens := max(req.PromptTokens, 0)
	matched := min(max(c.MatchedBlocks, 0), len(req.Keys))
	if matched == 0 || tokens == 0 {
		return 0
	}
	bytes := req.PromptBytes
	if bytes <= 0 {
		bytes = len(req.Keys) * BlockBytes
	}
	share := float64(matched) * BlockBytes / float64(bytes)
	return min(int(share*float64(tokens)), tokens)
}

// confidence is how much a load report of this age counts, 1 down to 0.
func confidence(c *Candidate, cfg *Config) float64 {
	age := c.LoadAge.Seconds() - FreshSeconds
	if age <= 0 {
		return 1
	}
	return cfg.LoadHalfLife / (cfg.LoadHalfLife + age)
}

// parts are the terms of a cost, in seconds; see Term.
type parts struct {
	prefill, backlog, decode, queue, memory, sticky, handicap float64

	credit      int
	load, trust float64
}

// sum is finite, whatever a candidate claims.
func (p *parts) sum() float64 {
	s := p.prefill + p.backlog + p.decode + p.queue + p.memory + p.sticky + p.handicap
	if s < math.MaxFloat64 {
		return s
	}
	return math.MaxFloat64
}

// costOf is how long the request takes at the endpoint and what it costs those
// who are there, in seconds.
func costOf(req *Request, c *Candidate, cfg *Config) float64 {
	var p parts
	p.weigh(req, c, cfg)
	return p.sum()
}

// termsOf is costOf in its parts.
func termsOf(req *Request, c *Candidate, cfg *Config) Term {
	var p parts
	p.weigh(req, c, cfg)
	return Term{
		ID: c.ID, Tier: tierOf(c).String(), Cost: p.sum(),
		Prefill: p.prefill, Backlog: p.backlog, Decode: p.decode, Queue: p.queue, Memory: p.memory,
		Sticky: p.sticky, Handicap: p.handicap,
		MatchedBlocks: c.MatchedBlocks, CreditTokens: p.credit, Load: p.load, Confidence: p.trust,
	}
}

// weigh estimates the terms. Each is at least 0 and rises with what it measures.
func (p *parts) weigh(req *Request, c *Candidate, cfg *Config) {
	rate := c.PrefillRate
	if !(rate > 0) || math.IsInf(rate, 0) {
		rate = cfg.PrefillRate
	}
	p.credit = creditTokens(req, c)
	p.trust = confidence(c, cfg)
	// What others have there, as far as the report is believed, and what this
	// router knows it has there.
	foreign := max(c.Running, 0) + max(c.Waiting, 0) - max(c.InFlightAtReport, 0)
	p.load = float64(max(c.InFlight, 0)) + p.trust*float64(max(foreign, 0))

	p.prefill = float64(max(req.PromptTokens, 0)-p.credit) / rate
	p.backlog = float64(max(c.InFlightPromptTokens, 0)) / rate
	p.decode = p.load*cfg.DecodeSeconds + float64(max(c.InFlightDecodeTokens, 0))*cfg.DecodeTokenSeconds
	p.queue = queueSeconds(c, cfg, p.load, p.trust)
	if n := len(req.Keys); n > 0 {
		p.sticky = float64(n-min(max(c.MatchedBlocks, 0), n)) / float64(n) * cfg.StickySeconds
	}
	if usage := min(c.KVUsage, 1); usage > KVFree {
		p.memory = p.trust * (usage - KVFree) / (1 - KVFree) * cfg.KVFullSeconds
	}
	if c.Health == Degraded {
		p.handicap = cfg.DegradedSeconds
	}
}

// assumedSlots stands in where an engine does not say how many requests it
// computes at once.
const assumedSlots = 16

// queueSeconds is the wait for a slot: requests past the slots, each slot
// free after a service time. Where slots are unknown the reported queue counts.
func queueSeconds(c *Candidate, cfg *Config, load, trust float64) float64 {
	if c.MaxRunning > 0 {
		slots := float64(c.MaxRunning)
		return max(load+1-slots, 0) / slots * cfg.ServiceSeconds
	}
	return trust * float64(max(c.Waiting, 0)) / assumedSlots * cfg.ServiceSeconds
}
