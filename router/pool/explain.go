package pool

import (
	"fmt"

	"github.com/hearth-dev/hearth/router/pick"
)

// Explanation is what Acquire would do with a request, and why. Nothing is
// reserved or remembered for it.
type Explanation struct {
	Model   string              `json:"model"`
	Error   string              `json:"error,omitempty"`
	Pool    string              `json:"pool,omitempty"`
	Served  string              `json:"servedModel,omitempty"`
	Chosen  string              `json:"endpoint,omitempty"`
	Reason  pick.Reason         `json:"reason,omitempty"`
	Alarm   bool                `json:"alarm,omitempty"`
	Credit  int                 `json:"predictedCachedTokens"`
	Targets []TargetExplanation `json:"targets"` // in the order in which they would be asked
}

// TargetExplanation is one target's part of an Explanation.
type TargetExplanation struct {
	Pool        string      `json:"pool"`
	ServedModel string      `json:"servedModel"`
	Weight      int         `json:"weight"`
	Ready       bool        `json:"ready"`
	Skipped     string      `json:"skipped,omitempty"` // why it was not asked or could not take it
	Candidates  []pick.Term `json:"candidates,omitempty"`
}

// Explain says what Acquire would do now. It reserves and remembers nothing.
func (p *Pools) Explain(req *pick.Request) Explanation {
	view := p.routes.Load()
	x := Explanation{Model: req.Model, Targets: []TargetExplanation{}}
	m := view.models[req.Model]
	if m == nil {
		x.Error = fmt.Sprintf("no logical model %.200q", req.Model)
		return x
	}
	order, unmet := m.order(req, nil)
	asked := map[int]bool{}
	for _, i := range order {
		asked[i] = true
		x.Targets = append(x.Targets, p.explainTarget(&x, view, &m.targets[i], req))
	}
	for at := range x.Targets {
		if t := &x.Targets[at]; x.Pool == t.Pool && x.Served == t.ServedModel {
			t.Skipped = ""
			break
		}
	}
	for i := range m.targets {
		if t := &m.targets[i]; !asked[i] {
			missing, _ := t.lacks(req)
			skipped := fmt.Sprintf("prompt of about %d tokens exceeds the context of %d", req.PromptTokens, t.ContextTokens)
			if len(missing) > 0 {
				skipped = fmt.Sprintf("does not declare %v", missing)
			}
			x.Targets = append(x.Targets, TargetExplanation{
				Pool: t.Pool, ServedModel: t.ServedModel, Weight: t.Weight, Ready: t.ready, Skipped: skipped,
			})
		}
	}
	if x.Chosen == "" {
		x.Error = noEndpoint(m, order, unmet, false, req).Error()
	}
	return x
}

// explainTarget asks one target, and notes its choice in x if none before it
// had one.
func (p *Pools) explainTarget(x *Explanation, view *routes, t *target, req *pick.Request) TargetExplanation {
	out := TargetExplanation{Pool: t.Pool, ServedModel: t.ServedModel, Weight: t.Weight, Ready: t.ready}
	if !t.ready {
		out.Skipped = t.causeNotReady()
		return out
	}
	d, terms := t.pool.explain(view.roundRobin, t, req, p)
	out.Candidates = terms
	switch {
	case d.Index < 0:
		out.Skipped, _ = t.pool.cause(t, req)
	case x.Chosen == "" || x.Alarm && !d.Alarm && req.Pin == "":
		// A target that stands in goes before the least bad of one before it.
		x.Pool, x.Served, x.Chosen = t.Pool, t.ServedModel, terms[d.Index].ID
		x.Reason, x.Alarm, x.Credit = d.Reason, d.Alarm, d.CreditTokens
	}
	if d.Index >= 0 {
		out.Skipped = "another target takes the request"
	}
	return out
}

func (ps *poolState) explain(roundRobin bool, t *target, req *pick.Request, p *Pools) (pick.Decision, []pick.Term) {
	now := p.now()
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.gatherLocked(t, req, nil, p.index, now)
	weights, ask := p.weights, *req
	if roundRobin {
		weights.RoundRobin, ask.Tie = true, ps.turn
	}
	return pick.Explain(&ask, ps.candidates, weights)
}
