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

// costOf is the sum of termsOf.
func costOf(req *Request, c *Candidate, cfg *Config) float64 {
	t := termsOf(req, c, cfg)
	return t.Cost
}

// termsOf estimates, in seconds, how long the request takes at the endpoint
// and what it costs those who are there. Each term is at least 0 and rises
// with what it measures.
func termsOf(req *Request, c *Candidate, cfg *Config) Term {
	rate := c.PrefillRate
	if !(rate > 0) || math.IsInf(rate, 0) {
		rate = cfg.PrefillRate
	}
	credit := creditTokens(req, c)
	tokens := max(req.PromptTokens, 0)
	trust := confidence(c, cfg)
	// What others have there, as far as the report is believed, and what this
	// router knows it has there.
	own := float64(max(c.InFlight, 0))
	foreign := trust * float64(max(c.Running+c.Waiting-max(c.InFlightAtReport, 0), 0))
	load := own + foreign

	t := Term{
		ID: c.ID, Tier: tierOf(c).String(), MatchedBlocks: c.MatchedBlocks, CreditTokens: credit,
		Load: load, Confidence: trust,
		Prefill: float64(tokens-credit) / rate,
		Backlog: float64(max(c.InFlightPromptTokens, 0)) / rate,
		Decode:  load*cfg.DecodeSeconds + float64(max(c.InFlightDecodeTokens, 0))*cfg.DecodeTokenSeconds,
		Queue:   queueSeconds(c, cfg, load, trust),
	}
	if len(req.Keys) > 0 {
		missing := 1 - float64(min(max(c.MatchedBlocks, 0), len(req.Keys)))/float64(len(req.Keys))
		t.Sticky = missing * cfg.StickySeconds
	}
	if usage := min(c.KVUsage, 1); usage > KVFree {
		t.Memory = trust * (usage - KVFree) / (1 - KVFree) * cfg.KVFullSeconds
	}
	if c.Health == Degraded {
		t.Handicap = cfg.DegradedSeconds
	}
	t.Cost = t.Prefill + t.Backlog + t.Decode + t.Queue + t.Memory + t.Sticky + t.Handicap
	return t
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
