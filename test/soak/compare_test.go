package soak

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/test/sim/engine"
)

// books are the three of one request.
type books struct {
	records []Record
	works   []engine.Work
	sights  []Sight
}

// gone makes the request one whose client left.
func (b *books) gone() {
	b.records[0].Outcome, b.records[0].Estimated, b.records[0].CachedTokens = outcomeClientGone, true, 0
	b.works[0].Finish, b.sights[0].What = engine.WorkAborted, sawLeft
}

// cut makes it one that the router cut.
func (b *books) cut() {
	b.gone()
	b.records[0].Outcome, b.sights[0].What = outcomeCut, sawBroken
}

func TestBooksThatDisagreeAreFound(t *testing.T) {
	t.Parallel()
	now := time.Now()
	record := Record{ID: "1", RequestID: "r", Endpoint: "e", PromptTokens: 9, CachedTokens: 4, CompletionTokens: 5, Outcome: outcomeOK, Status: 200}
	work := engine.Work{Phase: engine.WorkEnded, Request: "r", Prompt: 9, Cached: 4, Completion: 5, Finish: engine.WorkWhole}
	sight := Sight{ID: "r", Front: "f", What: sawRight, Status: 200, Prompt: 9, Tokens: 5, Ended: now}
	for name, c := range map[string]struct {
		change func(b *books)
		want   string // "" where the books agree
	}{
		"as it should be":           {func(*books) {}, ""},
		"two records":               {func(b *books) { b.records = append(b.records, b.records[0]) }, "two records"},
		"no record":                 {func(b *books) { b.records = nil }, "has no record"},
		"other tokens":              {func(b *books) { b.records[0].CompletionTokens++ }, "but the engine did"},
		"other cached tokens":       {func(b *books) { b.records[0].CachedTokens++ }, "but the engine did"},
		"estimated though whole":    {func(b *books) { b.records[0].Estimated = true }, "is estimated"},
		"ok though aborted":         {func(b *books) { b.works[0].Finish = engine.WorkAborted }, "but the engine did"},
		"more than an aborted did":  {func(b *books) { b.gone(); b.works[0].Completion = 4 }, "more than the engine did"},
		"an aborted one, marked":    {func(b *books) { b.gone(); b.works[0].Completion = 5 }, ""},
		"right, but lost on record": {func(b *books) { b.records[0].Outcome = outcomeEngineLost }, "right"},
		"broken, but ok on record":  {func(b *books) { b.sights[0].What = sawBroken }, "broken"},
		"an error without a cause":  {func(b *books) { b.sights[0].What, b.sights[0].Status = sawError, 502 }, "error"},
		"garbage without a fault":   {func(b *books) { b.sights[0].What = sawGarbage }, "garbage"},
		"slow without a fault":      {func(b *books) { b.sights[0].What = sawExpired }, "expired"},
		"slow with a fault":         {func(b *books) { b.gone(); b.sights[0].What, b.works[0].Fault = sawExpired, engine.FaultHang }, ""},
		"wrong":                     {func(b *books) { b.sights[0].What = sawWrong }, "wrong"},
		"a bad one that was served": {func(b *books) { b.sights[0].What = sawBad }, "bad"},
		"cut too soon":              {func(b *books) { b.cut(); b.sights[0].Ended = now.Add(-time.Minute) }, "before the drain time was over"},
		"cut in the end":            {func(b *books) { b.cut() }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := books{[]Record{record}, []engine.Work{work}, []Sight{sight}}
			c.change(&b)
			book := Book{Drains: map[string]time.Time{"f": now}}
			for _, s := range b.sights {
				book.saw(s)
			}
			works := Works{}
			for _, w := range b.works {
				works.Tell("e", engine.Work{Phase: engine.WorkBegun, Request: w.Request})
				works.Tell("e", w)
			}
			got := book.Compare(b.records, works)
			found := slices.ContainsFunc(got.First, func(s string) bool { return strings.Contains(s, c.want) })
			if c.want == "" && got.Count > 0 || c.want != "" && !found {
				t.Errorf("found %q, want %q", got.First, c.want)
			}
		})
	}
}
