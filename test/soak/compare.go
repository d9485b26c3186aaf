package soak

import (
	"fmt"
	"time"

	"github.com/hearth-dev/hearth/test/sim/engine"
)

// Complaints are disagreements of the books: how many, and the first few.
type Complaints struct {
	Count int
	First []string
}

func (c *Complaints) add(format string, args ...any) {
	if c.Count++; len(c.First) < 20 {
		c.First = append(c.First, fmt.Sprintf(format, args...))
	}
}

// Outcomes of usage records, as METERING.md has them.
const (
	outcomeOK          = "ok"
	outcomeClientGone  = "client_gone"
	outcomeEngineError = "engine_error"
	outcomeEngineLost  = "engine_lost"
	outcomeTimeout     = "timeout"
	outcomeCut         = "cut"
)

// Compare holds the three books against each other: every request that an
// engine began has exactly one record, records tell the engines' own counts or
// are marked and tell no more, and what each client saw has its cause.
func (b *Book) Compare(records []Record, works Works) Complaints {
	b.mu.Lock()
	defer b.mu.Unlock()
	var c Complaints
	byRequest := map[string]*Record{}
	ids := map[string]bool{}
	asked := map[string]int{} // prompt tokens
	for i := range b.sights {
		asked[b.sights[i].ID] = b.sights[i].Prompt
	}
	for i := range records {
		r := &records[i]
		if ids[r.ID] || byRequest[r.RequestID] != nil {
			c.add("request %s has two records", r.RequestID)
		}
		ids[r.ID], byRequest[r.RequestID] = true, r
		compareTokens(&c, r, works[workKey{r.Endpoint, r.RequestID}], asked[r.RequestID])
	}
	faults := map[string]bool{} // request had one: "ID MODE"
	for key, list := range works {
		if byRequest[key.request] == nil {
			c.add("request %s was worked on by %s (%+v) and has no record", key.request, key.endpoint, list[0])
		}
		for _, w := range list {
			faults[key.request+" "+w.Fault] = true
		}
	}
	for i := range b.sights {
		s := &b.sights[i]
		r := byRequest[s.ID]
		compareSight(&c, s, r, faults)
		if limit, may := b.Drains[s.Front]; r != nil && r.Outcome == outcomeCut && (!may || s.Ended.Before(limit.Add(-time.Second))) {
			c.add("request %s at %s was cut at %s, before the drain time was over (%s): %+v", s.ID, s.Front, s.Ended, limit, *r)
		}
	}
	return c
}

// compareTokens holds a record against what its endpoint's engine did. An
// engine that takes the prompts of one request in turn may have left before
// the last of those that were asked for.
func compareTokens(c *Complaints, r *Record, list []engine.Work, asked int) {
	var w engine.Work
	if len(list) > 0 {
		w = list[len(list)-1]
	}
	switch {
	case r.Outcome == outcomeOK && !r.Estimated:
		if w.Finish != engine.WorkWhole || w.Prompt != r.PromptTokens || w.Cached != r.CachedTokens || w.Completion != r.CompletionTokens {
			c.add("record %+v, but the engine did %+v", *r, w)
		}
	case r.Outcome == outcomeOK && w.Fault != engine.FaultGarbage:
		c.add("record %+v is estimated, and the engine told: %+v", *r, w)
	case w.Phase == engine.WorkBegun:
		// The engine died and told no count.
	case r.PromptTokens > max(w.Prompt, asked) || r.CompletionTokens > w.Completion:
		c.add("record %+v has more than the engine did: %+v", *r, w)
	}
}

// compareSight holds what a client saw against the record.
func compareSight(c *Complaints, s *Sight, r *Record, faults map[string]bool) {
	fits := false
	switch s.What {
	case sawRight:
		fits = r != nil && r.Outcome == outcomeOK && !r.Estimated && r.PromptTokens == s.Prompt && r.CompletionTokens == s.Tokens
	case sawError:
		fits = r == nil && (s.Status == 503 || s.Status == 404 || s.Status == 429) ||
			r != nil && r.Status == s.Status && (r.Outcome == outcomeEngineError || r.Outcome == outcomeEngineLost || r.Outcome == outcomeTimeout || r.Outcome == outcomeCut)
	case sawBroken:
		fits = r != nil && (r.Outcome == outcomeEngineLost || r.Outcome == outcomeCut || r.Outcome == outcomeEngineError)
	case sawGarbage:
		fits = faults[s.ID+" "+engine.FaultGarbage]
	case sawExpired:
		fits = faults[s.ID+" "+engine.FaultHang] || faults[s.ID+" "+engine.FaultTrickle]
	case sawLeft:
		fits = true
	case sawRetired:
		fits = r == nil || r.Outcome == outcomeClientGone || r.Outcome == outcomeCut
	case sawBad:
		fits = r == nil
	case sawWrong:
	}
	if !fits {
		c.add("request %s (%s, stream %t) at %s: %s, status %d, %s; record %+v", s.ID, s.Kind, s.Stream, s.Front, s.What, s.Status, s.Detail, r)
	}
}
